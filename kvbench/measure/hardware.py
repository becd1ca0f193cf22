"""What the hardware can do, measured, and the floor it sets under a decode step.

No method is asked, and nothing here is part of a generation: bandwidths are measured before the
first one, the device's busy time in steps of its own after the timed ones.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from kvbench.backends.hf.layers import card_of
from kvbench.memory.codecs import Codecs
from kvbench.method import Shape

COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes of a buffer, far above any cache
UPLOADED = 2**28  # bytes of the pinned buffer
REPEATS = 10


class Bandwidth(NamedTuple):
    """Bytes per second.

    Attributes
    ----------
    copy
        inside the device's memory, read and written bytes both counted.
    upload
        from pinned host memory to the device; None where both are one memory.
    """

    copy: float
    upload: float | None


@functools.cache
def bandwidth(device: torch.device) -> Bandwidth:
    """The device's bandwidths, those of the quickest of a few copies; measured once in a
    process.
    """
    size = COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _least_seconds(lambda: target.copy_(source), device)
    if device.type != "cuda":
        return Bandwidth(copy, None)
    pinned = torch.ones(UPLOADED, dtype=torch.uint8, pin_memory=True)
    part = target[:UPLOADED]
    return Bandwidth(
        copy, UPLOADED / _least_seconds(lambda: part.copy_(pinned, non_blocking=True), device)
    )


def _least_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The least time of a call, after one that warms up: what else the machine does is not its
    limit.
    """
    call()
    return min(seconds(call, device) for _ in range(REPEATS))


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """What a call takes; on a GPU as its stream notes it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


# -- the floor -------------------------------------------------------------------------------------


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters of a model."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def read_weight_bytes(model: Any, rows: int) -> int:
    """Bytes of weights that a decode step of a transformers model reads, for a batch of `rows`.

    All of them once, but for an input embedding that is not the output head too: of that a row for
    each token; and of experts that a router chooses from as many as one token has, which all tokens
    may share.
    """
    idle = _expert_bytes(model) * (1 - card_of(model).expert_share)
    embedding = model.get_input_embeddings().weight
    if embedding is model.get_output_embeddings().weight:
        return weight_bytes(model) - round(idle)
    row = embedding.shape[1] * embedding.element_size()
    return weight_bytes(model) - round(idle) - embedding.shape[0] * row + rows * row


def _expert_bytes(model: torch.nn.Module) -> int:
    """Bytes of all experts that a router chooses from."""
    named = model.named_parameters()
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in named
        if ".experts." in name
    )


def whole_kv_bytes(shape: Shape, steps: int) -> int:
    """Bytes that full attention holds on the device after `steps` steps: every key and value of all
    layers.

    A layer with a window holds those before the next token in it, one with a state none.
    """
    tokens = len(shape.full_layers) * (sum(shape.lengths) + shape.batch * steps)
    tokens += sum(
        min(max(window - 1, 0), length + steps)
        for window in shape.windows.values()
        for length in shape.lengths
    )
    codecs = Codecs.native(shape.head_dim, shape.dtype, shape.latent_dim)
    return tokens * shape.kv_heads * codecs.nbytes


def floor_seconds(weights: float, attended: float, copy_bandwidth: float) -> float:
    """The least time of a decode step: (weights + keys and values attended, in bytes) / bandwidth
    of a copy.

    What a method reads to find its entries, and what comes up from the host, is not in it: that is
    the method's price.
    """
    return (weights + attended) / copy_bandwidth


# -- memory ----------------------------------------------------------------------------------------


def restart_peak(device: torch.device) -> None:
    """Count the peak of device memory from here on; nothing to do without a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that torch's allocator held on a GPU since `restart_peak`; None without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# -- how busy the device is ------------------------------------------------------------------------


def can_watch(device: torch.device) -> bool:
    """Whether `busy_seconds` can measure: a CPU is busy with Python, too."""
    return device.type == "cuda"


def busy_seconds(call: Callable[[], Any], device: torch.device) -> float | None:
    """Seconds in which a GPU computed or copied during a call; None where the profiler has no
    permission.

    The profiler lets go of the device then. Where it stays, it makes every later launch of the
    process slower: on an H200 9.0 us in place of 6.9, and a decode step 43 ms in place of 33.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # read wherever a profile ends
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            call()
            torch.cuda.synchronize(device)
    ranges = [
        (event.time_range.start, event.time_range.end)
        for event in watched.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return union_length(ranges) / 1e6 if ranges else None


def union_length(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals (start, end) cover together: where they overlap, streams ran
    side by side.
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
