"""A timed sample: a rehearsal, a generation that nothing ends early, and the hardware's limits for
it.

Loading kernels and compiling take longer than any step, so the same runs first with a short prompt
and is thrown away. On a GPU a few more steps after the timed ones measure how long it is busy.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvbench.backends.hf.runner import ModelRunner
from kvbench.engine.batch import Generation, generate
from kvbench.engine.engine import Engine
from kvbench.engine.request import Progress
from kvbench.measure import hardware, machine
from kvbench.measure.synthetic import SYNTHETIC_SPAN, Filled, SyntheticEngine
from kvbench.models.types import Model
from kvbench.tasks import Timed

REHEARSED = 4096  # prompt tokens of the rehearsal, at most: long enough for every method's index
REHEARSED_STEPS = 3
WATCHED = 8  # decode steps in which the busy time of a GPU is measured

# Makes the engine of rows of token ids, with room for so many new tokens.
MakeEngine = Callable[[Sequence[Sequence[int]], int], Engine]


def time_sample(
    model: Model,
    timed: Timed,
    new_tokens: int,
    make: MakeEngine,
    prefill_chunk: int | None,
    progress: Progress | None,
    rehearsed: int = REHEARSED,
    probed: bool = False,
) -> tuple[Generation, Engine, dict[str, Any]]:
    """Generate for a timed sample.

    Parameters
    ----------
    model
        with "kvbench" attention.
    timed
        the prompts, and how they are timed.
    new_tokens
        of each row.
    make
        a fresh engine for the rows that it is given; of a sample with synthetic keys a
        `SyntheticEngine`.
    prefill_chunk, progress
        as for `generate`.
    rehearsed
        prompt tokens of the rehearsal, at most.
    probed
        with probes there is nothing to time: no rehearsal, and no `hardware` part.

    Returns
    -------
    tuple[Generation, Engine, dict[str, Any]]
        The generation, whose breakdown leaves the warm-up steps out, its engine, and what the
        sample's record holds besides: `machine`, and as `hardware` what the hardware can do, the
        floor, and memory.
    """
    device = model.device
    gc.collect()  # the stores of the sample before: caches and engines refer to each other
    if probed:
        engine = make(timed.rows, new_tokens)
        return (
            _generate(model, timed.rows, timed, engine, new_tokens, prefill_chunk, progress),
            engine,
            {},
        )
    bandwidth = hardware.bandwidth(device)
    short = [row[:rehearsed] for row in timed.rows]
    _generate(
        model, short, timed, make(short, REHEARSED_STEPS), REHEARSED_STEPS, prefill_chunk, None
    )
    gc.collect()

    watched = WATCHED if hardware.can_watch(device) else 0
    hardware.restart_peak(device)
    engine = make(timed.rows, new_tokens + watched)
    watch = _Watch(device, len(timed.rows[0]), progress)
    with machine.observed(device) as measured_on:
        generation = _generate(model, timed.rows, timed, engine, new_tokens, prefill_chunk, watch)
    synthetic_s = generation.prefill_ms.pop(SYNTHETIC_SPAN, 0.0) / 1e3
    generation.ttft_s -= synthetic_s
    if generation.tt2t_s is not None:
        generation.tt2t_s -= synthetic_s
    peak = hardware.peak_bytes(device)
    facts = {
        "copy_bandwidth": bandwidth.copy,
        "upload_bandwidth": bandwidth.upload,
        **_floor(model, generation, engine, bandwidth.copy),
        # before the watched ones
        "steps_repeated": engine.captured.repeated if engine.captured else None,
        "python_ms": _python_ms(model, timed, generation, engine, watched) if watched else None,
        **_memory(model, generation, engine, peak),
        "prefill_memory_bytes": watch.prefill_bytes,
    }
    return generation, engine, {"machine": measured_on, "hardware": facts}


def _generate(
    model: Model,
    rows: Sequence[Sequence[int]],
    timed: Timed,
    engine: Engine,
    new_tokens: int,
    prefill_chunk: int | None,
    progress: Progress | None,
) -> Generation:
    filled = None
    if not timed.prefill:
        assert isinstance(engine, SyntheticEngine)
        filled = Filled(engine, rows)
    return generate(
        ModelRunner(model),
        rows,
        engine,
        max_new_tokens=new_tokens,
        prefill_chunk=prefill_chunk,
        prefilled=filled,
        progress=progress,
        warmup=timed.warmup,
    )


class _Watch:
    """Follows a generation from outside its timed parts: the peak of the prefill's memory is not
    that of the steps.

    Attributes
    ----------
    prefill_bytes
        the most that the device held until the first new token; None without a GPU.
    """

    def __init__(self, device: torch.device, prompt: int, progress: Progress | None) -> None:
        self._device, self._prompt = device, prompt
        self._progress = progress
        self._prefilling = True
        self.prefill_bytes: int | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._prefilling and done >= self._prompt:
            self._prefilling = False
            self.prefill_bytes = hardware.peak_bytes(self._device)
            hardware.restart_peak(self._device)
        if self._progress:
            self._progress(done, total)


def _floor(
    model: Model, generation: Generation, engine: Engine, bandwidth: float
) -> dict[str, float]:
    """The bytes that a step must read, and the milliseconds that they take at least."""
    read = hardware.read_weight_bytes(model, engine.shape.batch)
    attended = generation.audit["attended_bytes_per_step"]
    seconds = hardware.floor_seconds(read, attended, bandwidth)
    return {"must_read_bytes": read + attended, "floor_ms": 1e3 * seconds}


def _memory(
    model: Model, generation: Generation, engine: Engine, peak: int | None
) -> dict[str, Any]:
    """The device's memory: the peak of what was allocated, or without a GPU what is counted."""
    weights = hardware.weight_bytes(model)
    counted = weights + engine.allocated_bytes() + generation.audit["index_bytes"]
    return {
        "memory": "counted" if peak is None else "allocated",
        "memory_bytes": counted if peak is None else peak,
        "weight_bytes": weights,
        "whole_kv_bytes": hardware.whole_kv_bytes(engine.shape, len(generation.step_ms)),
    }


def _python_ms(
    model: Model, timed: Timed, generation: Generation, engine: Engine, steps: int
) -> float | None:
    """Milliseconds of a step in which the device waits for the host."""
    step_ms = statistics.fmean(generation.step_ms[timed.warmup :])
    busy = _busy_ms(model, generation, engine, steps)
    return None if busy is None else max(0.0, step_ms - busy)


@torch.inference_mode()
def _busy_ms(model: Model, generation: Generation, engine: Engine, steps: int) -> float | None:
    """Milliseconds of a step in which the device is busy, the mean over `steps` steps after the
    generated ones.
    """
    passes = ModelRunner(model).passes(engine)
    tokens = torch.tensor([row[-1] for row in generation.tokens])

    def decode() -> None:
        nonlocal tokens
        for _ in range(steps):
            tokens = passes.next_tokens(tokens)

    busy = hardware.busy_seconds(decode, model.device)
    return None if busy is None else 1e3 * busy / steps
