"""Steps that a device repeats by itself give what steps give that run as ever, to the bit; on the twin of a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flashinfer_twin
import pytest
import torch
from driver import METHODS, SMALL, Case, numbers, scores_of, slow
from integrity import check
from twin import Twin, device

from kvbench.attention import flashinfer
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import choices, shipped
from kvbench.engine.batch import generate
from kvbench.engine.captured import CapturedStep
from kvbench.engine.engine import Engine
from kvbench.engine.request import QuestionTokens
from kvbench.memory import device as memory

CASES = {case.id: case for case in METHODS}
FIFTY = [
    "full",
    "snapkv",
    "quest",
    "h2o",
    "lychee",
    "quest_structure",
    "streaming_llm",
    "icecache",
]  # that are followed for longer, as memory moves
# Presets whose steps are captured in pieces, since their layers need the host, and what for.
SEARCH = "its index is searched on the CPU"
HOST = {
    "arkvale": "its tokens live on the host, and which pages stay is worked out there",
    "clusterkv": "its tokens live on the host, and which clusters stay is worked out there",
    "icecache": SEARCH,
    "icecache_code": SEARCH,
    "icecache_plus": SEARCH,
    "icecache_reuse": SEARCH,
    "magicpig": SEARCH,
    "omnikv": "some layers' tokens live on the host",
    "pariskv": "its tokens live on the host, which each new one is copied to",
    "pariskv_adaptive": "its tokens live on the host, which each new one is copied to",
    "pariskv_aligned": "its tokens live on the host, which each new one is copied to",
    "pqcache": "its tokens live on the host, and which blocks stay is worked out there",
    "pyramidkv_racc": "what has left the device is searched by the host",
    "racc_code": "what is dropped goes to the host",
    "racc": "what has left the device is searched by the host",
    "racc_paper": "what has left the device is searched by the host",
    "shadowkv": "its values live on the host",
    "snapkv_racc": "what has left the device is searched by the host",
    "vattention": "each step draws a sample, and counts how often it was as good as it should be",
}
CAPTURED = [case for case in METHODS if case.name not in HOST and case.file is None]
IN_PIECES = [next(case for case in METHODS if case.name == name) for name in HOST]
QUICK = {"icecache", "clusterkv"}  # a search in other threads, and a method that keeps the keys that it is shown
LONGER = {"twilight_quest-calibrated": (260, 230)}  # proposes more tokens than there are otherwise


@dataclass
class Outcome:
    """What a generation gave: logits [steps, B, vocabulary]."""

    logits: torch.Tensor
    tokens: list[list[int]]
    audit: dict[str, Any]
    breakdown: dict[str, float]
    step: CapturedStep | None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twin]:
    """A device with FlashInfer, which is given the dummy's head size and precision."""
    flashinfer_twin.install(monkeypatch)
    monkeypatch.setattr(flashinfer_twin, "HEAD_DIMS", {16, 32})
    monkeypatch.setattr(flashinfer_twin, "DTYPES", {torch.float32})
    monkeypatch.setattr(flashinfer, "FLASHINFER_HEAD_DIMS", (16, 32))
    monkeypatch.setattr(flashinfer, "FLASHINFER_DTYPES", ("float32",))
    with device() as cuda:
        yield cuda


@pytest.fixture
def above(cuda: Twin) -> Loaded:
    """The dummy Llama on the device, in the CPU's precision."""
    return load(shipped("model", "dummy-tiny"), device="cuda", dtype="float32")


def outcome(
    loaded: Loaded, case: Case, captures: bool, steps: int, lengths: Sequence[int] = (150, 90), **settings: Any
) -> Outcome:
    """Two ragged rows, of which the second ends early."""
    method, logits = case.build(), list[torch.Tensor]()
    question = settings.pop("question", QuestionTokens())
    settings = {"new_tokens": steps + 1 + len(question), "attention": "flashinfer", **settings}
    engine = engine_for(
        loaded.model,
        lengths,
        method,
        Budget(SMALL),
        (),
        loaded.tokenizer,
        head_scores=scores_of(loaded.model),
        cuda_graphs=captures,
        **settings,
    )
    prompts = [numbers(length, seed=row) for row, length in enumerate(lengths)]
    ends = [numbers(steps + 1, seed=9), *(numbers(steps // 2, seed=row) for row in range(1, len(lengths)))]
    generation = generate(
        ModelRunner(loaded.model),
        prompts,
        engine,
        max_new_tokens=steps + 1,
        forced_tokens=ends,
        question=question,
        watch=lambda step: logits.append(step.cpu()),
    )
    for store in engine.stores.values():
        check(store)
    return Outcome(torch.stack(logits), generation.tokens, generation.audit, generation.breakdown_ms, engine.captured)


def same(loaded: Loaded, case: Case, steps: int, **settings: Any) -> CapturedStep:
    """Generate with captured steps and without: to the bit the same."""
    ever, captured = (outcome(loaded, case, captures, steps, **settings) for captures in (False, True))
    assert ever.step is None and captured.step is not None
    assert torch.equal(captured.logits, ever.logits) and captured.tokens == ever.tokens
    assert captured.audit == ever.audit
    return captured.step


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CAPTURED])
def test_a_captured_step_is_an_eager_one_to_the_bit(above: Loaded, case: Case) -> None:
    steps = 70 if case.name in ("raas", "scope") else 8  # lists of these grow until they are full
    step = same(above, case, steps, lengths=LONGER.get(case.id, (150, 90)))
    assert step.repeated >= 2 and step.eager + step.captured + step.repeated == steps
    assert len(step.pieces) == 1


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[] if case.name in QUICK else pytest.mark.slow) for case in IN_PIECES],
)
def test_a_step_with_parts_of_the_host_is_captured_between_them(above: Loaded, case: Case) -> None:
    step = same(above, case, 8)
    assert (step.eager, step.captured, step.repeated) == (1, 1, 6)
    assert len(step.pieces) == above.model.config.num_hidden_layers + 1


@pytest.mark.parametrize("name", ["full", "icecache"])
def test_a_capture_that_the_driver_refuses_leaves_eager_steps(
    above: Loaded, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of the model, after other layers have been captured, and their parts of the host have run."""
    above.model.model.layers[2].mlp.register_forward_pre_hook(lambda module, inputs: inputs[0].sum().item() and None)
    step = same(above, CASES[name], 5)
    assert (step.eager, step.captured, step.repeated) == (5, 0, 0)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["snapkv_decode", "clusterkv"])
def test_parts_of_a_repeated_step_have_their_times(above: Loaded, name: str) -> None:
    case = CASES.get(name) or next(case for case in METHODS if case.name == name)
    spent = outcome(above, case, True, 6).breakdown
    assert all(spent[part] > 0 for part in ("model", "attention", "select", "other")), spent


@pytest.mark.parametrize("name", ["full", *slow(*FIFTY[1:])])
def test_fifty_steps_while_memory_moves(above: Loaded, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are added as they are filled, whose number was not known."""
    monkeypatch.setattr(memory, "GROWTH", 16)
    step = same(above, CASES[name], 50, new_tokens=None)
    assert step.eager >= 1 and step.repeated >= 20


@pytest.mark.parametrize("name", slow("full", "topk", "h2o"))
def test_another_executor_sees_all_slots_in_every_step(above: Loaded, name: str) -> None:
    assert same(above, CASES[name], 8, attention="torch").repeated >= 4


def test_a_second_prompt_in_the_memory_of_the_first(above: Loaded) -> None:
    first, second = (same(above, CASES["full"], 6, lengths=[length]) for length in (150, 148))
    assert first.repeated == second.repeated == 4


def test_tokens_of_a_question_are_steps_too(above: Loaded) -> None:
    question = QuestionTokens([numbers(3, seed=5)] * 2)
    assert same(above, CASES["snapkv"], 4, question=question).repeated == 5


def test_presets_that_need_the_host_are_listed_with_what_for() -> None:
    assert HOST.keys() <= set(choices("method"))
    assert len(choices("method")) - len(HOST) == 46
    for name in HOST:
        method = CASES[name].build()
        assert method.needs.host_step or method.needs.home != "device", name


def test_a_cpu_repeats_nothing(tiny: Loaded) -> None:
    assert outcome(tiny, CASES["full"], True, 2, attention="cpu").step is None


def test_a_copied_engine_captures_anew(above: Loaded) -> None:
    engine = engine_for(above.model, [60], CASES["full"].build(), Budget(None), (), attention="torch", new_tokens=20)
    generate(ModelRunner(above.model), [numbers(60)], engine, max_new_tokens=5)
    copied: Engine = copy.deepcopy(engine)
    assert copied.captured is not None and engine.captured is not None and engine.captured.repeated == 2
    assert copied.captured.eager == copied.captured.repeated == 0


def test_a_wait_or_a_copy_is_refused_while_a_step_is_captured(cuda: Twin) -> None:
    tensor, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    for forbidden in (lambda: tensor.sum().item(), lambda: tensor.cpu(), lambda: torch.ones(3).to("cuda")):
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
            forbidden()


def test_a_graph_repeats_its_operations_on_the_same_memory(cuda: Twin) -> None:
    step, total, graph = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(step * 2)
    graph.replay()
    step.fill_(5)
    graph.replay()
    assert total.item() == 12
