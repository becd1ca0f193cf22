"""RACC's Table 5 again: build, search, memory and accuracy of faiss's Flat, IVFPQ and HNSW, as ratios to Flat.

The paper searches 100,000 GloVe vectors for their 100 nearest; here they are synthetic, of the same size, or captured
keys. Every arm holds the same vectors, answers the same single queries and runs on one thread. Times are CPU time,
which other work on the machine disturbs little; those of queries are medians, taken turn by turn. All arms search by
distance: synthetic vectors as they are, captured keys by inner product, through the vectors that
`methods/racc/index.py` augments.

Prints one JSON object as its last line; `runs` has an entry for each set of vectors:
  n, dim, k            vectors, their dimension, and how many are wanted
  flat                 build_s, search_ms of one query, mbytes
  arms                 for each setting of the paper (and `code`'s, of the published code): build, search, memory, each
                       over Flat's; accuracy, recall of the exact k in percent
  paper                the paper's own numbers as the same ratios
  orderings            of each column, the pairs of arms whose order here is not the paper's, as [arm, arm, here, paper]
  why                  what explains them
  hnsw_by_metric       captured keys: recall of a graph over augmented vectors, and over inner products themselves

IVFPQ's three numbers are read as lists, subspaces and probes; HNSW's as neighbours, efConstruction and efSearch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from capture_trace import load

from kvbench.config import bind_methods

bind_methods()

from methods.racc.index import augmented  # noqa: E402

Floats = np.ndarray[Any, np.dtype[np.float32]]

# Table 5: build s, search ms, MB, accuracy %
PAPER = {
    "Flat": (0.03, 0.577, 49.12, 100.0),
    "IVFPQ-1": (7.27, 0.018, 57.12, 81.93),
    "IVFPQ-2": (8.25, 0.025, 82.49, 83.89),
    "IVFPQ-3": (14.19, 0.016, 67.75, 81.92),
    "IVFPQ-4": (7.49, 0.020, 54.00, 82.63),
    "HNSW-1": (0.39, 0.068, 49.05, 81.65),
    "HNSW-2": (0.43, 0.038, 73.21, 82.69),
    "HNSW-3": (0.81, 0.038, 48.53, 81.57),
}
COLUMNS = ("build", "search", "memory", "accuracy")
IVFPQ = {
    "IVFPQ-1": (2048, 32, 16),
    "IVFPQ-2": (2048, 32, 32),
    "IVFPQ-3": (4096, 32, 16),
    "IVFPQ-4": (2048, 64, 16),
    "IVFPQ-code": (100, 8, 10),
}
HNSW = {
    "HNSW-1": (16, 200, 2000),
    "HNSW-2": (32, 200, 1500),
    "HNSW-3": (16, 200, 1500),
    "HNSW-code": (32, 200, 100),
}
# What explains each column's differences: facts of the indexes first, what the paper may have done as a guess.
WHY = {
    "memory": (
        "an IVFPQ index holds for each vector an id and a code of one byte a subspace, far below Flat; the paper's is "
        "larger than Flat, so it seems to count more than the index, such as the process. A graph holds the vectors "
        "and its edges, so it cannot be smaller than Flat, as the paper's HNSW-1 and HNSW-3 are"
    ),
    "build": (
        "CPU time of one thread: a graph inserts vectors one after the other with a beam of 200; the paper's 0.4 s for "
        "100,000 of them takes many threads, and its HNSW-1 and HNSW-3, which differ in efSearch alone and so are the "
        "same graph, take 0.39 and 0.81 s: its build times vary by a factor of two"
    ),
    "search": (
        "CPU time of one query on one thread: a graph that keeps 1,500 or 2,000 candidates evaluates several times as "
        "many vectors, at random places of memory, and Flat streams through all of them; the paper's HNSW-2, with "
        "more edges, is no slower than HNSW-3, so its times may be of batches on many threads. IVFPQ's settings "
        "lie near each other: a query pays for the distances to all lists first, and then for few codes"
    ),
    "accuracy": (
        "a beam of 1,500 for k=100 finds nearly all neighbours; the paper's 82 % is what a graph finds that is "
        "searched by another metric than the one it is judged by. What IVFPQ finds depends on how well codes part "
        "neighbours, so on the vectors"
    ),
}


@dataclass(frozen=True)
class Data:
    """Vectors [n, D] and queries [queries, D]; `keys` and `asked` are what they were before they were augmented."""

    name: str
    vectors: Floats
    queries: Floats
    keys: Floats | None = None
    asked: Floats | None = None


def glove_like(rng: np.random.Generator, count: int, queries: int, dim: int) -> Data:
    """Word vectors' shape: topics of very different size, variances that fall by direction, lengths that vary."""
    topics = 2000
    size = 1 / np.arange(1, topics + 1) ** 0.7
    spread = np.arange(1, dim + 1) ** -0.25
    centres = rng.standard_normal((topics, dim)) * spread
    topic = rng.choice(topics, count + queries, p=size / size.sum())
    length = np.exp(0.25 * rng.standard_normal((count + queries, 1)))
    vectors = length * (centres[topic] + 0.9 * spread * rng.standard_normal((count + queries, dim)))
    vectors = vectors.astype(np.float32)
    return Data("made", vectors[:count], vectors[count:])


def captured(path: str, queries: int) -> list[Data]:
    """A set for each layer of a trace: the keys of its first KV head, and its group's last queries."""
    sets = []
    for layer in load(path):
        group = len(layer.queries) // len(layer.keys)
        keys = np.ascontiguousarray(layer.keys[0])
        asked = layer.queries[:group].swapaxes(0, 1).reshape(-1, keys.shape[1])[-queries:]
        vectors = augmented(keys, float(np.square(keys).sum(axis=1).max()))
        wide = np.column_stack([asked, np.zeros((len(asked), 1), np.float32)])
        sets.append(Data(f"layer {layer.layer}", vectors, wide.astype(np.float32), keys, np.ascontiguousarray(asked)))
    return sets


def widened(vectors: Floats, subspaces: int) -> Floats:
    """With zeros up to a width that the subspaces divide."""
    return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % subspaces)))


@dataclass(frozen=True)
class Arm:
    """An index, the seconds it took to build, and how it is asked; arms that differ in that alone share the index."""

    index: Any
    build_s: float
    queries: Floats
    width: int = 0

    def search(self, query: int, k: int) -> Any:
        """Ids [k] of one query's nearest."""
        if hasattr(self.index, "nprobe"):
            self.index.nprobe = self.width
        elif hasattr(self.index, "hnsw"):
            self.index.hnsw.efSearch = self.width
        return self.index.search(self.queries[query : query + 1], k)[1][0]


def arm(name: str, data: Data, built: dict[Any, tuple[Any, float]]) -> Arm:
    """An arm by its name; `built` are the indexes there are."""
    *how, width = (*IVFPQ.get(name, ()), *HNSW.get(name, ())) or (name, 0)
    key = name in IVFPQ, *how
    if key not in built:
        built[key] = build(name, data)
    index, seconds = built[key]
    return Arm(index, seconds, widened(data.queries, how[1]) if name in IVFPQ else data.queries, width)


def build(name: str, data: Data) -> tuple[Any, float]:
    """The index of an arm, and the seconds it took; a set too small for its lists has fewer of them."""
    vectors = data.vectors
    if name in IVFPQ:
        lists, subspaces, _ = IVFPQ[name]
        vectors = widened(vectors, subspaces)
        width = vectors.shape[1]
        lists = min(lists, max(1, len(vectors) // 39))
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, subspaces, 8)
        # 40 vectors a list, as 39 is the least faiss asks for, and ten rounds of k-means in place of 25
        index.cp.max_points_per_centroid, index.cp.niter = 40, 10
        index.pq.cp.niter = 10
    elif name in HNSW:
        neighbours, construction, _ = HNSW[name]
        index = faiss.IndexHNSWFlat(vectors.shape[1], neighbours)
        index.hnsw.efConstruction = construction
    else:
        index = faiss.IndexFlatL2(vectors.shape[1])
    start = time.process_time()
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    return index, time.process_time() - start


def bench(data: Data, k: int, names: list[str]) -> dict[str, Any]:
    """All arms on one set."""
    arms: dict[str, Arm] = {}
    built: dict[Any, tuple[Any, float]] = {}
    for name in names:
        arms[name] = arm(name, data, built)
        print(f"{data.name}: {name} built in {arms[name].build_s:.1f} s", file=sys.stderr)
    found: dict[str, list[Any]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for query in range(len(data.queries)):
        for name, one in arms.items():
            start = time.process_time()
            found[name].append(one.search(query, k))
            seconds[name].append(time.process_time() - start)
    rows = {
        name: (
            one.build_s,
            1e3 * statistics.median(seconds[name]),
            faiss.serialize_index(one.index).nbytes / 1e6,
            100 * float(np.mean([np.isin(*both).mean() for both in zip(found["Flat"], found[name], strict=True)])),
        )
        for name, one in arms.items()
    }
    ratios, paper = over_flat(rows), over_flat(PAPER)
    result = {
        "vectors": data.name,
        "n": len(data.vectors),
        "dim": data.vectors.shape[1],
        "k": k,
        "flat": dict(zip(("build_s", "search_ms", "mbytes"), rows["Flat"][:3], strict=True)),
        "arms": ratios,
        "paper": {name: paper[name] for name in ratios if name in paper},
        "orderings": (differing := orderings(ratios, paper)),
        "why": {column: WHY[column] for column in differing},
    }
    if data.keys is not None and data.asked is not None:
        result["hnsw_by_metric"] = by_metric(data, k)
    return result


def over_flat(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Rows as ratios to Flat's; accuracy as it is."""
    flat = rows["Flat"]
    return {
        name: {
            column: value if column == "accuracy" else value / base
            for column, value, base in zip(COLUMNS, row, flat, strict=True)
        }
        for name, row in rows.items()
        if name != "Flat"
    }


def orderings(ours: dict[str, Any], paper: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Pairs of the paper's arms that a column orders the other way; Flat, at 1 (100 %), is one of them.

    What differs by less than 5 % on either side has no order.
    """
    found: dict[str, list[list[Any]]] = {}
    for column in COLUMNS:
        base = 100.0 if column == "accuracy" else 1.0
        here = {"Flat": base} | {name: ours[name][column] for name in ours if name in paper}
        there = {"Flat": base} | {name: paper[name][column] for name in here if name != "Flat"}
        for one, other in itertools.combinations(here, 2):
            signs = [_order(values[one], values[other]) for values in (here, there)]
            if set(signs) == {"<", ">"}:
                found.setdefault(column, []).append([one, other, *signs])
    return found


def _order(one: float, other: float) -> str:
    if min(one, other) > 0.95 * max(one, other):
        return "="
    return "<" if one < other else ">"


def by_metric(data: Data, k: int) -> dict[str, float]:
    """Recall in percent of a graph as the code sets it: by distances of augmented vectors, and by inner products."""
    assert data.keys is not None and data.asked is not None
    exact = np.argsort(-data.asked @ data.keys.T, axis=1)[:, :k]
    neighbours, construction, search = HNSW["HNSW-code"]
    recall = {}
    for name, metric, vectors, queries in (
        ("augmented", faiss.METRIC_L2, data.vectors, data.queries),
        ("inner_product", faiss.METRIC_INNER_PRODUCT, data.keys, data.asked),
    ):
        index = faiss.IndexHNSWFlat(vectors.shape[1], neighbours, metric)
        index.hnsw.efConstruction, index.hnsw.efSearch = construction, search
        index.add(vectors)
        found = index.search(queries, k)[1]
        recall[name] = 100 * float(np.mean([np.isin(one, own).mean() for one, own in zip(exact, found, strict=True)]))
    return recall


def _rounded(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _rounded(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [_rounded(value) for value in thing]
    return float(f"{thing:.4g}") if isinstance(thing, float) else thing


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000, help="synthetic vectors; 0: none")
    parser.add_argument("--dim", type=int, default=128, help="their dimension")
    parser.add_argument("--queries", type=int, default=100, help="of each set")
    parser.add_argument("--k", type=int, default=100, help="vectors wanted")
    parser.add_argument("--trace", help="captured keys, an .npz of scripts/capture_trace.py")
    every = ["Flat", *IVFPQ, *HNSW]
    parser.add_argument("--arms", nargs="+", choices=every[1:], default=every[1:], help="beside Flat")
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(1)
    names = ["Flat", *arguments.arms]
    sets = captured(arguments.trace, arguments.queries) if arguments.trace else []
    if arguments.n:
        sets.append(glove_like(np.random.default_rng(0), arguments.n, arguments.queries, arguments.dim))
    print(json.dumps(_rounded({"runs": [bench(data, min(arguments.k, len(data.vectors)), names) for data in sets]})))


if __name__ == "__main__":
    main()
