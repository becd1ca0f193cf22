"""ParisKV's stages for all rows and KV heads at once, in torch, on any device;
`kernels.cpp` has the same for a CPU.

Both give the same bits: sums run in one stated order, and equal votes or estimates keep the earlier
token. Nothing here waits for a device: how far a search goes stands in a tensor.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.kernels.operators import operator
from methods.blocks.topk import top_earliest
from methods.pariskv.codebook import (
    CENTROIDS,
    DECODED,
    LEVELS,
    NO_ALIGNMENT,
    NO_RADIUS,
    SUBSPACE,
    THRESHOLDS,
)

LEVEL_BITS = 3  # of a coordinate's level; its fourth is the sign


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


class Codes(NamedTuple):
    """What is kept of keys: D / 2 + S / 2 bytes of codes and S weights, S = D / 8 subspaces.

    Attributes
    ----------
    ids
        [..., S] uint8, the signs of each subspace, a bit each.
    levels
        [..., 3, S] uint8, the levels of its eight coordinates: their lowest bits, the second ones,
        the highest.
    weights
        [..., S] bfloat16.
    """

    ids: torch.Tensor
    levels: torch.Tensor
    weights: torch.Tensor

    def of(self, tokens: torch.Tensor) -> Codes:
        """Of some of [B, Hkv, n] tokens: [B, Hkv, C]."""
        ids, weights = (rows_at(part, tokens) for part in (self.ids, self.weights))
        levels = rows_at(self.levels.flatten(3), tokens).unflatten(3, self.levels.shape[3:])
        return Codes(ids, levels, weights)

    def estimates(self, rotated: torch.Tensor) -> torch.Tensor:
        """Of <query, key> for a rotated query [..., S, 8]: [..., C] float32 of [..., C] keys."""
        bit = torch.arange(SUBSPACE, dtype=torch.int32, device=rotated.device)
        nibbles = (self.ids[..., None] >> bit & 1) << LEVEL_BITS
        for place, plane in enumerate(self.levels.unbind(dim=-2)):
            nibbles |= (plane[..., None] >> bit & 1) << place
        terms = constants(rotated.device).decoded[nibbles.long()] * rotated.unsqueeze(-3)
        products = in_order(terms[..., 0::2] + terms[..., 1::2])
        return in_order(products * self.weights.float())


def rows_at(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of rows [B, Hkv, n, D] those of tokens [B, Hkv, C]: [B, Hkv, C, D]."""
    return rows.gather(2, tokens[..., None].expand(-1, -1, -1, rows.shape[3]))


def encode(keys: torch.Tensor, signs: torch.Tensor) -> Codes:
    """What is kept of keys [..., head_dim].

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
    planes = torch.stack([level >> bit & 1 for bit in range(LEVEL_BITS)], dim=-3)
    return Codes(_bytes(subspaces >= 0), _bytes(planes), (radius / alignment).bfloat16())


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    """Bits [..., 8] as bytes, the lowest first."""
    place = torch.arange(SUBSPACE, dtype=torch.int32, device=bits.device)
    return (bits.int() << place).sum(dim=-1).to(torch.uint8)


def count_ids(ids: torch.Tensor) -> torch.Tensor:
    """How many of the keys with ids [Hkv, n, S] have each id: [Hkv, S, 256] int32."""
    ids = ids.transpose(1, 2).long()
    counts = torch.zeros(*ids.shape[:2], CENTROIDS, dtype=torch.int32, device=ids.device)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand_as(ids)
    return counts.scatter_add_(2, ids, ones)


def tables(
    queries: torch.Tensor, signs: torch.Tensor, counts: torch.Tensor, spans: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated mean of a group's queries [B, Hkv, G, head_dim], and the votes of each centroid
    for it.

    Parameters
    ----------
    counts
        [B, Hkv, S, 256], keys of each id.
    spans
        [tiers, B], `Quotas.tiers`.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        [B, Hkv, S, 8] float32, and [B, Hkv, S, 256] uint8.
    """
    mean = in_order(queries.float().transpose(2, 3)) / queries.shape[2]
    rotated = rotate(mean, signs).unflatten(-1, (-1, SUBSPACE))
    score = torch.zeros_like(rotated[..., :1])
    # <z_b, c> of every sign pattern c, the first coordinate its lowest bit
    for coordinate in rotated.split(1, dim=-1):
        score = torch.cat([score - coordinate, score + coordinate], dim=-1)
    order = score.argsort(dim=-1, descending=True, stable=True)
    ordered_counts = counts.gather(3, order)
    nearer = ordered_counts.cumsum(dim=-1) - ordered_counts
    votes = torch.zeros_like(nearer, dtype=torch.uint8)
    for span in spans:
        votes += nearer < span[:, None, None, None]
    return rotated, torch.zeros_like(votes).scatter_(3, order, votes)


def vote(
    ids: torch.Tensor,
    votes_of: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """The tokens with most votes, [B, Hkv, most] int64 ascending, trailing n; of equal ones the
    earlier.

    Parameters
    ----------
    ids
        [B, Hkv, n, S].
    votes_of
        [B, Hkv, S, 256] uint8, of each centroid.
    lengths, candidates
        [B], tokens of each row's zone, the first of n, and candidates wanted, `most` at most.
    """
    votes = torch.zeros_like(ids[..., 0])
    for subspace in range(ids.shape[3]):
        votes += votes_of[:, :, subspace].gather(2, ids[..., subspace].long())
    length = ids.shape[2]
    beyond = torch.arange(length, device=ids.device) >= lengths[:, None, None]
    best = top_earliest(votes.short().masked_fill(beyond, -1), most, candidates)
    return best.masked_fill(best < 0, length).sort(dim=-1).values


@operator("methods.pariskv.gpu")
def search_codes(
    queries: torch.Tensor,
    signs: torch.Tensor,
    ids: torch.Tensor,
    levels: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    asks: torch.Tensor,
    candidates: int,
    retrieved: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of each row's zone with the largest estimates, best first, and these.

    Parameters
    ----------
    queries
        [B, Hkv, G, head_dim].
    ids, levels, weights
        `Codes` of all zones, of [B, Hkv, n] keys.
    counts
        [B, Hkv, S, 256], as `count_ids` makes them.
    asks
        [4 + tiers, B] int64, of each row: tokens of its zone, the first of these, candidates,
        tokens to retrieve, and `Quotas.tiers`; a row that does not ask has none.
    candidates, retrieved
        the most of a row.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        tokens of the sequence [B, Hkv, retrieved] int64, and float32; -1 and -inf where the
        estimate is NaN, and after those that a row asks for.
    """
    lengths, begins, wanted, limits = asks[:4]
    rotated, votes_of = tables(queries, signs, counts, asks[4:])
    voted = vote(ids, votes_of, lengths, wanted, candidates)
    at = voted.clamp(max=ids.shape[2] - 1)
    estimates = Codes(ids, levels, weights).of(at).estimates(rotated)
    estimates = estimates.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    estimates = estimates.masked_fill(voted == ids.shape[2], -torch.inf)
    best = top_earliest(estimates, retrieved, limits)
    tokens = at.gather(2, best.clamp(min=0)) + begins[:, None, None]
    values = estimates.gather(2, best.clamp(min=0))
    return tokens.masked_fill(best < 0, -1), values.masked_fill(best < 0, -torch.inf)
