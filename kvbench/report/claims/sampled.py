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
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

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
# Of an arm's samples: the seed of each or the word for its content, its id, its group, its value,
# and the number that divides it (NaN: none does).
KEYS = ["which", "id"]
READINGS = [*KEYS, "group", "value", "below"]

Arms = dict[str, dict[str, list[Run]]]  # runs by the role of their arm, and its words


def sampled(
    runs: Runs | None, spec: Mapping[str, Any], coverage: float = COVERAGE
) -> Finding | Missing:
    """The number that a criterion asks for, with its interval of this coverage."""
    arms, command = arms_of(spec), beds()[spec["bed"]].command
    by_role: Arms = {}
    for role, words in ((role, words) for role, some in arms.items() for words in some):
        arm = runs_of(runs, spec["bed"], words, times=is_time(_value(role, spec)))
        if isinstance(arm, Missing):
            return arm
        if all(run.is_unbounded for run in arm):
            return Missing(f"the budget of {words} never applied: every step attended all tokens")
        by_role.setdefault(role, {})[words] = arm
    chosen = {words: arm for role in by_role.values() for words, arm in role.items()}
    if mismatch := _differing(spec, chosen):
        return mismatch
    compared, used_share, taken = _compared(spec, by_role)
    if not len(compared):
        return Missing(f"no sample of {' '.join(arms['of'][0].split())} that counts; {command}")
    divides = np.all if "interval" in spec else np.any
    if compared["below"].notna().any() and not divides(compared["below"]):
        words = " or ".join(arms.get("over", arms["of"]))
        return Missing(f"{words} has 0 there, which divides nothing; {command}")
    finding = _finding(spec, compared, coverage)
    n = round(finding.n / used_share)
    notes = [_unbounded(words, arm) for words, arm in chosen.items()]
    if len({run.shares_decode for arm in chosen.values() for run in arm}) > 1:
        notes.insert(0, "some of these arms decoded together with others, some alone")
    if "among" in arms:
        notes.insert(0, f"over the {finding.n} of {n} that {arms['among'][0]} answers")
    note = "; ".join(filter(None, notes))
    return finding._replace(n=n, note=note, used_share=used_share, taken=taken)


def _value(role: str, spec: Mapping[str, Any]) -> str:
    """The value of a criterion that is read of the arms in a role."""
    return "score" if role == "among" else str(spec["value"])


def _unbounded(words: str, arm_runs: Sequence[Run]) -> str:
    """In how many samples of an arm the budget never applied, in words; "" for none."""
    counts = [run.arm["unbounded_samples"] for run in arm_runs]
    count = sum(int(of_run) for of_run in counts if not missing(of_run))
    total = sum(run.arm["n"] for run in arm_runs)
    return f"the budget of {words} never applied in {count} of {total} samples" if count else ""


def _compared(spec: Mapping[str, Any], by_role: Arms) -> tuple[pd.DataFrame, float, float]:
    """The samples that all arms have, less or over another arm's.

    Also `used_share` and `taken`, as of `Finding`.
    """
    readings = {
        role: [
            _readings(arm, _value(role, spec), spec.get("lengths", []), role == "of")
            for arm in arms.values()
        ]
        for role, arms in by_role.items()
    }
    ours, used_share, taken = readings["of"][0], 1.0, 1.0
    if "among" in readings:
        reference = readings["among"][0]["value"].reindex(ours.index).dropna()
        ours = ours.loc[reference.index[reference == 100]]
        used_share = len(ours) / max(1, len(reference))
    others = readings.get("less") or readings.get("over") or [ours]
    shared = reduce(pd.Index.intersection, (other.index for other in others), ours.index)
    ours = ours.loc[shared].sort_values(["group", "id", "which"])
    theirs = others[0]
    if len(others) > 1:
        theirs = max(others, key=lambda other: sum(other["value"].loc[ours.index[::2]]))
        taken, ours = len(ours) / max(1, len(ours) // 2), ours[1::2]
    beside = theirs["value"].loc[ours.index]
    if "less" in readings:
        ours = ours.assign(value=ours["value"] - beside)
    return ours.assign(below=beside) if "over" in readings else ours, used_share, taken


def _finding(spec: Mapping[str, Any], compared: pd.DataFrame, coverage: float) -> Finding:
    """The number with its interval of this coverage."""
    strata = [group for _, group in compared.groupby("group")]
    values, below = ([group[name].to_numpy() for group in strata] for name in ("value", "below"))
    is_ratio = bool(compared["below"].notna().any())
    if "interval" in spec:
        # of a ratio the samples' own
        every = np.concatenate(values) / (np.concatenate(below) if is_ratio else 1.0)
        if spec["interval"] == "range":
            return ranged(every)
        return estimated(estimate([every], coverage))
    if is_ratio:
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


def _matches(settings: Mapping[str, Any], required: Mapping[str, str]) -> bool:
    """Whether a run has these settings; a key that it does not have has its usual value."""
    return all(
        value == (USUAL.get(key, "null") if missing(settings.get(key)) else show(settings[key]))
        for key, value in required.items()
    )


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
            timed = [line for run in arm for line in run.samples() if not is_disturbed(line)]
            kinds[-1]["machine"] = " as well as ".join(sorted(by_machine(timed)))
    command = beds()[spec["bed"]].command
    for key in sorted(set().union(*kinds)):
        values = {words: kind.get(key) for words, kind in zip(chosen, kinds, strict=True)}
        if len(set(values.values())) > 1:
            differing = " and ".join(f"{value} ({words})" for words, value in values.items())
            return Missing(f"runs that differ in {key}, {differing}; {command}")
    if " as well as " in (machine := kinds[0].get("machine", "")):
        return Missing(f"runs on several machines, {machine}; choose those of one; {command}")
    return None


# -- samples ---------------------------------------------------------------------------------------


def _readings(
    chosen: Sequence[Run], value: str, lengths: Sequence[int], failures: bool
) -> pd.DataFrame:
    """What the samples of an arm say, with columns `READINGS`.

    Of samples that are the same under several seeds the first counts. A failed sample has no value,
    except a score of 0 with `failures`; in an arm that others are compared with it has none at all.
    Times of a disturbed machine are left out.
    """
    frames = []
    for run in chosen:
        scores = dict(zip(run.scores.ids, run.scores.values, strict=True))
        contents = dict(zip(run.scores.ids, map(str, run.scores.contents), strict=True))
        seed, lines = show(run.settings["seed"]), []
        # repeats of a time are samples; a text that several seeds share is one
        by_seed = run.is_timed or len(lengths) > 1
        for record in run.samples():
            length = (record.get("meta") or {}).get("length")
            if (lengths and length not in lengths) or (is_time(value) and is_disturbed(record)):
                continue
            if record.get("error") and not (value == "score" and failures):
                continue
            id = record.get("sample") or record["id"]
            if numbers := [float(scores[id])] if value == "score" else _numbers(record, value):
                number, below = (*numbers, np.nan)[:2]
                which, group = seed if by_seed else contents[id], str(record.get("group") or "")
                lines.append((which, id, group, number, below, length))
        of_run = pd.DataFrame(lines, columns=[*READINGS, "length"]).drop_duplicates(
            KEYS, keep="last"
        )
        frames.append(_growth(of_run, seed, lengths) if len(lengths) > 1 else of_run)
    every = pd.concat(frames)[READINGS].drop_duplicates(KEYS).set_index(KEYS)
    return every.astype({"value": float, "below": float})


def is_time(value: str) -> bool:
    """Whether a criterion's value is of times."""
    return value.startswith(TIMES)


def _growth(readings: pd.DataFrame, seed: str, lengths: Sequence[int]) -> pd.DataFrame:
    """What a value grows by from the first of two lengths to the second, mean over repeats."""
    of = [readings["value"][readings["length"] == tokens] for tokens in lengths]
    if not all(map(len, of)):
        return readings[:0]
    grown = statistics.fmean(of[1]) - statistics.fmean(of[0])
    return pd.DataFrame([(seed, "growth", "", grown, np.nan)], columns=READINGS)


def _numbers(record: Record, value: str) -> list[float]:
    """The number of a sample at a path, or the two numbers of "A / B".

    [] where one is not there, or the second is 0. Of "B + C" all but the first may be missing.
    """
    numbers = []
    for paths in value.split(" / "):
        first, *more = (_number(record, path) for path in paths.split(" + "))
        if first is None:
            return []
        numbers.append(first + sum(number or 0.0 for number in more))
    return numbers if numbers[1:] != [0] else []


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
