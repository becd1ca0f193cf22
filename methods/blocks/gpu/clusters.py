"""The Triton kernels that find the tokens of the best clusters, see `methods.clusterkv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks.gpu.lists import products_with, range_of
from methods.blocks.topk import ranked_ids

ROWS, SLOTS = 32, 256  # clusters and tokens that a program has at once


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    query, means, scores, clusters, group, size, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """Products of a query head with a block of means; what is no number is the best."""
    head, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    at = tl.arange(0, WIDE)
    asks = tl.load(query + head * size + at, mask=at < size, other=0.0).to(tl.float32)
    of_head = means + head // group * clusters * size
    near = products_with(of_head, asks, clusters, first, size, ROWS, WIDE)
    near = tl.where(near != near, float("inf"), tl.maximum(near, -3.4028234663852886e38))
    cluster = first + tl.arange(0, ROWS)
    tl.store(scores + head * clusters + cluster, near, mask=cluster < clusters)


@triton.jit
def _members(  # type: ignore[no-untyped-def]
    order,
    starts,
    sizes,
    members,
    ends,
    tokens,
    clusters,
    group,
    count,
    room,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The first `room` members of the clusters in their order."""
    head = tl.program_id(0).to(tl.int64)
    of_head = head // group * clusters
    rank = tl.arange(0, WIDTH)
    cluster = tl.load(order + head * clusters + rank, mask=rank < clusters, other=-1)
    size = tl.load(sizes + of_head + cluster, mask=cluster >= 0, other=0).to(tl.int32)
    tl.store(ends + head * clusters + rank, tl.cumsum(size), mask=rank < clusters)
    tl.debug_barrier()  # ends are there to be read
    for first in range(0, room, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        at = range_of(ends + head * clusters, clusters, slot, ROUNDS)
        inside = (at < clusters) & (slot < room)
        which = tl.load(order + head * clusters + at, mask=inside, other=0)
        end = tl.load(ends + head * clusters + at, mask=inside, other=0)
        size_of = tl.load(sizes + of_head + which, mask=inside, other=0)
        place = tl.load(starts + of_head + which, mask=inside, other=0) + slot - end + size_of
        token = tl.load(members + head // group * count + place, mask=inside, other=-1)
        tl.store(tokens + head * room + slot, token, mask=slot < room)


def cluster_tokens(
    query: Tensor, means: Tensor, starts: Tensor, sizes: Tensor, members: Tensor, room: int
) -> Tensor:
    """See `methods.clusterkv.cluster_tokens`."""
    heads, (kv_heads, clusters, size) = len(query), means.shape
    scores = torch.empty(1, heads, clusters, dtype=torch.float32, device=query.device)
    _score[heads, triton.cdiv(clusters, ROWS)](
        query.contiguous(),
        means.contiguous(),
        scores,
        clusters,
        heads // kv_heads,
        size,
        ROWS=ROWS,
        WIDE=triton.next_power_of_2(size),
    )
    order = ranked_ids.launch(scores, None, clusters)
    ends = torch.empty(heads, clusters, dtype=torch.int32, device=query.device)
    tokens = torch.empty(heads, room, dtype=torch.int64, device=query.device)
    _members[heads,](
        order,
        starts.contiguous(),
        sizes.contiguous(),
        members.contiguous(),
        ends,
        tokens,
        clusters,
        heads // kv_heads,
        members.shape[1],
        room,
        WIDTH=triton.next_power_of_2(clusters),
        ROUNDS=clusters.bit_length(),
        SLOTS=SLOTS,
    )
    return tokens
