"""Executors follow every field of a selection, and agree with the formula; whichever method selects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from driver import (
    ATTEND,
    CLOSE,
    CLOSE_IN_HALF,
    FAST,
    drive,
    stream,
)
from integrity import everything

from kvbench.attention import executor as attention
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Method, Needs, Selection


def tensors(*sizes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=rng) for size in sizes]


def filled_store(kv_heads: int, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> LayerStore:
    """Two rows of 21 and 13 tokens of which some are gone: slots are not ids, and one row has more pages."""
    store = LayerStore(2, kv_heads, head_dim, 28, dtype, torch.device("cpu"))
    key, value = tensors((2, kv_heads, 20, head_dim), (2, kv_heads, 20, head_dim), seed=1)
    store.write_prompt(key, value, 0, [0, 0])
    store.seal_prompt([20, 12])
    kept = [[2, 3, 5, 7, 9, 12, 15, 18, 19], [0, 1, 3, 5, 6, 8, 10, 11, -1]]
    store.keep(torch.tensor(kept)[:, None].expand(2, kv_heads, -1))
    newest = tensors((2, kv_heads, 1, head_dim), (2, kv_heads, 1, head_dim), seed=2)
    store.append(*(part.to(dtype) for part in newest))
    return store


def full_selection(heads: int, query_heads: int, kv_heads: int, parts: Sequence[str], head_dim: int = 8) -> Selection:
    """Five of the ids in `filled_store`, other ones for each head, best first, fewer in the second row."""
    kept = [[2, 3, 5, 7, 9, 12, 15, 18, 19, 20], [0, 1, 3, 5, 6, 8, 10, 11, 12]]
    rng = torch.Generator().manual_seed(3)
    index = torch.full((2, heads, 5), -1)
    for row, count in enumerate((5, 3)):
        for head in range(heads):
            order = torch.randperm(len(kept[row]), generator=rng)[:count]
            index[row, head, :count] = torch.tensor(kept[row])[order]
    log_weight, keys, extra_key, extra_value, extra_weight = tensors(
        (2, query_heads, 5),
        (2, kv_heads, 5, head_dim),
        (2, kv_heads, 2, head_dim),
        (2, kv_heads, 2, head_dim),
        (2, query_heads, 2),
        seed=4,
    )
    return Selection(
        index,
        log_weight=log_weight if "log_weight" in parts else None,
        keys=keys if "keys" in parts else None,
        extra=Extra(extra_key, extra_value, extra_weight) if "extra" in parts else None,
    )


def by_the_formula(
    query: torch.Tensor, store: LayerStore, selection: Selection, row: int, head: int, softcap: float = math.inf
) -> torch.Tensor:
    """One query head's output [D], written down from the interface's words."""
    group = query.shape[1] // store.kv_heads
    kv_head = head // group
    of_head = {1: 0, store.kv_heads: kv_head, query.shape[1]: head}[selection.index.shape[1]]
    ids, stored_keys, stored_values = everything(store, row, kv_head)
    logits, values = [], []
    for rank, token in enumerate(selection.index[row, of_head].tolist()):
        if token < 0:
            continue
        slot = ids.tolist().index(token)
        key = stored_keys[slot] if selection.keys is None else selection.keys[row, kv_head, rank]
        logits.append(capped(0.3 * torch.dot(query[row, head, 0].float(), key.float()), softcap))
        if selection.log_weight is not None:
            logits[-1] = logits[-1] + selection.log_weight[row, head, rank]
        values.append(stored_values[slot])
    if selection.extra is not None:
        for entry in range(selection.extra.key.shape[2]):
            logit = 0.3 * torch.dot(query[row, head, 0].float(), selection.extra.key[row, kv_head, entry].float())
            logits.append(capped(logit, softcap) + selection.extra.log_weight[row, head, entry])
            values.append(selection.extra.value[row, kv_head, entry])
    return torch.stack(logits).softmax(0) @ torch.stack(values).float()


def capped(logit: torch.Tensor, softcap: float) -> torch.Tensor:
    return logit if softcap == math.inf else softcap * torch.tanh(logit / softcap)


PARTS = [(), ("log_weight",), ("extra",), ("log_weight", "extra")]


KEYS = [("keys",), ("log_weight", "keys", "extra")]  # replaced keys are per KV head


PER_AND_PARTS = [
    *((per, parts) for per in ("all", "kv_head") for parts in PARTS + KEYS),
    *(("query_head", parts) for parts in PARTS),
]


@pytest.mark.parametrize(
    ("per", "parts"), PER_AND_PARTS, ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain"
)
@pytest.mark.parametrize("softcap", [math.inf, 0.8])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_executors_follow_every_field_of_a_selection(
    query_heads: int, kv_heads: int, softcap: float, per: str, parts: Sequence[str]
) -> None:
    heads = {"all": 1, "kv_head": kv_heads, "query_head": query_heads}[per]
    store, selection = filled_store(kv_heads), full_selection(heads, query_heads, kv_heads, parts)
    (query,) = tensors((2, query_heads, 1, 8), seed=5)
    results = {}
    for name, attend in ATTEND.items():
        cap = None if softcap == math.inf else softcap
        out, weights = attend(query, store, selection, 0.3, probabilities=True, softcap=cap)
        assert weights is not None
        assert weights.shape == (2, query_heads, 5 + 2 * ("extra" in parts))
        torch.testing.assert_close(weights.sum(dim=2), torch.ones(2, query_heads))
        assert weights[1, :, 3:5].eq(0).all(), "an absent entry has no weight"
        for row in range(2):
            for head in range(query_heads):
                expected = by_the_formula(query, store, selection, row, head, softcap)
                torch.testing.assert_close(out[row, head, 0], expected, rtol=0, atol=CLOSE)
        results[name] = weights
    for name in FAST:
        torch.testing.assert_close(results[name], results["reference"], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("per", ["all", "kv_head", "query_head"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_executors_attend_synthetic_entries_alone(dtype: torch.dtype, per: str) -> None:
    """An Extra is all that there is to attend: its two entries, and no token."""
    store, heads = filled_store(2, dtype=dtype), {"all": 1, "kv_head": 2, "query_head": 4}[per]
    query, key, value, log_weight = tensors((2, 4, 1, 8), (2, 2, 2, 8), (2, 2, 2, 8), (2, 4, 2), seed=5)
    extra = Extra(key.to(dtype), value.to(dtype), log_weight)
    selection = Selection(torch.empty(2, heads, 0, dtype=torch.int64), extra=extra)
    near = CLOSE if dtype == torch.float32 else CLOSE_IN_HALF
    for name, attend in ATTEND.items():
        out, weights = attend(query.to(dtype), store, selection, 0.3, probabilities=True)
        assert weights is not None and weights.shape == (2, 4, 2), name
        torch.testing.assert_close(weights.sum(dim=2), torch.ones(2, 4))
        for row in range(2):
            for head in range(4):
                expected = by_the_formula(query, store, selection, row, head)
                torch.testing.assert_close(out[row, head, 0].float(), expected, rtol=0, atol=near)


class Summary(Method):
    """Attends one synthetic entry, and no token of the prompt or after it."""

    def __init__(self, home: Any, query_heads: bool) -> None:
        self.needs, self.query_heads = Needs(home=home), query_heads

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        batch, query_heads, _, head_dim = query.shape
        key = query.new_zeros(batch, self.shape.kv_heads, 1, head_dim)
        heads = query_heads if self.query_heads else self.shape.kv_heads
        nothing = torch.empty(batch, heads, 0, dtype=torch.int64)
        return Selection(nothing, extra=Extra(key, key + layer + 1, query.new_zeros(batch, query_heads, 1)))

    def rule(self, layer: int, length: int, generated: int) -> int:
        return 1


@pytest.mark.parametrize("query_heads", [False, True])
@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("executor", attention.EXECUTORS)
def test_a_method_may_attend_no_token_at_all(executor: str, home: str, query_heads: bool) -> None:
    driven = drive(stream(30, 21), Summary(home, query_heads), 1, executor=executor)
    for layer in range(2):
        torch.testing.assert_close(driven.outputs[:, layer], torch.full_like(driven.outputs[:, layer], layer + 1))
    assert driven.audit["attended_mean"] == driven.audit["attended_max"] == 1
    assert driven.audit["moved_bytes_per_step"] == 0 and not driven.audit["over_rule"]


@pytest.mark.parametrize("name", attention.EXECUTORS)
def test_executors_attend_everything_resident_without_a_selection(name: str) -> None:
    store = filled_store(2)
    (query,) = tensors((2, 4, 1, 8), seed=5)
    out, weights = ATTEND[name](query, store, None, 0.3, probabilities=True)
    ids = store.resident_ids()
    expected, _ = ATTEND["reference"](query, store, Selection(ids), 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=CLOSE)
    assert weights is not None
    assert weights.shape == (2, 4, ids.shape[2])
    torch.testing.assert_close(weights.sum(dim=2), torch.ones(2, 4))


class Everything(Method):
    """Uses every field of a Selection, and notes what it is shown afterwards."""

    needs = Needs(probabilities=True)

    def __init__(self) -> None:
        self.observed: list[tuple[int, Selection | None, torch.Tensor]] = []

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        batch, kv_heads, query_heads = len(self.shape.lengths), self.shape.kv_heads, self.shape.query_heads
        last = min(self.view.lengths(layer))
        index = torch.arange(last - 6, last).flip(0).expand(batch, kv_heads, 6)
        key, value = self.view.keys(layer, index), self.view.values(layer, index)
        extra = Extra(key[:, :, :1], value[:, :, :1], torch.full((batch, query_heads, 1), 0.5))
        return Selection(index, torch.linspace(0, 1, 6).expand(batch, query_heads, 6), key + 0.1, extra)

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.observed.append((layer, selection, probabilities.clone()))

    def rule(self, layer: int, length: int, generated: int) -> int:
        return 7


def test_method_that_uses_every_field_sees_its_probabilities() -> None:
    fixed = stream(30, 21)
    fast, slow = Everything(), Everything()
    ours, theirs = drive(fixed, fast, 7), drive(fixed, slow, 7, executor="reference")
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=CLOSE)
    assert [layer for layer, _, _ in fast.observed] == [0, 1] * fixed.steps
    for (_, selection, weights), (_, _, expected) in zip(fast.observed, slow.observed, strict=True):
        assert selection is not None
        assert weights.shape == (2, 4, 7)
        torch.testing.assert_close(weights, expected, rtol=0, atol=CLOSE)
        torch.testing.assert_close(weights.sum(dim=2), torch.ones(2, 4))
    assert ours.audit["attended_mean"] == ours.audit["attended_max"] == 7
    assert not ours.audit["over_rule"]
