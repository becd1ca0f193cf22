"""Spans that add up, bytes counted once, and the rule that is checked against what was attended."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from driver import SMALL, drive, numbers, run_loop, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import kvbench.spans
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.engine.audit import method_bytes
from kvbench.engine.batch import generate
from kvbench.kernels.lists import count_lists
from kvbench.method import Method, Prompt, Selection
from kvbench.spans import Spans

# -- spans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until it is told to go on."""

    class Clock:
        now = 0.0

        def tick(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(kvbench.spans.time, "perf_counter", lambda: clock.now)
    return clock


def test_span_inside_a_span_is_taken_off_the_outer_one(clock: Any) -> None:
    spans = Spans()
    with spans("outer"):
        clock.tick(1)
        with spans("inner"):
            clock.tick(2)
            with spans("innermost"):
                clock.tick(4)
            clock.tick(8)
        clock.tick(16)
        with spans("inner"):
            clock.tick(32)
    clock.tick(64)  # nothing is open
    assert spans.reset() == {"outer": 17, "inner": 42, "innermost": 4}
    assert spans.reset() == {}


def test_span_of_the_same_name_inside_counts_once(clock: Any) -> None:
    spans = Spans()
    with spans("attention"):
        clock.tick(1)
        with spans("attention"):
            clock.tick(2)
        clock.tick(4)
    assert spans.reset() == {"attention": 7}


def test_span_ends_with_an_error(clock: Any) -> None:
    spans = Spans()
    with pytest.raises(KeyError), spans("outer"):
        clock.tick(1)
        with spans("inner"):
            clock.tick(2)
            raise KeyError
    clock.tick(4)
    assert spans.reset() == {"outer": 1, "inner": 2}


@settings(max_examples=60)
@given(
    tree=st.recursive(
        st.integers(0, 9), lambda parts: st.lists(st.tuples(st.sampled_from("abc"), parts), max_size=4), max_leaves=20
    )
)
def test_parts_add_up_to_the_whole(tree: Any) -> None:
    """Any nesting: what all spans hold is the time that went by while one was open."""
    ticks = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvbench.spans.time, "perf_counter", lambda: float(ticks[0]))
        spans = Spans()

        def walk(node: Any) -> None:
            if isinstance(node, int):
                ticks[0] += node
                return
            for name, part in node:
                with spans(name):
                    walk(part)

        with spans("other"):
            walk(tree)
        assert sum(spans.reset().values()) == ticks[0]


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("name", ["full", "quest", "snapkv", "topk", "streaming_llm"])
def test_breakdown_of_a_step_adds_up_to_its_time(tiny: Loaded, name: str) -> None:
    generation, _ = run_loop(tiny, [numbers(150)], method_named(name), SMALL, steps=8)
    assert set(kvbench.spans.PARTS) <= set(generation.breakdown_ms)
    # the clock is read for the whole step just before its parts and just after them
    whole = sum(generation.step_ms) / len(generation.step_ms)
    assert sum(generation.breakdown_ms.values()) == pytest.approx(whole - 2)
    # and so for the prompts, and for what is asked of them
    assert sum(generation.prefill_ms.values()) == pytest.approx(generation.ttft_s * 1e3 - 4)
    assert generation.breakdown_ms["model"] > 0
    assert generation.breakdown_ms["attention"] > 0
    assert generation.breakdown_ms["index_build"] == 0, "no prompt is read while decoding"


@pytest.mark.usefixtures("ticking")
def test_method_may_name_spans_of_its_own(tiny: Loaded) -> None:
    class Napping(Method):
        def select(self, layer: int, query: torch.Tensor) -> None:
            with self.context.spans("nap"):
                for _ in range(9):
                    time.perf_counter()

    generation, _ = run_loop(tiny, [numbers(30)], Napping(), None, steps=3)
    assert generation.breakdown_ms["nap"] == pytest.approx(4 * 10), "of four layers"
    assert generation.breakdown_ms["select"] == pytest.approx(4 * 2), "before and after the nap"


# -- bytes a method holds ----------------------------------------------------------------------------------------------


class Holding(Method):
    """Holds what it is given."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Box:
    """Some other object in which a method keeps things."""

    def __init__(self, content: Any) -> None:
        self.content = content


def cycle() -> list[Any]:
    items: list[Any] = [torch.zeros(10)]
    items.append(items)
    return items


def test_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(100, dtype=torch.float32)
    assert method_bytes(Holding(a=whole)) == 400
    threads = ThreadPoolExecutor()
    threads.found = whole
    assert method_bytes(Holding(a=threads)) == 0, "threads are everybody's"
    assert method_bytes(Holding(a=whole[:10])) == 400, "a view keeps all of its storage alive"
    assert method_bytes(Holding(a=whole, b=whole[50:], c=[whole.view(10, 10)])) == 400
    assert method_bytes(Holding(a=whole, b=whole.clone())) == 800


def test_arrays_count_as_tensors_do() -> None:
    array = np.zeros(100, dtype=np.float64)
    assert method_bytes(Holding(a=array)) == 800
    assert method_bytes(Holding(a=array[:10], b=array[5:].reshape(5, 19))) == 800
    assert method_bytes(Holding(a=array, b=torch.from_numpy(array))) == 800, "the same memory, seen by both libraries"
    tensor = torch.zeros(100)
    assert method_bytes(Holding(a=tensor.numpy(), b=tensor)) == 400


@pytest.mark.parametrize(
    "content",
    [
        lambda tensor: [tensor],
        lambda tensor: (0, tensor),
        lambda tensor: {"x": [{"y": tensor}]},
        lambda tensor: deque([tensor]),
        Box,
        lambda tensor: [Box({0: tensor})],
        lambda tensor: {"a": tensor, "b": tensor},
    ],
)
def test_tensors_are_found_wherever_a_method_keeps_them(content: Any) -> None:
    assert method_bytes(Holding(held=content(torch.zeros(25)))) == 100


class Clinging(Method):
    """Holds on to the prompt's keys, in place in the store, and maybe has the store drop them."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops
        self.prompt_keys: dict[int, torch.Tensor] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.prompt_keys[layer] = prompt.keys
        if self.drops:
            self.view.keep(layer, torch.arange(10).expand(1, 1, 10))

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        return None


def test_keys_in_the_store_are_no_index_until_the_store_has_dropped_them(tiny: Loaded) -> None:
    for drops in (False, True):
        method = Clinging(drops)
        generation, _ = run_loop(tiny, [numbers(30)], method, None, steps=3)
        held = sum(keys.untyped_storage().nbytes() for keys in method.prompt_keys.values())
        assert held > 0
        assert generation.audit["index_bytes"] == (held if drops else 0)


def test_what_holds_itself_is_counted_once() -> None:
    assert method_bytes(Holding(items=cycle())) == 40


def test_parts_of_the_harness_are_not_the_methods() -> None:
    driven = drive(stream(60, 41), method_named("quest"), SMALL)
    pages, layers, batch, kv_heads, head_dim = 4, 2, 2, 2, 16
    bounds = 2 * kv_heads * head_dim * 4
    assert driven.audit["index_bytes"] == layers * batch * pages * bounds
    assert drive(stream(60), method_named("full"), None).audit["index_bytes"] == 0


# -- counting ----------------------------------------------------------------------------------------------------------


lists_of_ids = st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 6]), st.integers(0, 6)).flatmap(
    lambda shape: npst.arrays(np.int64, shape, elements=st.sampled_from([-1, 0, 1, 2, 63, 64, 200]))
)


@settings(max_examples=100)
@given(lists_of_ids)
def test_ids_are_counted_as_lists_and_sets_count_them(lists: np.ndarray) -> None:
    named, distinct = count_lists(lists, 2)  # KV heads, which may share a list, or ask for three each
    there = [
        [[int(token) for token in part.flat if token >= 0] for part in np.split(row, min(2, len(row)))] for row in lists
    ]
    there = [row * (2 // len(row)) for row in there]
    assert named.tolist() == [[len(tokens) for tokens in row] for row in there]
    assert distinct.tolist() == [[len(set(tokens)) for tokens in row] for row in there]


class Fixed(Method):
    """Attends as many tokens as it is told at each step, and says what it is told of its rule."""

    def __init__(self, counts: list[int], limit: int | None) -> None:
        self.counts, self.limit = counts, limit

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.asked: set[tuple[int, int]] = set()
        self.now = -1

    def step(self, *_: torch.Tensor) -> None:
        self.now += 1

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        return Selection(torch.arange(self.counts[self.now]).expand(self.shape.batch, 1, -1))

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        self.asked.add((length, generated))
        return self.limit


@pytest.mark.parametrize(
    ("counts", "limit", "over"),
    [([5, 5, 5, 5], 5, False), ([5, 5, 5, 6], 5, True), ([6, 1, 1, 1], 5, True), ([9, 9, 9, 9], None, False)],
)
def test_over_rule_remembers_any_step(counts: list[int], limit: int | None, over: bool) -> None:
    method = Fixed(counts, limit)
    audit = drive(stream(30, 20), method, 5).audit
    assert audit["over_rule"] is over
    assert audit["attended_max"] == max(counts)
    assert audit["attended_mean"] == pytest.approx(sum(counts) / 4)
    assert method.asked == {(length, step) for length in (30, 20) for step in (1, 2, 3, 4)}


def test_rule_of_each_row_is_its_own() -> None:
    class ByLength(Fixed):
        def rule(self, layer: int, length: int, generated: int) -> int:
            return length // 5

    assert not drive(stream(30, 30), ByLength([6] * 4, None), None).audit["over_rule"]
    assert drive(stream(30, 20), ByLength([6] * 4, None), None).audit["over_rule"]


class Uneven(Method):
    """Attends 12 tokens of one KV head and 8 of the other in layer 0, as many as it is told of both in layer 1."""

    def __init__(self, above: int) -> None:
        self.above = above

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        index = torch.arange(12).repeat(self.shape.batch, 2, 1)
        index[:, 1, 8:] = -1
        return Selection(index if layer == 0 else index[:, :1, : self.above])

    def rule(self, layer: int, length: int, generated: int) -> int:
        return 12

    def mean_rule(self, length: int, generated: int) -> float:
        return 9.5 if length < 30 else 12


@pytest.mark.parametrize(("above", "over"), [(9, False), (10, True)])
def test_a_rule_of_the_mean_is_one_over_all_heads_and_layers_of_a_row(above: int, over: bool) -> None:
    """No head attends more than it may, and 9.5 of the shorter row on average, or half an entry more."""
    driven = drive(stream(30, 20), Uneven(above), None)
    assert driven.audit["over_rule"] is over
    if over:
        said = "step 1: the KV heads attended 10.00 entries on average, the method's rule allows 9.5"
        assert driven.engine.audit.broken() == said


# -- generated tokens inside the budget --------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [33, 48, 100])
def test_counted_tokens_stay_inside_the_budget(tiny: Loaded, capacity: int) -> None:
    """Seventy steps: free, SnapKV keeps every generated token on top of C; counted, they push older ones out."""
    prompts, steps = [numbers(150, seed=1), numbers(97, seed=2)], 70
    attended = {}
    for generated in ("free", "counted"):
        engine = engine_for(
            tiny.model,
            list(map(len, prompts)),
            method_named("snapkv"),
            Budget(capacity, "paper", generated),  # type: ignore[arg-type]
            (),
            new_tokens=steps + 1,
        )
        audit = generate(ModelRunner(tiny.model), prompts, engine, max_new_tokens=steps + 1).audit
        assert not audit["over_rule"]
        attended[generated] = audit["attended_max"]
    assert attended == {"free": min(capacity, 150) + steps, "counted": capacity}


class Library:
    """Wraps memory that no Python object owns."""

    foreign_bytes = 64


def test_memory_of_a_library_counts_as_its_owner_tells() -> None:
    assert method_bytes(Holding(held=[Library(), torch.zeros(25)])) == 164


def test_a_method_inside_a_method_counts_without_the_harness_s_parts() -> None:
    inner = Holding(kept=torch.zeros(25), view=torch.zeros(100), context=torch.zeros(100))
    assert method_bytes(Holding(inner=inner, more=torch.zeros(1))) == 104


class Telling(Method):
    """Says how many steps it may have, and tries to speak for the audit."""

    def report(self) -> dict[str, float]:
        return {"steps_to_come": float(self.context.new_tokens or -1), "attended_max": 10**6}


def test_what_a_method_reports_stands_beside_the_audit_and_never_in_its_place() -> None:
    fixed = stream(30, steps=3)
    audit = drive(fixed, Telling(), None).audit
    assert (audit["steps_to_come"], audit["attended_max"]) == (3, 33)
    assert drive(fixed, Telling(), None, left=True).audit["steps_to_come"] == -1, "under generate nobody knows"
