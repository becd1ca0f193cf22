"""Batches of ragged rows on the twin of a GPU: one attention a layer for all rows, and what each row gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import flashinfer_twin
import pytest
import torch
from driver import METHODS, SMALL, Case, numbers, scores_of, slow
from twin import device

from kvbench.attention import flashinfer
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import shipped
from kvbench.engine.batch import generate

CASES = {case.id: case for case in METHODS}
STEPS = 4
# Methods whose attention torch computes, by what it has to give or take that FlashInfer does not.
PROBABILITIES = {"cake", "h2o", "lru", "raas", "scope", "tova"}
WEIGHTS_OR_KEYS = {"attention_matching", "magicpig", "shadowkv", "vattention"}
OPTIONS = {"random-always", "h2o-query_head", "raas-unpinned", "scope-discontinuous", "scope-adaptive"}


@pytest.fixture
def above(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """The dummy Llama on a device with FlashInfer, in the CPU's precision."""
    flashinfer_twin.install(monkeypatch)
    flashinfer_twin.take_small_models(monkeypatch)
    with device():
        yield load(shipped("model", "dummy-tiny"), device="cuda", dtype="float32")


def logits(loaded: Loaded, case: Case, rows: Sequence[int], steps: int = STEPS, **settings: Any) -> torch.Tensor:
    """[steps + 1, B, vocabulary] of given tokens after prompts of these lengths; a prompt of a length is always one."""
    told = list[torch.Tensor]()
    settings = {"attention": "flashinfer", "head_scores": scores_of(loaded.model), "new_tokens": steps + 2, **settings}
    engine = engine_for(loaded.model, rows, case.build(), Budget(SMALL), (), loaded.tokenizer, **settings)
    generate(
        ModelRunner(loaded.model),
        [numbers(length, seed=length) for length in rows],
        engine,
        max_new_tokens=steps + 1,
        forced_tokens=[numbers(steps + 1, seed=length + 1) for length in rows],
        watch=lambda step: told.append(step.cpu()),
    )
    return torch.stack(told)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in METHODS])
def test_a_layer_of_a_ragged_batch_is_one_attention(above: Loaded, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows = Counter[tuple[str, int]](), [150, 90, 41]

    def counted(name: str, call: Any) -> Any:
        def run(first: Any, *rest: Any) -> Any:
            query = rest[0] if name == "flashinfer" else first
            calls[name, len(query)] += 1
            return call(first, *rest)

        return run

    plan = flashinfer.AttentionPlan
    monkeypatch.setattr(plan, "attend", counted("flashinfer", plan.attend))
    monkeypatch.setattr(flashinfer, "attend", counted("torch", flashinfer.attend))
    logits(above, case, rows, cuda_graphs=False)
    torchs = case.name in PROBABILITIES | WEIGHTS_OR_KEYS or case.id in OPTIONS
    assert calls == {("torch" if torchs else "flashinfer", len(rows)): STEPS * 4}


@pytest.mark.parametrize("name", ["full", *slow("snapkv", "quest", "adakv_snapkv", "pariskv", "icecache")])
def test_a_row_of_sixty_four_has_the_logits_that_it_has_alone(above: Loaded, name: str) -> None:
    rows = [40 + 3 * row for row in range(64)]
    together = logits(above, CASES[name], rows, steps=2)
    for at in (0, 31, 63):
        alone = logits(above, CASES[name], rows[at : at + 1], steps=2)[:, 0]
        assert (together[:, at] - alone).norm() <= 1e-4 * alone.norm()
