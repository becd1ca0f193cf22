"""What a selection made on the CPU must bring up from the host: the bookkeeping of one step and layer, compiled.

In torch the same takes a dozen passes over a few thousand numbers, which cost more than the tokens that move.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbench.kernels.lists import plan_lists
from kvbench.memory.slots import NO_TOKEN, whole_pages


class StagePlan(NamedTuple):
    """Where each token of a selection goes, and where it comes from.

    Attributes:
        ids: [B, Hkv, U] ascending, distinct, `NO_TOKEN` after; U is the longest list, in whole pages.
        source: [B, Hkv, U], a row of what is held, then of the newest tokens, then of the missing ones.
        slots: [B, Hkv, M], the index in `ids` of each token asked for, -1 where none was.
        head, token: [n] each, the missing ones: row * Hkv + KV head, and id.
        complete: a token was asked for everywhere.
        found: how many of `ids` are held.
    """

    ids: torch.Tensor
    source: torch.Tensor
    slots: torch.Tensor
    head: torch.Tensor
    token: torch.Tensor
    complete: bool
    found: int


def plan_stage(index: torch.Tensor, held: torch.Tensor | None, newest: list[int] | None) -> StagePlan:
    """Plan the staging of token ids index [B, Hkv, M] (-1 = none, repeats allowed), on the CPU.

    Args:
        held: [B, Hkv, V] ids that are staged, ascending, `NO_TOKEN` after; None: none.
        newest: of each row, the id of the token whose key is on the device anyway; None: none is.
    """
    batch, heads, count = index.shape
    size = batch * heads
    lists = index.reshape(size, count).contiguous().numpy()
    have = np.empty((size, 0), np.int64) if held is None else held.reshape(size, -1).contiguous().numpy()
    last = np.full(size, -1) if newest is None else np.repeat(np.asarray(newest, np.int64), heads)
    first = have.size + (0 if newest is None else last.size)
    shape = len(lists), whole_pages(count)
    parts: tuple[Any, ...] = np.full(shape, NO_TOKEN), np.zeros(shape, np.int64), np.full(lists.shape, -1)
    missing, order = np.empty((2, lists.size), np.int64), np.argsort(lists, axis=1)
    moving, longest, complete, found = plan_lists(lists, order, have, last, first, *parts, missing)
    head, token = torch.from_numpy(missing[:, :moving])
    ids, source, slots = (torch.from_numpy(part).view(batch, heads, part.shape[1]) for part in parts)
    used = whole_pages(longest)
    return StagePlan(ids[..., :used], source[..., :used], slots, head, token, complete, found)


@cache
def compile_kernels() -> None:
    """Compile, or read from disk, before anything is timed."""
    plan_stage(torch.zeros(1, 1, 1, dtype=torch.int64), None, None)
