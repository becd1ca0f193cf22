"""Triton kernels of a device tier, see `kvbench.memory.device` and `kvbench.memory.transfer`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 256  # tokens that a program looks for


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
def slot_of(token, ids, room, filled, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot of each token in the room of its head; 0 for -1, and a token that is not here
    aborts.

    Parameters
    ----------
    ids
        pointer to the `room` tokens of the head, ascending; None: slot = id.
    filled
        slots that are.
    DEPTH
        bits of `room`.
    """
    wanted = token >= 0
    if ids is None:
        slot = token
        lost = token >= filled
    else:
        slot = tl.zeros_like(token)  # how many of the list are smaller
        for step in tl.static_range(DEPTH):
            further = slot + (1 << (DEPTH - 1 - step))
            inside = wanted & (further <= room)
            smaller = tl.load(ids + further - 1, mask=inside, other=0) < token
            slot = tl.where(inside & smaller, further, slot)
        slot = tl.minimum(slot, room - 1)
        lost = tl.load(ids + slot, mask=wanted, other=-1) != token
    tl.device_assert(~(wanted & lost), "a token is not in the store: dropped earlier, or not seen")
    return tl.where(wanted & ~lost, slot, 0)


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
    at = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = entry < count
    place = at // heads * of_row + at % heads * of_head + entry * apart
    token = tl.load(index + place, mask=here, other=-1)
    of_head_ids = ids
    if ids is not None:
        of_head_ids = ids + at * room
    slot = slot_of(token, of_head_ids, room, tl.load(filled + at), DEPTH)
    tl.store(slots + at * count + entry, slot + tl.load(first + at), mask=here)
    tl.store(present + at * count + entry, token >= 0, mask=here)


def locate_tokens(
    index: Tensor, ids: Tensor | None, filled: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvbench.memory.device.locate_tokens`."""
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
    slot = slot_of(token, of_head_ids, room, tl.load(filled + head), DEPTH) + tl.load(first + head)
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
def _fetch(near, far, here, host, out, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    local, remote = tl.load(near + at), tl.load(far + at)
    near_size = tl.where(local >= 0, size, 0)
    row = tl.load(here + local * size + lane, mask=lane < near_size, other=0)
    far_size = tl.where(remote >= 0, size - near_size, 0)
    distant = tl.load(host + remote * size + lane, mask=lane < far_size, other=0)
    tl.store(out + at * size + lane, tl.where(lane < near_size, row, distant), mask=lane < size)


def fetch(near: Tensor, far: Tensor, here: Tensor, host: Tensor) -> Tensor:
    """See `kvbench.memory.transfer.fetch`."""
    count, size = len(near), host.shape[1]
    out = torch.empty(count, size, dtype=host.dtype, device=near.device)
    if count:
        _fetch[(count,)](near, far, here, host, out, size, WIDTH=triton.next_power_of_2(size))
    return out
