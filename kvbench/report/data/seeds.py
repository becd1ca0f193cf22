"""Runs that differ in their seed alone stand together, as one run of more samples: the tables and figures of reports.

Scores are of the samples of all seeds, of what is the same sample under several seeds the mean; other numbers are the
mean of the runs', times the median of those that were taken on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.data.evidence import but_for_seed
from kvbench.report.data.frame import Runs, Scores, framed, missing
from kvbench.report.data.select import order_of
from kvbench.runs.quantities import QUANTITIES, Quantity, is_number, named
from kvbench.runs.summary import combine

SUMMED = ("n", "failed", "left_out")
OF_MACHINE = ("latency", "breakdown_ms", "hardware", "machine")  # parts of a summary that are of one machine


def over_seeds(runs: Runs, chosen: Iterable[int]) -> tuple[Runs, list[int]]:
    """The same runs, but of those chosen that differ in their seed alone only the first is left and stands for all.

    Returns:
        The runs, and which of them stand for the chosen ones. A line of `arms` has the least and the largest of its
        seeds' numbers as `spread`, by name; in `settings` the seed is all of them.
    """
    alike: dict[str, list[int]] = {}
    for run in chosen:
        arm = runs.arm[run]
        kind = {**but_for_seed(runs, run), "data": arm["data"]}
        alike.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(run)
    together = {members[0]: members for members in alike.values()}
    if all(len(members) == 1 for members in alike.values()):
        return runs, list(together)
    gone = {run for members in alike.values() for run in members[1:]}
    arms, settings = ({run: line for run, line in of.items() if run not in gone} for of in (runs.arm, runs.setting))
    scores = {run: own for run, own in runs.scores.items() if run not in gone}
    groups = runs.groups[~runs.groups["run"].isin(together)].to_dict("records") if len(runs.groups) else []
    for first, members in together.items():
        members.sort(key=lambda run: order_of(str(runs.setting[run]["seed"])))
        arms[first] = _arm([runs.arm[run] for run in members])
        seeds = {"seed": ", ".join(str(runs.setting[run]["seed"]) for run in members)}
        settings[first] = {**runs.setting[first], **but_for_seed(runs, first), **seeds}
        arms[first] |= seeds
        scores[first] = _scores([runs.scores[run] for run in members])
        if len(runs.groups):
            groups += _groups(first, runs.groups[runs.groups["run"].isin(members)])
    return (
        replace(
            runs,
            arms=framed(list(arms.values())).set_axis(list(arms)),
            groups=framed(groups),
            settings=pd.DataFrame(list(settings.values()), list(settings), dtype=object),
            scores=scores,
        ),
        list(together),
    )


def _arm(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of `Runs.arms` that stands for these."""
    if len(lines) == 1:
        return dict(lines[0])
    timed = _timed_alike(lines)
    latest = max(lines, key=lambda line: str(line["updated"]))
    found: dict[str, Any] = {**lines[0], "updated": latest["updated"], "spread": {}}
    found |= {"paths": tuple(path for line in lines for path in line["paths"])}
    found |= {"finished": all(line["finished"] for line in lines), "device_name": timed[0]["device_name"]}
    for name in (name for name in lines[0] if name in QUANTITIES or "." in name):
        quantity = named(name)
        values = [line[name] for line in (timed if _is_of_machine(quantity) else lines) if not missing(line[name])]
        if name in SUMMED:
            found[name] = sum(values)
        elif values:
            found[name] = median(values) if quantity.is_time else combine(quantity.combine, values)
            if len(values) > 1 and all(map(is_number, values)):
                found["spread"][name] = (min(values), max(values))
    for name, quantity in QUANTITIES.items():
        if quantity.ratio and not any(missing(found[part]) for part in (name, *quantity.ratio)):
            found[name] = found[quantity.ratio[0]] / found[quantity.ratio[1]]
    found["left_out"] = found["left_out"] + sum(line["n"] for line in lines if _is_timed(line) and line not in timed)
    return found


def _is_of_machine(quantity: Quantity) -> bool:
    return quantity.part in OF_MACHINE or quantity.is_time


def _is_timed(line: Mapping[str, Any]) -> bool:
    return not (missing(line["tpot_ms_mean"]) and missing(line["ttft_s"]))


def _timed_alike(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As `kvbench.runs.summary.timed_alike`, of runs; all where none is timed."""
    found: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for line in filter(_is_timed, lines):
        found.setdefault((line["disturbed"] not in (True,), str(line["device_name"])), []).append(line)
    return found[max(found, key=lambda kind: (kind[0], len(found[kind])))] if found else list(lines)


def _scores(members: Sequence[Scores]) -> Scores:
    if len(members) == 1:
        return members[0]
    lists = ([one for own in members for one in getattr(own, name)] for name in ("ids", "groups", "seeds"))
    ids, groups, seeds = lists
    values, failed, contents, kl = (
        np.concatenate([getattr(own, name) for own in members]) for name in ("values", "failed", "contents", "kl")
    )
    return Scores(ids, groups, values, failed, seeds, contents, kl)


def _groups(run: int, lines: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of `Runs.groups` of a run that stands for those of these."""
    return [
        {
            **own.iloc[0],
            "run": run,
            "score": own["score"].mean(),
            "stderr": None,
            "n": own["n"].sum(),
            "failed": own["failed"].sum(),
        }
        for _, own in lines.groupby("group", sort=False)
    ]
