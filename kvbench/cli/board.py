"""`kvbench board ARCHIVE ...`: submissions held against what kvbench ships, and a site with their rows.

Exit codes: 0 done, 1 a submission failed, which a site lists with its reasons, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli.report import SHIPPED
from kvbench.config import ConfigError
from kvbench.runs.stored import ResultsError, printable

if TYPE_CHECKING:
    from kvbench.report.submissions.checked import Submitted

ABOUT = "Check submissions, as kvbench submit packs them, and make a site with their rows beside the board's own."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench board", description=ABOUT)
    add = parser.add_argument
    add("archives", nargs="+", type=Path, metavar="ARCHIVE", help="submissions, in the order in which they came")
    add("--out", type=Path, metavar="FOLDER", help="write the site there; without it they are only checked")
    add(
        *("--beside",),
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="the board's own runs, folders or archives; default: the archives that kvbench ships",
    )
    given = parser.parse_args(arguments)
    try:
        return _board(given.archives, given.out, given.beside or [path for path in SHIPPED if path.is_file()])
    except (ConfigError, ResultsError) as error:
        print(f"kvbench board: {printable(str(error))}", file=sys.stderr)
        return 2


def _board(archives: Sequence[Path], out: Path | None, own: Sequence[Path]) -> int:
    from kvbench.report import site
    from kvbench.report.data.frame import collect
    from kvbench.report.submissions.checked import checked

    if missing := [path for path in archives if not path.is_file()]:
        raise ConfigError(f"{missing[0]}: no such file; expected a submission, as kvbench submit packs it")
    if not own:
        raise ConfigError(
            "--beside: kvbench was installed without its results; expected those of its repository, as in "
            f"--beside {' '.join(map(str, (Path('results', path.name) for path in SHIPPED)))}"
        )
    if out:
        site.check(out)
    found, runs = checked(archives, collect(own))
    for one in found:
        print(*map(printable, _lines(one)), sep="\n")
    if out:
        folders = " and ".join(map(str, own))
        site.write(runs, folders, out, found)
        print(out / "index.html")
    return int(any(one.reasons for one in found))


def _lines(one: Submitted) -> list[str]:
    """What became of a submission, a line each."""
    from kvbench.report.submissions.whole import named

    if one.reasons:
        return [f"{one.name}: fails, no rows", *(f"  {reason}" for reason in one.reasons)]
    rows = [f"  row      {named(run)}: {code}" for run, code in zip(one.rows, one.code, strict=True)]
    trusted = [f"  trusted  {one.taken_on_trust}"] if one.unread else []
    repeats = [f"  repeats  {repeat}" for repeat in one.repeats]
    return [f"{one.name}: {len(rows)} rows {one.by}", *rows, *trusted, *repeats]
