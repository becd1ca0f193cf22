"""The search of LycheeCluster's index as Triton kernels, see `search.best_tokens`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks.gpu.lists import products_with, range_of
from methods.blocks.topk import ranked_ids

ROWS, SLOTS = 32, 256  # centroids and entries that a program has at once


@triton.jit
def _bounds(  # type: ignore[no-untyped-def]
    queries,
    rows,
    radii,
    sizes,
    scores,
    weight,
    count,
    size,
    GROUP: tl.constexpr,
    MEAN: tl.constexpr,
    RANGES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The largest product that a member of each ball can have with a query; -inf of empty ones.

    RANGES: `sizes` are where members begin and end, not how many there are.
    """
    of_query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    head = of_query if MEAN else of_query // GROUP
    at = tl.arange(0, WIDE)
    asks, norm = tl.zeros([WIDE], tl.float32), 0.0
    for member in tl.static_range(GROUP if MEAN else 1):
        of_member = of_query * GROUP + member if MEAN else of_query
        query = tl.load(queries + of_member * size + at, mask=at < size, other=0.0)
        asks += query
        norm += tl.sqrt_rn(tl.sum(query * query))
    if MEAN:
        asks = tl.math.div_rn(asks, tl.full([WIDE], GROUP, tl.float32))
        norm = norm / GROUP
    near = products_with(rows + head * count * size, asks, count, first, size, ROWS, WIDE)
    ball = first + tl.arange(0, ROWS)
    inside = ball < count
    near += weight * norm * tl.load(radii + head * count + ball, mask=inside, other=0.0)
    if RANGES:
        place = sizes + head * (count + 1) + ball
        held = tl.load(place + 1, mask=inside, other=0) - tl.load(place, mask=inside, other=0)
    else:
        held = tl.load(sizes + head * count + ball, mask=inside, other=0)
    tl.store(scores + of_query * count + ball, tl.where(held > 0, near, float("-inf")), mask=inside)


@triton.jit
def _nearness(  # type: ignore[no-untyped-def]
    queries,
    codes,
    near,
    count,
    room,
    size,
    GROUP: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Products of a query with the representatives of a block of chunks."""
    of_query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    head = of_query if MEAN else of_query // GROUP
    at = tl.arange(0, WIDE)
    asks = tl.zeros([WIDE], tl.float32)
    for member in tl.static_range(GROUP if MEAN else 1):
        of_member = of_query * GROUP + member if MEAN else of_query
        asks += tl.load(queries + of_member * size + at, mask=at < size, other=0.0)
    if MEAN:
        asks = tl.math.div_rn(asks, tl.full([WIDE], GROUP, tl.float32))
    chunk = first + tl.arange(0, ROWS)
    products = products_with(codes + head * room * size, asks, count, first, size, ROWS, WIDE)
    tl.store(near + of_query * count + chunk, products, mask=chunk < count)


@triton.jit
def _arrange(  # type: ignore[no-untyped-def]
    near,
    starts,
    members,
    arranged,
    clusters,
    count,
    LISTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The members of each cluster, those nearest to the query first; of equal ones the earlier."""
    of_query = tl.program_id(0).to(tl.int64)
    head = of_query // LISTS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    begin = starts + head * (clusters + 1)
    cluster = range_of(begin + 1, clusters, place, ROUNDS)
    first = tl.load(begin + cluster, mask=inside, other=0)
    size = tl.load(begin + cluster + 1, mask=inside, other=0) - first
    of_head = members + head * count
    chunk = tl.load(of_head + place, mask=inside, other=0)
    mine = tl.load(near + of_query * count + chunk, mask=inside, other=0.0)
    rank = tl.zeros([BLOCK], tl.int32)
    for step in range(tl.max(size)):
        there = inside & (step < size)
        other = tl.load(of_head + first + step, mask=there, other=0)
        theirs = tl.load(near + of_query * count + other, mask=there, other=0.0)
        nearer = (theirs > mine) | ((theirs == mine) & (first + step < place))
        rank += (there & nearer).to(tl.int32)
    tl.store(arranged + of_query * count + first + rank, chunk, mask=inside)


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    order,
    unit_tokens,
    unit_starts,
    scores,
    work,
    listed,
    listed_scores,
    units,
    clusters,
    searched,
    room,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The clusters of the units that are searched, unit by unit, and their scores."""
    of_query = tl.program_id(0).to(tl.int64)
    head = of_query // LISTS
    ends, stops = work + of_query * 2 * units, work + of_query * 2 * units + units
    rank = tl.arange(0, WIDTH)
    unit = tl.load(order + of_query * units + rank, mask=rank < units, other=-1)
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
    best,
    listed,
    starts,
    members,
    bounds,
    work,
    tokens,
    clusters,
    count,
    ranked,
    fitting,
    room,
    ARRANGED: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The tokens of the best clusters' chunks, as many whole chunks as fit.

    ARRANGED: `members` are of each list, not of each head.
    """
    of_query = tl.program_id(0).to(tl.int64)
    head = of_query // LISTS
    ends = work + of_query * 2 * (ranked + fitting)
    stops, chunk_ends, chunk_stops = ends + ranked, ends + 2 * ranked, ends + 2 * ranked + fitting

    rank = tl.arange(0, WIDTH)
    at = tl.load(best + of_query * ranked + rank, mask=rank < ranked, other=-1)
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

    for first in range(0, room, SLOTS):
        out = first + tl.arange(0, SLOTS)
        which = range_of(chunk_ends, fitting, out, CHUNK_ROUNDS)
        there = (which < fitting) & (out < room)
        token = tl.load(chunk_stops + which, mask=there, other=0) + out
        token -= tl.load(chunk_ends + which, mask=there, other=0)
        tl.store(tokens + of_query * room + out, tl.where(there, token, -1), mask=out < room)


def best_tokens(
    queries: Tensor,
    mean: bool,
    unit_centroids: Tensor,
    unit_radii: Tensor,
    unit_tokens: Tensor,
    unit_starts: Tensor,
    centroids: Tensor,
    radii: Tensor,
    starts: Tensor,
    members: Tensor,
    codes: Tensor | None,
    bounds: Tensor,
    searched: int,
    ub_weight: int,
    most: int,
    room: int,
) -> Tensor:
    """See `search.best_tokens`."""
    group, size = queries.shape[1:]
    units, clusters, count = unit_radii.shape[1], radii.shape[1], members.shape[1]
    lists = 1 if mean else group
    of_queries = len(queries) * lists
    ranked, fitting = min(most, clusters), min(most, count)
    starts, members = starts.contiguous(), members.contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=queries.device)

    def bounded(rows: Tensor, radii: Tensor, sizes: Tensor, ranges: bool) -> Tensor:
        balls = radii.shape[1]
        scores = empty(1, of_queries, balls)
        _bounds[of_queries, triton.cdiv(balls, ROWS)](
            queries.contiguous(),
            rows.contiguous(),
            radii.contiguous(),
            sizes.contiguous(),
            scores,
            ub_weight,
            balls,
            size,
            GROUP=group,
            MEAN=mean,
            RANGES=ranges,
            ROWS=ROWS,
            WIDE=triton.next_power_of_2(size),
            enable_fp_fusion=False,
        )
        return scores

    unit_scores = bounded(unit_centroids, unit_radii, unit_tokens, False)
    scores = bounded(centroids, radii, starts, True)
    order = ranked_ids.launch(unit_scores, None, units)
    listed = empty(of_queries, clusters, dtype=torch.int32)
    listed_scores = empty(1, of_queries, clusters)
    _list[of_queries,](
        order,
        unit_tokens.contiguous(),
        unit_starts.contiguous(),
        scores,
        empty(of_queries, 2 * units, dtype=torch.int32),
        listed,
        listed_scores,
        units,
        clusters,
        searched,
        room,
        LISTS=lists,
        WIDTH=triton.next_power_of_2(units),
        ROUNDS=units.bit_length(),
        SLOTS=SLOTS,
    )
    best = ranked_ids.launch(listed_scores, None, ranked)
    if codes is not None:
        near, arranged = empty(of_queries, count), empty(of_queries, count, dtype=torch.int32)
        _nearness[of_queries, triton.cdiv(count, ROWS)](
            queries.contiguous(),
            codes.contiguous(),
            near,
            count,
            codes.shape[1],
            size,
            GROUP=group,
            MEAN=mean,
            ROWS=ROWS,
            WIDE=triton.next_power_of_2(size),
        )
        _arrange[of_queries, triton.cdiv(count, SLOTS)](
            near,
            starts,
            members,
            arranged,
            clusters,
            count,
            LISTS=lists,
            ROUNDS=clusters.bit_length(),
            BLOCK=SLOTS,
        )
        members = arranged
    tokens = empty(of_queries, room, dtype=torch.int64)
    _write[of_queries,](
        best,
        listed,
        starts,
        members,
        bounds,
        empty(of_queries, 2 * (ranked + fitting), dtype=torch.int32),
        tokens,
        clusters,
        count,
        ranked,
        fitting,
        room,
        ARRANGED=codes is not None,
        LISTS=lists,
        WIDTH=triton.next_power_of_2(ranked),
        ROUNDS=ranked.bit_length(),
        CHUNKS=triton.next_power_of_2(fitting),
        CHUNK_ROUNDS=fitting.bit_length(),
        SLOTS=SLOTS,
    )
    return tokens
