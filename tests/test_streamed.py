"""Streamed linear layers compute what plain ones do, and take their place where they are quicker, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvbench.engine import models
from kvbench.engine.streamed import FEW, StreamedLinear, stream
from kvbench.measure.hardware import read_weight_bytes, weight_bytes

SIZES = st.sampled_from([1, 15, 16, 33, 96, 130])


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
        found = StreamedLinear(plain)(x)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, 1, outputs)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # bfloat16, rounded once


@pytest.mark.parametrize("x", [torch.zeros(1, 32), torch.zeros(1, 31, dtype=torch.bfloat16)])
def test_what_torch_refuses_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="dtype|shapes"):
        StreamedLinear(nn.Linear(32, 3, bias=False, dtype=torch.bfloat16))(x)


@pytest.mark.parametrize("number", [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3e38, float("inf"), float("nan")])
def test_a_sum_is_rounded_as_torch_rounds(number: float) -> None:
    """To the nearest, of two that are as near to the even one; what is no number stays none."""
    parts = torch.tensor([number]).to(torch.bfloat16), torch.tensor([number])
    rest = torch.nan_to_num(parts[1] - parts[0].float(), 0, 0, 0).to(torch.bfloat16)
    plain = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    plain.weight[:] = torch.cat([parts[0], rest])
    found = StreamedLinear(plain)(torch.ones(1, 2, dtype=torch.bfloat16))
    torch.testing.assert_close(found[0], plain.weight.float().sum(1).to(torch.bfloat16), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_streamed_where_that_is_quicker_and_holds_no_more(dtype: str) -> None:
    model = models.load({"name": "tiny", "path": None, **SHAPE}, device="cpu", dtype=dtype).model
    ids, weights, read = torch.arange(FEW + 1)[None], weight_bytes(model), read_weight_bytes(model, rows=1)
    expected = [model(ids[:, :many]).logits.float() for many in (FEW + 1, 1)]
    stream(model)
    kinds = [type(module) for module in model.modules()]
    streamed = dtype == "bfloat16"
    assert (kinds.count(StreamedLinear), kinds.count(nn.Linear)) == ((2 * 7 + 1, 0) if streamed else (0, 2 * 7 + 1))
    assert (weight_bytes(model), read_weight_bytes(model, rows=1)) == (weights, read)
    for many, whole in zip((FEW + 1, 1), expected, strict=True):
        torch.testing.assert_close(model(ids[:, :many]).logits.float(), whole, rtol=0, atol=0.02 * streamed)


SHAPE = {
    "weights": "dummy",
    "dense_layers": [],
    "config": {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
