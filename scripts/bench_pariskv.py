"""What ParisKV's search finds and costs, beside scanning every key in fp32: one KV head, one thread, on the CPU.

All sides hold the same keys and answer the same queries turn by turn. Times are CPU time, which other work on the
machine disturbs little: medians over the queries.

Prints one JSON object as its last line:
  runs       for each kind of keys and each n, at the published beta and rho for n:
    ratio          tables + vote + rerank over scan
    ratio_top      the same over scan_top
    encode_ratio   to encode one key, over scan: what a generated token adds to a step
    us             the medians these are of, in microseconds: scan (one product of all keys with the query, in torch),
                   scan_top (that and its top k), tables (a query's lookups), vote (with the choice of candidates),
                   rerank (with the choice of k), encode (a key)
    coarse, final  share of the exact top k among the candidates, and among the k retrieved
  sweep      for each kind of keys (n = --sweep-length) and captured head: coarse and final at the published shares, and
             at points, for each beta and rho, with six tiers and with one; of captured keys also mass, the share of the
             query heads' attention that falls on the k retrieved
  max_ratio, min_final    the largest ratio, and the least final recall by kind, of the runs with n >= 128k
  bytes      metadata of a key: ids, codes, weights, all; without_ids, as ids repeat the signs in the codes; over_kv,
             all over its key and value in bfloat16

Keys: those of `scripts/bench_index.py` (isotropic, clustered, attention); anisotropic, lognormal deviations (1) of the
coordinates around a mean as long as they are, and normal queries, which care for all coordinates alike; captured ones
from --trace, an .npz of `scripts/capture_trace.py`: every layer and KV head in it, asked with its last queries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_index import KINDS as INDEX_KINDS
from capture_trace import load

from methods.pariskv import kernels
from methods.pariskv.codebook import Quotas, quotas, random_signs
from methods.pariskv.index import KernelIndex

Floats = np.ndarray[Any, np.dtype[np.float32]]

BETAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RHOS = (0.05, 0.2, 0.5, 1.0)
LONG = 131072


def anisotropic(rng: np.random.Generator, count: int, queries: int, dim: int) -> tuple[Any, Any]:
    """Keys with a few wide coordinates and a mean, which codes of the whole key must spend their bits on."""
    deviation, mean = np.exp(rng.standard_normal(dim)), rng.standard_normal(dim)
    deviation *= np.sqrt(dim) / np.linalg.norm(deviation)
    mean *= np.sqrt(dim) / np.linalg.norm(mean)
    return mean + deviation * rng.standard_normal((count, dim)), rng.standard_normal((queries, dim))


KINDS = {**INDEX_KINDS, "anisotropic": anisotropic}


@dataclass(frozen=True)
class Data:
    """Keys [n, D], and queries [m, G, D] of the group that shares them."""

    name: str
    keys: Floats
    queries: Floats


class Head:
    """The index of one KV head, and its stages for one query group at a time."""

    def __init__(self, keys: Floats) -> None:
        self.signs = random_signs(keys.shape[1], 0)
        self.index = KernelIndex(1, 1, self.signs, ThreadPoolExecutor(1))
        start = time.process_time()
        self.index.extend(0, torch.from_numpy(keys)[None])
        self.encode_us = 1e6 * (time.process_time() - start) / len(keys)
        self.ids, self.codes, self.halves, self.counts = self.index.head(0, 0)
        subspaces, count = len(self.ids), len(keys)
        self.votes, self.votes_of = np.empty(self.ids.shape[1], np.uint8), np.empty((subspaces, 256), np.uint8)
        self.rotated = np.empty((8, subspaces), np.float32)
        self.candidates, self.picked = np.empty(count, np.int32), np.empty(count, np.int32)
        self.estimates = np.empty(count, np.float32)

    def tables(self, group: Floats, asked: Quotas) -> None:
        """What vote and rerank look up."""
        spans = np.array(asked.tiers)
        kernels.tables(group, self.signs.numpy(), self.counts, spans, self.votes_of, self.rotated)

    def vote(self, asked: Quotas) -> Any:
        """The candidates, ascending."""
        candidates = self.candidates[: asked.candidates]
        most = len(asked.tiers) * len(self.ids)
        kernels.vote(self.ids, self.index.lengths[0], self.votes_of, most, self.votes, candidates)
        return candidates

    def rerank(self, asked: Quotas) -> Any:
        """The k retrieved of the candidates of the last vote, best first."""
        tokens, scores = np.empty(asked.retrieved, np.int32), np.empty(asked.retrieved, np.float32)
        candidates, work = self.candidates[: asked.candidates], (self.estimates, self.picked)
        kernels.rerank(self.codes, self.halves, self.rotated, candidates, *work, tokens, scores)
        return tokens


def recalls(head: Head, data: Data, asked: Quotas, best: Any) -> tuple[float, float, Any]:
    """Mean coarse and final recall of the tokens `best` [m, k], and what was retrieved, [m, k]."""
    coarse, final, found = [], [], []
    for group, own in zip(data.queries, best, strict=True):
        head.tables(group, asked)
        coarse.append(np.isin(own, head.vote(asked)).mean())
        found.append(head.rerank(asked))
        final.append(np.isin(own, found[-1]).mean())
    return float(np.mean(coarse)), float(np.mean(final)), np.stack(found)


def best_of_mean(data: Data, k: int) -> Any:
    """The k keys with the largest product with each group's mean query, [m, k]."""
    logits = data.queries.mean(axis=1) @ data.keys.T
    return np.argpartition(-logits, k, axis=1)[:, :k]


def run(data: Data, k: int) -> dict[str, Any]:
    """Times of all stages beside the scans', and the recall, at the published shares."""
    head, keys, asked = Head(data.keys), torch.from_numpy(data.keys), quotas(len(data.keys), k)
    calls: dict[str, Callable[[Floats], Any]] = {
        "scan": lambda group: torch.mv(keys, torch.from_numpy(group[0])),
        "scan_top": lambda group: torch.mv(keys, torch.from_numpy(group[0])).topk(k),
        "tables": lambda group: head.tables(group, asked),
        "vote": lambda group: head.vote(asked),
        "rerank": lambda group: head.rerank(asked),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for group in data.queries:
        for name, call in calls.items():
            start = time.process_time()
            call(group)
            seconds[name].append(time.process_time() - start)
    us = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
    step = us["tables"] + us["vote"] + us["rerank"]
    coarse, final, _ = recalls(head, data, asked, best_of_mean(data, k))
    return {
        "keys": data.name,
        "n": len(data.keys),
        "candidates": asked.candidates,
        "ratio": step / us["scan"],
        "ratio_top": step / us["scan_top"],
        "encode_ratio": head.encode_us / us["scan"],
        "us": {**us, "encode": head.encode_us},
        "coarse": coarse,
        "final": final,
    }


def sweep(data: Data, k: int, with_mass: bool) -> dict[str, Any]:
    """Recall for each beta and rho."""
    head, best = Head(data.keys), best_of_mean(data, k)
    points = []
    for tiers in (6, 1):
        for rho in RHOS:
            for beta in BETAS:
                coarse, final, found = recalls(head, data, quotas(len(data.keys), k, beta, rho, tiers), best)
                point = {"tiers": tiers, "rho": rho, "beta": beta, "coarse": coarse, "final": final}
                points.append({**point, "mass": _mass(data, found)} if with_mass else point)
    coarse, final, _ = recalls(head, data, quotas(len(data.keys), k), best)
    published = {"coarse": coarse, "final": final}
    return {"keys": data.name, "n": len(data.keys), "group": data.queries.shape[1], **published, "points": points}


def _mass(data: Data, found: Any) -> float:
    """Mean share of the query heads' attention over all keys that falls on the tokens found, [m, k]."""
    shares = []
    for group, tokens in zip(data.queries, found, strict=True):
        logits = group @ data.keys.T / np.sqrt(data.keys.shape[1])
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares.append((weight[:, tokens].sum(axis=1) / weight.sum(axis=1)).mean())
    return float(np.mean(shares))


def _made(kind: str, count: int, queries: int, dim: int) -> Data:
    keys, asked = KINDS[kind](np.random.default_rng(0), count, queries, dim)
    return Data(kind, keys.astype(np.float32), asked.astype(np.float32)[:, None])


def _captured(path: str, queries: int) -> list[Data]:
    """Every layer and KV head of a captured file, with the last queries of its group."""
    sets = []
    for trace in load(path):
        grouped = trace.queries.reshape(len(trace.keys), -1, *trace.queries.shape[1:])[:, :, -queries:]
        for head, (keys, own) in enumerate(zip(trace.keys, grouped, strict=True)):
            asked = np.ascontiguousarray(own.transpose(1, 0, 2))
            sets.append(Data(f"layer {trace.layer} head {head}", np.ascontiguousarray(keys), asked))
    return sets


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


def main() -> None:
    """Make or read the keys, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="synthetic keys")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, LONG, 4 * LONG], help="keys")
    parser.add_argument("--sweep-length", type=int, default=32768, help="keys of the sweep")
    parser.add_argument("--trace", help="captured keys for the sweep: an .npz of capture_trace.py")
    parser.add_argument("--dim", type=int, default=128, help="head dimension of synthetic keys")
    parser.add_argument("--queries", type=int, default=40, help="queries of each run; half as many in the sweep")
    parser.add_argument("--k", type=int, default=100, help="keys wanted")
    arguments = parser.parse_args()
    if min(arguments.lengths + [arguments.sweep_length]) <= arguments.k:
        parser.error(f"--lengths, --sweep-length: expected more keys than --k {arguments.k}")

    torch.set_num_threads(1)
    run(_made("isotropic", 1000, 2, arguments.dim), 10)  # compiles
    runs, sweeps = [], []
    for kind in arguments.kinds:
        for length in arguments.lengths:
            print(f"{kind}, {length} keys", file=sys.stderr)
            runs.append(run(_made(kind, length, arguments.queries, arguments.dim), arguments.k))
        print(f"{kind}, sweep", file=sys.stderr)
        made = _made(kind, arguments.sweep_length, arguments.queries // 2, arguments.dim)
        sweeps.append(sweep(made, arguments.k, False))
    for data in _captured(arguments.trace, arguments.queries) if arguments.trace else []:
        print(f"{data.name}, sweep", file=sys.stderr)
        sweeps.append(sweep(data, arguments.k, True))
    long = [one for one in runs if one["n"] >= LONG]
    print(
        json.dumps(
            {
                "k": arguments.k,
                "dim": arguments.dim,
                "max_ratio": max((one["ratio"] for one in long), default=None),
                "min_final": {
                    kind: min(one["final"] for one in long if one["keys"] == kind)
                    for kind in sorted({one["keys"] for one in long})
                },
                "bytes": _bytes(arguments.dim),
                "runs": runs,
                "sweep": sweeps,
            }
        )
    )


if __name__ == "__main__":
    main()
