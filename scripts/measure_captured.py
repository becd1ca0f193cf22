"""What the papers say of keys and queries, measured on those of a real model without generation.

--model reads texts of --length and --further tokens with full attention; of every layer and KV head
the keys of the first --length tokens are searched for, and the queries of later tokens ask. A
measure is the mean over layers and heads, of each text.

Prints one JSON object as its last line, `texts`, with an entry for each text
  text        which one
  pages       IceCache, 4.1: attention mass of a query in the --pages pages of 16 tokens that have
              most of it, where pages are of similar keys (similar, the authors' tree) and of
              consecutive ones (consecutive)
  recall      ParisKV: of the 100 tokens with the largest product with a group's mean query, the
              share retrieved by its codes (codes), and without its rotation and normalisation, by
              as many centroids that k-means learns from the keys in each subspace (learned)
  windows     RACC, Figure 3: of the 5 % of the prompt that get most attention in 100 consecutive
              steps, the share that is also among those of the next 100 steps (adjacent), and of
              the last 100 of --further (distant), mean over query heads
  bounds      LycheeCluster, Equation 2, with radii as published: share of chunks above the bound
              of their coarse unit (above), and recall of the best --budget tokens ranked by
              bounds and by centroids alone (bound, centroid)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import torch
from bench import command_line, print_result, say
from bench_index import INSERTED, LAYOUTS, KeySet
from bench_lychee import token_recall
from bench_pariskv import GroupedKeys, Head
from capture_trace import capture

from kvbench.config import ConfigError, bind_methods

bind_methods()

from methods.blocks.chunking import Chunks  # noqa: E402
from methods.icecache.index import Workspace  # noqa: E402
from methods.lychee.clustering import ClusterLayout, pooled  # noqa: E402
from methods.lychee.index import ChunkSearch, ClusterIndex  # noqa: E402
from methods.pariskv.codebook import CENTROIDS, SUBSPACE, Quotas, quotas  # noqa: E402

Floats = np.ndarray[Any, np.dtype[np.float32]]

K = 100  # tokens that ParisKV retrieves
STEPS, SHARE = 100, 0.05  # of RACC's windows: steps, and prompt tokens that count
CHUNK = 12  # tokens of a chunk, the mean of those that end where text does


# -- IceCache --------------------------------------------------------------------------------------


def pages(keys: Floats, queries: Floats, page_count: int) -> dict[str, float]:
    """Mass in the best pages of either kind; keys [n + `INSERTED`, D], queries [m, G, D]."""
    work, data = Workspace(), KeySet("captured", keys, queries)
    quality = data.page_quality({"dci": data.tree(LAYOUTS["dci"], work)[0]}, page_count, work)
    return {
        "similar": quality["dci_oracle"]["mass"],
        "consecutive": quality["quest_oracle"]["mass"],
    }


# -- ParisKV ---------------------------------------------------------------------------------------


def recall(keys: Floats, queries: Floats) -> dict[str, float]:
    """Of the best of each mean query, what codes and learned centroids find.

    Keys [n, D], queries [m, G, D].
    """
    data, quota = GroupedKeys("captured", keys, queries), quotas(len(keys), K)
    head, learned = Head(keys), Learned(keys)
    hits: dict[str, list[float]] = {"codes": [], "learned": []}
    for group, best in zip(queries, data.best_of_mean(K), strict=True):
        head.tables(group, quota)
        head.vote(quota)
        for name, tokens in (
            ("codes", head.rerank(quota)),
            ("learned", learned.search(group.mean(axis=0), quota)[0]),
        ):
            hits[name].append(float(np.isin(best, tokens).mean()))
    return {name: float(np.mean(shares)) for name, shares in hits.items()}


def most(votes: Any, count: int) -> Any:
    """The tokens with most votes, of those with as many the first."""
    return np.argsort(-votes.astype(int), kind="stable")[:count]


class Learned:
    """ParisKV's two stages over keys as they are, with centroids that k-means learned from them.

    The first counts votes by the products of query and centroids, the second adds these products
    up.
    """

    def __init__(self, keys: Floats) -> None:
        parts = np.ascontiguousarray(keys.reshape(len(keys), -1, SUBSPACE).swapaxes(0, 1))
        self.centroids, self.ids = [], []
        for part in parts:
            kmeans = faiss.Kmeans(SUBSPACE, CENTROIDS, niter=10, seed=0, min_points_per_centroid=1)
            kmeans.train(part)
            self.centroids.append(kmeans.centroids)
            self.ids.append(kmeans.index.search(part, 1)[1][:, 0])

    def search(self, query: Floats, quota: Quotas) -> tuple[Any, Any]:
        """The tokens retrieved, and the votes of all."""
        votes = np.zeros(len(self.ids[0]), int)
        estimates = np.zeros(len(self.ids[0]), np.float32)
        for centroids, ids, part in zip(
            self.centroids, self.ids, query.reshape(-1, SUBSPACE), strict=True
        ):
            product = centroids @ part
            order = np.argsort(-product, kind="stable")
            sizes = np.bincount(ids, minlength=CENTROIDS)[order]
            nearer = np.empty(CENTROIDS, int)
            nearer[order] = sizes.cumsum() - sizes
            votes += (nearer[:, None] < np.array(quota.tiers)).sum(axis=1)[ids]
            estimates += product[ids]
        candidates = most(votes, quota.candidates)
        return (
            candidates[np.argsort(-estimates[candidates], kind="stable")[: quota.retrieved]],
            votes,
        )


# -- RACC ------------------------------------------------------------------------------------------


def windows(keys: torch.Tensor, queries: torch.Tensor, prompt: int) -> dict[str, float]:
    """Overlap of windows' best prompt tokens.

    Keys [n, D], queries [G, n - prompt, D] of one KV head.
    """
    steps, count = queries.shape[1], int(SHARE * prompt)
    logits = queries @ keys.T / keys.shape[1] ** 0.5
    later = torch.arange(len(keys)) > torch.arange(prompt, prompt + steps)[:, None]
    weight = logits.masked_fill_(later, -torch.inf).softmax(dim=2)[:, :, :prompt]
    best = weight.unflatten(1, (-1, STEPS)).sum(dim=2).topk(count, dim=2).indices
    chosen = torch.zeros(*best.shape[:2], prompt).scatter_(2, best, 1)
    shared = (chosen[:, :1] * chosen).sum(dim=2).mean(dim=0) / count
    return {"adjacent": float(shared[1]), "distant": float(shared[-1])}


# -- LycheeCluster ---------------------------------------------------------------------------------


def bounds(keys: torch.Tensor, queries: torch.Tensor, budget: int) -> dict[str, float]:
    """Chunks above their units' bounds, and recall by either ranking.

    Keys [H, n, D], queries [H, m, D].
    """
    ends = [*range(0, keys.shape[1], CHUNK), keys.shape[1]]
    chunks = Chunks(torch.tensor(ends))
    points, norms = pooled(keys, chunks.bounds, "mean"), queries.norm(dim=2)
    layout = ClusterLayout(radii="paper", move_units=True)
    index = ClusterIndex(
        points, chunks.lengths, layout, keys.dtype, torch.Generator().manual_seed(0)
    )
    score = queries @ points.transpose(1, 2)
    limit = (
        queries @ index.unit_centroids.transpose(1, 2)
        + norms[:, :, None] * index.unit_radii[:, None]
    )
    above = score > limit.gather(2, units(index)[:, None].expand_as(score))
    ranked = {
        name: token_recall(index, chunks, keys, queries, budget, ChunkSearch(ub_weight=weight))
        for name, weight in (("bound", 1), ("centroid", 0))
    }
    return {"above": float(above.float().mean()), **ranked}


def units(index: ClusterIndex) -> torch.Tensor:
    """[H, M], the coarse unit of every chunk."""
    of_chunk = torch.empty(index.members.shape, dtype=torch.int64)
    for head, (members, starts, first) in enumerate(
        zip(index.members, index.starts, index.unit_starts, strict=True)
    ):
        cluster = (
            torch.searchsorted(starts, torch.arange(len(members), dtype=starts.dtype), right=True)
            - 1
        )
        of_chunk[head, members.long()] = (
            torch.searchsorted(first, cluster.to(first.dtype), right=True) - 1
        )
    return of_chunk


MEASURES = ("pages", "recall", "windows", "bounds")


# -- a text ----------------------------------------------------------------------------------------


def measured(number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All measures on one text, means over layers and heads."""
    length, further = arguments.length, arguments.further
    words = [f"model={arguments.model}", "task=fidelity", f"task.lengths=[{length + further}]"]
    words += ["task.steps=1", f"task.samples={arguments.texts}", "dtype=float32"]
    arrays = capture([*words, *arguments.overrides], None, further, 0, number)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in MEASURES}
    layers = sum(name.startswith("keys.") for name in arrays)
    for layer in range(layers):
        keys, queries = arrays[f"keys.{layer}"], arrays[f"queries.{layer}"]
        heads = queries.reshape(len(keys), -1, *queries.shape[1:])
        head_queries = heads[:, :, : 2 * arguments.queries : 2]
        prompt_keys = torch.from_numpy(keys[:, :length])
        means = torch.from_numpy(head_queries.mean(axis=1))
        results["bounds"].append(bounds(prompt_keys, means, arguments.budget))
        for rows, group, every in zip(keys, head_queries, heads, strict=True):
            groups = np.ascontiguousarray(group.swapaxes(0, 1))
            results["pages"].append(pages(rows[: length + INSERTED], groups, arguments.pages))
            results["recall"].append(recall(np.ascontiguousarray(rows[:length]), groups))
            later = windows(torch.from_numpy(rows), torch.from_numpy(every), length)
            results["windows"].append(later)
        say(f"text {number + 1} of {arguments.texts}, layer {layer + 1} of {layers}")
    return {
        "text": json.loads(str(arrays["about"]))["sample"],
        **{name: mean(rows) for name, rows in results.items()},
    }


def mean(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number."""
    return {name: float(np.mean([record[name] for record in records])) for name in records[0]}


def main() -> None:
    """Read the texts, measure, print."""
    parser = command_line(
        __doc__,
        model=("smollm2-135m-instruct", "a model of conf/model"),
        texts=(12, "texts"),
        length=(4096, "tokens that are searched for"),
        further=(2000, "tokens after them"),
        queries=(32, "later tokens that ask, every other one from the first"),
        pages=(12, "pages of a query"),
        budget=(256, "tokens of a query, for bounds"),
    )
    parser.add_argument(
        "overrides", nargs="*", help="changes to the run, as `python -m kvbench` takes them"
    )
    arguments = parser.parse_intermixed_args()
    if (
        arguments.further < max(INSERTED, 2 * STEPS, 2 * arguments.queries)
        or arguments.further % STEPS
    ):
        parser.error(
            f"--further {arguments.further}: expected a multiple of {STEPS}, {INSERTED} or more"
        )
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    try:
        print_result({"texts": [measured(number, arguments) for number in range(arguments.texts)]})
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
