"""Numbers of claims from runs: from one arm's samples, or from two arms' on the same samples.

A criterion asks for
  bed         of `claims.beds`, whose words all runs share
  value       of a sample: "score" (0..100), a key such as "fidelity.kl_mean", "A / B" of two keys,
              "B + C" of parts of a step, or a list's quarter, such as "fidelity.steps.kl@last" (or
              @first)
  of          the arm, in words of the command line
  less, over  another arm, whose value is taken from it or divides it on the same samples; of
              several the best one on every other sample, compared on the rest
  among       an arm: only samples that it scores 100 on; the number of samples is of all
  lengths     prompt tokens; of two, what the value grows by from the first to the second, within a
              seed
  interval    "mean" of repeats, by Student, as for times; "range" of what is counted; else that of
              scores on samples
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbench.config import show
from kvbench.report.claims.claim import beds
from kvbench.report.claims.verdict import Finding, Missing, estimated, ranged
from kvbench.report.data.run import Run, Runs, is_shared, missing
from kvbench.report.data.select import same_decode_mode
from kvbench.report.data.stats import COVERAGE, difference, estimate, mean_score, ratio
from kvbench.runs.stored import Record
from kvbench.runs.summary import by_machine, is_disturbed

# What an arm's words mean where they do not name these keys.
USUAL = {
    "protocol.accounting": "paper",
    "protocol.question": "with",
    "probe.every": "0",
    "attention": "auto",
    "kv": "native",
    "method.protect": "0.0",
}

SHARED_KEYS = ("kv", "dense_layers")  # of arms that are compared, where they do not ask for it

ROLES = ("of", "less", "over", "among")

# how the values begin that a disturbed machine spoils
TIMES = ("tpot_ms", "breakdown_ms", "ttft_s", "tt2t_s")

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


def sampled(
    runs: Runs | None, spec: Mapping[str, Any], coverage: float = COVERAGE
) -> Finding | Missing:
    """The number that a criterion asks for, with its interval of this coverage."""
    arms, command = arms_of(spec), beds()[spec["bed"]].command
    by_role = _by_role(runs, spec)
    if isinstance(by_role, Missing):
        return by_role
    chosen = {words: arm for role in by_role.values() for words, arm in role.items()}
    if mismatch := _differing(spec, chosen):
        return mismatch
    compared = _compared(spec, by_role)
    if not compared.values:
        return Missing(f"no sample of {' '.join(arms['of'][0].split())} that counts; {command}")
    divides = np.all if "interval" in spec else np.any
    if compared.below and not divides(np.concatenate(compared.below)):
        words = " or ".join(arms.get("over", arms["of"]))
        return Missing(f"{words} has 0 there, which divides nothing; {command}")
    finding = _finding(spec, compared, coverage)
    n = round(finding.n / compared.used_share)
    notes = [_unbounded(words, arm) for words, arm in chosen.items()]
    if len({run.shares_decode for arm in chosen.values() for run in arm}) > 1:
        notes.insert(0, "some of these arms decoded together with others, some alone")
    if "among" in arms:
        notes.insert(0, f"over the {finding.n} of {n} that {arms['among'][0]} answers")
    note, share = "; ".join(filter(None, notes)), compared.used_share
    return finding._replace(n=n, note=note, used_share=share, taken=compared.taken)


def _by_role(
    runs: Runs | None, spec: Mapping[str, Any]
) -> dict[str, dict[str, list[Run]]] | Missing:
    """The runs of each arm, by its role in the number and its words; or why one has none."""
    by_role: dict[str, dict[str, list[Run]]] = {}
    for role, arms in arms_of(spec).items():
        for words in arms:
            arm = runs_of(runs, spec["bed"], words, times=is_time(_value(role, spec)))
            if isinstance(arm, Missing):
                return arm
            if all(run.is_unbounded for run in arm):
                why = f"the budget of {words} never applied: every step attended all tokens"
                return Missing(why)
            by_role.setdefault(role, {})[words] = arm
    return by_role


def _value(role: str, spec: Mapping[str, Any]) -> str:
    """The value of a criterion that is read of the arms in a role."""
    return "score" if role == "among" else str(spec["value"])


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
    spec: Mapping[str, Any], by_role: Mapping[str, Mapping[str, Sequence[Run]]]
) -> Compared:
    """The samples that all arms have, by group."""
    readings = {
        role: [
            _readings(arm, _value(role, spec), spec.get("lengths", []), role == "of")
            for arm in arms.values()
        ]
        for role, arms in by_role.items()
    }
    ours, used_share = readings["of"][0], 1.0
    if "among" in readings:
        reference = readings["among"][0]
        both = ours.keys() & reference.keys()
        ours = {key: ours[key] for key in both if reference[key].value == 100}
        used_share = len(ours) / max(1, len(both))
    others = readings.get("less") or readings.get("over") or [ours]
    shared = (key for key in ours if all(key in other for other in others))
    keys = sorted(shared, key=lambda key: (ours[key].group, key[1], key[0]))
    theirs, taken = others[0], 1.0
    if len(others) > 1:
        theirs = max(others, key=lambda other: sum(other[key].value for key in keys[::2]))
        taken, keys = len(keys) / max(1, len(keys[1::2])), keys[1::2]
    groups = dict.fromkeys(ours[key].group for key in keys)
    strata = [[key for key in keys if ours[key].group == group] for group in groups]
    values, below = _arrays(ours, strata, "value"), _arrays(theirs, strata, "value")
    if "less" in readings:
        values = [value - other for value, other in zip(values, below, strict=True)]
    if "over" not in readings:
        below = _arrays(ours, strata, "below") if "/" in spec["value"] else []
    return Compared(values, below, used_share, taken)


def _arrays(
    readings: Mapping[Key, Reading], strata: Sequence[Sequence[Key]], name: str
) -> list[np.ndarray]:
    """This field of the readings in each stratum."""
    return [np.array([getattr(readings[key], name) for key in stratum]) for stratum in strata]


def _finding(spec: Mapping[str, Any], compared: Compared, coverage: float) -> Finding:
    """The number with its interval of this coverage."""
    values, below = compared.values, compared.below
    if "interval" in spec:
        # of a ratio the samples' own
        every = np.concatenate(values) / (np.concatenate(below) if below else 1.0)
        if spec["interval"] == "range":
            return ranged(every)
        return estimated(estimate([every], coverage))
    if below:
        return estimated(ratio(values, below, coverage))
    if spec["value"] != "score":
        return estimated(estimate(values, coverage))
    return estimated((difference if "less" in spec else mean_score)(values, coverage))


def arms_of(spec: Mapping[str, Any]) -> dict[str, list[str]]:
    """The arms that a criterion asks for, in words of the command line, by role."""
    named = {role: spec[role] for role in ROLES if role in spec}
    return {role: [arms] if isinstance(arms, str) else arms for role, arms in named.items()}


def runs_of(runs: Runs | None, bed: str, words: str, times: bool) -> list[Run] | Missing:
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
        {show(run.settings["seed"]): str(run.arm["data"]) for run in arm} for arm in chosen.values()
    ]
    seeds = set.intersection(*map(set, data))
    kinds = []
    for arm, of_seed in zip(chosen.values(), data, strict=True):
        settings = arm[0].but_for_seed.items()
        kind = {key: show(value) for key, value in settings if key in SHARED_KEYS or is_shared(key)}
        kind |= {f"task's data of seed {seed}": of_seed[seed] for seed in seeds}
        kinds.append({key: value for key, value in kind.items() if key not in named})
        if is_time(spec["value"]):
            kinds[-1]["machine"] = " as well as ".join(_machines(arm))
    command = beds()[spec["bed"]].command
    for key in sorted(set().union(*kinds)):
        values = {words: kind.get(key) for words, kind in zip(chosen, kinds, strict=True)}
        if len(set(values.values())) > 1:
            differing = " and ".join(f"{value} ({words})" for words, value in values.items())
            return Missing(f"runs that differ in {key}, {differing}; {command}")
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
    """What the samples of an arm say.

    Of samples that are the same under several seeds the first counts. A failed sample has no value,
    except a score of 0 with `failures`; in an arm that others are compared with it has none at all.
    Times of a disturbed machine are left out.
    """
    readings: dict[Key, Reading] = {}
    for run in chosen:
        seed = show(run.settings["seed"])
        contents = dict(zip(run.scores.ids, run.scores.contents, strict=True))
        scores = dict(zip(run.scores.ids, run.scores.values, strict=True))
        of_run: dict[Key, Reading] = {}
        for record in run.samples():
            length = (record.get("meta") or {}).get("length")
            if (lengths and length not in lengths) or (is_time(value) and is_disturbed(record)):
                continue
            if record.get("error") and not (value == "score" and failures):
                continue
            id = record.get("sample") or record["id"]
            if numbers := [float(scores[id])] if value == "score" else _numbers(record, value):
                of_run[seed, id] = Reading(str(record.get("group") or ""), *numbers)
        if len(lengths) > 1:
            of_run = _growth(of_run, seed, lengths, run)
        elif not run.is_timed:
            # repeats of a time are samples; a text that several seeds share is one
            of_run = {(str(contents[id]), id): reading for (_, id), reading in of_run.items()}
        readings = of_run | readings
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


def _numbers(record: Record, value: str) -> list[float]:
    """The number of a sample at a path, or the two numbers of "A / B".

    [] where one is not there, or the second is 0.
    """
    numbers = [_sum(record, paths.split(" + ")) for paths in value.split(" / ")]
    present = [number for number in numbers if number is not None]
    return present if len(present) == len(numbers) and present[1:] != [0] else []


def _sum(record: Record, paths: Sequence[str]) -> float | None:
    """The sum of a sample's numbers at these paths, of which all but the first may be missing."""
    first, *more = (_number(record, path) for path in paths)
    return None if first is None else first + sum(number or 0.0 for number in more)


def _number(record: Record, path: str) -> float | None:
    """A number of a sample by its path; None where there is none."""
    keys, *quarter = path.split("@")
    value: Any = record
    for key in keys.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return None
    return quarter_of(value, *quarter) if quarter else float(value)


def quarter_of(values: Sequence[float], which: str) -> float:
    """The mean of the first or the last quarter of a list."""
    size = max(1, len(values) // 4)
    return statistics.fmean(values[:size] if which == "first" else values[-size:])
