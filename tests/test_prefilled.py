"""One prefill for many methods: each gets the bits of a run of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from driver import METHODS, SMALL, Attended, numbers, run_loop, same_attended, slow, watch

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.prefilled import Prefilled, prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.engine.request import chosen_tokens
from kvbench.method import Method, Needs

RAGGED = [numbers(150, seed=1), numbers(97, seed=2), numbers(60, seed=3)]
STEPS = 5


class Sums(Method):
    """Keeps the tokens that received most attention (H2O's prefill)."""

    needs = Needs(query_window=3, attention_sums=True)

    def prefill(self, layer: int, prompt: Any) -> None:
        assert prompt.queries.shape[2] == 3
        best = prompt.attention_sums.masked_fill(~self.real(prompt), -1).topk(20, dim=2).indices
        self.view.keep(layer, best[:, :: self.shape.group])

    @staticmethod
    def real(prompt: Any) -> torch.Tensor:
        valid = prompt.valid()
        return torch.ones(1, dtype=torch.bool) if valid is None else valid[:, None]


def hosted_quest() -> Method:
    method = method_named("quest")
    method.needs = replace(method.needs, home="host")
    return method


ARMS: dict[str, Callable[[], Method]] = {
    **{case.id: case.build for case in METHODS},
    "quest at home on the host": hosted_quest,
    "attention sums": Sums,
}


@dataclass
class Ran:
    """What an arm generated: its tokens, the audit, the selections, and the logits of its decode steps."""

    tokens: list[list[int]]
    audit: dict[str, Any]
    seen: list[Attended]
    logits: torch.Tensor


def ran(loaded: Loaded, arm: str, prefilled: Prefilled | None, chunk: int | None, accounting: str) -> Ran:
    method = ARMS[arm]()
    seen = watch(method)
    logits: list[torch.Tensor] = []

    def note(_: Any, __: Any, out: torch.Tensor) -> None:
        if len(out) == len(RAGGED) and out.shape[1] == 1:
            logits.append(out.clone())

    hook = loaded.model.lm_head.register_forward_hook(note)
    try:
        generation, _ = run_loop(
            loaded,
            RAGGED,
            method,
            SMALL,
            accounting=accounting,
            steps=STEPS,
            prefilled=prefilled,
            prefill_chunk=chunk,
        )
    finally:
        hook.remove()
    assert generation.shared_prefill == (prefilled is not None)
    return Ran(generation.tokens, generation.audit, seen, torch.stack(logits[-STEPS:]))


def snapshot(loaded: Loaded, chunk: int | None) -> Prefilled:
    needs = [build().needs for build in ARMS.values()]
    lengths = {"max_new_tokens": STEPS + 1, "chunk": chunk}
    return prefill_once(loaded.model, RAGGED, needs, tokenizer=loaded.tokenizer, **lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk", "accounting"),
    [
        ("dummy-tiny", 64, "unified"),
        *slow(("dummy-mistral", 64, "paper"), ("dummy-qwen3", None, "paper")),
    ],
)
def test_every_method_gets_the_bits_of_its_own_run_in_any_order(
    dummies: Callable[[str], Loaded], name: str, chunk: int | None, accounting: str
) -> None:
    loaded = dummies(name)
    alone = {arm: ran(loaded, arm, None, chunk, accounting) for arm in ARMS}
    shared = snapshot(loaded, chunk)
    order = random.Random(0).sample(list(ARMS), k=len(ARMS))
    for arm in order + order[::-1]:
        ours, own = ran(loaded, arm, shared, chunk, accounting), alone[arm]
        assert ours.tokens == own.tokens, arm
        assert ours.audit == own.audit, arm
        assert same_attended(ours.seen, own.seen), arm
        assert torch.equal(ours.logits, own.logits), arm
    different = {tuple(map(tuple, own.tokens)) for own in alone.values()}
    assert len(different) > 2, "arms that all generate the same show little"


@pytest.mark.slow  # all methods
def test_no_method_writes_into_the_prompt(tiny: Loaded) -> None:
    shared = snapshot(tiny, None)
    _, engine = run_loop(tiny, RAGGED, ARMS["full"](), None, steps=STEPS, prefilled=shared)

    def prompt() -> list[torch.Tensor]:
        return [
            block[row, :, : len(ids)].clone()
            for store in engine.stores.values()
            for block in (store.device.key, store.device.value)
            for row, ids in enumerate(RAGGED)
        ]

    before, pointers = prompt(), [store.device.key.data_ptr() for store in engine.stores.values()]
    after = engine.stores[0].device.key[0, :, len(RAGGED[0]) :].clone()
    for arm in ARMS:
        ran(tiny, arm, shared, None, "paper")
    assert [store.device.key.data_ptr() for store in engine.stores.values()] == pointers
    assert all(map(torch.equal, prompt(), before))
    assert not torch.equal(engine.stores[0].device.key[0, :, len(RAGGED[0]) :], after), (
        "the arms share no memory with this"
    )


def fresh_engine(loaded: Loaded, arm: str, lengths: list[int] | None = None, new_tokens: int = STEPS + 1) -> Any:
    lengths = lengths or [len(prompt) for prompt in RAGGED]
    return engine_for(loaded.model, lengths, ARMS[arm](), Budget(SMALL), (), new_tokens=new_tokens)


@torch.inference_mode()
@pytest.mark.parametrize("arm", ["full", "snapkv", "quest at home on the host"])
def test_method_that_began_earlier_must_not_go_on(tiny: Loaded, arm: str) -> None:
    shared = snapshot(tiny, None)
    early, late = fresh_engine(tiny, arm), fresh_engine(tiny, "quest")
    shared.lend(early)
    runner = ModelRunner(tiny.model)
    early_passes = runner.passes(early)
    tokens = early_passes.next_tokens(chosen_tokens(shared.logits))
    shared.lend(late)
    with pytest.raises(RuntimeError, match="another method has begun"):
        early_passes.next_tokens(tokens)
    assert torch.isfinite(runner.passes(late).next_tokens(chosen_tokens(shared.logits))).all()


@torch.inference_mode()
def test_what_was_not_recorded_is_refused_and_hurts_nobody(tiny: Loaded) -> None:
    shared = prefill_once(tiny.model, RAGGED, [Needs(query_window=16)], max_new_tokens=STEPS + 1)
    held = fresh_engine(tiny, "snapkv-kvpress")  # a window of 16
    shared.lend(held)
    for arm in ("snapkv", "attention sums"):  # a window of 32; sums
        with pytest.raises(ValueError, match="recorded less"):
            shared.lend(fresh_engine(tiny, arm))
    with pytest.raises(ValueError, match="150, 97, 60"):
        shared.lend(fresh_engine(tiny, "full", [150, 97, 61]))
    ModelRunner(tiny.model).passes(held).next_tokens(chosen_tokens(shared.logits))


@torch.inference_mode()
def test_short_prompts_record_the_window_they_have(tiny: Loaded) -> None:
    shared = prefill_once(tiny.model, [numbers(9)], [Needs(query_window=9)], max_new_tokens=2)
    engine = fresh_engine(tiny, "snapkv", [9], new_tokens=2)
    shared.lend(engine)
    assert engine.prefilled


def test_more_tokens_than_the_prefill_left_room_for_are_refused(tiny: Loaded) -> None:
    shared = prefill_once(tiny.model, RAGGED, [], max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens"):
        run_loop(tiny, RAGGED, ARMS["full"](), None, steps=STEPS, prefilled=shared)


def test_first_tokens_are_those_of_a_prefill(tiny: Loaded) -> None:
    generation, _ = run_loop(tiny, RAGGED, ARMS["full"](), None, steps=0)
    shared = snapshot(tiny, 40)
    assert chosen_tokens(shared.logits).tolist() == [row[0] for row in generation.tokens]
    assert shared.lengths == (150, 97, 60)
