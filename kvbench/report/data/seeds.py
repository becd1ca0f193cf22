"""Runs that differ in their seed alone become one run of more samples.

Scores are of the samples of all seeds, of what is the same sample under several seeds the mean;
other numbers are the mean of the runs' by their samples, times the median of those that were taken
on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.data.run import Run, Runs, Scores, framed, missing
from kvbench.report.data.select import order_of
from kvbench.runs.quantities import QUANTITIES, is_number, named
from kvbench.runs.summary import combine

SUMMED = ("n", "failed", "unbounded_samples", "left_out", "tokens")
# parts of a summary that are of one machine
OF_MACHINE = ("latency", "breakdown_ms", "hardware", "machine")


def over_seeds(runs: Runs, chosen: Iterable[Run]) -> tuple[Runs, list[Run]]:
    """The same runs, in which one stands for all that differ in their seed alone.

    It is the first of the chosen ones; of an arm of which none is chosen, and with which others are
    compared, the first of all.

    Returns
    -------
    tuple[Runs, list[Run]]
        The runs, and which of them stand for the chosen ones. A line of `arms` has the least and
        the largest of its seeds' numbers as `spread`, by name; in `settings` the seed is all of
        them.
    """
    chosen_arms, all_arms = dict[str, list[Run]](), dict[str, list[Run]]()
    chosen = list(chosen)
    for some, by_arm in ((chosen, chosen_arms), (runs, all_arms)):
        for run in some:
            kind = {**run.but_for_seed, "data": run.arm["data"]}
            by_arm.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(run)
    joined = {
        members[0]: members for members in (all_arms | chosen_arms).values() if len(members) > 1
    }
    first = [members[0] for members in chosen_arms.values()]
    if not joined:
        return runs, first
    gone = {run for members in joined.values() for run in members[1:]}
    remaining = [run for run in runs if run not in gone]
    arms, settings = [], []
    scores = {}
    for run in remaining:
        members = sorted(
            joined.get(run, [run]), key=lambda member: order_of(str(member.settings["seed"]))
        )
        seeds = {"seed": ", ".join(str(member.settings["seed"]) for member in members)}
        arms.append(_arm([member.arm for member in members]) | seeds)
        settings.append({**run.settings, **run.but_for_seed, **seeds})
        scores[run.index] = _scores([member.scores for member in members])
    index = list(scores)
    frames = framed(arms).set_axis(index), pd.DataFrame(settings, index, dtype=object)
    whole = Runs(*frames, scores, runs.skipped)
    return whole, [whole[run.index] for run in first]


def _arm(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of `Runs.arms` that stands for these."""
    if len(lines) == 1:
        return dict(lines[0])
    timed = _timed_on_same_machine(lines)
    latest = max(lines, key=lambda line: str(line["updated"]))
    joined: dict[str, Any] = {**lines[0], "updated": latest["updated"], "spread": {}}
    joined |= {"paths": tuple(path for line in lines for path in line["paths"])}
    joined["finished"] = all(line["finished"] for line in lines)
    joined["device_name"] = timed[0]["device_name"]
    for name in (name for name in lines[0] if name in QUANTITIES or "." in name):
        quantity = named(name)
        of_machine = quantity.part in OF_MACHINE or quantity.is_time
        measured = timed if of_machine else lines
        there = [line for line in measured if not missing(line[name])]
        values = [line[name] for line in there]
        if name in SUMMED:
            joined[name] = sum(values)
        elif values:
            by_sample = [line[name] for line in there for _ in range(line["n"])]
            mean = median(values) if quantity.is_time else combine(quantity.combine, by_sample)
            joined[name] = mean
            if len(values) > 1 and all(map(is_number, values)):
                joined["spread"][name] = (min(values), max(values))
    for name, quantity in QUANTITIES.items():
        if quantity.ratio and not any(missing(joined[part]) for part in (name, *quantity.ratio)):
            joined[name] = joined[quantity.ratio[0]] / joined[quantity.ratio[1]]
    elsewhere = (line["n"] for line in lines if _is_timed(line) and line not in timed)
    joined["left_out"] += sum(elsewhere)
    return joined


def _is_timed(line: Mapping[str, Any]) -> bool:
    return not all(missing(line[name]) for name in ("tpot_ms_mean", "ttft_s", "own_ms"))


def _timed_on_same_machine(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As `kvbench.runs.summary.same_machine`, of runs; all where none is timed."""
    by_machine: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for line in filter(_is_timed, lines):
        kind = (line["disturbed"] not in (True,), str(line["device_name"]))
        by_machine.setdefault(kind, []).append(line)
    if not by_machine:
        return list(lines)
    return by_machine[max(by_machine, key=lambda kind: (kind[0], len(by_machine[kind])))]


def _scores(members: Sequence[Scores]) -> Scores:
    if len(members) == 1:
        return members[0]

    def joined(name: str) -> list[str]:
        return [label for member in members for label in getattr(member, name)]

    arrays = {
        name: np.concatenate([getattr(member, name) for member in members])
        for name in ("values", "failed", "contents", "kl")
    }
    return Scores(ids=joined("ids"), groups=joined("groups"), seeds=joined("seeds"), **arrays)
