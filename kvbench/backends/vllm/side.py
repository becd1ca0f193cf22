"""What methods keep of prompts whose blocks vLLM frees: rows in a memory of a fixed size.

A request has a seat there while it runs, with room for what its method keeps in all sparse layers
and KV heads together, however these share it out. Tokens that are generated lie in vLLM's blocks,
as ever.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvbench.attention.cpu import Beside, Held, bias_of, held_near, lists_part, rebuilt_keys, run
from kvbench.backends.vllm import kernels
from kvbench.backends.vllm.paged import BlockTable, Memory, PagedTier
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import Located, Pool, Slotted
from kvbench.method import Method, Selection, Shape

LENGTHS = 512  # of prompts, the longest ones, of which all layers are asked


def rows_per_seat(method: Method, shape: Shape) -> int | None:
    """Rows of a seat: what a method keeps of any prompt, of all sparse layers and KV heads.

    None: no less than it has.

    Parameters
    ----------
    method
        that has begun with this shape.
    shape
        of one row, the longest prompt.
    """
    longest, layers = shape.lengths[0], shape.sparse_layers
    if method.evicts == "never" or not layers:
        return None
    # of a shorter one more may be kept: some methods keep blocks until they are full
    lengths = range(1, longest + 1)
    most = [method.mean_rule(length, 0) for length in lengths]
    if most[0] is None:
        most = [method.rule(layers[0], length, 0) or longest for length in lengths]
        most += [
            method.rule(layer, length, 0) or longest
            for length in lengths[-LENGTHS:]
            for layer in layers
        ]
    retained = max(count for count in most if count is not None)
    return None if retained >= longest else math.ceil(retained * len(layers)) * shape.kv_heads


class Side:
    """Rows of keys and values, in seats of equal size.

    Parameters
    ----------
    seats
        requests that run at once.
    rows, layers
        see below.
    head_dim, dtype
        of keys and values.

    Attributes
    ----------
    pool
        all seats.
    rows
        of a seat.
    layers
        sparse ones of the model, which share a seat.
    seats
        how many there are.
    free
        seats that nobody has.
    """

    def __init__(
        self, seats: int, rows: int, head_dim: int, dtype: torch.dtype, layers: int
    ) -> None:
        self.pool = Pool(*(torch.zeros(seats * rows, head_dim, dtype=dtype) for _ in range(2)))
        self.rows = rows
        self.layers = layers
        self.seats = seats
        self.free = list(range(seats))

    @staticmethod
    def nbytes(seats: int, rows: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a memory of this size."""
        return 2 * seats * rows * head_dim * dtype.itemsize

    def counts(self) -> dict[str, float]:
        """Bytes of the seats that requests have, `side_used_bytes`, and of all, `side_bytes`."""
        seat_bytes = self.nbytes(1, self.rows, self.pool.key.shape[1], self.pool.key.dtype)
        return {
            "side_used_bytes": (self.seats - len(self.free)) * seat_bytes,
            "side_bytes": self.seats * seat_bytes,
        }

    def take(self) -> Seat:
        """A seat that is free."""
        return Seat(self, self.free.pop())

    def give(self, number: int) -> None:
        """Nobody reads this one any more."""
        self.free.append(number)


class Seat:
    """A request's part of the memory.

    Parameters
    ----------
    side
        the memory.
    number
        of the seat.
    """

    def __init__(self, side: Side, number: int) -> None:
        self.side = side
        self._number = number
        self._taken = 0

    @property
    def share(self) -> int:
        """Bytes of it, for each sparse layer."""
        side = self.side
        return side.nbytes(1, side.rows, side.pool.key.shape[1], side.pool.key.dtype) // side.layers

    def room(self, rows: int) -> int:
        """The first of so many rows that nobody has yet.

        Raises
        ------
        RuntimeError
            the method keeps more than its rule says.
        """
        first, self._taken = self._taken, self._taken + rows
        if self._taken > self.side.rows:
            raise RuntimeError(
                f"a method keeps {self._taken} rows of a prompt, and its rule says {self.side.rows}"
            )
        return self._number * self.side.rows + first

    def leave(self) -> None:
        """The request has ended, or is preempted."""
        self.side.give(self._number)


class _CopiedRows(Slotted):
    """The rows of one request in one layer, without holes.

    Parameters
    ----------
    seat
        of the request.
    ids
        [1, Hkv, M] ascending, `NO_TOKEN` after.
    used
        [1, Hkv], of each list.
    key, value
        [1, Hkv, M, D].
    """

    def __init__(
        self,
        seat: Seat,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        self.pool = seat.side.pool
        self.ids = ids
        self.used = used
        begin, there = seat.room(self.total), torch.arange(ids.shape[2]) < used[..., None]
        self.first = begin + used.cumsum(1) - used
        for part, rows in zip(self.pool, (key, value), strict=True):
            part[begin : begin + self.total] = rows[there]

    def held(self, codecs: Codecs) -> Held:
        """As kernels find them by their ids."""
        none = torch.zeros_like(self.used)
        counts = self.first, self.used, none, self.used
        return held_near(codecs, (*self.pool, None), self.ids, *counts)

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in slots [1, Hkv, M] of their head, [1, Hkv, M, D] each."""
        return self.pool.at(slots + self.first[..., None])


class SideTier(PagedTier):
    """As `PagedTier`.

    Once the prompt is over, its tokens are read where they were copied to, and in no block.

    Parameters
    ----------
    memory, table, layer
        as of `PagedTier`.
    seat
        of the request.

    Attributes
    ----------
    kept
        the copies; None: the prompt is not over.
    prompt
        tokens of it, once it is.
    cut
        of what was copied some is attended no more.
    """

    writable = True
    copies: _CopiedRows | None = None
    prompt, cut = 0, False

    def __init__(self, memory: Memory, table: BlockTable, layer: int, seat: Seat) -> None:
        super().__init__(memory, table, layer)
        self._seat = seat

    def keep(
        self,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        room: int | None = None,
    ) -> None:
        """See `PagedTier.keep`; what is first kept, of the prompt, is copied."""
        self.cut = self.copies is not None
        super().keep(ids, used, key, value, room)
        if self.copies is None:
            self._copy(ids, key, value)

    def _copy(self, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.copies = _CopiedRows(self._seat, ids.contiguous(), self.used, key, value)
        # in which a method may write: see `kvbench.memory.view.StoreView.write`
        self.pool = self.copies.pool

    def end_prompt(self, length: int) -> None:
        """See `PagedTier.end_prompt`; where all of it was kept, all is copied."""
        if self.copies is None:
            ids = self.token_ids()
            self._copy(ids, *self.rows(ids))
        self.prompt = length

    def bytes_for(self, length: int) -> int:
        """See `PagedTier.bytes_for`.

        Without the prompt's whole blocks, and with the room for copies of it.
        """
        blocks = super().bytes_for(length) - super().bytes_for(
            self.prompt - self.prompt % self.memory.size
        )
        return blocks + self._seat.share

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedTier.rows`."""
        if self.copies is None:
            return super().rows(ids)
        slots, copied = self.copies.find(ids)
        here, there = self.copies.at(slots), super().rows(ids.masked_fill(copied, -1))
        ours = (copied | (ids < 0))[..., None]
        key, value = (torch.where(ours, *pair) for pair in zip(here, there, strict=True))
        return key, value

    def locate(self, index: torch.Tensor) -> Located:
        """See `PagedTier.locate`; of copies, slots are those of `pool`."""
        located = super().locate(index)
        if self.copies is None:
            return located
        return replace(located, slots=self.copies.find(index)[0] + self.copies.first[..., None])


def attend_some(
    query: torch.Tensor, tier: SideTier, selection: Selection, scaling: float
) -> torch.Tensor:
    """Attention of one request, [1, Hq, 1, D], to a selection of what it holds in one layer.

    Raises
    ------
    LookupError
        a token that is selected is not attended any more, or was never seen.
    """
    tier.refuse_absent(selection.index)
    assert tier.copies is not None
    copies, heads = tier.copies, tier.memory.kv_heads
    index = selection.index.contiguous()
    lists = max(index.shape[1], heads)
    bias, old = bias_of(selection, 1, lists), index < tier.prompt
    rebuilt = rebuilt_keys(selection, query.dtype)
    copied, since = (index.masked_fill(mask, -1) for mask in (~old, old))
    blocks = tier.memory.blocks(tier.table[None])
    parts = [
        lists_part(copied, bias, copies.held(tier.codecs), rebuilt, True),
        kernels.blocks_part(since, bias, blocks, rebuilt, query.dtype),
    ]
    if selection.extra is not None:
        parts.append(Beside.of(selection.extra, query.dtype).alone(index, bias, heads))
    return run(query, scaling, lists, parts, 0).out
