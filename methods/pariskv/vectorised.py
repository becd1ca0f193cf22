"""ParisKV's stages for all KV heads of a row at once, in torch, on any device; `kernels.py` has the
same for one head.

Both give the same bits: sums run in one stated order, and equal votes or estimates keep the earlier
token.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from methods.blocks.topk import top_earliest
from methods.pariskv.codebook import (
    CENTROIDS,
    DECODED,
    LEVELS,
    NO_ALIGNMENT,
    NO_RADIUS,
    SUBSPACE,
    THRESHOLDS,
    Quotas,
)


class Constants(NamedTuple):
    """Those of `codebook`, on a device."""

    thresholds: torch.Tensor
    levels: torch.Tensor
    decoded: torch.Tensor


@cache
def constants(device: torch.device) -> Constants:
    """Brought to a device once."""
    return Constants(THRESHOLDS.to(device), LEVELS.to(device), DECODED.to(device))


def in_order(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, from its first term to its last."""
    first, *others = terms.unbind(dim=-1)
    for term in others:
        first = first + term
    return first


def rotate(vectors: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Vectors [..., head_dim], rotated: [..., D] float32.

    `signs` [..., D] as `codebook.random_signs` makes them.
    """
    rotated = pad(vectors.float(), (0, signs.shape[-1] - vectors.shape[-1])) * signs
    width = 1
    while width < rotated.shape[-1]:
        low, high = rotated.unflatten(-1, (-1, 2, width)).unbind(dim=-2)
        rotated = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        width *= 2
    return rotated


def encode(keys: torch.Tensor, signs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is kept of keys [..., head_dim].

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        ids [..., S] uint8 for S = D / 8 subspaces, and codes [..., S + S / 2] int32: for each
        subspace a word of eight 4-bit codes, lowest bits first, then the weights as bfloat16, two
        in a word.

    Raises
    ------
    ValueError
        a key is not finite, or too large to square.
    """
    subspaces = rotate(keys, signs).unflatten(-1, (-1, SUBSPACE))
    # torch's float32 root may be off in its last bit; that of a double, rounded, is the nearest
    # float32
    radius = in_order(subspaces * subspaces).double().sqrt().float()
    if not bool(radius.isfinite().all()):
        raise ValueError("a key is not finite, or too large to square")
    size = subspaces.abs() / radius.clamp(min=NO_RADIUS)[..., None]
    level = torch.zeros_like(size, dtype=torch.int32)
    at = constants(size.device)
    for threshold in at.thresholds:
        level += size > threshold
    alignment = in_order(at.levels[level.long()] * size).clamp(min=NO_ALIGNMENT)
    weights = (radius / alignment).bfloat16()
    positive = (subspaces >= 0).int()
    bit = torch.arange(SUBSPACE, dtype=torch.int32, device=size.device)
    ids = (positive << bit).sum(dim=-1).to(torch.uint8)
    words = ((positive << 3 | level) << 4 * bit).sum(dim=-1, dtype=torch.int32)
    return ids, torch.cat([words, weights.view(torch.int32)], dim=-1)


def count_ids(ids: torch.Tensor) -> torch.Tensor:
    """How many of the keys with ids [Hkv, S, n] have each id: [Hkv, S, 256] int32."""
    ids = ids.long()
    counts = torch.zeros(*ids.shape[:2], CENTROIDS, dtype=torch.int32, device=ids.device)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand_as(ids)
    return counts.scatter_add_(2, ids, ones)


def tables(
    queries: torch.Tensor, signs: torch.Tensor, counts: torch.Tensor, quotas: Quotas
) -> tuple[torch.Tensor, ...]:
    """The rotated mean of a group's queries [Hkv, G, head_dim], and the votes of each centroid for
    it.

    Returns
    -------
    tuple[torch.Tensor, ...]
        [Hkv, S, 8] float32, and [Hkv, S, 256] uint8.
    """
    mean = in_order(queries.float().transpose(1, 2)) / queries.shape[1]
    rotated = rotate(mean, signs).unflatten(-1, (-1, SUBSPACE))
    score = torch.zeros_like(rotated[..., :1])
    # <z_b, c> of every sign pattern c, the first coordinate its lowest bit
    for coordinate in rotated.split(1, dim=-1):
        score = torch.cat([score - coordinate, score + coordinate], dim=-1)
    order = score.argsort(dim=-1, descending=True, stable=True)
    ordered_counts = counts.gather(2, order)
    nearer = ordered_counts.cumsum(dim=-1) - ordered_counts
    votes = sum((nearer < span).to(torch.uint8) for span in quotas.tiers)
    assert isinstance(votes, torch.Tensor)
    return rotated, torch.zeros_like(votes).scatter_(2, order, votes)


def vote(ids: torch.Tensor, votes_of: torch.Tensor, candidates: int) -> torch.Tensor:
    """The tokens with most votes, [Hkv, candidates] int64 ascending; of equal ones the earlier.

    Parameters
    ----------
    ids
        [Hkv, S, n].
    votes_of
        [Hkv, S, 256] uint8, of each centroid.
    """
    votes = torch.zeros_like(ids[:, 0])
    for subspace in range(ids.shape[1]):
        votes += votes_of[:, subspace].gather(1, ids[:, subspace].long())
    return top_earliest(votes[None], candidates)[0].sort(dim=-1).values


def estimate(codes: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Estimates of <query, key> for codes [Hkv, C, S + S / 2] and a rotated query [Hkv, S, 8]:
    [Hkv, C] float32.
    """
    words, weights = codes.tensor_split([rotated.shape[1]], dim=-1)
    bit = torch.arange(SUBSPACE, dtype=torch.int32, device=codes.device)
    nibbles = words[..., None] >> 4 * bit & 15
    terms = constants(codes.device).decoded[nibbles.long()] * rotated[:, None]
    products = in_order(terms[..., 0::2] + terms[..., 1::2])
    return in_order(products * weights.contiguous().view(torch.bfloat16).float())


def search(
    ids: torch.Tensor,
    codes: torch.Tensor,
    counts: torch.Tensor,
    queries: torch.Tensor,
    signs: torch.Tensor,
    quotas: Quotas,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of a zone with the largest estimates, [Hkv, k] int64, best first, and these;
    -1, -inf for NaN.

    Parameters
    ----------
    ids, codes, counts
        of one row's zone, [Hkv, S, n], and as `encode` and `count_ids` make them.
    queries
        [Hkv, G, head_dim].
    """
    rotated, votes_of = tables(queries, signs, counts, quotas)
    candidates = vote(ids, votes_of, quotas.candidates)
    chosen = codes.gather(1, candidates[..., None].expand(-1, -1, codes.shape[2]))
    estimates = estimate(chosen, rotated).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best = top_earliest(estimates[None], quotas.retrieved)[0]
    tokens = torch.where(best < 0, -1, candidates.gather(1, best.clamp(min=0)))
    return tokens, estimates.gather(1, best.clamp(min=0)).masked_fill(best < 0, -torch.inf)
