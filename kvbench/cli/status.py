"""`kvbench status [FOLDER ...]`: how the runs below a folder are doing, from any machine that sees
it.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.table import Table

from kvbench.cli.report import user_folders
from kvbench.runs.state import WATCH_SECONDS, State, doubtful, state_of
from kvbench.runs.stored import ResultsError, printable, runs_in
from kvbench.runs.table import add_numbers, wide_console

FOLDER = Path("results")
LONGEST = 10**9  # seconds that are shown: a status file may say anything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "kvbench status",
        description="How the runs below a folder are doing, from any machine that sees it.",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="runs, or folders above some; yours in results",
    )
    parser.add_argument("--all", action="store_true", help="a line for finished runs, too")
    parser.add_argument("--json", action="store_true", help="print all runs as JSON")
    flags = parser.parse_args(arguments)
    try:
        folders = flags.folders or user_folders(FOLDER, "status")[0]
        runs = list(runs_in(folders))
    except ResultsError as error:
        return _refused(error)
    if before := doubtful(runs):
        print(
            f"other machines' clocks may differ: watching {len(before)} status.json for"
            f" {WATCH_SECONDS:.0f} s",
            file=sys.stderr,
        )
        time.sleep(WATCH_SECONDS)
    states = []
    for folder in runs:
        try:
            states.append(state_of(folder, before))
        except ResultsError as error:
            _refused(error)
    if not states:
        return 2
    if flags.json:
        print(json.dumps([{**run._asdict(), "path": str(run.path)} for run in states], indent=2))
        return 0
    shown = [run for run in states if flags.all or run.state != "finished" or run.failed]
    console = wide_console()
    if shown:
        console.print(table(shown))
    counts = Counter(printable(run.state) for run in states)
    console.print(
        f"{len(states)} runs: "
        + ", ".join(f"{count} {state}" for state, count in counts.most_common())
    )
    return 0


def _refused(error: ResultsError) -> int:
    print(f"kvbench status: {printable(str(error))}", file=sys.stderr)
    return 2


def table(states: Sequence[State]) -> Table:
    """A line for each run."""
    drawn = Table()
    drawn.add_column("run", overflow="fold")
    drawn.add_column("state")
    add_numbers(drawn, ["done", "failed", "samples/min", "left", "last sign"])
    for run in states:
        drawn.add_row(
            printable("/".join(run.path.parts[-4:])),
            printable(run.state)
            + (f", {run.running} of {run.shards} shards" if run.shards > 1 else ""),
            f"{run.done}/{'?' if run.total is None else run.total}",
            str(run.failed),
            "" if run.rate is None else f"{run.rate:.1f}",
            _duration(run.left_s),
            _duration(run.silent_s),
        )
    return drawn


def _duration(seconds: float | None) -> str:
    return "" if seconds is None or seconds > LONGEST else str(timedelta(seconds=round(seconds)))
