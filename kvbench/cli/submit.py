"""`kvbench submit RUNS`: finished runs as one file for a board, checked before they are packed.

Exit codes: 0 done, 1 a run is not whole and nothing was packed, 2 bad input.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli.report import user_folders
from kvbench.config import ConfigError
from kvbench.runs.archive import SUFFIX, write_archive
from kvbench.runs.stored import ResultsError, printable, using

if TYPE_CHECKING:
    from kvbench.report.data.run import Runs

DESCRIPTION = """\
Pack finished runs into one file for a board: settings, machine, summaries, and of each sample
scores, audit and times, without prompts, answers and outputs. A manifest has the SHA-256 of every
file.
"""
ANONYMOUS = "anonymous"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench submit", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="run folders, folders above some, or an archive",
    )
    add(
        "--out",
        type=Path,
        default=Path(f"submission{SUFFIX}"),
        metavar=f"NAME{SUFFIX}",
        help="default: %(default)s",
    )
    add(
        "--as",
        dest="who",
        default=ANONYMOUS,
        metavar="WHO",
        help='who made them, "NAME" or "NAME, https://..."',
    )
    flags = parser.parse_args(arguments)
    try:
        return _submit(flags.runs, flags.out, flags.who)
    except (ConfigError, ResultsError, OSError) as error:
        print(f"kvbench submit: {printable(str(error))}", file=sys.stderr)
        return 2


def _submit(folders: Sequence[Path], out: Path, who: str) -> int:
    from kvbench.report.data.compact import compacted
    from kvbench.report.data.frame import collect
    from kvbench.report.submissions.manifest import signed, with_manifest
    from kvbench.report.submissions.whole import faults, named

    try:
        name, link = signed(who)
    except ValueError as error:
        raise ConfigError(f"--as {error}") from error
    if not out.name.endswith(SUFFIX) or not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {out}: expected an archive to write in a folder that is there, NAME{SUFFIX}"
        )
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name another")
    # and not what kvbench ships
    yours = [path for folder in folders for path in user_folders(folder, "submit")[0]]
    runs = collect(yours, unfinished=True)
    older = [skip for skip in runs.skipped if skip.why.startswith("an older run")]
    wrong = [f"{path.name}: {why}" for path, why in runs.skipped if (path, why) not in older]
    for run in runs:
        with using(run.arm["path"]):
            wrong += [f"{named(run)}: {reason}" for reason in faults(run)]
    if wrong:
        print(*(f"not whole  {printable(line)}" for line in wrong), sep="\n")
        print(
            "nothing packed; run what is missing, or name the folders of the whole runs alone",
            file=sys.stderr,
        )
        return 1
    packed = {
        "/".join(("runs", *Path(run.arm["path"]).absolute().parts[-4:])): run.arm["path"]
        for run in runs
    }
    try:
        size = write_archive(out, with_manifest(compacted(packed), name, link))
    except ValueError as error:
        longest = max((str(Path(run.arm["path"]).absolute()) for run in runs), key=len)
        raise ConfigError(
            f"{longest}: {error}; expected folders as a run makes them, task/model/arm/id"
        ) from error
    _say(runs, out, size, f"{name}, {link}" if link else name, len(older))
    return 0


def _say(runs: Runs, out: Path, size: int, who: str, older: int) -> None:
    """What is in a submission, and what to do with it."""
    from kvbench.report.submissions.whole import named

    for run in runs:
        print(
            f"packed  {printable(named(run))}: {run.arm['n']} samples, score {run.arm['score']:.1f}"
        )
    note = f"; {older} older runs of the same arms left out" if older else ""
    print(f"\n{len(runs.arms)} runs of {who}, {size / 2**10:.0f} KiB in {out}{note}")
    print(
        "without prompts, answers and outputs; who reads it can make the runs again from their"
        " settings"
    )
    print(
        f"\nkvbench board {shlex.quote(str(out))}              # says whether a board takes it, and"
        " why not"
    )
    print(
        f"kvbench board {shlex.quote(str(out))} --out site/  # a site with its rows beside those"
        " that kvbench ships"
    )
