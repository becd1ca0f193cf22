"""`backend=vllm` where there is no vLLM: what a run asks of it, and what a stand-in for it makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.vllm import plan
from kvbench.cli.compose import composed
from kvbench.cli.plan import grouped, planned
from kvbench.config import ConfigError
from kvbench.engine.request import Stops
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Prompts
from kvbench.runs.identity import arm_name
from kvbench.runs.sweep import run_shared


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "version", lambda package: "0.32.0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("method=racc", "method=racc: it moves tokens between two memories"),
        ("method=h2o", "method=h2o: it looks into the attention of the prompt"),
        ("method=quest budget=4", "budget=4: below the minimum of quest"),
        ("method=quest task=fidelity", "task=fidelity: its steps are given or timed"),
        ("method=quest kv=int8", "kv=int8: .* expected native"),
        ("method=quest attention=torch", "attention=torch: .* expected auto"),
        ("method=quest probe.every=4", "probe.every=4: .* expected 0"),
        ("method=quest protocol.temperature=0.6", "protocol.temperature=0.6: .* expected 0"),
        ("method=quest model=dummy-tiny", "model=dummy-tiny: vLLM runs trained weights"),
        ("method=quest backend.tensor_parallel=0", "backend.tensor_parallel=0: expected a whole number"),
    ],
)
def test_what_vllm_cannot_give_is_refused_before_it_starts(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed("backend=vllm", *words.split())


@pytest.mark.parametrize(("found", "message"), [(None, "not installed here"), ("0.31.2", "0.31.2 is installed")])
def test_another_vllm_or_none_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, message: str) -> None:
    def version(package: str) -> str:
        if found is None:
            raise plan.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(plan, "version", version)
    with pytest.raises(ConfigError, match=message):
        composed("backend=vllm", "method=quest")
    composed("backend=vllm", "method=quest", here=False)  # a job that runs elsewhere


def test_the_engine_is_named_and_its_arms_run_together() -> None:
    arms = [composed("backend=vllm", f"method={method}", "sweep.shared_prefill=false") for method in ("full", "quest")]
    assert [arm_name(arm) for arm in arms] == ["full-vllm", "quest-256-vllm"]
    assert grouped(arms) == [[0, 1]] and grouped([*arms, composed("method=quest")]) == [[0, 1], [2]]


def test_an_arm_whose_prompts_are_freed_has_an_engine_of_its_own() -> None:
    methods = ("full", "snapkv", "quest", "think", "streaming_llm budget=0.5")
    arms = [composed("backend=vllm", *f"method={words}".split()) for words in methods]
    assert grouped(arms) == [[0, 2, 4], [1], [3]], "half of a prompt is not known before"
    [_, own, _] = planned(arms, [f"method={words}" for words in methods], 1)
    assert own.why == "1 arm, whose engine frees what its method drops"
    with pytest.raises(ConfigError, match="method=snapkv: vLLM frees what it drops, in an engine for this arm alone"):
        run_shared(arms[:2])


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 9000),
    budget=st.integers(64, 12000),
    layers=st.integers(1, 40),
    dense=st.integers(0, 40),
    rows=st.integers(1, 9),
)
def test_a_run_that_frees_prompts_reserves_what_its_prompts_and_their_copies_take(
    length: int, budget: int, layers: int, dense: int, rows: int
) -> None:
    """Blocks go to groups of as many layers as the fewer of dense and sparse ones, see vLLM's `get_kv_cache_groups`."""
    from kvbench.backends.vllm.served import BLOCK, _memory

    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = {**shape, "num_hidden_layers": layers, "max_position_embeddings": 10**6}
    freeing = plan.Plan("snapkv", budget, dense_layers=range(dense := min(dense, layers)))
    most, memory = _memory(ModelCard.of(config), torch.float32, Prompts(length, rows), freeing)
    a_token = 2 * 2 * 16 * 4  # bytes of it in a layer
    together = min(dense, layers - dense) or layers
    groups = -(-dense // together) + -(-(layers - dense) // together)
    blocks = memory["kv_cache_memory_bytes"] - rows * min(budget, most) * (layers - dense) * a_token
    assert blocks // (together * BLOCK * a_token) > rows * groups * -(-most // BLOCK), "one block is nobody's"


class Engine:
    """vLLM's, as far as it is asked: each prompt gets its last token plus one, plus two, ... a token a step."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[list[int], Any]] = {}
        self.made: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], how: Any) -> str:
        if len(prompt["prompt_token_ids"]) > 8:
            raise ValueError("the prompt is longer than 8 tokens")
        self.open[name], self.made[name] = (prompt["prompt_token_ids"], how), 0
        return f"{name}-inside"

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.open.pop(name, None)

    def step(self) -> list[Any]:
        found = []
        for name, (prompt, how) in list(self.open.items()):
            self.made[name] += 1
            token = prompt[-1] + self.made[name]
            finished = token in how.stop_token_ids or self.made[name] == how.max_tokens
            found.append(
                SimpleNamespace(request_id=name, finished=finished, outputs=[SimpleNamespace(token_ids=[token])])
            )
            if finished:
                del self.open[name]
        return found


def test_rows_end_each_by_its_own_stop_and_have_audits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.backends.vllm.served import Served

    words = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1))
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace, sampling_params=words)
    monkeypatch.setitem(__import__("sys").modules, "vllm", vllm)
    monkeypatch.setitem(__import__("sys").modules, "vllm.sampling_params", words)
    reports = {f"{row}-inside": {"attended_mean": row} for row in range(3)}
    told: list[Any] = []

    def rpc(name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        told.append((name, args))
        return [reports]

    engine = Engine()
    model: Any = SimpleNamespace(llm_engine=engine, collective_rpc=rpc)
    served = Served(model, None, "m", "r", 64, (), ())  # type: ignore[arg-type]
    generation, audits = served.generate(
        plan.Plan("quest", 64),
        [[10], [20], [30]],
        max_new_tokens=4,
        stops=Stops({12}, lambda tokens: tokens[-1] == 23),
    )
    assert generation.tokens == [[11, 12], [21, 22, 23], [31, 32, 33, 34]]
    assert [audit["attended_mean"] for audit in audits] == [0, 1, 2] and generation.audit == audits[0]
    assert len(generation.step_ms) == 3 and generation.tt2t_s is not None
    assert told[0][0] == "kvbench_run" and told[0][1][0]["method"] == "quest"
    with pytest.raises(ConfigError, match="backend=vllm: the prompt is longer than 8 tokens"):
        served.generate(plan.Plan("full", None), [[1], [1] * 9], max_new_tokens=4)
    assert not engine.has_unfinished_requests(), "what was asked for before the error is given up"
