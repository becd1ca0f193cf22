"""Blocks and pools of slots: what the tiers of a store share.

A block is [B, H, slots, D], a slot holds one token, and a list beside the block says which. A pool
is the slots of all rows and heads one after the other, as many for each as it takes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

# slots of a page: blocks on the device are whole pages, so that a paged kernel reads them in place
PAGE = 16
GROWTH = 256  # slots added at least when a tier of unknown final length is full
NO_TOKEN = torch.iinfo(torch.int64).max  # sorts after every token id


Slots = TypeVar("Slots", int, torch.Tensor)


def whole_pages(slots: Slots) -> Slots:
    """Slots of as many pages as it takes."""
    return -(-slots // PAGE) * PAGE


def more_slots(slots: int, reserved: int, grows: bool) -> int:
    """Slots to reserve where `slots` are needed and fewer, `reserved`, are there.

    Raises
    ------
    RuntimeError
        the tier may not grow.
    """
    if not grows:
        raise RuntimeError(f"the store reserved {reserved} tokens and was asked to hold {slots}")
    return max(slots, reserved + max(GROWTH, reserved // 8))


class Pool(NamedTuple):
    """Keys and values in slots of all rows and heads, [T, width] each, without holes; T is whole
    pages.
    """

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> Pool:
        """Blocks [B, H, n, width] as they lie, in place."""
        return cls(key.view(-1, key.shape[3]), value.view(-1, value.shape[3]))

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What slots [B, H, M] of the pool hold, [B, H, M, width] each; zeros where the pool has
        none.
        """

        def at(part: torch.Tensor) -> torch.Tensor:
            size = (*slots.shape, part.shape[1])
            return (
                part.index_select(0, slots.reshape(-1)).view(size)
                if len(part)
                else part.new_zeros(size)
            )

        return at(self.key), at(self.value)


def flat(slots: torch.Tensor, count: int) -> torch.Tensor:
    """Slots [B, H, M] of blocks of `count` slots as slots of the pool."""
    batch, heads, _ = slots.shape
    return slots + torch.arange(batch * heads, device=slots.device).view(batch, heads, 1) * count


def rows(block: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """block [B, H, n, D] at slots [B, H, M]: [B, H, M, D].

    Much quicker than torch.gather on a CPU.
    """
    batch, heads, count, width = block.shape
    if not count or not slots.shape[2]:
        return block.new_zeros(batch, heads, slots.shape[2], width)
    return (
        block.reshape(-1, width)
        .index_select(0, flat(slots, count).view(-1))
        .view(batch, heads, -1, width)
    )


def find(lists: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each of ids [B, H, M] in the ascending lists [B, H, n], and whether it is there (if
    not: any index).
    """
    if not lists.shape[2]:
        return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    index = torch.searchsorted(lists, ids).clamp(max=lists.shape[2] - 1)
    return index, lists.gather(2, index) == ids


def lists_of(index: torch.Tensor) -> torch.Tensor:
    """Token ids [B, H, M], -1 anywhere, as ascending lists with `NO_TOKEN` after the last id."""
    return torch.where(index < 0, NO_TOKEN, index).sort(dim=2).values


def repeated(lists: torch.Tensor) -> torch.Tensor:
    """[B, H, n] bool, True on each id of ascending lists [B, H, n] that stands before it, too."""
    again = torch.zeros_like(lists, dtype=torch.bool)
    again[..., 1:] = (lists[..., 1:] == lists[..., :-1]) & (lists[..., 1:] != NO_TOKEN)
    return again


def of_kv_heads(index: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Token ids [B, Hs, M], Hs = 1, Hkv or Hq, as a list of each KV head, [B, Hkv, n]: a query
    group's in one.
    """
    batch, heads, _ = index.shape
    return (
        index.expand(-1, kv_heads, -1) if heads <= kv_heads else index.reshape(batch, kv_heads, -1)
    )


def joined(lists: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Ascending lists [B, Hs, n], Hs = 1, Hkv or Hq, as those of the KV heads: a query group's
    without repeats.
    """
    if lists.shape[1] <= kv_heads:
        return of_kv_heads(lists, kv_heads)
    both = of_kv_heads(lists, kv_heads).sort(dim=2).values
    return both.masked_fill(repeated(both), NO_TOKEN).sort(dim=2).values


def index_of(lists: torch.Tensor) -> torch.Tensor:
    """Lists [B, H, n] as token ids with -1 for `NO_TOKEN`."""
    return torch.where(lists == NO_TOKEN, -1, lists)


def without(index: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    """Token ids [B, H, n], -1 for each that its row and head also have in `gone` [B, H, M]."""
    return torch.where(torch.isin(_globally(index), _globally(gone)), -1, index)


def _globally(index: torch.Tensor) -> torch.Tensor:
    """Token ids [B, H, M] as numbers that differ between rows and heads; -1 stays -1."""
    batch, heads, _ = index.shape
    first = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) << 40
    return torch.where(index < 0, -1, index + first)


def ascending(lists: torch.Tensor) -> bool:
    """Each of lists [B, H, n] is distinct ids >= 0 in ascending order, then `NO_TOKEN` only; waits
    for the device.
    """
    rises = (lists[..., 1:] > lists[..., :-1]) | (lists[..., 1:] == NO_TOKEN)
    return bool((lists >= 0).all()) and bool(rises.all())


def with_slots(block: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of block [B, H, n, D] with `capacity` slots, zero from n on."""
    copy = block.new_zeros(*block.shape[:2], capacity, block.shape[3])
    copy[:, :, : block.shape[2]] = block
    return copy


def with_free_slots(ids: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of the lists ids [B, H, n] for `capacity` slots, `NO_TOKEN` from n on."""
    copy = ids.new_full((*ids.shape[:2], capacity), NO_TOKEN)
    copy[:, :, : ids.shape[2]] = ids
    return copy
