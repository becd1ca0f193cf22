"""Whether what is stored of a run can be true: all that read runs ask here, and leave out and name
what cannot.

A bound holds for every method, model and machine: it follows from what a number counts. What is
only unlikely passes. No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.budget import Budget
from kvbench.config import ConfigError, MethodConfig, show
from kvbench.runs.identity import earlier_ids
from kvbench.runs.quantities import MS, QUANTITIES, SECONDS, find, is_number
from kvbench.runs.stored import Record, ResultsError, archive_of, printable

NEAR = 1e-3  # relative: packed samples have five digits
TINY = 1e-6  # of KL in nats, which is rounded about 0
MOST_TOKENS = 2**31  # of a prompt, and samples of a run
MOST_BYTES = 2**50  # of a memory
MOST_SECONDS = 10**9
# new tokens of a sample that does not say how many it has, as older and empty answers do not
UNSAID = 1024

OF_RECORD = ("prompt_tokens", "cut_tokens", "question_tokens", "new_tokens")
PARTS = (
    "audit",
    "probe",
    "hardware",
    "machine",
    "fidelity",
    "breakdown_ms",
    "prefill_ms",
    "tpot_ms",
    "written",
)
SHARES = {"recall", "mass", "jaccard", "seen", "looped"}
OF_STATUS = ("done", "failed", "total", "ran")
STEPS = ("kl", "nll", "nll_full")


def refuse_impossible(folder: Path, written: Mapping[str, Any], records: Iterable[Record]) -> None:
    """Refuse a run with a number that cannot be, or that lies in another run's folder.

    Parameters
    ----------
    folder
        the run's.
    written
        its run.yaml, as `kvbench.runs.stored.read_run_yaml` gives it.
    records
        its samples.

    Raises
    ------
    ResultsError
        names the sample, the key and its value.
    """
    stored_id = str(written["run_id"])
    names = {folder.name, folder.resolve().name}
    if names.isdisjoint((stored_id, *earlier_ids(stored_id))) and folder != archive_of(folder):
        raise ResultsError(f"the folder of run {printable(stored_id)[:40]} under another name")
    config = written["identity"]["config"]
    try:
        budget = _budget(config)
    except ConfigError as error:
        raise ResultsError(printable(str(error))) from error
    unified = config["protocol"]["accounting"] == "unified"
    for record in records:
        if reason := next(_of_record(record, budget, unified), ""):
            raise ResultsError(
                f"cannot be: sample {printable(record['id'])[:80]}: {printable(reason)}"
            )


def impossible_status(says: Mapping[str, Any]) -> str:
    """What in a status file, of known types, cannot be; ""."""
    wrong = (key for key in OF_STATUS if not 0 <= (says.get(key) or 0) <= MOST_TOKENS)
    return next((f"{key}={says[key]}: no number of samples" for key in wrong), "")


def _budget(config: Mapping[str, Any]) -> Budget:
    """The budget that a run says it had; one without a size of a method that has none.

    Raises
    ------
    ConfigError
        there is no such budget.
    """
    method = MethodConfig.of(config["method"])
    protocol, size = config["protocol"], config["budget"]
    if is_number(size) and size > MOST_TOKENS:
        raise ConfigError(f"budget={size}: more tokens than a prompt has")
    if not method.has_budget:
        return Budget(None)
    return Budget.of(size, method, protocol["accounting"], protocol.get("generated", "free"))


def _of_record(record: Record, budget: Budget, unified: bool) -> Iterator[str]:
    """What in a sample cannot be."""
    yield from _beyond(record, "", OF_RECORD)
    if record.get("error"):
        return
    for name, score in (record.get("scores") or {}).items():
        if not is_number(score) or not 0 <= score <= 1:
            yield f"scores.{name}={show(score)[:40]}: expected a number from 0 to 1"
    yield from _beyond(record, "latency", ("ttft_s", "tt2t_s"))
    for part in PARTS:
        if values := record.get(part):
            yield from _beyond(values, part, values)
    yield from _attended(record, budget, unified)
    yield from _divergence(record)


def _beyond(values: Mapping[str, Any], part: str, keys: Iterable[str]) -> Iterator[str]:
    """Numbers that are out of bounds."""
    for key in keys:
        value: Any = values.get(key)
        if not is_number(value):
            continue
        least, most, whole = _bounds(part, key)
        if not least <= value <= most or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            name = f"{part}.{key}" if part in PARTS else key
            yield f"{name}={show(value)}: expected {kind} from {least:g} to {most:g}"


@functools.cache
def _bounds(part: str, key: str) -> tuple[float, float, bool]:
    """The least and the largest that a number of this name can be, and whether it is a whole one.

    A method's own number of another name may be anything.
    """
    quantity = find(part, key)
    if key in SHARES or key.endswith("_share"):
        return 0, 1, False
    if key.endswith("_bytes"):
        return (
            0,
            MOST_BYTES,
            quantity.name in QUANTITIES and quantity.combine == "max" and part == "audit",
        )
    if key.endswith(("_bytes_per_step", "_bandwidth")):
        return 0, MOST_BYTES, False
    if part.endswith("_ms") or quantity.unit == MS:
        return 0, MOST_SECONDS * 1e3, False
    if quantity.unit == SECONDS:
        return 0, MOST_SECONDS, False
    if part in ("", "written"):
        return 0, MOST_TOKENS, True
    if quantity.name in QUANTITIES:
        return 0, MOST_TOKENS, False
    return -math.inf, math.inf, False


def _attended(record: Record, budget: Budget, unified: bool) -> Iterator[str]:
    """What an audit cannot have counted, of this prompt under this budget."""
    audit = {key: value for key, value in (record.get("audit") or {}).items() if is_number(value)}
    if "attended_mean" not in audit:
        return
    tokens, mean = _tokens(record), audit["attended_mean"]
    most = audit.get("attended_max", tokens)
    if most > tokens:
        yield f"audit.attended_max={most:g}: of {tokens} tokens"
    if not 1 - NEAR <= mean <= most * (1 + NEAR):
        yield (
            f"audit.attended_mean={mean:g}: expected 1 entry or more, and no more than the most,"
            f" {most:g}"
        )
    if (spread := audit.get("attended_std", 0)) > most:
        yield f"audit.attended_std={spread:g}: expected no more than the most attended, {most:g}"
    stored = audit.get("device_kv_bytes", 0)
    if (allocated := audit.get("device_kv_allocated_bytes", stored)) < stored:
        yield (
            f"audit.device_kv_allocated_bytes={allocated}: expected room for the {stored} that are"
            " held"
        )
    if budget.size is not None:
        had = audit.get("budget", 0)
        # A share is of what is compressed.
        size = budget.tokens(
            (record.get("prompt_tokens") or 0) - (record.get("question_tokens") or 0)
        )
        if not abs(had - size) < 1 + NEAR * size:
            yield f"audit.budget={had:g}: expected the {size} tokens of budget={show(budget.size)}"
        elif unified and mean > had * (1 + NEAR):
            yield (
                f"audit.attended_mean={mean:g}: expected no more than C, {had:g}, in which all"
                " counts"
            )


def _tokens(record: Record) -> int:
    """The most tokens that a step can attend: of the prompt, and of the answer."""
    counts: list[Any] = [
        (record.get("written") or {}).get("length"),
        record.get("new_tokens"),
        len(_steps(record).get("kl") or ()),
    ]
    answer = (
        len(record.get("output_ids") or ()) or max(filter(is_number, counts), default=0) or UNSAID
    )
    return int(answer) + (record.get("prompt_tokens") or MOST_TOKENS)


def _steps(record: Record) -> Mapping[str, Any]:
    return (record.get("fidelity") or {}).get("steps") or {}


def _divergence(record: Record) -> Iterator[str]:
    """What of a KL divergence from full attention cannot be: less than 0, or a mean that its steps
    have not.
    """
    near, steps = record.get("fidelity") or {}, _steps(record)
    for name in STEPS:
        key = "kl_mean" if name == "kl" else name
        values, mean = steps.get(name), near.get(key)
        if values and min(values) < 0:
            yield f"fidelity.steps.{name}: {min(values):g} is less than 0"
        if values and mean is not None and not is_near(fmean(values), mean, TINY):
            yield f"fidelity.{key}={mean:g}: expected the mean of its steps, {fmean(values):g}"


def is_near(value: float, other: float, most: float = 0.0) -> bool:
    """Whether two numbers are the same but for the digits that are packed, or differ by so much at
    most.
    """
    return abs(value - other) <= most + NEAR * max(abs(value), abs(other))
