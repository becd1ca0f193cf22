"""Packed linear layers compute what plain ones do, and take their place where they are quicker, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvbench.engine import models
from kvbench.engine.packed import PackedLinear, pack
from kvbench.measure.hardware import read_weight_bytes, weight_bytes

needs_tiles = pytest.mark.skipif(not models.quick_in_bfloat16(), reason="layers are packed for a CPU with AMX alone")


@needs_tiles
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_plain_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 40, bias=bias).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, 96).to(torch.bfloat16)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    found = PackedLinear(plain)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # bfloat16, rounded once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_packed_where_that_is_quicker_and_loses_no_bytes(dtype: str) -> None:
    model = models.load({"name": "tiny", "path": None, **SHAPE}, device="cpu", dtype=dtype).model
    ids, before, weights = torch.arange(9)[None], model, weight_bytes(model)
    expected = before(ids).logits.float()
    pack(model)
    packed = dtype == "bfloat16" and models.quick_in_bfloat16()
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(PackedLinear), kinds.count(nn.Linear)) == ((2 * 7 + 1, 0) if packed else (0, 2 * 7 + 1))
    tied = model.get_input_embeddings().weight  # is there twice, and a step reads a row of it
    assert weight_bytes(model) == weights + packed * tied.nbytes
    assert read_weight_bytes(model, rows=1) == weights + packed * tied[0].nbytes
    torch.testing.assert_close(model(ids).logits.float(), expected, rtol=0, atol=0.02 * packed)


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
