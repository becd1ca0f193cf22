"""What a selection made on the CPU must bring up from the host: the bookkeeping of one step and
layer, compiled.

In torch the same takes a dozen passes over a few thousand numbers, which cost more than the tokens
that move.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from kvbench.kernels.lists import plan_lists
from kvbench.memory.slots import NO_TOKEN, whole_pages

NO_OUTPUT = np.empty((0, 0), np.int64)
NOTHING = torch.empty(0, dtype=torch.int64)


class StagePlan(NamedTuple):
    """Where each token of a selection goes, and where it comes from.

    Attributes
    ----------
    ids
        [B, Hkv, U] ascending, distinct, `NO_TOKEN` after; U is the longest list, in whole pages.
    total
        how many ids these are.
    moving
        how many of them are not on the device.
    hits
        how many are staged.
    complete
        a token was asked for everywhere.
    source
        [B, Hkv, U], a row of what is held, then of the newest tokens, then of the missing ones.
    slots
        [B, Hkv, M], the index in `ids` of each token asked for, -1 where none was.
    head, token
        [moving] each, the missing ones: row * Hkv + KV head, and id.
    """

    ids: torch.Tensor
    total: int
    moving: int
    hits: int
    complete: bool
    source: torch.Tensor
    slots: torch.Tensor
    head: torch.Tensor
    token: torch.Tensor


def plan_stage(
    index: torch.Tensor,
    heads: int,
    staged: torch.Tensor | None,
    newest: list[int] | None,
    counted: bool = False,
) -> StagePlan:
    """Plan the staging of token ids index [B, Hs, M] (-1 = none, repeats allowed), on the CPU.

    Parameters
    ----------
    heads
        Hkv; Hs is 1, Hkv or Hq.
    staged
        [B, Hkv, V] ids that are staged, ascending, `NO_TOKEN` after; None: none.
    newest
        of each row, the id of the token whose key is on the device anyway; None: none is.
    counted
        nothing is to be moved, so `source`, `slots`, `head` and `token` are empty.
    """
    lists = index.contiguous().numpy()
    batch, list_heads, count = lists.shape
    size, count = batch * heads, max(1, list_heads // heads) * count
    have = NO_OUTPUT if staged is None else staged.contiguous().view(size, -1).numpy()
    last = np.full(batch, -1) if newest is None else np.array(newest)
    ids = np.empty((size, whole_pages(count)), np.int64)
    ids.fill(NO_TOKEN)
    if counted:
        moving, longest, complete, hits, total = plan_lists(
            lists, have, last, ids, NO_OUTPUT, NO_OUTPUT, NO_OUTPUT
        )
        parts = (NOTHING,) * 4
    else:
        source, slots, missing = (
            np.zeros_like(ids),
            np.full((size, count), -1),
            np.empty((2, size * count), np.int64),
        )
        moving, longest, complete, hits, total = plan_lists(
            lists, have, last, ids, source, slots, missing
        )
        whole = source[:, : whole_pages(longest)], slots
        rows = (torch.from_numpy(part).view(batch, heads, part.shape[1]) for part in whole)
        parts = *rows, *torch.from_numpy(missing[:, :moving])
    ids = np.ascontiguousarray(ids[:, : whole_pages(longest)]).reshape(
        batch, heads, whole_pages(longest)
    )
    return StagePlan(torch.from_numpy(ids), total, moving, hits, complete, *parts)


@cache
def compile_kernels() -> None:
    """Compile, or read from disk, before anything is timed."""
    plan_stage(torch.zeros(1, 1, 1, dtype=torch.int64), 1, None, None)
