"""Tables and numbers of pages, from what is committed in results/.

    python scripts/fill_tables.py             writes the tables of all pages anew
    python scripts/fill_tables.py --pictures  and the pictures of results/

`results/shown.yaml` has each table by its name, and the command of each picture. In a page `<!--
table: NAME -->` stands before a table, `<!-- numbers: NAME -->` in a section whose prose quotes a
table that is not printed. A number in prose is one of the tables of its section, or a setting
(`SETTINGS`). A test holds the pages to both; what no run has is printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from kvbench.cli.report import main as report
from kvbench.cli.report import tables_of
from kvbench.report.claims.claim import Criterion
from kvbench.report.claims.page import Judged, counted, judged, sentence
from kvbench.report.claims.verdict import Finding, Setting, Verdict
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.data.select import select
from kvbench.report.tables import formats
from kvbench.runs.quantities import named

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = (
    "README.md",
    "results/README.md",
    "results/FINDINGS.md",
    *(f"docs/results/{path.name}" for path in sorted((ROOT / "docs" / "results").glob("*.md"))),
)
MARK = re.compile(r"<!-- (table|numbers): ([\w-]+) -->\n")
METHOD_TABLE_HEAD = "| `method=` |KL|"  # by scripts/method_table.py

NUMBER = re.compile(
    r"(?<![\w.,/=-])[-+−±]?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?![\w/]|[.,-]\d|-\w)"
)
LIST = r"(?:[\d,.]*\d(?: to |, | and | or ))*"  # of numbers before the last
SETTINGS = re.compile(
    rf"\b(?:C|p|N|D|n) = {LIST}[\d,.]*\d"
    rf"|{LIST}\d[\d,.]*(?: [kMB])?"
    r" (?:tokens|given|steps|layers|tasks|subsets|bits|cores|threads|parameters)\b"
    r"|\bGemma 3\b|\b[\d.]+ or newer|95 %|\b20\d\d(?:-\d+)?\b|\b\d{4}\.\d{5}\b"
)


class Shown(NamedTuple):
    """A table as text.

    Attributes
    ----------
    head
        of the labels, then of the columns.
    rows
        the texts of the columns by the labels.
    """

    head: tuple[list[str], list[str]]
    rows: dict[tuple[str, ...], list[str]]

    def written(self) -> str:
        """A table in Markdown."""
        (labels, columns), body = self.head, self.rows.items()
        code = [
            index
            for index, name in enumerate(labels)
            if name in ("method", "kv", "claim", "claims")
        ]
        lines = [
            [
                *(
                    f"`{label}`" if place in code else label
                    for place, label in enumerate(row_labels)
                ),
                *texts,
            ]
            for row_labels, texts in body
        ]
        rule = [*["---"] * len(labels), *["---:"] * len(columns)]
        return "\n".join(
            "| " + " | ".join(map(_plain, line)) + " |"
            for line in ([*labels, *columns], rule, *lines)
        )

    def numbers(self) -> Iterator[float]:
        """The numbers of a table, without signs, and how many rows it has."""
        yield float(len(self.rows))
        for labels, texts in self.rows.items():
            for text in (*labels, *texts):
                yield from (
                    float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)
                )


@functools.cache
def described() -> dict[str, Any]:
    """What `results/shown.yaml` holds."""
    return yaml.safe_load((RESULTS / "shown.yaml").read_text(encoding="utf-8"))


@functools.cache
def runs_of(*archives: str) -> Runs:
    """The runs of archives in results/; each is read once."""
    return collect([RESULTS / name for name in archives])


@functools.cache
def table(name: str) -> Shown:
    """A table of `shown.yaml`: its parts side by side, in the rows of the first."""
    parts = [_part(part) for part in described()["tables"][name]]
    first = parts[0]
    blank = [["-"] * len(part.head[1]) for part in parts]
    rows = {
        labels: [
            text
            for part, none in zip(parts, blank, strict=True)
            for text in part.rows.get(labels, none)
        ]
        for labels in first.rows
    }
    return Shown((first.head[0], [name for part in parts for name in part.head[1]]), rows)


def _part(part: Mapping[str, Any]) -> Shown:
    """One part, its columns renamed by `heads`."""
    kinds = {
        "report": _reported,
        "json": lambda entry: _filed(**entry),
        "claims": lambda entry: _verdicts() if entry == "verdicts" else _claimed(entry),
        "ranks": lambda entry: _ranks(**entry),
    }
    shown = next(make(part[kind]) for kind, make in kinds.items() if kind in part)
    heads = part.get("heads", shown.head[1])
    if len(heads) != len(shown.head[1]):
        raise ValueError(
            f"shown.yaml: {len(heads)} heads for the columns {', '.join(shown.head[1])}"
        )
    return Shown((shown.head[0], heads), shown.rows)


def _reported(command: str) -> Shown:
    """What `kvbench report` prints with these words."""
    words = shlex.split(command)
    (report_table,) = tables_of(words, lambda archives: runs_of(*map(str, archives)))
    grid = formats.grid(report_table)
    labels = [axis.rpartition(".")[2] for axis in grid.head]
    lines = [line for row in grid.rows for line in row]
    return Shown((labels, grid.columns), {line.labels: line.texts for line in lines})


def _filed(
    file: str, rows: str, columns: Mapping[str, str], labels: Mapping[str, str] | None = None
) -> Shown:
    """Numbers of a JSON file of results/.

    Parameters
    ----------
    file
        its name.
    rows
        the path of an object, whose keys are the rows, or of a list.
    columns
        by heading a path from a row, its keys joined by "|"; or "PATH / PATH", a ratio, "PATH ±
        PATH", "PATH [PATH, PATH]"; the format of each number stands after ":". A key that is a
        quantity's has its unit.
    labels
        of a list's entries, by heading the paths of what they are named by.
    """
    content = _at(json.loads((RESULTS / file).read_text(encoding="utf-8")), rows)
    labels = labels or {}
    names = [
        tuple(_at(entry, path) for path in labels.values()) if labels else (entry,)
        for entry in content
    ]
    entries = zip(names, content if labels else content.values(), strict=True)
    table_rows = {
        tuple(map(str, name)): [_number(entry, column) for column in columns.values()]
        for name, entry in entries
    }
    assert len(table_rows) == len(names), f"{file}: entries of one name"
    for heading, texts in zip(columns, zip(*table_rows.values(), strict=True), strict=True):
        assert {*texts} != {"-"}, f"{file}: no entry has {columns[heading]}"
    return Shown(([*labels] or ["method"], list(columns)), table_rows)


def _at(content: Any, path: str) -> Any:
    for key in filter(None, path.split("|")):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


def _number(entry: Any, column: str) -> str:
    """A column's text in a row, "-" where it has none."""
    paths, _, digits = column.replace(" :", ":").partition(":")
    try:
        values = {path: _at(entry, path) for path in re.findall(r"[\w|]+", paths)}
    except KeyError:
        return "-"
    if None in values.values():
        return "-"
    scaled = {path: named(path.rpartition("|")[2]).scaled(value) for path, value in values.items()}
    if " / " in paths:
        above, below = scaled.values()
        return f"{above / below:{digits}}"
    return re.sub(r"[\w|]+", lambda path: f"{scaled[path[0]]:{digits}}", paths)


@functools.cache
def _judged() -> list[Judged]:
    return judged(None, [])


def _claimed(ids: Sequence[str]) -> Shown:
    """What was measured of each criterion of these claims, and whether that holds."""
    by_id = {judged.claim.id: judged for judged in _judged()}
    rows = {}
    for id in ids:
        for criterion, number, verdict in by_id[id].criteria:
            measured = (
                sentence(criterion, number)
                .removeprefix(f"{criterion.description}: ")
                .partition("; wanted ")[0]
            )
            count = str(number.n) if isinstance(number, Finding) else "-"
            rows[id, criterion.description] = [
                measured,
                criterion.bounds_text,
                count,
                _said(by_id[id], criterion, verdict),
            ]
    return Shown((["claim", "what was measured"], ["found", "wanted", "n", "verdict"]), rows)


def _said(judged: Judged, criterion: Criterion, verdict: Verdict) -> str:
    """The verdict on a criterion as a table has it."""
    if not criterion.decides:
        return "information"
    stands_in = judged.setting is Setting.STAND_IN and verdict is not Verdict.NOT_TESTABLE
    return f"{Setting.STAND_IN.value}: {verdict.value}" if stands_in else verdict.value


def _verdicts() -> Shown:
    """How many claims of each setting have each verdict."""
    shown = [verdict for verdict in Verdict if verdict is not Verdict.NOT_TESTABLE]
    rows = {}
    for setting, counts in counted(_judged()).items():
        verdicts = [counts.get(verdict, 0) for verdict in shown]
        cells = ["-"] * len(shown) if setting is Setting.NOWHERE else list(map(str, verdicts))
        rows[setting.value,] = [str(sum(counts.values())), *cells]
    return Shown((["claims"], ["claims", *(verdict.value for verdict in shown)]), rows)


def _ranks(file: str, where: Sequence[str]) -> Shown:
    """Mean rank of each method by KL, over the texts that all have read; 1 is the nearest."""
    runs = runs_of(file)
    scores = {run.label("method"): run.scores for run in runs.only(select(runs, where))}
    near = pd.DataFrame({name: pd.Series(score.kl, score.ids) for name, score in scores.items()})
    ranks = near.dropna().rank(axis="columns").mean()
    return Shown((["method"], ["rank"]), {(name,): [f"{rank:.1f}"] for name, rank in ranks.items()})


def _plain(text: str) -> str:
    return text.replace("*", r"\*")


def filled(page: str) -> str:
    """A page with its tables as they are now."""
    parts = MARK.split(page)
    out = parts[0]
    for kind, name, rest in zip(*(parts[start::3] for start in (1, 2, 3)), strict=True):
        out += f"<!-- {kind}: {name} -->\n"
        if kind == "table":
            body = re.sub(r"\A(?:\|.*\n)*\n*", "", rest)
            out += f"{table(name).written()}\n\n{body}"
        else:
            out += rest
    return out


# -- numbers in prose ------------------------------------------------------------------------------


def unfounded(page: str) -> list[str]:
    """Numbers of a page, with lines, that are no settings and in no table of their section."""
    return [
        number
        for section in re.split(r"^(?=## )", page, flags=re.MULTILINE)
        for number in _unfounded(section)
    ]


def _unfounded(section: str) -> Iterator[str]:
    names = [name for _, name in MARK.findall(section)]
    table_numbers = sorted(
        {number for name in names for number in table(name).numbers()} | _set_in(section, names)
    )
    for line in _prose(section).splitlines():
        for number in NUMBER.finditer(SETTINGS.sub("", line)):
            digits = len(number[1].partition(".")[2])
            value = float(number[1].replace(",", ""))
            if not any(abs(other - value) <= 0.5 * 10**-digits + 1e-9 for other in table_numbers):
                yield f"{number[0]}: {line.strip()}"


def _prose(section: str) -> str:
    """A section without tables that are made, code, links and comments."""
    without = re.sub(r"^```.*?^```", "", section, flags=re.DOTALL | re.MULTILINE)
    without = re.sub(r"<!-- table: [\w-]+ -->\n(?:\|.*\n)*", "", without)
    without = re.sub(
        rf"^{re.escape(METHOD_TABLE_HEAD)}.*\n(?:\|.*\n)*", "", without, flags=re.MULTILINE
    )
    return re.sub(r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)|https?://\S+", " ", without, flags=re.DOTALL)


def _set_in(section: str, names: Sequence[str]) -> set[float]:
    """Numbers of the commands that a section shows, and of those that its tables are made by."""
    commands = re.findall(r"^```.*?^```|`[^`\n]*`", section, re.DOTALL | re.MULTILINE)
    commands += [
        part["report"] for name in names for part in described()["tables"][name] if "report" in part
    ]
    return {
        float(number) for command in commands for number in re.findall(r"\d+(?:\.\d+)?", command)
    }


def main() -> None:
    """Write the tables into the pages, and draw the pictures if asked to."""
    parser = argparse.ArgumentParser(description="Tables and pictures of pages, from results/.")
    parser.add_argument(
        "--pictures", action="store_true", help="draw the pictures of results/, too"
    )
    parser.add_argument("names", nargs="*", help="of pictures; default: all")
    options = parser.parse_args()
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        (ROOT / name).write_text(filled(page), encoding="utf-8")
        for line in unfounded(filled(page)):
            print(f"{name}: no run here has {line}")
    for name, command in described()["pictures"].items() if options.pictures else ():
        if not options.names or name in options.names:
            words = [
                str(RESULTS / word) if (RESULTS / word).is_file() else word
                for word in shlex.split(command)
            ]
            report([*words, "--out", str(RESULTS / name)])


if __name__ == "__main__":
    main()
