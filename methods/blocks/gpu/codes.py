"""The Triton kernels that estimate attention from product codes, see `methods.pqcache`.

What a token gets is its share of the attention of each query head, whose sum over all tokens is
joined from those over blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu import capped
from methods.blocks.gpu.lists import products_with
from methods.blocks.topk import ranked_ids

BLOCK = 1024  # tokens of a program


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    query,
    table,
    products,
    group,
    parts,
    centroids,
    size,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one part of one query head, with all its centroids."""
    of_query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    place = query + (of_query * parts + part) * size + at
    asks = tl.load(place, mask=at < size, other=0.0).to(tl.float32)
    of_part = (of_query // group * parts + part) * centroids
    near = products_with(table + of_part * size, asks, centroids, 0, size, ROWS, WIDE)
    centroid = tl.arange(0, ROWS)
    out = products + (of_query * parts + part) * centroids + centroid
    tl.store(out, near, mask=centroid < centroids)


@triton.jit
def _between(lengths, row, token, sinks, recent):  # type: ignore[no-untyped-def]
    """Which tokens are neither sinks nor recent ones."""
    return (token >= sinks) & (token < tl.load(lengths + row) - 1 - recent)


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    products,
    codes,
    of_query,
    part_codes,
    token,
    inside,
    scaling,
    softcap,
    parts,
    centroids,
    room,
):
    """Estimated logits of a query head."""
    logits = tl.zeros(token.shape, tl.float32)
    for part in range(parts):
        code = tl.load(codes + part_codes + part * room + token, mask=inside, other=0).to(tl.int32)
        place = products + (of_query * parts + part) * centroids + code
        logits += tl.load(place, mask=inside, other=0.0)
    return tl.where(inside, capped(logits * scaling, softcap), float("-inf"))


@triton.jit
def _blocks(  # type: ignore[no-untyped-def]
    products,
    codes,
    lengths,
    peaks,
    sums,
    row,
    heads,
    sinks,
    recent,
    scaling,
    softcap,
    parts,
    centroids,
    room,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit in a block of tokens for each query head, and the sum of exp below it."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = (token < room) & _between(lengths, row, token, sinks, recent)
    part_codes = (row * heads + head) * parts * room
    for member in tl.static_range(GROUP):
        of_query = head * GROUP + member
        logits = _logits(
            products,
            codes,
            of_query,
            part_codes,
            token,
            inside,
            scaling,
            softcap,
            parts,
            centroids,
            room,
        )
        peak = tl.max(logits)
        total = tl.sum(tl.where(inside, tl.exp(logits - peak), 0.0))
        tl.store(peaks + of_query * tl.num_programs(1) + block, peak)
        tl.store(sums + of_query * tl.num_programs(1) + block, total)


@triton.jit
def _shares(  # type: ignore[no-untyped-def]
    products,
    codes,
    lengths,
    peaks,
    sums,
    scores,
    row,
    heads,
    sinks,
    recent,
    scaling,
    softcap,
    parts,
    centroids,
    room,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The attention that a block of tokens gets, summed over the group."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, other = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    inside = (token < room) & _between(lengths, row, token, sinks, recent)
    part_codes, there = (row * heads + head) * parts * room, other < tl.num_programs(1)
    received = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(GROUP):
        of_query = head * GROUP + member
        of_blocks = of_query * tl.num_programs(1) + other
        highest = tl.load(peaks + of_blocks, mask=there, other=float("-inf"))
        peak = tl.max(highest)
        below = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - peak))
        total = tl.sum(below * tl.load(sums + of_blocks, mask=there, other=0.0))
        logits = _logits(
            products,
            codes,
            of_query,
            part_codes,
            token,
            inside,
            scaling,
            softcap,
            parts,
            centroids,
            room,
        )
        received += tl.where(inside, tl.exp(logits - peak) / total, 0.0)
    out = scores + head * room + token
    tl.store(out, tl.where(inside, received, float("-inf")), mask=token < room)


@triton.jit
def _code(  # type: ignore[no-untyped-def]
    key,
    table,
    codes,
    lengths,
    row,
    heads,
    parts,
    centroids,
    size,
    room,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The nearest centroid of one part of a key."""
    of_part = tl.program_id(0).to(tl.int64)
    at, centroid = tl.arange(0, WIDE), tl.arange(0, ROWS)
    place = key + (row * heads * parts + of_part) * size + at
    part = tl.load(place, mask=at < size, other=0.0).to(tl.float32)
    rows = table + of_part * centroids * size
    inside = (centroid < centroids)[:, None] & (at < size)[None, :]
    center = tl.load(rows + centroid[:, None] * size + at[None, :], mask=inside, other=0.0)
    near = tl.sum((part[None, :] - 0.5 * center) * center, axis=1)
    near = tl.where(centroid < centroids, near, float("-inf"))
    token = tl.load(lengths + row) - 1
    out = codes + (row * heads * parts + of_part) * room + token
    tl.store(out, tl.argmax(near, axis=0).to(tl.uint8))


def code_newest(key: Tensor, table: Tensor, codes: Tensor, lengths: Tensor, row: int) -> None:
    """See `methods.pqcache.code_newest`."""
    heads, parts, centroids, size = table.shape
    _code[heads * parts,](
        key.contiguous(),
        table.contiguous(),
        codes,
        lengths,
        row,
        heads,
        parts,
        centroids,
        size,
        codes.shape[3],
        ROWS=triton.next_power_of_2(centroids),
        WIDE=triton.next_power_of_2(size),
    )


def coded_tokens(
    query: Tensor,
    table: Tensor,
    codes: Tensor,
    lengths: Tensor,
    row: int,
    sinks: int,
    recent: int,
    retrieved: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """See `methods.pqcache.coded_tokens`."""
    heads, group, parts, size = query.shape
    centroids, room = table.shape[2], codes.shape[3]
    blocks = triton.cdiv(room, BLOCK)
    products, peaks, sums, scores = (
        torch.empty(heads, *shape, dtype=torch.float32, device=query.device)
        for shape in ((group, parts, centroids), (group, blocks), (group, blocks), (room,))
    )
    _products[heads * group, parts](
        query.contiguous(),
        table.contiguous(),
        products,
        group,
        parts,
        centroids,
        size,
        ROWS=triton.next_power_of_2(centroids),
        WIDE=triton.next_power_of_2(size),
    )
    sizes = row, heads, sinks, recent, scaling, softcap, parts, centroids, room
    grid = heads, blocks
    _blocks[grid](products, codes, lengths, peaks, sums, *sizes, GROUP=group, BLOCK=BLOCK)
    _shares[grid](
        products,
        codes,
        lengths,
        peaks,
        sums,
        scores,
        *sizes,
        GROUP=group,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
    )
    return ranked_ids.launch(scores[None], None, min(retrieved, room))[0]
