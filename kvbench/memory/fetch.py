"""Rows of pinned host memory that the device reads itself (unified virtual addressing).

A selection that was made on the device stays there: no index comes down, nothing is gathered on the
host, nobody waits. On a GPU it is one Triton kernel; `fetched` in torch says what that computes,
and is what other devices run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def fetch(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """Each row from the device or from the host.

    Parameters
    ----------
    near
        [n] int64, row of `here`, or -1.
    far
        [n] int64, row of `host` where `near` is -1, or -1: zeros.
    here
        [h, D] on the device.
    host
        [m, D], pinned where the device is a GPU; only the rows named are read.

    Returns
    -------
    torch.Tensor
        [n, D] on the device.
    """
    return _launch(near, far, here, host) if near.is_cuda else fetched(near, far, here, host)


def fetched(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """As `fetch`, in torch, with everything on one device."""
    rows = torch.where((far >= 0)[:, None], host[far.clamp(min=0)], 0)
    return torch.where((near >= 0)[:, None], here[near.clamp(min=0)], rows) if len(here) else rows


def _launch(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(len(near), host.shape[1], dtype=host.dtype, device=near.device)
    width = 1 << (host.shape[1] - 1).bit_length()
    _kernel()[(len(near),)](near, far, here, host, out, host.shape[1], width)
    return out


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def fetch_rows(near, far, here, host, out, size, width: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0)
        lane = tl.arange(0, width)
        local, remote = tl.load(near + at), tl.load(far + at)
        inside = lane < size
        row = tl.load(here + local * size + lane, mask=inside & (local >= 0), other=0.0)
        distant = tl.load(
            host + remote * size + lane, mask=inside & (local < 0) & (remote >= 0), other=0.0
        )
        tl.store(out + at * size + lane, tl.where(local >= 0, row, distant), mask=inside)

    return fetch_rows
