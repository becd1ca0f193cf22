"""Scorers while decoding, against plain lists and codes that others have published."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from driver import Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from waves import wave_stream

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.config import ConfigError, bind_methods, method_config
from kvbench.memory.device import PAGE

bind_methods()

from methods.blocks.interval import Interval  # noqa: E402
from methods.blocks.scorer import Scorer  # noqa: E402

few = settings(max_examples=15)
CLEAR = 1e-6  # votes that differ by less may stand in either order in float32


def votes(fixed: Stream, row: int, head: int, held: list[int], asked: range, window: int) -> list[float]:
    """What each token held, the last `window` left out, gets from the group's queries at the positions `asked`."""
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    received = [0.0] * len(held)
    for query_head in range(head * group, (head + 1) * group):
        for position in asked:
            query = fixed.queries[0, row, query_head, position].tolist()
            seen = [at for at, token in enumerate(held) if token <= position]
            keys = [fixed.keys[0, row, head, held[at]].tolist() for at in seen]
            logits = [fixed.scaling * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for at, weight in zip(seen, weights, strict=True):
                received[at] += weight / sum(weights) / group if at < len(held) - window else 0.0
    return received


def cut(fixed: Stream, row: int, head: int, held: list[int], asked: int, window: int, kept: int) -> list[int]:
    """SnapKV over what is held: the window, and the tokens with most votes, the largest of three neighbours'."""
    now = held[-1] + 1
    received = votes(fixed, row, head, held, range(max(0, now - asked), now), window)
    pooled = [max(received[max(0, at - 1) : at + 2]) for at in range(len(held) - window)]
    ranked = sorted(range(len(pooled)), key=lambda at: (-pooled[at], at))
    last, next_ = pooled[ranked[kept - window - 1]], pooled[ranked[kept - window]]
    assume(last == next_ or last - next_ > CLEAR)
    return sorted(held[at] for at in ranked[: kept - window]) + held[len(held) - window :]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7)]))
    sizes = {"layers": 1, "query_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 4}
    return stream(*lengths, steps=16, seed=draw(st.integers(0, 10**6)), **sizes)


@few
@given(streams(), st.integers(8, 20), st.integers(1, 6), st.integers(1, 7), st.sampled_from(["paper", "unified"]))
def test_snapkv_votes_again_over_all_that_is_held(
    fixed: Stream, budget: int, interval: int, window: int, accounting: str
) -> None:
    """Masked by id: a query attends no token after its own, wherever that stands among those held."""
    method = method_named("snapkv_decode", interval=interval, window=window, kernel=3)
    driven = drive(fixed, method, budget, accounting=accounting)
    every, own, kept = interval, window, budget
    if accounting == "unified":
        every, own = min(interval, budget // 4), min(window, budget // 4)
        kept = budget - every
        assert driven.audit["attended_max"] <= budget
    for row, length in enumerate(fixed.lengths):
        for head in range(fixed.keys.shape[2]):
            held = list(range(length))
            if accounting == "unified" and length >= budget:
                held = cut(fixed, row, head, held, window, own, kept)
            for step in range(1, fixed.steps + 1):
                held.append(length + step - 1)
                assert driven.seen[step - 1].sets(row)[head] == set(held)
                assert driven.engine.method.rule(0, length, step) == (len(held) if accounting == "paper" else budget)
                if len(held) == budget if accounting == "unified" else step % every == 0 and len(held) > kept:
                    held = cut(fixed, row, head, held, min(window, every + own), own, kept)
    assert not driven.audit["over_rule"]


# The public code keeps these, the newest four among them, of 40 tokens, 20 of them generated.
KEPT = {
    False: [[0, 1, 2, 19, 20, 21, 22, 32, 33, 34], [1, 2, 3, 5, 15, 16, 17, 18, 34, 35]],
    True: [[0, 1, 7, 10, 11, 12, 13, 14, 15, 23], [10, 11, 12, 13, 15, 16, 17, 26, 27, 28]],
}


@pytest.mark.parametrize("rope", KEPT)
def test_a_cut_keeps_what_the_public_code_keeps(rope: bool) -> None:
    method = method_named("snapkv_decode", interval=20, window=4, kernel=3, pooling="mean")
    driven = drive(wave_stream(20, 21, rope=rope), method, 14)
    assert driven.seen[19].sets(0) == [set(range(40))] * 2, "all until the cut"
    assert [sorted(kept) for kept in driven.seen[20].sets(0)] == [[*kept, 36, 37, 38, 39, 40] for kept in KEPT[rope]]


class Newest(Interval, Scorer):
    """Of all tokens held those with the largest value in the first channel of their key."""

    def score(self, layer: int, prompt: Any) -> torch.Tensor:
        scores: torch.Tensor = prompt.keys[..., 0].float()
        return scores


def test_any_scorer_becomes_one_that_cuts_while_decoding() -> None:
    fixed = stream(12, 5, steps=9, layers=2)
    driven = drive(fixed, Newest(4), 6)
    for at in driven.seen:
        for row, length in enumerate(fixed.lengths):
            for head, attended in enumerate(at.sets(row)):
                first = fixed.keys[at.layer, row, head, :, 0].tolist()
                held = list(range(length))
                for step in range(1, at.step):
                    held.append(length + step - 1)
                    if step % 4 == 0:
                        held = sorted(sorted(held, key=lambda token: -first[token])[:6])
                assert attended == {*held, at.lengths[row] - 1}


@pytest.mark.parametrize("accounting", ["paper", "unified"])
@pytest.mark.parametrize("name", ["snapkv_decode", "knorm_decode", "tova_decode", "keydiff_blocks"])
def test_both_ends_of_the_prompt_stay_if_asked_for(name: str, accounting: str) -> None:
    """Of 20 tokens four at each end, wherever they stand among those held; without it some of them go."""
    lost = 0
    options = {"block": 5} if name == "keydiff_blocks" else {"interval": 5}
    options |= {"window": 3} if name == "snapkv_decode" else {}
    for protect in (0.2, 0.0):
        fixed = stream(60, 35, steps=23)
        driven = drive(fixed, method_named(name, protect=protect, **options), 20, accounting=accounting)
        for at in driven.seen:
            for row, length in enumerate(fixed.lengths):
                ends = {*range(4), *range(length - 4, length)}
                missing = [len(ends - kept) for kept in at.sets(row)]
                assert not protect or missing == [0] * len(missing)
                lost += sum(missing)
        assert not driven.audit["over_rule"]
    assert lost


def test_ends_that_leave_nothing_to_choose_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"protect=0.25: twice 8 tokens leave nothing to choose of 32, 16 of them taken"
    ):
        drive(stream(60), method_named("snapkv_decode", protect=0.25, interval=13, window=13), 32, accounting="unified")


def test_tova_cuts_all_heads_alike() -> None:
    driven = drive(stream(30, 9, steps=12, kv_heads=3, query_heads=9), method_named("tova_decode", interval=4), 7)
    for at in driven.seen:
        for row in range(2):
            assert at.sets(row) == [at.sets(row)[0]] * 3
    assert driven.audit["attended_max"] == 34


def test_with_a_fraction_rows_have_intervals_of_their_own() -> None:
    """Other rows change nothing, though queries are kept for all of them alike."""
    fixed = stream(100, 60, 30, steps=40)
    options = {"interval": 12, "window": 9}
    batch = drive(fixed, method_named("snapkv_decode", **options), 0.5, accounting="unified")
    for row in range(3):
        alone = drive(fixed.row(row), method_named("snapkv_decode", **options), 0.5, accounting="unified")
        assert [at.sets(row) for at in batch.seen] == [at.sets(0) for at in alone.seen]


def test_a_copy_goes_on_by_itself() -> None:
    fixed = stream(30, steps=12)
    copies = []
    driven = drive(
        fixed,
        method_named("snapkv_decode", interval=5, window=3),
        10,
        after_prefill=lambda engine: copies.append(copy.deepcopy(engine)),
    )
    assert copies[0].method.sizes == [30] and driven.engine.method.sizes == [12]  # type: ignore[attr-defined]
    assert copies[0].method.queries[0] is not driven.engine.method.queries[0]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["paper", "unified"])
@pytest.mark.parametrize(
    "name", ["snapkv_decode", "knorm_decode", "keydiff_decode", "expected_attention_decode", "tova_decode"]
)
def test_memory_is_flat_over_a_long_answer(name: str, accounting: str) -> None:
    fixed = stream(50, 31, steps=4000, layers=1, head_dim=8)
    driven = drive(fixed, method_named(name, interval=32), 64, accounting=accounting)
    most = 64 + (32 if accounting == "paper" else 0)
    entry = 2 * 2 * 8 * 4 * 2  # two rows, keys and values of two KV heads in float32
    assert driven.audit["attended_max"] == most
    assert driven.audit["device_kv_bytes"] <= most * entry
    assert driven.audit["device_kv_allocated_bytes"] <= (most + PAGE) * entry
    assert not driven.audit["over_rule"]


def test_budgets_below_the_least_are_refused() -> None:
    facts = method_config("snapkv_decode", window=8)
    with pytest.raises(ConfigError, match="minimum of snapkv_decode, 9 tokens"):
        Budget.of(8, facts)
    with pytest.raises(ConfigError, match="minimum of snapkv_decode, 16 tokens"):
        Budget.of(15, facts, "unified")
