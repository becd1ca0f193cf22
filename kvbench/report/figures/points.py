"""Where a run stands in a chart: its marks by the names of the axes.

This alone reads runs for the figures of `curves.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, get_args

import numpy as np
import pandas as pd

from kvbench.backends.protocol import Question
from kvbench.report.data.run import Run, missing
from kvbench.report.data.stats import Estimate, estimate, mean_score
from kvbench.report.data.style import Style
from kvbench.report.figures.charts import LEAST, Mark, Scale
from kvbench.runs.quantities import MIB, QUANTITIES
from kvbench.runs.summary import by_machine, is_disturbed, same_machine
from kvbench.runs.summary import written as output_of

Place = tuple[str, ...]  # what else the marks of one chart share: a batch, a length, a machine
Points = Callable[[Run, Any, str, str], Iterator[tuple[Place, Mark]]]

QUESTION = "protocol.question"
PLACES = {word: place for place, word in enumerate(get_args(Question))}
WORDS = {
    "with": "with the context",
    "after": "after compression",
    "decode": "after, token by token",
}
STEPS = 64  # marks of a line over steps, at most
SMOOTHED = {"kl_mean": 8}  # steps whose mean is shown: of single tokens KL differs by magnitudes
# Ways to hold keys and values.
BITS = {"8": "#3B6EA8", "4": "#C4453C", "3": "#7A4FA3", "2": "#3F8F4F"}
CODES = {
    "native": "o",
    "fp": "^",
    "int": "s",
    "kivi": "D",
    "turboquant_k": "v",
    "turboquant_": "p",
    "turboquant_mse": "<",
    "turboquant_prod": ">",
}
# The axes that are no recorded quantity on its own scale.
SCALES = {
    "budget": Scale("budget C: tokens, or below 1 a share of the prompt", "values"),
    "budget_tokens": Scale("budget C (tokens)", "values"),
    "attended_mean": Scale(QUANTITIES["attended_mean"].axis, "log"),
    "attended_share": Scale("attended / C, mean over KV heads, layers and steps", "linear"),
    "read": Scale(f"KV read per step ({MIB.name})", "log"),
    "share": Scale("held (% of full attention's native bytes)", "log"),
    "device_kv_bytes": Scale(QUANTITIES["device_kv_bytes"].axis, "log"),
    "device_index_bytes": Scale(QUANTITIES["device_index_bytes"].axis, "log"),
    QUESTION: Scale("the question is read", "words", tuple(WORDS[word] for word in PLACES)),
    "method.cluster_size": Scale("chunks per cluster", "values"),
    "method.page_size": Scale("tokens per page", "values"),
    "step": Scale("decode step", "steps"),
    "length": Scale("prompt tokens", "values"),
    "score": Scale(QUANTITIES["score"].axis, "score"),
    "kl_mean": Scale(QUANTITIES["kl_mean"].axis, "log"),
    "new_tokens": Scale(QUANTITIES["new_tokens"].axis, "zero"),
    "looped": Scale(QUANTITIES["looped"].axis, "score"),
    "tpot_ms_mean": Scale(QUANTITIES["tpot_ms_mean"].axis, "log"),
    "own_ms": Scale(QUANTITIES["own_ms"].axis, "log"),
    "tokens_per_s": Scale("tokens a second", "log"),
    **{name: Scale(QUANTITIES[name].axis, "share") for name in ("recall", "jaccard", "seen")},
}


def kv_style(kind: str) -> Style:
    """How a way to hold keys and values is drawn: a colour for its bits, a marker for its code.

    These are the colours of no method.
    """
    bits = re.search(r"\d", kind)
    colour = BITS.get(bits[0] if bits else "", "#444444")
    codes = [code for code in CODES if kind.startswith(code)]
    marker = CODES[max(codes, key=len)] if codes else "X"
    turned = "--" if "-" in kind else "-"
    return Style(kind, colour, marker, turned)


# -- marks -----------------------------------------------------------------------------------------


def at_cost(run: Run, arm: Any, x: str, y: str) -> Iterator[tuple[Place, Mark]]:
    """The mark of a run: a number with its interval over a cost; times are of one machine."""
    cost, value = _cost(run, arm, x), _estimate(run, arm, y)
    is_level = missing(arm["budget"]) and x in ("budget", "attended_mean")
    if value is None or (math.isnan(cost) and not is_level):
        return
    is_time = x in QUANTITIES and QUANTITIES[x].is_time
    place = (str(arm["device_name"]),) if is_time else ()
    reach = float(arm["index_bytes"]) * MIB.scale if x == "read" and arm["index_bytes"] else 0.0
    index = 0.0 if math.isnan(reach) else reach
    mean, low, high, n, _ = value
    yield place, Mark(cost, mean, low, high, arm["budget"], "", index, n)


def _cost(run: Run, arm: Any, name: str) -> float:
    """What a run costs, in the unit of its axis; NaN where it does not say."""
    match name:
        case "read":
            return run.bytes_read * MIB.scale
        case "share":
            return run.share_of_full
        case "protocol.question":
            return float(PLACES[str(run.settings[name])])
    value = run.settings.get(name) if name.startswith("method.") else arm[name]
    scale = QUANTITIES[name].unit.scale if name in QUANTITIES else 1.0
    return math.nan if missing(value) else float(str(value)) * scale


def _estimate(run: Run, arm: Any, name: str) -> Estimate | None:
    """A number of a run with its interval, in the unit of its axis."""
    match name:
        case "score":
            return run.score()
        case "kl_mean":
            if (kl := run.kl()) is None or kl.mean <= 0:  # 0 stays, which is full attention's
                return kl
            # as a log axis has room for it
            low, high = (None if end is None else max(end, LEAST) for end in (kl.low, kl.high))
            return kl._replace(mean=max(kl.mean, LEAST), low=low, high=high)
        case "new_tokens" | "looped":
            return _written(run, name)
    value = arm[name]
    scaled = None if missing(value) else QUANTITIES[name].scaled(value)
    return None if scaled is None else Estimate(scaled, None, None, int(arm["n"]))


def _written(run: Run, name: str) -> Estimate | None:
    """The mean length of a run's outputs in tokens, or the share that end in a loop, in %."""
    answered = [record for record in run.samples() if not record.get("error")]
    outputs = pd.DataFrame(list(filter(None, map(output_of, answered))))
    if not len(outputs):
        return None
    if name == "looped":
        return mean_score([100 * outputs["looped"].to_numpy(float)])
    return estimate([outputs["length"].to_numpy(float)])


def over_steps(run: Run, arm: Any, x: str, y: str) -> Iterator[tuple[Place, Mark]]:
    """Means over samples at each decode step, neighbouring steps together where there are many.

    Of probes as far as half of the samples go.
    """
    if y == "kl_mean":
        near = [sample["fidelity"] for sample in run.samples() if "fidelity" in sample]
        mean = pd.DataFrame([of_sample["steps"]["kl"] for of_sample in near]).mean()
        curve = pd.Series(mean.to_numpy(float), mean.index + 1.0)
    else:
        means = step_means([sample.get("probe") for sample in run.samples()])
        curve = means[y] if y in means else pd.Series(dtype=float)
    for step, value in thinned(curve.dropna(), SMOOTHED.get(y, 1)).items():
        yield (), Mark(float(step), float(value), n=int(arm["n"]))  # type: ignore[arg-type]


def step_means(probes: list[Any]) -> pd.DataFrame:
    """The mean over samples of each probe by decode step, as far as half of the samples go."""
    steps = [(of_sample or {}).get("steps") for of_sample in probes]
    frames = [pd.DataFrame(of_sample, dtype=float) for of_sample in steps if of_sample]
    if not frames:
        return pd.DataFrame()
    by_step = pd.concat(frames).groupby("step")
    return by_step.mean()[by_step.size() >= len(frames) / 2]


def thinned(curve: pd.Series, least: int = 1) -> pd.Series:
    """The mean of neighbouring steps, so many at least, and of as many as a picture can show."""
    if not len(curve):
        return curve
    together = max(least, math.ceil(len(curve) / STEPS))
    blocks = np.arange(len(curve)) // together
    steps = curve.index.to_series().groupby(blocks).mean()
    return pd.Series(curve.groupby(blocks).mean().to_numpy(), steps.to_numpy())


def over_lengths(run: Run, arm: Any, x: str, y: str) -> Iterator[tuple[Place, Mark]]:
    """The median time of a token at each length of prompts, with the least and the largest.

    Times that were taken beside other work are left out.
    """
    if not run.is_timed:
        yield from _of_samples(run)
        return
    for cell, line in run.cells.items():
        if missing(line[y]) or line["disturbed"] in (True,):
            continue
        low, high = line["spread"].get(y, (line[y], line[y]))
        place = (f"batch {cell.batch}", cell.machine)
        yield place, Mark(cell.tokens, float(line[y]), low, high, n=int(line["n"]))


def _of_samples(run: Run) -> Iterator[tuple[Place, Mark]]:
    """The same of samples of a task, one row each."""
    by_length: dict[int, list[Any]] = {}
    machines = by_machine(run.samples())  # of which one is that its times are of
    for record in machines.get(run.arm["device_name"]) or machines.get("", []):
        if record.get("tpot_ms") and "length" in record["meta"]:
            by_length.setdefault(record["meta"]["length"], []).append(record)
    for records in by_length.values():
        timed = [record for record in same_machine(records) if not is_disturbed(record)]
        times = [record["tpot_ms"]["mean"] for record in timed]
        if times:
            tokens = timed[0]["prompt_tokens"]
            middle = float(median(times))
            place = ("batch 1", str(run.arm["device_name"]))
            yield place, Mark(tokens, middle, min(times), max(times), n=len(times))


def over_batches(run: Run, arm: Any, x: str, y: str) -> Iterator[tuple[Place, Mark]]:
    """Tokens a second over the bytes that so many requests at once take, at each length."""
    for cell, line in run.cells.items():
        size, ms = line["device_kv_bytes"], line["tpot_ms_mean"]
        if missing(size) or missing(ms) or line["disturbed"] in (True,):
            continue
        rate = 1000 * cell.batch / float(ms)
        place = (f"{cell.tokens:,} tokens", cell.machine)
        yield place, Mark(float(size) * MIB.scale, rate, words=str(cell.batch), n=int(line["n"]))
