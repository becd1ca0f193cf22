"""The hash tables of one row and layer, and how likely a key is to be sampled from them.

A table has a code of some bits for every key, the signs of its products with as many random
directions (SimHash). Keys are centred before, queries are not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from kvbench.kernels.library import CppFile
from methods.blocks.kernels import is_readable
from methods.blocks.products import products as list_products

KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"))

# keys that are projected together, so that their products stay in the processor's cache
CHUNK = 128
# keys in the buckets of a step that take longer to look at than it takes to wake a thread
WORTH_A_THREAD = 1 << 18


class HashedSample(NamedTuple):
    """What one query head after the other attends.

    Attributes
    ----------
    ids
        [Hq, m] int64 token ids, those always attended first, trailing -1.
    weights
        [Hq, m] fp32, what is added to their logits.
    counts
        tokens that each sampled.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    counts: list[int]


class Tables:
    """Hash tables over the keys of one token after the other.

    Parameters
    ----------
    keys
        [Hkv, n, D].
    first
        token id of the first key.
    directions
        [L, K or more, D] fp32 on the CPU, of L tables.
    bits
        K, of a code.

    Attributes
    ----------
    mean
        [Hkv, D] fp32, of the keys.
    norms
        [Hkv, n] fp32, of the keys less their mean.
    starts, members
        see `fill` of `kernels.cpp`.
    """

    def __init__(self, keys: torch.Tensor, first: int, directions: torch.Tensor, bits: int) -> None:
        self.first, self.bits = first, bits
        self.directions = directions
        mean = keys.float().mean(dim=1, keepdim=True)
        centred = keys.float() - mean
        self.mean, self.norms = mean[:, 0].cpu().contiguous(), centred.norm(dim=2).cpu()
        codes = codes_of(centred, directions.to(keys.device), bits).cpu()
        self.starts = torch.zeros(*codes.shape[:2], 2**self.bits + 1, dtype=torch.int32)
        self.members = torch.empty_like(codes)
        KERNELS.fill(*(part.flatten(0, 1) for part in (codes, self.starts, self.members)))

    @property
    def tables(self) -> int:
        """How many there are, L."""
        return len(self.directions)

    def sample(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        always: tuple[int, int, int],
        room: int | None,
    ) -> HashedSample:
        """The tokens that query [Hq, D] fp32 attends.

        Parameters
        ----------
        keys
            [Hkv, S, D], by token id, on the CPU.
        always
            (n, start, seen), the tokens 0 .. n - 1 and start .. seen - 1 are always attended. Of
            those before start are sampled whose keys share a bucket with the query in two tables or
            more.
        room
            tokens that the query heads of a KV head may sample between them; they look up fewer
            tables where all would find more. None: any number.
        """
        count = self.members.shape[2]
        most = always[0] + always[2] - always[1] + count
        ids = torch.empty(len(query), most, dtype=torch.int64)
        weights = torch.empty(len(query), most)
        counts = torch.zeros(len(query), dtype=torch.int64)
        directions = self.directions.flatten(0, 1)[None, None]
        products = list_products(query[None, :, None], directions).view(
            len(query), *self.directions.shape[:2]
        )
        # float16, which no kernel reads, as a copy
        stored = (keys if is_readable(keys) else keys.float()).contiguous()
        built = self.starts, self.members, self.mean, self.norms, self.bits, self.first
        looked_at = len(query) * self.tables * count >> self.bits
        threads = min(torch.get_num_threads(), max(1, looked_at // WORTH_A_THREAD))
        longest = KERNELS.sample(
            threads,
            products.contiguous(),
            query.contiguous(),
            stored,
            *built,
            *always,
            min(always[1] - self.first, count),
            count if room is None else room,
            ids,
            weights,
            counts,
        )
        return HashedSample(ids[:, :longest], weights[:, :longest], counts.tolist())


def codes_of(vectors: torch.Tensor, directions: torch.Tensor, bits: int) -> torch.Tensor:
    """The code of every vector [H, n, D] in every table of directions [L, K or more, D]: [H, L, n]
    int32.
    """
    flat, powers = directions.flatten(0, 1).T, 2.0 ** torch.arange(bits, device=directions.device)
    codes = []
    for chunk in vectors.split(CHUNK, dim=1):
        signs = (chunk @ flat).unflatten(2, directions.shape[:2])[..., :bits] > 0
        codes.append((signs.float() @ powers).int())
    return torch.cat(codes, dim=1).transpose(1, 2).contiguous()


def meets(cosines: torch.Tensor, bits: int) -> torch.Tensor:
    """How likely a key with these cosines is to share a query's bucket in one table of so many
    bits.
    """
    return (1 - cosines.clamp(-1, 1).acos() / math.pi) ** bits


def likelihood(met: torch.Tensor, tables: int) -> torch.Tensor:
    """How likely a key is to meet a query in two of so many tables or more, if in one it
    is `met`.
    """
    missed = 1 - met
    return 1 - missed**tables - tables * met * missed ** (tables - 1)
