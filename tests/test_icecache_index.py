"""The DCI tree of IceCache: structure, parents, search, insertion and pages, against what the formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import CLOSE, D, bfloat16, check_parents, check_structure, levels, own_node, parent_tokens

from methods.icecache.index import DCITree, ExactScan, Layout, Search, Workspace
from methods.icecache.kernels import KERNELS, NONE, ROOT, TOP

# Small pages and large promoted shares: a hundred keys make three or four levels and many pages.
SMALL = Layout(page_size=4, promotion=(0.15, 0.3))
EVERYTHING = Search(fov=10**6)

quick = settings(max_examples=25)
seeds = st.integers(0, 10**6)
layouts = st.builds(
    Layout,
    page_size=st.sampled_from([2, 4, 16]),
    promotion=st.sampled_from([(0.15, 0.3), (0.02, 0.2), (0.5, 0.5)]),
    levels=st.sampled_from(["counter", "counter_ceil", "random"]),
    parents=st.sampled_from(["nearest", "anchored"]),
    anchors=st.sampled_from([(7, 2, 0.9), (1, 1, 1.1)]),
    split=st.sampled_from(["projection", "greedy"]),
    remainder=st.sampled_from(["first", "last"]),
    exhaustive_below=st.sampled_from([0, 10, 4096]),
    fov=st.sampled_from([3, 1000]),
    reparent=st.booleans(),
)
searches = st.builds(
    Search,
    fov=st.sampled_from([1, 5, 10**6]),
    rank_by=st.sampled_from(["point", "centroid"]),
    exhaustive_below=st.sampled_from([0, 10, 4096]),
)
kinds = st.sampled_from(["normal", "heavy", "mean", "repeated", "equal", "zero"])


def some_keys(count: int, seed: int, kind: str = "normal") -> np.ndarray:
    """[count, D] float32."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((count, D))
    if kind == "heavy":
        keys *= np.exp(rng.standard_normal((count, 1)))
    elif kind == "mean":
        keys += 3
    elif kind == "repeated":
        keys = keys[rng.integers(0, max(1, count // 5), count)]
    elif kind == "equal":
        keys[:] = keys[:1]
    elif kind == "zero":
        keys[:: max(1, count // 3)] = 0
    return keys.astype(np.float32)


def clustered(count: int, centres: np.ndarray, spread: float, rng: np.random.Generator) -> np.ndarray:
    """[count, D] float32, each near one of the centres."""
    keys = centres[rng.integers(0, len(centres), count)] + spread * rng.standard_normal((count, D))
    return keys.astype(np.float32)


def some_queries(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).standard_normal((count, D)).astype(np.float32)


def built(keys: np.ndarray, layout: Layout = SMALL, kind: type[DCITree] = DCITree) -> DCITree:
    return kind(keys, len(keys), layout, seed=7)


def grown(keys: np.ndarray, layout: Layout, start: int, steps: Sequence[int] = (1,)) -> DCITree:
    """A tree over the first `start` keys, into which the others are inserted by turns of `steps`."""
    tree, work, turn = DCITree(keys, start, layout, seed=7), Workspace(), 0
    while len(tree) < len(keys):
        tree.insert(min(steps[turn % len(steps)], len(keys) - len(tree)), work)
        turn += 1
    return tree


def found(tree: DCITree, queries: np.ndarray, wanted: int, search: Search) -> list[set[int]]:
    answer = tree.best_tokens(queries, wanted, search, Workspace())
    return [{int(token) for token in row if token != NONE} for row in answer.ids]


def answers(tree: DCITree, queries: np.ndarray, search: Search, work: Workspace) -> list[list[list[int]]]:
    """The best 8 pages and tokens of each query."""
    return [ask(queries, 8, search, work).ids.tolist() for ask in (tree.best_pages, tree.best_tokens)]


# -- structure ---------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 150), layouts, kinds, seeds)
def test_a_built_tree_holds_each_key_once(count: int, layout: Layout, kind: str, seed: int) -> None:
    check_structure(built(some_keys(count, seed, kind), layout))


@quick
@given(st.integers(0, 80), st.integers(0, 120), layouts, kinds, seeds)
def test_an_insertion_keeps_each_key_once(start: int, more: int, layout: Layout, kind: str, seed: int) -> None:
    check_structure(grown(some_keys(start + more, seed, kind), layout, start, [1, 16, 3]))


def test_a_narrow_search_for_a_parent_finds_one_where_the_best_nodes_above_have_no_children_yet() -> None:
    layout = Layout(page_size=2, promotion=(0.5, 0.5), levels="random", exhaustive_below=0, fov=1, reparent=False)
    for seed in range(60):
        check_structure(grown(some_keys(120, seed), layout, 10))


@quick
@given(st.integers(1, 200), layouts, kinds, seeds)
def test_parents_of_an_exhaustive_build_minimise_delta(count: int, layout: Layout, kind: str, seed: int) -> None:
    check_parents(built(some_keys(count, seed, kind), replace(layout, exhaustive_below=4096)))


@quick
@given(st.integers(1, 150), layouts, seeds)
def test_a_beam_as_wide_as_the_levels_finds_parents_that_minimise_delta(count: int, layout: Layout, seed: int) -> None:
    layout = replace(layout, parents="nearest", exhaustive_below=0, fov=1000)
    check_parents(built(some_keys(count, seed, "heavy"), layout))


@quick
@given(st.integers(1, 150), st.integers(0, 40), layouts, seeds)
def test_inserting_one_by_one_gives_the_parents_of_a_build(count: int, start: int, layout: Layout, seed: int) -> None:
    keys = some_keys(count, seed)
    keys[0] *= 20 / np.linalg.norm(keys[0])  # c is there from the first key on
    layout = replace(layout, exhaustive_below=4096, reparent=True)
    tree = grown(keys, layout, min(max(start, 1), count))
    check_parents(tree)
    if layout.levels != "random":
        assert parent_tokens(tree) == parent_tokens(built(keys, layout))


@quick
@given(st.integers(1, 150), layouts, seeds)
def test_growing_c_changes_no_parent_and_no_answer(count: int, layout: Layout, seed: int) -> None:
    keys = np.concatenate([some_keys(count, seed), 50 * some_keys(1, seed + 1)])
    tree = DCITree(keys, count, replace(layout, promotion=(0.001, 0.2)), seed=7)
    before = parent_tokens(tree)
    tree.insert(1, Workspace())
    assert {token: parent for token, parent in parent_tokens(tree).items() if token < count} == before
    check_structure(tree)
    exact = np.argsort(-(keys @ some_queries(1, seed)[0]), kind="stable")[:5]
    assert found(tree, some_queries(1, seed), 5, EVERYTHING) == [set(exact.tolist())]


def test_a_new_top_node_adopts_the_old_top_level_even_without_reparenting() -> None:
    tree = grown(some_keys(60, 0), replace(SMALL, promotion=(0.5, 0.5), reparent=False), 0)
    assert tree.arrays.state[TOP] > 2
    check_structure(tree)


def test_without_reparenting_a_promoted_newcomer_starts_childless() -> None:
    layout = replace(SMALL, promotion=(0.1, 0.1), reparent=False)
    newcomer = 31  # after 9 and 20, the third to find room above
    tree = grown(some_keys(newcomer + 1, 0), layout, newcomer)
    assert levels(tree)[newcomer] == 2
    assert tree.arrays.node["children"][own_node(tree)[newcomer]] == 0
    moved = grown(some_keys(newcomer + 1, 0), replace(layout, reparent=True), newcomer)
    assert moved.arrays.node["children"][own_node(moved)[newcomer]] > 0


def test_level_sizes_follow_the_promoted_shares() -> None:
    keys = some_keys(4000, 0)
    counter = np.bincount(levels(built(keys, replace(SMALL, promotion=(0.05, 0.2)))))
    for below, above, share in zip(counter[1:], counter[2:], [0.05, 0.2, 0.2, 0.2], strict=False):
        assert share * below - 2 < above <= share * (below + 1)
    drawn = np.bincount(levels(built(keys, replace(SMALL, promotion=(0.05, 0.2), levels="random"))))
    for share, size, of in [(0.05, drawn[2:].sum(), 4000), (0.2, drawn[3:].sum(), drawn[2:].sum())]:
        assert abs(size - share * of) < 4 * np.sqrt(of * share * (1 - share))


@pytest.mark.parametrize("share", [0.02, 1 / 16])
@pytest.mark.parametrize("split", ["projection", "greedy"])
def test_occupancy_is_near_that_of_exponential_cells(share: float, split: Any) -> None:
    tree = built(some_keys(4000, 0), Layout(promotion=(share, 0.2), split=split))
    occupancy = len(tree) / (16 * np.count_nonzero(tree.counts))
    expected = (1 - np.exp(-share * 16)) / (share * 16)
    assert abs(occupancy - expected) < 0.1


def test_pages_of_a_node_are_filled_evenly_and_in_the_order_of_the_projection() -> None:
    tree = built(some_keys(90, 3), replace(SMALL, promotion=(0.001, 0.2)))
    assert tree.counts.tolist() == [4] * 21 + [3] * 2
    late = built(some_keys(90, 3), replace(SMALL, promotion=(0.001, 0.2), remainder="last"))
    assert late.counts.tolist() == [3] * 2 + [4] * 21
    value = tree.arrays.projection[:, 0] + tree.arrays.direction[0, -1] * np.sqrt(
        tree.arrays.largest[0] - tree.arrays.point["norm2"]
    )
    ordered = value[tree.arrays.slots[tree.arrays.slots != NONE]]
    assert (np.diff(ordered) >= 0).all()


def test_greedy_pages_hold_nearer_keys_than_projected_ones() -> None:
    rng = np.random.default_rng(0)
    keys = clustered(600, 4 * rng.standard_normal((40, D)), 0.3, rng)

    def spread(split: Any) -> float:
        tree = built(keys, Layout(promotion=(0.01, 0.2), split=split))
        pages = tree.tokens(np.arange(tree.pages))
        return float(np.mean([keys[page[page >= 0]].var(axis=0).sum() for page in pages]))

    assert spread("greedy") < 0.5 * spread("projection")


# -- search ------------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 150), layouts, kinds, st.sampled_from(["point", "centroid"]), st.integers(1, 6), seeds)
def test_a_search_without_limit_is_exact(
    count: int, layout: Layout, kind: str, rank_by: Any, group: int, seed: int
) -> None:
    keys, queries = some_keys(count, seed, kind), some_queries(group, seed)
    tree = grown(keys, layout, count // 2, [16])
    scores = queries.astype(np.float64) @ keys.T.astype(np.float64)
    best = -np.sort(-scores, axis=1)[:, :10]
    for exhaustive_below in (0, 10, 4096):
        search = replace(EVERYTHING, rank_by=rank_by, exhaustive_below=exhaustive_below)
        answer = tree.best_tokens(queries, 10, search, Workspace())
        assert answer.evaluated == count
        shown = best.shape[1]
        np.testing.assert_allclose(answer.scores[:, :shown], best, atol=CLOSE * (1 + np.abs(scores).max(initial=0)))
        assert (answer.ids[:, shown:] == NONE).all()
        of_ids = np.take_along_axis(scores, answer.ids[:, :shown].astype(int), axis=1)
        np.testing.assert_allclose(of_ids, best, atol=CLOSE * (1 + np.abs(scores).max(initial=0)))
        assert all(len(set(row)) == shown for row in answer.ids[:, :shown].tolist())


@quick
@given(st.integers(1, 150), layouts, kinds, seeds)
def test_best_pages_are_ranked_by_their_best_member(count: int, layout: Layout, kind: str, seed: int) -> None:
    keys, queries = some_keys(count, seed, kind), some_queries(3, seed)
    tree = grown(keys, layout, count // 2, [16])
    tokens = tree.tokens(np.arange(tree.pages))
    member = np.where(tokens == NONE, -np.inf, (queries @ keys.T)[:, tokens])
    best = -np.sort(-member.max(axis=2), axis=1)[:, :6]
    answer = tree.best_pages(queries, 6, EVERYTHING, Workspace())
    shown = min(6, int(np.count_nonzero(tree.counts)))
    np.testing.assert_allclose(answer.scores[:, :shown], best[:, :shown], atol=CLOSE * (1 + np.abs(best[:, 0]).max()))
    assert (answer.ids[:, shown:] == NONE).all()
    assert all(len(set(row)) == shown for row in answer.ids[:, :shown].tolist())


@quick
@given(st.integers(1, 200), layouts, searches, st.integers(1, 5), seeds)
def test_the_search_evaluates_the_children_of_the_best_nodes(
    count: int, layout: Layout, search: Search, group: int, seed: int
) -> None:
    keys, queries = some_keys(count, seed, "heavy"), some_queries(group, seed)
    tree = grown(keys, layout, count // 2, [16])
    search = replace(search, exhaustive_below=4096)
    node = tree.arrays.node[: tree.nodes]
    centroid = search.rank_by == "centroid"
    children = np.maximum(node["children"], 1)[:, None]
    vectors = tree.arrays.node_sum[: tree.nodes] / children if centroid else tree.arrays.node_key[: tree.nodes]
    eligible = (node["children"] > 0) & ((node["level"] == 2) | centroid)
    eligible[ROOT] = False
    front = {ROOT} if centroid or tree.arrays.state[TOP] < 2 else set()
    for query in queries:
        ranked = sorted(np.flatnonzero(eligible), key=lambda at: -float(query @ vectors[at]))
        front |= set(ranked[: search.fov])
    looked_into = (tree.counts > 0) & np.isin(tree.arrays.page["node"][: tree.pages], list(front))
    wanted = set(tree.tokens(np.flatnonzero(looked_into)).ravel().tolist()) - {NONE}
    if not centroid:
        wanted |= {token for token, row in enumerate(own_node(tree)) if row != NONE}
    answer = tree.best_tokens(queries, count, search, Workspace())
    assert answer.evaluated == len(wanted)
    assert answer.ranked == tree.nodes - 1
    assert set(answer.ids[answer.ids >= 0].tolist()) == wanted


def test_mean_recall_rises_with_the_beam() -> None:
    keys, queries = some_keys(3000, 0), some_queries(60, 0)
    tree = built(keys, Layout(promotion=(1 / 16, 0.2)))
    exact = np.argsort(-(queries @ keys.T), axis=1)[:, :20]
    for search in (Search(), Search(rank_by="centroid"), Search(exhaustive_below=50)):
        recalls = []
        for fov in (2, 8, 32, 128, 1000):
            hits = [
                len(set(row) & found(tree, query[None], 20, replace(search, fov=fov))[0])
                for row, query in zip(exact.tolist(), queries, strict=True)
            ]
            recalls.append(np.mean(hits) / 20)
        assert recalls == sorted(recalls)
        assert recalls[0] < 0.7
        assert recalls[-1] == 1


def test_a_group_finds_at_least_what_its_queries_find_alone() -> None:
    keys, queries = some_keys(1000, 0), some_queries(4, 0)
    tree, search = built(keys, Layout(promotion=(1 / 16, 0.2))), Search(fov=4)
    together = tree.best_tokens(queries, 30, search, Workspace()).scores
    for query, scores in zip(queries, together, strict=True):
        alone = tree.best_tokens(query[None], 30, search, Workspace()).scores[0]
        assert (scores >= alone - CLOSE).all()


@quick
@given(st.integers(1, 120), layouts, kinds, seeds)
def test_the_exact_scan_answers_for_the_same_pages(count: int, layout: Layout, kind: str, seed: int) -> None:
    keys, queries = some_keys(count, seed, kind), some_queries(2, seed)
    tree, scan = built(keys, layout), built(keys, layout, ExactScan)
    assert (tree.tokens(np.arange(tree.pages)) == scan.tokens(np.arange(scan.pages))).all()
    for ask in ("best_pages", "best_tokens"):
        searched = getattr(tree, ask)(queries, 5, EVERYTHING, Workspace())
        scanned = getattr(scan, ask)(queries, 5, Search(fov=1), Workspace())
        np.testing.assert_allclose(searched.scores, scanned.scores, atol=CLOSE * (1 + np.abs(keys).max() * D))
        assert (scanned.ranked, scanned.evaluated) == (0, count)


# -- pages over time ---------------------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 100), st.integers(0, 60), layouts, seeds)
def test_arranged_pages_are_blocks_of_rows_and_answer_as_before(
    count: int, more: int, layout: Layout, seed: int
) -> None:
    keys, queries = some_keys(count + more, seed), some_queries(3, seed)
    tree, stays = (DCITree(keys.copy(), count, layout, seed=7) for _ in range(2))
    work = Workspace()
    for _ in range(2):
        order = tree.arrange()
        assert sorted(order.tolist()) == list(range(len(tree)))
        memory = keys.copy()
        memory[: len(tree)] = keys[order]
        tree.bind(memory)
        check_structure(tree)
        for page, size in enumerate(tree.counts):
            rows = tree.arrays.slots[page, :size]
            assert (np.diff(rows) == 1).all()
        assert answers(tree, queries, Search(fov=3), work) == answers(stays, queries, Search(fov=3), work)
        for one in (tree, stays):
            one.insert(len(keys) - len(one), work)


@quick
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 20), seeds)
def test_the_group_union_keeps_rank_order_and_repeats_nothing(group: int, depth: int, wanted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = np.array([rng.permutation(15)[:depth] for _ in range(group)], np.int32).reshape(group, depth)
    joined = np.empty(wanted, np.int32)
    KERNELS.interleave(lists, joined)
    expected = list(dict.fromkeys(lists.T.ravel().tolist()))[:wanted]
    assert joined.tolist() == expected + [NONE] * (wanted - len(expected))
    if group == 1 and depth:
        assert expected == lists[0, :wanted].tolist()
    if wanted >= group and depth:
        assert set(lists[:, 0].tolist()) <= set(expected)


def test_ten_thousand_random_inserts_and_queries_agree_with_brute_force() -> None:
    rng, work = np.random.default_rng(0), Workspace()
    keys = some_keys(9000, 0, "heavy")
    tree = DCITree(keys, 0, replace(SMALL, promotion=(0.05, 0.2)), seed=7)
    inserts = queries = 0
    while inserts + queries < 10_000:
        if rng.random() < 0.5 and len(tree) < len(keys) - 3:
            tree.insert(int(rng.integers(1, 4)), work)
            inserts += 1
        else:
            query = rng.standard_normal((1, D)).astype(np.float32)
            scores = keys[: len(tree)] @ query[0]
            answer = tree.best_tokens(query, 3, EVERYTHING, work)
            shown = min(3, len(tree))
            best = -np.sort(-np.partition(scores, len(tree) - shown)[len(tree) - shown :])
            np.testing.assert_allclose(answer.scores[0, :shown], best, rtol=CLOSE, atol=CLOSE)
            queries += 1
    check_structure(tree)
    assert min(inserts, queries) > 3000


# -- threads, formats, memory ------------------------------------------------------------------------------------------


def same(one: DCITree, two: DCITree) -> bool:
    """Bitwise the same tree."""
    count, nodes, pages = len(one), one.nodes, one.pages
    return (len(two), two.nodes, two.pages) == (count, nodes, pages) and all(
        (getattr(one.arrays, name)[:size] == getattr(two.arrays, name)[:size]).all()
        for name, size in [("point", count), ("page", pages), ("slots", pages), ("node", nodes), ("node_sum", nodes)]
    )


def test_eight_threads_build_insert_and_ask_as_one_does() -> None:
    keys, queries = some_keys(1500, 0), some_queries(4, 0)
    layout = Layout(promotion=(1 / 16, 0.2), levels="random")
    shared = built(keys, layout)

    def job(seed: int) -> tuple[DCITree, np.ndarray]:
        work = Workspace()
        tree = DCITree(keys, 1000, layout, seed % 3, work)
        for _ in range(25):
            tree.insert(20, work)
        asked = [shared.best_pages(queries, 8, Search(fov=9), work).ids for _ in range(20)]
        assert all((ids == asked[0]).all() for ids in asked)
        return tree, asked[0]

    alone = [job(seed) for seed in range(3)]
    with ThreadPoolExecutor(8) as pool:
        for seed, (tree, ids) in enumerate(pool.map(job, range(16))):
            assert same(tree, alone[seed % 3][0])
            assert (ids == alone[0][1]).all()


@pytest.mark.slow
def test_bfloat16_keys_are_read_in_place() -> None:
    bits, keys = bfloat16(some_keys(300, 0))
    narrow, wide = grown(bits, SMALL, 200, [16]), grown(keys, SMALL, 200, [16])
    assert same(narrow, wide)
    ours, theirs = (answers(tree, some_queries(4, 0), Search(fov=5), Workspace()) for tree in (narrow, wide))
    assert ours == theirs


def test_memory_beyond_the_indexed_keys_is_never_read() -> None:
    keys = some_keys(200, 0)
    poisoned = np.full((400, D), np.nan, np.float32)
    poisoned[:200] = keys
    assert same(built(keys), DCITree(poisoned, 200, SMALL, seed=7))


def test_one_workspace_serves_trees_of_any_size() -> None:
    work, queries = Workspace(), some_queries(5, 0)
    for count in (10, 400, 50):
        tree = DCITree(some_keys(count, 0), count, SMALL, 7, work)
        for group in (queries[:1], queries):
            assert answers(tree, group, Search(), work) == answers(tree, group, Search(), Workspace())


@pytest.mark.parametrize("stored", [np.float32, pytest.param(np.uint16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [5, 16, 40])
def test_sketches_change_nothing_about_the_best_pages(stored: Any, head_dim: int) -> None:
    """Keys of all lengths, so near one another that no sketch tells them apart, and some that have no sketch."""
    rng = np.random.default_rng(head_dim)
    keys = rng.standard_normal(head_dim) + 0.02 * rng.standard_normal((700, head_dim))
    keys[::7] *= 10.0 ** rng.integers(-3, 3, (100, 1))
    keys[5::50], keys[6::50] = 0, 1e-36
    bits, keys = bfloat16(keys.astype(np.float32))
    tree = DCITree(bits if stored is np.uint16 else keys, 650, SMALL, 0)
    tree.insert(50, Workspace())
    tokens = tree.tokens(np.arange(tree.pages))
    for scale in (1e-31, 1, 1e6):
        queries = (scale * rng.standard_normal((5, head_dim))).astype(np.float32)
        queries[0] = 0
        member = np.where(tokens == NONE, -np.inf, (queries.astype(np.float64) @ keys.T)[:, tokens]).max(axis=2)
        answer = tree.best_pages(queries, 9, EVERYTHING, Workspace())
        best = -np.sort(-member, axis=1)[:, :9]
        size = np.linalg.norm(queries.astype(np.float64), axis=1)[:, None] * np.linalg.norm(keys, axis=1).max()
        assert (abs(answer.scores - best) <= 1e-6 * size).all()
        assert (abs(np.take_along_axis(member, answer.ids.astype(int), axis=1) - best) <= 1e-6 * size).all()


@pytest.mark.parametrize("seed", range(5))
def test_among_clusters_a_promoted_newcomer_takes_all_that_are_nearer_to_it(seed: int) -> None:
    """Of whose points most are too near to their parents to be asked."""
    rng = np.random.default_rng(seed)
    keys = clustered(700, 5 * rng.standard_normal((6, D)), 0.5, rng)
    keys[0] *= 2 * np.linalg.norm(keys, axis=1).max() / np.linalg.norm(keys[0])  # so that c stays
    tree = DCITree(keys, 400, SMALL, seed)
    for _ in range(15):
        tree.insert(20, Workspace())
    check_structure(tree)
    check_parents(tree)


def test_the_index_is_small_beside_its_keys() -> None:
    keys = np.random.default_rng(0).standard_normal((4000, 128)).astype(np.float32)
    assert DCITree(keys, 4000, Layout(), 0).nbytes < 0.4 * keys.nbytes  # of it .26 the sketches


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_key_that_is_not_finite_is_refused(bad: float) -> None:
    keys = some_keys(60, 0)
    keys[40, 3] = bad
    with pytest.raises(ValueError, match="key 40 is not finite"):
        DCITree(keys, 60, SMALL, 7)
    tree = DCITree(keys, 30, SMALL, 7)
    with pytest.raises(ValueError, match="key 40 is not finite"):
        tree.insert(16, Workspace())
    check_structure(tree)
    keys[40, 3] = 0
    tree.insert(16, Workspace())
    check_structure(tree)


def test_an_empty_tree_answers_nothing_and_grows() -> None:
    tree = DCITree(some_keys(5, 0), 0, SMALL, 7)
    for answer in (
        tree.best_pages(some_queries(2, 0), 3, Search(), Workspace()),
        tree.best_tokens(some_queries(2, 0), 3, Search(), Workspace()),
    ):
        assert (answer.ids == NONE).all()
        assert answer.evaluated == 0
        assert (tree.tokens(answer.ids) == NONE).all()
    assert not len(tree.arrange())
    tree.insert(5, Workspace())
    assert len(tree) == 5


def test_wrong_memory_and_queries_are_refused() -> None:
    keys = some_keys(40, 0)
    tree = DCITree(keys, 40, SMALL, 7)
    for words, call in (
        ("contiguous", lambda: DCITree(keys[:, ::2], 40, SMALL, 7)),
        ("float64", lambda: DCITree(keys.astype(np.float64), 40, SMALL, 7)),
        ("memory of 40", lambda: DCITree(keys, 41, SMALL, 7)),
        ("memory of 40", lambda: tree.insert(1, Workspace())),
        (r"\[G, 8\]", lambda: tree.best_pages(keys[:1, :4].copy(), 3, Search(), Workspace())),
        ("not finite", lambda: tree.best_pages(np.full((1, D), np.nan, np.float32), 3, Search(), Workspace())),
        ("uint16", lambda: tree.bind(keys.astype(np.uint16))),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("wrong", [{"promotion": (0, 0.2)}, {"projections": (2, 0)}, {"anchors": (0, 1, 0.9)}], ids=str)
def test_wrong_layouts_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Layout(**wrong)
