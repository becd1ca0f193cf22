"""The device tier of a layer's store: slots filled in the order of the token ids, in pages a kernel reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbench.memory.slots import (
    NO_TOKEN,
    PAGE,
    ascending,
    find,
    index_of,
    more_slots,
    rows,
    whole_pages,
    with_free_slots,
    with_slots,
)
from kvbench.memory.transfer import uploaded


@dataclass(frozen=True, eq=False)
class Located:
    """Where tokens lie on the device.

    Attributes:
        key, value: [B, Hkv, S, D], blocks that hold them all; S is a multiple of `kvbench.memory.slots.PAGE`.
        slots: [B, Hkv, M] int64, the slot of each token asked for; any where none was.
        present: [B, Hkv, M] bool, whether one was; None: everywhere.
    """

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    present: torch.Tensor | None

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens, gathered: [B, Hkv, M, D] each; any finite content where none was asked for."""
        return rows(self.key, self.slots), rows(self.value, self.slots)


class DeviceTier:
    """Keys and values on the device.

    Slots of a row and head are filled from 0 without holes, in ascending order of token id. Slots after them are
    zero or stale, finite, and never attended.

    Args:
        key, value: [B, Hkv, capacity, D], whole pages; used in place.
        reserved: slots that may be used.
        grows: the blocks may be reallocated when they are full; else they move in `keep` only.

    Attributes:
        key, value: [B, Hkv, capacity, D].
        ids: [B, Hkv, capacity] int64, the token in each slot (`NO_TOKEN` after the used ones), or None: slot = id.
        used: [B, Hkv] int64 on the CPU, slots filled.
        reserved: slots asked for; whole pages may be a few more.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, reserved: int, grows: bool = False) -> None:
        self.key, self.value = key, value
        self.ids: torch.Tensor | None = None
        self.used = torch.zeros(key.shape[:2], dtype=torch.int64)
        self.reserved = reserved
        self._grows = grows

    @classmethod
    def zeros(
        cls, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, grows: bool = False
    ) -> DeviceTier:
        """A tier with nothing in it; size is (B, Hkv, slots to reserve, D)."""
        batch, kv_heads, reserved, head_dim = size
        whole = (batch, kv_heads, whole_pages(reserved), head_dim)
        # Zeros, not empty: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
        key, value = (torch.zeros(whole, dtype=dtype, device=device) for _ in range(2))
        return cls(key, value, reserved, grows)

    @property
    def capacity(self) -> int:
        """Slots of the blocks."""
        return self.key.shape[2]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in one KV head."""
        return 2 * self.key.shape[3] * self.key.element_size()

    @property
    def filled(self) -> torch.Tensor:
        """[B, Hkv] int64 on the device, slots filled; nothing waits for it."""
        return uploaded(self.used, self.key.device)

    @property
    def uniform(self) -> bool:
        """All KV heads of all rows have filled as many slots."""
        return int(self.used.min()) == int(self.used.max())

    # -- writing ---------------------------------------------------------------------------------------------------

    def write_prompt(self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]) -> None:
        """Store a prefill chunk; see `LayerStore.write_prompt`."""
        end = column + key.shape[2]
        self.reserve(end)
        if not any(offsets):
            self.key[:, :, column:end] = key
            self.value[:, :, column:end] = value
            return
        for row, offset in enumerate(offsets):
            skip = max(0, offset - column)
            if skip < key.shape[2]:
                slots = slice(column + skip - offset, end - offset)
                self.key[row, :, slots] = key[row, :, skip:]
                self.value[row, :, slots] = value[row, :, skip:]

    def seal_prompt(self, lengths: Sequence[int]) -> None:
        """The first `lengths[b]` slots of row b are used from now on."""
        self.used = torch.tensor(lengths).unsqueeze(1).repeat(1, self.key.shape[1])

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row, whose id is `lengths[b]`; key, value [B, Hkv, 1, D]."""
        first = int(self.used[0, 0])
        self.reserve(int(self.used.max()) + 1)
        if self.uniform:
            self.key[:, :, first : first + 1] = key
            self.value[:, :, first : first + 1] = value
        else:
            slot = self.filled[..., None, None].expand_as(key)
            self.key.scatter_(2, slot, key)
            self.value.scatter_(2, slot, value)
        if self.ids is not None:
            token = torch.tensor(lengths)[:, None].expand_as(self.used)
            slot, token = uploaded(torch.stack([self.used, token]), key.device)
            self.ids.scatter_(2, slot[..., None], token[..., None])
        self.used = self.used + 1

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, in newly allocated memory where they are not there.

        Raises:
            RuntimeError: the tier may not grow.
        """
        if slots <= self.reserved:
            return
        held, self.reserved = self.reserved, more_slots(slots, self.reserved, self._grows)
        capacity = whole_pages(self.reserved)
        self.key, self.value = (with_slots(block[:, :, :held], capacity) for block in (self.key, self.value))
        if self.ids is not None:
            self.ids = with_free_slots(self.ids[:, :, :held], capacity)

    def keep(self, ids: torch.Tensor, used: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold these tokens and no others, in newly allocated memory; as many free slots stay reserved.

        Args:
            ids: [B, Hkv, M] ascending, `NO_TOKEN` after.
            used: [B, Hkv] on the CPU, tokens in each list; M is the most.
            key, value: [B, Hkv, M, D].
        """
        self.reserved = ids.shape[2] + self.reserved - int(self.used.max())
        capacity = whole_pages(self.reserved)
        self.key, self.value = with_slots(key, capacity), with_slots(value, capacity)
        self.ids = with_free_slots(ids, capacity)
        self.used = used

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every KV head, where none was dropped."""
        self.used = self.used - count

    def clear(self) -> None:
        """Free the blocks; nothing comes here any more."""
        self.key, self.value = self.key[:, :, :0].clone(), self.value[:, :, :0].clone()
        self.used = torch.zeros_like(self.used)
        self.reserved = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def resident(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values in place, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all used)."""
        longest = int(self.used.max())
        key, value = self.key[:, :, :longest], self.value[:, :, :longest]
        if self.uniform:
            return key, value, None
        return key, value, torch.arange(longest, device=key.device) < self.filled[..., None]

    def token_ids(self) -> torch.Tensor:
        """Ids of the tokens here, ascending, [B, Hkv, n] on the device with trailing -1."""
        longest = int(self.used.max())
        if self.ids is not None:
            return index_of(self.ids[:, :, :longest])
        slots = torch.arange(longest, device=self.key.device).expand(*self.used.shape, longest)
        return slots if self.uniform else torch.where(slots < self.filled[..., None], slots, -1)

    def tokens(self, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [n] ascending, keys and values [n, D], of the tokens of one KV head, on the CPU."""
        used = int(self.used[row, head])
        ids = torch.arange(used) if self.ids is None else self.ids[row, head, :used].cpu()
        return ids, self.key[row, head, :used].cpu(), self.value[row, head, :used].cpu()

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie, on the device or on the CPU as the index may be.

        Raises:
            LookupError: a token that is not here. On a GPU the kernel is aborted instead.
        """
        index, present = self.upload(index)
        slots, found = self.find(index)
        self._check(index, found)
        return Located(self.key, self.value, slots, present)

    def upload(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An index on the device, and where it names a token (None: everywhere, as far as the host knows)."""
        present = index >= 0
        if not index.is_cuda and bool(present.all()):
            return uploaded(index, self.key.device), None
        return uploaded(index, self.key.device), uploaded(present, self.key.device)

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of token ids [B, Hkv, M] on the device (0: there is none), and whether the token is here."""
        wanted = index.clamp(min=0)
        if self.ids is None:
            slots, found = wanted, wanted < (int(self.used[0, 0]) if self.uniform else self.filled[..., None])
        else:
            slots, found = find(self.ids, wanted)
        found = found & (index >= 0)
        return slots.masked_fill(~found, 0), found

    def _check(self, index: torch.Tensor, found: torch.Tensor) -> None:
        found = found | (index < 0)
        if index.is_cuda:
            torch._assert_async(found.all())
        elif not bool(found.all()):
            raise LookupError(f"token {index[~found][0].item()} is not in the store: dropped earlier, or not seen")

    # -- for tests -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert what holds between any two calls; waits for the device."""
        assert self.key.shape == self.value.shape, "a key has a value"
        assert self.capacity % PAGE == 0, "a block is whole pages"
        assert 0 <= self.reserved <= self.capacity, "what is reserved is there"
        assert int(self.used.min()) >= 0 and int(self.used.max()) <= self.reserved, "what is used was reserved"
        assert all(bool(block.isfinite().all()) for block in (self.key, self.value)), "every slot is finite"
        if self.ids is not None:
            assert self.ids.shape == self.key.shape[:3], "a slot has an id"
            assert ascending(self.ids), "tokens ascend from slot 0 without holes, none of them twice"
            assert torch.equal((self.ids != NO_TOKEN).sum(dim=2).cpu(), self.used), "a used slot has a token"
