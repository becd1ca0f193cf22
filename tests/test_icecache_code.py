"""IceCache's tree as its authors' code builds and searches it, against slow readings of what that code does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from driver import drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import D, levels, parents

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods

bind_methods()

from methods.icecache.index import DCITree, ExactScan, Layout, Search, Workspace  # noqa: E402
from methods.icecache.kernels import NONE, ROOT  # noqa: E402

pytestmark = pytest.mark.slow  # its kernels take as long to compile as those of all other methods

# What float32 loses, of the largest number around, where sums of D products are subtracted from it.
CLOSE = 2e-6
quick = settings(max_examples=25)
seeds = st.integers(0, 10**6)
kinds = st.sampled_from(["normal", "heavy", "mean"])


def some_keys(count: int, seed: int, kind: str = "normal") -> np.ndarray:
    """[count, D] float32; neighbours are alike, as tokens of a text are."""
    rng = np.random.default_rng(seed)
    keys = (
        rng.standard_normal((count, D)) + np.repeat(2 * rng.standard_normal((count // 20 + 1, D)), 20, axis=0)[:count]
    )
    if kind == "heavy":
        keys *= np.exp(rng.standard_normal((count, 1)))
    return (keys + 3 * (kind == "mean")).astype(np.float32)


def parent_rows(tree: DCITree) -> np.ndarray:
    """[n] the row whose child each row is, -1: the root's."""
    return tree.arrays.node["point"][parents(tree)]


# -- levels ------------------------------------------------------------------------------------------------------------


def counted(count: int, first: Fraction, above: Fraction) -> list[int]:
    """Levels by arrival: the one after a point of level l goes to l + 1, if l's size is now its due or more."""
    size, found, level = Counter[int](), [], 1
    for _ in range(count):
        share = first if level == 1 else above
        opened = size[level] == 0
        size[level] += 1
        found.append(level)
        due = size[level + 1] / share if size[level + 1] else math.ceil(1 / share)
        short = size[level] >= due if size[level + 1] else size[level] == due
        level = level + 1 if short and not opened else 1
    return found


@quick
@given(st.integers(1, 3000), st.integers(1, 100), st.sampled_from([("0.01", "0.2"), ("0.5", "0.5"), ("0.0625", "0.2")]))
def test_levels_are_counted_in_turn_through_insertions(count: int, more: int, shares: tuple[str, str]) -> None:
    first, above = map(float, shares)
    layout = Layout(levels="counter_ceil", promotion=(first, above))
    tree = DCITree(some_keys(count + more, 0), count, layout, seed=7)
    tree.insert(more, Workspace())
    assert levels(tree).tolist() == counted(count + more, *map(Fraction, shares))


def test_a_thousand_points_make_the_levels_that_the_authors_code_makes() -> None:
    tree = DCITree(some_keys(1000, 0), 1000, Layout(levels="counter_ceil"), seed=7)
    assert sorted(Counter(levels(tree)).items()) == [(1, 987), (2, 10), (3, 3)]


# -- parents -----------------------------------------------------------------------------------------------------------


def check_anchored(keys: np.ndarray, anchors: tuple[int, int, float], share: float) -> int:
    """By a plain reading, point by point; where two choices are as good up to rounding, either is right.

    Returns:
        nodes that were to choose from.
    """
    layout = Layout(promotion=(share, 0.2), parents="anchored", anchors=anchors, exhaustive_below=1500)
    tree = DCITree(keys, len(keys), layout, seed=7)
    level, exact = np.array(levels(tree)), keys.astype(np.float64)
    bottom, upper = np.flatnonzero(level == 1), np.flatnonzero(level == 2)
    squared_c = float((exact**2).sum(1).max())
    height = np.sqrt(squared_c - (exact**2).sum(1))
    distance = squared_c - exact[bottom] @ exact[upper].T - np.outer(height[bottom], height[upper])
    chosen = np.searchsorted(upper, parent_rows(tree)[bottom]).tolist()

    close, (interval, reach, threshold) = CLOSE * squared_c, anchors
    positions = sorted({*range(0, len(bottom), interval), len(bottom) - 1})
    farthest, late = Counter[int](), len(upper) > 1000  # then those searched for come after all others
    for at in positions:
        assert distance[at, chosen[at]] <= distance[at].min() + close
        farthest[chosen[at]] = max(farthest[chosen[at]], distance[at, chosen[at]])
    searched = 0
    for at in sorted({*range(len(bottom))} - {*positions}):
        left = at // interval
        near = sorted({chosen[other] for other in positions[max(0, left - reach + 1) : left + 1 + reach]})
        best = near[int(distance[at, near].argmin())]
        bound, own = {node: threshold * farthest[node] for node in near}, distance[at, chosen[at]]
        as_good = [node for node in near if distance[at, node] <= distance[at, best] + close]
        fits = bound[best] >= distance[at, best]
        as_near = chosen[at] in as_good and bound[chosen[at]] >= own - close
        too_far = any(bound[node] <= distance[at, node] + close for node in as_good)
        assert as_near or (too_far and own <= distance[at].min() + close), (at, chosen[at], best)
        searched += not fits
        if fits or not late:
            farthest[chosen[at]] = max(farthest[chosen[at]], own)
    assert 0 < searched < len(bottom) - len(positions)
    assert (distance.argmin(axis=1) != chosen).any()
    return len(upper)


@settings(max_examples=10)
@given(
    st.integers(1600, 2200), st.sampled_from([(30, 3, 0.9), (7, 2, 1.02), (120, 30, 0.9), (2, 1, 0.5)]), kinds, seeds
)
def test_most_points_choose_among_the_parents_of_anchors_near_them(
    count: int, anchors: tuple[int, int, float], kind: str, seed: int
) -> None:
    check_anchored(some_keys(count, seed, kind), anchors, 0.05)


def test_below_many_nodes_what_is_searched_does_not_count_for_those_after() -> None:
    assert check_anchored(some_keys(5000, 1), (30, 3, 0.9), 0.3) > 1000


def test_up_to_a_limit_every_point_is_searched() -> None:
    keys, anchors = some_keys(500, 0), (20, 1, 1.1)
    nearest = DCITree(keys, 500, Layout(promotion=(0.05, 0.2)), seed=7)
    bottom = levels(nearest).tolist().count(1)
    for limit, equal in ((bottom, True), (bottom - 1, False)):
        layout = Layout(promotion=(0.05, 0.2), parents="anchored", anchors=anchors, exhaustive_below=limit)
        assert (parent_rows(DCITree(keys, 500, layout, seed=7)) == parent_rows(nearest)).all() == equal


# -- P-DCI -------------------------------------------------------------------------------------------------------------


def batches(values: np.ndarray, target: float) -> Iterator[tuple[list[int], float]]:
    """Of a list, 128 at a time from the nearer side of the target, then from the other; and how far the last one is."""
    below = sorted(np.flatnonzero(values < target).tolist(), key=lambda at: -values[at])
    above = sorted(np.flatnonzero(values >= target).tolist(), key=lambda at: values[at])
    while below or above:
        right = not below or (bool(above) and values[above[0]] - target < target - values[below[0]])
        one, other = (above, below) if right else (below, above)
        batch = (one[:128] + other)[:128]
        del other[: max(0, 128 - len(one))], one[:128]
        yield batch, abs(values[batch[-1]] - target)


def visited(values: np.ndarray, target: np.ndarray, composites: int, wanted: int, share: float) -> set[int]:
    """P-DCI over values [J, n]: of each composite the index whose next batch ends nearest goes on; what all met."""
    indices, count = values.shape
    simple, queues = indices // composites, [batches(*pair) for pair in zip(values, target, strict=True)]
    nothing: tuple[list[int], float] = ([], math.inf)
    heads, met, found, visits = [next(queue, nothing) for queue in queues], Counter[tuple[int, int]](), set(), 0
    while len(found) < wanted or (visits < simple * count and len(found) < math.ceil(share * count - 1e-4)):
        for composite in range(composites):
            j = min(range(composite * simple, (composite + 1) * simple), key=lambda j: heads[j][1])
            for at in heads[j][0]:
                met[composite, at] += 1
                visits += 1
                if met[composite, at] == simple:
                    found.add(at)
            heads[j] = next(queues[j], nothing)
    return found


def descended(tree: DCITree, query: np.ndarray, fov: int, wanted: int, share: float) -> tuple[dict[int, float], int]:
    """A beam from the root down: the score of every point that is offered, and how many keys were scored."""
    arrays, count = tree.arrays, len(tree)
    score = arrays.keys[:count] @ query
    height = np.sqrt(np.maximum(arrays.largest[0] - arrays.point["norm2"][:count], 0))
    values = (arrays.projection[:count] + height[:, None] * arrays.direction[:, -1]).T
    target = arrays.direction[:, :-1] @ query / np.linalg.norm(query)
    of = arrays.page["node"][arrays.point["page"][:count]]
    offered: dict[int, float] = {}
    beam, scored = [ROOT], 0
    for level in range(max(levels(tree)), 0, -1):
        most, reached = wanted if level == 1 else fov, []
        for node in beam:
            rows = np.flatnonzero(of == node)
            if len(rows) > most:
                rows = rows[sorted(visited(values[:, rows], target, tree.layout.projections[0], most, share))]
            scored += len(rows)
            reached += sorted(rows.tolist(), key=lambda row: -score[row])[:most]
        if level > 1:
            reached = sorted(reached, key=lambda row: -score[row])[:fov]
            beam = arrays.point["node"][reached].tolist()
        offered |= {row: float(score[row]) for row in reached}
    return offered, scored


@quick
@given(
    st.integers(1, 1500),
    st.sampled_from([(1, 1), (3, 1), (1, 4), (2, 3)]),
    st.sampled_from([(0.001, 0.2), (0.004, 0.5), (0.3, 0.2)]),
    st.sampled_from([0.2, 0.8, 1.0]),
    st.sampled_from([(3, 3), (9, 5), (30, 12), (160, 140)]),
    kinds,
    seeds,
)
def test_each_query_descends_by_p_dci(
    count: int,
    projections: tuple[int, int],
    promotion: tuple[float, float],
    share: float,
    widths: tuple[int, int],
    kind: str,
    seed: int,
) -> None:
    (fov, wanted), queries = widths, np.random.default_rng(seed + 1).standard_normal((2, D)).astype(np.float32)
    layout = Layout(page_size=4, promotion=promotion, projections=projections, levels="counter_ceil")
    tree = DCITree(some_keys(count, seed, kind), count, layout, seed=7)
    search, work, total = Search(fov=fov, prop_to_retrieve=share), Workspace(), 0
    of_pages, of_tokens = (ask(queries, wanted, search, work) for ask in (tree.best_pages, tree.best_tokens))
    for at, query in enumerate(queries):
        offered, scored = descended(tree, query, fov, wanted, share)
        total += scored
        close = 5 * CLOSE * np.linalg.norm(query) * np.sqrt(tree.arrays.largest[0])
        tokens = sorted(offered.values(), reverse=True)[:wanted]
        np.testing.assert_allclose(of_tokens.scores[at, : len(tokens)], tokens, atol=close)
        best: dict[int, float] = {}
        for row, score in offered.items():
            page = int(tree.arrays.point["page"][row])
            best[page] = max(best.get(page, -math.inf), score)
        ranked = sorted(best, key=lambda page: -best[page])[:wanted]
        np.testing.assert_allclose(of_pages.scores[at, : len(ranked)], [best[page] for page in ranked], atol=close)
        assert set(of_pages.ids[at].tolist()) - {NONE} == set(ranked)
        assert (of_pages.ids[at, len(ranked) :] == NONE).all()
    assert of_pages.evaluated == of_tokens.evaluated == total


def test_a_node_of_one_batch_is_visited_whole_and_a_larger_one_is_not() -> None:
    query = np.random.default_rng(0).standard_normal((1, D)).astype(np.float32)
    for count, share, scored in ((128, 0.2, 128), (129, 0.8, 128), (160, 0.8, 128), (161, 0.8, 161), (300, 0.8, 256)):
        layout = Layout(promotion=(0.001, 0.2), projections=(1, 1))
        tree = DCITree(some_keys(count, 0), count, layout, seed=7)
        assert tree.best_tokens(query, 5, Search(prop_to_retrieve=share), Workspace()).evaluated == scored


def test_the_exact_scan_knows_no_projections() -> None:
    keys, query = some_keys(700, 0), np.ones((1, D), np.float32)
    scan = ExactScan(keys, 700, Layout(projections=(1, 1), promotion=(0.001, 0.2)), seed=7)
    answer = scan.best_tokens(query, 700, Search(fov=1, prop_to_retrieve=0.1), Workspace())
    assert sorted(answer.ids[0].tolist()) == list(range(700))


# -- the method --------------------------------------------------------------------------------------------------------


def test_what_is_attended_are_the_pages_that_each_query_head_descends_to() -> None:
    """Joined by rank and cut to the slots, after window and sinks."""
    fixed = stream(1300, steps=3, layers=1)
    options: dict[str, Any] = {"page_size": 4, "small_page_size": 4, "promotion": [0.004, 0.5]}
    method, compared = method_named("icecache_code", **options), 0
    select = method.select

    def checked_select(layer: int, query: Any) -> Any:
        nonlocal compared
        selection = select(layer, query)
        (regions,), (length,) = method.regions, method.view.lengths(layer)
        first = [*range(length - 1, regions.window(length) - 1, -1), *range(regions.sinks)]
        for head, tree in enumerate(method.trees[layer][0]):
            asked = query[0, 2 * head : 2 * head + 2, 0].numpy()
            ids = tree.best_pages(asked, regions.recalled, Search(30, prop_to_retrieve=0.8), Workspace()).ids
            joined = [page for page in dict.fromkeys(ids.T.ravel().tolist()) if page != NONE][: regions.recalled]
            recalled = [regions.sinks + token for token in tree.tokens(np.array(joined)).ravel() if token != NONE]
            assert selection.index[0, head].tolist()[: len(first + recalled)] == first + recalled
            compared += 1
        return selection

    method.select = checked_select
    drive(fixed, method, 96)
    assert compared == 3 * 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"rank_by": "centroid"}, "rank_by=centroid"), ({"anchors": [120, 2.5, 0.9]}, r"anchors=\[120, 2.5, 0.9\]")],
)
def test_what_the_code_cannot_do_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        method_named("icecache_code", **wrong)
