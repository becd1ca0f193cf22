"""`kvbench report [FOLDER ...]`: tables and figures of run folders, alone or beside the papers' own.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvbench
from kvbench.config import ConfigError
from kvbench.runs.stored import ResultsError, printable, runs_below

if TYPE_CHECKING:
    from argparse import Namespace

    from matplotlib.figure import Figure

    from kvbench.report.data.run import LeftOut, Run, Runs
    from kvbench.report.tables.cells import Table
    from kvbench.runs.quantities import Quantity

FOLDER = Path("results")
RESULTS = Path(kvbench.__file__).parents[1] / "results"
SWEEPS = (
    "claims",
    "controls",
    "fidelity_budgets",
    "given_qwen",
    "in_vllm",
    "latency_gpu",
    "quantised",
    "quantised_long",
    "question",
    "reference",
    "reference_qwen",
    "reference_tiny",
)
SHIPPED = [RESULTS / f"{name}.tar.xz" for name in SWEEPS]
FORMATS = {"console": ".txt", "markdown": ".md", "latex": ".tex", "csv": ".csv", "html": ".html", "site": ""}

EXAMPLES = """\
  kvbench report                                         your runs below results/
  kvbench report results/reference.tar.xz                the runs that kvbench ships
  kvbench report --rows method,budget --columns task     scores, with all that belongs to them
  kvbench report --rows method --columns budget --values tpot_ms_mean --where task=passkey
  kvbench report --paper icecache_table1 --format latex  ours beside the published numbers
  kvbench report --figure tradeoff --size column --out tradeoff.pdf
  kvbench report --out report.html                       one page with all tables and pictures
  kvbench report --out site/                             a folder: leaderboard, a page a method, samples
  kvbench report --claims                                 which of the papers' claims hold in your runs
  kvbench report --list                                  what can be made
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        if given.list:
            print(_list())
        elif given.claims:
            _print_claims(given)
        elif given.figure and _drawn_from_file(given):
            print(given.out)
        else:
            runs = _runs(given)
            make = _draw if given.figure else _write_site if given.format == "site" else _print
            narrow = make(given, runs)
            sys.stdout.flush()
            _say_left_out(runs, narrow)
    except (ConfigError, ResultsError) as error:
        print(f"kvbench report: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def tables_of(arguments: Sequence[str], read: Callable[[Sequence[Path]], Runs]) -> list[Table]:
    """The tables that a command line makes.

    Args:
        arguments: as after `kvbench report`, with folders or archives.
        read: gives the runs of these.

    Raises:
        ConfigError, ResultsError: as the command reports them.
    """
    given = _parser().parse_args(arguments)
    _check(given)
    return _tables(given, read(given.folders))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvbench report",
        description="Tables and figures of run folders, alone or beside the papers' own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs, or an archive; default: yours below results")
    add("--list", action="store_true", help="name the published tables, the figures, the keys and the values")
    add("--paper", action="append", metavar="ID", help="a published table with ours beside it; may be repeated")
    add("--claims", action="store_true", help="the papers' claims: what was measured of each, and the verdict")
    add("--rows", type=_words, metavar="KEY,...", help="settings that make rows; default: method")
    add("--columns", type=_words, default=[], metavar="KEY,...", help="settings that make columns; none: the values")
    add("--values", type=_words, metavar="NAME,...", help="what stands in the cells; default: score")
    add("--sort", action="store_true", help="rows by the first value, the best first; default: by their labels")
    add("--where", action="append", default=[], metavar="KEY=VALUE", help="only runs with this value, or one of V,V")
    add("--figure", metavar="NAME", help="draw a figure to --out FILE.png, .pdf or .svg")
    add("--size", choices=("page", "column"), default="page", help="of a figure: a page of 7 inches, a column of 3.4")
    add("--format", choices=FORMATS, help="default: as --out ends, else console")
    add("--out", type=Path, metavar="FILE", help="write there instead of printing; a folder: a static site")
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
    if given.paper and (given.rows or given.columns or given.values or given.sort):
        raise ConfigError(f"--paper {given.paper[0]}: has its own rows, columns and values; leave out yours")
    if given.columns or given.values or given.sort:
        given.rows = given.rows or ["method"]
    if given.claims and (given.paper or given.rows or given.figure):
        raise ConfigError("--claims: has its own runs and values; leave out --paper, --rows, --columns and --figure")
    if given.out and not given.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {given.out}: no such folder, {given.out.parent}; make it, or name another")
    if given.out and not given.figure and not given.format:
        endings = {ending: name for name, ending in FORMATS.items()}
        if given.out.suffix not in endings:
            known = ", ".join(filter(None, endings))
            raise ConfigError(f"--out {given.out}: ends in none of {known}; name a --format")
        given.format = endings[given.out.suffix]
    given.format = given.format or "console"
    if given.claims and given.format in ("latex", "site"):
        raise ConfigError(f"--format {given.format}: not of --claims; expected console, markdown, csv or html")
    if given.format == "site":
        _check_site(given)
    if given.paper:
        from kvbench.report.data import papers as published

        given.paper = [published.table(id) for id in given.paper]


def _check_site(given: Namespace) -> None:
    """Refuse what does not go with a site, and a folder that is not one.

    Raises:
        ConfigError: names it.
    """
    from kvbench.report.site import check

    if not given.out:
        raise ConfigError("--format site: give a folder with --out, such as site/")
    if given.paper or given.rows:
        raise ConfigError(
            f"--out {given.out}: a site shows all runs, and every published table; leave out --paper and --rows"
        )
    check(given.out)


def _list() -> str:
    """Everything that can be asked for, each with a line on what it is."""
    from kvbench.report.data.papers import ids
    from kvbench.report.figures.all import FIGURES, OF_FILES
    from kvbench.report.tables.cells import PARTS
    from kvbench.runs.quantities import NUMBERS

    lists = {
        "published tables (--paper)": ids(),
        "figures (--figure)": FIGURES | OF_FILES,
        "values (--values)": {
            **{name: quantity.heading + _better(quantity) for name, quantity in (NUMBERS | PARTS).items()},
            "fidelity": "all of task=fidelity, with their errors",
            "breakdown_ms.PART": "a part of a decode step, such as breakdown_ms.select",
            "audit.NAME": "a number of the method's own, such as audit.candidates of pariskv",
            "scores.NAME": "another score of the task, such as scores.no_comma of instructions",
        },
        "keys (--rows, --columns, --where)": {
            "model method budget task seed": "of every run",
            "protocol.KEY probe.every": "as on the command line",
            "method.KEY task.KEY": "an option, such as method.page_size or task.lengths",
            "group": "a task's subsets or lengths; for rows and columns",
        },
    }
    lines = []
    for heading, entries in lists.items():
        width = max(map(len, entries))
        lines += [f"{heading}:", *(f"  {name:<{width}}  {about}" for name, about in entries.items()), ""]
    return "\n".join(lines).rstrip()


def _better(quantity: Quantity) -> str:
    return f"; {quantity.better} is better" if quantity.better else ""


def _runs(given: Namespace) -> Runs | None:
    """The runs of the folders; None where there are none and published tables are asked for, which need none.

    Raises:
        ResultsError: there are none.
    """
    from kvbench.report.data.frame import collect

    named = bool(given.folders)
    try:
        given.folders = given.folders or own_folders(FOLDER, "report")[0]
        runs = collect(given.folders, given.unfinished)
    except ResultsError as error:
        if not given.paper or named:
            raise
        print(f"kvbench report: {printable(str(error))}; the published numbers stand alone", file=sys.stderr)
        return None
    if not len(runs.arms) and not given.paper:
        folders = " and ".join(map(str, given.folders))
        raise ResultsError(f"{folders}: no run that can be shown; left out: {_named(runs.left_out)}")
    return runs if len(runs.arms) else None


def _chosen(given: Namespace, runs: Runs) -> Runs:
    """The runs of --where."""
    from kvbench.report.data.select import select

    return runs.only(select(runs, given.where))


def own_folders(folder: Path, command: str) -> tuple[list[Path], int]:
    """The folders of a user's own runs in a folder, and how many archives there kvbench ships; that folder itself where
    none is shipped.

    Args:
        folder: of runs.
        command: of kvbench, for the message.

    Raises:
        ResultsError: there are only runs that kvbench ships.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError:  # which whoever reads runs there says
        inside = []
    shipped = [path for path in inside if path.resolve() in SHIPPED]
    own = [path for path in inside if path not in shipped and next(runs_below(path), None)]
    if shipped and not own:
        names = " ".join(map(str, shipped))
        raise ResultsError(
            f"{folder}: no run of yours yet; those that kvbench ships are taken by name: kvbench {command} {names}"
        )
    return (own if shipped else [folder]), len(shipped)


def _say_left_out(runs: Runs | None, narrow: Sequence[str]) -> None:
    """Print a line on standard error: the runs and columns that are not in the report."""
    words = [_named(runs.left_out)] if runs and runs.left_out else []
    words += [f"{', '.join(narrow)}: too wide for here; --format html has room"] if narrow else []
    if words:
        print(printable(f"left out: {'; '.join(words)}"), file=sys.stderr)


def _named(left_out: Sequence[LeftOut]) -> str:
    """The first run that is left out with its reason, and how many more there are."""
    path, why = left_out[0]
    more = f"; {len(left_out) - 1} more runs, which --format html names" if len(left_out) > 1 else ""
    return f"{path}: {why}{more}"


def _tables(given: Namespace, runs: Runs | None) -> list[Table]:
    from kvbench.report.tables import runs as tables
    from kvbench.report.tables.cells import BRIEFEST_SCORE, WHOLE_SCORE
    from kvbench.report.tables.published import beside, ran

    if given.paper:
        made = [beside(runs, paper, given.where, given.allow_mixed) for paper in given.paper]
        return made if given.format in ("csv", "html") else list(map(ran, made))
    assert runs is not None
    if given.rows:
        values = given.values or ["score"]
        score = BRIEFEST_SCORE if given.format == "latex" else WHOLE_SCORE
        return [
            tables.pivot(runs, given.rows, given.columns, values, given.where, given.allow_mixed, score, given.sort)
        ]
    if given.format == "html":
        return [*tables.summary(runs, given.where), *tables.by_group(runs, given.where)]
    return tables.summary(runs, given.where) if given.format == "csv" else tables.overview(runs, given.where)


def _print(given: Namespace, runs: Runs | None) -> list[str]:
    """Print or write the tables; the headings for which a console had no room."""
    from kvbench.report.tables import formats
    from kvbench.report.tables.latex import latex

    made = _tables(given, runs)
    narrow: list[str] = []
    if given.format == "console":
        from kvbench.runs.terminal import Console

        plain = given.out or not sys.stdout.isatty()
        # A file is UTF-8, whatever the terminal is.
        target = io.StringIO() if given.out else sys.stdout
        console = Console(width=formats.PAGE_WIDTH, file=target) if plain else Console()
        with console.capture() as captured:
            narrow = formats.console(made, console)
        text = captured.get()
    elif given.format == "html":
        text = _page(given, runs, made)
    else:
        text = {"markdown": formats.markdown, "latex": latex, "csv": formats.csv_text}[given.format](made)
    _give(given, text)
    return narrow


def _give(given: Namespace, text: str) -> None:
    """Print a text, or write it to --out.

    Raises:
        ConfigError: it cannot be written there.
    """
    if not given.out:
        print(text, end="")
        return
    try:
        given.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {given.out}: cannot write there ({error.strerror})") from error
    print(given.out)


def _print_claims(given: Namespace) -> None:
    """Print or write the claims with their verdicts; some need no runs, and are decided without any."""
    from kvbench.report.claims import page
    from kvbench.report.data.frame import collect

    named, runs = bool(given.folders), None
    try:
        given.folders = given.folders or own_folders(FOLDER, "report")[0]
        found = collect(given.folders, given.unfinished)
        runs = _chosen(given, found) if len(found.arms) else None
    except ResultsError:
        if named:
            raise
    _give(given, page.FORMATS[given.format](page.judged(runs, given.folders)))


def _page(given: Namespace, runs: Runs | None, made: Sequence[Table]) -> str:
    """The HTML page: the tables, and where no rows are chosen every figure that can be drawn from these runs."""
    from kvbench.report import html

    if given.paper or given.rows or runs is None:
        return html.page("kvbench report", "", made, {}, runs.left_out if runs else [])
    from kvbench.report.figures.all import FIGURES, draw

    chosen = _chosen(given, runs)
    figures, undrawn = {}, []
    for name, title in FIGURES.items():
        try:
            figures[name] = (title, draw(name, chosen))
        except ConfigError as error:
            undrawn.append(str(error))
    folders = " and ".join(map(str, given.folders))
    about = f"{len(chosen.arms)} runs below {folders}."
    outputs = {run.arm["path"].name: _outputs(run) for run in chosen}
    return html.page("kvbench report", about, made, figures, runs.left_out, undrawn, outputs)


def _outputs(run: Run) -> str:
    """A run's samples for the page."""
    from kvbench.report.html import outputs_of

    name = ", ".join(map(run.label, ("model", "task", "method", "budget")))
    return outputs_of(name, run.arm["path"].name, run.arm["metric"], run.samples())


def _write_site(given: Namespace, runs: Runs | None) -> list[str]:
    from kvbench.report import site

    assert runs is not None
    site.write(_chosen(given, runs), " and ".join(map(str, given.folders)), given.out)
    print(given.out / "index.html")
    return []


def _draw(given: Namespace, runs: Runs | None) -> list[str]:
    from kvbench.report.figures.all import draw

    assert runs is not None
    _write_figure(given, draw(given.figure, _chosen(given, runs), given.size))
    print(given.out)
    return []


def _drawn_from_file(given: Namespace) -> bool:
    """Draw the figure if it is one of a script's JSON; whether it is."""
    from kvbench.report.figures.all import OF_FILES, draw_file

    if given.figure not in OF_FILES:
        return False
    _write_figure(given, draw_file(given.figure, given.folders, given.size))
    return True


def _write_figure(given: Namespace, figure: Figure) -> None:
    from kvbench.report.figures.all import write

    try:
        write(figure, given.out)
    except OSError as error:
        raise ConfigError(f"--out {given.out}: cannot write there ({error.strerror})") from error
