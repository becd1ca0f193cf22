"""What a method is shown: the prompt put together from chunks, and every hook in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, Stream, drive, numbers, run_loop, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.engine.batch import generate
from kvbench.engine.engine import Engine
from kvbench.engine.request import QuestionTokens, Stops, chosen_tokens
from kvbench.method import Method, Needs, Prompt, Selection, Shape

# -- the prompt --------------------------------------------------------------------------------------------------------


class Shown(Method):
    """Keeps a copy of every prompt it is shown."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.prompts: dict[int, Prompt] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        assert layer not in self.prompts, "a layer is shown once"
        self.prompts[layer] = prompt


def show(
    fixed: Stream, needs: Needs, widths: Sequence[int], offsets: Sequence[int], dense_layers: Sequence[int] = ()
) -> tuple[dict[int, Prompt], torch.Tensor]:
    """The prompts shown when a stream is read in chunks of these widths, and the token ids [B, columns] it had."""
    layers, batch, query_heads, _, head_dim = fixed.queries.shape
    columns = sum(widths)
    shape = Shape(
        layers,
        query_heads,
        fixed.keys.shape[2],
        head_dim,
        fixed.lengths,
        fixed.keys.dtype,
        fixed.keys.device,
        fixed.scaling,
        tuple(layer for layer in range(layers) if layer not in dense_layers),
    )
    method = Shown(needs)
    engine = Engine(shape, method, Budget(None), offsets=offsets, columns=columns)
    token_ids = torch.full((batch, columns), -7)
    for row, (length, offset) in enumerate(zip(fixed.lengths, offsets, strict=True)):
        token_ids[row, offset : offset + length] = 100 * row + torch.arange(length)
    parts = []
    for rows in (fixed.queries, fixed.keys, fixed.values):
        padded = torch.full((layers, batch, rows.shape[2], columns, head_dim), 50.0)  # no real vector looks like this
        for row, (length, offset) in enumerate(zip(fixed.lengths, offsets, strict=True)):
            padded[:, row, :, offset : offset + length] = rows[:, row, :, :length]
        parts.append(padded)
    column = 0
    for width in widths:
        here = slice(column, column + width)
        engine.start_chunk(token_ids[:, here])
        for layer in range(layers):
            engine.attend(layer, *(part[layer, :, :, here] for part in parts))
        column += width
    assert engine.prefilled
    return method.prompts, token_ids


def received(fixed: Stream, layer: int, row: int, head: int) -> torch.Tensor:
    """Attention each prompt key gets from all prompt queries of a head, by a loop over queries."""
    kv_head = head // (fixed.queries.shape[2] // fixed.keys.shape[2])
    length = fixed.lengths[row]
    total = torch.zeros(length, dtype=torch.float64)
    for at in range(length):
        logits = fixed.keys[layer, row, kv_head, : at + 1].double() @ fixed.queries[layer, row, head, at].double()
        total[: at + 1] += (logits * fixed.scaling).softmax(0)
    return total


@settings(max_examples=40)
@given(data=st.data())
def test_prompt_is_the_same_for_any_chunks_and_padding(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3), "lengths")
    longest = max(lengths)
    padding = data.draw(st.sampled_from(["right", "left", "both"]), "padding")
    columns = longest + (data.draw(st.integers(0, 4), "more") if padding != "right" else 0)
    if padding == "both":
        offsets = [data.draw(st.integers(0, columns - length), "offset") for length in lengths]
    else:
        offsets = [columns - length if padding == "left" else 0 for length in lengths]
    widths: list[int] = []
    while sum(widths) < columns:
        widths.append(data.draw(st.integers(1, columns - sum(widths)), "width"))
    window = data.draw(st.integers(0, 25), "window")
    fixed = stream(*lengths, steps=0, head_dim=4, seed=sum(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.attention.torch.BLOCK", data.draw(st.sampled_from([1, 5, 64]), "block"))
        prompts, _ = show(fixed, Needs(query_window=window, attention_sums=True), widths, offsets)
    assert list(prompts) == [0, 1]
    for layer, prompt in prompts.items():
        assert prompt.lengths == tuple(lengths)
        size = min(window, longest)
        if window:
            assert prompt.queries.shape == (len(lengths), 4, size, 4)
        else:
            assert prompt.queries.numel() == 0
        assert prompt.attention_sums is not None
        assert prompt.attention_sums.shape == (len(lengths), 4, longest)
        assert prompt.keys.shape == prompt.values.shape == (len(lengths), 2, longest, 4)
        for row, length in enumerate(lengths):
            assert prompt.token_ids[row].tolist() == [100 * row + at for at in range(length)] + [0] * (longest - length)
            assert torch.equal(prompt.keys[row, :, :length], fixed.keys[layer, row, :, :length])
            assert torch.equal(prompt.values[row, :, :length], fixed.values[layer, row, :, :length])
            held = min(size, length)
            if held:
                last = fixed.queries[layer, row, :, length - held : length]
                assert torch.equal(prompt.queries[row, :, size - held :], last)
            for head in range(4):
                sums = prompt.attention_sums[row, head, :length].double()
                torch.testing.assert_close(sums, received(fixed, layer, row, head), rtol=0, atol=CLOSE)


def test_nothing_is_collected_that_was_not_asked_for() -> None:
    prompts, _ = show(stream(9, steps=0), Needs(), [4, 5], [0])
    assert prompts[0].queries.numel() == 0
    assert prompts[0].attention_sums is None
    assert prompts[0].on_host is None


def test_dense_layers_are_never_shown() -> None:
    prompts, _ = show(stream(9, steps=0, layers=4), Needs(query_window=2, attention_sums=True), [9], [0], (0, 3))
    assert list(prompts) == [1, 2]


# -- the hooks ---------------------------------------------------------------------------------------------------------


class Recording(Method):
    """Notes every call with what can be checked about its arguments."""

    needs = Needs(probabilities=True)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.calls.append(("begin", self.shape.sparse_layers, self.shape.lengths))

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.calls.append(("prefill", layer))

    def end_prefill(self) -> None:
        self.calls.append(("end_prefill",))

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        assert active.dtype == torch.bool
        self.calls.append(("step", tokens.tolist(), positions.tolist(), active.tolist()))

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        lengths = self.view.lengths(layer)
        current = (torch.tensor(lengths) - 1)[:, None, None]
        assert torch.equal(self.view.keys(layer, current), key), "the current token is stored"
        assert torch.equal(self.view.values(layer, current), value)
        self.calls.append(("append", layer, lengths))

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        assert query.shape == (self.shape.batch, self.shape.query_heads, 1, self.shape.head_dim)
        self.calls.append(("select", layer))
        self.selection = None if layer == 2 else Selection((torch.tensor(self.view.lengths(layer)) - 1)[:, None, None])
        return self.selection

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        assert selection is self.selection
        seen = 1 if selection else max(self.view.lengths(layer))
        assert probabilities.shape == (self.shape.batch, self.shape.query_heads, seen)
        self.calls.append(("observe", layer))

    def end_step(self) -> None:
        self.calls.append(("end_step",))

    def rule(self, layer: int, length: int, generated: int) -> None:
        return None


@pytest.mark.parametrize("dense_layers", [(), (0,), (3,), (0, 1), (1, 3)])
def test_hooks_come_in_the_order_that_method_promises(tiny: Loaded, dense_layers: tuple[int, ...]) -> None:
    """Ragged rows of which one stops early; it keeps its place in the batch, and `active` says that it has ended."""
    prompts, steps = [numbers(30, seed=1), numbers(21, seed=2)], 6
    free, _ = run_loop(tiny, prompts, Recording(), None, dense_layers=dense_layers, steps=steps)
    stop = next(token for token in free.tokens[0][1:4] if token not in free.tokens[1])
    method = Recording()
    options: dict[str, Any] = {"dense_layers": dense_layers, "steps": steps, "prefill_chunk": 13}
    generation, _ = run_loop(tiny, prompts, method, None, stops=Stops([stop]), **options)
    sparse = tuple(layer for layer in range(4) if layer not in dense_layers)
    ended = generation.tokens[0].index(stop) if stop in generation.tokens[0] else steps
    assert ended < steps, "no row ended early"
    expected: list[tuple[Any, ...]] = [("begin", sparse, (30, 21))]
    expected += [("prefill", layer) for layer in sparse]
    expected.append(("end_prefill",))
    for step in range(steps):
        expected.append(
            (
                "step",
                [free.tokens[row][step] for row in range(2)],
                [30 + step, 21 + step],
                [step < ended, True],
            )
        )
        for layer in sparse:
            expected += [("append", layer, (31 + step, 22 + step)), ("select", layer), ("observe", layer)]
        expected.append(("end_step",))
    assert method.calls == expected


def test_observe_comes_only_where_probabilities_are_needed() -> None:
    method = Recording()
    method.needs = Needs()
    drive(stream(20), method, None)
    assert "observe" not in {call[0] for call in method.calls}


def test_method_is_asked_nothing_where_every_layer_is_dense() -> None:
    method = Recording()
    audit = drive(stream(30), method, None, dense_layers=range(2)).audit
    assert {call[0] for call in method.calls} <= {"begin", "end_prefill", "step", "end_step"}
    assert audit["dense_share"] == 1 and "attended_max" not in audit


# -- the question, read as decode steps --------------------------------------------------------------------------------

CONTEXTS = [numbers(120, seed=4), numbers(80, seed=5)]
QUESTION = numbers(9, seed=6)


@pytest.mark.parametrize("name", ["full", "quest", "snapkv", "streaming_llm"])
@pytest.mark.parametrize("chunk", [None, 50])
def test_question_is_read_as_decode_steps(tiny: Loaded, name: str, chunk: int | None) -> None:
    method = method_named(name)
    options: dict[str, Any] = {"question": QuestionTokens([QUESTION] * len(CONTEXTS)), "prefill_chunk": chunk}
    lengths = list(map(len, CONTEXTS))
    with torch.inference_mode():
        engine = engine_for(tiny.model, lengths, method, Budget(SMALL), (), new_tokens=len(QUESTION) + 5)
        runner = ModelRunner(tiny.model)
        tokens = chosen_tokens(runner.prefill(engine, CONTEXTS, chunk))
        passes = runner.passes(engine)
        for token in QUESTION:
            tokens = passes.next_tokens(torch.full_like(tokens, token))
        by_hand = [tokens]
        for _ in range(4):
            by_hand.append(passes.next_tokens(by_hand[-1]))
    generation, asked = question_run(tiny, method_named(name), **options)
    assert generation.tokens == torch.stack(by_hand, dim=1).tolist()
    assert asked.stores[0].lengths == engine.stores[0].lengths
    assert asked.audit.steps == len(QUESTION) + 4


def question_run(loaded: Loaded, method: Method, **options: Any) -> Any:
    """Four decode steps after the question; `run_loop` reserves memory for prompt and steps only."""
    lengths = list(map(len, CONTEXTS))
    engine = engine_for(loaded.model, lengths, method, Budget(SMALL), (), new_tokens=len(QUESTION) + 5)
    return generate(ModelRunner(loaded.model), CONTEXTS, engine, max_new_tokens=5, **options), engine


def test_full_attention_reads_a_question_as_part_of_the_prompt(tiny: Loaded) -> None:
    asked, _ = question_run(tiny, method_named("full"), question=QuestionTokens([QUESTION] * len(CONTEXTS)))
    whole, _ = run_loop(tiny, [context + QUESTION for context in CONTEXTS], method_named("full"), None, steps=4)
    assert asked.tokens == whole.tokens


def test_sparse_method_reads_the_question_sparsely(tiny: Loaded) -> None:
    """The test before could not fail if the question went through dense attention."""
    method = method_named("streaming_llm")
    asked, engine = question_run(tiny, method, question=QuestionTokens([QUESTION] * len(CONTEXTS)))
    assert engine.audit.steps == len(QUESTION) + 4
    assert asked.audit["attended_max"] == SMALL
    whole, _ = run_loop(tiny, [context + QUESTION for context in CONTEXTS], method_named("full"), None, steps=4)
    assert asked.tokens != whole.tokens
