"""Copy finished runs without what a report does not need, so that they are small enough to be committed.

    python scripts/compact_runs.py results/sweep_reference results/reference --outputs passkey,ruler

Of each arm the newest run is kept: run.yaml, status.json, summary.json, and of each sample all but the prompt's answers
and the output, of which it says how long it was: a data set's texts may not be passed on. `--outputs` names the tasks
of which both are kept, those that make their prompts. Numbers have five digits, and of a path from the root its last
part is left. `kvbench report` reads the copies as it reads the runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from kvbench.config import choices, nearest
from kvbench.report.data.frame import collect, content_of
from kvbench.runs.stored import ResultsError, contents, read_run_yaml, read_samples
from kvbench.runs.summary import written

TEXTS = ("answers", "output")
DROPPED = ("output_ids", *TEXTS)


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


def compact(source: Path, target: Path, outputs: Collection[str] = ()) -> list[Path]:
    """Copy the runs below `source` to the same places below `target`, answers and outputs of these tasks with them; the
    folders written.
    """
    folders = []
    for path in map(Path, collect([source]).arms["path"]):
        folder = target / path.relative_to(source)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("status.json", "summary.json"):
            if (path / name).exists():
                (folder / name).write_bytes(contents(path / name))
        told = read_run_yaml(path)
        told["config"] = without_paths(told["config"])
        dropped = set(DROPPED) - set(TEXTS if told["config"]["task"]["name"] in outputs else ())
        (folder / "run.yaml").write_text(yaml.safe_dump(told, sort_keys=False, allow_unicode=True))
        with open(folder / "samples.jsonl", "w") as out:
            for record in read_samples(path / "samples.jsonl")[0].values():
                kept = {key: value for key, value in record.items() if key not in dropped}
                kept |= {"written": written(record), "content": record.get("content") or content_of(record)}
                out.write(json.dumps(rounded(kept), separators=(",", ":")) + "\n")
        folders.append(folder)
    return folders


def main() -> None:
    """Copy, and say how much is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a results folder")
    parser.add_argument("target", type=Path, help="where the copies go; what is there of other runs goes away")
    parser.add_argument(
        "--outputs", default="", metavar="TASKS", help="keep answers and outputs of these: passkey,ruler"
    )
    arguments = parser.parse_args()
    outputs = [task for task in arguments.outputs.split(",") if task]
    for task in outputs:
        if task not in choices("task"):
            parser.error(f"--outputs={task}: no such task; {nearest(task, choices('task'))}")
    source, kept = arguments.source.resolve(), (arguments.target / "runs").resolve()
    if source.is_relative_to(kept) or kept.is_relative_to(source):
        parser.error(f"{arguments.target}: the folder to read from; expected another to write to")
    try:
        runs = collect([arguments.source])
    except ResultsError as error:
        parser.error(str(error))
    if runs.arms.empty:
        parser.error(f"{arguments.source}: no finished run there")
    shutil.rmtree(arguments.target / "runs", ignore_errors=True)
    folders = compact(arguments.source, arguments.target, outputs)
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    print(f"{len(folders)} runs, {size / 2**20:.1f} MiB in {arguments.target}")


if __name__ == "__main__":
    main()
