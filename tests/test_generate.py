"""The measured loop: when rows end, what is timed, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driver import METHODS, SMALL, Case, each_method, numbers, run_loop

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.engine.request import QuestionTokens, Stops
from kvbench.method import Needs
from kvbench.spans import PARTS, Spans

PROMPTS = [numbers(60, seed=4), numbers(41, seed=5)]


def test_rows_end_after_their_own_stop_token(tiny: Loaded) -> None:
    free, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=12)
    stops = [free.tokens[0][3], free.tokens[1][7]]

    def until_stop(tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens) - 1)
        return tokens[: end + 1]

    expected = [until_stop(tokens) for tokens in free.tokens]
    assert len(expected[0]) != len(expected[1]), "choose other prompts: both rows end together"
    stopped, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=12, stops=Stops(stops))
    assert stopped.tokens == expected
    assert len(stopped.step_ms) == max(map(len, expected)) - 1, "the loop ends with its last row"


def test_row_that_ends_at_once_takes_no_step(tiny: Loaded) -> None:
    free, _ = run_loop(tiny, PROMPTS[:1], method_named("full"), None, steps=0)
    stopped, _ = run_loop(tiny, PROMPTS[:1], method_named("full"), None, steps=12, stops=Stops(free.tokens[0]))
    assert stopped.tokens == free.tokens
    assert stopped.step_ms == []


@pytest.mark.parametrize(
    "question",
    [QuestionTokens(), QuestionTokens([(5, 6)] * len(PROMPTS)), QuestionTokens([(5, 6)] * len(PROMPTS), at_once=True)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_no_row_begins_with_a_banned_token_and_any_may_go_on_with_it(
    tiny: Loaded, question: QuestionTokens, shared: bool
) -> None:
    options: dict[str, Any] = {"question": question}
    free, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=4, **options)
    banned = {tokens[0] for tokens in free.tokens}
    if shared:
        lengths = {"max_new_tokens": 5 + len(question)}
        options["prefilled"] = prefill_once(tiny.model, PROMPTS, [Needs()], **lengths)
    held, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=4, stops=Stops(not_first=banned), **options)
    assert not banned & {tokens[0] for tokens in held.tokens}
    again, _ = run_loop(
        tiny, PROMPTS, method_named("full"), None, steps=4, stops=Stops(not_first=set(range(250))), **options
    )
    assert shared and not question or all(tokens[0] >= 250 for tokens in again.tokens)
    if not question:
        prompts = [[*prompt, tokens[0]] for prompt, tokens in zip(PROMPTS, held.tokens, strict=True)]
        continued, _ = run_loop(tiny, prompts, method_named("full"), None, steps=3)
        assert [tokens[1:] for tokens in held.tokens] == continued.tokens


def test_rows_end_where_the_caller_says(tiny: Loaded) -> None:
    free, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=12)

    def ends(tokens: list[int]) -> bool:
        return list(tokens) in (free.tokens[0][:4], free.tokens[1][:9])

    stopped, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=12, stops=Stops(ends=ends))
    assert stopped.tokens == [free.tokens[0][:4], free.tokens[1][:9]]
    once, _ = run_loop(tiny, PROMPTS, method_named("full"), None, steps=12, stops=Stops(ends=lambda tokens: True))
    assert once.tokens == [tokens[:1] for tokens in free.tokens] and not once.step_ms


@each_method
def test_one_new_token_needs_no_decode_step(tiny: Loaded, case: Case) -> None:
    generation, _ = run_loop(tiny, PROMPTS, case.build(), SMALL, steps=0)
    assert [len(tokens) for tokens in generation.tokens] == [1, 1]
    assert generation.ttft_s > 0
    assert generation.tt2t_s is None
    assert generation.step_ms == []
    assert generation.breakdown_ms == {}
    assert "attended_max" not in generation.audit


def test_timings_follow_from_each_other(tiny: Loaded) -> None:
    generation, _ = run_loop(tiny, PROMPTS, method_named("quest"), SMALL, steps=9)
    assert len(generation.step_ms) == 9
    assert all(milliseconds > 0 for milliseconds in generation.step_ms)
    assert generation.tt2t_s == pytest.approx(generation.ttft_s + generation.step_ms[0] / 1e3)


@pytest.mark.usefixtures("ticking")
@each_method
def test_breakdown_adds_up_to_the_step(tiny: Loaded, case: Case) -> None:
    """Spans are exclusive: the clock is read for the whole step just before its parts and just after them.

    And so twice in a prefill: for the prompts, and for what is asked of them.
    """
    generation, _ = run_loop(tiny, PROMPTS, case.build(), SMALL, steps=12)
    assert set(PARTS) <= set(generation.breakdown_ms)
    mean = sum(generation.step_ms) / len(generation.step_ms)
    assert sum(generation.breakdown_ms.values()) == pytest.approx(mean - 2)
    assert sum(generation.prefill_ms.values()) == pytest.approx(generation.ttft_s * 1e3 - 4)
    assert generation.breakdown_ms["model"] > 0
    assert generation.breakdown_ms["attention"] > 0
    assert (generation.breakdown_ms["select"] > generation.breakdown_ms["index_build"]) or case.name == "full"


def test_spans_are_exclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("kvbench.spans.time.perf_counter", lambda: float(next(clock)))
    spans = Spans()
    with spans("outer"):  # reads the clock at 0
        with spans("inner"):  # 1
            pass  # 2
        with spans("inner"):  # 3
            pass  # 4
    assert spans.reset() == {"outer": 3.0, "inner": 2.0}  # 5
    assert dict(spans.seconds) == {}


@pytest.fixture
def broken_logits(tiny: Loaded) -> Iterator[Callable[[int, float, int], None]]:
    """Spoil one logit of a row in the n-th forward pass of the model."""
    hooks = []

    def spoil(nth: int, value: float, row: int = 0) -> None:
        passes = 0

        def hook(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            if passes == nth:
                out = out.clone()
                out[row, -1, 7] = value
            return out

        hooks.append(tiny.model.lm_head.register_forward_hook(hook))

    yield spoil
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("nth", [1, 3])
def test_logits_that_are_no_numbers_are_an_error(tiny: Loaded, broken_logits: Any, nth: int, value: float) -> None:
    broken_logits(nth, value)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        run_loop(tiny, PROMPTS[:1], method_named("quest"), SMALL, steps=5)


def test_masked_logits_are_no_error(tiny: Loaded, broken_logits: Any) -> None:
    """Some models ban tokens with -inf."""
    broken_logits(3, -float("inf"))
    generation, _ = run_loop(tiny, PROMPTS[:1], method_named("quest"), SMALL, steps=5)
    assert len(generation.tokens[0]) == 6


@pytest.mark.parametrize("chunk", [None, 16])
def test_progress_rises_to_the_total(tiny: Loaded, chunk: int | None) -> None:
    calls: list[tuple[int, int]] = []
    run_loop(
        tiny, PROMPTS, method_named("full"), None, steps=4, prefill_chunk=chunk, progress=lambda *at: calls.append(at)
    )
    done = [at for at, _ in calls]
    assert {total for _, total in calls} == {60 + 5}
    assert done == sorted(set(done))
    assert done[-1] == 60 + 5
    assert len(done) == (1 if chunk is None else 4) + 4


@pytest.mark.parametrize("chunk", [1, 13, 40, 41, 42, 59, 60, 61, 4096])
def test_prefill_chunk_of_any_size_generates_the_same(tiny: Loaded, chunk: int) -> None:
    """40, 41 and 42 end before, at and behind the end of the shorter row."""
    whole, _ = run_loop(tiny, PROMPTS, method_named("snapkv", window=8), SMALL)
    chunked, _ = run_loop(tiny, PROMPTS, method_named("snapkv", window=8), SMALL, prefill_chunk=chunk)
    assert chunked.tokens == whole.tokens


def test_prompts_of_one_token(tiny: Loaded, sdpa: Callable[[Loaded], torch.nn.Module]) -> None:
    expected = sdpa(tiny).generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 1:]
    for case in METHODS:
        generation, _ = run_loop(tiny, [[5]], case.build(), SMALL, steps=3)
        assert generation.tokens == [expected.tolist()], case.id
