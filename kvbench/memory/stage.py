"""The stage of a layer: copies of host tokens on the device, and how they get there.

A selection is planned where it was made, on the CPU or on the device, and the device reads what is
missing from the host's memory itself. What is staged already is not moved again. On a GPU rows come
up on a side stream, beside what is computed until attention needs them; how long it then stands
still is the span "waiting". Where attention reads the host's memory in place, no copy is made: the
stage only counts what would have been held and moved.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from kvbench.kernels.lists import plan_lists
from kvbench.kernels.operators import operator
from kvbench.memory.device import (
    NO_TOKEN,
    Located,
    Pool,
    distinct,
    find,
    flat,
    index_of,
    lists_of,
    of_kv_heads,
    whole_pages,
    with_free_slots,
    without,
)
from kvbench.memory.host import HostTier
from kvbench.memory.kinds import KV, NATIVE
from kvbench.memory.transfer import fetch, side_stream, uploaded
from kvbench.method import DeviceCache
from kvbench.spans import Spans


@dataclass(frozen=True)
class StoreSettings:
    """What a store is asked for.

    Attributes
    ----------
    home, on_drop, rebuilds_keys, host_keys, cache
        see `kvbench.method.Needs`.
    kv
        how the tiers hold keys and values once the prompt is over; until then the device has them
        as they came.
    grows
        the final length is unknown, so memory may be reallocated; else the reserved blocks never
        move.
    in_place
        attention reads host tokens where they lie, on a CPU; what a device would be sent is counted
        alone.
    moved
        called with the bytes that went from the host to the device.
    count_hits
        called with the attended tokens of KV heads, newest ones left out, that were staged, and
        that were moved up.
    spans
        where the time of transfers, and of waiting for them, is counted.
    """

    home: Literal["device", "host"] = "device"
    on_drop: Literal["discard", "offload"] = "discard"
    rebuilds_keys: bool = False
    host_keys: bool = False
    kv: KV = NATIVE
    grows: bool = False
    in_place: bool = False
    cache: DeviceCache = DeviceCache()
    moved: Callable[[int], None] = lambda size: None
    count_hits: Callable[[int, int], None] = lambda here, moved: None
    spans: Spans = field(default_factory=Spans)


# -- what stays beside the last selection ----------------------------------------------------------


class LastSteps:
    """What the last `steps` steps attended stays."""

    def __init__(self, steps: int) -> None:
        self._attended: deque[torch.Tensor] = deque(maxlen=steps)

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Ids [B, Hkv, n] that the device holds from now on, attended or not, -1 = none, after a
        step that attended ids [B, Hkv, U] on the CPU, distinct, of rows of `lengths` tokens.
        """
        self._attended.append(ids)
        return torch.cat([*self._attended], dim=2)


class FrequentBlocks:
    """The blocks of a row that were used last or most often stay, in all its KV heads; see
    `kvbench.method.DeviceCache`.

    A text's last block counts once it is full. If a step uses more blocks than there is room for,
    those with most tokens that the step before did not attend count; blocks of one step are noted
    in ascending order of that number, equal ones in the order of the text. Of blocks used equally
    often the one used longest ago leaves first.
    """

    def __init__(self, cache: DeviceCache) -> None:
        self._room, self._block = cache.tokens // cache.block, cache.block
        self._counts = cache.policy == "lfu"
        # of each block there, how often and when it was used
        self._rows: list[dict[int, tuple[int, int]]] = []
        self._before: torch.Tensor | None = None  # what the last step attended
        self._clock = 0

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
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
        first = np.full((len(lengths), max(map(len, self._rows))), -self._block)
        for row, blocks in enumerate(self._rows):
            first[row, : len(blocks)] = np.array([*blocks], np.int64) * self._block
        retained = torch.from_numpy(first[..., None] + np.arange(self._block)).clamp(min=-1)
        return retained.flatten(1)[:, None].expand(-1, ids.shape[1], -1)

    def _use(self, blocks: dict[int, tuple[int, int]], block: int) -> None:
        if block not in blocks and len(blocks) == self._room:
            del blocks[min(blocks, key=blocks.__getitem__)]
        times, _ = blocks.get(block, (0, 0))
        self._clock += 1
        blocks[block] = times + self._counts, self._clock


# -- the plan of a selection -----------------------------------------------------------------------


class StagePlan(NamedTuple):
    """What a selection that was made on the CPU stages: ids [B, Hkv, U] ascending, distinct,
    `NO_TOKEN` after, U the longest list in whole pages; how many are neither staged nor the newest,
    whether a token was asked for everywhere, and how many are staged.
    """

    ids: torch.Tensor
    moving: int
    complete: bool
    hits: int


def plan_stage(
    index: torch.Tensor, heads: int, staged: torch.Tensor | None, newest: list[int] | None
) -> StagePlan:
    """StagePlan the staging of token ids index [B, Hs, M], Hs = 1, Hkv or Hq (-1 = none, repeats
    allowed), for `heads` = Hkv of which ids [B, Hkv, V] are staged, ascending, `NO_TOKEN` after.
    """
    lists = index.contiguous().numpy()
    size, count = len(lists) * heads, max(1, lists.shape[1] // heads) * lists.shape[2]
    here = np.empty((0, 0), np.int64)
    if staged is not None:
        here = staged.contiguous().view(size, -1).numpy()
    last = np.full(len(lists), -1) if newest is None else np.array(newest)
    ids = np.full((size, whole_pages(count)), NO_TOKEN)
    plan = plan_lists(lists, here, last, ids)
    width = whole_pages(plan[0])
    planned = torch.from_numpy(ids[:, :width].copy()).view(len(lists), heads, width)
    return StagePlan(planned, *plan[1:])


# -- where staged tokens come from -----------------------------------------------------------------


def origins(
    ids: torch.Tensor,
    slots: torch.Tensor,
    staged: torch.Tensor | None,
    newest: torch.Tensor | None,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens to be staged come from: [B * Hkv * U] rows of those on the device, or -1, and
    else of the host's.

    Parameters
    ----------
    ids
        [B, Hkv, U] ascending, `NO_TOKEN` after the last.
    slots
        [B, Hkv, U], those of the host.
    staged
        [B, Hkv, V], as `ids`, of the tokens that are staged already.
    newest
        [B, 1, 1] token whose row follows these; None: none.
    capacity
        slots of a KV head on the host.
    """
    size = ids.shape[:2]
    head = torch.arange(size.numel(), device=ids.device).view(*size, 1)
    near, first = torch.full_like(ids, -1), 0
    if staged is not None:
        slot, there = find(staged, ids)
        near, first = torch.where(there, head * staged.shape[2] + slot, near), staged.numel()
    if newest is not None:
        near = torch.where((ids == newest) & (near < 0), first + head, near)
    far = torch.where((near < 0) & (ids != NO_TOKEN), head * capacity + slots, -1)
    return near.masked_fill(ids == NO_TOKEN, -1).view(-1), far.view(-1)


class StageLists(NamedTuple):
    """A selection that was made on a device, and what is staged for it.

    Attributes
    ----------
    ids
        [B, Hkv, U] ascending, distinct, `NO_TOKEN` after the last.
    slots
        [B, Hkv, M], of the index in a pool of these.
    present
        [B, Hkv, M] bool, whether it names a token.
    near, far
        see `origins`.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    present: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor


@operator("kvbench.memory.gpu", writes=("counts",))
def stage_lists(
    index: torch.Tensor,
    staged: torch.Tensor | None,
    seen: torch.Tensor,
    has_newest: bool,
    capacity: int,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan the staging of token ids index [B, Hkv, M] (-1 = none, repeats allowed) on a device; one
    that no row has seen aborts.

    Parameters
    ----------
    staged, capacity
        as of `origins`; slots of the host are ids.
    seen
        [B], tokens of each row, the newest of which is on the device if `has_newest`.
    counts
        [2] int64, to which tokens to be read from the host and tokens staged already are added.

    Returns
    -------
    tuple
        of `StageLists`.
    """
    seen, present = seen[:, None, None], index >= 0
    torch._assert_async((index < seen).all())
    ids = with_free_slots(distinct(lists_of(index)), whole_pages(index.shape[2]))
    near, far = origins(ids, ids, staged, seen - 1 if has_newest else None, capacity)
    staged_count = 0 if staged is None else staged.numel()
    counts += torch.stack([(far >= 0).sum(), ((near >= 0) & (near < staged_count)).sum()])
    slots = flat(find(ids, index.clamp(min=0))[0], ids.shape[2])
    return ids, slots, present, near, far


# -- the stage -------------------------------------------------------------------------------------

Newest = list[int] | None  # of each row, the id of the token that is on the device anyway
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values that lie together


class Staged(NamedTuple):
    """Copies of host tokens: of the last selection, and what else stays.

    Attributes
    ----------
    ids
        [B, Hkv, U] ascending, `NO_TOKEN` after the last; on the side where the selection was made.
    rows
        keys and values [B, Hkv, U, width] on the device, as held on the host, there once `event` is
        over; None where attention is in place.
    """

    ids: torch.Tensor
    rows: Rows | None = None
    event: torch.cuda.Event | None = None


class Stage:
    """What of a host tier is on the device.

    Attributes
    ----------
    newest
        keys and values [B, Hkv, 1, width] of the current token, which come from the device anyway.
    """

    def __init__(self, host: HostTier, device: torch.device, how: StoreSettings) -> None:
        plan_stage(torch.zeros(1, 1, 1, dtype=torch.int64), 1, None, None)  # before the clock runs
        self.newest: Rows | None = None
        self._host, self._device, self._how = host, device, how
        # the policy, where more stays than the last step attended
        self._keeper: LastSteps | FrequentBlocks | None = None
        if how.cache.policy != "last":
            self._keeper = FrequentBlocks(how.cache)
        elif how.cache.steps > 1:
            self._keeper = LastSteps(how.cache.steps)
        self._retained: torch.Tensor | None = None  # [B, Hkv, n] ids that stay, by the keeper
        self._staged: Staged | None = None
        self._pending: Staged | None = None  # what was prefetched
        self._noted: deque[Callable[[], None]] = deque()  # what is still to be planned, in order
        # tokens that a GPU has read, and those that it had: not yet counted
        self._counts: torch.Tensor | None = None

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
        """Stage the tokens of index [B, Hkv, M] (-1 = none, repeats allowed), on either side, and
        of others what the cache keeps; rows have seen `lengths` tokens.

        Raises
        ------
        LookupError
            a token that is not in the tier. An index on a GPU aborts the kernel instead.
        """
        self.receive()
        by_device = index.is_cuda and not self._host.arranged and self._keeper is None
        if by_device:
            seen = uploaded(torch.tensor(lengths), self._device)
            staged_ids = None if self._staged is None else self._staged.ids.to(self._device)
            if self._counts is None:
                self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)
            known = staged_ids, seen, self.newest is not None, self._host.capacity
            lists = StageLists(*stage_lists(index, *known, self._counts))
            ids, slots = lists.ids, lists.slots
            present: torch.Tensor | None = lists.present
            staged = self._come_up(ids, lists.near, lists.far)
        else:
            index = index.cpu()
            if index.numel() and (last := int(index.max())) >= self._host.capacity:
                raise LookupError(f"token {last} is not in the store: not seen yet")
            plan = self._plan(index, self._newest(lengths), lengths)
            staged, ids = self._bring_planned(plan, lengths), plan.ids
            slots = flat(find(ids, index.clamp(min=0))[0], ids.shape[2])
            slots = uploaded(slots.masked_fill(index < 0, -1), self._device)
            present, slots = None if plan.complete else slots >= 0, slots.clamp(min=0)
        self._take(staged)
        rows = staged.rows or self._host.gather(index_of(ids))
        return Located(Pool.of(*rows), slots, present, self._host.codecs)

    def prefetch(self, index: torch.Tensor, lengths: Sequence[int]) -> None:
        """Begin to bring up what of index [B, Hkv or 1, M], on the CPU, is in the tier."""
        index = index.expand(-1, self._host.heads, -1)
        index = torch.where(self._host.here(index), index, -1)
        newest = self._newest(lengths)

        def begin() -> None:
            self._pending = self._bring_planned(self._plan(index, newest), lengths)

        self._noted.append(begin)
        if not self._how.in_place:
            self._settle()

    def attended(self, index: Callable[[], torch.Tensor], lengths: Sequence[int]) -> None:
        """Note that tokens of the tier were attended where they lie, to be staged and counted
        later: `index`, called before the next change, gives their ids [B, Hs, M], -1 for others.
        """
        newest = self._newest(lengths)

        def bring() -> None:
            self._take(self._bring_planned(self._plan(index(), newest, lengths), lengths))

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
        if self._counts is not None:
            tokens, here = self._counts.tolist()
            self._counts.zero_()
            self._count_moved(tokens)
            self._how.count_hits(here, tokens)

    def rest(self) -> None:
        """Wait until the device reads no more of the host's memory."""
        if self._device.type == "cuda":
            side_stream(self._device).synchronize()

    def _count_moved(self, tokens: int) -> None:
        codecs = self._host.codecs
        size = codecs.value.nbytes if self._how.rebuilds_keys else codecs.nbytes
        if tokens:
            self._how.moved(tokens * size)

    def _settle(self) -> None:
        """StagePlan what was noted."""
        while self._noted:
            self._receive()
            self._noted.popleft()()

    def _receive(self) -> None:
        if self._pending is not None:
            self._take(self._pending)
            self._pending = None

    def _take(self, staged: Staged) -> None:
        """These are staged from now on."""
        self._wait_for(staged)
        self._staged = staged._replace(event=None)

    def _newest(self, lengths: Sequence[int]) -> Newest:
        """Of each row, the id of the token in `newest`."""
        return None if self.newest is None else [length - 1 for length in lengths]

    def _plan(
        self, index: torch.Tensor, newest: Newest, lengths: Sequence[int] | None = None
    ) -> StagePlan:
        """The plan of index [B, Hs, M] and of what the keeper keeps beside it; `lengths`: of a step
        that attends the index, which the keeper is shown.
        """
        staged, heads = None if self._staged is None else self._staged.ids.cpu(), self._host.heads
        plan = plan_stage(index, heads, staged, newest)
        if lengths is not None:
            self._how.count_hits(plan.hits, plan.moving)
            if self._keeper is not None:
                self._retained = self._keeper.after(index_of(plan.ids), lengths)
        if self._retained is None:
            return plan
        more = torch.cat([of_kv_heads(index, heads), self._retained], dim=2)
        return plan_stage(more, heads, staged, newest)._replace(complete=plan.complete)

    # -- how rows come up --------------------------------------------------------------------------

    def _bring_planned(self, plan: StagePlan, lengths: Sequence[int]) -> Staged:
        """Copies of what was planned on the CPU; attended in place, none."""
        staged = Staged(plan.ids)
        if not self._how.in_place:
            staged = self._bring(plan.ids, torch.tensor(lengths)[:, None, None])
        self._count_moved(plan.moving)
        return staged

    def _bring(self, ids: torch.Tensor, seen: torch.Tensor) -> Staged:
        """Copies of ids [B, Hkv, U] on the CPU, of rows that have `seen` [B, 1, 1] tokens."""
        near, far = self._origins(ids, seen)
        return self._come_up(ids, *uploaded(torch.stack([near, far]), self._device))

    def _origins(self, ids: torch.Tensor, seen: torch.Tensor) -> Rows:
        """See `origins`, of ids on the CPU."""
        staged = None if self._staged is None else self._staged.ids.cpu()
        newest = None if self.newest is None else seen - 1
        return origins(ids, self._host.slots(ids), staged, newest, self._host.capacity)

    def _come_up(self, ids: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> Staged:
        """Copies of ids [B, Hkv, U] from where they are, see `origins`.

        What is not here yet the device reads from the host's memory, a GPU on its side stream.
        """
        sides = slice(int(self._how.rebuilds_keys), 2)
        staged = None if self._staged is None else self._staged.rows
        here = [list((rows or ())[sides]) for rows in (staged, self.newest)]
        host = [block.flatten(0, 2) for block in self._host.blocks[:2][sides]]
        stream = side_stream(self._device) if near.is_cuda else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            if self._host.copied is not None:
                stream.wait_event(self._host.copied)
        with torch.cuda.stream(stream):
            rows = fetch(near, far, *here, host)
            event = None if stream is None else stream.record_event()
        if stream is not None:
            for tensor in (near, far, *itertools.chain(*here)):
                tensor.record_stream(stream)
        if self._how.rebuilds_keys:
            zeros = self._host.key.new_zeros(1, self._host.key.shape[3], device=self._device)
            rows = [zeros.expand(len(far), -1), *rows]
        key, value = (side.view(*ids.shape, side.shape[1]) for side in rows)
        return Staged(ids, (key, value), event)

    def _wait_for(self, staged: Staged) -> None:
        """What is computed from here on waits for rows that come up."""
        if staged.event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        with self._how.spans("waiting"):
            stream.wait_event(staged.event)
        for rows in staged.rows or ():
            rows.record_stream(stream)
