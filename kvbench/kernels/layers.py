"""A model's own layers in bfloat16, for a few tokens: linear, feed-forward and attention's
projections, RMS norm.

All tensors are contiguous. Sums and what lies between are float32; results are rounded once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from kvbench.kernels.library import library


class RotatedLayers(ctypes.Structure):
    """Addresses and sizes of what `rotated` takes."""

    _fields_ = [
        ("threads", c_int64),
        ("x", c_void_p),
        ("weights", c_void_p * 3),
        ("angles", c_void_p * 2),
        ("outs", c_void_p * 3),
        *((name, c_int64) for name in ("rows", "inputs", "query_heads", "kv_heads", "head_dim")),
    ]


def products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """A linear layer: out [..., outputs] = x [..., inputs] . weight [outputs, inputs]^T + bias
    [outputs].
    """
    outputs, inputs = weight.shape
    parts = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    sizes = x.numel() // inputs, inputs, outputs
    library().linear(torch.get_num_threads(), *parts, *sizes)


def gated(x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """A feed-forward part: down . (silu(gate . x) * (up . x)).

    Parameters
    ----------
    x, out
        [..., inputs].
    weights
        gate and up [hidden, inputs], and down [inputs, hidden].
    """
    hidden, inputs = weights[0].shape
    parts = (part.data_ptr() for part in (x, *weights, out))
    library().gated(torch.get_num_threads(), *parts, x.numel() // inputs, inputs, hidden)


def rotated(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    angles: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> None:
    """Queries, keys and values of tokens, the first two turned by their positions' angles (RoPE).

    Parameters
    ----------
    x
        [B, q, inputs].
    weights
        three, [heads * D, inputs].
    angles
        cosines and sines, [B, q, D].
    outs
        [B, q, heads, D], for each weight.
    """
    arrays = (
        (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        for parts in (weights, angles, outs)
    )
    sizes = x.shape[0] * x.shape[1], x.shape[2], outs[0].shape[2], *outs[1].shape[2:]
    call = RotatedLayers(torch.get_num_threads(), x.data_ptr(), *arrays, *sizes)
    library().rotated(ctypes.byref(call))


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Vectors x [..., width] over their root mean square, times a weight [width] (Zhang and
    Sennrich, 2019).
    """
    parts = (part.data_ptr() for part in (x, weight, out))
    library().normed(*parts, x.numel() // len(weight), len(weight), epsilon)
