"""Operators: one launch on a device, captured and repeated; their kernels in Triton's interpreter and its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import twin
from driver import slow
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.config import bind_methods

bind_methods()

from methods.blocks.topk import top_earliest  # noqa: E402

IN_TRITON = Path(__file__).parent / "in_triton"


def run_in_triton(*words: str, interpret: bool) -> str:
    """What a process of its own prints: Triton takes the interpreter or not as it is imported."""
    pytest.importorskip("triton", reason="comes with kvbench[triton], and on a GPU with torch")
    env = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *words], env=env, cwd=IN_TRITON, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("which", ["not slow", *slow("slow")])
def test_kernels_give_what_their_references_give_in_the_interpreter(which: str) -> None:
    out = run_in_triton("-m", "pytest", "-m", which, "-p", "no:xdist", "-p", "no:cacheprovider", ".", interpret=True)
    assert " passed" in out or "100%" in out


@pytest.mark.parametrize("script", slow("compile_operators.py"))
def test_kernels_compile_for_gpus_that_are_not_here(script: str) -> None:
    out = run_in_triton(script, interpret=False)
    assert "sm_80" in out and "sm_90" in out


class Counted(TorchDispatchMode):
    """The operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_an_operator_is_one_launch_that_a_graph_repeats() -> None:
    with twin.device():
        scores, graph = torch.tensor([[[1.0, 3.0, 2.0]]], device="cuda"), torch.cuda.CUDAGraph()
        with Counted() as counted, torch.cuda.graph(graph):
            best = top_earliest(scores, 2)
        assert counted.names == ["kvbench::ranked_ids"] and len(graph.nodes) == 1
        graph.replay()
        assert best.tolist() == [[[1, 2]]]
        scores.neg_()
        graph.replay()
        assert best.tolist() == [[[0, 2]]]
