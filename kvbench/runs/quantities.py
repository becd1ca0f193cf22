"""Every number that a run records, once: where it stands, what it is called, how it is shown and
combined. No torch.

A summary, the tables of the terminal, the columns of a report (`--values`) and the axes of its
pictures all read `QUANTITIES`: to add a number is to record it and to write one line here. What is
recorded without a line, such as the numbers of a method's own `report()`, is combined and shown as
well, by a name made of its key (`find`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Unit(NamedTuple):
    """What a number is shown in.

    Attributes
    ----------
    name
        "" for a plain number.
    scale
        from the stored number to the shown one.
    """

    name: str
    scale: float = 1


PLAIN, SECONDS, MS = Unit(""), Unit("s"), Unit("ms")
KIB, MIB, GB_PER_S, NATS = (
    Unit("KiB", 2**-10),
    Unit("MiB", 2**-20),
    Unit("GB / s", 1e-9),
    Unit("nats"),
)
PERCENT = Unit("%", 100)
MORE: Literal["more"] = "more"
LESS: Literal["less"] = "less"

# the `decode` of a run and of a record; where it is missing, alone
DECODED = ALONE, JOINTLY = "alone", "together"
# Parts of a step that are of the model: rows that decode together share them. All else is a
# method's own time.
OF_MODEL = ("breakdown_ms.model", "breakdown_ms.other")
METHOD_TIME = "own: attention, search and transfers, without the model"

PASSED = {f"pass_at_{k}": k for k in (1, 2, 4, 8, 16, 32, 64)}  # the k of each pass@k, by its name


# Of tokens, by the name of each: percentiles, and quarters of a text's steps.
OF_KL = {f"kl_p{p:g}".replace(".", "_"): p for p in (50, 90, 95, 99, 99.9)}
OF_QUARTERS = {"kl_q1": "first", "kl_q2": "second", "kl_q3": "third", "kl_q4": "last"}
OF_DELTA_P = {
    f"delta_p_p{p:g}".replace(".", "_"): p for p in (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
}


class Quantity(NamedTuple):
    """One recorded number, flag or word.

    Attributes
    ----------
    name
        of its column in reports, and for `--values`.
    part
        of a summary that holds it: "" is the summary itself, "macro" its mean over groups where it
        has one.
    title
        what it is, in words; for a line or a picture of its own.
    unit, digits
        how it is shown; `digits` after the point.
    better
        more or less of it; "": neither.
    label
        heading of a column, with the unit; "": made of title and unit.
    short
        heading of a column among many; "": the label.
    combine
        what several samples come to: "mean" and "max" of numbers, "any" of flags, the different
        "words".
    key
        its key in the part; "": the name.
    ratio
        two names: not recorded, but the first of them over the second.
    """

    name: str
    part: str
    title: str
    unit: Unit = PLAIN
    digits: int = 2
    better: Literal["more", "less", ""] = ""
    label: str = ""
    short: str = ""
    combine: Literal["mean", "max", "any", "words"] = "mean"
    key: str = ""
    ratio: tuple[str, str] | None = None

    @property
    def heading(self) -> str:
        """What a column of it is called."""
        return self.label or ", ".join(filter(None, [self.title, self.unit.name]))

    @property
    def narrow_heading(self) -> str:
        """What a column of it is called among many."""
        return self.short or self.heading

    @property
    def axis(self) -> str:
        """What an axis of a picture is called."""
        return f"{self.title} ({self.unit.name})" if self.unit.name else self.title

    @property
    def is_number(self) -> bool:
        """Whether it is a number, and no flag or word."""
        return self.combine in ("mean", "max")

    @property
    def is_time(self) -> bool:
        """Whether it is of one machine, and where transfers are simulated or counted of no GPU."""
        return self.unit in (SECONDS, MS)

    def scaled(self, value: float) -> float:
        """A stored number in its unit."""
        return self.unit.scale * float(value)

    def number(self, value: float | None, missing: str = "-") -> str:
        """A stored number as it stands under its heading; `missing` for None."""
        return missing if value is None else f"{self.scaled(value):.{self.digits}f}"

    def amount(self, value: float | None) -> str:
        """A stored number with its unit, or a dash."""
        return "-" if value is None else f"{self.number(value)} {self.unit.name}".rstrip()


def _percentile(p: float) -> str:
    return "median" if p == 50 else f"p{p:g}"


def _with_error(
    name: str, title: str, unit: Unit, digits: int, better: Literal["more", "less", ""] = ""
) -> tuple[Quantity, Quantity]:
    """A number over tokens, and its standard error, which a table shows beside it."""
    return (
        Quantity(name, "fidelity", title, unit, digits, better),
        Quantity(
            f"{name}_error",
            "fidelity",
            f"{title}, standard error over tokens",
            unit,
            digits,
            better and LESS,
        ),
    )


_LISTED = (
    Quantity("score", "macro", "score", PLAIN, 1, MORE),
    Quantity("attended_share", "", "attended / C", ratio=("attended_mean", "budget_tokens")),
    Quantity("attended_mean", "audit", "attended entries per KV head", PLAIN, 1),
    Quantity(
        "attended_std", "audit", "attended entries, spread over layers, heads and steps", PLAIN, 1
    ),
    Quantity("attended_max", "audit", "attended entries, most", PLAIN, 0, combine="max"),
    Quantity("budget_tokens", "audit", "C, tokens", PLAIN, 0, key="budget"),
    Quantity("device_kv_bytes", "audit", "KV on the device", MIB, 2, LESS, combine="max"),
    Quantity(
        "device_kv_allocated_bytes",
        "audit",
        "KV on the device, allocated",
        MIB,
        2,
        LESS,
        combine="max",
    ),
    Quantity("host_bytes", "audit", "KV on the host", MIB, 2, LESS, combine="max"),
    Quantity("index_bytes", "audit", "index", MIB, 2, LESS, combine="max"),
    Quantity("device_index_bytes", "", "KV on the device, and the index", MIB, 2, LESS),
    Quantity("moved_bytes_per_step", "audit", "moved up per step", KIB, 1, LESS),
    Quantity(
        "cache_hit_share",
        "audit",
        "attended from the host, on the device already, share",
        better=MORE,
    ),
    Quantity("attended_bytes_per_step", "audit", "KV attended per step", MIB, 2, LESS),
    Quantity("read_bytes_per_step", "audit", "read by the index per step", KIB, 1, LESS),
    Quantity("replay_tokens", "audit", "tokens read again before the first", PLAIN, 0, LESS),
    Quantity("dense_share", "audit", "dense layers, share"),
    Quantity("windowed_share", "audit", "layers without full attention, share"),
    Quantity("windowed_kv_bytes", "audit", "KV of layers with a window", MIB, 2, combine="max"),
    Quantity("state_bytes", "audit", "states of the model", MIB, 2, combine="max"),
    Quantity("over_rule", "audit", "over the method's own rule", combine="any"),
    Quantity("executor", "audit", "executor", combine="words"),
    Quantity("computed_in", "audit", "computed in", combine="words", key="dtype"),
    Quantity("held_as", "audit", "keys and values held as", combine="words", key="kv"),
    Quantity("executor_note", "audit", "why not another executor", combine="words"),
    Quantity("transfer", "audit", "transfers", combine="words"),
    Quantity(
        "ttft_s", "latency", "time to first token", SECONDS, 3, LESS, "to first token, s", "TTFT, s"
    ),
    Quantity(
        "index_s",
        "latency",
        "index building before the first token",
        SECONDS,
        3,
        LESS,
        "index building, s",
        "index, s",
    ),
    Quantity(
        "index_share",
        "",
        "index building / TTFT",
        PLAIN,
        2,
        LESS,
        "",
        "index / TTFT",
        ratio=("index_s", "ttft_s"),
    ),
    Quantity(
        "tt2t_s",
        "latency",
        "time to second token",
        SECONDS,
        3,
        LESS,
        "to second token, s",
        "TT2T, s",
    ),
    Quantity(
        "tpot_ms_mean", "latency", "time per further token", MS, 2, LESS, "ms / token", "TPOT, ms"
    ),
    Quantity(
        "tpot_ms_p50",
        "latency",
        "median per token",
        MS,
        2,
        LESS,
        "ms / token, median",
        "TPOT p50, ms",
    ),
    Quantity(
        "tpot_ms_p95",
        "latency",
        "p95 per token",
        MS,
        2,
        LESS,
        "ms / token, 95th percentile",
        "TPOT p95, ms",
    ),
    Quantity("own_ms", "", "own time per token", MS, 2, LESS, "own ms / token", "own, ms"),
    Quantity(
        "floor_ms", "hardware", "floor of a token", MS, 2, "", "floor, ms / token", "floor, ms"
    ),
    Quantity(
        "floor_ratio",
        "",
        "median / floor",
        PLAIN,
        1,
        LESS,
        "",
        "p50 / floor",
        ratio=("tpot_ms_p50", "floor_ms"),
    ),
    Quantity(
        "busy_ms",
        "",
        "device busy, of a token",
        MS,
        2,
        LESS,
        "device busy, ms / token",
        "device busy, ms",
    ),
    Quantity(
        "python_ms",
        "hardware",
        "Python, device idle, of a token",
        MS,
        2,
        "",
        "Python, ms / token",
        "Python, ms",
    ),
    Quantity(
        "must_read_bytes", "hardware", "weights and KV attended per step", MIB, 1, combine="max"
    ),
    Quantity("memory", "hardware", "memory is", combine="words"),
    Quantity("memory_bytes", "hardware", "memory in decoding", MIB, 1, LESS, combine="max"),
    Quantity(
        "prefill_memory_bytes", "hardware", "memory in the prefill", MIB, 1, LESS, combine="max"
    ),
    Quantity("weight_bytes", "hardware", "weights", MIB, 1, combine="max"),
    Quantity("whole_kv_bytes", "hardware", "all KV", MIB, 1, combine="max"),
    Quantity("copy_bandwidth", "hardware", "copy", GB_PER_S, 1),
    Quantity("upload_bandwidth", "hardware", "host to device", GB_PER_S, 1),
    Quantity("measured_on", "machine", "measured on", combine="words", key="device"),
    Quantity("threads", "machine", "threads", PLAIN, 0),
    Quantity("cores", "machine", "cores", PLAIN, 0),
    Quantity("load", "machine", "load before", PLAIN, 1, LESS),
    Quantity("others", "machine", "cores taken by other processes", PLAIN, 2, LESS),
    Quantity("steal", "machine", "cores taken by other guests", PLAIN, 2, LESS),
    Quantity("disturbed", "machine", "disturbed", combine="any"),
    Quantity("left_out", "machine", "samples whose times are left out", PLAIN, 0, LESS),
    Quantity("recall", "probe", "recall of the exact top tokens", better=MORE, label="recall"),
    Quantity("mass", "probe", "attention mass", better=MORE),
    Quantity("output_error", "probe", "output error", PLAIN, 3, LESS, key="error"),
    Quantity("jaccard", "probe", "Jaccard with the step before", label="Jaccard with last step"),
    Quantity("seen", "probe", "share selected in the last 32 steps", label="seen in last 32 steps"),
    Quantity("kl_mean", "fidelity", "KL from full attention", NATS, 4, LESS),
    Quantity("kl_stderr", "fidelity", "KL, standard error over texts", NATS, 4, LESS),
    Quantity("kl_mean_error", "fidelity", "KL, standard error over tokens", NATS, 4, LESS),
    *(
        Quantity(name, "fidelity", f"KL, {_percentile(p)}", NATS, 4, LESS)
        for name, p in OF_KL.items()
    ),
    Quantity("kl_max", "fidelity", "KL, largest", NATS, 3, LESS, combine="max"),
    *(
        Quantity(name, "fidelity", f"KL, {which} quarter", NATS, 4, LESS)
        for name, which in OF_QUARTERS.items()
    ),
    Quantity("nll", "fidelity", "negative log-likelihood of the text", NATS, 3, LESS),
    Quantity("nll_full", "fidelity", "the same under full attention", NATS, 3),
    Quantity("nll_correlation", "fidelity", "correlation of log-likelihoods", PERCENT, 2, MORE),
    *_with_error("perplexity", "perplexity", PLAIN, 2, LESS),
    *_with_error("perplexity_full", "perplexity under full attention", PLAIN, 2),
    *_with_error("perplexity_ratio", "perplexity ratio", PLAIN, 4),
    *_with_error("ln_perplexity_ratio", "ln perplexity ratio", PLAIN, 4),
    Quantity(
        "ln_perplexity_ratio_stderr",
        "fidelity",
        "ln perplexity ratio, standard error over texts",
        PLAIN,
        4,
    ),
    *_with_error("delta_p_mean", "delta p, mean", PERCENT, 2),
    *_with_error("delta_p_rms", "delta p, RMS", PERCENT, 2, LESS),
    *(
        Quantity(name, "fidelity", f"delta p, {_percentile(p)}", PERCENT, 2)
        for name, p in OF_DELTA_P.items()
    ),
    *_with_error("same_top", "same top token", PERCENT, 2, MORE),
    Quantity("tokens", "fidelity", "tokens compared", PLAIN, 0),
    Quantity("score_samples", "", "score, mean over samples", PLAIN, 1, MORE, key="score"),
    Quantity("score_ok", "", "score without failed", PLAIN, 1, MORE),
    *(Quantity(name, "", f"pass@{k}", PLAIN, 1, MORE) for name, k in PASSED.items()),
    Quantity("prompts", "", "prompts with several answers", PLAIN, 0),
    Quantity(
        "new_tokens", "output", "new tokens, mean", PLAIN, 1, label="new tokens", key="tokens_mean"
    ),
    Quantity("new_tokens_median", "output", "new tokens, median", PLAIN, 0, key="tokens_median"),
    Quantity("looped", "output", "outputs that end in a loop", PERCENT, 0, LESS, short="looped, %"),
    Quantity("stderr", "macro", "standard error of the score", PLAIN, 1, LESS),
    Quantity("n", "", "samples", PLAIN, 0),
    Quantity("failed", "", "failed", PLAIN, 0, LESS),
    Quantity("cut_samples", "", "samples with cut prompts", PLAIN, 0, LESS),
    Quantity("cut_share", "", "prompt tokens cut out", PERCENT, 0, LESS),
    Quantity("unbounded_samples", "", "samples in which the budget never applied", PLAIN, 0, LESS),
)
QUANTITIES = {quantity.name: quantity for quantity in _LISTED}
# what `--values` takes
NUMBERS = {name: quantity for name, quantity in QUANTITIES.items() if quantity.is_number}
_BY_KEY = {
    (quantity.part, quantity.key or quantity.name): quantity
    for quantity in _LISTED
    if not quantity.ratio
}
_ENDINGS = {"_bytes": MIB, "_ms": MS, "_s": SECONDS}  # of keys without a line, which say their unit


def find(part: str, key: str) -> Quantity:
    """What a key of a part stands for; without a line of its own it is a number by the name
    "<part>.<key>".

    Of such numbers samples are combined by their mean, and by their maximum where the key ends in
    _max or _bytes.
    """
    if listed := _BY_KEY.get((part, key)):
        return listed
    ending = next((ending for ending in _ENDINGS if key.endswith(ending)), "")
    title, unit = key.removesuffix(ending).replace("_", " "), _ENDINGS.get(ending, PLAIN)
    combine: Literal["mean", "max"] = "max" if key.endswith(("_max", "_bytes")) else "mean"
    if part == "breakdown_ms":
        return Quantity(
            f"{part}.{key}",
            part,
            title,
            MS,
            label=f"{title}, ms / token",
            short=f"{title}, ms",
            key=key,
        )
    return Quantity(f"{part}.{key}", part, title, unit, combine=combine, key=key)


def named(name: str) -> Quantity:
    """The quantity of a name, listed or not."""
    part, _, key = name.partition(".")
    return QUANTITIES.get(name) or find(part, key)


def recorded(summary: Mapping[str, Any]) -> dict[str, Any]:
    """All that a summary holds of a run, or of some samples, by name: numbers as stored, ratios of
    them, flags, words.

    What was not measured is absent.
    """
    numbers = {}
    for part, values in _parts(summary).items():
        for key, value in values.items():
            quantity = find(part, key)
            if is_number(value) or not quantity.is_number:
                numbers[quantity.name] = value
    stored_bytes = [numbers[name] for name in ("device_kv_bytes", "index_bytes") if name in numbers]
    if stored_bytes:
        numbers["device_index_bytes"] = math.fsum(stored_bytes)
    method_times = [
        time
        for name, time in numbers.items()
        if name.startswith("breakdown_ms.") and name not in OF_MODEL
    ]
    if method_times:
        numbers["own_ms"] = math.fsum(method_times)
    step, waits = numbers.get("tpot_ms_mean"), numbers.get("python_ms")
    if step is not None and waits is not None:
        numbers["busy_ms"] = step - waits
    for quantity in _LISTED:
        above, below = (numbers.get(name) for name in quantity.ratio or ("", ""))
        if above and below:
            numbers[quantity.name] = above / below
    return numbers


def _parts(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What a summary holds, by part; at its top, where much else stands, only what has a line."""
    latency = summary.get("latency") or {}
    times = {key: value for key, value in latency.items() if key != "breakdown_ms"}
    others = ("machine", "audit", "hardware", "output", "probe", "fidelity", "scores")
    parts = {part: summary.get(part) or {} for part in others}
    top = {"": summary, "macro": summary.get("macro") or summary}
    listed = {
        part: {key: values.get(key) for place, key in _BY_KEY if place == part}
        for part, values in top.items()
    }
    return {**listed, "latency": times, "breakdown_ms": latency.get("breakdown_ms") or {}, **parts}


def is_number(value: Any) -> bool:
    """Whether a recorded value is a finite number, and not a flag."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def machine_name(machine: Mapping[str, Any]) -> str:
    """What the `machine` of a record or summary is called; "" of an empty one."""
    return f"{machine['device']}, {machine['threads']} threads" if "device" in machine else ""
