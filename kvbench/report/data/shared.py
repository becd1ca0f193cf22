"""Runs on a part of their samples: what a picture joins or ranks is of the same prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pandas as pd

from kvbench.report.data.run import Run, Runs, SampleKey, is_shared
from kvbench.report.data.stats import FEWEST
from kvbench.runs.stored import Record
from kvbench.runs.summary import answers_of
from kvbench.tasks.fidelity import Fidelity

Part = frozenset[SampleKey]


def on_shared_samples(runs: Runs, ignoring: Collection[str] = ()) -> Runs:
    """Runs that can be compared, each on the samples alone that all of them have.

    Where too few are common to all, runs that lack some are left out (`most_shared`). In `arms` a
    column `sample_note` says what was left out beside a run; "" where nothing was. Timed runs are
    as they were: they are compared by length and batch.

    Parameters
    ----------
    runs
        one for all that differ in their seed alone.
    ignoring
        settings in which runs with the same samples may differ.
    """
    notes, parts = dict[int, str](), dict[int, tuple[np.ndarray, list[Record]]]()
    absent = set[int]()
    for rivals in _comparable(runs, ignoring):
        keys = {run.index: frozenset(run.scores.keys) for run in rivals}
        fulls = [keys[run.index] for run in rivals if run.is_full]
        shared = most_shared(keys.values(), max(fulls, key=len, default=frozenset[SampleKey]()))
        longer = [run for run in rivals if shared < keys[run.index]]
        without = [run.index for run in rivals if not shared <= keys[run.index]]
        note = _note(rivals, shared, longer, len(without))
        notes |= {run.index: note for run in rivals}
        absent.update(without)
        for run in longer:
            mask = np.array([key in shared for key in run.scores.keys])
            parts[run.index] = mask, run.records_of(shared)
    staying = runs.only(run for run in runs if run.index not in absent).restricted(parts)
    earlier = staying.arms.get("sample_note", pd.Series("", staying.arms.index))
    arms = staying.arms.assign(
        sample_note=[notes.get(index) or note for index, note in earlier.items()]
    )
    return Runs(arms, staying.settings, staying.scores, staying.skipped)


def _comparable(runs: Runs, ignoring: Collection[str]) -> Iterable[Sequence[Run]]:
    """The runs of each kind that can be compared sample by sample.

    Those with probes stand in other pictures, but for task=fidelity, of which they change no
    number.
    """
    rivals: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if not run.is_timed:
            shared = {key: str(run.settings[key]) for key in run.but_for_seed if is_shared(key)}
            kind = tuple(sorted(item for item in shared.items() if item[0] not in ignoring))
            apart = run.arm["probe_every"] > 0 and run.arm["task"] != Fidelity.name
            data = () if ignoring else (run.arm["data"],)
            rivals.setdefault((kind, apart, *data), []).append(run)
    return rivals.values()


def most_shared(parts: Iterable[Part], of_full: Part = frozenset()) -> Part:
    """The samples to compare runs on that have these parts of a task.

    Those that most runs have; of fewer than `FEWEST` one sample more counts as much as one run. Of
    as many samples times runs those are taken that full attention has, then the most.
    """
    parts = list(parts)
    common = frozenset.intersection(*parts)
    candidates = dict.fromkeys([common, *parts, *(part & of_full for part in parts)])

    def rank(part: Part) -> tuple[int, bool, int]:
        runs = sum(part <= other for other in parts)
        return runs * min(len(part), FEWEST), part <= of_full, len(part)

    return max(candidates, key=rank)


def _note(rivals: Sequence[Run], shared: Part, longer: Sequence[Run], without: int) -> str:
    """What was left out, in words; "" where nothing was."""
    if not longer and not without:
        return ""
    most = max((len(run.scores.ids) for run in longer), default=len(shared))
    words = f"{rivals[0].arm['task']}: the {len(shared)} samples alone that all runs here have"
    words += f", of up to {most}" if longer else ""
    lacking = f"; without {without} run{'s' * (without > 1)} that lack{'s' * (without == 1)} some"
    return f"{words}{lacking}" if without else words


def by_length(runs: Runs) -> dict[int | None, Runs]:
    """The runs at each length of prompts, with the samples of that length alone.

    Bytes of a run over several lengths are of its longest prompt, while its scores and KL are means
    over all of them; at one length both are of the same samples. Runs of one length are under None,
    as they are.
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
