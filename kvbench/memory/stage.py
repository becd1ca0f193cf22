"""The stage of a layer: copies of host tokens on the device, and how they get there.

A selection made on the CPU is planned there, and what is missing goes up in one transfer; one made
on the device stays there, and the device reads the host's memory itself. What is staged already is
not moved again. On a GPU rows come up on a side stream, beside what is computed until attention
needs them; how long it then stands still is the span "waiting". Where attention reads the host's
memory in place, no copy is made: the stage only counts what would have been held and moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvbench.kernels.lists import plan_lists
from kvbench.memory.device import (
    NO_TOKEN,
    Located,
    Pool,
    find,
    flat,
    index_of,
    lists_of,
    of_kv_heads,
    whole_pages,
    without,
)
from kvbench.memory.host import HostTier, rows_in
from kvbench.memory.transfer import fetch, side_stream, uploaded
from kvbench.method import DeviceCache
from kvbench.spans import Spans


class Keeper(Protocol):
    """A policy, with what it remembers of one layer."""

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """A step attended token ids [B, Hkv, U] on the CPU, distinct, -1 = none; rows have seen
        `lengths` tokens.

        Returns
        -------
        torch.Tensor
            [B, Hkv, n] ids that the device holds from now on, attended or not, -1 = none.
        """


def keeper_of(cache: DeviceCache) -> Keeper | None:
    """The policy; None where nothing stays but what the last step attended."""
    if cache.policy == "last":
        return LastSteps(cache.steps) if cache.steps > 1 else None
    return FrequentBlocks(cache.tokens // cache.block, cache.block, counts=cache.policy == "lfu")


class LastSteps:
    """What the last `steps` steps attended stays."""

    def __init__(self, steps: int) -> None:
        self._attended: deque[torch.Tensor] = deque(maxlen=steps)

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See `Keeper`."""
        self._attended.append(ids)
        return torch.cat([*self._attended], dim=2)


class FrequentBlocks:
    """The blocks of a row that were used last or most often stay, in all its KV heads.

    A step uses a block if it attends a token of it, in any KV head, that the step before did not
    attend; tokens that it did, such as sinks and recent ones, are on the device anyway. If a step
    uses more blocks than there is room for, those with most such tokens count. Blocks of one step
    are noted in ascending order of that number, equal ones in the order of the text.

    Parameters
    ----------
    room
        the most blocks of a row that stay.
    block
        tokens of a block; the last one of a text counts once it is full.
    counts
        the block used least often since it came up leaves first, among equals the one used longest
        ago; without, always the one used longest ago.
    """

    def __init__(self, room: int, block: int, counts: bool) -> None:
        self._room, self._block = room, block
        self._counts = counts
        # of each block there, how often and when it was used
        self._rows: list[dict[int, tuple[int, int]]] = []
        self._before: torch.Tensor | None = None  # what the last step attended
        self._clock = 0

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See `Keeper`."""
        self._rows = self._rows or [{} for _ in lengths]
        fresh = ids if self._before is None else without(ids, self._before)
        self._before = ids
        for blocks, new, length in zip(self._rows, fresh.numpy(), lengths, strict=True):
            # nor the newest
            whole = new[(new >= 0) & (new < min(length // self._block * self._block, length - 1))]
            uses = np.bincount(whole // self._block)
            used = uses.nonzero()[0]
            for block in used[np.argsort(uses[used], kind="stable")][-self._room :].tolist():
                self._use(blocks, block)
        retained = np.full((len(lengths), max(map(len, self._rows)), self._block), -1)
        for row, blocks in enumerate(self._rows):
            retained[row, : len(blocks)] = np.array([*blocks], np.int64)[
                :, None
            ] * self._block + np.arange(self._block)
        return torch.from_numpy(retained).flatten(1)[:, None].expand(-1, ids.shape[1], -1)

    def _use(self, blocks: dict[int, tuple[int, int]], block: int) -> None:
        if block not in blocks and len(blocks) == self._room:
            del blocks[min(blocks, key=blocks.__getitem__)]
        times, _ = blocks.get(block, (0, 0))
        self._clock += 1
        blocks[block] = times + self._counts, self._clock


NO_OUTPUT = np.empty((0, 0), np.int64)
NOTHING = torch.empty(0, dtype=torch.int64)


class Counts(NamedTuple):
    """What `plan_lists` counts; see `StagePlan`. `longest`: ids of the longest list."""

    moving: int
    longest: int
    complete: bool
    hits: int
    total: int


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
    batch = len(lists)
    size, count = batch * heads, max(1, lists.shape[1] // heads) * lists.shape[2]
    have = NO_OUTPUT if staged is None else staged.contiguous().view(size, -1).numpy()
    last = np.full(batch, -1) if newest is None else np.array(newest)
    ids = np.empty((size, whole_pages(count)), np.int64)
    ids.fill(NO_TOKEN)
    if counted:
        counts = Counts(*plan_lists(lists, have, last, ids, NO_OUTPUT, NO_OUTPUT, NO_OUTPUT))
        parts = (NOTHING,) * 4
    else:
        source, slots = np.zeros_like(ids), np.full((size, count), -1)
        missing = np.empty((2, size * count), np.int64)
        counts = Counts(*plan_lists(lists, have, last, ids, source, slots, missing))
        whole = source[:, : whole_pages(counts.longest)], slots
        rows = (torch.from_numpy(part).view(batch, heads, part.shape[1]) for part in whole)
        parts = *rows, *torch.from_numpy(missing[:, : counts.moving])
    width = whole_pages(counts.longest)
    ids = np.ascontiguousarray(ids[:, :width]).reshape(batch, heads, width)
    numbers = counts.total, counts.moving, counts.hits, counts.complete
    return StagePlan(torch.from_numpy(ids), *numbers, *parts)


@cache
def compile_kernels() -> None:
    """Compile, or read from disk, before anything is timed."""
    plan_stage(torch.zeros(1, 1, 1, dtype=torch.int64), 1, None, None)


LAST = DeviceCache()
# of each row, the id of the token whose key and value are on the device anyway
Newest = list[int] | None
Blocks = tuple[tuple[torch.Tensor, torch.Tensor], ...]  # keys and values that lie together


@dataclass(frozen=True, eq=False)
class Staged:
    """Copies of host tokens: of the last selection, and what else stays.

    Attributes
    ----------
    ids
        [B, Hkv, U] ascending, `NO_TOKEN` after the last; on the side where the selection was made.
    rows
        keys and values [B, Hkv, U, width] on the device, as held on the host; None where attention
        is in place.
    total
        how many ids these are, a number on the device where the selection was made there.
    """

    ids: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor] | None
    total: int | torch.Tensor


@dataclass(frozen=True, eq=False)
class Pending:
    """Tokens to be staged, some of them still on their way up.

    Attributes
    ----------
    ids, total
        [B, Hkv, U] and their number, as of `Staged`.
    source
        [B, Hkv, U] int64 on the CPU, the row of each in `blocks` taken one after the other.
    blocks
        keys and values, [..., D] each, on the device; the last is there for who waits on `event`,
        if any.
    """

    ids: torch.Tensor
    total: int
    source: torch.Tensor
    blocks: Blocks
    event: torch.cuda.Event | None = None


class Stage:
    """What of a host tier is on the device.

    Parameters
    ----------
    host
        the tier.
    device
        where the stage is.
    moved
        called with the number of tokens that were moved up, by the host or by the device.
    in_place
        attention reads the host's memory, so nothing is copied; the device is the CPU.
    cache
        what stays beside the last selection.
    count_hits
        called with the attended tokens, newest ones left out, that were here and that were moved
        up.
    values_only
        keys are not moved; zeros stand in their place.
    spans
        that the time of waiting for rows goes to.

    Attributes
    ----------
    newest
        keys and values [B, Hkv, 1, width] of the current token, which come from the device anyway.
    values_only
        as above.
    """

    def __init__(
        self,
        host: HostTier,
        device: torch.device,
        moved: Callable[[int], None],
        in_place: bool = False,
        cache: DeviceCache = LAST,
        count_hits: Callable[[int, int], None] = lambda here, moved: None,
        values_only: bool = False,
        spans: Spans | None = None,
    ) -> None:
        compile_kernels()
        self.newest: tuple[torch.Tensor, torch.Tensor] | None = None
        self._host, self._device = host, device
        self._moved, self._in_place = moved, in_place
        self._spans = spans or Spans()
        self._keeper, self._count_hits = keeper_of(cache), count_hits
        self._retained: torch.Tensor | None = None  # [B, Hkv, n] ids that stay, by the keeper
        self.values_only = values_only
        self._nothing = tuple(
            block.new_empty(0, block.shape[3], device=device) for block in (host.key, host.value)
        )
        self._staged: Staged | None = None
        self._noted: deque[Callable[[], None]] = deque()  # what is still to be planned, in order
        self._pending: Pending | None = None
        # tokens that the device itself has read, not yet counted as moved
        self._fetched: torch.Tensor | int = 0
        self._here: torch.Tensor | int = 0  # and those that it had, not yet counted as found

    @property
    def staged(self) -> Staged | None:
        """What is on the device."""
        self._settle()
        return self._staged

    def forget(self) -> None:
        """Nothing is staged any more."""
        self._settle()
        self._staged = self._pending = None

    def locate(self, index: torch.Tensor, lengths: Sequence[int]) -> Located:
        """Stage the tokens of index [B, Hkv, M] (-1 = none, repeats allowed), and of others what
        the cache keeps.

        Parameters
        ----------
        index
            on the CPU, or on the device; there it may name any token that was seen.
        lengths
            tokens seen by each row.

        Raises
        ------
        LookupError
            a token that is not in the tier. An index on a GPU aborts the kernel instead.
        """
        self.receive()
        if index.is_cuda and not self._host.arranged and self._keeper is None:
            return self._read_by_device(index, lengths)
        index = index.cpu()
        if index.numel() and (last := int(index.max())) >= self._host.capacity:
            raise LookupError(f"token {last} is not in the store: not seen yet")
        plan = self._plan_step(index, lengths, self._newest(lengths), counted=False)
        self._staged = self._received(self._sent(plan))
        rows = self._staged.rows or self._host.gather(index_of(self._staged.ids))
        slots, pool = uploaded(plan.slots, self._device), Pool.of(*rows)
        count = rows[0].shape[2]
        if plan.complete:
            return Located(pool, flat(slots, count), None, self._host.codecs)
        return Located(pool, flat(slots.clamp(min=0), count), slots >= 0, self._host.codecs)

    def prefetch(self, index: torch.Tensor, lengths: Sequence[int]) -> None:
        """Begin to bring up what of index [B, Hkv or 1, M], on the CPU, is in the tier."""
        index = index.expand(-1, self._host.key.shape[1], -1)
        token = index.clamp(0, self._host.capacity - 1)
        there = self._host.present.gather(2, token) & (index == token)
        index, newest = torch.where(there, index, -1), self._newest(lengths)

        def begin() -> None:
            self._receive()
            plan = self._plan(index, newest, self._in_place)
            self._pending = self._sent(self._with_retained(plan, index, newest, self._in_place))

        self._noted.append(begin)
        if not self._in_place:
            self._settle()

    def attended(self, index: Callable[[], torch.Tensor], lengths: Sequence[int]) -> None:
        """Note that tokens of the tier were attended where they lie; they are staged and counted
        later.

        Parameters
        ----------
        index
            gives the [B, Hs, M] ids of those that were, Hs = 1, Hkv or Hq, -1 for others; called
            before the next change.
        lengths
            as for `locate`.
        """
        newest = self._newest(lengths)

        def bring() -> None:
            self._receive()
            self._staged = self._received(
                self._sent(self._plan_step(index(), lengths, newest, self._in_place))
            )

        self._noted.append(bring)

    def receive(self) -> None:
        """What was prefetched is staged from now on."""
        self._settle()
        self._receive()

    def count_fetched(self) -> None:
        """Count as moved what the device itself has read, for which this waits, or would have been
        sent.
        """
        self._settle()
        tokens, here = int(self._fetched), int(self._here)
        self._fetched = self._here = 0
        if tokens:
            self._moved(tokens)
        self._count_hits(here, tokens)

    def _settle(self) -> None:
        """Plan what was noted."""
        while self._noted:
            self._noted.popleft()()

    def _receive(self) -> None:
        if self._pending is not None:
            self._staged, self._pending = self._received(self._pending), None

    # -- planned on the CPU ------------------------------------------------------------------------

    def _newest(self, lengths: Sequence[int]) -> Newest:
        """Of each row, the id of the token in `newest`."""
        return None if self.newest is None else [length - 1 for length in lengths]

    def _plan(self, index: torch.Tensor, newest: Newest, counted: bool) -> StagePlan:
        staged = None if self._staged is None else self._staged.ids.cpu()
        return plan_stage(index, self._host.key.shape[1], staged, newest, counted)

    def _plan_step(
        self, index: torch.Tensor, lengths: Sequence[int], newest: Newest, counted: bool
    ) -> StagePlan:
        """The plan of a step that attends index [B, Hs, M], which is passed to the keeper, too."""
        plan = self._plan(index, newest, counted)
        self._count_hits(plan.hits, plan.moving)
        if self._keeper is not None:
            self._retained = self._keeper.after(index_of(plan.ids), lengths)
        return self._with_retained(plan, index, newest, counted)

    def _with_retained(
        self, plan: StagePlan, index: torch.Tensor, newest: Newest, counted: bool
    ) -> StagePlan:
        """The plan of `index`, with what the keeper keeps beside it."""
        if self._retained is None:
            return plan
        index = of_kv_heads(index, self._retained.shape[1])
        both = self._plan(torch.cat([index, self._retained], dim=2), newest, counted)
        return both._replace(slots=both.slots[..., : index.shape[2]], complete=plan.complete)

    def _sent(self, plan: StagePlan) -> Pending:
        """Move up what is missing on the device, on a GPU on the side stream."""
        if self._in_place:
            self._moved(plan.moving)
            return Pending(plan.ids, plan.total, plan.source, ())
        blocks = self._blocks()
        if not plan.moving:
            return Pending(plan.ids, plan.total, plan.source, blocks)
        heads = self._host.key.shape[1]
        buffer = self._host.read(
            plan.head // heads, plan.head % heads, plan.token, self.values_only
        )
        self._moved(plan.moving)
        with torch.cuda.stream(self._side):
            parts = rows_in(
                uploaded(buffer, self._device), self._host.moving(self.values_only), plan.moving
            )
            event = None if self._side is None else self._side.record_event()
        return Pending(
            plan.ids, plan.total, plan.source, (*blocks, _with_keys(parts, self._nothing[0])), event
        )

    @property
    def _side(self) -> torch.cuda.Stream | None:
        """The stream on which rows come up; None without a GPU."""
        return side_stream(self._device) if self._device.type == "cuda" else None

    def _wait_for(self, event: torch.cuda.Event, values: torch.Tensor) -> None:
        """What is computed from here on waits for rows whose values these are."""
        stream = torch.cuda.current_stream(self._device)
        with self._spans("waiting"):
            stream.wait_event(event)
        values.record_stream(stream)

    def _received(self, pending: Pending) -> Staged:
        """The tokens that were moved up, in one block with those that were staged before."""
        if self._in_place:
            return Staged(pending.ids, None, pending.total)
        source = uploaded(pending.source.reshape(-1), self._device)
        if pending.event is not None:
            self._wait_for(pending.event, pending.blocks[-1][1])
        sides = _joined(pending.blocks, self._nothing)
        key, value = (
            side.index_select(0, source).view(*pending.ids.shape, side.shape[1]) for side in sides
        )
        return Staged(pending.ids, (key, value), pending.total)

    # -- on the device alone -----------------------------------------------------------------------

    def _read_by_device(self, index: torch.Tensor, lengths: Sequence[int]) -> Located:
        """The same on the device alone: it reads the host's memory, and nobody waits.

        Values come up on the side stream, beside the keys and the search for each token's place.
        """
        device_lengths = uploaded(torch.tensor(lengths), self._device)[:, None, None]
        torch._assert_async((index < device_lengths).all())
        ids = _distinct(index)
        near, far = self._origins(ids, device_lengths)
        staged_count = 0 if self._staged is None else self._staged.ids.numel()
        self._fetched = self._fetched + (far >= 0).sum()
        self._here = self._here + ((near >= 0) & (near < staged_count)).sum()
        if self._host.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._host.copied)
        here = _joined(self._blocks(), self._nothing)
        *keys, there = (host.flatten(0, 2) for host in self._host.moving(self.values_only))
        values, event = self._fetched_aside(near, far, here[1], there)
        parts = [*(fetch(near, far, here[0], key) for key in keys), values]
        key, value = _with_keys(parts, self._nothing[0])
        rows = key.reshape(*ids.shape, -1), value.reshape(*ids.shape, -1)
        self._staged = Staged(ids, rows, (ids != NO_TOKEN).sum())
        slots, _ = find(ids, index.clamp(min=0))
        places = flat(slots, ids.shape[2]), index >= 0
        self._wait_for(event, values)
        return Located(Pool.of(*rows), *places, self._host.codecs)

    def _fetched_aside(
        self, near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """`fetch` on the side stream, after all that was computed, and the event after it."""
        side = side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            rows = fetch(near, far, here, host)
            event = side.record_event()
        for tensor in (near, far, here):
            tensor.record_stream(side)
        return rows, event

    def _origins(
        self, ids: torch.Tensor, device_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ids [B, Hkv, U] come from: [B * Hkv * U] rows of the joined blocks, or -1, and else
        of the host's.
        """
        size = ids.shape[:2]
        head = torch.arange(size.numel(), device=ids.device).view(*size, 1)
        near, first = torch.full_like(ids, -1), 0
        if self._staged is not None:
            staged = self._staged.ids.to(ids.device)
            slot, there = find(staged, ids)
            near, first = torch.where(there, head * staged.shape[2] + slot, near), staged.numel()
        if self.newest is not None:
            near = torch.where((ids == device_lengths - 1) & (near < 0), first + head, near)
        far = torch.where((near < 0) & (ids != NO_TOKEN), head * self._host.capacity + ids, -1)
        return near.masked_fill(ids == NO_TOKEN, -1).view(-1), far.view(-1)

    # -- what is there -----------------------------------------------------------------------------

    def _blocks(self) -> Blocks:
        """The staged tokens, then the newest of each row."""
        staged = () if self._staged is None or self._staged.rows is None else (self._staged.rows,)
        return staged if self.newest is None else (*staged, self.newest)


def _with_keys(
    parts: Sequence[torch.Tensor], nothing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, width] that were moved; in the place of keys that were not zeros, as wide
    as `nothing`.
    """
    *key, value = parts
    return key[0] if key else nothing.new_zeros(1, nothing.shape[1]).expand(len(value), -1), value


def _joined(blocks: Blocks, nothing: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all blocks, keys and values, [n, width] each; where there are none, `nothing` [0,
    width] of each.
    """
    sides = zip(*blocks, strict=True) if blocks else [(none,) for none in nothing]
    key, value = (
        torch.cat([part.reshape(-1, none.shape[1]) for part in side])
        for side, none in zip(sides, nothing, strict=True)
    )
    return key, value


def _distinct(index: torch.Tensor) -> torch.Tensor:
    """Distinct ids >= 0 of index [B, H, M], ascending, `NO_TOKEN` after; as many columns, in whole
    pages.
    """
    ids = lists_of(index)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]
    distinct = ids.new_full((*ids.shape[:2], whole_pages(ids.shape[2])), NO_TOKEN)
    distinct[..., : ids.shape[2]] = ids.masked_fill(repeated, NO_TOKEN).sort(dim=2).values
    return distinct
