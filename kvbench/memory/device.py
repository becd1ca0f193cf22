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
from torch.nn.functional import pad

from kvbench.kernels import tokens as kernels
from kvbench.kernels.library import why_missing
from kvbench.kernels.operators import operator
from kvbench.memory.codecs import Codecs
from kvbench.memory.transfer import uploaded

# slots of a page: blocks on the device are whole pages, so that a paged kernel reads them in place
PAGE = 16
GROWTH = 256  # slots added at least when a tier of unknown final length is full
NO_TOKEN = torch.iinfo(torch.int64).max  # sorts after every token id

Slots = TypeVar("Slots", int, torch.Tensor)
_layouts = itertools.count()  # a number for each place that slots were ever in


def whole_pages(slots: Slots) -> Slots:
    """Slots of as many pages as it takes."""
    return -(-slots // PAGE) * PAGE


def more_slots(slots: int, reserved: int, grows: bool) -> int:
    """Slots to reserve where `slots` are needed and fewer, `reserved`, are there; refused of a tier
    that may not grow.
    """
    if not grows:
        raise RuntimeError(f"the store reserved {reserved} tokens and was asked to hold {slots}")
    return max(slots, reserved + max(GROWTH, reserved // 8))


# -- lists of token ids ----------------------------------------------------------------------------


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


def index_of(lists: torch.Tensor) -> torch.Tensor:
    """Lists [B, H, n] as token ids with -1 for `NO_TOKEN`."""
    return torch.where(lists == NO_TOKEN, -1, lists)


def repeated(lists: torch.Tensor) -> torch.Tensor:
    """[B, H, n] bool, True on entries of ascending lists [B, H, n] that also stand before them."""
    again = torch.zeros_like(lists, dtype=torch.bool)
    again[..., 1:] = lists[..., 1:] == lists[..., :-1]
    return again


def distinct(lists: torch.Tensor) -> torch.Tensor:
    """Ascending lists without repeats, as long as they were."""
    return lists.masked_fill(repeated(lists), NO_TOKEN).sort(dim=2).values


def of_kv_heads(index: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Token ids [B, Hs, M], Hs = 1, Hkv or Hq, as a list of each KV head, [B, Hkv, n]: a query
    group's in one.
    """
    if index.shape[1] <= kv_heads:
        return index.expand(-1, kv_heads, -1)
    return index.reshape(len(index), kv_heads, -1)


def without(index: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    """Token ids [B, H, n], -1 for each that its row and head also have in `gone` [B, H, M]."""
    # as numbers that differ between rows and heads
    ours, theirs = (torch.where(ids < 0, -1, flat(ids, 1 << 40)) for ids in (index, gone))
    return torch.where(torch.isin(ours, theirs), -1, index)


def with_free_slots(ids: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of the lists ids [B, H, n] for `capacity` slots, `NO_TOKEN` from n on."""
    copy = ids.new_full((*ids.shape[:2], capacity), NO_TOKEN)
    copy[:, :, : ids.shape[2]] = ids
    return copy


# -- operators of a tier on a GPU; their Triton kernels are in `kvbench.memory.gpu` ----------------


@operator("kvbench.memory.gpu", writes=("keys", "values", "ids", "slots", "filled", "seen"))
def put_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor | None,
    slots: torch.Tensor,
    filled: torch.Tensor,
    seen: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Store the next token of every row, key and value [B, Hkv, 1, width], and count it.

    Parameters
    ----------
    keys, values
        [T, width], the pool.
    ids
        [B, Hkv, capacity], the token in each slot of a head's room; None: slot = id.
    slots, filled, seen
        see `kvbench.memory.device.Counters`.
    """
    keys.index_copy_(0, slots, key.flatten(0, 2))
    values.index_copy_(0, slots, value.flatten(0, 2))
    if ids is not None:
        ids.scatter_(2, filled[..., None], seen.view(-1, 1, 1).expand(*filled.shape, 1))
    for counter in (slots, filled, seen):
        counter.add_(1)


@operator("kvbench.memory.gpu")
def find_tokens(
    index: torch.Tensor, ids: torch.Tensor | None, filled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, in the room of their head, of token ids index [B, Hkv, M] (0: none), and which are
    here; `ids` and `filled` as in `put_token`.
    """
    slots = index.clamp(min=0)
    slots, here = (slots, slots < filled[..., None]) if ids is None else find(ids, slots)
    here = here & (index >= 0)
    return slots.masked_fill(~here, 0), here


@operator("kvbench.memory.gpu")
def locate_tokens(
    index: torch.Tensor, ids: torch.Tensor | None, filled: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool's slots of token ids index [B, Hkv, M] (-1 = none: any slot), and which are ids; a
    token that is not here aborts.

    `ids` and `filled` are as in `put_token`, `first` [B, Hkv] is where each head's room begins.
    """
    (slots, here), present = find_tokens.reference(index, ids, filled), index >= 0
    torch._assert_async((here | ~present).all())
    return slots + first[..., None], present


@operator("kvbench.memory.gpu", writes=("listed", "last"))
def list_tokens(
    index: torch.Tensor,
    ids: torch.Tensor | None,
    filled: torch.Tensor,
    first: torch.Tensor,
    listed: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Write lists of the pool's slots as a paged kernel reads them, in pages of one token.

    Parameters
    ----------
    index
        [B, Hs, M], trailing -1, Hs a multiple of Hkv: lists of query heads; others: see
        `locate_tokens`.
    listed
        [B * Hs, pages] int32, of which the first M are written.
    last
        [B * Hs] int32, tokens of the last page where all pages but that one are full: below 1 where
        a list ends before.
    """
    of_kv_heads = index.reshape(*filled.shape, -1)
    slots, present = locate_tokens.reference(of_kv_heads, ids, filled, first)
    listed[:, : index.shape[2]] = slots.view(len(listed), -1)
    torch.sub(present.view(len(listed), -1).sum(dim=1), listed.shape[1] - 1, out=last)


# -- rows of keys and values -----------------------------------------------------------------------


def flat(slots: torch.Tensor, count: int) -> torch.Tensor:
    """Slots [B, H, M] of blocks of `count` slots as slots of the pool."""
    size = slots.shape[:2]
    return slots + torch.arange(size.numel(), device=slots.device).view(*size, 1) * count


def rows(block: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """block [B, H, n, D] at slots [B, H, M]: [B, H, M, D]; zeros where n is 0.

    Much quicker than torch.gather on a CPU.
    """
    return rows_at(block.flatten(0, 2), flat(slots, block.shape[2]))


def rows_at(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots [B, H, M] of a pool [T, width]: [B, H, M, width]; zeros where the pool has none."""
    size = (*slots.shape, pool.shape[1])
    if not len(pool):
        return pool.new_zeros(size)
    return pool.index_select(0, slots.reshape(-1)).view(size)


class Pool(NamedTuple):
    """Keys and values in slots of all rows and heads, [T, width] each, without holes; T is whole
    pages.
    """

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> Pool:
        """Blocks [B, H, n, width] as they lie, in place."""
        key, value = (part.view(part.shape[:3].numel(), part.shape[3]) for part in (key, value))
        return cls(key, value)

    @classmethod
    def packed(
        cls, key: torch.Tensor, value: torch.Tensor, used: torch.Tensor, room: torch.Tensor
    ) -> Pool:
        """A newly allocated pool with room [B, Hkv] for each head, its first slots from blocks [B,
        Hkv, n, width]; of heads with unequal room as many as `used` [B, Hkv] says, on the CPU.
        """
        most = int(room.max())
        if int(room.min()) == most:
            return cls.of(*(pad(block, (0, 0, 0, most - block.shape[2])) for block in (key, value)))
        slots, first = torch.arange(key.shape[2]), first_slots(room)
        there = slots < used[..., None]
        target = uploaded((first[..., None] + slots)[there], key.device)
        source = uploaded(flat(slots.expand_as(there), len(slots))[there], key.device)

        def moved(block: torch.Tensor) -> torch.Tensor:
            pool = block.new_zeros(int(room.sum()), block.shape[3])
            return pool.index_copy_(0, target, block.flatten(0, 2).index_select(0, source))

        return cls(moved(key), moved(value))

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What slots [B, H, M] of the pool hold, see `rows_at`."""
        return rows_at(self.key, slots), rows_at(self.value, slots)


def first_slots(room: torch.Tensor) -> torch.Tensor:
    """Where the room of each head begins in a pool, for room [B, Hkv]."""
    return room.view(-1).cumsum(0).view_as(room) - room


class Resident(NamedTuple):
    """Keys and values [B, H, n, D or width], and where there are some; None: everywhere."""

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Located:
    """Where tokens lie on the device: the pool's slots [B, Hkv, M], any where none was asked for;
    `present` [B, Hkv, M] says where one was, None: everywhere.
    """

    pool: Pool
    slots: torch.Tensor
    present: torch.Tensor | None
    codecs: Codecs

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens, [B, Hkv, M, D] each; finite where none was asked for."""
        return self.codecs.decode(*self.stored_rows())

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rows`, in the rows that the pool holds them in."""
        return self.pool.at(self.slots)


class Span(NamedTuple):
    """A stretch of slots of each KV head that one pool holds in one way, in place: from `begin` on
    and before `end`, [B, Hkv] int64 on the CPU; `first` [B, Hkv] is where the pool has, or would
    have, slot 0. `parameters` [groups, 2, D] are of keys that have them by groups of tokens.
    """

    pool: Pool
    codecs: Codecs
    first: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    parameters: torch.Tensor | None = None


# -- which token is where --------------------------------------------------------------------------


class Counters(NamedTuple):
    """What each token changes, on the device, in place, int64: the pool's slot of the next token of
    each KV head [B * Hkv], slots filled [B, Hkv], and tokens seen by each row [B], which is the id
    of the next one.
    """

    slot: torch.Tensor
    filled: torch.Tensor
    seen: torch.Tensor


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
    longest, total, uniform
        the most of these, their sum, and whether all are equal.
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
        """Take back the last `count` tokens of every KV head, which has dropped none."""
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
        (None: all are, which nobody looks at on a GPU).
        """
        present = index >= 0
        if not index.is_cuda and bool(present.all()):
            return uploaded(index, self.first.device), None
        return uploaded(index, self.first.device), uploaded(present, self.first.device)

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of token ids [B, Hkv, M] on the device, and which are here; see `find_tokens`."""
        slots, here = find_tokens(index, self.ids, self.filled)
        return slots, here

    @staticmethod
    def refuse_lost(index: torch.Tensor, present: torch.Tensor) -> None:
        """Raise LookupError where a token id [B, Hkv, M] is not here; a GPU's kernel aborts."""
        present = present | (index < 0)
        if index.is_cuda:
            torch._assert_async(present.all())
        elif not bool(present.all()):
            raise LookupError(
                f"token {index[~present][0].item()} is not in the store: dropped earlier, or not"
                " seen"
            )


class DeviceTier(Slotted):
    """Keys and values on the device, from blocks [B, Hkv, capacity, D] of whole pages, in place.

    Slots after the used ones are zero or stale, finite, and never attended. The prompt stays in the
    model's dtype until `encode`.

    Attributes
    ----------
    pool, codecs
        all slots, and how they hold keys and values.
    room
        [B, Hkv] int64 on the CPU, slots of each KV head, whole pages.
    capacity, even
        slots of the KV head that has most, and whether all have as many.
    reserved
        slots asked for, of the KV head that has filled most; whole pages may be a few more. Where
        the tier grows the blocks are reallocated when they are full; else they move in `keep` and
        `encode` only.
    layout
        a number that changes whenever slots move in memory.
    """

    unit = PAGE  # the room of a KV head is a multiple of it

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        reserved: int,
        grows: bool = False,
        latent_dim: int = 0,
    ) -> None:
        self.codecs = Codecs.native(key.shape[3], key.dtype, latent_dim)
        self._hold(Pool.of(key, value), torch.full(key.shape[:2], key.shape[2]))
        self.ids, self.used = None, torch.zeros_like(self.room)
        self.reserved = reserved
        self._grows = grows

    def _hold(self, pool: Pool, room: torch.Tensor) -> None:
        """Use this pool from now on; room [B, Hkv] is the number of slots of each KV head."""
        self.pool, self.room = pool, room
        self.first = uploaded(first_slots(room), pool.key.device)
        self.layout, self.counters = next(_layouts), None
        self._next_slots: kernels.Slots | None = None
        self.capacity = int(room.max())
        self.even = int(room.min()) == self.capacity

    def _repack(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        ids: torch.Tensor | None,
        used: torch.Tensor | None = None,
        even: bool = False,
    ) -> None:
        """Hold other rows [B, Hkv, n, width], in newly allocated memory; `ids`: as of `Slotted`,
        `used`: what of each KV head they are, else what is used; `even`: with room for as many.
        """
        room = self._room(even)
        self._hold(Pool.packed(key, value, self.used if used is None else used, room), room)
        capacity = self.capacity
        self.ids = None if ids is None else with_free_slots(ids[:, :, :capacity], capacity)

    def _room(self, even: bool = False) -> torch.Tensor:
        """Slots that each KV head takes, in whole units, with those reserved for tokens to come."""
        room = (self.used + (self.reserved - self.longest)).clamp(min=1)
        if even:
            room = torch.full_like(room, self.reserved)
        return -(-room // self.unit) * self.unit

    def __getstate__(self) -> dict[str, Any]:
        """All but what has the addresses of the slots, which are not those of a copy."""
        return self.__dict__ | {"_next_slots": None, "counters": None}

    @property
    def key(self) -> torch.Tensor:
        """Keys as held, in place, [B, Hkv, capacity, width], of KV heads with equal room."""
        return self._block(self.pool.key)

    @property
    def value(self) -> torch.Tensor:
        """Values in place, as `key`."""
        return self._block(self.pool.value)

    def _block(self, part: torch.Tensor) -> torch.Tensor:
        assert self.even, "KV heads of unequal room are no block"
        return part.view(*self.room.shape, self.capacity, part.shape[1])

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a key, and of a value."""
        return self.codecs.key.nbytes, self.codecs.value.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens here; not those of slots without one."""
        return self.total * self.codecs.nbytes

    def blocks(self) -> list[torch.Tensor]:
        """All that is held."""
        return [*self.pool]

    # -- writing -----------------------------------------------------------------------------------

    def write_prompt(
        self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]
    ) -> None:
        """Store a prefill chunk; see `LayerStore.write_prompt`."""
        key, value = self.codecs.encode(key, value)
        end = column + key.shape[2]
        self.reserve(end)
        for row, offset in enumerate(offsets):
            skip = max(0, offset - column)
            if skip < key.shape[2]:
                slots = slice(column + skip - offset, end - offset)
                self.key[row, :, slots] = key[row, :, skip:]
                self.value[row, :, slots] = value[row, :, skip:]

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token, key, value [B, Hkv, 1, D], of every row, whose id is its length."""
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
            self._put_counted(lengths, self.pool, None, *self.codecs.encode(key, value))
            self.numbers += 1
            return
        key, value = self.codecs.encode(key.contiguous(), value.contiguous())
        if self._next_slots is None:  # where the slots are, until they move
            batch, heads = self.numbers.shape
            self._next_slots = kernels.Slots(
                *(part.data_ptr() for part in self.pool),
                *self.sizes,
                self.first.data_ptr(),
                0 if self.ids is None else self.ids.data_ptr(),
                0 if self.ids is None else self.ids.shape[2],
                batch * heads,
                heads,
            )
        self._next_slots.put(key, value, self.used, torch.tensor(lengths))

    @torch.inference_mode()  # tensors made in this mode can be written in it alone
    def _put_counted(
        self, lengths: Sequence[int], pool: Pool, slots: torch.Tensor | None, *rows: torch.Tensor
    ) -> None:
        """The same by the device's own numbers, as a step has the same operations as the one
        before, in slots [B * Hkv] of a pool; None: those after the used ones.
        """
        if self.counters is None:
            first, used = first_slots(self.room), self.used
            parts = (first + used).view(-1), used.reshape(-1), torch.tensor(lengths)
            sent = uploaded(torch.cat(parts), self.first.device)
            views = sent.split([part.numel() for part in parts])
            self.counters = Counters(views[0], views[1].view_as(used), views[2])
        slots = self.counters.slot if slots is None else slots
        put_token(*pool, self.ids, slots, self.counters.filled, self.counters.seen, *rows)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, in newly allocated memory where they are not there."""
        if slots > self.reserved:
            before, self.reserved = self.reserved, more_slots(slots, self.reserved, self._grows)
            # of a prompt, all that is there: none of it is used before it is sealed
            stored = self._slots(before if self.even else self.longest, masked=not self.even)
            self._repack(stored.key, stored.value, self.ids, even=self.even)

    def keep(
        self,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        room: int | None = None,
    ) -> None:
        """Hold these tokens and no others, in newly allocated memory: ids [B, Hkv, M] ascending,
        `NO_TOKEN` after, of which `used` [B, Hkv] on the CPU are tokens, M the most, with rows [B,
        Hkv, M, width] as they are held here; `room`: slots for tokens to come, None: as many as
        were.
        """
        free = self.reserved - self.longest if room is None else room
        self.reserved, self.used = ids.shape[2] + free, used
        self._repack(key, value, ids)

    def encode(self, codecs: Codecs) -> None:
        """Hold what is here, and what comes, as `codecs` say, in newly allocated memory."""
        if codecs == self.codecs:
            return
        key, value = codecs.encode(*self.resident()[:2])
        self.codecs = codecs
        self._repack(key, value, self.ids, even=self.even)

    def clear(self) -> None:
        """Free the blocks; nothing comes here any more."""
        self._hold(Pool(*(part[:0].clone() for part in self.pool)), torch.zeros_like(self.room))
        self.used = torch.zeros_like(self.used)
        self.reserved = 0

    # -- reading -----------------------------------------------------------------------------------

    def resident(self, whole: bool = False) -> Resident:
        """Keys and values, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all
        used); `whole`: n is the capacity, of equal size in all steps until slots move.

        They are in place where KV heads have equal room and nothing is coded, else a copy.
        """
        stored = self._slots(self.capacity) if whole else self.stored_rows()
        return Resident(*self.codecs.decode(stored.key, stored.value), stored.mask)

    def prompt_rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `count` slots of a prompt, in place, [B, Hkv, count, D]."""
        return self.codecs.decode(self.key[:, :, :count], self.value[:, :, :count])

    def stored_rows(self) -> Resident:
        """As `resident`, in the rows that they are held in."""
        return self._slots(self.longest, masked=not self.uniform)

    def _slots(self, count: int, masked: bool = True) -> Resident:
        """The first `count` slots of each KV head as they are held, and whether they are filled."""
        if self.even and not masked:
            return Resident(self.key[:, :, :count], self.value[:, :, :count], None)
        slots, filled = torch.arange(count, device=self.first.device), self.filled[..., None]
        if self.even:
            return Resident(self.key[:, :, :count], self.value[:, :, :count], slots < filled)
        within = torch.minimum(slots, (filled - 1).clamp(min=0))
        return Resident(*self.at(within), slots < filled)

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, as they are held, of slots [B, Hkv, M], each in the room of its head."""
        return self.pool.at(slots + self.first[..., None])

    def spans(self) -> list[Span]:
        """All used slots, in place; each of them in one span."""
        return [Span(self.pool, self.codecs, self.first, torch.zeros_like(self.used), self.used)]

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie; see `LayerStore.locate`."""
        if index.is_cuda:
            slots, present = locate_tokens(index, self.ids, self.filled, self.first)
            return Located(self.pool, slots, present, self.codecs)
        index, present = self.upload(index)
        slots, here = self.find(index)
        self.refuse_lost(index, here)
        return Located(self.pool, slots + self.first[..., None], present, self.codecs)
