"""Triton kernels of a device tier, see `kvbench.memory.device` and `kvbench.memory.transfer`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.memory import stage

AT_ONCE = 256  # tokens that a program looks for
LONGEST = 4096  # tokens that it sorts
NO_TOKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # as in `kvbench.memory.device`


@triton.jit
def _put_token(  # type: ignore[no-untyped-def]
    keys,
    values,
    ids,
    slots,
    filled,
    seen,
    key,
    value,
    heads,
    room,
    key_size,
    value_size,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # all heads of a row, as its id is counted once
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    here = head < heads
    at = row * heads + head
    slot = tl.load(slots + at, mask=here, other=0)
    count = tl.load(filled + at, mask=here, other=0)
    token = tl.load(seen + row)
    mask = here[:, None] & (lane < key_size)[None, :]
    new = tl.load(key + at[:, None] * key_size + lane[None, :], mask=mask)
    tl.store(keys + slot[:, None] * key_size + lane[None, :], new, mask=mask)
    mask = here[:, None] & (lane < value_size)[None, :]
    new = tl.load(value + at[:, None] * value_size + lane[None, :], mask=mask)
    tl.store(values + slot[:, None] * value_size + lane[None, :], new, mask=mask)
    if ids is not None:
        tl.store(ids + at * room + count, tl.zeros([HEADS], tl.int64) + token, mask=here)
    tl.debug_barrier()  # all threads have read the counters
    tl.store(slots + at, slot + 1, mask=here)
    tl.store(filled + at, count + 1, mask=here)
    tl.store(seen + row, token + 1)


def put_token(
    keys: Tensor,
    values: Tensor,
    ids: Tensor | None,
    slots: Tensor,
    filled: Tensor,
    seen: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """See `kvbench.memory.device.put_token`."""
    heads = filled.shape[1]
    _put_token[(len(filled),)](
        keys,
        values,
        ids,
        slots,
        filled,
        seen,
        key.contiguous(),
        value.contiguous(),
        heads,
        0 if ids is None else ids.shape[2],
        keys.shape[1],
        values.shape[1],
        HEADS=triton.next_power_of_2(heads),
        WIDTH=triton.next_power_of_2(max(keys.shape[1], values.shape[1])),
    )


@triton.jit
def smaller(ids, room, token, wanted, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of `room` ascending ids are smaller than each token, of those `wanted`.

    `DEPTH`: bits of `room`.
    """
    count = tl.zeros_like(token)
    for step in tl.static_range(DEPTH):
        further = count + (1 << (DEPTH - 1 - step))
        inside = wanted & (further <= room)
        less = tl.load(ids + further - 1, mask=inside, other=0) < token
        count = tl.where(inside & less, further, count)
    return count


@triton.jit
def slot_of(token, ids, room, filled, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot of each token in the room of its head, 0 for one that is not here, and which are.

    Parameters
    ----------
    ids
        pointer to the `room` tokens of the head, ascending; None: slot = id.
    filled
        slots that are.
    DEPTH
        bits of `room`.
    """
    here = token >= 0
    if ids is None:
        slot = token
        here = here & (token < filled)
    else:
        slot = smaller(ids, room, token, here, DEPTH)
        here = here & (slot < room)
        here = here & (tl.load(ids + slot, mask=here, other=-1) == token)
    return tl.where(here, slot, 0), here


@triton.jit
def _locate_tokens(  # type: ignore[no-untyped-def]
    index,
    ids,
    filled,
    first,
    slots,
    present,
    count,
    heads,
    room,
    of_row,
    of_head,
    apart,
    DEPTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Slots in the pool, where `first` says which a head begins at: a token that is not here
    aborts; else those of its room.
    """
    at = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = entry < count
    place = at // heads * of_row + at % heads * of_head + entry * apart
    token = tl.load(index + place, mask=inside, other=-1)
    of_head_ids = ids
    if ids is not None:
        of_head_ids = ids + at * room
    slot, here = slot_of(token, of_head_ids, room, tl.load(filled + at), DEPTH)
    if first is not None:
        tl.device_assert(here | (token < 0), "a token is not in the store: dropped, or not seen")
        slot += tl.load(first + at)
        here = token >= 0
    tl.store(slots + at * count + entry, slot, mask=inside)
    tl.store(present + at * count + entry, here, mask=inside)


def find_tokens(index: Tensor, ids: Tensor | None, filled: Tensor) -> tuple[Tensor, Tensor]:
    """See `kvbench.memory.device.find_tokens`."""
    return _located(index, ids, filled, None)


def locate_tokens(
    index: Tensor, ids: Tensor | None, filled: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvbench.memory.device.locate_tokens`."""
    return _located(index, ids, filled, first)


def _located(
    index: Tensor, ids: Tensor | None, filled: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads, count = index.shape[1:]
    slots = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    present = torch.empty(index.shape, dtype=torch.bool, device=index.device)
    if not count:
        return slots, present
    room = 0 if ids is None else ids.shape[2]
    _locate_tokens[(len(index) * heads, triton.cdiv(count, AT_ONCE))](
        index,
        ids,
        filled,
        first,
        slots,
        present,
        count,
        heads,
        room,
        *index.stride(),
        DEPTH=room.bit_length(),
        AT_ONCE=AT_ONCE,
        debug=True,  # the assertion is checked, and that alone
        sanitize_overflow=False,
    )
    return slots, present


@triton.jit
def _list_tokens(  # type: ignore[no-untyped-def]
    index,
    ids,
    filled,
    first,
    listed,
    last,
    count,
    lists,
    group,
    room,
    pages,
    of_row,
    of_list,
    apart,
    DEPTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    head = at // group  # of all rows
    entry = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = entry < count
    place = index + at // lists * of_row + at % lists * of_list + entry * apart
    token = tl.load(place, mask=here, other=-1)
    of_head_ids = ids
    if ids is not None:
        of_head_ids = ids + head * room
    slot, known = slot_of(token, of_head_ids, room, tl.load(filled + head), DEPTH)
    tl.device_assert(known | (token < 0), "a token is not in the store: dropped, or not seen")
    slot += tl.load(first + head)
    tl.store(listed + at * pages + entry, slot.to(tl.int32), mask=here)
    # one thread of all sees where the list ends
    after = tl.load(place + apart, mask=entry + 1 < count, other=-1)
    ends = here & (token >= 0) & (after < 0)
    length = tl.where(ends, entry + 1, 0)
    tl.store(last + at + entry * 0, length - (pages - 1), mask=ends | ((entry == 0) & (token < 0)))


def list_tokens(
    index: Tensor, ids: Tensor | None, filled: Tensor, first: Tensor, listed: Tensor, last: Tensor
) -> None:
    """See `kvbench.memory.device.list_tokens`."""
    lists, count = index.shape[1:]
    room = 0 if ids is None else ids.shape[2]
    _list_tokens[(len(index) * lists, max(1, triton.cdiv(count, AT_ONCE)))](
        index,
        ids,
        filled,
        first,
        listed,
        last,
        count,
        lists,
        lists // filled.shape[1],
        room,
        listed.shape[1],
        *index.stride(),
        DEPTH=room.bit_length(),
        AT_ONCE=AT_ONCE,
        debug=True,  # the assertion is checked, and that alone
        sanitize_overflow=False,
    )


@triton.jit
def _fetch(  # type: ignore[no-untyped-def]
    near, far, staged, newest, host, out, count, size, WIDTH: tl.constexpr
):
    """One row; of `count` staged ones and those behind."""
    at, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    local, remote = tl.load(near + at), tl.load(far + at)
    row = tl.zeros([WIDTH], out.dtype.element_ty)
    if staged is not None:
        near_size = tl.where((local >= 0) & (local < count), size, 0)
        row = tl.load(staged + local * size + lane, mask=lane < near_size, other=0)
    if newest is not None:
        new_size = tl.where(local >= count, size, 0)
        new = tl.load(newest + (local - count) * size + lane, mask=lane < new_size, other=0)
        row = tl.where(lane < new_size, new, row)
    far_size = tl.where((local < 0) & (remote >= 0), size, 0)
    distant = tl.load(host + remote * size + lane, mask=lane < far_size, other=0)
    row = tl.where(lane < far_size, distant, row)
    tl.store(out + at * size + lane, row, mask=lane < size)


@triton.jit
def _fetch_both(  # type: ignore[no-untyped-def]
    near,
    far,
    staged_keys,
    staged,
    newest_keys,
    newest,
    host_keys,
    host,
    keys,
    values,
    count,
    key_size,
    size,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    _fetch(near, far, staged, newest, host, values, count, size, WIDTH)
    if host_keys is not None:
        _fetch(near, far, staged_keys, newest_keys, host_keys, keys, count, key_size, KEY_WIDTH)


def fetch(
    near: Tensor,
    far: Tensor,
    staged: Sequence[Tensor],
    newest: Sequence[Tensor],
    host: Sequence[Tensor],
) -> list[Tensor]:
    """See `kvbench.memory.transfer.fetch`."""
    out = [
        torch.empty(len(near), block.shape[1], dtype=block.dtype, device=near.device)
        for block in host
    ]
    # sides that hold nothing, as values that are parts of their keys, are there already
    wide = [side for side, block in enumerate(host) if block.shape[1]]
    if not len(near) or not wide:
        return out
    sides = [[parts[side].contiguous() for side in wide if parts] for parts in (staged, newest)]
    blocks = [[parts[side] for side in wide] for parts in (host, out)]
    pairs = [[None] * (2 - len(parts)) + [*parts] for parts in (*sides, *blocks)]
    sizes = [host[side].shape[1] for side in wide]
    count = sides[0][-1].numel() // sizes[-1] if staged else 0
    _fetch_both[(len(near),)](
        near,
        far,
        *itertools.chain(*pairs),
        count,
        sizes[0],
        sizes[-1],
        KEY_WIDTH=triton.next_power_of_2(sizes[0]),
        WIDTH=triton.next_power_of_2(sizes[-1]),
    )
    return out


@triton.jit
def _stage_lists(  # type: ignore[no-untyped-def]
    index,
    staged,
    seen,
    counts,
    ids,
    slots,
    present,
    near,
    far,
    heads,
    count,
    width,
    held,
    newest,
    capacity,
    of_row,
    of_head,
    apart,
    SORTED: tl.constexpr,
    DEPTH: tl.constexpr,
    HELD: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(seen + at // heads)
    entry = tl.arange(0, SORTED)
    here, inside = entry < count, entry < width
    place = at // heads * of_row + at % heads * of_head + entry * apart
    token = tl.load(index + place, mask=here, other=-1)
    tl.device_assert(token < length, "a token is not in the store: not seen yet")
    out = ids + at * width
    # ascending, and each once
    ascending = tl.sort(tl.where(token < 0, NO_TOKEN, token))
    tl.store(out + entry, ascending, mask=inside)
    tl.debug_barrier()
    before = tl.load(out + entry - 1, mask=inside & (entry > 0), other=-1)
    tl.debug_barrier()  # all have read
    first = (ascending != before) & (ascending != NO_TOKEN)
    distinct = tl.sum(first.to(tl.int32))
    tl.store(out + tl.cumsum(first.to(tl.int32)) - 1, ascending, mask=first)
    nothing = tl.full([SORTED], NO_TOKEN, tl.int64)
    tl.store(out + entry, nothing, mask=inside & (entry >= distinct))
    tl.debug_barrier()  # ids are there to be read
    # where the tokens of the index lie in them
    slot = smaller(out, width, tl.maximum(token, 0), here, DEPTH)
    tl.store(slots + at * count + entry, at * width + tl.minimum(slot, width - 1), mask=here)
    tl.store(present + at * count + entry, token >= 0, mask=here)
    # and where they come from
    own = tl.load(out + entry, mask=inside, other=NO_TOKEN)
    wanted = entry < distinct
    origin = tl.full([SORTED], -1, tl.int64)
    if staged is not None:
        of_head_ids = staged + at * held
        slot = smaller(of_head_ids, held, own, wanted, HELD)
        match = tl.load(of_head_ids + slot, mask=wanted & (slot < held), other=-1)
        origin = tl.where(wanted & (match == own), at * held + slot, origin)
        tl.atomic_add(counts + 1, tl.sum((origin >= 0).to(tl.int64)))
    is_newest = wanted & (origin < 0) & (own == length - 1) & (newest >= 0)
    origin = tl.where(is_newest, newest + at, origin)
    distant = wanted & (origin < 0)
    tl.atomic_add(counts, tl.sum(distant.to(tl.int64)))
    tl.store(near + at * width + entry, origin, mask=inside)
    tl.store(far + at * width + entry, tl.where(distant, at * capacity + own, -1), mask=inside)


def stage_lists(
    index: Tensor,
    staged: Tensor | None,
    seen: Tensor,
    has_newest: bool,
    capacity: int,
    counts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `kvbench.memory.stage.stage_lists`; what is too much for one program is torch's."""
    heads, count = index.shape[1:]
    if not count or count > LONGEST:
        known = staged, seen, has_newest, capacity, counts
        planned: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        planned = stage.stage_lists.reference(index, *known)
        return planned
    width, held = stage.whole_pages(count), 0 if staged is None else staged.shape[2]
    lists = len(index) * heads
    ids = torch.empty(len(index), heads, width, dtype=torch.int64, device=index.device)
    near, far = torch.empty_like(ids), torch.empty_like(ids)
    slots = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    present = torch.empty(index.shape, dtype=torch.bool, device=index.device)
    _stage_lists[(lists,)](
        index,
        staged if held else None,
        seen,
        counts,
        ids,
        slots,
        present,
        near,
        far,
        heads,
        count,
        width,
        held,
        lists * held if has_newest else -1,
        capacity,
        *index.stride(),
        SORTED=triton.next_power_of_2(width),
        DEPTH=width.bit_length(),
        HELD=held.bit_length(),
        num_warps=8,
        debug=True,  # the assertion is checked, and that alone
        sanitize_overflow=False,
    )
    return ids, slots, present, near.view(-1), far.view(-1)
