"""RACC's Table 5: build, search, memory, accuracy of faiss's IVFPQ and HNSW, over Flat's.

The paper searches 100,000 GloVe vectors for their 100 nearest; here they are synthetic, of the same
size. Every arm holds the same vectors, answers the same single queries by distance and runs on one
thread. Times are CPU time; those of queries are medians, taken turn by turn.

Prints one JSON object as its last line, with one entry in `runs`:
  n, dim, k            vectors, their dimension, and how many are wanted
  flat                 build_s, search_ms of one query, mbytes
  arms                 for each setting of the paper (and `code`'s, of the published code): build,
                       search, memory, each over Flat's; accuracy, recall of the exact k in
                       percent
  paper                the paper's own numbers as the same ratios
  orderings            of each column, the pairs of arms whose order here is not the paper's, as
                       [arm, arm, here, paper]

IVFPQ's three numbers are read as lists, subspaces and probes; HNSW's as neighbours, efConstruction
and efSearch.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np
from bench import command_line, median_us, print_result, say

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


def glove_like(rng: np.random.Generator, count: int, dim: int) -> Floats:
    """Vectors as of words: topics of very different size, directions and lengths that vary."""
    topics = 2000
    size = 1 / np.arange(1, topics + 1) ** 0.7
    spread = np.arange(1, dim + 1) ** -0.25
    centres = rng.standard_normal((topics, dim)) * spread
    topic = rng.choice(topics, count, p=size / size.sum())
    length = np.exp(0.25 * rng.standard_normal((count, 1)))
    vectors = length * (centres[topic] + 0.9 * spread * rng.standard_normal((count, dim)))
    return vectors.astype(np.float32)


def widened(vectors: Floats, subspaces: int) -> Floats:
    """With zeros up to a width that the subspaces divide."""
    return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % subspaces)))


@dataclass(frozen=True)
class IndexArm:
    """An index, the seconds it took to build, and how it is asked.

    Arms that differ in that alone share the index.
    """

    index: Any
    build_s: float
    queries: Floats
    width: int = 0

    def search(self, k: int, query: int) -> Any:
        """Ids [k] of one query's nearest."""
        if hasattr(self.index, "nprobe"):
            self.index.nprobe = self.width
        elif hasattr(self.index, "hnsw"):
            self.index.hnsw.efSearch = self.width
        return self.index.search(self.queries[query : query + 1], k)[1][0]


def arm(
    name: str, vectors: Floats, queries: Floats, built: dict[Any, tuple[Any, float]]
) -> IndexArm:
    """An arm by its name; `built` are the indexes there are."""
    *how, width = (*IVFPQ.get(name, ()), *HNSW.get(name, ())) or (name, 0)
    key = name in IVFPQ, *how
    if key not in built:
        built[key] = build(name, vectors)
    index, seconds = built[key]
    say(f"{name} built in {seconds:.1f} s")
    return IndexArm(index, seconds, widened(queries, how[1]) if name in IVFPQ else queries, width)


def build(name: str, vectors: Floats) -> tuple[Any, float]:
    """The index of an arm, and the seconds it took.

    A set too small for its lists has fewer of them.
    """
    if name in IVFPQ:
        lists, subspaces = IVFPQ[name][:2]
        vectors = widened(vectors, subspaces)
        width = vectors.shape[1]
        lists = min(lists, max(1, len(vectors) // 39))
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, subspaces, 8)
        # 40 vectors a list, as 39 is the least faiss asks for, and ten rounds of k-means in place
        # of 25
        index.cp.max_points_per_centroid, index.cp.niter = 40, 10
        index.pq.cp.niter = 10
    elif name in HNSW:
        neighbours, construction = HNSW[name][:2]
        index = faiss.IndexHNSWFlat(vectors.shape[1], neighbours)
        index.hnsw.efConstruction = construction
    else:
        index = faiss.IndexFlatL2(vectors.shape[1])
    start = time.process_time()
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    return index, time.process_time() - start


def bench(vectors: Floats, queries: Floats, k: int, names: list[str]) -> dict[str, Any]:
    """All arms on one set."""
    built: dict[Any, tuple[Any, float]] = {}
    arms = {name: arm(name, vectors, queries, built) for name in names}
    query_ids = range(len(queries))
    calls = {name: partial(built_arm.search, k) for name, built_arm in arms.items()}
    us = median_us(calls, query_ids)
    nearest = {name: [call(query) for query in query_ids] for name, call in calls.items()}
    rows = {}
    for name, built_arm in arms.items():
        megabytes = faiss.serialize_index(built_arm.index).nbytes / 1e6
        recalls = [
            np.isin(*both).mean() for both in zip(nearest["Flat"], nearest[name], strict=True)
        ]
        accuracy = 100 * float(np.mean(recalls))
        rows[name] = (built_arm.build_s, us[name] / 1e3, megabytes, accuracy)
    ratios, paper = over_flat(rows), over_flat(PAPER)
    return {
        "vectors": "made",
        "n": len(vectors),
        "dim": vectors.shape[1],
        "k": k,
        "flat": dict(zip(("build_s", "search_ms", "mbytes"), rows["Flat"][:3], strict=True)),
        "arms": ratios,
        "paper": {name: paper[name] for name in ratios if name in paper},
        "orderings": orderings(ratios, paper),
    }


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
    """Pairs of the paper's arms that a column orders the other way.

    Flat, at 1 (100 %), is one of them.

    What differs by less than 5 % on either side has no order.
    """
    differing: dict[str, list[list[Any]]] = {}
    for column in COLUMNS:
        base = 100.0 if column == "accuracy" else 1.0
        here = {"Flat": base} | {name: ours[name][column] for name in ours if name in paper}
        there = {"Flat": base} | {name: paper[name][column] for name in here if name != "Flat"}
        for first, other in itertools.combinations(here, 2):
            signs = [_order(values[first], values[other]) for values in (here, there)]
            if set(signs) == {"<", ">"}:
                differing.setdefault(column, []).append([first, other, *signs])
    return differing


def _order(first: float, other: float) -> str:
    if min(first, other) > 0.95 * max(first, other):
        return "="
    return "<" if first < other else ">"


def main() -> None:
    """Measure, and print."""
    every = [*IVFPQ, *HNSW]
    parser = command_line(
        __doc__,
        n=(100_000, "synthetic vectors"),
        dim=(128, "their dimension"),
        queries=(100, "asked one by one"),
        k=(100, "vectors wanted"),
        arms=(every, "beside Flat", every),
    )
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    points = glove_like(np.random.default_rng(0), options.n + options.queries, options.dim)
    vectors, queries = points[: options.n], points[options.n :]
    print_result(
        {"runs": [bench(vectors, queries, min(options.k, options.n), ["Flat", *options.arms])]}
    )


if __name__ == "__main__":
    main()
