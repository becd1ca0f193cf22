"""What IceCache's index finds and costs, beside scanning every key and beside faiss, one thread.

Every arm holds the same keys and answers the same queries, in groups as a KV head's query heads ask
them; faiss gets a whole group in one call. Times are CPU time, which other work on the machine
disturbs little; those of queries are medians, taken turn by turn.

Prints one JSON object as its last line; `runs` has an entry for each kind of keys and each n:
  arms       dci (the authors' layout, nodes ranked by their own key), dci_plus (more nodes,
             greedy pages, nodes ranked by the mean of their children), faiss_hnsw (M=32,
             efConstruction=200), faiss_ivf (4 sqrt(n) lists):
    build_s            seconds to index n keys
    insert_us          microseconds per token, inserted 16 at a time (dci, dci_plus)
    bytes_per_token    memory of the index beside the keys (dci, dci_plus)
  groups     for 1 and for --group queries asked together:
    flat_us, exact_us  one group's top k by faiss.IndexFlatIP, and by scoring every key in page
                       order (ExactScan)
    stream_us          one pass over all keys for their maximum: what reading them costs
    points             for each arm, and for dci and dci_plus with either ranking, one for each
                       beam width (efSearch, nprobe): recall of the top k; mass, the share of the
                       softmax in what was found; query_us of a group; ranked (nodes scored) and
                       evaluated (keys scored) over n; floor_us, the time to read these at the
                       pace of stream_us
    recall_at_15, recall_at_15_centroid    best recall of dci_plus's tree with at most 15 %
                                           evaluated, by both rankings
    query_speedup      flat_us over the fastest point of dci_plus with recall >= 0.9
    insert_over_query  insertion per token over that fastest query
  build_speedup        build of faiss_hnsw over that of dci_plus
  pages      recall of the top 16 * --pages tokens, mass, and tokens inside --pages pages of 16,
             for each query on its own: pages that dci and dci_plus find, pages of consecutive
             tokens that Quest's bound finds (quest), and of each the pages with the most mass
             (oracle)

Keys: isotropic normal; clustered, 200 normal centres and deviations of 0.4; attention, variances
that fall as j^-0.8 over a mean as long as the deviations, which lognormal lengths (0.3) stretch;
captured ones from --trace, an .npz of `scripts/capture_trace.py`: every layer and KV head in it,
asked with its last queries.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import faiss
import numpy as np
from bench import command_line, median_us, print_result
from capture_trace import load

from methods.icecache.index import DCITree, ExactScan, Layout, Search, Workspace

Floats = np.ndarray[Any, np.dtype[np.float32]]

# beam widths, as shares of the nodes
SHARES = (0.01, 0.02, 0.04, 0.06, 0.09, 0.12, 0.15, 0.18, 0.22, 0.3)
LAYOUTS = {"dci": Layout(), "dci_plus": Layout(promotion=(1 / 32, 0.2), split="greedy")}
PRESETS = {
    "icecache": Layout(),
    "icecache_code": Layout(
        levels="counter_ceil",
        parents="anchored",
        remainder="last",
        projections=(1, 1),
        exhaustive_below=3000,
    ),
}
RANK_BY = {"dci": "point", "dci_plus": "centroid"}
PAGE = 16
INSERTED = 1024


@dataclass(frozen=True)
class KeySet:
    """Keys [n + INSERTED, D], the last ones for insertion, and queries [groups, G, D]."""

    name: str
    keys: Floats
    queries: Floats

    @property
    def count(self) -> int:
        return len(self.keys) - INSERTED

    def report(self, k: int, pages: int, group_sizes: list[int]) -> dict[str, Any]:
        """All arms on one set of keys."""
        work = Workspace()
        trees = {name: self.tree(layout, work) for name, layout in LAYOUTS.items()}
        arms, built = self.arms(trees, k, work)
        flat = faiss.IndexFlatIP(self.keys.shape[1])
        flat.add(self.keys[: self.count])
        scan = _arranged(ExactScan(self.keys, self.count, Layout(), 0, work), self)
        whole: dict[str, Callable[[Floats], Any]] = {
            "flat_us": lambda group: flat.search(group, k),
            "exact_us": lambda group: scan.best_tokens(group, k, Search(), work),
            "stream_us": lambda _: self.keys[: self.count].max(),
        }
        groups = [
            replace(self, queries=self.queries[:, :size]).answers(k, arms, whole)
            for size in group_sizes
        ]
        for of_size in groups:
            good = [
                at["query_us"]
                for at in of_size["points"]["dci_plus centroid"]
                if at["recall"] >= 0.9
            ]
            if good:
                of_size["query_speedup"] = of_size["flat_us"] / min(good)
                of_size["insert_over_query"] = built["dci_plus"]["insert_us"] / min(good)
        return {
            "keys": self.name,
            "n": self.count,
            "arms": built,
            "groups": groups,
            "build_speedup": built["faiss_hnsw"]["build_s"] / built["dci_plus"]["build_s"],
            "pages": self.page_quality(
                {name: tree for name, (tree, _) in trees.items()}, pages, work
            ),
            "presets": self.presets(pages, work),
        }

    def arms(
        self, trees: dict[str, tuple[DCITree, float]], k: int, work: Workspace
    ) -> tuple[dict[str, SearchArm], dict[str, dict[str, float]]]:
        """All arms, and what building each took."""
        arms, built = dict[str, SearchArm](), dict[str, dict[str, float]]()
        for name, (tree, seconds) in trees.items():
            for rank_by in ("point", "centroid"):
                arms[f"{name} {rank_by}"] = _dci_arm(tree, rank_by, k, work)
            built[name] = {
                "build_s": seconds,
                "bytes_per_token": tree.nbytes / self.count,
                "insert_us": self.insert_us(LAYOUTS[name], work),
            }
        for name, make in (("faiss_hnsw", _hnsw), ("faiss_ivf", _ivf)):
            start = time.process_time()
            arms[name] = make(self.keys[: self.count], k)
            built[name] = {"build_s": time.process_time() - start}
        return arms, built

    def answers(
        self, k: int, arms: dict[str, SearchArm], whole: dict[str, Callable[[Floats], Any]]
    ) -> dict[str, Any]:
        """Quality and time of every arm at every width, for groups of one size."""
        queries = np.ascontiguousarray(self.queries)
        truth = Truth.of(self, k)
        calls: dict[Any, Callable[[Floats], Any]] = dict(whole)
        points: dict[str, list[dict[str, Any]]] = {}
        for name, (ask, widths) in arms.items():
            points[name] = []
            for width in widths:
                calls[name, width] = partial(ask, width=width)
                replies = [ask(group, width=width) for group in queries]
                point = {"width": width, **truth.quality([reply[0] for reply in replies])}
                if name.startswith("dci"):
                    point["ranked"] = np.mean([reply[1] for reply in replies]) / self.count
                    point["evaluated"] = np.mean([reply[2] for reply in replies]) / self.count
                points[name].append(point)
        micros = median_us(calls, queries)
        for name, some in points.items():
            for point in some:
                point["query_us"] = micros[name, point["width"]]
                if "evaluated" in point:
                    # ranked by point, what was ranked is among what was evaluated
                    read = point["evaluated"] + (
                        point["ranked"] if name.endswith("centroid") else 0
                    )
                    point["floor_us"] = read * micros["stream_us"]

        def recall_at_15(name: str) -> float:
            return max(
                (at["recall"] for at in points[name] if at["evaluated"] <= 0.15), default=0.0
            )

        return {
            "group": self.queries.shape[1],
            **{name: micros[name] for name in whole},
            "points": points,
            "recall_at_15": recall_at_15("dci_plus point"),
            "recall_at_15_centroid": recall_at_15("dci_plus centroid"),
        }

    def tree(self, layout: Layout, work: Workspace) -> tuple[DCITree, float]:
        """A tree over the keys, and the CPU seconds that it took to build."""
        start = time.process_time()
        tree = DCITree(self.keys, self.count, layout, 0, work)
        seconds = time.process_time() - start
        return _arranged(tree, self), seconds

    def insert_us(self, layout: Layout, work: Workspace) -> float:
        tree = DCITree(self.keys, self.count, layout, 0, work)
        start = time.process_time()
        for _ in range(INSERTED // PAGE):
            tree.insert(PAGE, work)
        return 1e6 * (time.process_time() - start) / INSERTED

    def page_quality(
        self, trees: dict[str, DCITree], page_count: int, work: Workspace
    ) -> dict[str, dict[str, float]]:
        """What `page_count` pages hold for each query on its own."""
        truth = Truth.of(self, page_count * PAGE)
        chosen: dict[str, list[Any]] = {}
        for name, tree in trees.items():
            pages = tree.tokens(np.arange(tree.pages, dtype=np.int32))
            search = Search(fov=max(page_count, int(0.12 * tree.nodes)), rank_by=RANK_BY[name])  # type: ignore[arg-type]
            chosen[name] = [
                tree.tokens(tree.best_pages(group, page_count, search, work).ids)
                for group in self.queries
            ]
            chosen[f"{name}_oracle"] = truth.oracle(pages, page_count)
        consecutive = np.arange(self.count // PAGE * PAGE).reshape(-1, PAGE)
        keys = self.keys[consecutive]
        bounds = [_quest_bound(group, keys.min(axis=1), keys.max(axis=1)) for group in self.queries]
        chosen["quest"] = [_largest(consecutive, bound, page_count) for bound in bounds]
        chosen["quest_oracle"] = truth.oracle(consecutive, page_count)
        result = {}
        for name, tokens in chosen.items():
            flat = [of_group.reshape(len(of_group), -1) for of_group in tokens]
            count = float(np.mean([(row >= 0).sum(axis=1) for row in flat]))
            result[name] = {**truth.quality(flat), "tokens": count}
        return result

    def presets(self, page_count: int, work: Workspace) -> dict[str, dict[str, float]]:
        """What `page_count` pages hold as presets build and search the tree; what that takes."""
        truth = Truth.of(self, page_count * PAGE)
        search = Search(max(30, self.count // 1000), prop_to_retrieve=0.8)
        result = {}
        for name, layout in PRESETS.items():
            DCITree(self.keys, self.count, layout, 0, work)
            start = time.process_time()
            tree = DCITree(self.keys, self.count, layout, 0, work)
            seconds = time.process_time() - start
            answers = [tree.best_pages(group, page_count, search, work) for group in self.queries]
            quality = truth.quality(
                [tree.tokens(answer.ids).reshape(len(answer.ids), -1) for answer in answers]
            )
            scored = float(np.mean([answer.evaluated for answer in answers]))
            result[name] = {**quality, "build_s": seconds, "scored_for_a_group": scored}
        return result


def isotropic(rng: np.random.Generator, count: int, queries: int, dim: int) -> tuple[Any, Any]:
    """Keys and queries without any structure: the case no index helps."""
    return rng.standard_normal((count, dim)), rng.standard_normal((queries, dim))


def clustered(rng: np.random.Generator, count: int, queries: int, dim: int) -> tuple[Any, Any]:
    """Keys around 200 centres, queries around the same."""
    centres = rng.standard_normal((200, dim))
    return tuple(
        centres[rng.integers(0, 200, size)] + 0.4 * rng.standard_normal((size, dim))
        for size in (count, queries)
    )  # type: ignore[return-value]


def attention(rng: np.random.Generator, count: int, queries: int, dim: int) -> tuple[Any, Any]:
    """Anisotropic keys with a mean and heavy norms, as post-RoPE keys are."""
    deviation = np.arange(1, dim + 1) ** -0.4
    deviation = rng.permutation(deviation * np.sqrt(dim / np.sum(deviation**2)))
    mean = rng.standard_normal(dim)
    mean *= np.sqrt(dim) / np.linalg.norm(mean)
    stretch = np.exp(0.3 * rng.standard_normal((count, 1)))
    keys = mean + stretch * deviation * rng.standard_normal((count, dim))
    return keys, 0.5 * rng.standard_normal(dim) + deviation * rng.standard_normal((queries, dim))


KINDS = {"isotropic": isotropic, "clustered": clustered, "attention": attention}


@dataclass(frozen=True)
class Truth:
    """For every query the top k tokens [groups, G, k], and the softmax over keys [groups, G, n]."""

    top: Any
    softmax: Any

    @classmethod
    def of(cls, data: KeySet, k: int) -> Truth:
        logits = data.queries @ data.keys[: data.count].T
        top = np.argpartition(-logits, k, axis=2)[:, :, :k]
        weight = np.exp((logits - logits.max(axis=2, keepdims=True)) / np.sqrt(data.keys.shape[1]))
        return cls(top, weight / weight.sum(axis=2, keepdims=True))

    def quality(self, ids: list[Any]) -> dict[str, float]:
        """Mean recall and mass of answers [G, k] for each group."""
        recall, mass = [], []
        for group, rows in enumerate(ids):
            for query, row in enumerate(rows):
                row = row[row >= 0]
                recall.append(np.isin(self.top[group, query], row).mean())
                mass.append(self.softmax[group, query, row].sum())
        return {"recall": float(np.mean(recall)), "mass": float(np.mean(mass))}

    def oracle(self, pages: Any, page_count: int) -> list[Any]:
        """Tokens [G, page_count, PAGE] of the pages with the most mass, for every group."""
        return [
            _largest(pages, np.where(pages >= 0, softmax[:, pages], 0).sum(axis=2), page_count)
            for softmax in self.softmax
        ]


# An index: `ask(group, width=...)` gives ids [G, k] and what was ranked and evaluated; and the
# widths to ask with.
SearchArm = tuple[Callable[..., tuple[Any, int, int]], list[int]]


def _arranged(tree: Any, data: KeySet) -> Any:
    """The tree over a copy of its keys in page order, as the store lays them out."""
    order = tree.arrange()
    tree.bind(np.concatenate([data.keys[order], data.keys[len(order) :]]))
    return tree


def _dci_arm(tree: DCITree, rank_by: Any, k: int, work: Workspace) -> SearchArm:
    def ask(group: Floats, width: int) -> tuple[Any, int, int]:
        answer = tree.best_tokens(group, k, Search(fov=width, rank_by=rank_by), work)
        return answer.ids, answer.ranked, answer.evaluated

    return ask, _widths(tree.nodes)


def _hnsw(keys: Floats, k: int) -> SearchArm:
    index = faiss.IndexHNSWFlat(keys.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    index.add(keys)
    return partial(_ask_faiss, index, k, index.hnsw, "efSearch"), [k, 2 * k, 4 * k, 8 * k]


def _ivf(keys: Floats, k: int) -> SearchArm:
    lists = int(4 * np.sqrt(len(keys)))
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(keys.shape[1]), keys.shape[1], lists, faiss.METRIC_INNER_PRODUCT
    )
    index.train(keys)
    index.add(keys)
    return partial(_ask_faiss, index, k, index, "nprobe"), _widths(lists)


def _ask_faiss(
    index: Any, k: int, holder: Any, option: str, group: Floats, width: int
) -> tuple[Any, int, int]:
    setattr(holder, option, width)
    return index.search(group, k)[1], 0, 0


def _widths(cells: int) -> list[int]:
    return sorted({max(1, int(share * cells)) for share in SHARES})


def _quest_bound(queries: Any, low: Any, high: Any) -> Any:
    """Largest possible q.k [G, pages] of pages with keys between `low` and `high` [pages, D]."""
    return np.maximum(queries, 0) @ high.T + np.minimum(queries, 0) @ low.T


def _largest(pages: Any, score: Any, page_count: int) -> Any:
    """Tokens [G, page_count, PAGE] of the pages with the largest score [G, pages]."""
    return pages[np.argpartition(-score, page_count, axis=1)[:, :page_count]]


def _synthetic(kind: str, count: int, arguments: argparse.Namespace) -> KeySet:
    rng = np.random.default_rng(0)
    query_count = arguments.groups * arguments.group
    keys, queries = KINDS[kind](rng, count + INSERTED, query_count, arguments.dim)
    queries = queries.reshape(arguments.groups, arguments.group, arguments.dim)
    return KeySet(kind, keys.astype(np.float32), queries.astype(np.float32))


def _captured(path: str, groups: int) -> list[KeySet]:
    """A set for each layer and KV head of a trace.

    Its last queries ask for what came before the inserted tokens.
    """
    sets = []
    for trace in load(path):
        heads, dim = len(trace.keys), trace.keys.shape[2]
        queries = trace.queries[:, -groups:].reshape(
            heads, -1, min(groups, trace.queries.shape[1]), dim
        )
        for head in range(heads):
            name = f"layer {trace.layer}, KV head {head} of {path}"
            sets.append(
                KeySet(name, trace.keys[head], np.ascontiguousarray(queries[head].swapaxes(0, 1)))
            )
            if sets[-1].count < INSERTED:
                raise SystemExit(
                    f"--trace {path}: {len(trace.keys[head])} tokens, expected {2 * INSERTED} or"
                    " more"
                )
    return sets


def main() -> None:
    """Make or read the keys, measure, print."""
    parser = command_line(
        __doc__,
        lengths=([4096, 36000, 131072], "keys"),
        trace=(None, "captured keys, an .npz of scripts/capture_trace.py"),
        dim=(128, "head dimension of synthetic keys"),
        group=(4, "queries that are asked together"),
        groups=(40, "groups of queries"),
        k=(100, "keys wanted"),
        pages=(12, "pages wanted, for the quality of pages"),
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="synthetic keys"
    )
    arguments = parser.parse_args()

    warm = replace(_synthetic("attention", 2048, arguments), name="warm")
    for layout in LAYOUTS.values():
        warm.tree(layout, Workspace())[0].best_tokens(warm.queries[0], 10, Search(), Workspace())
    warm.insert_us(Layout(), Workspace())

    sets = _captured(arguments.trace, arguments.groups) if arguments.trace else []
    sets += [
        _synthetic(kind, length, arguments)
        for kind in arguments.kinds
        for length in arguments.lengths
    ]
    faiss.omp_set_num_threads(1)
    sizes = sorted({1, arguments.group})
    runs = [data.report(arguments.k, arguments.pages, sizes) for data in sets]
    print_result({"k": arguments.k, "dim": arguments.dim, "runs": runs})


if __name__ == "__main__":
    main()
