"""Scorers that leaderboards have (LagKV, CurDKV, Compactor, Q-Filters), against their formulas, a head at a time."""

from __future__ import annotations

import numpy as np
import torch
from driver import Stream, drive, head_scores, rotate, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbench.backends.hf.model import method_named

Array = NDArray[np.float64]
few = settings(max_examples=12)
CLEAR = 1e-4  # scores that differ by less, relatively, may stand in either order in float32


def of_head(fixed: Stream, row: int, head: int) -> tuple[Array, Array, Array]:
    """Queries [G, n, D] of its group, keys and values [n, D] of a prompt."""
    length, group = fixed.lengths[row], fixed.queries.shape[2] // fixed.keys.shape[2]
    queries = fixed.queries[0, row, head * group : (head + 1) * group, :length]
    keys, values = (part[0, row, head, :length] for part in (fixed.keys, fixed.values))
    return queries.double().numpy(), keys.double().numpy(), values.double().numpy()


def lag_scores(keys: Array, values: Array, sinks: int, lag: int) -> list[float]:
    n = len(keys)
    if n < sinks + 2 * lag:
        return [1.0] * min(sinks, n) + [place / (n - sinks) for place in range(n - sinks)]
    scores = [1.0] * n
    for start in range(sinks, n - 2 * lag + 1, lag):
        both = np.zeros(lag)
        for states in (keys, values):
            after = states[start + lag : start + 2 * lag]
            low, high = after.min(axis=0), after.max(axis=0)
            spread = np.array([((token - low) / (high - low)).std(ddof=1) for token in states[start : start + lag]])
            both += np.exp(spread) / np.exp(spread).sum()
        for rank, place in enumerate(np.argsort(both, kind="stable")):
            scores[start + place] = rank / lag
    return scores


def cur_scores(keys: Array, values: Array, sinks: int, local: int) -> list[float]:
    scores = []
    for token in range(len(keys)):
        window = slice(token // local * local, token // local * local + local)
        shares = [(part[token] @ part[token]) / (part[window] ** 2).sum() for part in (keys, values)]
        scores.append(np.inf if token < sinks else shares[0] * shares[1])
    return scores


def chosen(fixed: Stream, attended: list[set[int]], scores: list[float], count: int) -> None:
    """Of one head: the `count` best stay, but for ties."""
    kept = sorted(attended[0])
    least = min(scores[token] for token in kept)
    most = max((score for token, score in enumerate(scores) if token not in kept), default=-np.inf)
    assert len(kept) == count and (most <= least or most - least <= CLEAR * abs(least))


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    lengths = draw(st.lists(st.integers(6, 60), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (2, 2), (1, 5)]))
    head_dim, seed = draw(st.sampled_from([16, 20])), draw(st.integers(0, 1000))
    return stream(
        *lengths, steps=1, layers=1, query_heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, seed=seed
    )


def kept(fixed: Stream, name: str, budget: int, **options: object) -> list[list[set[int]]]:
    """Prompt tokens that stay, by row and KV head."""
    seen = drive(fixed, method_named(name, **options), budget).seen[0]
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    return [
        [{token for token in ids if token < length} for ids in seen.sets(row)[::group]]
        for row, length in enumerate(fixed.lengths)
    ]


@few
@given(streams(), st.integers(5, 40), st.sampled_from([0, 3]), st.sampled_from([4, 9]))
def test_lagkv_keeps_what_spreads_most_beside_the_next_stretch(
    fixed: Stream, budget: int, sinks: int, lag: int
) -> None:
    for row, heads in enumerate(kept(fixed, "lagkv", budget, sinks=sinks, lag=lag)):
        for head, tokens in enumerate(heads):
            _, keys, values = of_head(fixed, row, head)
            chosen(fixed, [tokens], lag_scores(keys, values, sinks, lag), min(budget, fixed.lengths[row]))


@few
@given(streams(), st.integers(5, 40), st.sampled_from([0, 3]), st.sampled_from([1, 5, 16]))
def test_curdkv_keeps_the_largest_shares_of_their_windows(fixed: Stream, budget: int, sinks: int, local: int) -> None:
    for row, heads in enumerate(kept(fixed, "curdkv", budget, sinks=sinks, local=local)):
        for head, tokens in enumerate(heads):
            _, keys, values = of_head(fixed, row, head)
            chosen(fixed, [tokens], cur_scores(keys, values, sinks, local), min(budget, fixed.lengths[row]))


def standardised(scores: Array) -> Array:
    return (scores - scores.mean()) / scores.std(ddof=1)


def compactor_scores(fixed: Stream, row: int, sketches: Array, weight: float, chunk: int) -> Array:
    """Of the tokens between eight sinks and the last four, [H, n]."""
    length, leverage, attended = fixed.lengths[row], [], []
    for head, sketch in enumerate(sketches):
        queries, keys, values = of_head(fixed, row, head)
        inner = np.arange(8, length - 4)
        before = rotate(torch.tensor(keys[inner]), -torch.tensor(inner)).numpy()
        rows = (before - before.mean(axis=0)) @ sketch
        inverse = np.linalg.inv(rows.T @ rows + 0.01 * np.eye(rows.shape[1]))
        leverage.append([token @ inverse @ token for token in rows])
        received = np.zeros(len(inner))
        for start in range(0, len(inner), chunk):
            part = inner[start : start + chunk]
            logits = queries[:, part] @ keys[part].T
            weights = np.exp(logits - logits.max(axis=2, keepdims=True))
            received[start : start + chunk] = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1).mean(axis=0)
        worth = np.pad(received * np.linalg.norm(values[inner], axis=1), 1)
        attended.append((worth[:-2] + worth[1:-1] + worth[2:]) / 3)
    return weight * standardised(np.array(leverage)) + standardised(np.array(attended))


@few
@given(streams(), st.integers(13, 40), st.sampled_from([4, 16]), st.sampled_from([None, 0.0, 0.7]))
def test_compactor_keeps_outliers_and_what_its_chunk_attends(
    fixed: Stream, budget: int, chunk: int, blending: float | None
) -> None:
    method = method_named("compactor", chunk=chunk, sketch=6, blending=blending)
    seen = drive(fixed, method, budget).seen[0]
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    for row, length in enumerate(fixed.lengths):
        if length <= max(budget, 20):
            continue
        generator = method.context.generator(0, row=row)  # type: ignore[attr-defined]
        shape = fixed.keys.shape[2], fixed.keys.shape[4], 6
        sketches = torch.randn(shape, generator=generator).double().numpy() / 6**0.5
        weight = 1 - budget / length if blending is None else blending
        scores = compactor_scores(fixed, row, sketches, weight, chunk)
        for head, ids in enumerate(seen.sets(row)[::group]):
            ends = [*range(8), *range(length - 4, length)]
            whole = np.full(length, np.inf)
            whole[8 : length - 4] = scores[head]
            assert ids >= set(ends)
            chosen(fixed, [{token for token in ids if token < length}], list(whole), budget)


@few
@given(streams(), st.integers(5, 40), st.sampled_from([0, 4]))
def test_qfilter_keeps_what_lies_along_the_measured_direction(fixed: Stream, budget: int, window: int) -> None:
    directions = head_scores(1, fixed.keys.shape[2], fixed.queries.shape[2], fixed.keys.shape[4]).filters[0]
    for row, heads in enumerate(kept(fixed, "qfilter", budget, window=window)):
        for head, tokens in enumerate(heads):
            _, keys, _ = of_head(fixed, row, head)
            scores = [float(key @ np.array(directions[head])) for key in keys]
            scores[-window or len(scores) :] = [np.inf] * window
            chosen(fixed, [tokens], scores, min(budget, fixed.lengths[row]))


@few
@given(st.sampled_from([1, 2, 3, 5, 7]), st.integers(1, 2), st.sampled_from([16, 20, 64]), st.integers(0, 100))
def test_a_direction_is_the_first_singular_vector_turned_to_most_queries(
    group: int, kv_heads: int, head_dim: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(kv_heads * group, 60, head_dim)) + 2 * rng.normal(size=(kv_heads * group, 1, head_dim))
    measuring = method_named("qfilter").calibrator()
    assert measuring is not None
    measuring.shape = fixed_shape = stream(8, query_heads=kv_heads * group, kv_heads=kv_heads).shape()
    measuring.queries = {0: [torch.tensor(queries).float()]}  # type: ignore[attr-defined]
    numbers, _ = measuring.measure([], lambda text: None)
    for head in range(fixed_shape.kv_heads):
        turned = []
        for of_head in queries[head * group : (head + 1) * group]:
            first = np.linalg.svd(of_head)[2][0]
            turned.append(first if (of_head @ first > 0).mean() > 0.5 else -first)
        np.testing.assert_allclose(numbers["filters"][0][head], np.mean(turned, axis=0), atol=1e-3)
