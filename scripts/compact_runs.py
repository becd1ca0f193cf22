"""Pack finished runs without what a report does not need, so that they are small enough to be committed.

    python scripts/compact_runs.py results/sweep_reference results/reference.tar.xz --outputs passkey,ruler

Of each arm the newest run is kept: run.yaml, summary.json, status.json without process and host, and of each sample all
but the prompt's answers, its excerpt and the output, of which it says how long it was: a data set's texts may not be
passed on. `--outputs` names the tasks of which these are kept, those that make their prompts. Numbers have five digits,
and of a path from the root its last part is left. `kvbench report` reads the archive as it reads the runs, and the same
runs make the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from kvbench.config import choices, nearest
from kvbench.report.data.frame import collect, content_of
from kvbench.runs.archive import SUFFIX, packed
from kvbench.runs.stored import Record, ResultsError, contents, json_in, read_run_yaml, read_samples
from kvbench.runs.summary import written

TEXTS = ("answers", "excerpt", "output")
DROPPED = ("output_ids", *TEXTS)
OF_PROCESS = ("pid", "host")


def rounded(value: Any) -> Any:
    """Every number of a record with at most five digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def without_paths(value: Any) -> Any:
    """A config in which a path from the root is its last part."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def compact(source: Path, outputs: Collection[str] = ()) -> dict[str, bytes]:
    """The files of the runs below `source` by their names from there, answers and outputs of these tasks with them.

    Raises:
        ResultsError: no finished run is there.
    """
    files = {}
    for path in map(Path, collect([source]).arms.get("path", ())):
        run = read_run_yaml(path)
        run["config"] = without_paths(run["config"])
        dropped = set(DROPPED) - set(TEXTS if run["config"]["task"]["name"] in outputs else ())
        records = [_compacted(record, dropped) for record in read_samples(path / "samples.jsonl")[0].values()]
        status = {key: value for key, value in json_in(path / "status.json").items() if key not in OF_PROCESS}
        own = {
            "run.yaml": yaml.safe_dump(run, sort_keys=False, allow_unicode=True),
            "samples.jsonl": "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records),
            "status.json": json.dumps(status, indent=2) + "\n",
        }
        files |= {str(path.relative_to(source) / name): text.encode() for name, text in own.items()}
        files[str(path.relative_to(source) / "summary.json")] = contents(path / "summary.json")
    if not files:
        raise ResultsError(f"{source}: no finished run there")
    return files


def _compacted(record: Record, dropped: Collection[str]) -> Record:
    kept = {key: value for key, value in record.items() if key not in dropped}
    kept |= {"written": written(record), "content": record.get("content") or content_of(record)}
    compacted: Record = rounded(kept)
    return compacted


def main() -> None:
    """Pack, and say how much is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a results folder, or an archive")
    parser.add_argument("target", type=Path, help=f"the archive to write, NAME{SUFFIX}; one that is there goes away")
    parser.add_argument(
        "--outputs", default="", metavar="TASKS", help="keep answers and outputs of these: passkey,ruler"
    )
    arguments = parser.parse_args()
    outputs = [task for task in arguments.outputs.split(",") if task]
    for task in outputs:
        if task not in choices("task"):
            parser.error(f"--outputs={task}: no such task; {nearest(task, choices('task'))}")
    target: Path = arguments.target
    if not target.name.endswith(SUFFIX) or target.is_dir() or not target.parent.is_dir():
        parser.error(f"{target}: expected an archive to write in a folder that is there, NAME{SUFFIX}")
    try:
        archive = packed(compact(arguments.source, outputs))
    except (ResultsError, ValueError) as error:
        parser.error(str(error))
    whole = target.with_name(f".{target.name}.new")
    whole.write_bytes(archive)
    whole.replace(target)
    print(f"{len(collect([target]).arms)} runs, {len(archive) / 2**20:.1f} MiB in {target}")


if __name__ == "__main__":
    main()
