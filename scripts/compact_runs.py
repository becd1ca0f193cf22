"""Pack finished runs without what a report does not need: small enough to be committed.

    python scripts/compact_runs.py results/sweep_reference results/reference.tar.xz --outputs ruler

Of each arm the newest run is kept: run.yaml, summary.json, status.json without process and host,
and of each sample all but the prompt's answers, its excerpt and the output, of which it says how
long it was: a data set's texts may not be passed on. `--outputs` names the tasks of which these are
kept, those that make their prompts. Numbers have five digits, and of a path from the root its last
part is left. `kvbench report` reads the archive as it reads the runs, and the same runs make the
same bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from bench import command_line

from kvbench.config import choices, nearest
from kvbench.report.data.compact import compacted
from kvbench.report.data.frame import collect
from kvbench.runs.archive import SUFFIX, write_archive
from kvbench.runs.stored import ResultsError, archive_of, runs_in


def compact(source: Path, outputs: Collection[str] = ()) -> dict[str, bytes]:
    """The files of the runs below `source`, by name; with answers and outputs of these tasks.

    Raises
    ------
    ResultsError
        no finished run is there.
    """
    # An archive among the runs, such as the target, is none of them.
    same_archive = [path for path in runs_in([source]) if archive_of(path) == archive_of(source)]
    folders = {
        str(path.relative_to(source)): path
        for path in map(Path, collect(same_archive).arms.get("path", ()))
    }
    if not folders:
        raise ResultsError(f"{source}: no finished run there")
    return compacted(folders, outputs)


def main() -> None:
    """Pack, and say how much is left."""
    parser = command_line(__doc__)
    parser.add_argument("source", type=Path, help="a results folder, or an archive")
    parser.add_argument(
        "target", type=Path, help=f"the archive to write, NAME{SUFFIX}; one that is there goes away"
    )
    parser.add_argument(
        "--outputs",
        default="",
        metavar="TASKS",
        help="keep answers and outputs of these: passkey,ruler",
    )
    arguments = parser.parse_args()
    outputs = [task for task in arguments.outputs.split(",") if task]
    for task in outputs:
        if task not in choices("task"):
            parser.error(f"--outputs={task}: no such task; {nearest(task, choices('task'))}")
    target: Path = arguments.target
    if not target.name.endswith(SUFFIX) or target.is_dir() or not target.parent.is_dir():
        parser.error(
            f"{target}: expected an archive to write in a folder that is there, NAME{SUFFIX}"
        )
    try:
        size = write_archive(target, compact(arguments.source, outputs))
    except (ResultsError, ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{len(collect([target]).arms)} runs, {size / 2**20:.1f} MiB in {target}")


if __name__ == "__main__":
    main()
