"""Streamed layers compute what plain ones do, and take their place where they are quicker, and nowhere else."""

from __future__ import annotations

import copy
import mmap
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from kvbench.backends.hf import loading as models
from kvbench.backends.hf.streamed import FEW, StreamedAttention, StreamedLinear, StreamedMLP, StreamedNorm, stream
from kvbench.measure.hardware import read_weight_bytes, weight_bytes
from kvbench.memory import transfer

SIZES = st.sampled_from([1, 15, 16, 33, 96, 130])


def streamed(plain: nn.Linear) -> nn.Linear:
    layer = copy.deepcopy(plain).requires_grad_(False)
    layer.__class__ = StreamedLinear
    return layer


@given(rows=st.integers(0, FEW), inputs=SIZES, outputs=SIZES, bias=st.booleans(), threads=st.integers(1, 3))
@settings(max_examples=40)
def test_a_streamed_layer_computes_what_the_plain_one_does(
    rows: int, inputs: int, outputs: int, bias: bool, threads: int
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(inputs, 2, rows).to(torch.bfloat16).permute(2, 1, 0)[:, 1:]
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = streamed(plain)(x)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, 1, outputs)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # bfloat16, rounded once


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_many_rows_are_multiplied_as_exactly_on_a_processor_that_is_slow_in_bfloat16(
    bias: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.backends.hf.streamed.slow_in_bfloat16", lambda: slow)
    monkeypatch.setattr("kvbench.backends.hf.streamed.BLOCK", 8)
    plain = nn.Linear(96, 33, bias=bias).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, FEW, 96).to(torch.bfloat16)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    found = streamed(plain)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # bfloat16, rounded once


@pytest.mark.parametrize("x", [torch.zeros(1, 32), torch.zeros(1, 31, dtype=torch.bfloat16)])
def test_what_torch_refuses_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="dtype|shapes"):
        streamed(nn.Linear(32, 3, bias=False, dtype=torch.bfloat16))(x)


@pytest.mark.parametrize("number", [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3e38, float("inf"), float("nan")])
def test_a_sum_is_rounded_as_torch_rounds(number: float) -> None:
    """To the nearest, of two that are as near to the even one; what is no number stays none."""
    parts = torch.tensor([number]).to(torch.bfloat16), torch.tensor([number])
    rest = torch.nan_to_num(parts[1] - parts[0].float(), 0, 0, 0).to(torch.bfloat16)
    plain = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    plain.weight[:] = torch.cat([parts[0], rest])
    found = streamed(plain)(torch.ones(1, 2, dtype=torch.bfloat16))
    torch.testing.assert_close(found[0], plain.weight.float().sum(1).to(torch.bfloat16), equal_nan=True, rtol=0, atol=0)


@given(rows=st.integers(1, FEW), inputs=SIZES, hidden=SIZES, scale=st.sampled_from([1.0, 40.0]))
@settings(max_examples=30)
@torch.inference_mode()
def test_a_streamed_feed_forward_part_computes_what_the_plain_one_does(
    rows: int, inputs: int, hidden: int, scale: float
) -> None:
    torch.manual_seed(0)
    sizes: Any = SimpleNamespace(hidden_size=inputs, intermediate_size=hidden, mlp_bias=False, hidden_act="silu")
    plain = LlamaMLP(sizes).to(torch.bfloat16)
    x, own = (scale * torch.randn(rows, inputs)).to(torch.bfloat16), copy.deepcopy(plain)
    own.__class__ = StreamedMLP
    exact, x64 = plain.double(), x.double()
    between = exact.act_fn(exact.gate_proj(x64)) * exact.up_proj(x64)
    most = 2**-7 * between.abs() @ exact.down_proj.weight.abs().T  # rounded between, and at the end
    assert bool(((own(x).double() - exact(x64)).abs() <= most + 1e-6).all())


def test_weights_move_together_and_keep_storages_of_their_own() -> None:
    weights = [torch.randn(3), torch.randn(0), torch.randn(40, 7), torch.randn(5, 4).to(torch.bfloat16).t()]
    before, where = [weight.clone() for weight in weights], [weight.data_ptr() for weight in weights]
    transfer.move_weights(weights)
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight, old) and weight.untyped_storage().nbytes() == weight.nbytes
        assert weight.data_ptr() % transfer.LINE == 0 or not weight.nbytes
    assert all(weight.data_ptr() != old for weight, old in zip(weights, where, strict=True) if weight.nbytes)


def test_a_system_without_large_pages_leaves_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    weight = torch.randn(3)
    where = weight.data_ptr()
    transfer.move_weights([weight])
    assert weight.data_ptr() == where


@pytest.mark.parametrize("count", [4, 2**20 - 1, 2**20 + 5])
def test_zeros_are_zeros_of_their_size_in_pages_of_either_kind(count: int) -> None:
    found = transfer.zeros((1, count), torch.bfloat16)
    assert found.shape == (1, count) and not found.count_nonzero() and found.untyped_storage().nbytes() == 2 * count
    found[0, -1] = 3
    assert found.sum() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_streamed_where_that_is_quicker_and_holds_no_more(dtype: str) -> None:
    model = loaded(dtype)
    before, weights, read = kinds(model), weight_bytes(model), read_weight_bytes(model, rows=1)
    stream(model)
    after = [StreamedLinear] * 15 + [StreamedAttention, StreamedMLP] * 2 + [StreamedNorm] * 5
    assert kinds(model) == (sorted(kind.__name__ for kind in after) if dtype == "bfloat16" else before)
    assert (weight_bytes(model), read_weight_bytes(model, rows=1)) == (weights, read)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 4), (1, FEW + 1)])
@torch.inference_mode()
def test_a_streamed_model_is_as_near_to_exact_numbers_as_a_plain_one(batch: int, tokens: int) -> None:
    plain = loaded("bfloat16")
    exact, own = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    stream(own)
    ids = torch.randint(300, (batch, tokens), generator=torch.Generator().manual_seed(1))
    whole, nearest, found = (model(ids).logits.double() for model in (exact, plain, own))
    assert (found - whole).norm() <= 1.1 * (nearest - whole).norm()


@pytest.mark.slow  # all of it is built anew
def test_an_older_cpu_computes_the_same() -> None:
    code = (
        "import sys, pytest; from kvbench.kernels import library; library._level = lambda: 'x86-64-v3';"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    tests = [f"{__file__}::{name}" for name in OF_KERNELS]
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "-n0", *tests]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


OF_KERNELS = [
    "test_a_streamed_layer_computes_what_the_plain_one_does",
    "test_a_streamed_model_is_as_near_to_exact_numbers_as_a_plain_one",
]


def loaded(dtype: str) -> PreTrainedModel:
    return models.load({"name": "tiny", "path": None, **SHAPE}, device="cpu", dtype=dtype).model


def kinds(model: PreTrainedModel) -> list[str]:
    """Of the parts that have weights, and of those that these are parts of."""
    leaves = (nn.Linear, LlamaAttention, LlamaMLP, LlamaRMSNorm)
    return sorted(type(module).__name__ for module in model.modules() if isinstance(module, leaves))


SHAPE = {
    "weights": "dummy",
    "dense_layers": [],
    "config": {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
