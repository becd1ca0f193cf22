"""OmniKV: what filter layers choose, equal to the paper's rule token by token; which layers, and where tokens live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import Stream, drive, stream

from kvbench.backends.hf.model import method_named

ENTRY = 2 * 16 * 4  # bytes of one token's key and value in one KV head of a stream


def chosen(fixed: Stream, layer: int, row: int, candidates: int, token: int, count: int) -> set[int]:
    """Of the first `candidates` tokens those that the query of `token` scores best, by the paper's words."""
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    scores = []
    for other in range(candidates):
        heads = [
            torch.dot(query[token].double(), fixed.keys[layer, row, head // group, other].double()).item()
            for head, query in enumerate(fixed.queries[layer, row])
        ]
        scores.append(max(heads) * fixed.scaling)
    return set(sorted(range(candidates), key=lambda other: -scores[other])[:count])


@pytest.mark.parametrize(
    ("lengths", "sizes", "budget", "options"),
    [
        ((40, 23, 6), {"layers": 5}, 9, {"filters": [0, 2], "wait": 0}),
        ((31,), {"layers": 6, "query_heads": 6, "kv_heads": 2}, 0.2, {"filters": [1], "wait": 2}),
        ((12, 30), {"layers": 4, "query_heads": 3, "kv_heads": 3, "head_dim": 8}, 12, {"filters": [0], "wait": 1}),
    ],
)
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_layers_after_a_filter_attend_its_best_prompt_tokens(
    lengths: tuple[int, ...], sizes: dict[str, int], budget: int | float, options: dict[str, Any], accounting: str
) -> None:
    fixed = stream(*lengths, steps=6, seed=len(lengths), **sizes)
    method = method_named("omnikv", **options)
    driven = drive(fixed, method, budget, accounting=accounting)
    compared = 0
    for at in driven.seen:
        before = [layer for layer in options["filters"] if layer < at.layer]
        whole = not before or at.layer in options["filters"] or at.layer - before[-1] <= options["wait"]
        assert at.in_place == whole
        for row, seen in enumerate(at.lengths):
            expected = set(range(seen))
            if whole:
                assert method.rule(at.layer, lengths[row], at.step) is None
            else:
                capacity = budget if isinstance(budget, int) else -(-lengths[row] // 5)
                always = at.step if accounting == "paper" else min(at.step, capacity // 4)
                count = capacity if accounting == "paper" else capacity - always
                expected = chosen(fixed, before[-1], row, seen - always, seen - 1, count)
                expected |= set(range(seen - always, seen))
                assert method.rule(at.layer, lengths[row], at.step) == count + always
                compared += 1
            assert all(ids == expected for ids in at.sets(row))
    assert compared and not driven.audit["over_rule"]


def test_tokens_of_layers_that_read_everything_stay_on_the_device() -> None:
    """The others move up what the last step has not left there; generated tokens are there, and stay."""
    fixed = stream(60, 37, steps=5, layers=7)
    driven = drive(fixed, method_named("omnikv", filters=[1, 4]), 10, dense_layers=[0])
    everything, attended = 2 * (60 + 37 + 2 * 5) * ENTRY, 2 * 2 * (10 + 5) * ENTRY
    for layer, store in driven.engine.stores.items():
        far = layer in (3, 6)
        assert store.host_bytes() == (everything if far else 0)
        assert store.resident_bytes() == (attended if far else everything)
    moved, last = 0, dict[tuple[int, int], set[int]]()
    for at in (at for at in driven.seen if at.layer in (3, 6)):
        for row, seen in enumerate(at.lengths):
            (wanted,) = at.sets(row)
            moved += 2 * len(wanted - last.get((at.layer, row), set()) - {seen - 1})
            last[at.layer, row] = wanted
    assert driven.audit["moved_bytes_per_step"] == pytest.approx(moved * ENTRY / 5) and moved > 2 * 4 * 10
    assert driven.audit["whole_share"] == pytest.approx(4 / 6)
    mean = (2 * (10 + 3) + 4 * (97 / 2 + 3)) / 6  # of step 3, the middle one
    assert driven.audit["attended_mean"] == pytest.approx(mean), "layers that read everything count, too"


def test_a_filter_after_the_last_sparse_layer_is_none() -> None:
    driven = drive(stream(12, steps=1, layers=4), method_named("omnikv", filters=[1]), 5, dense_layers=[1, 2, 3])
    assert driven.audit["whole_share"] == 1


@pytest.mark.parametrize(
    ("layers", "dense", "whole"),
    [
        (32, [], {0, 1, 2, 3, 8, 9, 18, 19}),
        (30, [0, 1], {2, 3, 8, 9, 17, 18}),
        (32, [2, 8], {0, 1, 3, 4, 9, 10, 18, 19}),  # the next layer is a filter in place of a dense one
        (4, [], {0, 1, 2, 3}),
    ],
)
def test_filters_are_as_deep_as_the_published_ones(layers: int, dense: list[int], whole: set[int]) -> None:
    driven = drive(stream(12, steps=1, layers=layers), method_named("omnikv"), 5, dense_layers=dense)
    assert {at.layer for at in driven.seen if at.in_place} == whole


@pytest.mark.parametrize(
    ("filters", "line"),
    [
        ([2, 1], r"^omnikv: filters=\[2, 1\]: expected ascending layers, such as \[2,8,18\], or null$"),
        (3, "filters=3: expected ascending layers"),
        ([], "expected ascending layers"),
        ([0, 2], r"^filters=\[0, 2\]: the model has 2 layers$"),
    ],
)
def test_filters_are_layers_of_the_model(filters: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        drive(stream(12), method_named("omnikv", filters=filters), 5)
