"""k-means over many sets of points at once, and the lists of clusters' members that it needs.

It runs on a GPU as it is, beside the model, and gives the same bits in any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding_bag, normalize, pad

COMPARED = 2**22  # similarities held at once
INERTIA = 1e-6  # share of the old centroid in the new one: nothing, but all of an empty cluster's


def spherical_kmeans(
    points: torch.Tensor,
    clusters: int,
    iterations: int,
    generator: torch.Generator,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster vectors by their inner product with the clusters' normalised means (Dhillon and Modha
    2001).

    A cluster begins as one of the points, drawn without repeats, and keeps its centroid while it is
    empty.

    Parameters
    ----------
    points
        [S, M, D] fp32, S sets of M points, of unit length or near it.
    clusters
        K of every set, at most its points.
    generator
        draws the first centroids, on the CPU.
    counts
        [S], points of each set where some have fewer than M; those after them are no points.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        centroids: [S, K, D] of unit length; of what `assigned` says, but for empty clusters.
        assigned: [S, M] int64, the cluster of every point; K for what is none.
    """
    sets, count = points.shape[:2]
    drawn = torch.rand(sets, count, generator=generator).to(points.device)
    absent = None
    if counts is not None:
        absent = torch.arange(count, device=points.device) >= counts[:, None]
        drawn = drawn.masked_fill(absent, torch.inf)
    first = drawn.argsort(dim=1)[:, :clusters]
    centroids = points.gather(1, first[..., None].expand(-1, -1, points.shape[2]))
    for _ in range(iterations):
        assigned = nearest(points, centroids)
        if absent is not None:
            assigned = assigned.masked_fill(absent, clusters)
        sums = cluster_sums(points, assigned, clusters)
        centroids = normalize(sums.add_(centroids, alpha=INERTIA), dim=2)
    return centroids, assigned


def kmeans(
    points: torch.Tensor,
    clusters: int,
    iterations: int,
    generator: torch.Generator,
    assign: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster vectors around the means of the clusters (Lloyd); an empty cluster keeps its mean.

    Parameters
    ----------
    points
        [S, M, D] fp32, S sets of M points.
    clusters
        K of every set, at most its points: a cluster begins as one of them, drawn without repeats.
    generator
        draws the first means, on the CPU.
    assign
        from points and means [S, K, D] the cluster of each point, [S, M].

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        means [S, K, D], and assigned [S, M] int64 by them.
    """
    drawn = torch.rand(points.shape[:2], generator=generator).argsort(dim=1)
    first = drawn[:, :clusters].to(points.device)
    means = points.gather(1, first[..., None].expand(-1, -1, points.shape[2]))
    for _ in range(iterations):
        assigned = assign(points, means)
        sums = cluster_sums(points, assigned, means.shape[1])
        sizes = lists_of(assigned, means.shape[1])[1].diff(dim=1)[..., None]
        means = torch.where(sizes > 0, sums / sizes.clamp(min=1), means)
    return means, assign(points, means)


def nearest_point(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """As `nearest`, by Euclidean distance."""
    half = centroids.square().sum(dim=2) / 2
    augmented = torch.cat([centroids, -half[..., None]], dim=2)
    return nearest(pad(points, (0, 1), value=1.0), augmented)


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The centroid [S, K, D] with the largest inner product for each of the points [S, M, D]: [S,
    M] int64.
    """
    step = max(1, COMPARED // (centroids.shape[0] * centroids.shape[1]))
    blocks = [
        (block @ centroids.transpose(1, 2)).max(dim=2).indices
        for block in points.split(step, dim=1)
    ]
    return torch.cat(blocks, dim=1)


def cluster_sums(points: torch.Tensor, assigned: torch.Tensor, clusters: int) -> torch.Tensor:
    """Sum of the points of every cluster, bitwise the same for any thread count.

    Parameters
    ----------
    points
        [S, M, D] fp32.
    assigned
        [S, M], the cluster of each; `clusters` for none.

    Returns
    -------
    torch.Tensor
        [S, clusters, D].
    """
    sets, width = len(points), points.shape[2]
    members, starts = lists_of(assigned, clusters)
    first = torch.arange(sets, device=points.device)[:, None] * points.shape[1]
    # one more list a set, of the points that are in no cluster
    lists = (members + first).view(-1), points.reshape(-1, width), (starts + first).view(-1)
    sums = embedding_bag(*lists, mode="sum")
    return sums.view(sets, clusters + 1, width)[:, :clusters]


def lists_of(assigned: torch.Tensor, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The points of every cluster, as lists one after the other (CSR).

    Parameters
    ----------
    assigned
        [S, M], the cluster of each point; `clusters` for none, whose points come after all lists.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        members [S, M], points in the order of their clusters, and starts [S, clusters + 1]: cluster
        c has the members starts[c] .. starts[c + 1] - 1.
    """
    members = assigned.argsort(dim=1, stable=True)
    sizes = torch.zeros(assigned.shape[0], clusters + 1, dtype=torch.int64, device=assigned.device)
    sizes.scatter_add_(1, assigned, torch.ones_like(assigned))
    return members, sizes.cumsum(dim=1) - sizes
