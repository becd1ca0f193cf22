"""Copies between host and device that nothing waits for."""

from __future__ import annotations

from functools import cache

import torch


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's copies run beside its computation."""
    return torch.cuda.Stream(device)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without a wait for it: to a GPU through pinned memory."""
    if tensor.device == device:
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
