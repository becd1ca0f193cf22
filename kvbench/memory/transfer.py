"""Copies between host and device that nothing waits for, and which device computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_ANYWHERE = nullcontext()


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a block of code: kernels that are no operations of torch run
    on that one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _ANYWHERE


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's copies run beside its computation."""
    return torch.cuda.Stream(device)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without a wait for it: to a GPU through pinned memory, which takes
    nothing expanded.
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()).to(
        device, non_blocking=True
    )
