"""GGUF files: what one says of its model is what the loaded model computes, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import random_model, write_gguf
from transformers import PreTrainedModel

from kvbench.backends.hf.loading import load, read_gguf
from kvbench.config import ConfigError, shipped
from kvbench.models.gguf import read_header

IDS = torch.tensor([[256, *range(40, 240)]])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return random_model()


@torch.inference_mode()
def alike(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models answer alike, to the rounding of float32 keys."""
    return torch.allclose(one(IDS).logits, other(IDS).logits, atol=1e-4)


def frequencies(model: PreTrainedModel) -> torch.Tensor:
    return model.model.rotary_emb.inv_freq


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_gguf(path, torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_without_scaling_answers_as_the_model_it_was_made_of(tmp_path: Path, plain: PreTrainedModel) -> None:
    keys = {  # what a file may say and a model does without
        "general.license": "mit",
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.finetuned": False,
        "llama.attention.causal": True,
        "llama.attention.sliding_window": 256,
        "llama.attention.key_length": 16,
        "llama.attention.scale": 0.25,
        "quantize.imatrix.file": "calibration.dat",
        "split.count": 1,
    }
    ones = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    read, tokenizer = read_gguf(write_gguf(tmp_path / "a.gguf", plain, keys, ones), torch.float32)
    assert alike(read, plain)
    assert tokenizer("ab", add_special_tokens=False).input_ids == [258]


SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        1024,
    ),
    "linear, by its older key": ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}, 512),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        512,
    ),
    "yarn of its context": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        512,
    ),
}


@pytest.mark.parametrize(("keys", "parameters", "window"), SCALED.values(), ids=SCALED)
def test_scaled_rotary_positions_are_those_of_transformers(
    tmp_path: Path, plain: PreTrainedModel, keys: dict[str, Any], parameters: dict[str, Any], window: int
) -> None:
    path = write_gguf(tmp_path / "a.gguf", plain, keys)
    node = {**(shipped("model", "dummy-tiny") or {}), "path": str(path), "weights": "pretrained"}
    loaded = load(node, "cpu", "float32")
    scaled = random_model(rope_scaling=parameters)
    assert not alike(scaled, plain)
    assert alike(loaded.model, scaled)
    assert loaded.card.context_length == window


def test_llama_3_scaling_is_read_off_its_factors(tmp_path: Path) -> None:
    shape = {"max_position_embeddings": 131072, "rope_theta": 500000.0}
    plain, scaled = random_model(**shape), random_model(**shape, rope_scaling={"rope_type": "llama3", **LLAMA3})
    factors = (frequencies(plain) / frequencies(scaled)).numpy()
    keys = {"llama.rope.freq_base": 500000.0}
    path = write_gguf(tmp_path / "a.gguf", plain, keys, {"rope_freqs.weight": factors})
    read = read_gguf(path, torch.float32)[0]
    assert torch.allclose(frequencies(read), frequencies(scaled), rtol=1e-6)
    assert read.config.rope_parameters["rope_type"] == "llama3"  # a folder saved of it has it, too
    assert alike(read, scaled)


def test_rotary_factors_of_another_kind_are_refused(tmp_path: Path, plain: PreTrainedModel) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    assert "rope_freqs.weight=[1 .. 3]" in refused(write_gguf(tmp_path / "a.gguf", plain, tensors=factors))
    factors = {"rope_factors_long.weight": np.ones(8, dtype=np.float32)}
    assert "rope_factors_long.weight" in refused(write_gguf(tmp_path / "b.gguf", plain, tensors=factors))


# Keys that transformers' reader passes over, or that the model which it makes has otherwise.
DROPPED: dict[str, Any] = {
    "llama.rope.scaling.type": "longrope",
    "llama.rope.scaling.attn_factor": 1.19,
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.rope.dimension_sections": [2, 3, 3, 0],
    "llama.rope.freq_base_swa": 10000.0,
    "llama.attention.sliding_window": 64,
    "llama.attention.scale": 0.1,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.causal": False,
    "llama.attention.key_length": 32,
    "llama.attention.value_length": 8,
    "llama.attention.layer_norm_epsilon": 1e-3,
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 0.5,
    "llama.embedding_scale": 12.0,
    "llama.residual_scale": 0.22,
    "llama.expert_count": 8,
    "llama.expert_used_count": 2,
    "llama.expert_weights_norm": True,
    "llama.leading_dense_block_count": 1,
    "llama.nextn_predict_layers": 1,
    "llama.something_new": 3,
    "adapter.type": "lora",
    "split.count": 3,
}


@pytest.mark.parametrize(("key", "value"), DROPPED.items(), ids=DROPPED)
def test_a_key_that_the_model_does_not_compute_with_is_refused_by_name(
    tmp_path: Path, plain: PreTrainedModel, key: str, value: Any
) -> None:
    line = refused(write_gguf(tmp_path / "a.gguf", plain, {key: value}))
    shown = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else str(value)
    assert f"{key}=" in line
    assert isinstance(value, list) or f"{key}={shown}"[:40] in line


@pytest.mark.parametrize("factor", ["four", -2.0, [2.0, 4.0]])
def test_a_factor_that_is_none_is_refused(tmp_path: Path, plain: PreTrainedModel, factor: Any) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": factor}
    assert "factor=" in refused(write_gguf(tmp_path / "a.gguf", plain, keys))


def test_weights_too_few_or_too_many_are_refused_by_name(tmp_path: Path, plain: PreTrainedModel) -> None:
    more = {"blk.1.attn_q.bias": np.ones(64, dtype=np.float32)}
    assert "blk.1.attn_q.bias" in refused(write_gguf(tmp_path / "a.gguf", plain, tensors=more))
    fewer: dict[str, Any] = {"blk.1.ffn_up.weight": None}
    assert "model.layers.1.mlp.up_proj.weight" in refused(write_gguf(tmp_path / "b.gguf", plain, tensors=fewer))


def test_windows_and_scaled_full_layers_of_gemma_3_are_those_of_the_file(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 6, "sliding_window": 32, "rope_theta": 1e6, "tie_word_embeddings": True}
    shape |= {"head_dim": 256}
    scaled = random_model("gemma3_text", **shape, rope_scaling={"rope_type": "linear", "factor": 8.0})
    keys: dict[str, Any] = {
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.dimension_count": None,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 32,
        "gemma3.attention.sliding_window_pattern": [True] * 5 + [False],
    }
    read = read_gguf(write_gguf(tmp_path / "a.gguf", scaled, keys, arch="gemma3"), torch.float32)[0]
    rope = read.config.rope_parameters
    assert (rope["full_attention"]["rope_type"], rope["sliding_attention"]["rope_type"]) == ("linear", "default")
    assert alike(read, scaled)
    other = keys | {"gemma3.attention.sliding_window_pattern": 3}
    assert "sliding_window_pattern=" in refused(write_gguf(tmp_path / "b.gguf", scaled, other, arch="gemma3"))
    other = keys | {"gemma3.attention.sliding_window": None}
    assert "sliding_window: missing" in refused(write_gguf(tmp_path / "c.gguf", scaled, other, arch="gemma3"))


@pytest.mark.parametrize("end", [4, 12, 100, 2000])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, plain: PreTrainedModel, end: int) -> None:
    whole = write_gguf(tmp_path / "a.gguf", plain).read_bytes()
    (tmp_path / "b.gguf").write_bytes(whole[:end])
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        read_header(tmp_path / "b.gguf")
