"""LaTeX tables: they compile, and mark in each column what is best, second best and not by chance."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import cell_of, stored

from kvbench.cli.report import main
from kvbench.report.data import papers as published
from kvbench.report.data.frame import collect
from kvbench.report.tables import runs as tables
from kvbench.report.tables.cells import BRIEF_SCORE, BRIEFEST_SCORE, ReportTable
from kvbench.report.tables.latex import SIZES, TIGHT, escaped, latex
from kvbench.report.tables.published import merge_published, ran
from kvbench.report.tables.widths import tabular_width
from kvbench.runs.quantities import named

AWKWARD = "a_b & 50 % #1 $x$ {y} ~z^ \\w [q]"
TAKES = {  # every command that a table may use, with how many arguments it takes in braces
    "begin": 1, "end": 1, "centering": 0, "caption": 1, "label": 1, "small": 0, "medskip": 0, "toprule": 0,
    "midrule": 0, "bottomrule": 0, "addlinespace": 0, "cmidrule": 1, "multicolumn": 3, "shortstack": 1, "emph": 1,
    "textbf": 1, "underline": 1, "rlap": 1, "textsuperscript": 1, "scriptsize": 0, "ast": 0, "par": 0, "smallskip": 0,
    "footnotesize": 0, "raggedright": 0, "textbackslash": 1, "textasciitilde": 1, "textasciicircum": 1, "pm": 0,
    "setlength": 1, "tabcolsep": 0,
}  # fmt: skip


SHAPED = {  # commands whose arguments say how the table is made
    "begin": r"\{(\w+)\}(?:\{([lr]+)\})?", "end": r"\{(\w+)\}", "multicolumn": r"\{(\d+)\}\{(?:@\{\})?[lcr]\}",
    "cmidrule": r"\(lr\)\{(\d+)-(\d+)\}",
}  # fmt: skip


def arguments(command: str, rest: str) -> re.Match[str] | None:
    """Of a command that a table may use; None where they are read as text."""
    assert command in TAKES, command
    opened = re.match(r"(?:\([a-z]+\)|\[[a-z]\])?" + r"\{" * (TAKES[command] > 0), rest)
    assert opened, f"\\{command} takes {TAKES[command]} arguments: {rest[:20]}"
    found = re.match(SHAPED.get(command, ""), rest)
    assert found, rest[:20]
    return found if command in SHAPED else None


def parsed(source: str) -> list[list[str]]:
    """The cells of each row of the tabulars, one below another: a strict reader of what a table is made of.

    Groups, environments and formulas must end where they should, commands be known and have their arguments, special
    characters be escaped, and every row have as many cells as the tabular has columns.
    """
    open_groups: list[str] = []
    math, rows, columns = False, [[""]], 0
    inside = False  # of the tabular, outside of a group of its own
    place = 0
    while place < len(source):
        found = re.compile(r"\\([a-zA-Z]+)|\\(.)|([{}$&%#_^~])|.", re.DOTALL).match(source, place)
        assert found
        text, place = found[0], found.end()
        if command := found[1]:
            if (given := arguments(command, source[place:])) is None:
                pass
            elif command == "begin":
                open_groups.append(given[1])
                columns, inside = len(given[2] or ""), given[1] == "tabular"
            elif command == "end":
                assert open_groups.pop() == given[1]
                inside = False
            elif command == "multicolumn":
                rows[-1] += [""] * (int(given[1]) - 1)
            else:
                assert 1 <= int(given[1]) <= int(given[2]) <= columns
            if given is not None:
                place += given.end()
                continue
        elif found[2] == "\\" and inside and open_groups[-1] == "tabular":
            assert len(rows[-1]) == columns, rows[-1]
            rows.append([""])
            continue
        elif text == "&":
            assert inside and open_groups[-1] == "tabular" and not math
            rows[-1].append("")
            continue
        elif text in "{}":
            if text == "{":
                open_groups.append("{")
            else:
                assert open_groups.pop() == "{"
        elif text == "$":
            math = not math
        elif text == "%":
            assert source[place] == "\n", "a comment would swallow the rest of the line"
        elif text in ("_", "^"):
            assert math, f"{text} outside of a formula"
        assert text not in ("#", "~")
        if inside:
            rows[-1][-1] += text
    assert not open_groups and not math
    rules = r"\\(toprule|midrule|bottomrule|addlinespace)"
    return [[re.sub(rules, "", cell).strip() for cell in row] for row in rows[:-1]]


def table(scores: Mapping[tuple[str, str], float], **more: float) -> ReportTable:
    """Scores by method and budget, a column for each budget."""
    methods = list(dict.fromkeys(method for method, _ in scores))
    budgets = list(dict.fromkeys(budget for _, budget in scores))
    cells = {
        (methods.index(method), budgets.index(budget)): cell_of(
            {"score": score, "score_low": 9.0, "score_high": 99.0, "samples": 8.0, **more}
        )
        for (method, budget), score in scores.items()
    }
    return ReportTable("t", "T", ("method",), [(name,) for name in methods], budgets, cells, dict(BRIEFEST_SCORE), [])


def rows(one: ReportTable) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in parsed(latex([one]))}


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_best_is_bold_and_the_second_underlined_full_attention_aside():
    found = rows(table({("full", "64"): 99.0, ("quest", "64"): 80.0, ("snapkv", "64"): 90.04, ("topk", "64"): 90.0}))
    assert {name: own[0].partition("$")[0] for name, own in found.items()} == {
        "method": "64",
        "Full": "99.0",
        "Quest": r"\underline{80.0}",
        "SnapKV": r"\textbf{90.0}",
        "Top-k": r"\textbf{90.0}",  # what prints alike ranks alike
    }


@pytest.mark.parametrize("more", [{"samples": 7.0, "pairs": 7.0}, {"score_low": 9.0, "score_high": 9.0}])
def test_nothing_is_best_or_starred_of_few_samples_or_without_a_width(more):
    more = {"against_full": -9.0, "against_full_low": -9.0, "against_full_high": -9.0, "pairs": 8.0, **more}
    source = latex([table({("quest", "64"): 80.0, ("snapkv", "64"): 90.0}, **more)])
    assert "textbf" not in source and "ast" not in source


def test_where_all_are_alike_nothing_is_best():
    assert "textbf" not in latex([table({("quest", "64"): 80.0, ("snapkv", "64"): 80.01})])


@pytest.mark.parametrize(("alike", "bold", "underlined"), [(10, 0, 0), (6, 0, 0), (5, 5, 0), (1, 1, 0)])
def test_what_most_methods_print_is_neither_best_nor_second(alike: int, bold: int, underlined: int):
    scores = {(f"m{number}", "64"): 100.0 if number < alike else 90.0 for number in range(11)}
    source = latex([table(scores)]).partition("\\midrule")[2].partition("\\bottomrule")[0]
    assert (source.count("textbf"), source.count("underline")) == (bold, underlined)


def test_less_time_is_better_and_rivals_share_their_budget():
    values = {("quest", "64"): 5.0, ("snapkv", "64"): 4.0, ("quest", "128"): 3.0, ("snapkv", "128"): 6.0}
    cells = {
        (row, 0): cell_of({"tpot_ms_mean": value, "tpot_ms_mean_low": 1.0, "tpot_ms_mean_high": 9.0, "samples": 8.0})
        for row, value in enumerate(values.values())
    }
    one = ReportTable(
        "t", "T", ("method", "budget"), list(values), [""], cells, {"tpot_ms_mean": named("tpot_ms_mean")}, []
    )
    assert [row[2].replace(" [1.00, 9.00]", "") for row in parsed(latex([one]))[1:]] == [
        r"\underline{5.00}", r"\textbf{4.00}", r"\textbf{3.00}", r"\underline{6.00}",
    ]  # fmt: skip


def test_a_table_without_a_number_is_one_of_dashes():
    cells = {(0, 0): cell_of({})}
    one = ReportTable("t", "T", ("method",), [("quest",)], [""], cells, {"recall": named("recall")}, [])
    assert parsed(latex([one])) == [["method", "recall"], ["Quest", "-"]]


@pytest.mark.parametrize(
    "low, high, star", [(-9.0, -1.0, True), (1.0, 9.0, True), (-9.0, 0.0, False), (-1.0, 1.0, False)]
)
def test_a_score_has_its_interval_and_a_star_where_it_is_not_full_attention_s_by_chance(low, high, star):
    more = {
        "score_low": 60.0,
        "score_high": 85.5,
        "against_full": -4.0,
        "against_full_low": low,
        "against_full_high": high,
        "pairs": 8.0,
    }
    one = table({("quest", "64"): 71.24}, **more)
    assert rows(one)["Quest"] == [r"71.2$^{+14.3}_{-11.2}$" + r"\rlap{\,\scriptsize $\ast$}" * star]
    assert ("1 comparison, of which chance alone" in latex([one])) == star
    assert "Samples of a score: 8." in latex([one])


def test_letters_stand_above_a_number_and_names_are_as_published():
    cell = cell_of({"score": 50.0, "tpot_ms_mean": 4.0}, {"score": "bf", "tpot_ms_mean": "c"})
    lines = {**BRIEF_SCORE, "tpot_ms_mean": named("tpot_ms_mean")}
    one = ReportTable(
        "t", "T", ("method", "x.y"), [("snapkv_racc", "7"), ("mine", "7")], [""], {(0, 0): cell}, lines, []
    )
    assert parsed(latex([one])) == [
        ["method", "y", "score", "ms / token"],
        ["SnapKV + RACC", "7", r"50.0\rlap{\,\scriptsize bf}", r"4.00\rlap{\textsuperscript{c}}"],
        ["mine", "7", "-", "-"],
    ]


# -- that it compiles --------------------------------------------------------------------------------------------------


def made(tmp_path: Path) -> dict[str, str]:
    """Tables of every kind, by what they are."""
    for task in ("passkey", "niah"):
        stored(tmp_path, "full", samples={"a_1": [1.0] * 8}, task=task)
        for method in ("quest", "snapkv", AWKWARD):
            for budget in (64, 0.1):
                stored(
                    tmp_path,
                    method,
                    budget,
                    {"a_1": [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, float(method == "quest")]},
                    task=task,
                )
    runs = collect([tmp_path])
    columns = [["task"], ["task", "budget"], ["group", "task"]]
    found = {
        f"by {' and '.join(names)}": latex(
            [
                tables.pivot(
                    runs, ["method"] + ["budget"] * ("budget" not in names), names, values, score_lines=BRIEFEST_SCORE
                )
            ]
        )
        for names in columns
        for values in (["score"], ["score", "attended_share", "tpot_ms_mean"])
    }
    return {"overview": latex(tables.overview(runs)), "summary": latex(tables.summary(runs)), **found}


def test_every_kind_of_table_is_read_by_a_strict_reader(tmp_path):
    for what, source in made(tmp_path).items():
        cells = parsed(source)
        assert any(r"\textbf{" in cell for row in cells for cell in row), what
        assert all(word in source for word in escaped(AWKWARD).split()), (
            what
        )  # one below the other where room is scarce
    for id in published.ids():
        assert parsed(latex([merge_published(None, published.table(id))]))


def test_a_reader_that_is_not_strict_would_prove_nothing():
    source = latex([table({("quest", "64"): 80.0, ("snapkv", "64"): 90.0})])
    assert parsed(source)
    for there, broken in (
        (" & ", " "),
        ("80.0", "80.0 & 1"),
        ("{90.0}", "{90.0"),
        ("Quest", "Que_st"),
        ("T}", "50 %}"),
    ):
        with pytest.raises(AssertionError):
            parsed(source.replace(there, broken, 1))


@pytest.mark.slow
def test_it_compiles_where_there_is_a_latex(tmp_path):
    program = next(filter(shutil.which, ("pdflatex", "tectonic")), None)
    if program is None:
        pytest.skip("neither pdflatex nor tectonic")
    body = "\n".join(made(tmp_path).values())
    packages = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
    (tmp_path / "t.tex").write_text(f"{packages}{body}\\end{{document}}\n")
    flags = ["-interaction=nonstopmode", "-halt-on-error"] if program == "pdflatex" else []
    done = subprocess.run([program, *flags, "t.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "t.pdf").exists(), done.stdout[-2000:]
    assert "Overfull" not in done.stdout


PRINTED = {  # tabulars, and how wide pdfTeX prints each, in points
    r"method & 64 & 128 \\|SnapKV & 40.0$^{+15.4}_{-13.7}$ & \textbf{52.5}$^{+14.6}_{-15.0}$ \\": 153.3,
    r"\multicolumn{2}{@{}l}{\emph{qwen2.5-coder-0.5b-instruct, fidelity, accounting=paper}} \\|Full & 1 \\": 245.9,
    r"method & \multicolumn{2}{c}{turboquant\_3bit, turboquant\_4bit} \\|Full & 1.0 & 2.0 \\": 203.8,
    r"kv & \shortstack[r]{KL from full\\attention,\\nats} & n \\|Full & 1.1725 $\pm$ 0.0342 & 3 \\": 128.4,
    r"model & GiB \\|WMAXIMUM \% \_ \textbackslash{} AaBbCc & 1,024\rlap{\textsuperscript{bf}} \\": 177.7,
    r"\shortstack[l]{{}[2048, 4096,\\8192]} & 3 & - \\|Quest & \underline{62.5} [41.0, 80.2] & - \\": 159.3,
}


@pytest.mark.parametrize("rows, width", PRINTED.items(), ids=range(len(PRINTED)))
def test_a_width_is_the_one_that_latex_prints_or_little_more(rows: str, width: float) -> None:
    assert width <= tabular_width(rows.split("|"), 10.0, 12.0) <= 1.1 * width


WIDE = {
    "columns": (("method",), [("quest",), ("snapkv",)], [str(2**power) for power in range(4, 24)]),
    "names": (tuple("abcdefg"), [("1.25", "together", "prose", "64", "mean", "-", "snapkv")] * 2, ["64", "128"]),
    "a long name": (("method",), [("Meta-Llama-3.1-8B-Instruct with all of its options",)], ["64", "128"]),
    "lists": (
        ("x", "y", "method"),
        [("[2048,4096,8192,16384]", "103, 104, 105, 106, 107", "adakv_snapkv")],
        ["1", "2"],
    ),
    "headings": (("method",), [("quest",)], [f"a heading of many words, the {n}th" for n in range(6)]),
}


@pytest.mark.parametrize("shape", WIDE)
def test_no_tabular_is_wider_than_the_text_of_an_article(shape: str) -> None:
    axes, labels, columns = WIDE[shape]
    cells = {
        (row, column): cell_of(
            {"score": 50.0, "score_low": 40.0, "score_high": 60.0, "tpot_ms_mean": 123.4, "samples": 8.0}
        )
        for row in range(len(labels))
        for column in range(len(columns))
    }
    lines = {**BRIEFEST_SCORE, "tpot_ms_mean": named("tpot_ms_mean")}
    source = latex(
        [ReportTable("t", "T", axes, labels, columns, cells, lines, ["task.subsets=[niah_1,niah_2], 2,000"])]
    )
    em, gap = next((size.em, size.gap) for size in (*SIZES, TIGHT) if f"\\centering{size.command}\n" in source)
    tabulars = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", source, re.DOTALL)
    assert max(tabular_width(tabular.splitlines(), em, gap) for tabular in tabulars) <= 345.0
    assert source.count("50.0") == len(cells) and r"niah\_1, niah\_2], 2,000" in source
    assert parsed(source)


def test_what_is_wider_than_a_page_stands_below_in_letters_that_can_be_read():
    budgets = [str(2**power) for power in range(4, 24)]
    one = table({(method, budget): 50.0 for method in ("quest", "snapkv") for budget in budgets}, low=40.0, high=60.0)
    source = latex([one])
    assert source.count(r"\begin{tabular}") == 4 and r"\footnotesize" in source and "resizebox" not in source
    cells = parsed(source)
    assert [cell for row in cells if row[0] == "method" for cell in row[1:]] == budgets
    assert max(map(len, cells)) <= 10


def test_rows_stand_in_the_order_that_was_asked_for_under_a_caption_in_words(tmp_path, capsys):
    made(tmp_path)
    words = [str(tmp_path), "--format", "latex", "--columns", "budget", "--values", "score,kl_mean"]
    assert main([*words, "--where", "task=niah", "--where", "method=snapkv,full,quest"]) == 0
    source = capsys.readouterr().out
    assert [row[0] for row in parsed(source)[1:]] == ["SnapKV", "Full", "Quest"]
    assert r"\caption{Score and KL from full attention by method and budget (niah, tiny)}" in source


def test_a_published_table_shows_the_rows_that_ran_and_counts_the_others():
    cells = {
        (0, 0): cell_of({"published": 1.0}),
        (1, 0): cell_of({"published": 2.0, "score": 3.0}),
        (2, 0): cell_of({}),
    }
    one = ReportTable("p", "P", ("",), [("a",), ("b",), ("c",)], ["x"], cells, {}, ["Published: a paper."])
    assert ran(one).rows == [("b",)] and ran(one).cells == {(0, 0): cells[1, 0]}
    assert ran(one).notes[0].startswith("2 rows ") and len(ran(one).notes) == 2
    nothing = replace(one, cells={**cells, (1, 0): cell_of({"published": 2.0})})
    assert ran(nothing) is nothing


def test_columns_are_chosen_on_the_command_line(tmp_path, capsys):
    made(tmp_path)
    words = [str(tmp_path), "--format", "latex", "--columns", "task,budget", "--where", "method=full,quest,snapkv"]
    assert main(words) == 0
    cells = parsed(capsys.readouterr().out)
    assert [cell for cell in cells[0] if cell] == [r"{niah}", r"{passkey}"]
    assert cells[1] == ["method", r"10 \%", "64", r"10 \%", "64"]
    assert [row[0] for row in cells[2:]] == ["Full", "Quest", "SnapKV"]
