"""Rows of new tokens as codes, in one pass over them: torch takes some ten operations."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Literal

import torch

from kvbench.kernels.library import library, why_missing

FEW = 2**16  # numbers up to which one thread is no slower than torch's
ENCODINGS = "int8", "e4m3", "channels", "steps", "nearest"


class Encode(ctypes.Structure):
    """Addresses and sizes of what `encoded` takes."""

    _fields_ = [
        ("encoding", c_int64),
        ("rows", c_void_p),
        ("is_bfloat16", c_int64),
        ("out", c_void_p),
        *((name, c_int64) for name in ("count", "head_dim", "width", "bits")),
        ("parameters_bfloat16", c_int64),
        ("bounds", c_void_p),
    ]


def is_quick(rows: torch.Tensor) -> bool:
    """Whether `encoded` takes rows, and sooner than torch."""
    fits = rows.is_cpu and rows.dtype in (torch.float32, torch.bfloat16)
    return fits and 0 < rows.numel() <= FEW and why_missing() is None


def encoded(
    rows: torch.Tensor,
    encoding: Literal["int8", "e4m3", "channels", "steps", "nearest"],
    width: int,
    bits: int = 8,
    parameters: torch.dtype = torch.float32,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [..., D] as bytes [..., width]: `kvbench.memory.codecs.scaled`, `kivi.Channels`,
    `turboquant.Uniform`, and the codes of `turboquant.Lloyd`.

    Parameters
    ----------
    parameters
        type of scales and minima of groups of channels, float32 or bfloat16.
    bounds
        [2**bits - 1] float32, between the numbers whose nearest is taken.
    """
    rows = rows.contiguous()
    head_dim = rows.shape[-1]
    out = torch.empty(*rows.shape[:-1], width, dtype=torch.uint8)
    call = Encode(
        ENCODINGS.index(encoding),
        rows.data_ptr(),
        rows.dtype == torch.bfloat16,
        out.data_ptr(),
        rows.numel() // head_dim,
        head_dim,
        width,
        bits,
        parameters == torch.bfloat16,
        0 if bounds is None else bounds.data_ptr(),
    )
    library().encode(ctypes.byref(call))
    return out
