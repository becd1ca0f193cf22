"""RocketKV: what is left of the prompt, and what of it a step attends, by a plain reading."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from driver import Stream, drive, stream
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from waves import wave_stream

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError

CLEAR = 1e-6  # numbers that differ by less may stand in either order in float32


def left_of(length: int, budget: int) -> int:
    ratio = max(1.0, length / budget)
    return int(length / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8))


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def ranked(scores: list[float], count: int, flat: bool = False) -> list[int]:
    """The best, of equal ones the first; `flat`: such that tie by their nature."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    if count < len(order):
        gap = scores[order[count - 1]] - scores[order[count]]
        assume(gap > CLEAR or flat and gap == 0)
    return order[:count]


def kept(fixed: Stream, layer: int, row: int, head: int, budget: int, window: int, kernel: int) -> list[int]:
    """What SnapKV leaves of the prompt, ascending."""
    length, group = fixed.lengths[row], fixed.queries.shape[2] // fixed.keys.shape[2]
    count = left_of(length, budget)
    keys, votes = fixed.keys[layer, row, head].double(), [0.0] * length
    for query in fixed.queries[layer, row, head * group : (head + 1) * group].double():
        for at in range(max(0, length - window), length):
            for token, weight in enumerate(softmax((keys[: at + 1] @ query[at] * fixed.scaling).tolist())):
                votes[token] += weight
    old = votes[: max(0, length - window)]
    wide = [max(old[max(0, at - kernel // 2) : at + kernel // 2 + 1]) for at in range(len(old))]
    best = ranked(wide, max(0, count - window), flat=True)
    return sorted([*best, *range(len(old), length)])


def chosen(fixed: Stream, layer: int, row: int, head: int, now: int, ids: list[int], sizes: tuple[int, int], most: int):
    """What a step attends of these ids."""
    page, channels = sizes
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    queries = fixed.queries[layer, row, head * group : (head + 1) * group, now - 1].double().tolist()
    keys = [fixed.keys[layer, row, head, token].tolist() for token in ids]
    pages = [keys[at : at + page] for at in range(0, len(keys), page)]
    sums = [sum(abs(query[d]) for query in queries) for d in range(len(keys[0]))]
    looked = ranked(sums, channels)
    scores = [0.0] * len(ids)
    for query in queries:
        share = sum(abs(query[d]) for d in looked) / sum(map(abs, query))
        logits = []
        for own in pages:
            bound = [max if sum(other[d] for other in queries) > 0 else min for d in looked]
            product = sum(query[d] * side(key[d] for key in own) for d, side in zip(looked, bound, strict=True))
            logits += [product / math.sqrt(len(query) * share)] * len(own)
        scores = [total + weight for total, weight in zip(scores, softmax(logits), strict=True)]
    return [ids[at] for at in ranked(scores, most, flat=True)]


@settings(max_examples=8)
@given(
    budget=st.integers(8, 40),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    unified=st.booleans(),
    heads=st.sampled_from([(2, 1), (2, 3), (1, 7)]),
)
@example(budget=8, lengths=[82], unified=False, heads=(1, 7))  # a short last page decides
def test_a_step_attends_what_a_plain_reading_says(
    budget: int, lengths: list[int], unified: bool, heads: tuple[int, int]
) -> None:
    fixed = stream(*lengths, steps=5, query_heads=heads[0] * heads[1], kv_heads=heads[0])
    method = method_named("rocketkv", window=4, kernel=5)
    driven = drive(fixed, method, budget, accounting="unified" if unified else "paper")
    for at in driven.seen:
        for row, length in enumerate(lengths):
            left, now = left_of(length, budget), at.lengths[row]
            ratio = max(1.0, left / budget)
            page = min(math.floor(ratio), math.ceil(math.sqrt(ratio)))
            sizes = page, round(16 * page / ratio)
            for head in range(heads[0]):
                ids = [*kept(fixed, at.layer, row, head, budget, 4, 5), *range(length, now)]
                most = budget if unified else round(budget / 2)
                right = ids if len(ids) <= budget else chosen(fixed, at.layer, row, head, now, ids, sizes, most)
                assert at.sets(row)[head] == set(right)
    assert not driven.audit["over_rule"]


def test_a_page_counts_as_often_as_it_has_tokens() -> None:
    """Two heads look at a page each: three tokens share what the first gives, one has all that the second gives."""
    from methods.rocketkv import estimates, received

    query = torch.tensor([[[20.0, 0.0], [0.0, 20.0]]])
    keys = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
    scores = received(estimates(query, keys, keys, 2, 1.0), torch.tensor([3, 3, 1]))
    assert torch.allclose(scores, torch.tensor([[1 / 3, 0, 1]]), atol=1e-6)


def test_the_numbers_of_the_rule() -> None:
    method: Any = method_named("rocketkv", window=4, kernel=3)
    driven = drive(wave_stream(), method, 8)
    assert (method.retained, method.page, method.channels) == ([23], (2,), (6,))
    assert method.prompt_ids[0][0].tolist() == [
        [*range(6), *range(16, 25), *range(32, 40)],
        [*range(8), *range(15, 23), *range(33, 40)],
    ]
    assert driven.seen[0].sets(0) == [{2, 3, 39, 40}, {21, 22, 33, 34}]
    with pytest.raises(ConfigError, match="budget=63: below the minimum of rocketkv, 64 tokens"):
        from kvbench.cli.compose import composed

        composed("method=rocketkv", "budget=63")


@pytest.mark.parametrize(
    ("length", "budget", "left", "sizes"),
    [(4096, 256, 1209, (3, 81)), (32768, 1024, 5792, (3, 68)), (131072, 512, 3019, (3, 65))],
)
def test_the_published_sizes(length: int, budget: int, left: int, sizes: tuple[int, int]) -> None:
    from methods.rocketkv import page_and_channels, retained_tokens

    assert retained_tokens(length, budget) == left
    assert page_and_channels(left, budget, 128) == sizes
