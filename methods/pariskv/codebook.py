"""What a key becomes, and how far each stage of a search reaches (ParisKV, ICML 2026, arXiv
2602.07721, and its code).

A key is rotated at random and cut into subspaces of 8 coordinates, y_b. What is kept of a subspace
is

    id_b      the signs of y_b, one bit each, lowest first: also the number of the nearest of 256
              sign centroids
    codes     for each coordinate sign << 3 | t, where |y_b| / ||y_b|| lies between the thresholds
              t - 1 and t
    weight_b  ||y_b|| / <v_b, u_b>, where u_b = y_b / ||y_b|| and v_b is u_b with its magnitudes
              replaced by levels[t]

so that weight_b <v_b, z_b> estimates <y_b, z_b> for the subspace z_b of a rotated query. The
rotation is sqrt(1/D) H diag(s): random signs s and one Walsh-Hadamard transform, the same for all
layers and heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

SUBSPACE = 8  # coordinates of a subspace
CENTROIDS = 256  # sign patterns of a subspace
THRESHOLDS = torch.tensor([0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901])
LEVELS = torch.tensor([0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633])
DECODED = torch.cat([-LEVELS, LEVELS])  # the value of each 4-bit code
NO_RADIUS, NO_ALIGNMENT = 1e-30, 1e-6  # what a subspace without length is divided by

# A centroid earns a vote for each tier it is in; a tier of share s holds the nearest centroids of s
# * rho * n keys.
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.00)
MOST_VOTES = 255  # of one token, who are counted in a byte

ROTATION_SEED = 42

# (beta, rho) of zones shorter than so many tokens; beta of the zone becomes candidates, rho of it
# earns votes.
SHARES = ((5_000, 0.5, 0.5), (10_000, 0.25, 0.3), (30_000, 0.2, 0.25))
SHARES_BEYOND = (0.1, 0.2)


def padded(head_dim: int) -> int:
    """Coordinates of a rotated vector: a power of two, and 4 subspaces at least.

    Raises
    ------
    ValueError
        so many subspaces that their votes for one token do not fit in a byte.
    """
    wide = max(4 * SUBSPACE, 1 << (head_dim - 1).bit_length())
    if wide // SUBSPACE * len(TIERS) > MOST_VOTES:
        raise ValueError(
            f"head_dim={head_dim}: ParisKV counts the votes of a token in a byte, for head_dim"
            " <= 256"
        )
    return wide


def random_signs(head_dim: int, seed: int) -> torch.Tensor:
    """sqrt(1/D) s, what a vector is multiplied with before the transform: [D] float32, D =
    `padded(head_dim)`.
    """
    wide = padded(head_dim)
    generator = torch.Generator().manual_seed(ROTATION_SEED + seed)
    signs = torch.randint(0, 2, (wide,), generator=generator) * 2 - 1
    return signs * torch.tensor(wide**-0.5, dtype=torch.float32)


@dataclass(frozen=True)
class Quotas:
    """How far the stages of one search in a zone reach.

    Attributes
    ----------
    tiers
        keys that each tier spans in every subspace, rising; a centroid is in a tier as long as
        fewer keys than that are nearer to the query, the one that crosses the line included.
    candidates
        tokens with most votes, C.
    retrieved
        candidates with the largest estimate, k.
    """

    tiers: tuple[int, ...]
    candidates: int
    retrieved: int


@lru_cache(maxsize=64)  # all layers of a step ask for the same
def quotas(
    count: int, k: int, beta: float | None = None, rho: float | None = None, tiers: int = 6
) -> Quotas:
    """The quotas for a zone of `count` tokens; a share that is None follows the zone's length as
    published.

    Parameters
    ----------
    k
        tokens to retrieve; a zone that has no more is retrieved whole.
    beta
        candidates as a share of the zone, never fewer than k.
    rho
        keys that vote in each subspace, as a share of the zone.
    tiers
        6, or 1: one vote for each subspace in reach.
    """
    of_length = next((pair for below, *pair in SHARES if count < below), SHARES_BEYOND)
    beta = of_length[0] if beta is None else beta
    rho = of_length[1] if rho is None else rho
    spans = tuple(_share(count, rho * share) for share in TIERS[-tiers:])
    retrieved = min(k, count)
    return Quotas(spans, max(_share(count, beta), retrieved), retrieved)


def _share(count: int, share: float) -> int:
    """The share of `count`, rounded up: 0.1 of 30 is 3, though it is 3.0000000000000004
    in binary.
    """
    return ceil(round(share * count, 9))
