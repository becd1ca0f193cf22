"""How LycheeCluster's index is searched on a device: units from the top down, clusters in them, and
their chunks (section 4); `kernels.cpp` has the same for a CPU, `gpu.py` for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.kernels.operators import operator
from methods.blocks.chunking import Chunks
from methods.blocks.ragged import entries, without_gaps
from methods.blocks.topk import top_earliest
from methods.lychee.clustering import rows_at


@dataclass(frozen=True)
class ChunkSearch:
    """How chunks are searched.

    Attributes
    ----------
    units
        best units whose clusters are ranked; more until they hold twice the tokens wanted.
    ub_weight
        of the radii in the bounds: 1, or 0 to rank by centroids alone.
    shortest
        tokens that every chunk has, but for `short` ones.
    """

    units: int = 16
    ub_weight: int = 1
    shortest: int = 8
    short: int = 1

    def most(self, room: int) -> int:
        """Chunks that need be ranked for `room` tokens: as many as fit, and the one after them."""
        return room // self.shortest + self.short + 1


class SearchedIndex(NamedTuple):
    """What a search reads of an index, see `ClusterIndex`."""

    unit_centroids: torch.Tensor
    unit_radii: torch.Tensor
    unit_tokens: torch.Tensor
    unit_starts: torch.Tensor
    centroids: torch.Tensor
    radii: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor

    def best_chunks(
        self,
        queries: torch.Tensor,
        norms: torch.Tensor,
        room: int,
        search: ChunkSearch,
        most: int,
        codes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Chunks in the order of their clusters' upper bounds, searched from the top down.

        Of equal bounds the earlier unit is better, and in the order of units the earlier cluster.
        Inside a cluster the chunks nearest to the query come first, where representatives are kept.

        Parameters
        ----------
        queries
            [H, Q, D] fp32.
        norms
            [H, Q], of the queries; of mean queries the mean norms.
        room
            tokens wanted.
        most
            clusters to rank.
        codes
            [H, M or more, D] int8, representatives of the chunks; None: none are kept.

        Returns
        -------
        torch.Tensor
            [H, Q, K] int64, chunks of at least `room` tokens if there are so many; trailing -1.
        """
        slack = search.ub_weight * norms[..., None]
        clusters = self._searched(queries, slack, room, search)
        at = clusters.clamp(min=0)
        score = _products(self.centroids, at, queries) + slack * _pick(self.radii, at)
        sizes = _pick(self.starts, at + 1) - _pick(self.starts, at)
        score = score.masked_fill((clusters < 0) | (sizes == 0), -torch.inf)
        order = top_earliest(score, most)
        none, order = order < 0, order.clamp(min=0)
        sizes = sizes.gather(2, order).masked_fill(none, 0)
        indexes, rank = entries(_pick(self.starts, at.gather(2, order)), sizes)
        chunks = _pick(self.members, indexes.clamp(min=0)).long()
        if codes is not None:
            order = _products(codes, chunks, queries).argsort(dim=2, descending=True, stable=True)
            rank = rank.masked_fill(indexes < 0, rank.shape[2]).gather(2, order)
            order = order.gather(2, rank.argsort(dim=2, stable=True))
            chunks, indexes = chunks.gather(2, order), indexes.gather(2, order)
        return torch.where(indexes < 0, -1, chunks)

    def _searched(
        self, queries: torch.Tensor, slack: torch.Tensor, room: int, search: ChunkSearch
    ) -> torch.Tensor:
        """The clusters of the best units, unit by unit, [H, Q, K]; trailing -1."""
        near = queries @ self.unit_centroids.float().transpose(1, 2)
        score = near + slack * self.unit_radii[:, None]
        score = score.masked_fill(self.unit_tokens[:, None] == 0, -torch.inf)
        order = score.argsort(dim=2, descending=True, stable=True)
        unit_tokens = _pick(self.unit_tokens, order)
        rank = torch.arange(order.shape[2], device=order.device)
        searched = (rank < search.units) | (unit_tokens.cumsum(dim=2) - unit_tokens < 2 * room)
        sizes = _pick(self.unit_starts.diff(dim=1), order).masked_fill(~searched, 0)
        return entries(_pick(self.unit_starts, order), sizes)[0]


@operator("methods.lychee.gpu")
def best_tokens(
    queries: torch.Tensor,
    mean: bool,
    unit_centroids: torch.Tensor,
    unit_radii: torch.Tensor,
    unit_tokens: torch.Tensor,
    unit_starts: torch.Tensor,
    centroids: torch.Tensor,
    radii: torch.Tensor,
    starts: torch.Tensor,
    members: torch.Tensor,
    codes: torch.Tensor | None,
    bounds: torch.Tensor,
    searched: int,
    ub_weight: int,
    most: int,
    room: int,
    seen: torch.Tensor | None,
    first: int,
    newest: int,
    sinks: int,
) -> torch.Tensor:
    """The newest tokens, sinks, and those of the best chunks: as many whole chunks as fit.

    [H or H * G, newest + sinks + room], trailing -1.

    Parameters
    ----------
    queries
        [H, G, D].
    mean
        ask once for each head, with the mean query and the mean norm of its group.
    codes
        as of `SearchedIndex.best_chunks`.
    bounds
        [M + 1], where chunks begin and the last one ends.
    searched, ub_weight, most
        `units`, `ub_weight` and `most` of `ChunkSearch`.
    room
        tokens wanted; so many chunks hold more: `most`.
    seen
        how many tokens there are, a number on the device; None: `newest` is 0.
    first, newest
        the tokens from this one on come first, the newest before the others, so many at most.
    sinks
        first tokens, which come then.
    """
    of_clusters = centroids, radii, starts, members
    index = SearchedIndex(unit_centroids, unit_radii, unit_tokens, unit_starts, *of_clusters)
    queries = queries.float()
    norms = queries.norm(dim=2)
    if mean:
        queries, norms = queries.mean(dim=1, keepdim=True), norms.mean(dim=1, keepdim=True)
    best = index.best_chunks(queries, norms, room, ChunkSearch(searched, ub_weight), most, codes)
    chunks = Chunks(bounds)
    tokens = chunks.tokens(chunks.fitting(best, room), room).flatten(0, 1)
    tokens = pad(tokens, (0, room - tokens.shape[1]), value=-1)
    if seen is None:
        return tokens
    new = seen - 1 - torch.arange(newest, device=tokens.device)
    fixed = new.masked_fill(new < first, -1), torch.arange(sinks, device=tokens.device)
    return without_gaps(torch.cat([torch.cat(fixed).expand(len(tokens), -1), tokens], dim=1))


def _products(vectors: torch.Tensor, at: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Of vectors [H, n, D], or codes of them, at indexes [H, Q, m], with queries [H, Q, D]:
    [H, Q, m].
    """
    rows = rows_at(vectors, at.flatten(1)).view(*at.shape, -1).float()
    return (rows @ queries[..., None]).squeeze(3)


def _pick(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """values [H, n] at indexes [H, Q, m]: [H, Q, m]."""
    return values.gather(1, at.flatten(1)).view(at.shape)
