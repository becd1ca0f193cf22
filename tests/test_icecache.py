"""IceCache as a method: its regions, what it attends and moves, and what it does with keys that are no good."""

from __future__ import annotations

import weakref
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from driver import Inline, Stream, drive, stream

import kvbench.engine.engine
from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, bind_methods, method_config
from kvbench.method import Prompt

bind_methods()

from methods.icecache import IceCache  # noqa: E402
from methods.icecache.index import DCITree  # noqa: E402

# Small pages and large promoted shares: a hundred keys make three or four levels and many pages.
SMALL_TREES: dict[str, Any] = {"page_size": 4, "small_page_size": 4, "promotion": [0.15, 0.3]}


def small(**options: Any) -> IceCache:
    return method_named("icecache", **{**SMALL_TREES, **options})


def pages_of(tree: DCITree, sinks: int) -> list[list[int]]:
    """The tokens of every page in use."""
    pages = tree.tokens(np.arange(tree.pages, dtype=np.int32))
    return [[sinks + token for token in page if token >= 0] for page in pages.tolist() if max(page) >= 0]


# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "page_size", "recalled"),
    [(40, 8, 1), (64, 8, 4), (100, 8, 8), (127, 8, 11), (128, 16, 4), (256, 16, 12)],
)
def test_budget_is_page_slots_of_sinks_window_and_recalled(budget: int, page_size: int, recalled: int) -> None:
    """Four slots are fixed; a remainder smaller than a page is left."""
    method = method_named("icecache")
    drive(stream(20, steps=1, layers=1), method, budget)
    (regions,) = method.regions
    assert (regions.page_size, regions.recalled, regions.sinks) == (page_size, recalled, 2 * page_size)
    assert (4 + recalled) * page_size <= budget < (5 + recalled) * page_size
    for length in range(5 * page_size, 9 * page_size):
        assert regions.window(length) % page_size == 0
        assert page_size < length - regions.window(length) <= 2 * page_size


@pytest.mark.parametrize("options", [{}, {"window_pages": 1}, {"sink_pages": 0}, {"split": "greedy"}], ids=str)
def test_every_past_token_is_in_exactly_one_of_sinks_index_and_window(options: dict[str, Any]) -> None:
    """Rows that begin with many, few and no indexed tokens, while the window rolls over ten pages."""
    method, checked = small(**options), 0
    select = method.select

    def checked_select(layer: int, query: torch.Tensor) -> Any:
        nonlocal checked
        for row, length in enumerate(method.view.lengths(layer)):
            regions = method.regions[row]
            for tree in method.trees[layer][row]:
                fixed = [*range(min(length, regions.sinks)), *range(regions.window(length), length)]
                indexed = sum(pages_of(tree, regions.sinks), [])
                assert sorted(fixed + indexed) == list(range(length))
                checked += 1
        return select(layer, query)

    method.select = checked_select  # type: ignore[method-assign]
    drive(stream(120, 24, 5, steps=42), method, 48)
    assert checked == 42 * 2 * 3 * 2


# -- what is attended --------------------------------------------------------------------------------------------------


def interleaved(lists: list[list[int]], count: int) -> list[int]:
    """Rank 0 of every list, then rank 1, ..., without repeats."""
    return list(dict.fromkeys(entry for rank in zip(*lists, strict=True) for entry in rank))[:count]


@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_attended_are_the_fixed_pages_and_the_best_pages_of_the_group(accounting: str) -> None:
    """By a plain reading: a page is as good as its best key, and the two query heads take turns."""
    fixed, method, budget = stream(140, 90, steps=10), small(index="exact"), 48
    select, compared = method.select, 0

    def checked_select(layer: int, query: torch.Tensor) -> Any:
        nonlocal compared
        selection = select(layer, query)
        for row, length in enumerate(method.view.lengths(layer)):
            regions = method.regions[row]
            first = [*range(length - 1, regions.window(length) - 1, -1), *range(regions.sinks)]
            for head, tree in enumerate(method.trees[layer][row]):
                pages = pages_of(tree, regions.sinks)
                keys = fixed.keys[layer, row, head].double()
                lists = []
                for asked in query[row, 2 * head : 2 * head + 2, 0].double():
                    scores = [float((keys[page] @ asked).max()) for page in pages]
                    lists.append(sorted(range(len(pages)), key=lambda page, scores=scores: -scores[page]))
                slots = regions.recalled if accounting == "paper" else 2 * regions.recalled
                recalled = sum((pages[page] for page in interleaved(lists, slots)), [])
                expected = (first + recalled)[:budget]
                got = [token for token in selection.index[row, head].tolist() if token >= 0]
                assert sorted(got) == sorted(expected)
                assert accounting == "paper" or len(got) == budget
                compared += 1
        return selection

    method.select = checked_select  # type: ignore[method-assign]
    drive(fixed, method, budget, accounting=accounting)
    assert compared == 10 * 2 * 2 * 2


def selected(fixed: Stream, budget: int = 48, **options: Any) -> list[list[set[int]]]:
    driven = drive(fixed, small(**options), budget)
    return [at.sets(row) for at in driven.seen for row in range(len(fixed.lengths))]


def test_looking_into_every_node_finds_what_the_exact_scan_finds() -> None:
    fixed = stream(300, 150, steps=10)
    exact = selected(fixed, index="exact")
    assert selected(fixed, fov=10**6) == exact
    assert selected(fixed, fov=10**6, rank_by="centroid") == exact


def test_options_change_what_is_attended() -> None:
    fixed = stream(500, steps=4)
    options: list[dict[str, Any]] = [
        {},
        {"fov": 1},
        {"levels": "random"},
        {"levels": "counter_ceil"},
        {"parents": "anchored", "anchors": [20, 2, 0.9], "exhaustive_below": 200},
        {"split": "greedy"},
        {"remainder": "last"},
        {"fov": 12, "rank_by": "centroid"},
        {"projections": [1, 1]},
        {"promotion": [0.3, 0.3]},
        {"sink_pages": 1},
    ]
    found = [selected(fixed, **one) for one in options]
    assert all(found[a] != found[b] for a in range(len(found)) for b in range(a))


def in_dtype(fixed: Stream, dtype: torch.dtype) -> Stream:
    return replace(fixed, queries=fixed.queries.to(dtype), keys=fixed.keys.to(dtype), values=fixed.values.to(dtype))


# -- the host ----------------------------------------------------------------------------------------------------------


def test_pages_are_blocks_of_host_memory_in_their_order() -> None:
    method = small()
    engine = drive(stream(130, 70, 20, steps=1), method, 48).engine
    for layer in (0, 1):
        host = engine.stores[layer].host
        assert host is not None
        for row, head in np.ndindex(3, 2):
            regions, tree = method.regions[row], method.trees[layer][row][head]
            order = [*range(regions.sinks), *sum(pages_of(tree, regions.sinks), [])]
            assert host.slot_of[row, head, order].tolist() == list(range(len(order)))
    assert not torch.equal(host.slot_of[0, 0], torch.arange(host.capacity)), "nothing was arranged"


def test_only_tokens_that_were_not_there_are_moved() -> None:
    """A step moves what it attends, less the current token and what the last step attended."""
    fixed, method = stream(140, 60, steps=20), small()
    driven = drive(fixed, method, 48)
    moved, last = 0, {}
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            for head, wanted in enumerate(at.sets(row)):
                moved += len(wanted - last.get((at.layer, row, head), set()) - {length - 1})
                last[at.layer, row, head] = wanted
    assert driven.audit["moved_bytes_per_step"] * fixed.steps == moved * 2 * 16 * 4
    assert driven.audit["device_kv_bytes"] <= 2 * 2 * 2 * 48 * 2 * 16 * 4
    assert driven.audit["read_bytes_per_step"] > 0


def test_long_generation_through_growing_memory_changes_nothing() -> None:
    """Seventy pages leave the window; under left padding the store's final length is unknown, and it grows twice."""
    fixed = stream(100, 60, steps=300, layers=1)
    known, grown = drive(fixed, small(), 48), drive(fixed, small(), 48, left=True)
    assert [at.sets(row) for at in known.seen for row in (0, 1)] == [
        at.sets(row) for at in grown.seen for row in (0, 1)
    ]
    torch.testing.assert_close(known.outputs, grown.outputs, rtol=0, atol=1e-5)
    assert {"insert", "query"} <= known.engine.spans.seconds.keys()


@pytest.mark.slow
def test_four_thousand_generated_tokens_are_found_as_well_as_a_prompt_of_them() -> None:
    """Keys drift away from those of the first prompt; a query asks for one token of the past, near or far."""
    total, last = 4400, 800
    fixed = stream(400, steps=total - 400, layers=1, query_heads=2, kv_heads=1)
    rng = torch.Generator().manual_seed(1)
    fixed.keys[0, 0, 0, :, 0] += torch.linspace(-3, 3, total)
    asked = (torch.rand(2, total, generator=rng) * (torch.arange(total) - 40).clamp(min=1)).long()
    fixed.queries[0, 0] = fixed.keys[0, 0, 0, asked] - fixed.keys[0, 0, 0].mean(dim=0)
    logits = fixed.queries[0, 0] @ fixed.keys[0, 0, 0].T

    def recall(prompt: int) -> float:
        method = method_named("icecache", page_size=4, small_page_size=4)
        driven = drive(replace(fixed, lengths=(prompt,), steps=total - prompt), method, 64)
        (tree,), regions = method.trees[0][0], method.regions[0]
        in_place = [*range(regions.sinks), *range(regions.window(total), total)]
        assert sorted(in_place + sum(pages_of(tree, regions.sinks), [])) == list(range(total))
        return float(
            np.mean(
                [
                    np.isin(logits[:, at.lengths[0] - 1, : at.lengths[0]].topk(16).indices, at.index)
                    for at in driven.seen[-last:]
                ]
            )
        )

    generated, read = recall(400), recall(total - last)
    assert generated > read - 0.02 and read > 0.4, (generated, read)


# -- prefill and reuse -------------------------------------------------------------------------------------------------


def test_trees_built_beside_the_prefill_are_those_built_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = stream(600, 333, steps=20, layers=4)
    ahead, in_turn = small(), small()
    pooled = drive(fixed, ahead, 48)
    monkeypatch.setattr(kvbench.engine.engine, "worker_pool", Inline)
    serial = drive(fixed, in_turn, 48)
    assert torch.equal(pooled.outputs, serial.outputs)
    for layer, row, head in np.ndindex(4, 2, 2):
        ours, theirs = ahead.trees[layer][row][head].arrays, in_turn.trees[layer][row][head].arrays
        assert all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


class Late(Executor):
    """Runs what is submitted when its result is asked for."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.result = lambda timeout=None: fn(*args, **kwargs)  # type: ignore[method-assign]
        return future


def test_builds_that_wait_do_not_hold_the_prompt_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbench.engine.engine, "worker_pool", Late)
    method, prompts = small(), []
    prefill, end_prefill = method.prefill, method.end_prefill

    def watched_prefill(layer: int, prompt: Prompt) -> None:
        prompts.append(weakref.ref(prompt))
        prefill(layer, prompt)

    def watched_end_prefill() -> None:
        assert all(prompt() is None for prompt in prompts[:-1]), "but for the layer at hand"
        end_prefill()

    method.prefill, method.end_prefill = watched_prefill, watched_end_prefill  # type: ignore[method-assign]
    drive(stream(150, layers=3), method, 48)
    assert len(prompts) == 3


@pytest.mark.parametrize("dense_layers", [(), (1,)], ids=str)
def test_reused_layers_attend_what_their_anchor_found(dense_layers: tuple[int, ...]) -> None:
    fixed = stream(150, 90, steps=12, layers=6)
    own, shared = small(), small(reuse=3)
    alone, reused = (drive(fixed, method, 48, dense_layers=dense_layers) for method in (own, shared))
    sparse = [layer for layer in range(6) if layer not in dense_layers]
    anchors = {layer: sparse[index - index % 3] for index, layer in enumerate(sparse)}
    assert set(shared.trees) == set(anchors.values())
    index = {(at.step, at.layer): at.index for at in reused.seen}
    expected = {(at.step, at.layer): at.index for at in alone.seen}
    for (step, layer), found in index.items():
        assert torch.equal(found, expected[step, anchors[layer]])
    for anchor in anchors.values():
        assert torch.equal(reused.outputs[:, anchor], alone.outputs[:, anchor])
    for layer, anchor in anchors.items():
        ours, theirs = reused.engine.stores[layer].host, reused.engine.stores[anchor].host
        assert ours is not None and theirs is not None and torch.equal(ours.slot_of, theirs.slot_of)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"small_page_size": 32}, "small_page_size=32: at most page_size=16"),
        ({"promotion": [0.1, 1.5]}, "shares lie between 0 and 1"),
        ({"promotion": [0.1]}, "two numbers"),
        ({"projections": [1, 0]}, r"projections=\(1, 0\)"),
        ({"prop_to_retrieve": 0.0}, "prop_to_retrieve=0.0"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        method_config("icecache", **options).build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["zero", "repeated", "equal"])
@pytest.mark.parametrize("options", [{}, {"split": "greedy", "rank_by": "centroid"}, {"projections": [1, 1]}], ids=str)
def test_keys_that_cannot_be_told_apart_fill_the_budget(kind: str, options: dict[str, Any]) -> None:
    fixed = stream(150, 90, steps=10)
    if kind == "zero":
        fixed.keys[..., ::3, :] = 0
    elif kind == "repeated":
        fixed.keys[:] = fixed.keys[..., torch.arange(fixed.keys.shape[3]) // 20, :]
    else:
        fixed.keys[:] = fixed.keys[..., :1, :]
    driven = drive(fixed, small(**options), 48)
    assert bool(driven.outputs.isfinite().all())
    assert driven.audit["attended_max"] <= 48
    assert all(len(ids) > 30 for at in driven.seen for row in (0, 1) for ids in at.sets(row))


@pytest.mark.parametrize("length", [1, 7, 20])
def test_a_prompt_shorter_than_the_fixed_pages_grows_into_the_index(length: int) -> None:
    method = method_named("icecache")
    driven = drive(stream(length, steps=70, layers=1), method, 40)
    for at in driven.seen:
        (now,) = at.lengths
        fixed = {*range(min(16, now)), *range(method.regions[0].window(now), now)}
        assert all(fixed <= ids and len(ids) <= 40 for ids in at.sets(0))
        assert now > 40 or all(ids == set(range(now)) for ids in at.sets(0))
    assert len(method.trees[0][0][0]) > 30


def test_budget_of_a_short_prompt_s_fraction_is_kept() -> None:
    driven = drive(stream(20, steps=10), method_named("icecache"), 1.0)
    assert driven.audit["attended_max"] == 20 and not driven.audit["over_rule"]


def test_half_precision_without_bfloat16_s_range_is_refused() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        drive(in_dtype(stream(60), torch.float16), small(), 48)
