"""Runs split by the length of their prompts: a method's cost and nearness at one length.

Bytes of a run over several lengths are of its longest prompt, while its scores and KL are means
over all of them; at one length both are of the same samples.
"""

from __future__ import annotations

import numpy as np

from kvbench.report.data.run import Run, Runs
from kvbench.runs.stored import Record
from kvbench.runs.summary import answers_of


def by_length(runs: Runs) -> dict[int | None, Runs]:
    """The runs at each length of prompts, with the samples of that length alone.

    Runs of one length are under None, as they are.
    """
    parts: dict[int | None, list[tuple[Run, list[Record] | None]]] = {}
    for run in runs:
        lengths = str(run.settings.get("task.lengths", "")).strip("[]").split(",")
        if run.is_timed or len(lengths) < 2:
            parts.setdefault(None, []).append((run, None))
            continue
        records: dict[int, list[Record]] = {}
        for record in run.samples():
            records.setdefault(record["meta"]["length"], []).append(record)
        for length, length_records in sorted(records.items()):
            parts.setdefault(length, []).append((run, length_records))
    return {length: _part(runs, part) for length, part in parts.items()}


def _part(runs: Runs, part: list[tuple[Run, list[Record] | None]]) -> Runs:
    restricted = {}
    for run, records in part:
        if records is not None:
            ids = {answers[0].get("sample") or answers[0]["id"] for answers in answers_of(records)}
            restricted[run.index] = np.array([id in ids for id in run.scores.ids]), records
    return runs.only(run for run, _ in part).restricted(restricted)
