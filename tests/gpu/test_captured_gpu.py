"""Captured steps on a GPU: to the bit what steps are that run as ever; `tests/test_captured.py` says so on the twin."""

from __future__ import annotations

import pytest
import torch
from test_captured import CASES, same

from kvbench.backends.hf.loading import Loaded, load
from kvbench.config import shipped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def above() -> Loaded:
    """A Llama with heads of 64, which FlashInfer reads where it is installed."""
    return load(shipped("model", "dummy-100m"), device="cuda", dtype="bfloat16")


@pytest.mark.parametrize("name", ["full", "snapkv", "keydiff", "topk", "quest", "rocketkv", "h2o", "squeeze"])
def test_a_gpu_repeats_steps_to_the_bit(above: Loaded, name: str) -> None:
    assert same(above, CASES[name], 24, lengths=(1500, 900), attention="auto").repeated >= 16
