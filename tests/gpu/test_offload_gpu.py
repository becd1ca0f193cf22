"""The store on a real GPU: its property test, rows that the device reads itself, times, and a step without a wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import test_store
import torch
from driver import METHODS, SMALL, Case, drive, stream
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvbench.engine.engine import Engine
from kvbench.memory.codecs import Codecs
from kvbench.memory.host import HostTier
from kvbench.memory.transfer import fetch
from kvbench.spans import Spans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
QUIET = ["full", "topk", "snapkv", "pyramidkv", "quest", "streaming_llm"]


class OnGpu(test_store.StoreMachine):
    device, survives = "cuda:0", False


@pytest.mark.parametrize("kind", [test_store.Discarding, test_store.Offloading, test_store.Hosted])
def test_nothing_is_lost(kind: type[test_store.StoreMachine]) -> None:
    machine = type(f"{kind.__name__}OnGpu", (OnGpu, kind), {})
    run_state_machine_as_test(machine, settings=settings(test_store.often, max_examples=30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_reads_pinned_rows_itself(dtype: torch.dtype) -> None:
    here = torch.randn(5, 80, device="cuda").to(dtype)
    tier = HostTier((1, 1), Codecs.native(80, dtype), torch.device("cuda"), 1000)
    tier.key.normal_()
    host = tier.key.view(-1, 80)
    near, far = torch.tensor([0, -1, -1, 4, -1]), torch.tensor([-1, 3, -1, -1, 999])
    (rows,) = fetch(near.cuda(), far.cuda(), [here[:3]], [here[3:]], [host])
    assert torch.equal(rows.cpu(), fetch.reference(near, far, [here.cpu()], [], [host])[0])


def test_spans_add_up_to_the_time_that_passed() -> None:
    spans, matrix = Spans(torch.device("cuda", 0)), torch.randn(4096, 4096, device="cuda")
    (matrix @ matrix).sum().item()
    start = time.perf_counter()
    with spans("host"):
        time.sleep(0.02)
        with spans("device"):
            for _ in range(20):
                matrix = matrix @ matrix / 64
        matrix.sum().item()
    passed = time.perf_counter() - start
    seconds = spans.reset()
    assert sum(seconds.values()) == pytest.approx(passed, rel=0.03)
    assert seconds["host"] >= 0.02 and seconds["device"] > 0


@pytest.fixture
def strict() -> Iterator[None]:
    """torch raises where the host waits for the device in a copy or for a value."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("case", [case for case in METHODS if case.id in QUIET], ids=lambda case: case.id)
@pytest.mark.parametrize("lengths", [(150,), (150, 90)], ids=["one", "ragged"])
def test_a_step_of_a_method_on_the_device_waits_for_nothing(
    case: Case, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = stream(*lengths, steps=6, head_dim=64)
    parts = {name: getattr(fixed, name).to("cuda", torch.bfloat16) for name in ("queries", "keys", "values")}
    fixed, attend = replace(fixed, **parts), Engine.attend

    def watched(engine: Engine, *arguments: torch.Tensor) -> torch.Tensor:
        # plans and kernels are made in the first two steps
        torch.cuda.set_sync_debug_mode("error" if engine.prefilled and engine.audit.steps >= 2 else "default")
        try:
            return attend(engine, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Engine, "attend", watched)
    driven = drive(fixed, case.build(), SMALL)
    assert driven.engine.audit.steps == 6 and torch.isfinite(driven.outputs).all()
