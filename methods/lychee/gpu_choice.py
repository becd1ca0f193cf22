"""The Triton kernel from scored units and clusters to tokens, see `methods.lychee.gpu`."""

from __future__ import annotations

import triton
import triton.language as tl

from methods.blocks.gpu.lists import range_of
from methods.blocks.gpu.ranks import ranked


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    unit,
    unit_tokens,
    unit_starts,
    scores,
    work,
    listed,
    listed_scores,
    of_query,
    head,
    units,
    clusters,
    searched,
    room,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The clusters of the units that are searched, unit by unit, and their scores."""
    ends, stops = work, work + units
    rank = tl.arange(0, WIDTH)
    there = unit >= 0
    tokens = tl.load(unit_tokens + head * units + unit, mask=there, other=0)
    there = there & ((rank < searched) | (tl.cumsum(tokens) - tokens < 2 * room))
    place = unit_starts + head * (units + 1) + unit
    stop = tl.load(place + 1, mask=there, other=0)
    size = stop - tl.load(place, mask=there, other=0)
    tl.store(ends + rank, tl.cumsum(size), mask=rank < units)
    tl.store(stops + rank, stop, mask=rank < units)
    tl.debug_barrier()  # they are there to be read
    for first in range(0, clusters, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        at = range_of(ends, units, slot, ROUNDS)
        inside = (at < units) & (slot < clusters)
        cluster = tl.load(stops + at, mask=inside, other=0) + slot
        cluster -= tl.load(ends + at, mask=inside, other=0)
        score = tl.load(scores + of_query * clusters + cluster, mask=inside, other=float("-inf"))
        out = of_query * clusters + slot
        tl.store(listed + out, cluster, mask=slot < clusters)
        tl.store(listed_scores + out, score, mask=slot < clusters)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    at,
    listed,
    starts,
    members,
    bounds,
    work,
    tokens,
    seen,
    first_new,
    newest,
    sinks,
    of_query,
    head,
    clusters,
    count,
    ranked,
    fitting,
    room,
    ARRANGED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The newest tokens, sinks, and those of the best clusters' chunks: as many whole ones as fit.

    ARRANGED: `members` are of each list, not of each head.
    """
    ends, stops = work, work + ranked
    chunk_ends, chunk_stops = stops + ranked, stops + ranked + fitting

    rank = tl.arange(0, WIDTH)
    cluster = tl.load(listed + of_query * clusters + at, mask=at >= 0, other=0)
    place = starts + head * (clusters + 1) + cluster
    stop = tl.load(place + 1, mask=at >= 0, other=0)
    size = stop - tl.load(place, mask=at >= 0, other=0)
    tl.store(ends + rank, tl.cumsum(size), mask=rank < ranked)
    tl.store(stops + rank, stop, mask=rank < ranked)
    tl.debug_barrier()  # they are there to be read

    slot = tl.arange(0, CHUNKS)
    at = range_of(ends, ranked, slot, ROUNDS)
    inside = (at < ranked) & (slot < fitting)
    member = tl.load(stops + at, mask=inside, other=0) + slot
    member -= tl.load(ends + at, mask=inside, other=0)
    of_list = of_query if ARRANGED else head
    chunk = tl.load(members + of_list * count + member, mask=inside, other=0)
    stop = tl.load(bounds + chunk + 1, mask=inside, other=0)
    length = (stop - tl.load(bounds + chunk, mask=inside, other=0)).to(tl.int32)
    length = tl.where(tl.cumsum(length) <= room, length, 0)
    tl.store(chunk_ends + slot, tl.cumsum(length), mask=slot < fitting)
    tl.store(chunk_stops + slot, stop.to(tl.int32), mask=slot < fitting)
    tl.debug_barrier()  # they are there to be read

    length, new = 0, 0
    if seen is not None:
        length = tl.load(seen).to(tl.int32)
        new = tl.maximum(tl.minimum(length - first_new, newest), 0)
    most = newest + sinks + room
    for first in range(0, most, SLOTS):
        out = first + tl.arange(0, SLOTS)
        entry = out - new - sinks
        which = range_of(chunk_ends, fitting, entry, CHUNK_ROUNDS)
        there = (entry >= 0) & (entry < room) & (which < fitting)
        token = tl.load(chunk_stops + which, mask=there, other=0) + entry
        token -= tl.load(chunk_ends + which, mask=there, other=0)
        token = tl.where(there, token, -1)
        token = tl.where(out < new + sinks, out - new, token)
        token = tl.where(out < new, length - 1 - out, token)
        tl.store(tokens + of_query * most + out, token.to(tl.int64), mask=out < most)


@triton.jit
def choose(  # type: ignore[no-untyped-def]
    unit_scores,
    unit_tokens,
    unit_starts,
    scores,
    listed,
    listed_scores,
    starts,
    members,
    bounds,
    tokens,
    seen,
    packed,
    work,
    first_new,
    newest,
    sinks,
    units,
    clusters,
    count,
    searched,
    most,
    fitting,
    room,
    ARRANGED: tl.constexpr,
    LISTS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From units to tokens, for one list."""
    of_query = tl.program_id(0).to(tl.int64)
    head = of_query // LISTS
    packed += of_query * (units + most)
    work += of_query * 2 * (units + most + fitting)
    unit = ranked(unit_scores + of_query * units, units, units, packed, UNITS, BLOCK)
    where = listed, listed_scores, of_query, head, units, clusters, searched, room
    of_units = unit_tokens, unit_starts, scores, work
    _list(unit, *of_units, *where, UNITS, UNIT_ROUNDS, SLOTS)
    tl.debug_barrier()  # what is listed is there to be read
    listed_scores += of_query * clusters
    best = ranked(listed_scores, clusters, most, packed + units, WIDTH, BLOCK)
    _write(
        best,
        listed,
        starts,
        members,
        bounds,
        work + 2 * units,
        tokens,
        seen,
        first_new,
        newest,
        sinks,
        of_query,
        head,
        clusters,
        count,
        most,
        fitting,
        room,
        ARRANGED,
        WIDTH,
        ROUNDS,
        CHUNKS,
        CHUNK_ROUNDS,
        SLOTS,
    )
