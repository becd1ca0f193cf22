"""`kvbench board ARCHIVE ...`: submissions held against what kvbench ships, and a site with their
rows.

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
    from kvbench.report.submissions.checked import Submission

DESCRIPTION = (
    "Check submissions, as kvbench submit packs them, and make a site with their rows beside the"
    " board's own."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench board", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "archives",
        nargs="+",
        type=Path,
        metavar="ARCHIVE",
        help="submissions, in the order in which they came",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write the site there; without it they are only checked",
    )
    add(
        *("--beside",),
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="the board's own runs, folders or archives; default: the archives that kvbench ships",
    )
    flags = parser.parse_args(arguments)
    try:
        return _board(
            flags.archives, flags.out, flags.beside or [path for path in SHIPPED if path.is_file()]
        )
    except (ConfigError, ResultsError) as error:
        print(f"kvbench board: {printable(str(error))}", file=sys.stderr)
        return 2


def _board(archives: Sequence[Path], out: Path | None, board_paths: Sequence[Path]) -> int:
    from kvbench.report import site
    from kvbench.report.data.frame import collect
    from kvbench.report.submissions.checked import checked

    if missing := [path for path in archives if not path.is_file()]:
        raise ConfigError(
            f"{missing[0]}: no such file; expected a submission, as kvbench submit packs it"
        )
    if not board_paths:
        raise ConfigError(
            "--beside: kvbench was installed without its results; expected those of its"
            " repository, as in --beside"
            f" {' '.join(map(str, (Path('results', path.name) for path in SHIPPED)))}"
        )
    if out:
        site.check(out)
    submissions, runs = checked(archives, collect(board_paths))
    for submission in submissions:
        print(*map(printable, _lines(submission)), sep="\n")
    if out:
        folders = " and ".join(map(str, board_paths))
        site.write(runs, folders, out, submissions)
        print(out / "index.html")
    return int(any(submission.reasons for submission in submissions))


def _lines(submission: Submission) -> list[str]:
    """What became of a submission, a line each."""
    from kvbench.report.submissions.whole import named

    if submission.reasons:
        return [
            f"{submission.name}: fails, no rows",
            *(f"  {reason}" for reason in submission.reasons),
        ]
    rows = [
        f"  row      {named(run)}: {code}"
        for run, code in zip(submission.rows, submission.code, strict=True)
    ]
    trusted = [f"  trusted  {submission.taken_on_trust}"] if submission.unread else []
    repeats = [f"  repeats  {repeat}" for repeat in submission.repeats]
    return [f"{submission.name}: {len(rows)} rows {submission.by}", *rows, *trusted, *repeats]
