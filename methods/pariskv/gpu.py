"""ParisKV's search as Triton kernels, see `vectorised.search_codes`: the same bits, on a GPU or in
Triton's interpreter. No product is fused with a sum, which would round once instead of twice.

A token's codes are read as words of four subspaces. Blocks of a zone are counted at once; a block
knows from the counts of those before it where its candidates go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks.topk import ranked_ids
from methods.pariskv import codebook, vectorised

BLOCK = 1024  # tokens whose votes a program counts
AT_ONCE = tl.constexpr(64)  # centroids that all others are compared with
RERANKED = 256  # candidates that a program estimates
SUBSPACE = tl.constexpr(codebook.SUBSPACE)
CENTROIDS = tl.constexpr(codebook.CENTROIDS)


@triton.jit
def _hadamard(x, WIDE: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The Walsh-Hadamard transform of [WIDE]."""
    for index in tl.static_range(ROUNDS):
        pairs = tl.reshape(x, [WIDE // (2 << index), 2, 1 << index])
        pairs = tl.permute(pairs, (0, 2, 1))
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), [WIDE])
    return x


@triton.jit
def _score(part, centroid):  # type: ignore[no-untyped-def]
    """<z_b, c> of sign patterns, where a pointer's eight coordinates are z_b."""
    score = tl.zeros(centroid.shape, tl.float32)
    for coordinate in tl.static_range(SUBSPACE):
        z = tl.load(part + coordinate)
        score = tl.where((centroid >> coordinate) & 1 == 1, score + z, score - z)
    return score


@triton.jit
def _tables(  # type: ignore[no-untyped-def]
    queries,
    signs,
    counts,
    asks,
    rotated,
    votes_of,
    totals,
    heads,
    head_dim,
    batch,
    WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    TIERS: tl.constexpr,
):
    """Of one subspace: its part of the rotated query, and the votes of its centroids."""
    of_head, subspace = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    mean = tl.zeros([WIDE], tl.float32)
    for member in tl.static_range(GROUP):
        place = queries + (of_head * GROUP + member) * head_dim + at
        mean += tl.load(place, mask=at < head_dim, other=0.0).to(tl.float32)
    mean = tl.math.div_rn(mean, tl.full([WIDE], GROUP, tl.float32))
    z = _hadamard(mean * tl.load(signs + at), WIDE, ROUNDS)
    tl.store(rotated + of_head * WIDE + at, z, mask=at // SUBSPACE == subspace)
    tl.debug_barrier()  # all of it is there to be read

    part = rotated + of_head * WIDE + subspace * SUBSPACE
    of_subspace = (of_head * (WIDE // SUBSPACE) + subspace) * CENTROIDS
    centroid = tl.arange(0, CENTROIDS)
    score, nearer = _score(part, centroid), tl.zeros([CENTROIDS], tl.int32)
    for start in range(0, CENTROIDS, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        keys, theirs = tl.load(counts + of_subspace + other), _score(part, other)
        near = theirs[None, :] > score[:, None]
        # of equal ones the one with the smaller number
        near = near | ((theirs[None, :] == score[:, None]) & (other[None, :] < centroid[:, None]))
        nearer += tl.sum(tl.where(near, keys[None, :], 0), axis=1)
    votes = tl.zeros([CENTROIDS], tl.int32)
    for tier in tl.static_range(TIERS):
        votes += nearer < tl.load(asks + (4 + tier) * batch + of_head // heads)
    tl.store(votes_of + of_subspace + centroid, votes.to(tl.uint8))
    if subspace == 0:
        tl.store(totals + of_head * CENTROIDS + centroid, tl.zeros([CENTROIDS], tl.int32))


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    ids,
    votes_of,
    asks,
    votes,
    at_least,
    totals,
    heads,
    room,
    batch,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The votes of a block of tokens; how many have so many votes, in it and in all."""
    of_head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(asks + of_head // heads)
    if block * BLOCK >= length:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < length
    total = tl.zeros([BLOCK], tl.int32)
    for word in range(WORDS):
        four = tl.load(ids + (of_head * room + token) * WORDS + word, mask=inside, other=0)
        for byte in tl.static_range(4):
            table = votes_of + (of_head * WORDS * 4 + word * 4 + byte) * CENTROIDS
            total += tl.load(table + ((four >> (8 * byte)) & 255), mask=inside, other=0).to(
                tl.int32
            )
    tl.store(votes + of_head * room + token, total.to(tl.uint8), mask=inside)
    of_vote = tl.histogram(total, CENTROIDS, mask=inside)
    counted = tl.sum(of_vote) - tl.cumsum(of_vote) + of_vote
    vote = tl.arange(0, CENTROIDS)
    of_block = of_head * tl.num_programs(1) + block
    tl.store(at_least + of_block * CENTROIDS + vote, counted)
    tl.atomic_add(totals + of_head * CENTROIDS + vote, counted, mask=counted > 0)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    votes,
    at_least,
    totals,
    asks,
    candidates,
    heads,
    room,
    batch,
    most,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The candidates of a block, put after those of the blocks before it."""
    of_head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ask = asks + of_head // heads
    length, wanted = tl.load(ask), tl.load(ask + 2 * batch).to(tl.int32)
    if (block * BLOCK >= length) | (wanted == 0):
        return
    vote = tl.arange(0, CENTROIDS)
    total = tl.load(totals + of_head * CENTROIDS + vote)
    least = tl.sum((total >= wanted).to(tl.int32)) - 1
    equals = wanted - tl.sum(tl.where(vote == least + 1, total, 0))
    earlier = tl.arange(0, BLOCKS)
    counted = at_least + (of_head * tl.num_programs(1) + earlier) * CENTROIDS + least
    as_good = tl.sum(tl.load(counted, mask=earlier < block, other=0))
    better = tl.sum(tl.load(counted + 1, mask=earlier < block, other=0))

    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < length
    has = tl.load(votes + of_head * room + token, mask=inside, other=0).to(tl.int32)
    equal = inside & (has == least)
    turn = as_good - better + tl.cumsum(equal.to(tl.int32))
    taken = (inside & (has > least)) | (equal & (turn <= equals))
    slot = better + tl.minimum(as_good - better, equals) + tl.cumsum(taken.to(tl.int32)) - 1
    tl.store(candidates + of_head * most + slot, token, mask=taken)


@triton.jit
def _estimate(  # type: ignore[no-untyped-def]
    ids,
    levels,
    weights,
    rotated,
    decoded,
    asks,
    candidates,
    estimates,
    heads,
    room,
    batch,
    most,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Estimated products of a block of candidates, in the order of `Codes.estimates`."""
    of_head = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(asks + 2 * batch + of_head // heads)
    token = of_head * room + tl.load(candidates + of_head * most + at, mask=inside, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    for word in range(WORDS):
        signs = tl.load(ids + token * WORDS + word, mask=inside, other=0)
        level = levels + token * 3 * WORDS + word
        low = tl.load(level, mask=inside, other=0)
        middle = tl.load(level + WORDS, mask=inside, other=0)
        high = tl.load(level + 2 * WORDS, mask=inside, other=0)
        for byte in tl.static_range(4):
            product = tl.zeros([BLOCK], tl.float32)
            for pair in tl.static_range(SUBSPACE // 2):
                both = tl.zeros([BLOCK], tl.float32)
                for which in tl.static_range(2):
                    bit = 8 * byte + 2 * pair + which
                    code = ((low >> bit) & 1) | (((middle >> bit) & 1) << 1)
                    code = code | (((high >> bit) & 1) << 2) | (((signs >> bit) & 1) << 3)
                    of_query = tl.load(rotated + (of_head * WORDS + word) * 4 * SUBSPACE + bit)
                    term = tl.load(decoded + code) * of_query
                    both = term if which == 0 else both + term
                product = both if pair == 0 else product + both
            weight = tl.load(weights + token * 4 * WORDS + word * 4 + byte, mask=inside, other=0.0)
            total += product * weight.to(tl.float32)
    number = inside & (total == total)
    tl.store(
        estimates + of_head * most + at, tl.where(number, total, float("-inf")), mask=at < most
    )


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    best,
    candidates,
    estimates,
    asks,
    tokens,
    values,
    heads,
    batch,
    most,
    retrieved,
    BLOCK: tl.constexpr,
):
    """The tokens that the best candidates are, and their estimates."""
    of_head = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    candidate = tl.load(best + of_head * retrieved + at, mask=at < retrieved, other=-1)
    chosen, place = candidate >= 0, of_head * most + candidate
    token = tl.load(candidates + place, mask=chosen, other=0)
    token += tl.load(asks + batch + of_head // heads)
    estimate = tl.load(estimates + place, mask=chosen, other=float("-inf"))
    here = of_head * retrieved + at
    tl.store(tokens + here, tl.where(chosen, token, -1), mask=at < retrieved)
    tl.store(values + here, estimate, mask=at < retrieved)


def search_codes(
    queries: Tensor,
    signs: Tensor,
    ids: Tensor,
    levels: Tensor,
    weights: Tensor,
    counts: Tensor,
    asks: Tensor,
    candidates: int,
    retrieved: int,
) -> tuple[Tensor, Tensor]:
    """See `vectorised.search_codes`."""
    batch, heads, room, subspaces = ids.shape
    device, lists, words = ids.device, batch * heads, subspaces // 4
    sizes = heads, room, batch
    ids, levels = ids.view(torch.int32), levels.view(torch.int32)

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    rotated = empty(batch, heads, len(signs), dtype=torch.float32)
    votes_of = empty(*counts.shape, dtype=torch.uint8)
    totals = empty(lists, codebook.CENTROIDS)
    _tables[lists, subspaces](
        queries.contiguous(),
        signs,
        counts,
        asks,
        rotated,
        votes_of,
        totals,
        heads,
        queries.shape[3],
        batch,
        WIDE=len(signs),
        ROUNDS=len(signs).bit_length() - 1,
        GROUP=queries.shape[2],
        TIERS=len(asks) - 4,
        num_warps=8,
        enable_fp_fusion=False,
    )
    blocks = max(1, triton.cdiv(room, BLOCK))
    votes, at_least = (
        empty(lists, room, dtype=torch.uint8),
        empty(lists, blocks, codebook.CENTROIDS),
    )
    _count[lists, blocks](
        ids, votes_of, asks, votes, at_least, totals, *sizes, WORDS=words, BLOCK=BLOCK
    )
    voted = empty(lists, candidates)
    _choose[lists, blocks](
        votes,
        at_least,
        totals,
        asks,
        voted,
        *sizes,
        candidates,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
    )
    estimates = empty(batch, heads, candidates, dtype=torch.float32)
    decoded = vectorised.constants(device).decoded
    _estimate[lists, max(1, triton.cdiv(candidates, RERANKED))](
        ids,
        levels,
        weights,
        rotated,
        decoded,
        asks,
        voted,
        estimates,
        *sizes,
        candidates,
        WORDS=words,
        BLOCK=RERANKED,
        enable_fp_fusion=False,
    )
    best = ranked_ids.launch(estimates, asks[3, :, None], retrieved)
    tokens, values = torch.empty_like(best), empty(*best.shape, dtype=torch.float32)
    _take[lists, triton.cdiv(retrieved, RERANKED)](
        best,
        voted,
        estimates,
        asks,
        tokens,
        values,
        heads,
        batch,
        candidates,
        retrieved,
        BLOCK=RERANKED,
    )
    return tokens, values
