"""How LycheeCluster's chunks are represented, and grouped into fine clusters and coarse units
(section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import embedding_bag, normalize

from methods.blocks.kmeans import lists_of, nearest, spherical_kmeans
from methods.blocks.ragged import entries

Pooling = Literal["mean", "max"]

# build=two_level: units are found on a sample of this many chunks for each, and sets of some
# hundred points settle soon
SAMPLED_PER_UNIT = 16
FINE_ITERATIONS = 2


@dataclass(frozen=True)
class ClusterLayout:
    """How chunks are clustered."""

    cluster_size: int = 2  # chunks in a fine cluster, on average
    # most coarse units; there are as many as the root of the fine clusters, at most
    units: int = 64
    iterations: int = 10  # of k-means
    # full: all chunks against all clusters (as published); two_level: units first, then clusters
    # inside each, a small part of the work
    build: Literal["full", "two_level"] = "full"
    pooling: Pooling = "mean"  # of its keys, what represents a chunk
    # how they follow a graft. exact: anew from all members, whose representatives are kept in int8.
    # strict: as large as the move of the centroid and the new member can make them. paper: never
    # smaller, and no smaller than the new member's distance; the centroid's move may leave older
    # members outside. A unit's ball holds its clusters' balls, in paper their centroids only
    radii: Literal["exact", "strict", "paper"] = "paper"
    # a graft moves the centroid of its unit, too, to the mean over one chunk more
    move_units: bool = True


def pooled(keys: torch.Tensor, bounds: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Representatives of chunks.

    Parameters
    ----------
    keys
        [H, N, D].
    bounds
        [M + 1], where chunks of these keys begin and the last one ends.

    Returns
    -------
    torch.Tensor
        [H, M, D] fp32 of unit length.
    """
    keys = keys[:, : int(bounds[-1])]
    tokens = torch.arange(int(bounds[0]), keys.shape[1], device=keys.device)
    offsets = bounds[:-1] - bounds[0]
    joined = [embedding_bag(tokens, head.float(), offsets, mode=pooling) for head in keys]
    return torch.stack([normalize(vectors, dim=1) for vectors in joined])


class Clustering(NamedTuple):
    """What a build finds.

    Attributes
    ----------
    centroids
        [H, L, D] fp32, in the order of their units.
    assigned
        [H, M], the cluster of every chunk.
    unit_centroids
        [H, P, D] fp32.
    units
        [H, L] ascending, the unit of every cluster; P for what is none.
    """

    centroids: torch.Tensor
    assigned: torch.Tensor
    unit_centroids: torch.Tensor
    units: torch.Tensor


def clustered(
    points: torch.Tensor, layout: ClusterLayout, generator: torch.Generator
) -> Clustering:
    """Cluster chunks by their representatives [H, M, D]; `generator` draws the first centroids."""
    build = _two_level if layout.build == "two_level" else _full
    return build(points, layout, generator)


def _full(points: torch.Tensor, layout: ClusterLayout, generator: torch.Generator) -> Clustering:
    """k-means of chunks, and k-means of its centroids."""
    clusters = ceil(points.shape[1] / layout.cluster_size)
    centroids, assigned = spherical_kmeans(points, clusters, layout.iterations, generator)
    count = _units(clusters, layout)
    unit_centroids, units = spherical_kmeans(centroids, count, layout.iterations, generator)
    units, order = units.sort(dim=1, stable=True)
    assigned = order.argsort(dim=1).gather(1, assigned)
    return Clustering(rows_at(centroids, order), assigned, unit_centroids, units)


def _two_level(
    points: torch.Tensor, layout: ClusterLayout, generator: torch.Generator
) -> Clustering:
    """k-means of a sample of chunks gives the units; k-means of each unit's chunks, the units of a
    size at once.
    """
    heads, count = points.shape[:2]
    units = _units(ceil(count / layout.cluster_size), layout)
    sample = torch.randperm(count, generator=generator)[: SAMPLED_PER_UNIT * units]
    sampled = points[:, sample.to(points.device)]
    unit_centroids, _ = spherical_kmeans(sampled, units, layout.iterations, generator)
    members, starts = lists_of(nearest(points, unit_centroids), units)
    sizes = starts.diff(dim=1)
    clusters, groups = _clusters_of_units(sizes, layout)
    ends = clusters.cumsum(dim=1)
    firsts, most = ends - clusters, int(ends[:, -1].max())

    # chunks, and clusters, of all heads one after the other
    head = torch.arange(heads, device=points.device)[:, None]
    flat, members = points.flatten(0, 1), (members + head * count).view(-1)
    centroids = flat.new_zeros(heads * most, points.shape[2])
    assigned = members.new_empty(heads * count)
    iterations = min(FINE_ITERATIONS, layout.iterations)
    for group in groups:
        target, inside = int(clusters[group][0]), sizes[group]
        indexes, _ = entries((starts[:, :-1] + head * count)[group][:, None], inside[:, None])
        chunks, present = members[indexes.clamp(min=0)], indexes >= 0
        means, local = spherical_kmeans(flat[chunks], target, iterations, generator, inside)
        assigned[chunks[present]] = (firsts[group][:, None] + local)[present]
        first = (firsts + head * most)[group][:, None]
        centroids[first + torch.arange(target, device=first.device)] = means
    index = torch.arange(most, device=points.device).expand(heads, -1).contiguous()
    return Clustering(
        centroids.view(heads, most, points.shape[2]),
        assigned.view(heads, count),
        unit_centroids,
        torch.searchsorted(ends, index, right=True),
    )


def _clusters_of_units(
    sizes: torch.Tensor, layout: ClusterLayout
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """How many clusters each unit gets, by its chunks [H, P], and which units get as many and are
    clustered at once: those whose sizes differ by less than a quarter, [H, P] bool each.
    """
    size_class = (sizes.log() / log(1.25)).floor().masked_fill(sizes == 0, -1)
    clusters, groups = torch.zeros_like(sizes), []
    for size in size_class.unique().tolist():
        group = size_class == size
        target = round(float(sizes[group].float().mean()) / layout.cluster_size)
        clusters[group] = min(max(1, target), int(sizes[group].min()))
        if size >= 0:
            groups.append(group)
    return clusters, groups


def _units(clusters: int, layout: ClusterLayout) -> int:
    return min(layout.units, ceil(sqrt(clusters)))


def rows_at(vectors: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """vectors [H, n, D] at indexes [H, m]: [H, m, D]."""
    heads, count = vectors.shape[:2]
    first = torch.arange(heads, device=at.device)[:, None] * count
    rows = vectors.flatten(0, 1).index_select(0, (at + first).view(-1))
    return rows.view(heads, -1, vectors.shape[2])
