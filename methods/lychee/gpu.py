"""The search of LycheeCluster's index as Triton kernels, see `search.best_tokens`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks.gpu.lists import products_with, range_of
from methods.blocks.gpu.ranks import LONGEST
from methods.lychee import search
from methods.lychee.gpu_choice import choose

ROWS, SLOTS = 32, 256  # centroids and entries that a program has at once
BLOCK = 2048  # scores that a program reads at once


@triton.jit
def _bounds(  # type: ignore[no-untyped-def]
    queries,
    rows,
    radii,
    sizes,
    scores,
    of_query,
    first,
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
    head = of_query if MEAN else of_query // GROUP
    at = tl.arange(0, WIDE)
    asks, norm = tl.zeros([WIDE], tl.float32), 0.0
    for member in tl.static_range(GROUP if MEAN else 1):
        of_member = of_query * GROUP + member if MEAN else of_query
        query = tl.load(queries + of_member * size + at, mask=at < size, other=0.0)
        query = query.to(tl.float32)
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
    of_query,
    first,
    count,
    room,
    size,
    GROUP: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Products of a query with the representatives of a block of chunks."""
    head = of_query if MEAN else of_query // GROUP
    at = tl.arange(0, WIDE)
    asks = tl.zeros([WIDE], tl.float32)
    for member in tl.static_range(GROUP if MEAN else 1):
        of_member = of_query * GROUP + member if MEAN else of_query
        query = tl.load(queries + of_member * size + at, mask=at < size, other=0.0)
        asks += query.to(tl.float32)
    if MEAN:
        asks = tl.math.div_rn(asks, tl.full([WIDE], GROUP, tl.float32))
    chunk = first + tl.arange(0, ROWS)
    products = products_with(codes + head * room * size, asks, count, first, size, ROWS, WIDE)
    tl.store(near + of_query * count + chunk, products, mask=chunk < count)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    queries,
    unit_rows,
    unit_radii,
    unit_tokens,
    unit_scores,
    rows,
    radii,
    starts,
    scores,
    codes,
    near,
    weight,
    units,
    clusters,
    count,
    room,
    size,
    GROUP: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Bounds of a block of units, of one of clusters, or products of one of chunks."""
    of_query, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_units, of_clusters = tl.cdiv(units, ROWS), tl.cdiv(clusters, ROWS)
    if block < of_units:
        of_balls = unit_rows, unit_radii, unit_tokens, unit_scores, of_query, block * ROWS
        _bounds(queries, *of_balls, weight, units, size, GROUP, MEAN, False, ROWS, WIDE)
    elif block < of_units + of_clusters:
        of_balls = rows, radii, starts, scores, of_query, (block - of_units) * ROWS
        _bounds(queries, *of_balls, weight, clusters, size, GROUP, MEAN, True, ROWS, WIDE)
    else:
        if codes is not None:
            first = (block - of_units - of_clusters) * ROWS
            sizes = count, room, size
            _nearness(queries, codes, near, of_query, first, *sizes, GROUP, MEAN, ROWS, WIDE)


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
    seen: Tensor | None,
    first: int,
    newest: int,
    sinks: int,
) -> Tensor:
    """See `search.best_tokens`; what is too much for one program is torch's."""
    group, size = queries.shape[1:]
    units, clusters, count = unit_radii.shape[1], radii.shape[1], members.shape[1]
    of_best, fitting = min(most, clusters), min(most, count)
    starts, members = starts.contiguous(), members.contiguous()
    if max(of_best, units) > LONGEST:
        of_units = unit_centroids, unit_radii, unit_tokens, unit_starts
        how = searched, ub_weight, most, room, seen, first, newest, sinks
        parts = *of_units, centroids, radii, starts, members, codes, bounds
        return search.best_tokens.reference(queries, mean, *parts, *how)
    lists = 1 if mean else group
    of_queries = len(queries) * lists

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(of_queries, *shape, dtype=dtype, device=queries.device)

    unit_scores, scores, listed_scores = empty(units), empty(clusters), empty(clusters)
    near = empty(0 if codes is None else count)
    blocks = (
        triton.cdiv(units, ROWS) + triton.cdiv(clusters, ROWS) + triton.cdiv(near.shape[1], ROWS)
    )
    _scores[of_queries, blocks](
        queries.contiguous(),
        unit_centroids.contiguous(),
        unit_radii.contiguous(),
        unit_tokens.contiguous(),
        unit_scores,
        centroids.contiguous(),
        radii.contiguous(),
        starts,
        scores,
        None if codes is None else codes.contiguous(),
        near,
        ub_weight,
        units,
        clusters,
        count,
        0 if codes is None else codes.shape[1],
        size,
        GROUP=group,
        MEAN=mean,
        ROWS=ROWS,
        WIDE=triton.next_power_of_2(size),
        enable_fp_fusion=False,
    )
    if codes is not None:
        arranged = empty(count, dtype=torch.int32)
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
    tokens = empty(newest + sinks + room, dtype=torch.int64)
    choose[of_queries,](
        unit_scores,
        unit_tokens.contiguous(),
        unit_starts.contiguous(),
        scores,
        empty(clusters, dtype=torch.int32),
        listed_scores,
        starts,
        members,
        bounds,
        tokens,
        seen,
        empty(units + of_best, dtype=torch.int64),
        empty(2 * (units + of_best + fitting), dtype=torch.int32),
        first,
        newest,
        sinks,
        units,
        clusters,
        count,
        searched,
        of_best,
        fitting,
        room,
        ARRANGED=codes is not None,
        LISTS=lists,
        UNITS=triton.next_power_of_2(units),
        UNIT_ROUNDS=units.bit_length(),
        WIDTH=triton.next_power_of_2(of_best),
        ROUNDS=of_best.bit_length(),
        CHUNKS=triton.next_power_of_2(fitting),
        CHUNK_ROUNDS=fitting.bit_length(),
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return tokens
