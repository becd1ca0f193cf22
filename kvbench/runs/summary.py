"""The summary of a run, from its sample records alone. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from kvbench.runs.quantities import (
    JOINTLY,
    OF_DELTA_P,
    OF_KL,
    OF_QUARTERS,
    PASSED,
    QUANTITIES,
    find,
    is_number,
    machine_name,
)

Record = TypeVar("Record", bound=Mapping[str, Any])
# of a loop: repeats, tokens in all, and tokens of its n-gram
LOOP_TIMES, LOOP_LEAST, LOOP_MOST = 4, 32, 128
DIGITS = 5e-5  # relative: numbers of an archive have five digits
# of the threads' cores, taken away by others: beyond that a time is not the method's
DISTURBED = 0.1
FEW = 10  # tokens: an error over as few is none, as in llama.cpp, nor is a quarter of as few


def summarise(records: Iterable[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """What summary.json holds, from sample records alone.

    Scores are means x 100 over all samples, a failed one counting 0; `score_ok` leaves the failed
    out; `stderr` is the standard error of the mean in the same units. Where a prompt has several
    answers, its score is their mean, the error is over prompts, and `pass_at_<k>` is there.
    Timings, audit, hardware and probes are over samples that did not fail, and timings and hardware
    over those of one machine (`same_machine`); a broken budget rule, which fails its sample, still
    shows in the audit. Where samples decoded together (`decode`), the others give no times: there
    is none of a whole token, and the parts of a step are the method's own. Where samples belong to
    several groups (subsets, lengths), `groups` has each one's own, and `macro` the plain mean of
    theirs. What no sample measured is None or absent.

    Parameters
    ----------
    records
        one record a sample, as in samples.jsonl.
    metric
        the main score's name.
    """
    records = list(records)
    finished = [record for record in records if not record.get("error")]
    names = sorted({metric}.union(*(record.get("scores") or {} for record in finished)))
    main = _of_prompts(records, metric)
    groups = _groups(records, metric)
    jointly = any(record.get("decode") == JOINTLY for record in records)
    timed = same_machine(
        [record for record in finished if (record.get("decode") == JOINTLY) == jointly]
    )
    summary: dict[str, Any] = {
        "score": _percent(main),
        "score_ok": _percent(_of_prompts(finished, metric)),
        "scores": {name: _percent(_scores(records, name)) for name in names},
        "n": len(records),
        "failed": len(records) - len(finished),
        **_cut(records),
        **_unbounded(finished),
        **_passed(records, metric),
        "stderr": _percent_error(main),
        "decode": JOINTLY if jointly else "",
        "groups": groups,
        "macro": _macro(groups),
        "latency": _latency(timed),
        "machine": _machine(timed, sum(map(len, by_machine(finished).values()))),
        "hardware": _combined("hardware", timed),
        "output": _written(finished),
        "fidelity": _nearness([record for record in finished if record.get("fidelity")], metric),
        **{part: _combined(part, finished) for part in ("audit", "probe")},
    }
    if any((record.get("audit") or {}).get("over_rule") for record in records):
        summary["audit"] = {**summary["audit"], "over_rule": True}
    optional = (
        "decode",
        "groups",
        "macro",
        "machine",
        "audit",
        "hardware",
        "output",
        "probe",
        "fidelity",
    )
    return {key: value for key, value in summary.items() if value or key not in optional}


def answers_of(records: Iterable[Record]) -> list[list[Record]]:
    """The answers to each prompt, in order of appearance; each record is one where prompts have one
    answer.
    """
    by_sample: dict[Any, list[Record]] = {}
    for place, record in enumerate(records):
        by_sample.setdefault(record.get("sample", record.get("id", place)), []).append(record)
    return list(by_sample.values())


def _passed(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """How many prompts there are, and pass@k, 0-100, where prompts have several answers; {} where
    they have one.

    pass@k is the chance that one of k answers is right, which has a score of 1: of a prompt with n
    answers, c of them right, 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021
    (Evaluating Large Language Models Trained on Code, eq. 1), and its mean over prompts.
    """
    prompts = answers_of(records)
    if len(prompts) == len(records):
        return {}
    counts = [
        (len(answers), sum(_score(record, metric) > 1 - 1e-9 for record in answers))
        for answers in prompts
    ]
    least = min(n for n, _ in counts)
    pass_rates = {
        name: math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)
        for name, k in PASSED.items()
        if k <= least
    }
    return {"prompts": len(prompts), **{name: 100 * share for name, share in pass_rates.items()}}


def _written(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """How long the outputs are that a model wrote, and how many of them ended in a loop; {} where
    it wrote none.
    """
    outputs = [
        facts
        for record in records
        if not (record.get("fidelity") or record.get("hardware")) and (facts := written(record))
    ]
    if not outputs:
        return {}
    lengths = [output["length"] for output in outputs]
    return {
        "tokens_mean": statistics.fmean(lengths),
        "tokens_median": statistics.median(lengths),
        "looped": statistics.fmean(output["looped"] for output in outputs),
    }


def written(record: Mapping[str, Any]) -> dict[str, int]:
    """How long a sample's output is, and whether it ended in a loop; a copy without the output has
    it written down.
    """
    output = record.get("output_ids")
    return (
        {"length": len(output), "looped": is_looped(output)}
        if output
        else record.get("written") or {}
    )


def is_looped(output: Sequence[int]) -> bool:
    """Whether the ids of an output end in one n-gram over and over: four times or more, and for 32
    tokens or more.

    n is at most 128. An output that a stop token has ended does not end in a loop.
    """
    for n in range(1, min(LOOP_MOST, len(output) // LOOP_TIMES) + 1):
        if output[-1] != output[-1 - n]:
            continue
        tail = output[-max(LOOP_TIMES * n, LOOP_LEAST) :]
        if len(tail) >= LOOP_LEAST and tail[n:] == tail[:-n]:
            return True
    return False


def _cut(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many samples have lost the middle of their prompts, and which share of all tokens that
    is; {} for none.
    """
    lost = [record.get("cut_tokens") or 0 for record in records]
    if not any(lost):
        return {}
    remaining = sum(record.get("prompt_tokens") or 0 for record in records)
    return {"cut_samples": sum(map(bool, lost)), "cut_share": sum(lost) / (sum(lost) + remaining)}


def _unbounded(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """In how many samples the budget never applied; {} for none."""
    count = sum(map(is_unbounded, records))
    return {"unbounded_samples": count} if count else {}


def is_unbounded(record: Mapping[str, Any]) -> bool:
    """Whether a sample's budget never applied: in each step every KV head of each sparse layer
    attended all tokens.

    After N tokens the counts are then N + 1, N + 2, ... up to the most, whose mean lies half-way;
    steps or heads that attend less lower it. Of a question that is read token by token every token
    is a step.
    """
    audit = record.get("audit") or {}
    numbers: tuple[Any, ...] = (
        audit.get("budget"),
        audit.get("attended_mean"),
        audit.get("attended_max"),
        record.get("prompt_tokens"),
    )
    if not all(map(is_number, numbers)):
        return False
    _, mean, most, tokens = numbers
    if "turn_tokens" not in audit:
        tokens -= record.get("question_tokens") or 0
    return bool(most > tokens and abs(mean - (tokens + 1 + most) / 2) <= DIGITS * mean)


def summarise_repeats(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """As `summarise`, of repeats of one timed sample on one machine: each time is the median of
    `repeats` of them.

    The parts of a step are those of the repeat with the median time per token, of an even number
    the mean of the two in the middle, so that they still add up to it. `spread` has the least and
    the largest of each, as pairs by the names in `latency`; {} of a single one.
    """
    timed = same_machine(records)
    ordered = sorted(timed, key=lambda record: _times(record).get("tpot_ms_mean") or 0.0)
    middle = ordered[max(0, len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    least, largest = (_latency(timed, end) for end in (min, max))
    several = [name for name in least if is_number(least[name])] if len(timed) > 1 else []
    return {
        **summarise(records, metric),
        "latency": (
            _latency(timed, statistics.median) | {"breakdown_ms": _latency(middle)["breakdown_ms"]}
        ),
        "repeats": len(timed),
        "spread": {name: (least[name], largest[name]) for name in several},
    }


# -- where times are from --------------------------------------------------------------------------


def is_disturbed(record: Mapping[str, Any]) -> bool:
    """Whether other processes or guests took cores that a sample's threads were to have, a tenth of
    them or more.
    """
    machine = record.get("machine") or {}
    taken = (machine.get("others") or 0.0) + (machine.get("steal") or 0.0)
    threads, cores = machine.get("threads", 0), machine.get("cores", 0)
    return bool(taken > max(0, cores - threads) + DISTURBED * threads)


def by_machine(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The timed ones of these records by the name of their machine, as they appear; failed ones
    have no times.
    """
    by_name: dict[str, list[Record]] = {}
    for record in records:
        timed = (
            record.get("tpot_ms") or record.get("breakdown_ms") or record.get("ttft_s") is not None
        )
        if timed and not record.get("error"):
            by_name.setdefault(machine_name(record.get("machine") or {}), []).append(record)
    return by_name


def same_machine(records: Iterable[Record]) -> list[Record]:
    """Those of these records whose times may be averaged: of one machine, which did nothing else.

    Of several machines that with the most such; where all were disturbed, that with the most.
    """
    timed = by_machine(records).values()
    undisturbed = [[record for record in group if not is_disturbed(record)] for group in timed]
    return max(undisturbed, key=len, default=[]) or max(timed, key=len, default=[])


def _machine(timed: Sequence[Mapping[str, Any]], of: int) -> dict[str, Any]:
    """What these times are of, whether all were disturbed, and how many samples' times are not
    among them.
    """
    combined = _combined("machine", timed)
    caveats = {"disturbed": is_disturbed(timed[0]), "left_out": of - len(timed)} if timed else {}
    return {**combined, **caveats} if combined or any(caveats.values()) else {}


def _score(record: Mapping[str, Any], name: str) -> float:
    """A record's score, 0..1; 0 where it failed or the score is missing or not a number."""
    value: Any = (record.get("scores") or {}).get(name)
    return float(value) if not record.get("error") and is_number(value) else 0.0


def _scores(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The scores of that name, 0..1, of the samples that have it, and of the failed ones in their
    groups.

    Subsets may have metrics of their own. A sample may have a score named after its kind, a value
    of its `meta`: only samples of that kind count there.
    """
    having = [name in (record.get("scores") or {}) for record in records]
    groups = {record.get("group") for record, has in zip(records, having, strict=True) if has}
    of_kind = [name in (record.get("meta") or {}).values() for record in records]
    failed = [
        bool(record.get("error"))
        and record.get("group") in groups
        and (is_of_kind or not any(of_kind))
        for record, is_of_kind in zip(records, of_kind, strict=True)
    ]
    counts = [has or lost or not groups for has, lost in zip(having, failed, strict=True)]
    return _of_prompts(compress(records, counts), name)


def _of_prompts(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The score of each prompt, 0..1: the mean over its answers."""
    return [
        statistics.fmean(_score(record, name) for record in answers)
        for answers in answers_of(records)
    ]


def _percent(scores: Sequence[float]) -> float | None:
    mean = _mean(scores)
    return None if mean is None else 100 * mean


def _percent_error(scores: Sequence[float]) -> float | None:
    error = _standard_error(scores)
    return None if error is None else 100 * error


def _standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n), s the sample standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def _groups(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[str, Any]]:
    """Main score, standard error, samples and failures of each group, in order of appearance; {}
    for a single one.
    """
    members: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        members.setdefault(record.get("group") or "", []).append(record)
    if len(members) < 2:
        return {}
    results = {}
    for group, group_records in members.items():
        scores = _of_prompts(group_records, metric)
        failed = sum(bool(record.get("error")) for record in group_records)
        results[group] = {
            "score": _percent(scores),
            "stderr": _percent_error(scores),
            "n": len(group_records),
            "failed": failed,
        }
    return results


def _macro(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The plain mean over groups, whatever their sizes, and its standard error; samples of no group
    are left out.
    """
    named_groups = [group for name, group in groups.items() if name]
    if not named_groups:
        return {}
    errors = [group["stderr"] for group in named_groups]
    has_errors = None not in errors
    return {
        "score": math.fsum(group["score"] for group in named_groups) / len(named_groups),
        "stderr": (
            math.sqrt(math.fsum(error**2 for error in errors)) / len(named_groups)
            if has_errors
            else None
        ),
    }


Centre = Callable[[list[Any]], Any]  # numbers, one or more, to one


def _latency(
    records: Sequence[Mapping[str, Any]], centre: Centre = statistics.fmean
) -> dict[str, Any]:
    """Means over samples; tpot_ms_p50 and _p95 are the mean of the samples' own percentiles over
    their steps.
    """
    times = [_times(record) for record in records]
    breakdown = [record["breakdown_ms"] for record in records if record.get("breakdown_ms")]
    parts = dict.fromkeys(part for sample in breakdown for part in sample)
    names = [name for name, quantity in QUANTITIES.items() if quantity.part == "latency"]
    return {
        **{name: _of_numbers(centre, (sample.get(name) for sample in times)) for name in names},
        # A part that a sample never entered took 0 ms there: so the means still add up to the step.
        "breakdown_ms": {
            part: _of_numbers(centre, (sample.get(part, 0.0) for sample in breakdown))
            for part in parts
        },
    }


def _times(record: Mapping[str, Any]) -> dict[str, Any]:
    """The times of a sample by name: those that its record nests, as "tpot_ms": {"mean": 4.0}, as
    "tpot_ms_mean".
    """
    nested = {f"tpot_ms_{name}": value for name, value in (record.get("tpot_ms") or {}).items()}
    if record.get("ttft_s") is not None and record.get("prefill_ms"):
        nested["index_s"] = record["prefill_ms"].get("index_build", 0.0) / 1e3
    return {**record, **nested}


def _combined(part: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value per key of a part of several samples; nested values are left to the
    sample lines.
    """
    values: dict[str, list[Any]] = {}
    for record in records:
        for key, value in (record.get(part) or {}).items():
            if _is_flat(value):
                values.setdefault(key, []).append(value)
    return {key: combine(find(part, key).combine, collected) for key, collected in values.items()}


def combine(how: str, values: list[Any]) -> Any:
    """What values of one key come to: flags to any, words to those that differ, numbers to their
    mean or maximum.

    How is what `kvbench.runs.quantities` says; a flag or a word of a method's own shows what it is.
    """
    if how == "any" or all(isinstance(value, bool) for value in values):
        return any(values)
    if all(value == values[0] for value in values):
        return values[0]
    if how == "words" or not all(map(is_number, values)):
        return sorted(set(map(str, values)))
    return max(values) if how == "max" else _mean(values)


def _nearness(stretches: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """How near to full attention a method stayed: means over stretches of text, and what follows
    from their tokens.

    Parameters
    ----------
    stretches
        records of `task=fidelity`.
    metric
        the score that is the share of steps with full attention's top token.
    """
    if not stretches:
        return {}
    near = [record["fidelity"] for record in stretches]
    numbers = {
        name: _mean(stretch.get(name) for stretch in near)
        for name in ("kl_mean", "nll", "nll_full")
    }
    if len(near) > 1:
        numbers["kl_stderr"] = _standard_error([stretch["kl_mean"] for stretch in near])
        numbers["ln_perplexity_ratio_stderr"] = _standard_error(
            [stretch["nll"] - stretch["nll_full"] for stretch in near]
        )
    steps = [stretch["steps"] for stretch in near if "steps" in stretch]
    if len(steps) == len(near):
        same = sum(
            round(_score(record, metric) * len(step["kl"]))
            for record, step in zip(stretches, steps, strict=True)
        )
        numbers |= of_tokens(steps, same)
    return numbers


def _mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among `values`, exact in any order; None if there is none."""
    return _of_numbers(statistics.fmean, values)


def _of_numbers(centre: Centre, values: Iterable[Any]) -> Any:
    """What the finite numbers among `values` come to; None if there is none."""
    numbers = [value for value in values if is_number(value)]
    return centre(numbers) if numbers else None


def _is_flat(value: Any) -> bool:
    return isinstance(value, bool | str) or is_number(value)


# -- how far next-token distributions are from full attention's ------------------------------------
#
# Numbers by the definitions of llama.cpp's `perplexity --kl-divergence`, from what a run stores of
# each step. Every error here is a standard error over tokens as if they were independent, as
# llama.cpp's are. Tokens of one text are not, so that it is too small; `kl_stderr` and the
# intervals of reports are over texts.


@np.errstate(all="ignore")  # what is not finite is absent
def of_tokens(texts: Sequence[Mapping[str, Sequence[float]]], same: int) -> dict[str, float]:
    """Every number of `fidelity` in a summary that needs each token, by name; what is not defined
    of these is absent.

    Parameters
    ----------
    texts
        of each the "kl" by step, KL(full attention || method) over the whole vocabulary in nats,
        and "nll" and "nll_full", the negative log-likelihood of its next token under the method and
        under full attention.
    same
        tokens of all texts at which both have the same top token.
    """
    steps = {
        name: np.concatenate([text[name] for text in texts]) for name in ("kl", "nll", "nll_full")
    }
    kl = steps["kl"]
    nll, nll_full = steps["nll"], steps["nll_full"]
    n, delta_p = len(kl), np.exp(-nll) - np.exp(-nll_full)
    ln_ratio = nll - nll_full
    perplexity, perplexity_full = np.exp(nll.mean()), np.exp(nll_full.mean())
    ratio = np.exp(ln_ratio.mean())
    rms, share = np.sqrt((delta_p**2).mean()), same / n
    numbers = {
        "tokens": n,
        "kl_max": kl.max(),
        "perplexity": perplexity,
        "perplexity_full": perplexity_full,
        "ln_perplexity_ratio": ln_ratio.mean(),
        "perplexity_ratio": ratio,
        "delta_p_mean": delta_p.mean(),
        "delta_p_rms": rms,
        "same_top": share,
        **quarters([text["kl"] for text in texts]),
        **percentiles(kl, OF_KL),
        **percentiles(delta_p, OF_DELTA_P),
    }
    if n > FEW:
        numbers |= {
            "kl_mean_error": standard_error(kl),
            "perplexity_error": perplexity * standard_error(nll),
            "perplexity_full_error": perplexity_full * standard_error(nll_full),
            "ln_perplexity_ratio_error": standard_error(ln_ratio),
            "perplexity_ratio_error": ratio * standard_error(ln_ratio),
            "delta_p_mean_error": standard_error(delta_p),
            "same_top_error": math.sqrt(share * (1 - share) / (n - 1)),
        }
        if rms > 0:
            numbers["delta_p_rms_error"] = standard_error(delta_p**2) / (2 * rms)
        if nll.std() > 0 and nll_full.std() > 0:
            numbers["nll_correlation"] = np.corrcoef(nll, nll_full)[0, 1]
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean of n values, over n - 1."""
    return float(values.std() / math.sqrt(len(values) - 1))


def percentiles(values: np.ndarray, percents: Mapping[str, float]) -> dict[str, float]:
    """The wanted percentiles by name, linear between neighbours; none beyond which fewer than one
    value lies.
    """
    there = {
        name: p for name, p in percents.items() if round(len(values) * min(p, 100 - p), 6) >= 100
    }
    return dict(zip(there, np.percentile(values, [*there.values()]), strict=True)) if there else {}


def quarters(kl: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean KL divergence of the first to the last quarter of each text's steps."""
    if min(map(len, kl)) <= 4 * FEW:
        return {}
    parts = zip(*(np.array_split(text, 4) for text in kl), strict=True)
    return {
        name: np.concatenate(part).mean() for name, part in zip(OF_QUARTERS, parts, strict=True)
    }
