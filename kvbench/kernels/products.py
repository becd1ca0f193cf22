"""Products of queries with all keys of their KV head, where the keys lie."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from kvbench.kernels.library import library


class Products(ctypes.Structure):
    """Addresses and sizes of what `products` takes."""

    _fields_ = [
        ("threads", c_int64),
        ("query", c_void_p),
        ("keys", c_void_p),
        *((name, c_int64) for name in ("row_size", "head_size", "size", "is_bfloat16")),
        ("scores", c_void_p),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "count", "head_dim")),
    ]


def products(threads: int, query: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> None:
    """Write q.k of each query head, unscaled, in so many threads.

    Parameters
    ----------
    query
        [B, Hkv, G, D] float32, contiguous.
    keys
        [B, Hkv, n, D] float32 or bfloat16, of any strides but the last.
    scores
        [B, Hkv, G, n] float32; written.
    """
    steps = (keys.element_size() * step for step in keys.stride()[:3])
    where = query.data_ptr(), keys.data_ptr(), *steps, keys.dtype == torch.bfloat16
    sizes = *scores.shape, keys.shape[3]
    library().products(ctypes.byref(Products(threads, *where, scores.data_ptr(), *sizes)))
