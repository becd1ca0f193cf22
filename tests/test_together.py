"""Generations in one decode pass: each is what it is alone, but for rounding, and nobody notices another's end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import SMALL, Case, each_method, numbers, scores_of, slow
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import WINDOW, random_model

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.prefilled import Prefilled, prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.hf.sampling import Sampler
from kvbench.budget import Budget
from kvbench.engine.batch import Batch, collecting_later, generate
from kvbench.engine.batch import Sequence as Decoded
from kvbench.engine.engine import Engine
from kvbench.engine.request import GenerationRequest, QuestionTokens, Stops
from kvbench.memory import transfer
from kvbench.memory.transfer import Original
from kvbench.method import Method, Needs, Selection

STEPS = 7
LENGTHS = (150, 97)
NO = Needs()
ALL = Needs(query_window=150, attention_sums=True, layer_similarity=True)


def engine(loaded: Loaded, method: Method, lengths: Sequence[int], **more: Any) -> Engine:
    budget = Budget(None if type(method) is Method else SMALL)
    settings: dict[str, Any] = {"new_tokens": STEPS + 1, "head_scores": scores_of(loaded.model), **more}
    return engine_for(loaded.model, lengths, method, budget, (), loaded.tokenizer, **settings)


def prefilled(loaded: Loaded, *prompts: Sequence[int], copies: bool = True, needs: Needs = NO) -> Prefilled:
    own, tokenizer = [ALL, needs], loaded.tokenizer
    return prefill_once(loaded.model, prompts, own, max_new_tokens=STEPS + 1, tokenizer=tokenizer, copies=copies)


class Rows:
    """Generations of one decode pass, and the logits that each was given.

    Attributes:
        logits: [steps, rows, vocabulary] of each, in the order in which they joined.
        made: by each, once it has left.
        errors: why it left, or None.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.runner = loaded, ModelRunner(loaded.model)
        self.rows = Batch(self.runner)
        self.logits: list[list[torch.Tensor]] = []
        self.generated: dict[int, list[list[int]]] = {}
        self.errors: dict[int, Exception | None] = {}
        self.audits: dict[int, dict[str, Any]] = {}
        self._names: dict[Decoded, int] = {}

    def join(self, method: Method, prompt: Prefilled, **more: Any) -> Decoded:
        own = engine(self.loaded, method, prompt.lengths, samples=["one"])
        self.logits.append(noted := list[torch.Tensor]())
        options: dict[str, Any] = {"max_new_tokens": STEPS + 1, "watch": lambda one: noted.append(one.clone()), **more}
        decoded = Decoded(self.runner, own, (), prompt).ask(GenerationRequest(**options))
        self._names[decoded] = len(self._names)
        self.rows.join(decoded)
        return decoded

    def step(self) -> None:
        for decoded, error in self.rows.step():
            name = self._names[decoded]
            self.generated[name], self.errors[name] = decoded.generated, error
            if error is None:
                self.audits[name] = decoded.conclude().audit

    def finish(self) -> None:
        while self.rows.rows:
            self.step()

    def of(self, name: int) -> torch.Tensor:
        return torch.stack(self.logits[name])


def alone(loaded: Loaded, method: Method, *prompts: Sequence[int], **more: Any) -> tuple[torch.Tensor, Any]:
    """Logits [steps, rows, vocabulary] of a generation by itself, and what it came to."""
    noted: list[torch.Tensor] = []
    shared = prefilled(loaded, *prompts, copies=False, needs=method.needs)
    own = engine(loaded, method, [len(prompt) for prompt in prompts], samples=["one"])
    options = {"max_new_tokens": STEPS + 1, "watch": lambda one: noted.append(one.clone()), **more}
    made = generate(ModelRunner(loaded.model), prompts, own, prefilled=shared, **options)
    return torch.stack(noted), made


@each_method
def test_a_row_among_others_has_the_logits_that_it_has_alone(case: Case, any_model: Loaded) -> None:
    """Beside full attention from the same memory, and rows of another length, of which some join and leave before."""
    prompts = [numbers(length, seed) for seed, length in enumerate(LENGTHS)]
    shared = [prefilled(any_model, prompt, needs=case.build().needs) for prompt in prompts]
    rows = Rows(any_model)
    rows.join(method_named("streaming_llm"), shared[1], max_new_tokens=3)
    rows.step()
    rows.join(Method(), shared[0])
    rows.join(case.build(), shared[0])
    rows.join(case.build(), shared[1])
    rows.finish()
    for name, (method, prompt) in enumerate([(Method(), 0), (case.build(), 0), (case.build(), 1)], 1):
        logits, made = alone(any_model, method, prompts[prompt])
        assert (rows.of(name) - logits).abs().max() <= 1e-4
        assert rows.generated[name] == made.tokens, "no tie in these"
        apart = {"index_bytes"}  # a heap's growth depends on the order of other work
        assert {key: rows.audits[name][key] for key in made.audit.keys() - apart} == pytest.approx(
            {key: made.audit[key] for key in made.audit.keys() - apart}
        )


@pytest.mark.parametrize("family", ["gemma3_text", *slow("gpt_oss", "gemma2")])
def test_windows_of_unequal_rows_are_one(family: str) -> None:
    """Shorter and longer than the window, an engine of two rows among them, and one that leaves."""
    model = random_model(family)
    use_kvbench_attention(model)
    loaded: Any = SimpleNamespace(model=model, tokenizer=None)
    prompts = [numbers(length, seed) for seed, length in enumerate((2 * WINDOW, WINDOW // 2, WINDOW + 20, WINDOW - 5))]
    arms = [(method_named("snapkv"), prompts[:1]), (Method(), prompts[1:2]), (Method(), prompts[2:])]
    rows = Rows(loaded)
    rows.join(arms[0][0], prefilled(loaded, *arms[0][1]))
    rows.join(arms[1][0], prefilled(loaded, *arms[1][1]), max_new_tokens=4)
    rows.step()
    rows.join(arms[2][0], prefilled(loaded, *arms[2][1]))
    rows.finish()
    for number, (method, own) in enumerate(arms):
        (logits, made), seen = alone(loaded, method, *own), rows.of(number)
        assert (seen - logits[: len(seen)]).abs().max() <= 1e-4 and len(seen) == (3 if number == 1 else STEPS)
        if number != 1:
            kept = ("windowed_share", "windowed_kv_bytes", "device_kv_bytes")
            assert {key: rows.audits[number][key] for key in kept} == {key: made.audit[key] for key in kept}


def test_the_same_composition_gives_the_same_bits(tiny: Loaded) -> None:
    prompt = prefilled(tiny, numbers(150))
    found = []
    for _ in range(2):
        rows = Rows(tiny)
        for name in ("full", "quest", "snapkv"):
            rows.join(Method() if name == "full" else method_named(name), prompt)
        rows.finish()
        found.append(torch.stack([rows.of(name) for name in range(3)]))
    assert torch.equal(*found)


class Failing(Method):
    """Goes wrong in one layer of its third step."""

    def __init__(self, how: str) -> None:
        self.how, self.steps = how, 0

    def step(self, *_: torch.Tensor) -> None:
        self.steps += 1
        if self.steps == 3 and self.how == "step":
            raise RuntimeError("lost the count")

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        if self.steps == 3 and self.how == "select" and layer == 1:
            raise MemoryError("no room for an index")
        if self.steps == 3 and self.how == "nan":
            query.fill_(torch.nan)  # the engine's own rows of the batch
        return None


@pytest.mark.parametrize("how", ["step", "select", "nan"])
def test_a_row_that_fails_touches_no_other(how: str, tiny: Loaded) -> None:
    prompt = prefilled(tiny, numbers(150))

    def others(failing: bool) -> Rows:
        rows = Rows(tiny)
        rows.join(method_named("quest"), prompt)
        rows.join(Failing(how if failing else "not"), prompt)
        rows.join(method_named("snapkv"), prompt)
        rows.finish()
        return rows

    with_failing, without = others(True), others(False)
    assert isinstance(with_failing.errors[1], (RuntimeError, MemoryError, FloatingPointError))
    assert len(with_failing.logits[1]) == 2
    for name in (0, 2):
        assert with_failing.errors[name] is None
        # the bits of the steps that it shared; after it has left, the matrices have a row less
        assert torch.equal(with_failing.of(name)[:3], without.of(name)[:3])
        assert (with_failing.of(name) - without.of(name)).abs().max() <= 1e-4


def test_each_row_ends_by_its_own_rules(tiny: Loaded) -> None:
    """Stops, given tokens, drawn tokens and a question: as alone."""
    ids, question = numbers(150), QuestionTokens([(65, 66, 67)])
    prompt = prefilled(tiny, ids)
    greedy = alone(tiny, Method(), ids)[1].tokens[0]
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"stops": Stops([greedy[3]])},
        lambda: {"forced_tokens": [[1, 2, 3, 4]]},
        lambda: {"draw": Sampler(2.0, ["a"], top_p=0.9)},
        lambda: {"max_new_tokens": 2},
        lambda: {"question": question, "max_new_tokens": 4},
        lambda: {"question": question, "draw": Sampler(2.0, ["b"]), "max_new_tokens": 4},
    ]
    rows = Rows(tiny)
    for kind in kinds:
        rows.join(method_named("quest"), prompt, **kind())
    rows.finish()
    for name, kind in enumerate(kinds):
        logits, made = alone(tiny, method_named("quest"), ids, **kind())
        assert rows.generated[name] == made.tokens and rows.errors[name] is None
        assert (rows.of(name) - logits).abs().max() <= 1e-4
    assert len({len(made[0]) for made in rows.generated.values()}) > 2


def test_a_snapshot_that_is_divided_is_the_same_for_who_comes_late(tiny: Loaded) -> None:
    """What others have generated from it, and what they have dropped, is theirs."""
    prompt = prefilled(tiny, numbers(150))
    early, late = Rows(tiny), Rows(tiny)
    for name in ("quest", "snapkv", "icecache"):
        early.join(method_named(name), prompt)
    early.join(Method(), prompt)
    early.finish()
    late.join(Method(), prompt)
    late.finish()
    assert (early.of(3) - late.of(0)).abs().max() <= 1e-4


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.data())
@settings(max_examples=40)
def test_copies_of_an_original_know_nothing_of_each_other(sizes: list[int], data: st.DataObject) -> None:
    parts = [torch.arange(size, dtype=torch.float32).view(1, -1) for size in sizes]
    original = Original(parts)
    copies = [original.copy() for _ in range(3)]
    expected = [[part.clone() for part in parts] for _ in range(3)]
    for _ in range(data.draw(st.integers(0, 8))):
        copy, part = data.draw(st.integers(0, 2)), data.draw(st.integers(0, len(parts) - 1))
        if sizes[part]:
            at = data.draw(st.integers(0, sizes[part] - 1))
            copies[copy][part][0, at:] = expected[copy][part][0, at:] = -float(copy + 1)
    for part in parts:
        part.fill_(7)  # what it was made of is not used any more
    del original
    for copy, held in zip(copies, expected, strict=True):
        assert all(map(torch.equal, copy, held))


def test_where_no_pages_are_shared_every_copy_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "shares_pages", lambda device: False)
    part = torch.arange(6.0)
    one, other = (Original([part]).copy()[0] for _ in range(2))
    one.fill_(7)
    assert torch.equal(other, torch.arange(6.0)) and torch.equal(part, torch.arange(6.0))


def test_garbage_is_collected_again_after_a_pass() -> None:
    with pytest.raises(ZeroDivisionError), collecting_later():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()


def test_angles_that_follow_the_length_go_alone(tiny: Loaded) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    assert ModelRunner(tiny.model).alone() is None
    assert ModelRunner(random_model("llama", rope_parameters=dynamic)).alone() is not None
