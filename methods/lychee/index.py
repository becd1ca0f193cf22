"""LycheeCluster's index (section 4 and algorithm 1): chunks in fine clusters, and these in coarse
units, balls around.

A chunk is represented by the normalised mean (or maximum) of its keys. Fine clusters and units are
balls around centroids: by Cauchy and Schwarz no member has a larger inner product with q than
q.centroid + |q| radius. An index serves the KV heads of one sequence and layer, which share the
chunks and differ in their clusters.

What it holds: half a centroid a chunk in the dtype of the keys, 136 bytes where heads have 128
elements of bfloat16, against 512 bytes of key and value a token: 2.2 % at 12 tokens a chunk, and
4.3 % with the int8 representatives that keep radii exact. The paper reports 1.0 to 1.3 %, less than
such centroids alone take.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize, pad

from kvbench.kernels.library import CppFile
from methods.blocks.chunking import Chunks
from methods.blocks.kmeans import lists_of
from methods.blocks.ragged import entries
from methods.lychee.clustering import ClusterLayout, clustered, rows_at
from methods.lychee.search import ChunkSearch, SearchedIndex, best_tokens

KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"))
LEVELS = 127  # a kept representative's elements are int8: whole numbers of 1 / LEVELS

SPARE_CHUNKS = 64  # room for grafts that is added at once


class ClusterIndex:
    """Fine clusters and coarse units over the chunks of one sequence and layer, for its H KV heads.

    Clusters stand in the order of their units. Centroids are held in the dtype of the keys; radii
    reach from the centroids as they are held to the representatives before any rounding, and are
    rounded up.

    Parameters
    ----------
    representatives
        [H, M, D] fp32, see `pooled`.
    lengths
        [M], tokens of each chunk.
    dtype
        in which centroids are held.
    generator
        draws first centroids.

    Attributes
    ----------
    count
        chunks, M.
    codes
        [H, M + spare, D] int8, the representatives; None unless radii are exact.
    centroids, radii
        [H, L, D] and [H, L] fp32, of the fine clusters.
    members, starts
        [H, M] and [H, L + 1] int32; members[h, starts[h, c] : starts[h, c + 1]] are c's chunks.
    unit_centroids, unit_radii
        [H, P, D] and [H, P] fp32, of the coarse units.
    unit_tokens
        [H, P] int32, in all chunks of a unit.
    unit_starts
        [H, P + 1] int32; unit u has the clusters unit_starts[h, u] .. unit_starts[h, u + 1] - 1.
        Those beyond the last unit are none: heads differ in the number of their clusters.
    """

    def __init__(
        self,
        representatives: torch.Tensor,
        lengths: torch.Tensor,
        layout: ClusterLayout,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        self.layout, self.count = layout, representatives.shape[1]
        # all of it as compiled code reads it, until the next graft
        self._read: list[torch.Tensor] | None = None
        clustering = clustered(representatives, layout, generator)
        clusters, units = clustering.centroids.shape[1], clustering.unit_centroids.shape[1]
        self.centroids = clustering.centroids.to(dtype)
        self.unit_centroids = clustering.unit_centroids.to(dtype)
        members, starts = lists_of(clustering.assigned, clusters)
        self.members, self.starts = members.int(), starts.int()
        self.unit_starts = lists_of(clustering.units, units)[1].int()
        unit_of_chunk = clustering.units.gather(1, clustering.assigned)
        self.unit_tokens = torch.zeros_like(self.unit_starts[:, 1:])
        self.unit_tokens.scatter_add_(1, unit_of_chunk, lengths.int().expand_as(unit_of_chunk))

        self.codes = _coded(representatives) if layout.radii == "exact" else None
        distance = self._distance(representatives, rows_at(self.centroids, clustering.assigned))
        self.radii = self._up(_largest(distance, clustering.assigned, clusters))
        unit_of_cluster = rows_at(self.unit_centroids, clustering.units.clamp(max=units - 1))
        reach = self._reach(self.centroids, self.radii, unit_of_cluster).masked_fill(
            self.starts.diff(dim=1) == 0, 0
        )
        self.unit_radii = self._up(_largest(reach, clustering.units, units + 1)[:, :units])

    def __getstate__(self) -> dict[str, Any]:
        """A copy's arrays lie elsewhere."""
        return {**self.__dict__, "_read": None}

    def searched(self) -> SearchedIndex:
        """What a search reads."""
        units = self.unit_centroids, self.unit_radii, self.unit_tokens, self.unit_starts
        return SearchedIndex(*units, self.centroids, self.radii, self.starts, self.members)

    def best_chunks(
        self, queries: torch.Tensor, norms: torch.Tensor, room: int, search: ChunkSearch
    ) -> torch.Tensor:
        """See `SearchedIndex.best_chunks`."""
        most = search.most(room)
        return self.searched().best_chunks(queries, norms, room, search, most, self.codes)

    def best_tokens(
        self,
        queries: torch.Tensor,
        mean: bool,
        chunks: Chunks,
        room: int,
        search: ChunkSearch,
        fixed: tuple[torch.Tensor | None, int, int, int] = (None, 0, 0, 0),
    ) -> torch.Tensor:
        """See `search.best_tokens`; `fixed`: its last four arguments."""
        how = search.units, search.ub_weight, search.most(room), room
        where = *self.searched(), self.codes, chunks.bounds
        return best_tokens(queries, mean, *where, *how, *fixed)

    def write_best_tokens(
        self,
        queries: torch.Tensor,
        mean: bool,
        chunks: Chunks,
        room: int,
        search: ChunkSearch,
        fixed: torch.Tensor,
        tokens: torch.Tensor,
    ) -> int:
        """As `best_chunks`, in one call into compiled code, for an index that `is_readable`.

        Parameters
        ----------
        queries
            [H, G, D].
        mean
            ask once for each head, with the mean query and the mean norm of its group.
        chunks
            those of the sequence.
        room
            most tokens of chunks.
        fixed
            tokens that come before those of chunks, [n].
        tokens
            [H * G or, with `mean`, H, n + room or more]; written: `fixed`, then the tokens of the
            best chunks in their order, as many whole chunks as fit, and trailing -1. Tokens of the
            longest are returned.
        """
        if self._read is None:
            none = self.centroids.new_empty(len(self.centroids), 0, queries.shape[2]).to(torch.int8)
            codes = none if self.codes is None else self.codes
            self._read = [part.contiguous() for part in (*self.searched(), codes)]
        how = search.units, float(search.ub_weight), search.most(room), room
        where = *self._read, chunks.bounds
        return KERNELS.best_tokens(
            torch.get_num_threads(), queries, mean, *where, *how, fixed, tokens
        )

    def graft(self, representative: torch.Tensor, length: int) -> None:
        """Add a chunk to its nearest cluster (algorithm 1, lazy update): no cluster is split, none
        is new.

        The cluster's centroid becomes the mean over one chunk more, and with `move_units` that of
        its unit.

        Parameters
        ----------
        representative
            [H, D] fp32.
        length
            the chunk's tokens.
        """
        self._read = None
        near = (self.centroids.float() @ representative[..., None]).squeeze(2)
        surplus = torch.arange(near.shape[1], device=near.device) >= self.unit_starts[:, -1:]
        cluster = near.masked_fill(surplus, -torch.inf).argmax(dim=1, keepdim=True)
        unit = torch.searchsorted(self.unit_starts[:, 1:].contiguous(), cluster.int(), right=True)
        end = self.starts.gather(1, cluster + 1)
        size = end - self.starts.gather(1, cluster)
        old, old_unit = rows_at(self.centroids, cluster), rows_at(self.unit_centroids, unit)
        _average(self.centroids, cluster, size, representative)
        if self.layout.move_units:
            clusters = self.unit_starts.gather(1, torch.cat([unit, unit + 1], dim=1))
            edges = self.starts.gather(1, clusters.long())
            _average(self.unit_centroids, unit, edges.diff(dim=1), representative)
        self.unit_tokens.scatter_add_(1, unit, torch.full_like(end, length))
        self._insert(representative, cluster, end)
        if self.codes is not None:
            self._measure(cluster, unit)
        else:
            self._widen(representative[:, None], cluster, unit, old, old_unit)

    def _insert(
        self, representative: torch.Tensor, cluster: torch.Tensor, end: torch.Tensor
    ) -> None:
        """Put a new chunk after the members of `cluster` [H, 1], which stand up to `end` [H, 1]."""
        index = torch.arange(self.count + 1, device=end.device)
        members = torch.where(index < end, pad(self.members, (0, 1)), pad(self.members, (1, 0)))
        self.members = members.masked_fill(index == end, self.count)
        self.starts += (torch.arange(self.starts.shape[1], device=end.device) > cluster).int()
        if self.codes is not None:
            if self.count == self.codes.shape[1]:
                self.codes = pad(self.codes, (0, 0, 0, SPARE_CHUNKS))
            self.codes[:, self.count] = _coded(representative)
        self.count += 1

    def _measure(self, cluster: torch.Tensor, unit: torch.Tensor) -> None:
        """Radii of `cluster` and `unit`, [H, 1], anew from what is in them."""
        first = self.starts.gather(1, cluster)
        indexes, _ = entries(first, self.starts.gather(1, cluster + 1) - first)
        assert self.codes is not None
        points = _decoded(rows_at(self.codes, self.members.gather(1, indexes.clamp(min=0)).long()))
        distance = self._distance(points, rows_at(self.centroids, cluster))
        farthest = distance.masked_fill(indexes < 0, 0).amax(dim=1, keepdim=True)
        self.radii.scatter_(1, cluster, self._up(farthest))
        first = self.unit_starts.gather(1, unit)
        clusters, _ = entries(first, self.unit_starts.gather(1, unit + 1) - first)
        at = clusters.clamp(min=0)
        centroids, unit_centroid = rows_at(self.centroids, at), rows_at(self.unit_centroids, unit)
        reach = self._reach(centroids, self.radii.gather(1, at), unit_centroid)
        empty = (clusters < 0) | (self.starts.diff(dim=1).gather(1, at) == 0)
        farthest = reach.masked_fill(empty, 0).amax(dim=1, keepdim=True)
        self.unit_radii.scatter_(1, unit, self._up(farthest))

    def _widen(
        self,
        point: torch.Tensor,
        cluster: torch.Tensor,
        unit: torch.Tensor,
        old: torch.Tensor,
        old_unit: torch.Tensor,
    ) -> None:
        """Radii of `cluster` and `unit`, [H, 1], that grow after `point` has moved centroids away
        from the old ones.
        """
        centroid = rows_at(self.centroids, cluster)
        distance = self._distance(point, centroid)
        radius = self._grown(self.radii.gather(1, cluster), old, centroid, distance)
        self.radii.scatter_(1, cluster, radius)
        unit_centroid = rows_at(self.unit_centroids, unit)
        reach = self._reach(centroid, radius, unit_centroid)
        radius = self._grown(self.unit_radii.gather(1, unit), old_unit, unit_centroid, reach)
        self.unit_radii.scatter_(1, unit, radius)

    def _grown(
        self, radius: torch.Tensor, old: torch.Tensor, new: torch.Tensor, reach: torch.Tensor
    ) -> torch.Tensor:
        """A radius that holds what lies at `reach`; in "strict" all that it held around the old
        centroid, too.
        """
        if self.layout.radii == "strict":
            radius = self._up(radius + (new.float() - old.float()).norm(dim=2))
        return torch.maximum(radius, self._up(reach))

    def _distance(self, points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        """How far representatives [H, m, D] may be from centroids [H, m or 1, D], even if they were
        decoded.
        """
        rounding = 0.0 if self.codes is None else sqrt(points.shape[2]) / (2 * LEVELS)
        return (points - centroids.float()).norm(dim=2) + rounding

    def _reach(
        self, centroids: torch.Tensor, radii: torch.Tensor, unit_centroids: torch.Tensor
    ) -> torch.Tensor:
        """How far from a unit's centroid its clusters reach, balls and all; in "paper" their
        centroids.
        """
        distance = (centroids.float() - unit_centroids.float()).norm(dim=2)
        return distance if self.layout.radii == "paper" else distance + radii

    def _up(self, radii: torch.Tensor) -> torch.Tensor:
        """Larger by more than fp32 may have lost in a norm over D differences."""
        return radii * (1 + self.centroids.shape[2] * torch.finfo(torch.float32).eps)


def _average(
    centroids: torch.Tensor, at: torch.Tensor, sizes: torch.Tensor, point: torch.Tensor
) -> None:
    """Move the centroids at [H, 1], each a mean over `sizes` [H, 1] members, to the mean over
    `point` [H, D], too.
    """
    total = sizes[..., None] * rows_at(centroids, at).float() + point[:, None]
    mean = normalize(total, dim=2).to(centroids.dtype)
    centroids.scatter_(1, at[..., None].expand_as(mean), mean)


def _coded(representatives: torch.Tensor) -> torch.Tensor:
    return (LEVELS * representatives).round_().to(torch.int8)


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    return codes.float() / LEVELS


def _largest(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """[H, count], the maxima over groups [H, n] of values [H, n] >= 0; 0 where there is none."""
    return values.new_zeros(len(groups), count).scatter_reduce(1, groups, values, "amax")
