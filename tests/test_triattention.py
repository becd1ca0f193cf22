"""TriAttention: what the mean queries of a model's heads keep, by a plain reading of its formulas."""

from __future__ import annotations

import cmath
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driven, LlamaRotary, Stream, drive, head_scores, rotate, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from waves import waves

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.measure import calibration
from kvbench.method import HeadScores
from kvbench.runs.run import prepare

CLEAR = 1e-4  # scores that differ by less may stand in either order in float32
SPEED = [10000.0 ** (-2 * f / 16) for f in range(8)]  # of the streams' 16 dims


# -- the formulas ------------------------------------------------------------------------------------------------------


def received(mean: list[float], sizes: list[float], key: list[float], at: int, now: int, speed: list[float]) -> float:
    """What a query head gives on average to a key before RoPE that stands at a position."""
    half, total = len(key) // 2, 0.0
    for f in range(half):
        asked, held = complex(mean[f], mean[f + half]), complex(key[f], key[f + half])
        phase = cmath.phase(asked * held.conjugate())
        for power in range(17):
            total += abs(asked) * abs(held) * math.cos(speed[f] * (now - at + 2**power) + phase) / 17
        total += (sizes[f] - abs(asked)) * abs(held)
    return total


def normalised(scores: list[float]) -> list[float]:
    deviation = max(statistics.pstdev(scores), 1e-6)
    return [(score - statistics.fmean(scores)) / deviation for score in scores]


def worth(fixed: Stream, known: HeadScores, row: int, head: int, layer: int, ids: list[int], now: int) -> list[float]:
    """What each of these tokens is worth to a KV head: the largest normalised score of its query heads."""
    keys = rotate(fixed.keys[layer, row, head].double(), -torch.arange(fixed.keys.shape[3])).tolist()
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    each = [
        normalised(
            [
                received(known.query_means[layer][own], known.query_sizes[layer][own], keys[at], at, now, SPEED)
                for at in ids
            ]
        )
        for own in range(head * group, (head + 1) * group)
    ]
    return [max(scores) for scores in zip(*each, strict=True)]


def check(driven: Driven, fixed: Stream, known: HeadScores, kept: list[int], limits: list[int], by_layer: bool) -> None:
    """Every head held, at every step, what a plain reading leaves."""
    layers, heads = len(fixed.keys), fixed.keys.shape[2]
    for row, length in enumerate(fixed.lengths):
        own = [[list(range(length)) for _ in range(heads)] for _ in range(layers)]
        for now in range(length, length + fixed.steps):
            if len(own[0][0]) >= limits[row]:
                for head in range(heads):
                    scores = [worth(fixed, known, row, head, at, own[at][head], now) for at in range(layers)]
                    if not by_layer:
                        scores = [[statistics.fmean(each) for each in zip(*scores, strict=True)]] * layers
                    for layer in range(layers):
                        ranked = sorted(range(len(scores[layer])), key=lambda i: (-scores[layer][i], i))
                        last, next_one = (scores[layer][ranked[at]] for at in (kept[row] - 1, kept[row]))
                        assume(last - next_one > CLEAR)
                        own[layer][head] = sorted(own[layer][head][i] for i in ranked[: kept[row]])
            for at in (at for at in driven.seen if at.lengths[row] == now + 1):
                for head in range(heads):
                    assert at.sets(row)[head] == {*own[at.layer][head], now}
            own = [[[*ids, now] for ids in layer] for layer in own]


@settings(max_examples=6)
@given(
    budget=st.integers(16, 40),
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=2),
    unified=st.booleans(),
    by_layer=st.booleans(),
    heads=st.sampled_from([(2, 1), (2, 3), (1, 7)]),
)
def test_what_is_kept_is_what_a_plain_reading_keeps(
    budget: int, lengths: list[int], unified: bool, by_layer: bool, heads: tuple[int, int]
) -> None:
    fixed = stream(*lengths, steps=14, query_heads=heads[0] * heads[1], kv_heads=heads[0])
    known = head_scores(2, heads[0], heads[0] * heads[1])
    method = method_named("triattention", buffer=5, sets="layer" if by_layer else "model")
    driven = drive(fixed, method, budget, accounting="unified" if unified else "paper")
    buffer = min(5, budget // 4) if unified else 5
    kept = budget - buffer if unified else budget
    check(driven, fixed, known, [kept] * len(lengths), [kept + buffer] * len(lengths), by_layer)
    assert not driven.audit["over_rule"]


# -- numbers of the published code -------------------------------------------------------------------------------------


def golden() -> tuple[Stream, HeadScores]:
    """Two layers of the sines that the numbers were made of, keys with RoPE; and what the queries ask on average."""

    queries = torch.stack([waves(c, 4, 41) * (torch.arange(4)[:, None, None] + 1) / 2 for c in (0.5, 0.8)])
    keys = torch.stack([rotate(waves(c, 2, 41), torch.arange(41)) for c in (1.0, 1.3)])
    asked = queries[:, :, :40]
    means = asked.mean(dim=2), torch.hypot(*asked.chunk(2, dim=-1)).mean(dim=2)
    none = ((0.0, 0.0), (0.0, 0.0))
    parts = [part[:, None].float() for part in (queries, keys, keys)]
    known = HeadScores(none, none, *(tuple(tuple(map(tuple, layer)) for layer in part.tolist()) for part in means))
    return Stream((40,), 1, *parts, torch.zeros(1, 41, dtype=torch.int64)), known


def kept_of(fixed: Stream, known: HeadScores, **options: Any) -> list[list[set[int]]]:
    """The ids of each layer and KV head at position 40."""
    driven = drive(fixed, method_named("triattention", **options), 14, scores=known)
    return [[ids - {40} for ids in at.sets(0)] for at in driven.seen if at.lengths == (41,)]


def test_the_published_code_keeps_the_same_tokens() -> None:
    fixed, known = golden()
    shared = [
        {1, 3, 8, 11, 18, 19, 20, 25, 26, 28, 35, 36, 37, 38},
        {2, 4, 5, 8, 9, 11, 18, 20, 24, 27, 31, 33, 36, 39},
    ]
    assert kept_of(fixed, known, buffer=26) == [shared, shared]
    own = kept_of(fixed, known, buffer=26, sets="layer")
    assert own[0][0] == {1, 3, 8, 11, 18, 19, 20, 21, 26, 28, 29, 35, 36, 38}
    pinned = [{*range(6), 11, 18, 19, 20, 28, 35, 36, 38}, {*range(6), 9, 11, 18, 20, 24, 27, 36, 39}]
    from_six = replace(fixed, lengths=(6,), steps=35)
    assert kept_of(from_six, known, buffer=26, pin_prompt=True) == [pinned, pinned]


def test_the_published_code_gives_the_same_scores() -> None:
    fixed, known = golden()
    method: Any = method_named("triattention")
    drive(fixed, method, 60, scores=known)
    scores = method.received(0, fixed.keys[0, 0, :, :40], 40)[0, 0]
    torch.testing.assert_close(scores[:3], torch.tensor([7.3831, 8.5461, 7.2875]), rtol=0, atol=1e-4)
    speed = [10000.0 ** (-2 * f / 8) for f in range(4)]
    plain = rotate(fixed.keys[0, 0, 0].double(), -torch.arange(41)).tolist()
    expected = [
        received(known.query_means[0][0], known.query_sizes[0][0], plain[at], at, 40, speed) for at in range(40)
    ]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-4)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_thousand_generated_tokens_take_no_more_memory() -> None:
    fixed = stream(200, steps=4000, layers=1, head_dim=4)
    audit = drive(fixed, method_named("triattention"), 64).audit
    assert audit["attended_max"] == 64 + 128 and not audit["over_rule"]
    assert audit["device_kv_bytes"] == (64 + 127) * 2 * 2 * 4 * 4  # after a step
    assert audit["device_kv_allocated_bytes"] <= 1.5 * audit["device_kv_bytes"]


def test_a_pinned_prompt_needs_room_for_more() -> None:
    fixed = stream(40, steps=30)
    driven = drive(fixed, method_named("triattention", buffer=8, pin_prompt=True), 48)
    assert all(set(range(40)) <= ids for at in driven.seen for ids in at.sets(0))
    assert driven.audit["attended_max"] == 48 + 8 and not driven.audit["over_rule"]
    with pytest.raises(
        ConfigError, match="^method.pin_prompt=true: a prompt of 40 tokens, of which budget=40 keeps 40"
    ):
        drive(fixed, method_named("triattention", pin_prompt=True), 40)


# -- what a model's heads ask ------------------------------------------------------------------------------------------


def test_mean_queries_are_those_of_the_model_s_projections(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that norms its queries after the norm, and before the positions."""
    monkeypatch.setattr(calibration, "PROSE_TOKENS", 40)
    noted: list[list[torch.Tensor]] = [[] for _ in tiny.model.model.layers]
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, out, own=own: own.append(out[0].double()))
        for layer, own in zip(tiny.model.model.layers, noted, strict=True)
    ]
    found = calibration.mean_queries(tiny)
    for hook in hooks:
        hook.remove()
    means, sizes = found.averages()
    assert found.count == 8 * 40
    heads = len(means[0])
    for layer, parts in enumerate(noted):
        # what `RotaryOf` tried itself out on comes first, a token at a time
        asked = torch.cat([part for part in parts if len(part) > 1]).unflatten(1, (heads, -1))
        torch.testing.assert_close(torch.tensor(means[layer]).double(), asked.mean(dim=0), rtol=1e-3, atol=1e-4)
        lengths = torch.hypot(*asked.chunk(2, dim=-1)).mean(dim=0)
        torch.testing.assert_close(torch.tensor(sizes[layer]).double(), lengths, rtol=1e-3, atol=1e-4)


def test_scores_without_queries_and_those_of_another_model_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "heads.tsv"
    table.write_text("1.2\t0.5\n0\t-3\n" * 2)
    with pytest.raises(ConfigError, match="^method.heads: scores without mean queries; expected a file of kvbench cal"):
        drive(stream(40), method_named("triattention"), 20, scores=replace(head_scores(2, 2), query_means=()))
    with pytest.raises(ConfigError, match="scores of 3 layers of 2 KV heads, and the model has 2 of 2"):
        drive(stream(40), method_named("triattention"), 20, scores=head_scores(3, 2, 4))
    with pytest.raises(ConfigError, match="mean queries of 4 heads of 8 dims, and the model has 4 of 16"):
        drive(stream(40), method_named("triattention"), 20, scores=head_scores(2, 2, 4, 8))
    words = ["task=passkey", "task.lengths=[256]", f"results_dir={tmp_path}"]
    other = composed("method=full").model.name
    with pytest.raises(ConfigError, match=f"made of .*, and the model is {other}"):
        composed("method=triattention", "method.heads=kvbench/assets/heads/dummy-tiny.json", *words)
    arm = prepare(composed("method=triattention", "model=dummy-tiny", *words))
    assert arm.calibration is not None and len(arm.calibration.scores.query_means) == 4


def test_a_model_that_pairs_other_dims_is_refused() -> None:
    class Interleaved(LlamaRotary):
        def turn(self, vectors: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
            return super().turn(vectors[..., order], angles)[..., order.argsort()]

    from kvbench.engine.positions import ModelRotation
    from methods.triattention import speeds

    cpu = torch.device("cpu")
    good = speeds(ModelRotation(LlamaRotary(16, cpu)), 16, cpu)
    torch.testing.assert_close(good, torch.tensor(SPEED, dtype=torch.float64), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="do not turn the dims f and f . D / 2 as a pair"):
        speeds(ModelRotation(Interleaved(16, cpu)), 16, cpu)
