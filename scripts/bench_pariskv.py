"""What ParisKV's search finds and costs, beside scanning every key in fp32: one head, one thread.

All sides hold the same keys and answer the same queries turn by turn. Times are CPU time, which
other work on the machine disturbs little: medians over the queries.

Prints one JSON object as its last line:
  runs       for each kind of keys and each n, at the published beta and rho for n:
    ratio          tables + vote + rerank over scan
    ratio_top      the same over scan_top
    encode_ratio   to encode one key, over scan: what a generated token adds to a step
    us             the medians these are of, in microseconds: scan (one product of all keys with
                   the query, in torch), scan_top (that and its top k), tables (a query's
                   lookups), vote (with the choice of candidates), rerank (with the choice of k),
                   encode (a key)
    coarse, final  share of the exact top k among the candidates, and among the k retrieved
  sweep      for each kind of keys (n = --sweep-length): coarse and final at the published shares,
             and at points, for each beta and rho, with six tiers and with one
  max_ratio, min_final    the largest ratio, and the least final recall by kind, of the runs with
                          n >= 128k
  bytes      metadata of a key: ids, codes, weights, all; without_ids, as ids repeat the signs in
             the codes; over_kv, all over its key and value in bfloat16

Keys: those of `scripts/bench_index.py` (isotropic, clustered, attention); anisotropic, lognormal
deviations (1) of the coordinates around a mean as long as they are, and normal queries, which care
for all coordinates alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench import command_line, median_us, print_result, say
from bench_index import KINDS as INDEX_KINDS

from methods.pariskv.codebook import LEVELS, Quotas, quotas, random_signs
from methods.pariskv.index import KERNELS, KernelIndex

Floats = np.ndarray[Any, np.dtype[np.float32]]

BETAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RHOS = (0.05, 0.2, 0.5, 1.0)
LONG = 131072


def anisotropic(rng: np.random.Generator, count: int, queries: int, dim: int) -> tuple[Any, Any]:
    """Keys with a few wide coordinates and a mean, on which codes must spend their bits."""
    deviation, mean = np.exp(rng.standard_normal(dim)), rng.standard_normal(dim)
    deviation *= np.sqrt(dim) / np.linalg.norm(deviation)
    mean *= np.sqrt(dim) / np.linalg.norm(mean)
    return mean + deviation * rng.standard_normal((count, dim)), rng.standard_normal((queries, dim))


KINDS = {**INDEX_KINDS, "anisotropic": anisotropic}


@dataclass(frozen=True)
class GroupedKeys:
    """Keys [n, D], and queries [m, G, D] of the group that shares them."""

    name: str
    keys: Floats
    queries: Floats

    def best_of_mean(self, k: int) -> Any:
        """The k keys with the largest product with each group's mean query, [m, k]."""
        logits = self.queries.mean(axis=1) @ self.keys.T
        return np.argpartition(-logits, k, axis=1)[:, :k]

    def times(self, k: int) -> dict[str, Any]:
        """Times of all stages beside the scans', and the recall, at the published shares."""
        head = Head(self.keys)
        keys = torch.from_numpy(self.keys)
        quota = quotas(len(self.keys), k)
        calls: dict[str, Callable[[Floats], Any]] = {
            "scan": lambda group: torch.mv(keys, torch.from_numpy(group[0])),
            "scan_top": lambda group: torch.mv(keys, torch.from_numpy(group[0])).topk(k),
            "tables": lambda group: head.tables(group, quota),
            "vote": lambda group: head.vote(quota),
            "rerank": lambda group: head.rerank(quota),
        }
        us = median_us(calls, self.queries)
        step = us["tables"] + us["vote"] + us["rerank"]
        return {
            "keys": self.name,
            "n": len(self.keys),
            "candidates": quota.candidates,
            "ratio": step / us["scan"],
            "ratio_top": step / us["scan_top"],
            "encode_ratio": head.encode_us / us["scan"],
            "us": {**us, "encode": head.encode_us},
            **head.recalls(self, quota, self.best_of_mean(k)),
        }

    def sweep(self, k: int) -> dict[str, Any]:
        """Recall for each beta and rho."""
        head = Head(self.keys)
        best = self.best_of_mean(k)
        count = len(self.keys)
        points = [
            {
                "tiers": tiers,
                "rho": rho,
                "beta": beta,
                **head.recalls(self, quotas(count, k, beta, rho, tiers), best),
            }
            for tiers in (6, 1)
            for rho in RHOS
            for beta in BETAS
        ]
        return {
            "keys": self.name,
            "n": count,
            **head.recalls(self, quotas(count, k), best),
            "points": points,
        }


class Head:
    """The index of one KV head, and its stages for one query group at a time."""

    def __init__(self, keys: Floats) -> None:
        self.signs = random_signs(keys.shape[1], 0)
        self.index = KernelIndex(1, 1, self.signs, ThreadPoolExecutor(1))
        start = time.process_time()
        self.index.extend(0, torch.from_numpy(keys)[None])
        self.encode_us = 1e6 * (time.process_time() - start) / len(keys)
        self.ids, self.codes, self.counts = self.index.head(0, 0)
        subspaces, count = len(self.ids), len(keys)
        self.votes, self.votes_of = (
            np.empty(self.ids.shape[1], np.uint8),
            np.empty((subspaces, 256), np.uint8),
        )
        self.rotated = np.empty((8, subspaces), np.float32)
        self.candidates = np.empty(count, np.int32)

    def tables(self, group: Floats, quota: Quotas) -> None:
        """What vote and rerank look up."""
        spans = np.array(quota.tiers)
        KERNELS.tables(group, self.signs, self.counts, spans, self.votes_of, self.rotated)

    def vote(self, quota: Quotas) -> Any:
        """The candidates, ascending."""
        candidates = self.candidates[: quota.candidates]
        most = len(quota.tiers) * len(self.ids)
        length = self.index.lengths[0]
        KERNELS.vote(self.ids, length, self.votes_of, most, self.votes, candidates)
        return candidates

    def rerank(self, quota: Quotas) -> Any:
        """The k retrieved of the candidates of the last vote, best first."""
        tokens, scores = np.empty(quota.retrieved, np.int32), np.empty(quota.retrieved, np.float32)
        candidates = self.candidates[: quota.candidates]
        KERNELS.rerank(self.codes, LEVELS, self.rotated, candidates, tokens, scores)
        return tokens

    def recalls(self, data: GroupedKeys, quota: Quotas, best: Any) -> dict[str, float]:
        """Mean coarse and final recall of the tokens `best` [m, k]."""
        recall: dict[str, list[float]] = {"coarse": [], "final": []}
        for group, best_ids in zip(data.queries, best, strict=True):
            self.tables(group, quota)
            recall["coarse"].append(np.isin(best_ids, self.vote(quota)).mean())
            recall["final"].append(np.isin(best_ids, self.rerank(quota)).mean())
        return {name: float(np.mean(shares)) for name, shares in recall.items()}


def _synthetic(kind: str, count: int, queries: int, dim: int) -> GroupedKeys:
    keys, query_vectors = KINDS[kind](np.random.default_rng(0), count, queries, dim)
    return GroupedKeys(kind, keys.astype(np.float32), query_vectors.astype(np.float32)[:, None])


def _bytes(dim: int) -> dict[str, float]:
    index = KernelIndex(1, 1, random_signs(dim, 0), ThreadPoolExecutor(1))
    index.extend(0, torch.zeros(1, 1, dim))
    ids, codes = index.ids[0, 0, :, 0].nbytes, index.codes[0, 0, 0].nbytes
    weights = 2 * ids  # a subspace's id takes one byte, its weight two
    return {
        "ids": ids,
        "codes": codes - weights,
        "weights": weights,
        "all": ids + codes,
        "without_ids": codes,
        "over_kv": (ids + codes) / (2 * dim * 2),
    }


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the module's docstring names."""
    k, dim = arguments.k, arguments.dim
    queries = arguments.queries
    _synthetic("isotropic", 1000, 2, dim).times(10)  # compiles
    runs, sweeps = [], []
    for kind in arguments.kinds:
        for length in arguments.lengths:
            say(f"{kind}, {length} keys")
            runs.append(_synthetic(kind, length, queries, dim).times(k))
        say(f"{kind}, sweep")
        sweeps.append(_synthetic(kind, arguments.sweep_length, queries // 2, dim).sweep(k))
    long = [record for record in runs if record["n"] >= LONG]
    finals = {record["keys"]: list[float]() for record in long}
    for record in long:
        finals[record["keys"]].append(record["final"])
    return {
        "k": k,
        "dim": dim,
        "max_ratio": max((record["ratio"] for record in long), default=None),
        "min_final": {kind: min(shares) for kind, shares in sorted(finals.items())},
        "bytes": _bytes(dim),
        "runs": runs,
        "sweep": sweeps,
    }


def main() -> None:
    """Make or read the keys, measure, print."""
    parser = command_line(
        __doc__,
        lengths=([8192, 32768, LONG, 4 * LONG], "keys"),
        sweep_length=(32768, "keys of the sweep"),
        dim=(128, "head dimension of synthetic keys"),
        queries=(40, "queries of each run; half as many in the sweep"),
        k=(100, "keys wanted"),
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="synthetic keys"
    )
    arguments = parser.parse_args()
    if min(arguments.lengths + [arguments.sweep_length]) <= arguments.k:
        parser.error(f"--lengths, --sweep-length: expected more keys than --k {arguments.k}")

    torch.set_num_threads(1)
    print_result(measured(arguments))


if __name__ == "__main__":
    main()
