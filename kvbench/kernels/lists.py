"""Bookkeeping over lists of token ids: how many are named, and what must come up from the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.kernels.library import KVBENCH

Ids = NDArray[np.int64]


def count_lists(lists: Ids, kv_heads: int) -> tuple[Ids, Ids]:
    """How many ids >= 0 the lists [B, Hs, M] of each KV head name, [B, Hkv], and how many distinct
    ones, [B, Hkv].

    Hs is 1, Hkv or Hq.
    """
    named, distinct = np.empty((2, len(lists), kv_heads), np.int64)
    if KVBENCH.why_missing is None:
        KVBENCH.count_lists(lists, named, distinct)
        return named, distinct
    ids = np.sort(lists.reshape(len(lists), min(lists.shape[1], kv_heads), -1))
    named[:] = (ids >= 0).sum(axis=2)
    repeated = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
    distinct[:] = named - repeated.sum(axis=2)
    return named, distinct


def plan_lists(index: Ids, staged: Ids, newest: Ids, ids: Ids) -> tuple[int, int, bool, int]:
    """What `kvbench.memory.stage.plan_stage` plans, of lists [B, Hs, M] and staged [L, V], L = B *
    Hkv.

    Parameters
    ----------
    newest
        [B], of each row the id of the token that is on the device anyway, or -1.
    ids
        [L, U], written where there is something.

    Returns
    -------
    tuple[int, int, bool, int]
        ids of the longest list, tokens that are neither staged nor the newest, whether there is one
        everywhere, and how many are staged.
    """
    if KVBENCH.why_missing is None:
        numbers = np.empty(3, np.int64)
        longest = KVBENCH.plan_lists(index, staged, newest, ids, numbers)
        return longest, int(numbers[0]), bool(numbers[1]), int(numbers[2])
    heads = len(ids) // len(index)
    shared = index.reshape(len(index), min(index.shape[1], heads), -1)
    longest = moving = hits = 0
    for at, out in enumerate(ids):
        tokens: Any = np.unique(shared[at // heads, min(at % heads, shared.shape[1] - 1)])
        tokens = tokens[tokens >= 0]
        is_staged = np.isin(tokens, staged[at] if len(staged) else ())
        out[: len(tokens)] = tokens
        longest = max(longest, len(tokens))
        hits += int(is_staged.sum())
        moving += int((~is_staged & (tokens != newest[at // heads])).sum())
    return longest, moving, bool((index >= 0).all()), hits
