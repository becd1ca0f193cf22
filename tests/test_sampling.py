"""Sampled generation: what is drawn, from what it follows, and what k answers to a prompt leave behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from driver import numbers, run_loop
from twin import device, on_device

import kvbench.measure.job
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.sampling import Sampler
from kvbench.backends.protocol import Protocol
from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.request import QuestionTokens, Stops
from kvbench.method import Needs
from kvbench.report.data.frame import collect
from kvbench.report.tables.runs import summary as summary_tables
from kvbench.runs.summary import summarise
from kvbench.runs.sweep import run, run_shared

PROMPTS = [numbers(60, seed=4), numbers(41, seed=5)]
DRAWS = 2000


def left(probabilities: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """What top-k and then top-p leave of a distribution [V], token by token: the slow way."""
    ranked = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))[: top_k or None]
    mass, kept, whole = 0.0, [], float(probabilities[ranked].sum())
    for token in ranked:
        if mass < top_p:
            kept.append(token)
        mass += float(probabilities[token]) / whole
    found = torch.zeros_like(probabilities)
    found[kept] = probabilities[kept] / probabilities[kept].sum()
    return found


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 0.6, 0), (1.5, 1.0, 7), (2.0, 0.8, 20)]
)
def test_tokens_are_drawn_as_often_as_softmax_says(temperature: float, top_p: float, top_k: int) -> None:
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    expected = left((logits.double() / temperature).softmax(0), top_p, top_k)
    draws = Sampler(temperature, [f"answer {n}" for n in range(DRAWS)], top_p, top_k)(logits.expand(DRAWS, -1))
    counts = torch.bincount(draws, minlength=len(logits)).double()
    assert counts[expected == 0].sum() == 0
    # The tail of chi-square beyond 4 standard deviations: less than one in 10,000; the seeds are fixed.
    there = expected > 0
    chi_square = ((counts - DRAWS * expected) ** 2 / (DRAWS * expected.clamp_min(1e-12)))[there].sum()
    freedom = int(there.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert 0.5 * (counts / DRAWS - expected).abs().sum() < (len(logits) / DRAWS) ** 0.5


def test_a_generation_begins_and_goes_on_as_the_model_says(tiny: Loaded) -> None:
    """First and second tokens of many rows, against the softmax of transformers' own logits."""
    rows = 200
    draw = Sampler(0.3, [str(row) for row in range(rows)])
    generation, _ = run_loop(tiny, [PROMPTS[0]] * rows, method_named("full"), None, steps=1, draw=draw)
    first = torch.tensor([tokens[0] for tokens in generation.tokens])
    with torch.inference_mode():
        prompt = torch.tensor([PROMPTS[0]])
        expected = (tiny.model(prompt, use_cache=False).logits[0, -1].double() / 0.3).softmax(0)
    assert float(expected.max()) < 0.9, "choose a higher temperature: it is greedy"
    top = expected.topk(5).indices
    found = torch.tensor([float((first == token).double().mean()) for token in top])
    error = (expected[top] * (1 - expected[top]) / rows).sqrt()
    assert ((found - expected[top]).abs() < 4 * error).all()
    assert len({tokens[1] for tokens in generation.tokens}) > 5, "the steps draw, too"


@pytest.mark.parametrize(
    "question", [QuestionTokens(), QuestionTokens([(5, 6)] * 2), QuestionTokens([(5, 6)] * 2, at_once=True)]
)
def test_a_row_draws_the_same_beside_others_and_from_a_shared_prefill(tiny: Loaded, question: QuestionTokens) -> None:
    def tokens(prompts: Any, seeds: list[str], **options: Any) -> list[list[int]]:
        draw = Sampler(1.0, seeds, 0.95)
        own = replace(question, rows=question.rows[: len(prompts)])
        return run_loop(tiny, prompts, method_named("full"), None, steps=8, question=own, draw=draw, **options)[
            0
        ].tokens

    alone = [tokens([prompt], [seed])[0] for prompt, seed in zip(PROMPTS, "ab", strict=True)]
    assert tokens(PROMPTS, ["a", "b"]) == alone
    assert tokens(PROMPTS, ["b", "a"]) != alone
    shared = prefill_once(tiny.model, PROMPTS, [Needs()], max_new_tokens=9 + len(question))
    run_loop(tiny, PROMPTS, method_named("full"), None, steps=3, question=question, prefilled=shared)
    assert tokens(PROMPTS, ["a", "b"], prefilled=shared) == alone


def test_a_draw_stays_on_the_device_of_its_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    with device() as cuda:
        draw, there = Sampler(0.8, ["a", "b", "c"], 0.9, 10), logits.to("cuda:0")
        with cuda.no_sync():
            tokens = draw(there)
        assert on_device(tokens)
        assert tokens.tolist() == Sampler(0.8, ["a", "b", "c"], 0.9, 10)(logits).tolist()


def test_a_banned_token_is_never_drawn_first(tiny: Loaded) -> None:
    banned = set(range(250))
    rows = [PROMPTS[0]] * 50
    generation, _ = run_loop(
        tiny,
        rows,
        method_named("full"),
        None,
        steps=0,
        stops=Stops(not_first=banned),
        draw=Sampler(2.0, list(map(str, range(50)))),
    )
    assert all(tokens[0] >= 250 for tokens in generation.tokens)


def test_logits_that_are_no_numbers_are_refused_when_sampled(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tiny.model.lm_head.forward
    monkeypatch.setattr(tiny.model.lm_head, "forward", lambda hidden: forward(hidden) * torch.nan)
    with pytest.raises(FloatingPointError):
        run_loop(tiny, PROMPTS[:1], method_named("full"), None, steps=1, draw=Sampler(1.0, ["a"]))


# -- k answers to a prompt ---------------------------------------------------------------------------------------------

ARMS = ("full", "quest", "snapkv", "streaming_llm")
SAMPLED = ("protocol.temperature=0.8", "protocol.samples=4", "task.limit=2", "task.lengths=[256]", "model=dummy-tiny")


@pytest.fixture
def configs(tmp_path: Path) -> Any:
    def make(*words: str, folder: str = "shared", arms: Sequence[str] = ARMS) -> list[Any]:
        base = [*SAMPLED, "dtype=float32", f"results_dir={tmp_path / folder}", *words]
        return [composed(f"method={method}", "budget=64", *base) for method in arms]

    return make


def answers(root: Path, arm: str) -> dict[str, list[int]]:
    lines = [line for path in root.glob(f"runs/*/*/{arm}*/*/samples.jsonl") for line in path.read_text().splitlines()]
    return {record["id"]: record["output_ids"] for record in map(json.loads, lines)}


def test_a_sweep_gives_k_answers_a_prompt_that_no_other_arm_changes(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    once = kvbench.measure.job.prefill_once
    monkeypatch.setattr(kvbench.measure.job, "prefill_once", lambda *all, **more: made.append(1) or once(*all, **more))
    summaries = run_shared(configs())
    assert len(made) == 2, "a prefill a prompt serves all arms and answers"
    run(configs(folder="alone", arms=["quest"])[0])
    assert len(made) == 4
    found = answers(tmp_path / "shared", "quest")
    assert found == answers(tmp_path / "alone", "quest") and len(found) == 8
    assert len({tuple(ids) for ids in found.values()}) > 4, "answers differ"
    assert [(summary["n"], summary["prompts"]) for summary in summaries] == [(8, 2)] * 4
    assert all({"pass_at_1", "pass_at_2", "pass_at_4"} <= summary.keys() for summary in summaries)
    assert all(summary["output"]["tokens_mean"] > 1 for summary in summaries)
    runs = collect([tmp_path / "shared"])
    assert all(len(scores.ids) == 2 for scores in runs.scores.values()), "a prompt counts once"
    shown = {heading for table in summary_tables(runs) for heading in table.lines}
    assert {"score", "pass_at_4", "new_tokens", "new_tokens_median"} <= shown


def test_samples_draw_the_same_tokens_in_a_batch(configs: Any, tmp_path: Path) -> None:
    for batch in ("1", "2"):
        run(configs("protocol.samples=1", f"batch={batch}", folder=batch, arms=["snapkv"])[0])
    alone = answers(tmp_path / "1", "snapkv")
    assert answers(tmp_path / "2", "snapkv") == alone and len(set(map(tuple, alone.values()))) == 2


def test_a_stopped_run_goes_on_with_the_answers_that_are_missing(configs: Any, tmp_path: Path) -> None:
    (config,) = configs(arms=["snapkv"])
    run(config)
    (path,) = tmp_path.glob("shared/runs/*/*/*/*/samples.jsonl")
    whole, kept = path.read_text().splitlines(), 3
    path.write_text("".join(f"{line}\n" for line in whole[:kept]))
    (path.parent / "summary.json").unlink()
    run(config)
    again = path.read_text().splitlines()
    assert again[:kept] == whole[:kept], "what was there stays as it was"
    told = [(record["id"], record["output_ids"]) for record in map(json.loads, again)]
    assert told == [(record["id"], record["output_ids"]) for record in map(json.loads, whole)]


def test_greedy_runs_keep_their_protocol_and_sampled_ones_have_their_own() -> None:
    assert Protocol(temperature=0, samples=1).digest() == Protocol().digest() == "b9182729a2e1"
    assert Protocol(temperature=1).digest() == Protocol(temperature=1.0).digest() != Protocol().digest()
    assert Protocol(temperature=1, samples=4).drawn() == {"temperature": 1.0, "samples": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["protocol.temperature=-1"], "protocol.temperature=-1: 0 (greedy), or "),
        (["protocol.temperature=1e-300"], "protocol.temperature=1e-300: 0 (greedy), or 1e-06 and more"),
        (["protocol.temperature=warm"], "protocol.temperature='warm'"),
        (["protocol.temperature=1", "protocol.top_p=2"], "protocol.top_p=2: a probability above 0"),
        (["protocol.temperature=1", "protocol.top_k=-1"], "protocol.top_k=-1: a number of tokens"),
        (["protocol.temperature=1", "protocol.samples=0"], "protocol.samples=0: a number of answers"),
        (["protocol.samples=2"], "protocol.samples=2: nothing is drawn with protocol.temperature=0"),
        (["protocol.top_p=0.9"], "protocol.top_p=0.9: nothing is drawn with protocol.temperature=0"),
        (["protocol.temperature=1", "protocol.samples=2", "batch=4"], "batch=4: protocol.samples=2 has each prompt"),
    ],
)
def test_bad_input_is_refused_in_a_line_before_a_model_loads(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(composed(*words))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_task_whose_tokens_are_given_or_timed_takes_no_temperature() -> None:
    with pytest.raises(ConfigError, match=r"protocol.temperature=0.5: task=latency draws no tokens; use 0"):
        run(composed("model=dummy-tiny", "task=latency", "task.lengths=[300]", "protocol.temperature=0.5"))


def test_pass_at_k_is_the_share_of_k_answers_drawn_that_hold_a_right_one() -> None:
    right = {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0], "c": [0, 0, 0, 0]}
    lines = [
        {"id": f"{prompt}#{n}", "sample": prompt, "scores": {"accuracy": score}}
        for prompt, scores in right.items()
        for n, score in enumerate(scores)
    ]
    found = summarise(lines, "accuracy")
    for k in (1, 2, 4):
        drawn = [[any(some) for some in combinations(scores, k)] for scores in right.values()]
        assert found[f"pass_at_{k}"] == pytest.approx(100 * fmean(map(fmean, drawn)))
    assert "pass_at_8" not in found and found["score"] == pytest.approx(25)
    assert found["stderr"] == pytest.approx(100 * stdev([0.25, 0.5, 0]) / 3**0.5), "over prompts"


@pytest.mark.parametrize(
    ("output", "looped"),
    [
        ([*range(50), *[7] * 32], True),
        ([*range(50), *[7] * 31], False),
        ([1, 2, 3] * 11, True),
        ([*range(1000, 1128)] * 4, True),
        ([*range(1000, 1129)] * 4, False),
        ([*range(100)] * 3, False),
        ([*[7] * 90, 2], False),
    ],
)
def test_a_loop_is_one_n_gram_four_times_and_32_tokens_at_the_very_end(output: list[int], looped: bool) -> None:
    found = summarise([{"id": "a", "scores": {"accuracy": 0}, "output_ids": output}], "accuracy")["output"]
    assert found["looped"] == looped and found["tokens_mean"] == len(output)
