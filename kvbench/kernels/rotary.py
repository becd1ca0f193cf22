"""Rotary positions of stored keys, in one pass over them."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from kvbench.kernels.library import library


class RotaryTurn(ctypes.Structure):
    """Addresses and sizes of what `turn` takes."""

    _fields_ = [
        *((name, c_void_p) for name in ("vectors", "positions", "cosines", "sines", "turned")),
        *((name, c_int64) for name in ("batch", "heads", "position_heads")),
        *((name, c_int64) for name in ("count", "head_dim", "width")),
    ]


def turn(
    vectors: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Turn vectors by their positions, one half of the channels against the other (RoPE as Llama
    has it).

    Parameters
    ----------
    vectors
        [B, H, n, D] float32.
    positions
        [B, 1 or H, n] int64.
    cosines, sines
        [length, R] float32, of each position; the first R channels are turned.

    Returns
    -------
    torch.Tensor
        [B, H, n, D] float32.
    """
    vectors, positions = vectors.contiguous(), positions.contiguous()
    turned = torch.empty_like(vectors)
    parts = (part.data_ptr() for part in (vectors, positions, cosines, sines, turned))
    sizes = *vectors.shape[:2], positions.shape[1], *vectors.shape[2:], cosines.shape[1]
    library().turn(ctypes.byref(RotaryTurn(*parts, *sizes)))
    return turned
