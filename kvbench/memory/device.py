"""The device tier of a layer's store: slots filled in the order of the token ids, in pages a kernel
reads in place.

All slots are one pool, in which each KV head of each row has room of its own: as much for each,
until `keep` leaves them unequal numbers of tokens. Then each has what its tokens take, in whole
pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.kernels import tokens as kernels
from kvbench.kernels.library import why_missing
from kvbench.memory.codecs import Codecs
from kvbench.memory.slots import list_tokens, locate_tokens, put_token
from kvbench.memory.transfer import uploaded, zeros

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
    size = slots.shape[:2]
    return slots + torch.arange(size.numel(), device=slots.device).view(*size, 1) * count


def rows(block: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """block [B, H, n, D] at slots [B, H, M]: [B, H, M, D].

    Much quicker than torch.gather on a CPU.
    """
    size = *block.shape[:2], slots.shape[2], block.shape[3]
    count = block.shape[2]
    if not count or not slots.shape[2]:
        return block.new_zeros(size)
    rows_of_all = block.reshape(-1, block.shape[3])
    return rows_of_all.index_select(0, flat(slots, count).view(-1)).view(size)


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
    if index.shape[1] <= kv_heads:
        return index.expand(-1, kv_heads, -1)
    return index.reshape(len(index), kv_heads, -1)


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
    size = index.shape[:2]
    first = torch.arange(size.numel(), device=index.device).view(*size, 1) << 40
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


_layouts = itertools.count()  # a number for each place that slots were ever in


class Resident(NamedTuple):
    """Keys and values [B, H, n, D or width], and where in [B, H, n] there are some; None:
    everywhere.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None


class HeadTokens(NamedTuple):
    """Tokens of one KV head of a row: ids [n] ascending, keys and values [n, D]."""

    ids: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Located:
    """Where tokens lie on the device.

    Attributes
    ----------
    pool
        what holds them all.
    slots
        [B, Hkv, M] int64, the pool's slot of each token asked for; where no token was asked for,
        any slot.
    present
        [B, Hkv, M] bool, whether a token was asked for; None: everywhere.
    codecs
        how the pool holds them.
    """

    pool: Pool
    slots: torch.Tensor
    present: torch.Tensor | None
    codecs: Codecs

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens, gathered: [B, Hkv, M, D] each; any finite content where
        none was asked for.
        """
        return self.codecs.decode(*self.stored_rows())

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rows`, in the rows that the pool holds them in."""
        return self.pool.at(self.slots)


class Span(NamedTuple):
    """A stretch of slots of each KV head that one codec holds, in place.

    Attributes
    ----------
    pool
        what holds it.
    codecs
        how, of keys and of values.
    first
        [B, Hkv] int64, the pool's slot that is, or would be, slot 0 of each KV head.
    begin, end
        [B, Hkv] int64 on the CPU, the first slot of the stretch and the one after its last.
    parameters
        [groups, 2, D], of keys that have them by groups of tokens.
    """

    pool: Pool
    codecs: Codecs
    first: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    parameters: torch.Tensor | None = None


class Counters:
    """What each token changes, on the device: one operation advances all of it in place.

    Parameters
    ----------
    first
        [B, Hkv] int64 on the CPU, where the room of each KV head begins in the pool.
    used
        [B, Hkv] int64 on the CPU, slots filled.
    lengths
        tokens seen by each row.
    device
        the device.

    Attributes
    ----------
    slot
        [B * Hkv] int64, the pool's slot of the next token of each KV head.
    filled
        [B, Hkv] int64, slots filled.
    seen
        [B] int64, tokens seen by each row, which is the id of the next one.
    """

    def __init__(
        self, first: torch.Tensor, used: torch.Tensor, lengths: Sequence[int], device: torch.device
    ) -> None:
        parts = (first + used).view(-1), used.reshape(-1), torch.tensor(lengths)
        self._all = uploaded(torch.cat(parts), device)
        views = self._all.split([part.numel() for part in parts])
        self.slot, self.seen = views[0], views[2]
        self.filled = views[1].view_as(used)

    def advance(self) -> None:
        """A token of every row has come."""
        self._all.add_(1)


class Slotted:
    """Which token is in which slot: those of a row and head are filled from 0 without holes, in
    order of token id.

    Attributes
    ----------
    first
        [B, Hkv] int64 on the device, where the room of each KV head begins in the pool.
    ids
        [B, Hkv, capacity] int64, the token in each slot (`NO_TOKEN` after the used ones), or None:
        slot = id.
    numbers
        [B, Hkv] int64, slots filled; a new token is counted in it, or in a new one where slots may
        have moved.
    longest
        slots filled by the KV head that has filled most.
    total
        slots filled by all.
    uniform
        all KV heads of all rows have filled as many slots.
    writable
        rows of tokens that are here may be written anew.
    counters
        of tokens that come to a GPU, once one has; None after any other change.
    """

    writable = True
    counters: Counters | None = None

    first: torch.Tensor
    ids: torch.Tensor | None
    numbers: NDArray[np.int64]
    longest: int
    total: int
    uniform: bool

    @property
    def used(self) -> torch.Tensor:
        """`numbers`, in their memory, [B, Hkv] on the CPU."""
        return torch.from_numpy(self.numbers)

    @used.setter
    def used(self, used: torch.Tensor) -> None:
        self.numbers = numbers = np.ascontiguousarray(used.numpy())
        self.longest, self.total = int(numbers.max()), int(numbers.sum())
        self.uniform, self.counters = self.longest == int(numbers.min()), None

    @property
    def filled(self) -> torch.Tensor:
        """[B, Hkv] int64 on the device, slots filled; nothing waits for it."""
        if self.counters is not None:
            return self.counters.filled
        return uploaded(self.used, self.first.device)

    def seal_prompt(self, lengths: Sequence[int]) -> None:
        """The first `lengths[b]` slots of row b are used from now on."""
        self.used = torch.tensor(lengths).unsqueeze(1).repeat(1, self.numbers.shape[1])

    def crop(self, count: int) -> None:
        """Take back the last `count` tokens of every KV head; none of its tokens may have been
        dropped.
        """
        self.used = self.used - count

    def token_ids(self) -> torch.Tensor:
        """Ids of the tokens here, ascending, [B, Hkv, n] on the device with trailing -1."""
        longest = self.longest
        if self.ids is not None:
            return index_of(self.ids[:, :, :longest])
        slots = torch.arange(longest, device=self.first.device).expand(*self.numbers.shape, longest)
        return slots if self.uniform else torch.where(slots < self.filled[..., None], slots, -1)

    def upload(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An index of token ids as the device needs it, and a mask of its entries that are ids
        (None: all are).

        An index that is on a GPU already gets a mask in any case: to look at it, the host would
        have to wait.
        """
        present = index >= 0
        if not index.is_cuda and bool(present.all()):
            return uploaded(index, self.first.device), None
        return uploaded(index, self.first.device), uploaded(present, self.first.device)

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots, in the room of their head, of token ids [B, Hkv, M] on the device (0: none), and
        which are here.
        """
        tokens = index.clamp(min=0)
        if self.ids is None:
            slots, present = tokens, tokens < self.filled[..., None]
        else:
            slots, present = find(self.ids, tokens)
        present = present & (index >= 0)
        return slots.masked_fill(~present, 0), present

    @staticmethod
    def refuse_lost(index: torch.Tensor, present: torch.Tensor) -> None:
        """Refuse token ids [B, Hkv, M] that are not here.

        Raises
        ------
        LookupError
            one is not. On a GPU the kernel is aborted instead.
        """
        present = present | (index < 0)
        if index.is_cuda:
            torch._assert_async(present.all())
        elif not bool(present.all()):
            raise LookupError(
                f"token {index[~present][0].item()} is not in the store: dropped earlier, or not"
                " seen"
            )


class DeviceTier(Slotted):
    """Keys and values on the device.

    Slots of a row and head are filled from 0 without holes, in ascending order of token id. Slots
    after them are zero or stale, finite, and never attended. The prompt stays in the model's dtype
    until `encode`.

    Parameters
    ----------
    key, value
        [B, Hkv, capacity, D], whole pages; used in place.
    reserved
        slots that may be used.
    grows
        the blocks may be reallocated when they are full; else they move in `keep` and `encode`
        only.

    Attributes
    ----------
    pool
        all slots.
    codecs
        how they hold keys and values.
    room
        [B, Hkv] int64 on the CPU, slots of each KV head, whole pages.
    capacity
        slots of the KV head that has most.
    even
        all KV heads have as many.
    reserved
        slots asked for, of the KV head that has filled most; whole pages may be a few more.
    layout
        a number that changes whenever slots move in memory.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, reserved: int, grows: bool = False
    ) -> None:
        self.codecs = Codecs.native(key.shape[3], key.dtype)
        self._hold(Pool.of(key, value), torch.full(key.shape[:2], key.shape[2]))
        self.ids, self.used = None, torch.zeros_like(self.room)
        self.reserved = reserved
        self._grows = grows

    @classmethod
    def zeros(
        cls,
        size: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        grows: bool = False,
    ) -> DeviceTier:
        """A tier with nothing in it; size is (B, Hkv, slots to reserve, D)."""
        reserved = size[2]
        whole = (*size[:2], whole_pages(reserved), size[3])
        # Zeros, not empty: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
        key, value = (zeros(whole, dtype, device) for _ in range(2))
        return cls(key, value, reserved, grows)

    def _hold(self, pool: Pool, room: torch.Tensor) -> None:
        """Use this pool from now on; room [B, Hkv] is the number of slots of each KV head."""
        self.pool, self.room = pool, room
        self.first = uploaded(_first(room), pool.key.device)
        self.layout, self.counters = next(_layouts), None
        self._next_slots: kernels.Slots | None = None
        self.capacity = int(room.max())
        self.even = int(room.min()) == self.capacity

    def __getstate__(self) -> dict[str, Any]:
        """All but what has the addresses of the slots, which are not those of a copy."""
        return self.__dict__ | {"_next_slots": None, "counters": None}

    @property
    def key(self) -> torch.Tensor:
        """Keys as they are held, in place, [B, Hkv, capacity, width], of a tier whose KV heads have
        equal room.
        """
        return self._block(self.pool.key)

    @property
    def value(self) -> torch.Tensor:
        """Values in place, as `key`."""
        return self._block(self.pool.value)

    def _block(self, part: torch.Tensor) -> torch.Tensor:
        assert self.even, "KV heads of unequal room are no block"
        return part.view(*self.room.shape, self.capacity, part.shape[1])

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in one KV head."""
        return self.codecs.nbytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a key, and of a value."""
        return self.codecs.key.nbytes, self.codecs.value.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens here; not those of slots without one."""
        return self.total * self.entry_bytes

    def blocks(self) -> list[torch.Tensor]:
        """All that is held."""
        return [*self.pool]

    # -- writing -----------------------------------------------------------------------------------

    def write_prompt(
        self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]
    ) -> None:
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

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row, whose id is `lengths[b]`; key, value [B,
        Hkv, 1, D].
        """
        if self.longest == self.reserved:
            self.reserve(self.longest + 1)
        self._put(lengths, key, value)
        self.longest, self.total = self.longest + 1, self.total + self.numbers.size

    def advance(self, tokens: int) -> None:
        """Count tokens, see `LayerStore.advance`."""
        self.numbers += tokens
        self.longest += tokens
        self.total += tokens * self.numbers.size

    def _put(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Put tokens [B, Hkv, 1, D] into the slots after the used ones, and count them."""
        if not key.is_cpu or why_missing() is not None:
            self._put_by_torch(lengths, key, value)
            self.numbers += 1
            return
        key, value = self.codecs.encode(key.contiguous(), value.contiguous())
        if self._next_slots is None:  # where the slots are, until they move
            batch, heads = self.numbers.shape
            self._next_slots = kernels.Slots(
                *(part.data_ptr() for part in self.pool),
                self.codecs.key.nbytes,
                self.codecs.value.nbytes,
                self.first.data_ptr(),
                0 if self.ids is None else self.ids.data_ptr(),
                0 if self.ids is None else self.ids.shape[2],
                batch * heads,
                heads,
            )
        self._next_slots.put(key, value, self.used, torch.tensor(lengths))

    @torch.inference_mode()  # tensors made in this mode can be written in it alone
    def _put_by_torch(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """The same by the device's own numbers: a step has the same operations as the one
        before.
        """
        counters = self.counted(lengths)
        encoded = self.codecs.encode(key, value)
        put_token(*self.pool, self.ids, counters.slot, counters.filled, counters.seen, *encoded)

    def _count(self, lengths: Sequence[int]) -> None:
        """One more slot of each KV head is used, by the next token of its row."""
        counters = self.counted(lengths)
        if self.ids is not None:
            token = counters.seen.view(-1, 1, 1).expand(*counters.filled.shape, 1)
            self.ids.scatter_(2, counters.filled[..., None], token)
        counters.advance()

    def counted(self, lengths: Sequence[int]) -> Counters:
        """The counters, of rows that have seen `lengths` tokens."""
        if self.counters is None:
            self.counters = Counters(_first(self.room), self.used, lengths, self.first.device)
        return self.counters

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, in newly allocated memory where they are not there.

        Raises
        ------
        RuntimeError
            the tier may not grow.
        """
        if slots <= self.reserved:
            return
        old_reserved, self.reserved = self.reserved, more_slots(slots, self.reserved, self._grows)
        if self.even:
            room = torch.full_like(self.room, whole_pages(self.reserved))
            key, value = self.key[:, :, :old_reserved], self.value[:, :, :old_reserved]
        else:
            room = self._room()
            key, value = self.stored_rows()[:2]
        self._hold(packed_pool(key, value, self.used, room), room)
        if self.ids is not None:
            self.ids = with_free_slots(
                self.ids[:, :, : min(old_reserved, self.ids.shape[2])], self.capacity
            )

    def _room(self) -> torch.Tensor:
        """Slots in whole pages that each KV head takes, with those reserved for tokens to come; a
        page at least.
        """
        return whole_pages((self.used + (self.reserved - self.longest)).clamp(min=1))

    def keep(
        self,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        room: int | None = None,
    ) -> None:
        """Hold these tokens and no others, in newly allocated memory.

        Parameters
        ----------
        ids
            [B, Hkv, M] ascending, `NO_TOKEN` after.
        used
            [B, Hkv] on the CPU, tokens in each list; M is the most.
        key, value
            [B, Hkv, M, width], as they are held here.
        room
            slots to reserve for tokens to come; None: as many as were.
        """
        free = self.reserved - self.longest if room is None else room
        self.reserved, self.used = ids.shape[2] + free, used
        rooms = self._room()
        self._hold(packed_pool(key, value, used, rooms), rooms)
        self.ids = with_free_slots(ids, self.capacity)

    def encode(self, codecs: Codecs) -> None:
        """Hold what is here, and what comes, as `codecs` say, in newly allocated memory."""
        if codecs == self.codecs:
            return
        key, value = codecs.encode(*self.resident()[:2])
        room = torch.full_like(self.room, whole_pages(self.reserved)) if self.even else self._room()
        self.codecs = codecs
        self._hold(packed_pool(key, value, self.used, room), room)
        if self.ids is not None:
            self.ids = with_free_slots(self.ids[:, :, : key.shape[2]], self.capacity)

    def clear(self) -> None:
        """Free the blocks; nothing comes here any more."""
        self._hold(Pool(*(part[:0].clone() for part in self.pool)), torch.zeros_like(self.room))
        self.used = torch.zeros_like(self.used)
        self.reserved = 0

    # -- reading -----------------------------------------------------------------------------------

    def resident(self) -> Resident:
        """Keys and values, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all
        used).

        They are in place where KV heads have equal room and nothing is coded, else a copy.
        """
        return self._decoded(self.stored_rows())

    def all_slots(self) -> Resident:
        """As `resident`, but n is the capacity: of equal size in all steps until slots move."""
        return self._decoded(self._slots(self.capacity))

    def _decoded(self, stored: Resident) -> Resident:
        return Resident(*self.codecs.decode(stored.key, stored.value), stored.mask)

    def stored_rows(self) -> Resident:
        """As `resident`, in the rows that they are held in."""
        if not self.uniform:
            return self._slots(self.longest)
        return Resident(self.key[:, :, : self.longest], self.value[:, :, : self.longest], None)

    def _slots(self, count: int) -> Resident:
        """The first `count` slots of each KV head as they are held, and whether they are filled."""
        slots, filled = torch.arange(count, device=self.first.device), self.filled[..., None]
        if self.even:
            return Resident(self.key[:, :, :count], self.value[:, :, :count], slots < filled)
        within = torch.minimum(slots, (filled - 1).clamp(min=0))
        key, value = self.pool.at(self.first[..., None] + within)
        return Resident(key, value, slots < filled)

    def spans(self) -> list[Span]:
        """All used slots, in place; each of them in one span."""
        return [Span(self.pool, self.codecs, self.first, torch.zeros_like(self.used), self.used)]

    def tokens(self, row: int, head: int) -> HeadTokens:
        """Those of one KV head, on the CPU."""
        used, first = int(self.used[row, head]), int(self.first[row, head])
        ids = torch.arange(used) if self.ids is None else self.ids[row, head, :used].cpu()
        key, value = self.codecs.decode(*(part[first : first + used] for part in self.pool))
        return HeadTokens(ids, key.cpu(), value.cpu())

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie, on the device or on the CPU as the index may
        be.

        Raises
        ------
        LookupError
            a token that is not here. On a GPU the kernel is aborted instead.
        """
        if index.is_cuda:
            slots, present = locate_tokens(index, self.ids, self.filled, self.first)
            return Located(self.pool, slots, present, self.codecs)
        index, present = self.upload(index)
        slots, here = self.find(index)
        self.refuse_lost(index, here)
        return Located(self.pool, slots + self.first[..., None], present, self.codecs)

    def list_tokens(self, index: torch.Tensor, listed: torch.Tensor, last: torch.Tensor) -> bool:
        """Write where token ids [B, Hs, M] of a GPU lie as lists of a paged kernel, see
        `kvbench.memory.slots.list_tokens`; False: they do not lie where such a kernel reads.
        """
        list_tokens(index, self.ids, self.filled, self.first, listed, last)
        return True


def _first(room: torch.Tensor) -> torch.Tensor:
    """Where the room of each head begins in a pool, for room [B, Hkv]."""
    return room.view(-1).cumsum(0).view_as(room) - room


def packed_pool(
    key: torch.Tensor, value: torch.Tensor, used: torch.Tensor, room: torch.Tensor
) -> Pool:
    """A newly allocated pool with room [B, Hkv] for each head, its first slots from blocks [B, Hkv,
    n, D].

    Parameters
    ----------
    used
        [B, Hkv] on the CPU, what of each head of the blocks is copied where heads have unequal
        room; else all is.
    """
    if int(room.min()) == int(room.max()):
        return Pool.of(with_slots(key, int(room.max())), with_slots(value, int(room.max())))
    slots, first = torch.arange(key.shape[2]), _first(room)
    there = slots < used[..., None]
    target = uploaded((first[..., None] + slots)[there], key.device)
    source = uploaded(flat(slots.expand_as(there), len(slots))[there], key.device)

    def moved(block: torch.Tensor) -> torch.Tensor:
        pool = block.new_zeros(int(room.sum()), block.shape[3])
        return pool.index_copy_(0, target, block.flatten(0, 2).index_select(0, source))

    return Pool(moved(key), moved(value))
