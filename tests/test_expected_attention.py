"""Expected Attention against its formulas, one head at a time in NumPy, with the rotations as matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driver import LlamaRotary, Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from waves import wave_stream

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, method_config
from kvbench.method import Method, Prompt

few = settings(max_examples=12)
CLEAR = 1e-4  # scores whose relative difference is less may stand in either order in float32
Array = NDArray[np.float64]


def turned_by(position: int, dim: int) -> Array:
    """The matrix that turns a vector to a position, Llama's pairs (d, d + D / 2)."""
    matrix, half = np.zeros((dim, dim)), dim // 2
    for d in range(half):
        angle = position * 10000.0 ** (-2 * d / dim)
        matrix[d, d] = matrix[d + half, d + half] = np.cos(angle)
        matrix[d + half, d], matrix[d, d + half] = np.sin(angle), -np.sin(angle)
    return matrix


def contributions(
    queries: Array, positions: list[int], keys: Array, values: Array, now: int, sinks: int, future: int, eps: float
) -> Array:
    """(p + eps) ||v|| of every key after the sinks, for a group's queries [G, W, D] at these positions."""
    dim = keys.shape[1]
    mean_turn = sum(turned_by(now + step, dim) for step in range(future)) / future
    total = np.zeros(len(keys) - sinks)
    for head in queries:
        before = np.array([turned_by(at, dim).T @ query for at, query in zip(positions, head, strict=True)])
        mean = mean_turn @ before.mean(axis=0)
        covariance = mean_turn @ np.cov(before.T, bias=True) @ mean_turn.T
        logits = np.array([key @ mean / dim**0.5 + key @ covariance @ key / (2 * dim) for key in keys[sinks:]])
        weights = np.exp(logits - logits.max())
        total += weights / weights.sum()
    return (total / len(queries) + eps) * np.linalg.norm(values[sinks:], axis=1)


def best(scores: Array, count: int, sinks: int) -> list[int]:
    """The sinks, and of the others those with the best scores, `count` in all; no close call."""
    ranked = np.argsort(-scores, kind="stable")
    if 0 < count - sinks < len(scores):
        last, next_ = scores[ranked[count - sinks - 1]], scores[ranked[count - sinks]]
        assume(last - next_ > CLEAR * last)
    return [*range(sinks), *(sinks + int(at) for at in ranked[: count - sinks])]


def of_head(fixed: Stream, row: int, head: int, until: int) -> tuple[Array, Array, Array]:
    """Queries of the group [G, n, D], keys and values [n, D] of the first tokens, float64."""
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    queries = fixed.queries[0, row, head * group : (head + 1) * group, :until]
    parts = (queries, fixed.keys[0, row, head, :until], fixed.values[0, row, head, :until])
    queries, keys, values = (part.double().numpy() for part in parts)
    return queries, keys, values


# -- what the public code keeps ----------------------------------------------------------------------------------------

KEPT: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({}, [8, 9, 14, 17, 20, 25, 28, 30, 37, 39], [4, 5, 8, 11, 17, 26, 29, 30, 38, 39]),
    ({"covariance": False}, [6, 7, 14, 17, 20, 23, 24, 33, 35, 37], [4, 8, 22, 23, 27, 28, 29, 35, 36, 37]),
    ({"eps": 0.01}, [8, 9, 14, 17, 20, 25, 28, 30, 37, 39], [4, 5, 8, 17, 23, 26, 29, 30, 38, 39]),
]


@pytest.mark.parametrize(("options", "first", "second"), KEPT, ids=lambda part: str(part) if part == {} else "")
def test_the_tokens_of_the_public_code_are_kept(options: dict[str, Any], first: list[int], second: list[int]) -> None:
    seen = drive(wave_stream(rope=True), method_named("expected_attention", **options), 14).seen[0]
    assert [sorted(kept - {0, 1, 2, 3, 40}) for kept in seen.sets(0)] == [first, second]
    assert all({0, 1, 2, 3} <= kept for kept in seen.sets(0))


def test_the_scores_are_those_of_the_public_code() -> None:
    scores = noted_scores(method := method_named("expected_attention"))
    drive(wave_stream(rope=True), method, 14)
    torch.testing.assert_close(scores[0][0, 0, 4:7], torch.tensor([0.075989, 0.095983, 0.108256]), rtol=0, atol=2e-6)


def noted_scores(method: Method) -> list[torch.Tensor]:
    """The scores that a scorer gives, noted as it does."""
    noted: list[torch.Tensor] = []
    score = method.score  # type: ignore[attr-defined]

    def watched(layer: int, prompt: Prompt) -> torch.Tensor:
        noted.append(score(layer, prompt).clone())
        return noted[-1]

    method.score = watched  # type: ignore[attr-defined]
    return noted


# -- against the formulas ----------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn, steps: int = 2) -> Stream:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7)]))
    sizes = {"layers": 1, "query_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 8}
    return stream(*lengths, steps=steps, seed=draw(st.integers(0, 10**6)), **sizes)


@few
@given(streams(), st.integers(6, 16), st.sampled_from([0, 2, 4]), st.sampled_from([0.0, 0.02]))
def test_what_queries_to_come_should_attend_stays(fixed: Stream, budget: int, sinks: int, eps: float) -> None:
    driven = drive(fixed, method_named("expected_attention", sinks=sinks, eps=eps, future=30), budget)
    for row, length in enumerate(fixed.lengths):
        for head, attended in enumerate(driven.seen[0].sets(row)):
            kept = list(range(length))
            if length > budget:
                queries, keys, values = of_head(fixed, row, head, length)
                positions = list(range(sinks, length))
                scores = contributions(queries[:, sinks:], positions, keys, values, length, sinks, 30, eps)
                kept = best(scores, budget, sinks)
            assert attended == {*kept, length}
    assert not driven.audit["over_rule"]


@few
@given(streams(steps=15), st.integers(8, 20), st.integers(1, 6), st.sampled_from(["paper", "unified"]))
def test_all_that_is_held_is_scored_by_the_last_queries_at_their_positions(
    fixed: Stream, budget: int, interval: int, accounting: str
) -> None:
    """Of what is held, ids with gaps; the reference turns by true positions."""
    method = method_named("expected_attention_decode", interval=interval, future=20, sinks=2)
    driven = drive(fixed, method, budget, accounting=accounting)
    every = min(interval, budget // 4) if accounting == "unified" else interval
    kept = budget - every if accounting == "unified" else budget
    for row, length in enumerate(fixed.lengths):
        for head in range(fixed.keys.shape[2]):
            queries, keys, values = of_head(fixed, row, head, length + fixed.steps)

            def cut(held: list[int], asked: int, q: Array = queries, k: Array = keys, v: Array = values) -> list[int]:
                now = held[-1] + 1
                at = list(range(max(now - asked, 2), now))
                return [
                    held[place] for place in best(contributions(q[:, at], at, k[held], v[held], now, 2, 20, 0), kept, 2)
                ]

            held = list(range(length))
            if accounting == "unified" and length >= budget:
                held = sorted(cut(held, length))
            for step in range(1, fixed.steps + 1):
                held.append(length + step - 1)
                assert driven.seen[step - 1].sets(row)[head] == set(held)
                if len(held) == budget if accounting == "unified" else step % every == 0 and len(held) > kept:
                    held = sorted(cut(held, every))
    assert not driven.audit["over_rule"]


class HalfTurned(LlamaRotary):
    """Turns the first half of the channels alone, as some models do."""

    def __init__(self, head_dim: int, device: torch.device) -> None:
        super().__init__(head_dim // 2, device)

    def turn(self, vectors: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        part, rest = vectors.chunk(2, dim=-1)
        return torch.cat([super().turn(part, angles), rest], dim=-1)


def test_channels_that_a_model_does_not_turn_keep_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.LlamaRotary", HalfTurned)
    method = method_named("expected_attention", future=50)
    drive(stream(30, layers=1), method, 12)
    turn = next(iter(method.turns.values()))  # type: ignore[attr-defined]
    expected = np.eye(16)
    expected[:8, :8] = sum(turned_by(30 + step, 8) for step in range(50)) / 50
    np.testing.assert_allclose(turn.T.numpy(), expected, rtol=0, atol=1e-5)


# -- options -----------------------------------------------------------------------------------------------------------


def test_heads_with_larger_scores_get_more_of_the_budget() -> None:
    fixed = stream(60, layers=1)
    fixed.values[:, :, 1] *= 3
    seen = drive(fixed, method_named("adakv_expected_attention"), 20).seen[0]
    few_, many = (len(kept) - 1 for kept in seen.sets(0))
    assert few_ + many == 40 and many > few_ >= 4


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("expected_attention", {"future": 0}, r"future=0: expected a whole number, 1 or more"),
        ("expected_attention", {"eps": -0.1}, r"eps=-0.1: expected a number from 0 on"),
        ("adakv_expected_attention", {"alpha": 2.0}, r"alpha=2.0: expected a number from 0 on, at most 1"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_config(name, **options)
