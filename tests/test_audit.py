"""The audit finds a method that breaks its rule, and counts the memory of those that drop tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import (
    METHODS,
    PROMPT,
    SMALL,
    attended_per_kv_head,
    drive,
    each_accounting,
    numbers,
    run_loop,
    stream,
    watch,
)

from kvbench.attention import executor as attention
from kvbench.backends.hf.loading import Loaded
from kvbench.engine.engine import Engine
from kvbench.memory.device import whole_pages
from kvbench.method import Extra, Method, Prompt, Selection


def test_audit_may_count_unions_on_some_steps_only(tiny: Loaded) -> None:
    """Per-query-head selections are counted on steps 0, 3, ...; the others tell nothing about the union."""
    case = next(case for case in METHODS if case.id == "topk")
    method = case.build()
    seen = watch(method)
    generation, _ = run_loop(tiny, [PROMPT], method, SMALL, steps=8, audit_every=3)
    counts = [count for at in seen if at.step % 3 == 1 for count in attended_per_kv_head(at, 2, 0)]
    assert generation.audit["attended_mean"] == pytest.approx(sum(counts) / len(counts), rel=1e-12)
    assert generation.audit["attended_max"] == max(counts)


class Greedy(Method):
    """Attends more than the budget it declares as its rule (or a token twice), in the way it is told."""

    def __init__(self, select: Callable[[int, int], Selection | None]) -> None:
        self.choose = select

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        return self.choose(len(self.shape.lengths), self.view.lengths(layer)[0])


def extra_entry() -> Extra:
    return Extra(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), torch.zeros(1, 4, 1))


CHEATS: dict[str, Callable[[int, int], Selection | None]] = {
    "one too many": lambda batch, length: Selection(torch.arange(11).expand(batch, 1, 11)),
    "one too many in one head": lambda batch, length: Selection(
        torch.tensor([[list(range(10)) + [-1], list(range(11))]])
    ),
    "too many by the union": lambda batch, length: Selection(
        torch.arange(24).view(1, 4, 6)
    ),  # 6 a query head, 12 a KV head
    "everything": lambda batch, length: None,
    "an extra entry": lambda batch, length: Selection(torch.arange(10).expand(batch, 1, 10), extra=extra_entry()),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_audit_finds_a_method_that_breaks_its_rule(cheat: str) -> None:
    assert drive(stream(30), Greedy(CHEATS[cheat]), 10).audit["over_rule"]


def test_audit_accepts_a_method_that_keeps_its_rule() -> None:
    driven = drive(stream(30), Greedy(lambda batch, length: Selection(torch.arange(10).expand(batch, 2, 10))), 10)
    assert driven.audit["attended_max"] == 10
    assert not driven.audit["over_rule"]


def test_audit_counts_a_token_for_both_heads_of_a_group_once() -> None:
    driven = drive(stream(30), Greedy(lambda batch, length: Selection(torch.arange(6).expand(batch, 4, 6))), 6)
    assert driven.audit["attended_max"] == 6
    assert not driven.audit["over_rule"]


def test_token_selected_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="layer 0: .* twice"):
        drive(stream(30), Greedy(lambda batch, length: Selection(torch.tensor([[[3, 4, 3]]]))), 10)


@pytest.mark.parametrize("token", [34, 31])
@pytest.mark.parametrize("executor", attention.EXECUTORS)
def test_token_that_is_not_there_is_an_error(executor: str, token: int) -> None:
    """31 would be the second generated token, at the first step."""
    with pytest.raises(LookupError):
        drive(stream(30), Greedy(lambda b, n: Selection(torch.tensor([[[token]]]))), 10, executor=executor)


@each_accounting
def test_snapkv_frees_device_memory(tiny: Loaded, accounting: str) -> None:
    prompt, steps = numbers(600), 40
    cases = {case.id: case for case in METHODS}
    allocated, audited = {}, {}
    for name in ("full", "snapkv"):
        generation, engine = run_loop(tiny, [prompt], cases[name].build(), SMALL, accounting=accounting, steps=steps)
        allocated[name] = sum(store.allocated_bytes() for store in engine.stores.values())
        audited[name] = generation.audit["device_kv_bytes"]
    token = 4 * 2 * 2 * 32 * 4  # layers, KV heads, key and value, head size, fp32
    assert audited["full"] == (len(prompt) + steps) * token
    assert audited["snapkv"] <= (SMALL + steps) * token
    assert allocated["snapkv"] <= whole_pages(SMALL + steps + 1) * token
    assert allocated["full"] >= audited["full"]


@pytest.mark.parametrize("name", ["streaming_llm", "snapkv", "cake", "squeeze", "razor", "h2o", "scope"])
def test_what_drops_tokens_as_it_goes_reserves_memory_for_those_that_come_before(name: str) -> None:
    fixed = stream(150, 150, steps=200)
    allocated: list[int] = []

    def note(engine: Engine) -> None:
        allocated.append(sum(store.allocated_bytes() for store in engine.stores.values()))

    case = next(case for case in METHODS if case.id == name)
    note(drive(fixed, case.build(), SMALL, accounting="unified", after_prefill=note).engine)
    token = 2 * 2 * 2 * fixed.keys.shape[4] * 4  # rows, KV heads, key and value, head size, fp32
    most = 150 if name == "razor" else 2 * SMALL  # of a layer: some of Razor's heads keep the prompt
    assert max(allocated) <= 2 * whole_pages(most + 32 + 1) * token


class HeadBudgets(Method):
    """Keeps 100 tokens of one KV head and 8 of the other."""

    def prefill(self, layer: int, prompt: Prompt) -> None:
        index = torch.full((len(self.shape.lengths), 2, 100), -1)
        index[:, 0], index[:, 1, :8] = torch.arange(100), torch.arange(8)
        self.view.keep(layer, index)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_the_audit_counts_what_unequal_heads_hold_and_what_they_take(dtype: torch.dtype) -> None:
    fixed = stream(150, 150, steps=4, dtype=dtype)
    driven = drive(fixed, HeadBudgets(), None)
    token = 2 * fixed.keys.shape[4] * dtype.itemsize
    assert driven.audit["device_kv_bytes"] == 2 * 2 * (100 + 8 + 2 * 4) * token
    stored = [part for store in driven.engine.stores.values() for part in store.device.pool]
    taken = sum(part.untyped_storage().nbytes() for part in stored)
    held = 2 * 2 * (whole_pages(100 + 4) + whole_pages(8 + 4)) * token
    assert driven.audit["device_kv_allocated_bytes"] == taken == held
