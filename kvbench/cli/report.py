"""`kvbench report [FOLDER ...]`: tables and figures of run folders, alone or beside the papers'
own.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config import ConfigError, shipped_folder
from kvbench.runs.stored import ResultsError, printable, runs_below

if TYPE_CHECKING:
    from argparse import Namespace

    from matplotlib.figure import Figure

    from kvbench.report.data.run import Run, Runs, SkippedRun
    from kvbench.report.html import Outputs
    from kvbench.report.tables.cells import ReportTable
    from kvbench.runs.quantities import Quantity

FOLDER = Path("results")
RESULTS = shipped_folder("results")
SWEEPS = (
    "claims",
    "controls",
    "fidelity_budgets",
    "given_qwen",
    "in_vllm",
    "kvzap",
    "latency_gpu",
    "quantised",
    "quantised_long",
    "question",
    "reference",
    "reference_qwen",
    "reference_tiny",
)
SHIPPED = [RESULTS / f"{name}.tar.xz" for name in SWEEPS]
INSTALLED = (
    "`kvbench report results/reference_qwen.tar.xz` shows runs that kvbench ships, wherever it is"
    " installed"
)
FORMATS = {
    "console": ".txt",
    "markdown": ".md",
    "latex": ".tex",
    "csv": ".csv",
    "long": "",
    "parquet": ".parquet",
    "html": ".html",
    "site": "",
}

EXAMPLES = """\
  kvbench report                                         your runs below results/
  kvbench report results/reference.tar.xz                the runs that kvbench ships
  kvbench report --rows method,budget --columns task     scores, with all that belongs to them
  kvbench report --rows method --columns budget --values tpot_ms_mean --where task=passkey
  kvbench report --paper icecache_table1 --format latex  ours beside the published numbers
  kvbench report --figure tradeoff --size column --out tradeoff.pdf
  kvbench report --out report.html                       one page with all tables and pictures
  kvbench report --out results.parquet                   every number in one long table
  kvbench report --out site/                             leaderboard, a page a method, samples
  kvbench report --claims                                which of the papers' claims hold
  kvbench report --list                                  what can be made
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        _check(flags)
        if flags.list:
            print(_list())
        elif flags.claims:
            _print_claims(flags)
        elif flags.figure and _drawn_from_file(flags):
            print(flags.out)
        else:
            runs = _runs(flags)
            made = {"site": _write_site, "long": _export, "parquet": _export}
            make = _draw if flags.figure else made.get(flags.format, _print)
            narrow = make(flags, runs)
            sys.stdout.flush()
            _print_skipped(runs, narrow)
    except (ConfigError, ResultsError) as error:
        print(f"kvbench report: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def tables_of(
    arguments: Sequence[str], read: Callable[[Sequence[Path]], Runs]
) -> list[ReportTable]:
    """The tables that a command line makes.

    Parameters
    ----------
    arguments
        as after `kvbench report`, with folders or archives.
    read
        gives the runs of these.

    Raises
    ------
    ConfigError, ResultsError
        as the command reports them.
    """
    flags = _parser().parse_args(arguments)
    _check(flags)
    return _tables(flags, read(flags.folders))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvbench report",
        description="Tables and figures of run folders, alone or beside the papers' own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "folders",
        nargs="*",
        type=_named_folder,
        metavar="FOLDER",
        help="of runs, or an archive; default: yours below results",
    )
    add(
        "--list",
        action="store_true",
        help="name the published tables, the figures, the keys and the values",
    )
    add(
        "--paper",
        action="append",
        metavar="ID",
        help="a published table with ours beside it; may be repeated",
    )
    add(
        "--claims",
        action="store_true",
        help="the papers' claims: what was measured of each, and the verdict",
    )
    add("--rows", type=_words, metavar="KEY,...", help="settings that make rows; default: method")
    add(
        "--columns",
        type=_words,
        default=[],
        metavar="KEY,...",
        help="settings that make columns; none: the values",
    )
    add(
        "--values", type=_words, metavar="NAME,...", help="what stands in the cells; default: score"
    )
    add(
        "--sort",
        action="store_true",
        help="rows by the first value, the best first; default: by their labels",
    )
    add(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only runs with this value, or one of V,V",
    )
    add(
        "--all",
        action="store_true",
        help="every run; else a console has the ten best methods of one selection of many",
    )
    add("--figure", metavar="NAME", help="draw a figure to --out FILE.png, .pdf or .svg")
    add(
        "--size",
        choices=("page", "column"),
        default="page",
        help="of a figure: a page of 7 inches, a column of 3.4",
    )
    add("--format", choices=FORMATS, help="default: as --out ends, else console")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write there instead of printing; a folder: a static site",
    )
    add(
        "--allow-mixed",
        action="store_true",
        help="let runs of several protocols into one table, marked",
    )
    add("--unfinished", action="store_true", help="take runs that have not finished, marked")
    return parser


def _named_folder(text: str) -> Path:
    """A folder, archive or file; `results/NAME` of those that kvbench ships, wherever it is
    installed.
    """
    path = Path(text)
    shipped = RESULTS / path.name
    return shipped if path.parent == FOLDER and not path.exists() and shipped.is_file() else path


def _words(text: str) -> list[str]:
    return text.split(",")


def _check(flags: Namespace) -> None:
    """Refuse flags that do not go together, and a published table that is not there, before any run
    is read.

    Raises
    ------
    ConfigError
        names them.
    """
    if flags.figure and not flags.out:
        from kvbench.report.figures.all import refuse_unknown

        refuse_unknown(flags.figure)
        raise ConfigError(
            f"--figure {flags.figure}: give a file with --out, such as {flags.figure}.png"
        )
    if flags.figure and (flags.paper or flags.rows):
        raise ConfigError(
            f"--figure {flags.figure}: one figure or tables; leave out --paper and --rows"
        )
    if flags.paper and (flags.rows or flags.columns or flags.values or flags.sort):
        raise ConfigError(
            f"--paper {flags.paper[0]}: has its own rows, columns and values; leave out yours"
        )
    if flags.columns or flags.values or flags.sort:
        flags.rows = flags.rows or ["method"]
    if flags.claims and (flags.paper or flags.rows or flags.figure):
        raise ConfigError(
            "--claims: has its own runs and values; leave out --paper, --rows, --columns and"
            " --figure"
        )
    if flags.out and not flags.out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {flags.out}: no such folder, {flags.out.parent}; make it, or name another"
        )
    if flags.out and not flags.figure and not flags.format:
        endings = {ending: name for name, ending in FORMATS.items()}
        if flags.out.suffix not in endings:
            expected = ", ".join(filter(None, endings))
            raise ConfigError(f"--out {flags.out}: ends in none of {expected}; name a --format")
        flags.format = endings[flags.out.suffix]
    flags.format = flags.format or "console"
    if flags.claims and flags.format in ("latex", "site"):
        raise ConfigError(
            f"--format {flags.format}: not of --claims; expected console, markdown, csv or html"
        )
    if flags.format in ("long", "parquet"):
        _check_export(flags)
    if flags.format == "site":
        _check_site(flags)
    if flags.paper:
        from kvbench.report.data import papers as published

        flags.paper = [published.table(id) for id in flags.paper]


def _check_export(flags: Namespace) -> None:
    """Refuse what does not go with all numbers of all runs as one file.

    Raises
    ------
    ConfigError
        names it.
    """
    if not flags.out:
        raise ConfigError(f"--format {flags.format}: give a file with --out, such as results.csv")
    if flags.paper or flags.rows or flags.claims:
        raise ConfigError(
            f"--out {flags.out}: has all numbers of all runs; leave out --paper, --claims, --rows,"
            " --columns and --values"
        )


def _check_site(flags: Namespace) -> None:
    """Refuse what does not go with a site, and a folder that is not one.

    Raises
    ------
    ConfigError
        names it.
    """
    from kvbench.report.site import check

    if not flags.out:
        raise ConfigError("--format site: give a folder with --out, such as site/")
    if flags.paper or flags.rows:
        raise ConfigError(
            f"--out {flags.out}: a site shows all runs, and every published table; leave out"
            " --paper and --rows"
        )
    check(flags.out)


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
            **{
                name: quantity.heading + _better(quantity)
                for name, quantity in (NUMBERS | PARTS).items()
            },
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
        lines += [
            f"{heading}:",
            *(f"  {name:<{width}}  {description}" for name, description in entries.items()),
            "",
        ]
    return "\n".join(lines).rstrip()


def _better(quantity: Quantity) -> str:
    return f"; {quantity.better} is better" if quantity.better else ""


def _runs(flags: Namespace) -> Runs | None:
    """The runs of the folders; None where there are none and published tables are asked for, which
    need none.

    Raises
    ------
    ResultsError
        there are none.
    """
    from kvbench.report.data.frame import collect

    named = bool(flags.folders)
    try:
        flags.folders = flags.folders or user_folders(FOLDER, "report")[0]
        runs = collect(flags.folders, flags.unfinished)
    except ResultsError as error:
        if named or (FOLDER.exists() and not flags.paper):
            raise
        if not flags.paper:
            raise ResultsError(f"{error}; {INSTALLED}") from error
        print(
            f"kvbench report: {printable(str(error))}; the published numbers stand alone",
            file=sys.stderr,
        )
        return None
    if not len(runs.arms) and not flags.paper:
        folders = " and ".join(map(str, flags.folders))
        raise ResultsError(f"{folders}: no run that can be shown; left out: {_named(runs.skipped)}")
    return runs if len(runs.arms) else None


def _chosen(flags: Namespace, runs: Runs) -> Runs:
    """The runs of --where."""
    from kvbench.report.data.select import select

    return runs.only(select(runs, flags.where))


def user_folders(folder: Path, command: str) -> tuple[list[Path], int]:
    """The folders of a user's own runs in a folder, and how many archives there kvbench ships; that
    folder itself where none is shipped.

    Parameters
    ----------
    folder
        of runs.
    command
        of kvbench, for the message.

    Raises
    ------
    ResultsError
        there are only runs that kvbench ships.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError:  # which whoever reads runs there says
        inside = []
    shipped = [path for path in inside if path.resolve() in SHIPPED]
    unshipped = [path for path in inside if path not in shipped and next(runs_below(path), None)]
    if shipped and not unshipped:
        names = " ".join(map(str, shipped))
        raise ResultsError(
            f"{folder}: no run of yours yet; those that kvbench ships are taken by name: kvbench"
            f" {command} {names}"
        )
    return (unshipped if shipped else [folder]), len(shipped)


def _print_skipped(runs: Runs | None, narrow: Sequence[str]) -> None:
    """Print a line on standard error: the runs and columns that are not in the report."""
    words = [_named(runs.skipped)] if runs and runs.skipped else []
    words += [f"{', '.join(narrow)}: too wide for here; --format html has room"] if narrow else []
    if words:
        print(printable(f"left out: {'; '.join(words)}"), file=sys.stderr)


def _named(skipped: Sequence[SkippedRun]) -> str:
    """The first run that is left out with its reason, and how many more there are."""
    path, why = skipped[0]
    more = f"; {len(skipped) - 1} more runs, which --format html names" if len(skipped) > 1 else ""
    return f"{path}: {why}{more}"


def _tables(flags: Namespace, runs: Runs | None) -> list[ReportTable]:
    from kvbench.report.tables import runs as tables
    from kvbench.report.tables.cells import BRIEFEST_SCORE, WHOLE_SCORE
    from kvbench.report.tables.first import first
    from kvbench.report.tables.published import merge_published, ran

    if flags.paper:
        comparisons = [
            merge_published(runs, paper, flags.where, flags.allow_mixed) for paper in flags.paper
        ]
        return comparisons if flags.format in ("csv", "html") else list(map(ran, comparisons))
    assert runs is not None
    if flags.rows:
        values = flags.values or ["score"]
        score = BRIEFEST_SCORE if flags.format == "latex" else WHOLE_SCORE
        return [
            tables.pivot(
                runs,
                flags.rows,
                flags.columns,
                values,
                flags.where,
                flags.allow_mixed,
                score,
                flags.sort,
            )
        ]
    if flags.format == "html":
        return [*tables.summary(runs, flags.where), *tables.by_group(runs, flags.where)]
    if flags.format == "csv":
        return tables.summary(runs, flags.where)
    whole = flags.all or flags.format != "console"
    return (tables.overview if whole else first)(runs, flags.where)


def _print(flags: Namespace, runs: Runs | None) -> list[str]:
    """Print or write the tables; the headings for which a console had no room."""
    from kvbench.report.tables import formats
    from kvbench.report.tables.latex import latex

    tables = _tables(flags, runs)
    narrow: list[str] = []
    if flags.format == "console":
        from kvbench.runs.terminal import Console

        plain = flags.out or not sys.stdout.isatty()
        # A file is UTF-8, whatever the terminal is.
        target = io.StringIO() if flags.out else sys.stdout
        console = Console(width=formats.PAGE_WIDTH, file=target) if plain else Console()
        with console.capture() as captured:
            narrow = formats.console(tables, console)
        text = captured.get()
    elif flags.format == "html":
        text = _page(flags, runs, tables)
    else:
        text = {"markdown": formats.markdown, "latex": latex, "csv": formats.csv_text}[
            flags.format
        ](tables)
    _give(flags, text)
    return narrow


def _give(flags: Namespace, text: str) -> None:
    """Print a text, or write it to --out.

    Raises
    ------
    ConfigError
        it cannot be written there.
    """
    if not flags.out:
        print(text, end="")
        return
    try:
        flags.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {flags.out}: cannot write there ({error.strerror})") from error
    print(flags.out)


def _print_claims(flags: Namespace) -> None:
    """Print or write the claims with their verdicts; some need no runs, and are decided without
    any.
    """
    from kvbench.report.claims import page
    from kvbench.report.data.frame import collect

    named, runs = bool(flags.folders), None
    try:
        flags.folders = flags.folders or user_folders(FOLDER, "report")[0]
        collected = collect(flags.folders, flags.unfinished)
        runs = _chosen(flags, collected) if len(collected.arms) else None
    except ResultsError:
        if named:
            raise
    _give(flags, page.FORMATS[flags.format](page.judged(runs, flags.folders)))


def _page(flags: Namespace, runs: Runs | None, tables: Sequence[ReportTable]) -> str:
    """The HTML page: the tables, and where no rows are chosen every figure that can be drawn from
    these runs.
    """
    from kvbench.report import html

    if flags.paper or flags.rows or runs is None:
        return html.page("kvbench report", "", tables, {}, runs.skipped if runs else [])
    from kvbench.report.figures.all import FIGURES, draw

    chosen = _chosen(flags, runs)
    figures, undrawn = {}, []
    for name, title in FIGURES.items():
        try:
            figures[name] = (title, draw(name, chosen))
        except ConfigError as error:
            undrawn.append(str(error))
    folders = " and ".join(map(str, flags.folders))
    subtitle = f"{len(chosen.arms)} runs below {folders}."
    outputs = list(map(_outputs, chosen))
    return html.page("kvbench report", subtitle, tables, figures, runs.skipped, undrawn, outputs)


def _outputs(run: Run) -> Outputs:
    """A run's samples for the page."""
    from kvbench.report.html import outputs_of

    name = ", ".join(map(run.label, ("model", "task", "method", "budget")))
    return outputs_of(name, run.arm["path"].name, run.arm["metric"], run.samples())


def _write_site(flags: Namespace, runs: Runs | None) -> list[str]:
    from kvbench.report import site

    assert runs is not None
    site.write(_chosen(flags, runs), " and ".join(map(str, flags.folders)), flags.out)
    print(flags.out / "index.html")
    return []


def _export(flags: Namespace, runs: Runs | None) -> list[str]:
    """Write all numbers of the runs in one long table."""
    from kvbench.report.data.table import Table

    assert runs is not None
    table = Table.of(runs, flags.where)
    try:
        (table.to_parquet if flags.format == "parquet" else table.to_csv)(flags.out)
    except OSError as error:
        raise ConfigError(f"--out {flags.out}: cannot write there ({error.strerror})") from error
    print(flags.out)
    return []


def _draw(flags: Namespace, runs: Runs | None) -> list[str]:
    from kvbench.report.figures.all import draw

    assert runs is not None
    _write_figure(flags, draw(flags.figure, _chosen(flags, runs), flags.size))
    print(flags.out)
    return []


def _drawn_from_file(flags: Namespace) -> bool:
    """Draw the figure if it is one of a script's JSON; whether it is."""
    from kvbench.report.figures.all import draw_file, is_of_files

    if not is_of_files(flags.figure, flags.folders):
        return False
    _write_figure(flags, draw_file(flags.figure, flags.folders, flags.size))
    return True


def _write_figure(flags: Namespace, figure: Figure) -> None:
    from kvbench.report.figures.all import write

    try:
        write(figure, flags.out)
    except OSError as error:
        raise ConfigError(f"--out {flags.out}: cannot write there ({error.strerror})") from error
