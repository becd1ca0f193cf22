"""Finished runs without what a report does not need, as the files of an archive.

No data set's text is among them.

Of a run run.yaml, summary.json and status.json stay, and of each sample all but the prompt's
answers, its excerpt and the output, of which it says how long it was. Numbers of samples have five
digits, and of a path from the root its last part is left. `scripts/compact_runs.py` and `kvbench
submit` pack what this gives.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.report.data.frame import content_of
from kvbench.runs.archive import rounded
from kvbench.runs.stored import Record, contents, json_in, read_run_yaml, read_samples
from kvbench.runs.summary import written

TEXTS = ("answers", "excerpt", "output")
DROPPED = ("output_ids", *TEXTS)
OF_PROCESS = ("pid", "host")


def compacted(folders: Mapping[str, Path], outputs: Collection[str] = ()) -> dict[str, bytes]:
    """The files of these runs by their names.

    Parameters
    ----------
    folders
        of runs, by the names that they shall have.
    outputs
        names of the tasks of which answers and outputs stay, those that make their prompts.

    Raises
    ------
    ResultsError
        a run cannot be read.
    """
    files: dict[str, bytes] = {}
    for name, path in folders.items():
        run = read_run_yaml(path)
        run["config"] = without_paths(run["config"])
        dropped = set(DROPPED) - set(TEXTS if run["config"]["task"]["name"] in outputs else ())
        records = [
            _compacted(record, dropped)
            for record in read_samples(path / "samples.jsonl")[0].values()
        ]
        status = {
            key: value
            for key, value in json_in(path / "status.json").items()
            if key not in OF_PROCESS
        }
        texts = {
            "run.yaml": yaml.safe_dump(run, sort_keys=False, allow_unicode=True),
            "samples.jsonl": "".join(
                json.dumps(record, separators=(",", ":")) + "\n" for record in records
            ),
            "status.json": json.dumps(status, indent=2) + "\n",
        }
        files |= {f"{name}/{file}": text.encode() for file, text in texts.items()}
        files[f"{name}/summary.json"] = contents(path / "summary.json")
    return files


def _compacted(record: Record, dropped: Collection[str]) -> Record:
    fields = {key: value for key, value in record.items() if key not in dropped}
    fields |= {"written": written(record), "content": record.get("content") or content_of(record)}
    compacted: Record = rounded(fields)
    return compacted


def without_paths(value: Any) -> Any:
    """A config in which a path from the root is its last part."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
