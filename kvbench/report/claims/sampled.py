"""Numbers of claims that are taken from runs: from one arm's samples, or from two arms' on the same
samples.

A criterion asks for
  bed         of `claims.beds`, whose words all runs share
  value       of a sample: "score" (0..100), a key such as "fidelity.kl_mean", "A / B" of two keys, or a list's quarter,
              such as "fidelity.steps.kl@last" (or @first)
  of          the arm, in words of the command line
  less, over  another arm, whose value is taken from it or divides it on the same samples; of several the best one on
              every other sample, compared on the rest
  among       an arm: only samples that it scores 100 on; those that were asked count as samples
  lengths     prompt tokens; of two, what the value grows by from the first to the second, within a seed
  interval    "mean" of repeats, by Student, as for times; "range" of what is counted; else that of scores on samples
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbench.config import show
from kvbench.report.claims.claim import beds
from kvbench.report.claims.verdict import Finding, Interval, Missing, ranged
from kvbench.report.data.run import Run, Runs, is_shared, missing
from kvbench.report.data.select import same_decode_mode
from kvbench.report.data.stats import (
    SCORES,
    difference,
    estimate,
    is_0_1,
    proportion,
    ratio,
    repeated,
)
from kvbench.runs.stored import Record
from kvbench.runs.summary import by_machine, is_disturbed

# What an arm's words mean where they do not name these keys.
USUAL = {
    "protocol.accounting": "paper",
    "protocol.question": "with",
    "probe.every": "0",
    "attention": "auto",
    "method.protect": "0.0",
}

SHARED_KEYS = ("kv", "dense_layers")  # of arms that are compared, where they do not ask for it

ROLES = ("of", "less", "over", "among")

TIMES = ("tpot_ms", "breakdown_ms")  # how the values begin that a disturbed machine spoils

Key = tuple[str, str]  # the seed of a sample or the word for its content, and its id


class Reading(NamedTuple):
    """What one sample says.

    Attributes
    ----------
    group
        of the sample.
    value
        of it.
    below
        the number that divides it; NaN where none does.
    """

    group: str
    value: float
    below: float = float("nan")


class Compared(NamedTuple):
    """Samples that count.

    Attributes
    ----------
    values
        [n] of each group of samples, less those of another arm where a criterion asks for it.
    below
        likewise what divides them; [] where nothing does.
    used_share, taken
        as of `Finding`.
    """

    values: list[np.ndarray]
    below: list[np.ndarray]
    used_share: float
    taken: float


def sampled(runs: Runs | None, spec: Mapping[str, Any]) -> Finding | Missing:
    """The number that a criterion asks for."""
    arms = arms_of(spec)
    readings: dict[str, list[dict[Key, Reading]]] = {}
    chosen: dict[str, list[Run]] = {}
    for name, several in arms.items():
        value = "score" if name == "among" else spec["value"]
        for words in several:
            those = runs_of(runs, spec["bed"], words, times=is_time(value))
            if isinstance(those, Missing):
                return those
            if all(run.is_unbounded for run in those):
                return Missing(
                    f"the budget of {words} never applied: every step attended all tokens"
                )
            chosen[words] = those
            readings.setdefault(name, []).append(
                _readings(those, value, spec.get("lengths", []), name == "of")
            )
    if mismatch := _differing(spec, chosen):
        return mismatch
    command = beds()[spec["bed"]].command
    compared = _compared(spec, readings)
    if not compared.values:
        return Missing(f"no sample of {' '.join(arms['of'][0].split())} that counts; {command}")
    if compared.below and not (np.all if "interval" in spec else np.any)(
        np.concatenate(compared.below)
    ):
        return Missing(
            f"{' or '.join(arms.get('over', arms['of']))} has 0 there, which divides nothing;"
            f" {command}"
        )
    finding = _finding(spec, compared, chosen[arms["of"][0]][0])
    decoded = {run.shares_decode for several in chosen.values() for run in several}
    n = round(finding.n / compared.used_share)
    notes = [
        f"over the {finding.n} of {n} that {arms['among'][0]} answers" if "among" in arms else "",
        "some of these arms decoded together with others, some alone" if len(decoded) > 1 else "",
        *(_unbounded(words, arm_runs) for words, arm_runs in chosen.items()),
    ]
    return finding._replace(
        n=n,
        note="; ".join(filter(None, notes)),
        used_share=compared.used_share,
        taken=compared.taken,
    )


def _unbounded(words: str, arm_runs: Sequence[Run]) -> str:
    """In how many samples of an arm the budget never applied, in words; "" for none."""
    count = sum(
        int(run.arm["unbounded_samples"])
        for run in arm_runs
        if not missing(run.arm["unbounded_samples"])
    )
    total = sum(run.arm["n"] for run in arm_runs)
    return f"the budget of {words} never applied in {count} of {total} samples" if count else ""


def _compared(
    spec: Mapping[str, Any], readings: Mapping[str, Sequence[Mapping[Key, Reading]]]
) -> Compared:
    """The samples that all arms have, by group."""
    ours, used_share, taken = readings["of"][0], 1.0, 1.0
    if "among" in readings:
        reference = readings["among"][0]
        both = ours.keys() & reference.keys()
        ours = {key: ours[key] for key in both if reference[key].value == 100}
        used_share = len(ours) / max(1, len(both))
    others = readings.get("less") or readings.get("over") or [ours]
    shared = (key for key in ours if all(key in other for other in others))
    keys = sorted(shared, key=lambda key: (ours[key].group, key[1], key[0]))
    theirs = others[0]
    if len(others) > 1:
        theirs = max(others, key=lambda other: sum(other[key].value for key in keys[::2]))
        taken, keys = len(keys) / max(1, len(keys[1::2])), keys[1::2]
    groups = dict.fromkeys(ours[key].group for key in keys)
    strata = [[key for key in keys if ours[key].group == group] for group in groups]
    values, other = (
        [np.array([of[key].value for key in stratum]) for stratum in strata]
        for of in (ours, theirs)
    )
    below = (
        other
        if "over" in readings
        else [np.array([ours[key].below for key in stratum]) for stratum in strata]
    )
    if "less" in readings:
        values = [value - another for value, another in zip(values, other, strict=True)]
    return Compared(
        values, below if "over" in readings or "/" in spec["value"] else [], used_share, taken
    )


def _finding(spec: Mapping[str, Any], compared: Compared, run: Run) -> Finding:
    """The number with its interval; `run` is of the arm whose number it is."""
    values, below = compared.values, compared.below
    if "interval" in spec:
        # of a ratio the samples' own
        every = np.concatenate(values) / (np.concatenate(below) if below else 1.0)
        if spec["interval"] == "range":
            return ranged(every)
        return Finding(*repeated(every)[:4], interval=Interval.STUDENT)
    if below:
        return Finding(*ratio(values, below)[:4], interval=Interval.BOOTSTRAP)
    if spec["value"] == "score" and "less" in spec:
        return Finding(*difference(values)[:4], interval=Interval.TANGO)
    if (
        spec["value"] == "score"
        and all(map(is_0_1, values))
        and run.scored_as not in run.all_runs.graded
    ):
        # scores that are all 100 have one, too
        return Finding(*proportion(values)[:4], interval=Interval.WILSON)
    bounds = SCORES if spec["value"] == "score" and missing(run.arm["kl_mean"]) else None
    return Finding(*estimate(values, bounds)[:4], interval=Interval.BOOTSTRAP)


def arms_of(spec: Mapping[str, Any]) -> dict[str, list[str]]:
    """The arms that a criterion asks for, in words of the command line, by the role that they have
    in its number.
    """
    named = {role: spec[role] for role in ROLES if role in spec}
    return {role: [arms] if isinstance(arms, str) else arms for role, arms in named.items()}


def runs_of(runs: Runs | None, bed: str, words: str, times: bool = False) -> list[Run] | Missing:
    """The runs of an arm, which differ in their seed alone.

    Parameters
    ----------
    times
        they are to have some, which runs that decoded together have not.
    """
    words_of_bed, command = beds()[bed]
    required = USUAL | dict(word.split("=", 1) for word in (*words_of_bed, *words.split()))
    chosen = [run for run in runs or () if _matches(run.settings, required)]
    if not chosen:
        return Missing(f"no run of {words} ({' '.join(words_of_bed)}); {command}")
    chosen = [run for run in chosen if not run.shares_decode] if times else same_decode_mode(chosen)
    if not chosen:
        return Missing(
            f"runs of {words} decoded together, and have no times; sweep.shared_decode=false makes"
            " some"
        )
    kinds = [{key: show(value) for key, value in run.but_for_seed.items()} for run in chosen]
    differing = sorted(key for key in kinds[0] if len({kind.get(key) for kind in kinds}) > 1)
    if differing:
        return Missing(
            f"several runs of {words}, which differ in {differing[0]}; choose with --where"
            f" {differing[0]}=..."
        )
    return chosen


def _differing(spec: Mapping[str, Any], chosen: Mapping[str, Sequence[Run]]) -> Missing | None:
    """Why arms cannot be compared: they differ in what neither they nor the bed ask for.

    None: they can.
    """
    named = {word.partition("=")[0] for words in chosen for word in words.split()}
    data = [
        {show(run.settings["seed"]): str(run.arm["data"]) for run in runs}
        for runs in chosen.values()
    ]
    kinds = []
    for runs, of_seed in zip(chosen.values(), data, strict=True):
        arm_settings = runs[0].but_for_seed.items()
        kind = {
            key: show(value) for key, value in arm_settings if key in SHARED_KEYS or is_shared(key)
        }
        kind |= {
            f"task's data of seed {seed}": of_seed[seed]
            for seed in set.intersection(*map(set, data))
        }
        kinds.append({key: value for key, value in kind.items() if key not in named})
    if is_time(spec["value"]):
        for kind, runs in zip(kinds, chosen.values(), strict=True):
            kind["machine"] = " as well as ".join(_machines(runs))
    command = beds()[spec["bed"]].command
    for key in sorted(set().union(*kinds)):
        if len({kind.get(key) for kind in kinds}) > 1:
            values = " and ".join(
                f"{kind.get(key)} ({words})" for words, kind in zip(chosen, kinds, strict=True)
            )
            return Missing(f"runs that differ in {key}, {values}; {command}")
    if " as well as " in (machine := kinds[0].get("machine", "")):
        return Missing(f"runs on several machines, {machine}; choose those of one; {command}")
    return None


def _machines(runs: Sequence[Run]) -> list[str]:
    """On which machines, with how many threads, the times of these runs were taken."""
    records = [record for run in runs for record in run.samples() if not is_disturbed(record)]
    return sorted(by_machine(records))


def _matches(settings: Mapping[str, Any], required: Mapping[str, str]) -> bool:
    """Whether a run has these settings; a key that it does not have has its usual value."""
    for key, value in required.items():
        setting = settings.get(key)
        shown = USUAL.get(key, "null") if missing(setting) else show(setting)
        if shown != value:
            return False
    return True


def _readings(
    chosen: Sequence[Run], value: str, lengths: Sequence[int], failures: bool
) -> dict[Key, Reading]:
    """What the samples of an arm say; of those that are the same under several seeds the first.

    A failed sample has no value, except a score of 0 with `failures`; in an arm that others are
    compared with it has none at all. Times of a disturbed machine are left out.
    """
    readings: dict[Key, Reading] = {}
    for run in chosen:
        seed = show(run.settings["seed"])
        run_readings: dict[Key, Reading] = {}
        contents = dict(zip(run.scores.ids, run.scores.contents, strict=True))
        scores = dict(zip(run.scores.ids, run.scores.values, strict=True))
        for record in run.samples():
            length = (record.get("meta") or {}).get("length")
            if (lengths and length not in lengths) or (is_time(value) and is_disturbed(record)):
                continue
            id = record.get("sample") or record["id"]
            group = str(record.get("group") or "")
            if record.get("error") and not (value == "score" and failures):
                continue
            if value == "score":
                run_readings[seed, id] = Reading(group, float(scores[id]))
            else:
                above, _, below = value.partition(" / ")
                numbers = [_number(record, path) for path in (above, below) if path]
                present = [number for number in numbers if number is not None]
                # over nothing there is no number
                if len(present) == len(numbers) and present[1:] != [0]:
                    run_readings[seed, id] = Reading(group, *present)
        if len(lengths) > 1:
            run_readings = _growth(run_readings, seed, lengths, run)
        elif not run.is_timed:
            # repeats of a time are samples; a text that several seeds share is one
            run_readings = {
                (str(contents[id]), id): reading for (_, id), reading in run_readings.items()
            }
        readings = run_readings | readings
    return readings


def is_time(value: str) -> bool:
    """Whether a criterion's value is of times."""
    return value.startswith(TIMES)


def _growth(
    readings: Mapping[Key, Reading], seed: str, lengths: Sequence[int], run: Run
) -> dict[Key, Reading]:
    """What a value grows by from the first of two lengths to the second, mean over repeats."""
    length = {record["id"]: record["meta"]["length"] for record in run.samples()}
    of = [
        [reading.value for (_, id), reading in readings.items() if length[id] == tokens]
        for tokens in lengths
    ]
    return (
        {(seed, "growth"): Reading("", statistics.fmean(of[1]) - statistics.fmean(of[0]))}
        if all(of)
        else {}
    )


def _number(record: Record, path: str) -> float | None:
    """A number of a sample by its path; None where there is none."""
    path, _, quarter = path.partition("@")
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return None
    return quarter_of(value, quarter) if quarter else float(value)


def quarter_of(values: Sequence[float], which: str) -> float:
    """The mean of the first or the last quarter of a list."""
    size = max(1, len(values) // 4)
    return statistics.fmean(values[:size] if which == "first" else values[-size:])
