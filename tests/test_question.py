"""A question that comes after its context was compressed, and contexts that are asked about several times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import SMALL, Case, each_method, numbers, scores_of, slow
from test_shared import records
from zoo import random_model

import kvbench.measure.prompts
import kvbench.runs.sweep
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.protocol import Protocol
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.batch import generate
from kvbench.engine.engine import Engine
from kvbench.engine.request import QuestionTokens
from kvbench.measure.prompts import prompt_of, read
from kvbench.measure.work import work_of
from kvbench.method import Method
from kvbench.runs.run import prepare
from kvbench.runs.sweep import run_arms, run_shared
from kvbench.runs.terminal import Console
from kvbench.tasks import Sample
from kvbench.tasks.passkey import Passkey
from methods.quest import Quest

NEW = 5
CONTEXTS = (numbers(150, seed=4), numbers(97, seed=5))
ASKED = numbers(9, seed=6)
OTHER = numbers(9, seed=7)


def asked(
    loaded: Any, method: Method, contexts: Sequence[Sequence[int]], question: Sequence[int], **options: Any
) -> tuple[list[list[int]], torch.Tensor, Engine]:
    """New tokens, the logits that chose all but the first [NEW - 1, B, V], and the engine."""
    model, noted = loaded.model if isinstance(loaded, Loaded) else loaded, list[torch.Tensor]()
    budget = Budget(None if type(method) is Method else SMALL)
    made: dict[str, Any] = {"new_tokens": NEW + len(question), "head_scores": scores_of(model)}
    engine = engine_for(model, list(map(len, contexts)), method, budget, (), getattr(loaded, "tokenizer", None), **made)
    options |= {"question": QuestionTokens([question] * len(contexts), at_once=True)} if question else {}
    watch = lambda logits: noted.append(logits.clone())  # noqa: E731
    return (
        generate(ModelRunner(model), contexts, engine, max_new_tokens=NEW, watch=watch, **options).tokens,
        torch.stack(noted),
        engine,
    )


# -- full attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("rows", [1, 2])
def test_with_full_attention_it_makes_no_difference_when_the_question_comes(
    tiny: Loaded, rows: int, chunk: Any
) -> None:
    contexts = CONTEXTS[:rows]
    whole = [context + ASKED for context in contexts]
    expected, logits, _ = asked(tiny, Method(), whole, [], prefill_chunk=chunk)
    found, scores, engine = asked(tiny, Method(), contexts, ASKED, prefill_chunk=chunk)
    assert found == expected
    torch.testing.assert_close(scores, logits, rtol=0, atol=1e-4)
    assert engine.audit.turn_tokens == len(ASKED) and engine.audit.steps == NEW - 1


@pytest.mark.parametrize("family", ["gemma3_text", *slow("gpt_oss")])
def test_nor_where_layers_have_a_window_and_rows_are_padded_on_the_left(family: str) -> None:
    use_kvbench_attention(model := random_model(family))
    expected, logits, _ = asked(model, Method(), [context + ASKED for context in CONTEXTS], [])
    found, scores, engine = asked(model, Method(), CONTEXTS, ASKED)
    assert found == expected and any(engine.offsets)
    torch.testing.assert_close(scores, logits, rtol=0, atol=1e-4 * float(logits.abs().max()))


def test_a_question_of_one_token_is_a_decode_step(tiny: Loaded) -> None:
    _, _, engine = asked(tiny, method_named("snapkv"), CONTEXTS[:1], ASKED[:1])
    assert engine.audit.steps == NEW and not engine.audit.turn_tokens


# -- what a method has seen --------------------------------------------------------------------------------------------


@each_method
def test_what_is_kept_of_a_context_does_not_depend_on_its_question(
    case: Case, any_model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[list[Any]]] = []
    real = Engine.start_turn

    def noted(engine: Engine, ids: torch.Tensor) -> None:
        kept.append([[store.resident_ids().tolist(), store.lengths] for store in engine.stores.values()])
        real(engine, ids)

    monkeypatch.setattr(Engine, "start_turn", noted)
    answers = [asked(any_model, case.build(), CONTEXTS, question)[1] for question in (ASKED, OTHER)]
    assert kept[0] == kept[1] and [kept[0][0][1]] == [list(map(len, CONTEXTS))]
    assert not torch.equal(*answers)


class Colours(Passkey):
    """Contexts of which each has some questions, equally long or not."""

    def samples(self, tokenizer: Any, seed: int) -> Iterator[Sample]:
        for sample in super().samples(tokenizer, seed):
            before = sample.prompt.removesuffix(sample.question)
            for number in range(3):
                text = f"What is number{' one' * number} {number}?"
                yield replace(sample, id=f"{sample.id}-q{number}", prompt=before + text, question=text)

    def __len__(self) -> int:
        return 3 * super().__len__()


def test_questions_of_one_context_stay_together_where_the_longest_run_first(configs: Any, monkeypatch: Any) -> None:
    """The longest question about one context makes a longer prompt than the shortest about a context that is longer."""
    monkeypatch.setattr(Colours, "stored", True)
    (config,) = configs("task.lengths=[300,305]", arms=["full"])
    arm = prepare(config)
    groups = list(read(arm, work_of(arm, None, ()).samples))
    assert len({len(batch[0].ids) for group in groups for batch in group}) == 2
    assert list(map(len, groups)) == [3, 3]


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    monkeypatch.setattr("kvbench.tasks.passkey.Passkey", Colours)

    def make(*words: str, folder: str = "together", arms: Sequence[str] = ARMS) -> list[Any]:
        base = ["model=dummy-tiny", "dtype=float32", "task.lengths=[300,400]", "task.positions=1"]
        base += [f"results_dir={tmp_path / folder}", "protocol.question=after", *words]
        return [composed(f"method={name}", "budget=64", *base) for name in arms]

    return make


ARMS = ("full", "quest", "snapkv", "icecache", "magicpig")


def comparable(root: Path) -> dict[str, Any]:
    return {
        key: [record[name] for name in ("output_ids", "prompt_tokens", "question_tokens")]
        + [pytest.approx(record["audit"]["attended_mean"], rel=2e-3), record["audit"]["turn_tokens"]]  # magicpig: ties
        for key, record in records(root).items()
    }


@pytest.mark.parametrize("arms", [ARMS[:3], pytest.param(ARMS, marks=pytest.mark.slow)], ids=len)
def test_a_context_is_prefilled_and_compressed_once_for_all_its_questions(
    arms: Sequence[str], configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, one by one, and each question with a prefill and a method of its own: the same answers."""
    real, prefills, built = kvbench.runs.sweep.SharedPrompts, list[int](), list[str]()

    def counted(arms: Any, prompts: Any, *progress: Any) -> Any:
        prefills.append(len(prompts))
        return real(arms, prompts, *progress)

    real_build = Quest.prefill

    def counted_build(self: Any, layer: int, prompt: Any) -> Any:
        built.append("quest") if layer == self.shape.sparse_layers[0] else None
        return real_build(self, layer, prompt)

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", counted)
    monkeypatch.setattr(Quest, "prefill", counted_build)
    run_shared(configs(arms=arms), Console(quiet=True))
    assert (len(prefills), len(built)) == (2, 2)
    run_shared(configs("sweep.shared_decode=false", folder="turns", arms=arms), Console(quiet=True))
    assert (len(prefills), len(built)) == (4, 4)
    for config in configs("sweep.shared_prefill=false", folder="alone", arms=arms):
        run_shared([config], Console(quiet=True))
    monkeypatch.setattr(kvbench.measure.prompts, "contexts", lambda prompts: None)
    run_shared(configs(folder="apart", arms=arms), Console(quiet=True))
    assert len(built) == 4 + 2 + 6
    expected = comparable(tmp_path / "apart")
    assert len(expected) == 6 * len(arms)
    for folder in ("together", "turns", "alone"):
        assert comparable(tmp_path / folder) == expected


@pytest.mark.parametrize(
    "arms", [("full", "quest", "icecache"), pytest.param(("snapkv", "magicpig"), marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_makes_what_a_whole_one_makes(arms: Sequence[str], configs: Any, tmp_path: Path) -> None:
    """From the second question of a context on."""
    run_shared(configs(folder="whole", arms=arms), Console(quiet=True))
    for limit in (2, 5, 6):
        run_shared(configs(f"task.limit={limit}", folder="parts", arms=arms), Console(quiet=True))
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")


def test_rows_of_a_batch_have_questions_of_one_length(configs: Any, tmp_path: Path) -> None:
    (config,) = configs("batch=6", arms=["snapkv"])
    arm = prepare(config)
    found = list(read(arm, arm.task.samples(arm.loaded.tokenizer, 0)))
    assert sorted(len(batch) for group in found for batch in group) == [2, 2, 2]
    assert all(len({len(prompt.question) for prompt in batch}) == 1 for group in found for batch in group)
    run_shared([config], Console(quiet=True))
    run_shared(configs(folder="single", arms=["snapkv"]), Console(quiet=True))
    batch, single = records(tmp_path / "together"), records(tmp_path / "single")
    assert {key: record["output_ids"] for key, record in batch.items()} == {
        key: record["output_ids"] for key, record in single.items()
    }


class Stubborn(Quest):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot copy a lock")


def test_a_method_that_cannot_be_copied_is_refused_by_name_and_the_others_go_on(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("methods.quest.Quest", Stubborn)
    outcomes = run_arms(configs(), Console(quiet=True))
    errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    assert len(errors) == 1 and "Stubborn" in errors[0] and "cannot copy a lock" in errors[0]
    assert len(records(tmp_path / "together")) == 6 * (len(ARMS) - 1)


# -- what has no question ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["after", "decode"])
@pytest.mark.parametrize("task", ["fidelity", "latency"])
def test_a_task_without_questions_is_refused_before_a_model_loads(task: str, question: str) -> None:
    with pytest.raises(ConfigError, match=f"protocol.question={question}: .*{task}.* with"):
        composed("model=dummy-tiny", f"task={task}", f"protocol.question={question}")


def test_what_asks_nothing_apart_is_refused_with_the_tokenizer_there(tmp_path: Path) -> None:
    """And before weights are read."""
    (tmp_path / "test.jsonl").write_text(json.dumps({"problem": "1 + 1?", "answer": "2", "unique_id": "a"}) + "\n")
    words = ("model=dummy-tiny", "task=math500", f"task.data_dir={tmp_path}", "task.max_new_tokens=8")
    config = composed(*words, "protocol.question=after")
    with pytest.raises(ConfigError, match="protocol.question=after: task=math500 .*with"):
        prepare(config)


@pytest.mark.parametrize("question", ["after", "decode"])
def test_a_slow_tokenizer_is_named_before_weights_are_read(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", False)
    monkeypatch.setattr("kvbench.backends.hf.loading._loaded", lambda *_: pytest.fail("reads weights"))
    config = composed("model=dummy-tiny", f"protocol.question={question}")
    with pytest.raises(ConfigError, match=f"protocol.question={question}: .*slow.*with"):
        prepare(config)


def test_a_sample_without_a_question_is_named(tiny: Loaded) -> None:
    config = composed("model=dummy-tiny", "protocol.question=after")
    arm = prepare(config)
    whole = "A question, and no context."  # but for the tokens of a chat template
    for question in ("", whole):
        with pytest.raises(ConfigError, match="protocol.question=after: strange .*with"):
            prompt_of(arm, Sample("strange", whole, (), 4, question))


def test_old_digests_hold() -> None:
    """Of protocols as results hold them that were made when there were two ways to read a question."""
    assert Protocol().digest() == "b9182729a2e1"
    assert Protocol(question="decode").digest() == "3780c8724b72"
    assert len({Protocol(question=word).digest() for word in ("with", "after", "decode")}) == 3  # type: ignore[arg-type]
