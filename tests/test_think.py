"""ThinK: which key channels are dropped, of which tokens, and what is left of a logit."""

from __future__ import annotations

import math

import pytest
import torch
from driver import CLOSE, Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from waves import wave_stream

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods
from kvbench.memory.kinds import KV, NATIVE
from kvbench.method import Method, Prompt

bind_methods()

from methods.think import weakest_channels  # noqa: E402


@pytest.mark.parametrize(
    ("heads", "window", "count", "dropped"),
    [
        (2, 32, 4, [{1, 2, 4, 5}, {0, 2, 3, 5}]),
        (2, 4, 4, [{2, 3, 4, 5}, {0, 2, 6, 7}]),
        (2, 32, 2, [{2, 4}, {0, 5}]),
        (4, 32, 4, [{1, 2, 4, 5}, {1, 2, 4, 5}, {0, 3, 5, 7}, {0, 2, 3, 5}]),
        (4, 32, 3, [{1, 2, 4}, {1, 2, 4}, {0, 3, 5}, {0, 3, 5}]),
    ],
    ids=["kvpress", "kvpress-window-4", "kvpress-quarter", "official", "official-.4"],
)
def test_published_codes_drop_the_same_channels(heads: int, window: int, count: int, dropped: list[set[int]]) -> None:
    """The official code repeats the keys for each query head, kvpress averages over the group."""
    fixed = wave_stream(steps=0)
    queries = fixed.queries[0, 0].unflatten(0, (heads, -1))
    keys = fixed.keys[0, 0].repeat_interleave(heads // 2, dim=0)
    assert [set(head) for head in weakest_channels(queries[:, :, -window:], keys, count).tolist()] == dropped


def weakest(fixed: Stream, layer: int, row: int, head: int, kept: list[int], count: int) -> list[int]:
    """Channels with the least q^2 k^2, by loops."""
    length, group = fixed.lengths[row], fixed.queries.shape[2] // fixed.keys.shape[2]
    queries = fixed.queries[layer, row, head * group : (head + 1) * group, max(0, length - 32) : length].tolist()
    keys = fixed.keys[layer, row, head, kept].tolist()
    weight = [
        sum(query[d] ** 2 for one in queries for query in one) * sum(key[d] ** 2 for key in keys)
        for d in range(len(keys[0]))
    ]
    order = sorted(range(len(weight)), key=weight.__getitem__)
    assume(count == 0 or weight[order[count]] > weight[order[count - 1]] * (1 + 1e-5))
    return order[:count]


def output(
    fixed: Stream, at: tuple[int, int, int], now: int, ids: list[int], lost: list[int], before: int
) -> torch.Tensor:
    """What a query head attends of these ids, whose keys before a position lack channels."""
    layer, row, own = at
    head = own * fixed.keys.shape[2] // fixed.queries.shape[2]
    query, total, sums = fixed.queries[layer, row, own, now - 1].tolist(), 0.0, torch.zeros(16, dtype=torch.float64)
    for token in ids:
        key = fixed.keys[layer, row, head, token].tolist()
        left = [d for d in range(16) if token >= before or d not in lost]
        weight = math.exp(fixed.scaling * sum(query[d] * key[d] for d in left))
        total, sums = total + weight, sums + weight * fixed.values[layer, row, head, token].double()
    return (sums / total).float()


@settings(max_examples=8)
@given(
    budget=st.integers(12, 60),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=2),
    unified=st.booleans(),
    channels=st.sampled_from([0.0, 0.1, 0.4, 0.75]),
    whole=st.integers(0, 20),
    heads=st.sampled_from([(2, 1), (2, 3), (1, 7)]),
)
def test_logits_are_those_of_the_channels_that_are_left(
    budget: int, lengths: list[int], unified: bool, channels: float, whole: int, heads: tuple[int, int]
) -> None:
    fixed = stream(*lengths, steps=3, query_heads=heads[0] * heads[1], kv_heads=heads[0])
    accounting = "unified" if unified else "paper"
    held: list[torch.Tensor] = []
    options = {"channels": channels, "whole": whole, "window": 8}
    driven = drive(fixed, method_named("think", **options), budget, accounting=accounting)
    base = drive(
        fixed,
        method_named("snapkv", window=8),
        budget,
        accounting=accounting,
        after_prefill=lambda engine: held.extend(engine.view.resident(layer) for layer in range(2)),
    )
    for at, beside in zip(driven.seen, base.seen, strict=True):
        for row, length in enumerate(lengths):
            for head, ids in enumerate(beside.sets(row)):
                assert at.sets(row)[head] == ids
                kept = [token for token in held[at.layer][row, head].tolist() if token >= 0]
                lost = weakest(fixed, at.layer, row, head, kept, int(channels * 16)) if length > budget else []
                for own in range(head * heads[1], (head + 1) * heads[1]):
                    right = output(fixed, (at.layer, row, own), at.lengths[row], sorted(ids), lost, length - whole)
                    found = driven.outputs[at.step - 1, at.layer, row, own]
                    torch.testing.assert_close(found, right, rtol=0, atol=CLOSE)
    assert not driven.audit["over_rule"]


def test_the_share_of_channels_is_counted_and_shared_prompts_are_not_written() -> None:
    fixed = stream(90, 20, steps=2)
    before = fixed.keys.clone()
    driven = drive(fixed, method_named("think", whole=8, window=8), 30)
    dropped, tokens = int(0.4 * 16), 30 + 20
    assert driven.audit["key_channels"] == pytest.approx(1 - 22 * dropped / 16 / tokens)
    assert torch.equal(fixed.keys, before)
    assert "key_channels" not in drive(fixed, method_named("think"), 90).audit

    class Writes(Method):
        def prefill(self, layer: int, prompt: Prompt) -> None:
            if layer:
                self.view.keep(layer, torch.tensor([[[3, 5]]]))
            self.view.write(layer, torch.tensor([[[5]]]).expand(1, 2, 1), keys=torch.ones(1, 2, 1, 16))

    with pytest.raises(ValueError, match="write is for tokens that keep has left on the device"):
        drive(stream(20), Writes(), 10)


def test_coded_keys_are_coded_without_the_dropped_channels() -> None:
    fixed = stream(90, steps=2)
    driven, exact = (drive(fixed, method_named("think", window=8), 30, kv=kv) for kv in (KV("int8", "int8"), NATIVE))
    torch.testing.assert_close(driven.outputs, exact.outputs, rtol=0, atol=0.1)
    base = drive(fixed, method_named("snapkv", window=8), 30)
    assert (base.outputs - exact.outputs).abs().max() > 0.1
