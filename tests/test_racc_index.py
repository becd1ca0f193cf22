"""RACC's index against brute force, and its ratios against sums written out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.config import bind_methods

bind_methods()

from methods.racc.index import KeyIndex, augmented  # noqa: E402
from methods.racc.ratio import actual_ratio, alpha_for, compression_ratio, retained, share  # noqa: E402
from methods.racc.settings import RACCOptions  # noqa: E402

Floats = np.ndarray[Any, np.dtype[np.float32]]

quick = settings(max_examples=60)


def made(count: int, dim: int = 16, seed: int = 0) -> Floats:
    """Keys of very different norms."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, dim)) * np.exp(rng.standard_normal((count, 1)))).astype(np.float32)


def clustered(count: int, dim: int, seed: int = 0) -> Floats:
    """Keys around twenty centres, and queries around the same."""
    rng = np.random.default_rng(seed)
    centres = 3 * np.random.default_rng(99).standard_normal((20, dim))
    return (centres[rng.integers(0, 20, count)] + rng.standard_normal((count, dim))).astype(np.float32)


def over(keys: Floats, **options: Any) -> KeyIndex:
    return KeyIndex(RACCOptions(**options), lambda tokens: keys[tokens])


def best(scores: Any, tokens: Any, k: int) -> set[int]:
    return set(tokens[np.argsort(-scores, kind="stable")[:k]].tolist())


# -- the transform and the index ---------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 50), st.integers(1, 40), st.floats(1, 5), st.integers(0, 2**32 - 1))
def test_distances_after_the_transform_are_inner_products(count: int, dim: int, spare: float, seed: int) -> None:
    """|upsilon(q) - phi(x)|^2 = |q|^2 + M - 2 <q, x>, for any M that no |x|^2 exceeds."""
    keys, query = made(count, dim, seed), made(1, dim, seed + 1)[0]
    bound = spare * float(np.sum(keys**2, axis=1).max())
    distances = np.sum((np.append(query, 0) - augmented(keys, bound)) ** 2, axis=1)
    expected = np.sum(query**2) + bound - 2 * keys @ query
    np.testing.assert_allclose(distances, expected, rtol=0, atol=1e-5 * (bound + np.sum(query**2)))


@quick
@given(st.integers(1, 120), st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_flat_and_inner_product_equal_brute_force(count: int, k: int, parts: int, seed: int) -> None:
    """However the keys come in: tokens in parts, some named again."""
    keys, query = made(count, seed=seed).astype(np.float32), made(1, seed=seed + 1)[0]
    index = over(keys, metric="ip")
    tokens = np.random.default_rng(seed).permutation(count)
    for part in range(1, parts + 1):
        index.cover(tokens[: count * part // parts])
    found = index.search(query, k)
    scores = keys.astype(np.float64) @ query
    assert len(found) == len(set(found.tolist())) == min(k, count)
    # distances in fp32 part what inner products in fp64 part, but for the last bits
    slack = 1e-5 * (float(np.sum(keys**2, axis=1).max()) + float(query @ query))
    assert scores[found].min() >= np.sort(scores)[-len(found)] - slack
    assert (np.diff(scores[found]) <= slack).all(), "nearest first"


def test_cosine_compares_directions() -> None:
    keys, queries = made(300), made(20, seed=1)
    index = over(keys, metric="cosine")
    index.cover(np.arange(300))
    directions = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    differ = 0
    for query in queries:
        found = set(index.search(query, 10).tolist())
        assert found == best(directions @ query, np.arange(300), 10)
        differ += found != best(keys @ query, np.arange(300), 10)
    assert differ > 15, "the two metrics would agree anyway"


def test_a_key_beyond_the_bound_makes_a_new_index() -> None:
    keys = made(100)
    keys[50] *= 100 / np.linalg.norm(keys[50])
    index = over(keys, metric="ip")
    index.cover(np.arange(50))
    assert (len(index), index.rebuilds, index.keys_read) == (50, 0, 50)
    index.cover(np.arange(51))
    assert (len(index), index.rebuilds, index.keys_read) == (51, 1, 50 + 1 + 51)
    index.cover(np.arange(100))
    assert (len(index), index.rebuilds, index.keys_read) == (100, 1, 50 + 1 + 51 + 49), "49 shorter keys are added"
    assert index.search(keys[50], 1).tolist() == [50]


def test_a_graph_finds_nearly_all() -> None:
    """Built in two parts, the longest key in the first."""
    keys, queries = clustered(3000, 32), clustered(30, 32, seed=1)
    index = over(keys, index="hnsw", metric="ip")
    bound = int(np.argmax(np.sum(keys**2, axis=1)))
    index.cover(np.unique([*range(2000), bound]))
    index.cover(np.arange(3000))
    assert index.rebuilds == 0
    recall = [len(best(keys @ query, np.arange(3000), 20) & set(index.search(query, 20))) / 20 for query in queries]
    assert np.mean(recall) > 0.9


@pytest.mark.parametrize(("dim", "subspaces", "width"), [(128, 8, 144), (16, 16, 32), (33, 5, 40)])
def test_codes_find_much_for_any_dimension(dim: int, subspaces: int, width: int) -> None:
    """The augmented width is filled up to what the subspaces divide."""
    keys = clustered(1200, dim)
    index = over(keys, index="ivfpq", metric="ip", subspaces=subspaces)
    index.cover(np.arange(1200))
    assert index._index.d == width
    assert index._index.nlist == 1200 // 39
    recall = [
        len(best(keys @ query, np.arange(1200), 50) & set(index.search(query, 50).tolist())) / 50
        for query in clustered(20, dim, seed=1)
    ]
    assert 0.2 < np.mean(recall) < 1, "better than chance, 0.04, and coded"


def test_few_keys_are_searched_flat_and_it_is_said_once() -> None:
    keys, queries = clustered(800, 16), clustered(10, 16, seed=1)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)

    def exact(index: KeyIndex) -> bool:
        tokens = np.arange(len(index))
        return all(set(index.search(q, 10).tolist()) == best(keys[tokens] @ q, tokens, 10) for q in queries)

    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        for index in (over(keys, index="ivfpq", metric="cosine"), over(keys, index="ivfpq", metric="cosine")):
            index.cover(np.arange(100))
            assert index.searched_flat and exact(index)
            index.cover(np.arange(199))
            assert index.rebuilds == 0, "twice as many keys would be worth a new index"
            index.cover(np.arange(255))
            assert index.searched_flat and exact(index)
            index.cover(np.arange(800))
            assert not index.searched_flat and not exact(index)
    assert [str(one.message) for one in said] == [
        "index=ivfpq: fewer keys than 256 are searched flat; its lists and codes need as many"
    ]


@pytest.mark.parametrize("kind", ["flat", "ivfpq", "hnsw"])
def test_the_same_keys_make_the_same_index(kind: str) -> None:
    keys = clustered(700, 16)
    found = []
    for _ in range(2):
        index = over(keys, index=kind, metric="ip")
        index.cover(np.arange(300))
        index.cover(np.arange(700))
        found.append([index.search(query, 25).tolist() for query in clustered(10, 16, seed=1)])
    assert found[0] == found[1]


def test_an_empty_index_finds_nothing_and_holds_nothing() -> None:
    index = over(made(5), metric="ip")
    assert (len(index), index.nbytes, index.search(made(1)[0], 3).tolist()) == (0, 0, [])
    index.cover(np.arange(5))
    assert sorted(index.search(made(1)[0], 9).tolist()) == [0, 1, 2, 3, 4]
    assert index.search(made(1)[0], 0).tolist() == []
    assert index.nbytes >= 5 * 17 * 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_key_that_is_no_number_is_named(value: float) -> None:
    keys = made(20)
    keys[13, 2] = value
    with pytest.raises(ValueError, match="key 13 is not finite"):
        over(keys, metric="ip").cover(np.arange(5, 20))


@pytest.mark.slow
def test_without_faiss_the_message_names_the_package() -> None:
    code = "import sys; sys.modules['faiss'] = None\nfrom kvbench.config import method_config\n"
    code += "from kvbench.config import ConfigError\ntry:\n    method_config('racc').build()\n"
    code += "except ConfigError as error:\n    print(error)"
    root = Path(__file__).parent.parent
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    assert said.count("\n") == 1 and "pip install faiss-cpu" in said


# -- ratios ------------------------------------------------------------------------------------------------------------


@quick
@given(st.floats(0, 1), st.integers(1, 60), st.floats(0, 1))
def test_formula_4_is_its_geometric_series(alpha: float, compressions: int, beta: float) -> None:
    series = sum(alpha**age for age in range(1, compressions + 1)) / compressions + beta
    assert compression_ratio(alpha, compressions, beta) == pytest.approx(series, rel=1e-9, abs=1e-9)


def test_the_published_values_give_fifteen_percent_near_4k_only() -> None:
    ratios = [compression_ratio(0.6, generated // 400, 0.01) for generated in (2000, 4000, 8000, 16000)]
    assert ratios[:3] == pytest.approx([0.287, 0.159, 0.085], abs=6e-4)
    assert ratios[3] == pytest.approx(0.047, abs=6e-4)


@pytest.mark.parametrize(("compressions", "alpha"), [(8, 0.530), (16, 0.692), (32, 0.818)])
def test_alpha_that_holds_fifteen_percent(compressions: int, alpha: float) -> None:
    assert alpha_for(0.15, compressions, 0.01) == pytest.approx(alpha, abs=5e-4)


@quick
@given(st.floats(0.02, 1), st.integers(1, 60), st.floats(0, 0.5))
def test_alpha_is_solved_from_the_ratio(alpha: float, compressions: int, beta: float) -> None:
    ratio = compression_ratio(alpha, compressions, beta)
    assert compression_ratio(alpha_for(ratio, compressions, beta), compressions, beta) == pytest.approx(ratio)
    assert alpha_for(1 + beta, compressions, beta) == pytest.approx(1)
    assert alpha_for(1 + beta + 1, compressions, beta) == 1
    with pytest.raises(ValueError, match="beta"):
        alpha_for(beta, compressions, beta)


def test_sizes_after_each_compression_are_the_recorded_ones() -> None:
    """The published code's, after a prompt of 100 tokens: 1 % of what there is at step 200 of a cycle returns."""
    linked = lambda number: share(0.01, 100 + 400 * number - 200) if number > 2 else 0  # noqa: E731
    assert [retained(done, 0.6, 400, 40, linked) for done in range(6)] == [0, 256, 409, 512, 578, 621]


@given(st.integers(0, 100), st.integers(0, 10_000))
def test_a_share_is_rounded_down_exactly(hundredths: int, count: int) -> None:
    assert share(hundredths / 100, count) == hundredths * count // 100


def test_the_measured_ratio_is_of_all_tokens_there_would_be() -> None:
    assert actual_ratio([10, 30, 20], 40) == {"ratio_end": 0.5, "ratio_mean": 0.5, "ratio_peak": 0.75}
    assert actual_ratio([], 0) == {}
