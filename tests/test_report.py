"""`kvbench report`: what it prints and writes, how quickly it answers, and what it refuses."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import archived, record, stored

from kvbench.cli.compose import composed
from kvbench.cli.report import SHIPPED, main
from kvbench.report.data import papers as published
from kvbench.report.figures import all as figures
from kvbench.runs.sweep import run

CHECKOUT = Path(__file__).parents[1]


def made(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    """What the command prints on its two streams; it must end well."""
    assert main(list(map(str, words))) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a refusal."""
    assert main(list(map(str, words))) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if not line.startswith("left out: ")]
    assert len(lines) == 1 and lines[0].startswith("kvbench report: ") and not told.out
    return lines[0]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    stored(tmp_path, "full", samples={"512": [1.0, 1.0], "1024": [1.0, 1.0]})
    for budget in (64, 128):
        stored(tmp_path, "quest", budget, {"512": [1.0, 0.0], "1024": [1.0, 1.0]})
    return tmp_path


@pytest.fixture
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page tries three figures, of which one cannot be drawn: each takes a third of a second."""
    few = {name: figures.FIGURES[name] for name in ("budget", "tradeoff", "recall")}
    monkeypatch.setattr(figures, "FIGURES", few)


# -- what it makes -----------------------------------------------------------------------------------------------------


def test_without_words_it_shows_the_runs_below_results(results, capsys, monkeypatch):
    (results / "results").mkdir()
    (results / "runs").rename(results / "results" / "runs")
    monkeypatch.chdir(results)
    told, said = made(capsys)
    assert told.startswith("3 runs\n") and "\ntiny, passkey\n" in told and not said
    lines = [line.split() for line in told.splitlines()]
    assert [line[:6] for line in lines if line[:1] in (["full"], ["quest"])] == [
        ["full", "-", "100.0", "[51.0,", "100.0]", "-"],
        ["quest", "64", "75.0", "[30.1,", "95.4]", "-25.0"],
        ["quest", "128", "75.0", "[30.1,", "95.4]", "-25.0"],
    ]


def test_runs_that_are_shipped_are_shown_when_they_are_named(results, capsys, monkeypatch):
    (results / "results").mkdir()
    shipped = archived(results, results / "results" / "reference.tar.xz")
    monkeypatch.chdir(results)
    monkeypatch.setattr("kvbench.cli.report.SHIPPED", [shipped])
    said = refused(capsys)
    assert "no run of yours" in said and "kvbench report results/reference.tar.xz" in said
    stored(results / "results", "snapkv")
    stored(results / "results" / "sweep_mine", "topk")
    told, _ = made(capsys)
    assert told.startswith("2 runs\n") and "snapkv" in told and "topk" in told and "quest " not in told
    assert made(capsys, "results/reference.tar.xz")[0].startswith("3 runs\n")


def test_what_kvbench_ships_is_known_as_such():
    listed = subprocess.run(
        ["git", "ls-files", "results/*.tar.xz"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout
    if not listed:
        pytest.skip("not a git checkout")
    assert {str(path.relative_to(CHECKOUT)) for path in SHIPPED} == set(listed.split())


@pytest.mark.parametrize(
    "ending, begins",
    [
        (".md", "### 3 runs"),
        (".tex", r"\begin{table}"),
        (".csv", "table,model"),
        (".html", "<!doctype"),
        (".txt", "3 runs"),
    ],
)
def test_the_file_s_ending_says_the_format(results, capsys, few_figures, ending, begins):
    out = results / f"report{ending}"
    told, _ = made(capsys, results, "--out", out)
    assert told.strip() == str(out) and out.read_text().startswith(begins)


@pytest.mark.usefixtures("nothing_shipped")
def test_the_page_holds_the_tables_and_the_pictures_that_can_be_drawn(results, capsys):
    stored(results, "snapkv", finished=False)
    made(capsys, results, "--out", results / "report.html")
    page = (results / "report.html").read_text()
    assert all(f'id="table-{name}"' in page for name in ("summary", "passkey"))
    assert page.count("data:image/svg+xml;base64,") >= 2 and 'id="figure-budget"' in page
    assert "1 runs left out" in page and "unfinished, 2 samples so far" in page
    assert "figures not drawn" in page and "figure=recall: no run with probes" in page


def test_a_score_on_the_page_leads_to_the_outputs_of_its_run(tmp_path, capsys, few_figures):
    wrong = record("b", "", 0.0, output="<b>41</b>", answers=["42"])
    path = stored(tmp_path, samples=[*(record(f"a{number}", "", 1.0) for number in range(30)), wrong])
    made(capsys, tmp_path, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f'<a href="#run-{path.name}">96.8</a>' in page
    opened = page.partition(f'<details id="run-{path.name}">')[2].partition("</details>")[0]
    assert opened.startswith("<summary>tiny, passkey, quest, 64: 31 samples, 20 with the lowest scores</summary>")
    rows = opened.partition("<tbody>")[2].split("</tr>")[:-1]
    assert rows[0] == "<tr><td>b</td><td>0.0</td><td>42</td><td>&lt;b&gt;41&lt;/b&gt;</td>" and len(rows) == 20


def test_a_figure_that_cannot_be_drawn_leaves_the_rest_of_the_page(results, capsys, monkeypatch, few_figures):
    draw = figures.curves
    monkeypatch.setattr(
        figures, "curves", lambda name, runs: runs.arms["gone"] if name == "budget" else draw(name, runs)
    )
    made(capsys, results, "--out", results / "report.html")
    page = (results / "report.html").read_text()
    assert "figure=budget: not from these runs (KeyError:" in page
    assert 'id="table-summary"' in page and 'id="figure-tradeoff"' in page


def test_a_figure_is_drawn_of_the_chosen_runs(results, capsys, monkeypatch):
    drawn = []
    draw = figures.draw
    monkeypatch.setattr(figures, "draw", lambda *words: drawn.append(words) or draw(*words))
    out = results / "budget.png"
    told, _ = made(capsys, results, "--figure", "budget", "--size", "column", "--where", "method=quest", "--out", out)
    assert told.strip() == str(out) and out.read_bytes().startswith(b"\x89PNG")
    ((name, runs, size),) = drawn
    assert (name, size) == ("budget", "column") and set(runs.arms["method"]) == {"quest"}


def test_the_list_names_everything(capsys):
    told, _ = made(capsys, "--list")
    words = set(told.split())
    assert {*published.ids(), *figures.FIGURES} <= words
    assert {"score", "attended_share", "recall", "group"} <= words


def test_a_paper_s_table_with_a_run_of_ours(tmp_path, capsys):
    known = published.table("icecache_table1").frame
    groups = {group: [1.0, 0.0] for group in known["group"] if group}
    options = {"code_sim": "difflib"}
    path = stored(tmp_path, "full", None, groups, task="longbench", model="llama3.1-8b-instruct", options=options)
    told, _ = made(capsys, tmp_path, "--paper", "icecache_table1", "--format", "csv")
    lines = [line for line in csv.DictReader(io.StringIO(told)) if line["run"]]
    assert {line["run"] for line in lines} == {str(path)} and len(lines) == 17
    for line in lines:
        assert float(line["difference"]) == pytest.approx(50 - float(line["published"]))
        assert float(line["samples"]) == (32 if line["column"] == "Avg" else 2)
        assert float(line["score_low"]) <= 50 <= float(line["score_high"])


def test_a_paper_s_table_needs_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, said = made(capsys, "--paper", "icecache_table3", "--paper", "racc_table5")
    assert "48.2" in told and "not run" in told and "IVFPQ" in told
    assert said == (
        "kvbench report: results: no such folder; a run is a folder such as "
        "results/runs/<task>/<model>/<arm>/<run id>; the published numbers stand alone\n"
    )


def test_a_real_run_is_shown_as_it_found_itself(tmp_path, capsys):
    words = ["model=dummy-tiny", "device=cpu", "task.lengths=[300]", "task.positions=2", f"results_dir={tmp_path}"]
    found = run(composed(*words, "method=icecache", "budget=64"))
    capsys.readouterr()
    told, _ = made(capsys, tmp_path, "--format", "csv")
    (line,) = csv.DictReader(io.StringIO(told))
    assert float(line["score"]) == found["score"] and "d" in line["marks"] and "e" in line["marks"]
    assert float(line["attended_share"]) == pytest.approx(found["audit"]["attended_mean"] / 64)
    assert float(line["device_kv_bytes"]) == found["audit"]["device_kv_bytes"], "as stored"
    assert (line["budget_tokens"], line["seed"]) == ("64.0", "0")


# -- what it says of the rest ------------------------------------------------------------------------------------------


def test_what_is_left_out_is_said(results, capsys):
    for budget in range(64, 76):
        stored(results, "snapkv", budget, finished=False)
    _, said = made(capsys, results)
    assert said.startswith("left out: ") and said.count("\n") == 1
    assert "unfinished, 2 samples so far; --unfinished" in said
    told, said = made(capsys, results, "--unfinished", "--format", "csv")
    assert not said and told.count("snapkv") >= 12


def test_mixed_protocols_are_refused_or_marked(results, capsys):
    stored(results, "snapkv", protocol={"accounting": "unified"})
    words = [results, "--rows", "method,budget", "--columns", "task"]
    assert "protocol.accounting: paper: 2 runs, unified: 1 runs" in refused(capsys, *words)
    told, _ = made(capsys, *words, "--allow-mixed")
    assert "m: under another protocol" in told


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["--paper", "icecache_tabel1"],
            "paper=icecache_tabel1: no such published table; did you mean icecache_table1",
        ),
        (["--figure", "budgets", "--out", "x.png"], "figure=budgets: no such figure; did you mean budget"),
        (["--figure", "budget"], "--figure budget: give a file with --out, such as budget.png"),
        (["--figure", "budget", "--out", "x.gif"], "x.gif"),
        (["--figure", "budget", "--rows", "method", "--out", "x.png"], "leave out --paper and --rows"),
        (["--paper", "racc_table1", "--rows", "method"], "leave out yours"),
        (["--columns", "task"], "quest, passkey: several runs, which differ in budget=64 | 128; add it to --rows"),
        (["--values", "score"], "quest: several runs, which differ in budget=64 | 128; add it to --rows"),
        (
            ["--out", "report.doc"],
            "--out report.doc: ends in none of .txt, .md, .tex, .csv, .parquet, .html; name a --format",
        ),
        (["--format", "site"], "--format site: give a folder with --out, such as site/"),
        (["--out", "."], "--out .: holds other files than a site's; name a new or an empty folder"),
        (["--out", "new", "--rows", "method"], "--out new: a site shows all runs, and every published table"),
        (["--out", "gone/report.md"], "--out gone/report.md: no such folder, gone; make it, or name another"),
        (["--figure", "budget", "--out", "gone/x.png"], "--out gone/x.png: no such folder, gone; "),
        (["--rows", "metod"], "metod: no such key of a run; did you mean method"),
        (["--where", "method=slow"], "--where method=slow: no run has it"),
        (["--where", "method=full", "--where", "method=quest"], "--where method=full --where method=quest: one key"),
    ],
)
def test_bad_input_is_one_line(results, capsys, monkeypatch, words, said):
    monkeypatch.chdir(results)
    assert said in refused(capsys, results, *words)


def test_shipped_runs_are_found_under_their_name_from_any_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, _ = made(capsys, "results/in_vllm.tar.xz", "--rows", "method")
    assert "keydiff" in told
    assert "results/gone.tar.xz" in refused(capsys, "results/gone.tar.xz")


def test_no_runs_says_where_it_looked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "results: no such folder; a run is a folder such as" in refused(capsys)
    assert f"{tmp_path}: no run in it" in refused(capsys, tmp_path)
    assert "kvbench report results/reference_qwen.tar.xz" in refused(capsys)
    assert "gone: no such folder" in refused(capsys, "gone", "--paper", "racc_table1")
    assert f"{tmp_path}: no run in it" in refused(capsys, tmp_path, "--figure", "budget", "--out", "x.png")


def test_an_unknown_paper_is_refused_before_runs_are_read(capsys, monkeypatch):
    monkeypatch.setattr("kvbench.report.data.frame.collect", lambda *a: pytest.fail("read"))
    assert "no such published table" in refused(capsys, "--paper", "gone")


def test_nothing_but_unusable_runs_is_an_error_that_counts_them(tmp_path, capsys):
    stored(tmp_path, finished=False)
    stored(tmp_path, "snapkv", samples=[record("a", "", float("nan"))])
    said = refused(capsys, tmp_path)
    assert f"{tmp_path}: no run that can be shown; left out: {tmp_path}" in said and "1 more runs" in said


def test_nothing_imports_torch_and_help_not_even_pandas(tmp_path):
    code = "import sys; from kvbench.cli.report import main\n"
    for words in (["--help"], ["--list"], ["--paper", "racc_table1"], ["--rows", "x", "gone"]):
        code += f"try: main({words})\nexcept SystemExit: pass\n"
        code += "print('imported', *sorted({'torch', 'pandas'} & {*sys.modules}))\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    imported = [set(line.split()[1:]) for line in found.stdout.splitlines() if line.split()[:1] == ["imported"]]
    assert len(imported) == 4 and imported[0] == set() and imported[-1] <= {"pandas"}
