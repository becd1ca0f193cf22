"""vAttention: what is drawn and how it is weighted, against the formulas a head at a time; and how near it comes."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from driver import drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.method import Method, Selection


def selections(method: Method) -> list[tuple[int, Selection]]:
    """Layer and selection of every step."""
    noted: list[tuple[int, Selection]] = []
    select = method.select

    def noting(layer: int, query: torch.Tensor) -> Selection | None:
        selection = select(layer, query)
        assert selection is not None
        noted.append((layer, selection))
        return selection

    method.select = noting  # type: ignore[method-assign]
    return noted


@settings(max_examples=12)
@given(st.data())
def test_the_sample_is_as_large_as_the_bound_asks_and_stands_for_the_rest(data: st.DataObject) -> None:
    group, kv_heads = data.draw(st.sampled_from([1, 2, 3, 5, 7]), "group"), data.draw(st.integers(1, 2), "KV heads")
    head_dim, budget = data.draw(st.sampled_from([16, 20, 64]), "D"), data.draw(st.integers(16, 48), "budget")
    lengths = data.draw(st.lists(st.integers(10, 90), min_size=1, max_size=2), "lengths")
    epsilon, seed = data.draw(st.sampled_from([0.05, 0.5]), "epsilon"), data.draw(st.integers(0, 99), "seed")
    sizes = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": 1, "seed": seed}
    fixed = stream(*lengths, steps=2, **sizes)
    fixed.queries.mul_(data.draw(st.sampled_from([0.1, 1.0]), "how far from uniform"))
    method = method_named("vattention", epsilon=epsilon)
    noted = selections(method)
    driven = drive(fixed, method, budget)
    window, heavy, base = max(1, budget // 8), budget // 4, max(2, budget // 8)
    known, quantile = 4 + window + heavy, NormalDist().inv_cdf(0.95)
    errors = []
    for step, (_, selection) in enumerate(noted):
        for row, length in enumerate(lengths):
            seen = length + step + 1
            for head in range(kv_heads):
                ids = [token for token in selection.index[row, head].tolist() if token >= 0]
                heads = range(head * group, (head + 1) * group)
                assert selection.log_weight is not None
                of_heads = selection.log_weight[row, heads.start : heads.stop, : len(ids)].double().numpy()
                if seen <= budget:
                    assert {*ids} == {*range(seen)} and not of_heads.any()
                    continue
                keys = fixed.keys[0, row, head, :seen].double()
                logits = (fixed.queries[0, row, list(heads), seen - 1].double() @ keys.T * fixed.scaling).numpy()
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                shared = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
                shared[[*range(4), *range(seen - window, seen)]] = np.inf
                assert {*ids[:known]} == {*np.argsort(-shared, kind="stable")[:known].tolist()}
                first, rest = weights[:, ids[known : known + base]], seen - known
                total = weights[:, ids[:known]].sum(axis=1) + rest * first.mean(axis=1)
                needed = (quantile * first.std(axis=1, ddof=1) * rest / (epsilon * total)) ** 2
                count = min(max(np.floor(needed.max()), base), budget - known)
                assert abs(len(ids) - known - count) <= (needed.max() % 1 < 1e-3 or needed.max() % 1 > 1 - 1e-3)
                drawn = len(ids) - known
                np.testing.assert_allclose(of_heads[:, :known], 0)
                np.testing.assert_allclose(of_heads[:, known:], np.log(rest / drawn), atol=1e-5)
                estimate = (weights[:, ids] * np.exp(of_heads)).sum(axis=1)
                errors += [*abs(estimate / weights.sum(axis=1) - 1)]
    held = np.mean(np.array(errors) <= epsilon) if errors else 0.0
    assert abs(method.report()["bound_held"] - held) <= 1.5 / max(len(errors), 1) and not driven.audit["over_rule"]


def test_the_bound_holds_as_often_as_it_says_where_there_is_room_for_it() -> None:
    """Weights that scatter little, so that a normal law describes their mean: 24 steps of 16 query heads."""
    fixed = stream(600, steps=24, layers=2, query_heads=8, kv_heads=4)
    fixed.queries.mul_(0.3)
    method: Any = method_named("vattention", epsilon=0.1, delta=0.1, heavy=0.1)
    drive(fixed, method, 400)
    report = method.report()
    assert report["bound_had_room"] == 1 and report["bound_held"] > 0.85
