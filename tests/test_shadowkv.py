"""ShadowKV: which chunks it attends, with which keys, and what that holds and moves."""

from __future__ import annotations

import math

import pytest
import torch
from driver import CLOSE, Driven, LlamaRotary, Stream, drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import tiers_of

from kvbench.backends.hf.model import method_named
from methods.shadowkv import low_rank

CHUNK, LAYERS = 8, 2


def reference(
    fixed: Stream, layer: int, row: int, step: int, capacity: int, outliers: int, unified: bool
) -> list[set[int]]:
    """The tokens that each KV head attends at a step, from 1 on, one chunk after the other."""
    prompt, local = fixed.lengths[row], 4
    length = prompt + step
    if unified:
        outliers, local = min(outliers, capacity // CHUNK // 8), min(local, capacity // CHUNK // 4)
    first = max(0, prompt // CHUNK - local)
    count = max(0, length // CHUNK - local) if unified else first
    attended = []
    for head in range(fixed.keys.shape[2]):
        keys = fixed.keys[layer, row, head].double()
        chunks = [keys[CHUNK * at : CHUNK * at + CHUNK] for at in range(count)]
        means = [chunk.mean(dim=0) for chunk in chunks]
        cosines = [
            min(float(key @ mean / key.norm() / mean.norm()) for key in chunk)
            for chunk, mean in zip(chunks[:first], means[:first], strict=True)
        ]
        apart = sorted(range(first), key=cosines.__getitem__)[:outliers]
        rest = [at for at in range(count) if at not in apart]
        recent = set(range(count * CHUNK, length))
        room = capacity // CHUNK
        if unified and capacity < length:
            room = (capacity - len(apart) * CHUNK - len(recent)) // CHUNK
        group = fixed.queries.shape[2] // fixed.keys.shape[2]
        scores = dict.fromkeys(rest, 0.0)
        for query in fixed.queries[layer, row, head * group : (head + 1) * group, length - 1].double():
            weights = [math.exp(float(query @ means[at]) * fixed.scaling) for at in rest]
            for at, weight in zip(rest, weights, strict=True):
                scores[at] = max(scores[at], weight / sum(weights))
        best = sorted(rest, key=scores.__getitem__, reverse=True)[: max(0, room)]
        attended.append(recent | {at * CHUNK + token for at in [*apart, *best] for token in range(CHUNK)})
    return attended


@settings(max_examples=15)
@given(
    st.lists(st.integers(20, 150), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 5),
    st.sampled_from([32, 40, 71, 200]),
    st.booleans(),
)
def test_attended_are_outliers_recent_tokens_and_the_chunks_with_the_best_means(
    lengths: list[int], group: int, outliers: int, capacity: int, unified: bool
) -> None:
    fixed = stream(*lengths, steps=10, query_heads=2 * group)
    method = method_named("shadowkv", outliers=outliers, rank=0.25)
    driven = drive(fixed, method, capacity, accounting="unified" if unified else "paper")
    for at in driven.seen:
        for row in range(len(lengths)):
            assert at.sets(row) == reference(fixed, at.layer, row, at.step, capacity, outliers, unified)
    assert not driven.audit["over_rule"]


def attended(fixed: Stream, driven: Driven, rank: int | None) -> torch.Tensor:
    """Attention of the ids that were attended, with the keys of chosen chunks from a full SVD of those before RoPE.

    Args:
        rank: singular values that stay; None: all keys are the stored ones.
    """
    outputs = torch.zeros_like(driven.outputs)
    rotary, dim = LlamaRotary(fixed.keys.shape[4], fixed.keys.device), fixed.keys.shape[4]
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    for at in driven.seen:
        for row, length in enumerate(fixed.lengths):
            keys = fixed.keys[at.layer, row].double()
            place = torch.arange(length)
            if rank is not None:
                plain = rotary.turn(keys[:, :length], rotary.angles(-place)).transpose(0, 1).flatten(1)
                u, s, v = torch.linalg.svd(plain, full_matrices=False)
                near = ((u[:, :rank] * s[:rank]) @ v[:rank]).unflatten(1, (-1, dim)).transpose(0, 1)
                rebuilt = rotary.turn(near, rotary.angles(place))
            for head, ids in enumerate(at.sets(row)):
                own, on_device = keys[head].clone(), tiers_of(driven.engine.stores[at.layer])[row, head] == 1
                if rank is not None:
                    own[:length] = torch.where(on_device[:length, None], own[:length], rebuilt[head])
                chosen = sorted(ids)
                query = fixed.queries[at.layer, row, head * group : (head + 1) * group, at.lengths[row] - 1].double()
                weights = (query @ own[chosen].T * fixed.scaling).softmax(dim=1)
                value = fixed.values[at.layer, row, head].double()
                outputs[at.step - 1, at.layer, row, head * group : (head + 1) * group] = weights @ value[chosen]
    return outputs


@pytest.mark.parametrize("executor", ["auto", "torch", "reference"])
@pytest.mark.parametrize("rank", [8, 32])
def test_keys_of_chosen_chunks_are_those_of_the_truncated_svd_before_rope(executor: str, rank: int) -> None:
    """Two KV heads of 16: at rank 32 the keys are exact. A covered row of the batch has none to rebuild."""
    fixed = stream(150, 60, 131, steps=5)
    method = method_named("shadowkv", outliers=2, rank=rank / 32)
    driven = drive(fixed, method, 32, executor=executor)
    torch.testing.assert_close(driven.outputs, attended(fixed, driven, rank), rtol=0, atol=10 * CLOSE)
    exact = (driven.outputs - attended(fixed, driven, None)).abs().max()
    assert exact < 10 * CLOSE if rank == 32 else exact > 0.01


def test_a_prompt_that_the_budget_covers_stays_as_it_is() -> None:
    fixed = stream(90, steps=5)
    driven = drive(fixed, method_named("shadowkv", outliers=2, rank=1 / 32), 64)
    torch.testing.assert_close(driven.outputs, attended(fixed, driven, None), rtol=0, atol=CLOSE)
    assert driven.audit["host_bytes"] == driven.audit["moved_bytes_per_step"] == 0


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_only_values_of_chosen_chunks_move_up(executor: str) -> None:
    """Two KV heads of 16 in float32; 48 tokens chosen, 16 outlying, 38 last, of a prompt of 150."""
    steps, heads, entry = 6, 2, 2 * 16 * 4
    fixed = stream(150, steps=steps)
    driven = drive(fixed, method_named("shadowkv", outliers=2, rank=0.25), 48, executor=executor)
    device = {layer: tiers_of(store)[0] == 1 for layer, store in driven.engine.stores.items()}
    staged: dict[tuple[int, int], set[int]] = {}
    moved = 0
    for at in driven.seen:
        for head, ids in enumerate(at.sets(0)):
            far = {token for token in ids if not device[at.layer][head, token]}
            moved += len(far - staged.get((at.layer, head), set())) * entry // 2
            staged[at.layer, head] = far
    audit = driven.audit
    assert audit["moved_bytes_per_step"] == moved / steps > 0
    assert audit["host_bytes"] == LAYERS * heads * (150 - 16 - 38) * entry
    assert audit["device_kv_bytes"] == LAYERS * heads * (48 + 16 + 38 + steps) * entry
    chunks, rank = 150 // 8 - 4, 8
    factors, means = (150 * rank + heads * rank * 16) * 4, heads * chunks * (16 * 4 + 1)
    assert audit["index_bytes"] == LAYERS * (factors + means + heads * 2 * 8)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
def test_low_rank_is_the_truncated_svd(tokens: int, heads: int, rank: int) -> None:
    keys = torch.randn(heads, tokens, 4, generator=torch.Generator().manual_seed(tokens)).double()
    rank = min(rank, heads * 4)
    u, s, v = torch.linalg.svd(keys.transpose(0, 1).flatten(1), full_matrices=False)
    mine, basis = low_rank(keys, rank)
    near = (u[:, :rank] * s[:rank]) @ v[:rank]
    torch.testing.assert_close((mine @ basis).transpose(0, 1).flatten(1), near, rtol=0, atol=1e-9)
