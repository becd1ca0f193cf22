"""`python -m kvbench.report [FOLDER ...]`: tables and figures of run folders, alone or beside the papers' own.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config import ConfigError
from kvbench.runs.folder import ResultsError

if TYPE_CHECKING:
    from argparse import Namespace

    from kvbench.report.cells import Table
    from kvbench.report.frame import LeftOut, Runs
    from kvbench.runs.quantities import Quantity

FOLDER = Path("results")
FORMATS = {"console": ".txt", "markdown": ".md", "latex": ".tex", "csv": ".csv", "html": ".html"}
NAMED = 10  # runs left out that are named one by one

EXAMPLES = """\
  python -m kvbench.report                                         everything below results/
  python -m kvbench.report --rows method,budget --columns task     scores, with all that belongs to them
  python -m kvbench.report --rows method --columns budget --values tpot_ms_mean --where task=passkey
  python -m kvbench.report --paper icecache_table1 --format latex  ours beside the published numbers
  python -m kvbench.report --figure tradeoff --out tradeoff.pdf
  python -m kvbench.report --out report.html                       one page with all tables and pictures
  python -m kvbench.report --list                                  what can be made
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        if given.list:
            print(_list())
        elif given.figure:
            _draw(given, _runs(given))
        else:
            _print(given, _runs(given))
        sys.stdout.flush()
    except (ConfigError, ResultsError) as error:
        print(f"kvbench.report: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # whoever read our output has enough; what is still buffered must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kvbench.report",
        description="Tables and figures of run folders, alone or beside the papers' own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, or folders above some; default: results")
    add("--list", action="store_true", help="name the published tables, the figures, the keys and the values")
    add("--paper", action="append", metavar="ID", help="a published table with ours beside it; may be repeated")
    add("--rows", type=_words, metavar="KEY,...", help="settings that make rows, such as method,budget")
    add("--columns", type=_words, default=[], metavar="KEY,...", help="settings that make columns; none: the values")
    add("--values", type=_words, metavar="NAME,...", help="what stands in the cells; default: score")
    add("--where", action="append", default=[], metavar="KEY=VALUE", help="only runs with this value, or one of V,V")
    add("--figure", metavar="NAME", help="draw a figure to --out FILE.png or FILE.pdf")
    add("--format", choices=FORMATS, help="default: as --out ends, else console")
    add("--out", type=Path, metavar="FILE", help="write there instead of printing")
    add("--allow-mixed", action="store_true", help="let runs of several protocols into one table, marked")
    add("--unfinished", action="store_true", help="take runs that have not finished, marked")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def _check(given: Namespace) -> None:
    """Refuse flags that do not go together, and a published table that is not there, before any run is read.

    Raises:
        ConfigError: names them.
    """
    if given.figure and not given.out:
        raise ConfigError(f"--figure {given.figure}: give a file with --out, such as {given.figure}.png")
    if given.figure and (given.paper or given.rows):
        raise ConfigError(f"--figure {given.figure}: one figure or tables; leave out --paper and --rows")
    if given.paper and (given.rows or given.columns or given.values):
        raise ConfigError(f"--paper {given.paper[0]}: has its own rows, columns and values; leave out yours")
    if (given.columns or given.values) and not given.rows:
        flag = "--columns" if given.columns else "--values"
        raise ConfigError(f"{flag}: needs --rows too, such as --rows method,budget")
    if given.out and not given.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {given.out}: no such folder, {given.out.parent}; make it, or name another")
    if given.out and not given.figure and not given.format:
        endings = {ending: name for name, ending in FORMATS.items()}
        if given.out.suffix not in endings:
            raise ConfigError(f"--out {given.out}: ends in none of {', '.join(endings)}; name a --format")
        given.format = endings[given.out.suffix]
    given.format = given.format or "console"
    if given.paper:
        from kvbench.report import published

        given.paper = [published.table(id) for id in given.paper]


def _list() -> str:
    """All that can be asked for, each with a line on what it is."""
    from kvbench.report.figures import FIGURES
    from kvbench.report.published import ids
    from kvbench.runs.quantities import NUMBERS

    parts = {
        "published tables (--paper)": ids(),
        "figures (--figure)": {name: title for name, (_, title) in FIGURES.items()},
        "values (--values)": {
            **{name: quantity.heading + _better(quantity) for name, quantity in NUMBERS.items()},
            "breakdown_ms.PART": "a part of a decode step, such as breakdown_ms.select",
            "audit.NAME": "a number of the method's own, such as audit.candidates of pariskv",
        },
        "keys (--rows, --columns, --where)": {
            "model method budget task seed": "of every run",
            "protocol.KEY probe.every": "as on the command line",
            "method.KEY task.KEY": "an option, such as method.page_size or task.lengths",
            "group": "a task's subsets or lengths; for rows and columns",
        },
    }
    lines = []
    for heading, entries in parts.items():
        width = max(map(len, entries))
        lines += [f"{heading}:", *(f"  {name:<{width}}  {about}" for name, about in entries.items()), ""]
    return "\n".join(lines).rstrip()


def _better(quantity: Quantity) -> str:
    return f"; {quantity.better} is better" if quantity.better else ""


def _runs(given: Namespace) -> Runs | None:
    """The runs of the folders; None where a paper's table can do without.

    Raises:
        ResultsError: there is none to be had.
    """
    from kvbench.report.frame import collect

    try:
        runs = collect(given.folders or [FOLDER], given.unfinished)
    except ResultsError as error:
        if not given.paper or given.folders:
            raise
        print(f"kvbench.report: {error}; the published numbers stand alone", file=sys.stderr)
        return None
    _name_left_out(runs.left_out)
    if not len(runs.arms) and not given.paper:
        folders = " and ".join(map(str, given.folders or [FOLDER]))
        raise ResultsError(f"{folders}: no run that can be shown, {len(runs.left_out)} left out")
    return runs if len(runs.arms) else None


def _name_left_out(left_out: Sequence[LeftOut]) -> None:
    for path, why in left_out[:NAMED]:
        print(f"left out: {path}: {why}", file=sys.stderr)
    if len(left_out) > NAMED:
        print(f"left out: {len(left_out) - NAMED} more; --format html names them all", file=sys.stderr)


def _tables(given: Namespace, runs: Runs | None) -> list[Table]:
    from kvbench.report import tables
    from kvbench.report.beside import beside

    if given.paper:
        return [beside(runs, paper, given.where, given.allow_mixed) for paper in given.paper]
    assert runs is not None
    if given.rows:
        values = given.values or ["score"]
        return [tables.pivot(runs, given.rows, given.columns, values, given.where, given.allow_mixed)]
    if given.format == "html":
        return [*tables.summary(runs, given.where), *tables.by_group(runs, given.where)]
    return tables.summary(runs, given.where)


def _print(given: Namespace, runs: Runs | None) -> None:
    from kvbench.report import formats

    made = _tables(given, runs)
    if given.format == "console":
        from rich.console import Console

        console = Console(width=140, file=sys.stdout) if given.out or not sys.stdout.isatty() else Console()
        with console.capture() as captured:
            formats.console(made, console)
        text = captured.get()
    elif given.format == "html":
        text = _page(given, runs, made)
    else:
        text = {"markdown": formats.markdown, "latex": formats.latex, "csv": formats.csv_text}[given.format](made)
    if not given.out:
        print(text, end="")
        return
    try:
        given.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {given.out}: cannot write there ({error.strerror})") from error
    print(given.out)


def _page(given: Namespace, runs: Runs | None, made: Sequence[Table]) -> str:
    """The HTML page: the tables, and without a selection every picture that these runs can be drawn in."""
    from kvbench.report import html

    if given.paper or given.rows or runs is None:
        return html.page("kvbench report", "", made, {}, runs.left_out if runs else [])
    from kvbench.report.figures import FIGURES, draw
    from kvbench.report.select import select

    chosen = runs.only(select(runs, given.where))
    figures, undrawn = {}, []
    for name, (_, title) in FIGURES.items():
        try:
            figures[name] = (title, draw(name, chosen))
        except ConfigError as error:
            undrawn.append(str(error))
        except (LookupError, TypeError, ValueError) as error:  # runs by an older kvbench, say; the tables stand
            undrawn.append(f"figure={name}: not from these runs ({type(error).__name__}: {error})")
    folders = " and ".join(map(str, given.folders or [FOLDER]))
    about = f"{len(chosen.arms)} runs below {folders}."
    return html.page("kvbench report", about, made, figures, runs.left_out, undrawn)


def _draw(given: Namespace, runs: Runs | None) -> None:
    from kvbench.report.figures import draw, write
    from kvbench.report.select import select

    assert runs is not None
    figure = draw(given.figure, runs.only(select(runs, given.where)))
    try:
        write(figure, given.out)
    except OSError as error:
        raise ConfigError(f"--out {given.out}: cannot write there ({error.strerror})") from error
    print(given.out)


if __name__ == "__main__":
    sys.exit(main())
