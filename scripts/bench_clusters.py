"""Our k-means and product quantisation beside faiss's, at the sizes at which methods cluster a prompt's keys.

ClusterKV has spherical k-means over a KV head's keys, one cluster for 80 of them; PQCache k-means with 64 means in each
half of a key. Ours do all KV heads of a layer at once; faiss's one after the other. Both take as many iterations from
as many points, and as many threads. Keys are made: variances that fall as j^-.8 over a mean, with lognormal lengths.

Prints one JSON object as its last line; `runs` has an entry for each task, number of keys and head dim:
  train_ms    of all heads, ours and faiss's, medians of turns taken beside each other
  assign_us   of one more key in every head: its cluster, or its code
  train_ratio, assign_ratio    ours over faiss's
  loss_ratio  mean squared distance of a key from what stands for it, or what a cosine lacks of 1, ours over faiss's
and threads, settings. results/bench_clusters_cpu.json names its command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import torch
from torch.nn.functional import normalize

from methods.blocks.kmeans import kmeans, nearest, nearest_point, spherical_kmeans

HEADS, ITERATIONS = 4, 20
PER_CLUSTER = 80  # ClusterKV
SUBSPACES, BITS = 2, 6  # PQCache


def made_keys(count: int, dim: int) -> torch.Tensor:
    """[HEADS, count, dim] float32."""
    rng = torch.Generator().manual_seed(0)
    deviation = torch.arange(1, dim + 1).float() ** -0.4
    mean = normalize(torch.randn(HEADS, 1, dim, generator=rng), dim=2) * deviation.norm()
    lengths = (0.3 * torch.randn(HEADS, count, 1, generator=rng)).exp()
    return (mean + torch.randn(HEADS, count, dim, generator=rng) * deviation) * lengths


class Clusters:
    """Spherical k-means."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.points = normalize(keys, dim=2)
        self.count = self.points.shape[1] // PER_CLUSTER

    def ours(self) -> torch.Tensor:
        """Centroids [H, K, D]."""
        return spherical_kmeans(self.points, self.count, ITERATIONS, torch.Generator().manual_seed(0))[0]

    def theirs(self) -> torch.Tensor:
        """As `ours`."""
        return torch.stack([_faiss(points, self.count, spherical=True) for points in self.points])

    def assigned(self, centroids: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """The cluster of each point."""
        return nearest(points, centroids)

    def assigned_by_faiss(self, centroids: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
        """What finds the cluster of points, of each head."""
        return [_flat(faiss.IndexFlatIP(centroids.shape[2]), own) for own in centroids]

    def loss(self, centroids: torch.Tensor) -> float:
        """What the cosine of a point and its centroid lacks of 1."""
        at = self.assigned(centroids, self.points)
        chosen = centroids.gather(1, at[..., None].expand_as(self.points))
        return float(1 - (chosen * self.points).sum(dim=2).mean())


class Codes(Clusters):
    """k-means in the parts of a key."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.points = keys.unflatten(2, (SUBSPACES, -1)).transpose(1, 2).flatten(0, 1).contiguous()
        self.count = 2**BITS

    def ours(self) -> torch.Tensor:
        """Means [H * m, K, D / m]."""
        return kmeans(self.points, self.count, ITERATIONS, torch.Generator().manual_seed(0), nearest_point)[0]

    def theirs(self) -> torch.Tensor:
        """As `ours`, by `faiss.ProductQuantizer`."""
        found = []
        for parts in self.points.unflatten(0, (-1, SUBSPACES)):
            whole = np.ascontiguousarray(parts.transpose(0, 1).flatten(1).numpy())
            quantizer = faiss.ProductQuantizer(whole.shape[1], SUBSPACES, BITS)
            quantizer.cp.niter, quantizer.cp.max_points_per_centroid = ITERATIONS, len(whole)
            quantizer.train(whole)
            means = faiss.vector_to_array(quantizer.centroids).reshape(SUBSPACES, self.count, -1)
            found.append(torch.from_numpy(means))
        return torch.cat(found)

    def assigned(self, centroids: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """The code of each part."""
        return nearest_point(points, centroids)

    def assigned_by_faiss(self, centroids: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
        """What finds the codes, of each head and part."""
        return [_flat(faiss.IndexFlatL2(centroids.shape[2]), own) for own in centroids]

    def loss(self, centroids: torch.Tensor) -> float:
        """Mean squared distance of a part from its mean."""
        at = self.assigned(centroids, self.points)
        chosen = centroids.gather(1, at[..., None].expand_as(self.points))
        return float((chosen - self.points).square().sum(dim=2).mean())


def _faiss(points: torch.Tensor, count: int, spherical: bool) -> torch.Tensor:
    # without sampling, as ours
    trained = faiss.Kmeans(
        points.shape[1], count, niter=ITERATIONS, spherical=spherical, max_points_per_centroid=len(points), seed=0
    )
    trained.train(np.ascontiguousarray(points.numpy()))
    return torch.from_numpy(trained.centroids)


def _flat(index: Any, centroids: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    index.add(np.ascontiguousarray(centroids.numpy()))
    return lambda points: index.search(points.numpy(), 1)


def measured(task: Clusters, rounds: int) -> dict[str, Any]:
    """See the module's docstring."""
    train: dict[str, list[float]] = {"ours": [], "faiss": []}
    assign: dict[str, list[float]] = {"ours": [], "faiss": []}
    centroids = {}
    for _ in range(rounds):
        for name, run in (("ours", task.ours), ("faiss", task.theirs)):
            start = time.perf_counter()
            centroids[name] = run()
            train[name].append(1e3 * (time.perf_counter() - start))
    of_heads, one = task.assigned_by_faiss(centroids["faiss"]), task.points[:, :1].contiguous()
    for _ in range(200):
        start = time.perf_counter()
        task.assigned(centroids["ours"], one)
        middle = time.perf_counter()
        for search, point in zip(of_heads, one, strict=True):
            search(point)
        assign["ours"].append(1e6 * (middle - start))
        assign["faiss"].append(1e6 * (time.perf_counter() - middle))
    medians = {
        name: {arm: round(statistics.median(values), 2) for arm, values in times.items()}
        for name, times in (("train_ms", train), ("assign_us", assign))
    }
    return {
        **medians,
        "train_ratio": round(medians["train_ms"]["ours"] / medians["train_ms"]["faiss"], 3),
        "assign_ratio": round(medians["assign_us"]["ours"] / medians["assign_us"]["faiss"], 3),
        "loss_ratio": round(task.loss(centroids["ours"]) / task.loss(centroids["faiss"]), 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    faiss.omp_set_num_threads(torch.get_num_threads())
    runs = []
    for count in given.keys:
        for dim in given.dims:
            keys = made_keys(count, dim)
            for name, task in (("clusters", Clusters(keys)), ("codes", Codes(keys))):
                runs.append({"task": name, "keys": count, "head_dim": dim, **measured(task, given.rounds)})
                print(json.dumps(runs[-1]), flush=True)
    print(json.dumps({"runs": runs, "threads": torch.get_num_threads(), "settings": vars(given)}))


if __name__ == "__main__":
    main()
