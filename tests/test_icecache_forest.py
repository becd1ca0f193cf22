"""All trees of a layer, asked and added to at once: as each of them alone, whatever the threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from trees import D, bfloat16

from methods.icecache import forest as forest_module
from methods.icecache.forest import Forest
from methods.icecache.index import DCITree, ExactScan
from methods.icecache.kernels import KERNELS, Tree
from methods.icecache.settings import Layout, Search
from methods.icecache.tree import Workspace

GROUP, SINKS = 3, 4
POOL = ThreadPoolExecutor(4)
SMALL: dict[str, Any] = {"page_size": 4, "promotion": (0.15, 0.3)}


@pytest.mark.parametrize("head_dim", [3, 8, 20, 64])
@pytest.mark.parametrize("stored", [np.float32, np.uint16])
def test_products_of_any_group_and_width_are_those_of_a_matrix_product(head_dim: int, stored: Any) -> None:
    rng = np.random.default_rng(head_dim)
    keys, rows = rng.standard_normal((37, head_dim)).astype(np.float32), rng.permutation(37).astype(np.int32)
    bits, cut = bfloat16(keys)
    keys = cut if stored is np.uint16 else keys
    tree = Tree(bits if stored is np.uint16 else keys, *[np.zeros(0)] * 14)
    for group in range(1, 10):
        queries, out = rng.standard_normal((group, head_dim)).astype(np.float32), np.empty((group, 40), np.float32)
        padded = np.append(rows, [0] * 3).astype(np.int32)
        KERNELS.products_of(tree.line, padded, 37, queries, out)
        np.testing.assert_allclose(out[:, :37], queries @ keys[rows].T, atol=1e-4)


def planted(counts: list[list[int]], layout: Layout, kind: type[DCITree] = DCITree) -> list[list[DCITree]]:
    """Trees over the first so many of 600 keys, of each row and KV head."""
    return [
        [kind(keys_of(row, head), count, layout, seed=row + head) for head, count in enumerate(heads)]
        for row, heads in enumerate(counts)
    ]


def keys_of(row: int, head: int) -> np.ndarray:
    return np.random.default_rng((row, head)).standard_normal((600, D)).astype(np.float32)


def queries_of(batch: int, heads: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((batch, heads, GROUP, D)).astype(np.float32)


def plainly(tree: DCITree, queries: np.ndarray, length: int, budget: int, window: int, slots: int) -> list[int]:
    """Window, sinks, and the members of the best pages by turns, for an index that looks into everything."""
    fixed = [*range(length - 1, window - 1, -1), *range(SINKS)]
    pages = [[SINKS + token for token in page if token >= 0] for page in tree.tokens(np.arange(tree.pages)).tolist()]
    scores = [[max((query @ tree.arrays.keys[token - SINKS] for token in page), default=-np.inf) for page in pages]
              for query in queries]  # fmt: skip
    ranked = [sorted(range(len(pages)), key=lambda page, of=of: -of[page]) for of in scores]
    joined = list(dict.fromkeys(page for rank in zip(*ranked, strict=True) for page in rank if pages[page]))
    return (fixed + [token for page in joined[:slots] for token in pages[page]])[:budget]


@pytest.mark.parametrize("kind", [DCITree, ExactScan])
def test_each_head_attends_what_a_plain_reading_of_its_tree_says(kind: type[DCITree]) -> None:
    """Rows of different lengths, one of them within its budget."""
    layout = Layout(**SMALL)
    trees = planted([[300, 300], [40, 40], [8, 8]], layout, kind)
    lengths, budget, slots = [310, 50, 18], 40, 5
    regions = np.array([(budget, SINKS, length - 6, length, slots) for length in lengths])
    queries = queries_of(3, 2)
    index, read = Forest(trees, POOL, [Workspace()]).attend(queries, regions, Search(fov=10**6), budget)
    for row, length in enumerate(lengths):
        for head, tree in enumerate(trees[row]):
            got = [token for token in index[row, head].tolist() if token >= 0]
            if length <= budget:
                assert got == list(range(length))[::-1]
            else:
                assert got == plainly(tree, queries[row, head], length, budget, length - 6, slots)
    assert read == 2 * (300 + 40)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORTH_A_THREAD", "WORTH_A_TEAM"):
        monkeypatch.setattr(forest_module, name, 1)
    layout, found = Layout(**SMALL), []
    for threads in (1, 2, 3, 8):
        trees = planted([[200] * 3, [150] * 3], layout)
        forest = Forest(trees, POOL, [Workspace() for _ in range(threads)])
        for _ in range(5):
            forest.insert([16, 3])
            length = len(trees[0][0])
            regions = np.array([(40, 0, length, length, 8), (40, 0, length, length, 8)])
            index, _ = forest.attend(queries_of(2, 3), regions, Search(fov=4, fov_share=0), 40)
        found.append(index)
    assert all((index == found[0]).all() for index in found)


@pytest.mark.parametrize("options", [{}, {"split": "greedy"}, {"levels": "random"}, {"reparent": False}], ids=str)
def test_trees_of_a_forest_grow_as_each_does_alone(options: dict[str, Any]) -> None:
    """From nothing, through promotions and arrays that are full."""
    layout = Layout(**SMALL, **options)
    together, alone = planted([[0, 90], [20, 0]], layout), planted([[0, 90], [20, 0]], layout)
    forest, work = Forest(together, POOL, [Workspace(), Workspace()]), Workspace()
    for count in [1, 16, 4, 16, 16, 7, 16, 16, 16, 16]:
        forest.insert([count, 16])
        for row, more in enumerate((count, 16)):
            for one, other in zip(together[row], alone[row], strict=True):
                other.insert(more, work)
                points, nodes, pages = len(one), one.nodes, one.pages
                assert (points, nodes, pages) == (len(other), other.nodes, other.pages)
                for name, size in (("point", points), ("slots", pages), ("page", pages), ("node", nodes)):
                    assert (getattr(one.arrays, name)[:size] == getattr(other.arrays, name)[:size]).all()
                assert (one.arrays.state == other.arrays.state).all()
