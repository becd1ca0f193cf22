"""How far the positions of a model reach, by its config, and rope parameters that none can have."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from transformers import AutoConfig

from kvbench import config
from kvbench.backends.hf.loading import load
from kvbench.cli.checks import check
from kvbench.config import ConfigError, shipped
from kvbench.models.card import ModelCard

LINEAR, DYNAMIC = {"type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
BY_LAYER = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}

# Rope scaling as published models have it, and how long a text each model is published for.
PUBLISHED = {
    "vicuna-7b-v1.5-16k": ({"max_sequence_length": 16384, "rope_scaling": LINEAR}, 4096, 16384),
    "longchat-7b-v1.5-32k": ({"rope_scaling": {**LINEAR, "factor": 8}}, 4096, 32768),
    "llama-2 with dynamic scaling": ({"rope_scaling": DYNAMIC}, 4096, 8192),
    "a linear model that states its window": ({"max_sequence_length": 16384, "rope_scaling": LINEAR}, 16384, 16384),
    "qwen2.5 with yarn": ({"rope_scaling": {**YARN, "original_max_position_embeddings": 32768}}, 32768, 131072),
    "qwen2.5 with yarn, no length before it": ({"rope_scaling": YARN}, 32768, 131072),
    "gpt-oss": ({"rope_scaling": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096}}, 131072, 131072),
    "llama-3.1": ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}, 131072, 131072),
    "phi-3-128k": ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 4096}, 131072, 131072),
    "qwen2-vl": ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 32768, 32768),
    "gemma-3-4b, as transformers holds it": ({"rope_parameters": BY_LAYER}, 131072, 131072),
    "gemma-3-4b, as published": (
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        131072,
        131072,
    ),
    "the newer name of two": ({"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}}, 4096, 4096),
    "the name that transformers prefers": (
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}},
        4096,
        16384,
    ),
    "no scaling": ({"max_sequence_length": 2048, "rope_theta": 1e6}, 4096, 4096),
}


def window(config: Mapping[str, Any]) -> int | None:
    return ModelCard.of(config).context_length


@pytest.mark.parametrize(("keys", "limit", "expected"), PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_a_window_is_what_the_model_is_published_for(
    keys: dict[str, Any], limit: int, expected: int, nested: bool
) -> None:
    model = {"max_position_embeddings": limit, **keys}
    assert window({"text_config": model} if nested else model) == expected


def test_a_window_is_the_same_before_and_after_transformers_reads_the_config() -> None:
    for keys in (
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "max_sequence_length": 8192},
        {"rope_scaling": YARN},
    ):
        raw = {"max_position_embeddings": 4096, **keys}
        read = AutoConfig.for_model("llama", **copy.deepcopy(raw))  # which adds to the dicts that it is given
        assert window(read.to_dict()) == window(raw)
    gemma = AutoConfig.for_model("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert window(gemma.to_dict()) == gemma.max_position_embeddings


def test_a_config_without_a_limit_has_no_window() -> None:
    assert window({"rope_scaling": LINEAR}) is None


def test_a_loaded_model_has_its_scaled_window() -> None:
    node = shipped("model", "dummy-tiny")
    assert node is not None
    node["config"] |= {"max_position_embeddings": 512, "rope_scaling": {**LINEAR}}
    assert load(node, "cpu").card.context_length == 2048


def refused(*overrides: str) -> str:
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        composed = compose("config", list(overrides))
    with pytest.raises(ConfigError) as caught:
        check(composed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_task_lengths_are_held_to_the_scaled_window(tmp_path: Path) -> None:
    words = [
        f"results_dir={tmp_path}",
        "model=dummy-tiny",
        "model.config.max_position_embeddings=4096",
        "+model.config.rope_scaling={type: linear, factor: 4}",
        "task=passkey",
    ]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        check(compose("config", [*words, "task.lengths=[16000]"]))
    assert "16384" in refused(*words, "task.lengths=[16384]")


# Of each: the part of a config, and the key and value that the message names.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "linear", "factor": "four"}}, "rope_scaling.factor=four"),
    ({"rope_scaling": {"type": "linear", "factor": [4]}}, "rope_scaling.factor=[4]"),
    ({"rope_scaling": {"type": "dynamic", "factor": -2}}, "rope_scaling.factor=-2"),
    ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor=0"),
    ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor=null"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=null"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor=true"),
    ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "rope_scaling.factor=nan"),
    ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor=inf"),
    ({"rope_scaling": {"type": 4, "factor": 4}}, "rope_scaling.rope_type=4"),
    ({"rope_scaling": ["linear", 4]}, "rope_scaling=[linear,4]"),
    ({"rope_scaling": "linear"}, "rope_scaling=linear"),
    ({"rope_parameters": {**YARN, "original_max_position_embeddings": 1.5}}, "original_max_position_embeddings=1.5"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": "1"}}, "rope_parameters.low_freq_factor=1"),
    ({"rope_parameters": {**LONGROPE, "long_factor": 3}}, "rope_parameters.long_factor=3"),
    ({"rope_parameters": {**LONGROPE, "short_factor": [1, "x"]}}, "rope_parameters.short_factor=[1,x]"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": "x"}}},
        "rope_parameters.full_attention.factor=x",
    ),
    ({"rope_theta": "high"}, "rope_theta=high"),
]


@pytest.mark.parametrize(("keys", "named"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_rope_parameters_that_none_can_have_are_refused_by_key_and_value(
    keys: dict[str, Any], named: str, nested: bool
) -> None:
    part = {"max_position_embeddings": 4096, "num_hidden_layers": 2, **keys}
    model = {"text_config": part} if nested else part
    with pytest.raises(ConfigError, match="expected") as caught:
        ModelCard.of(model)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_with_a_wrong_factor_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    keys = {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": "four"},
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "config.json: rope_scaling.factor=four" in refused(f"model.path={tmp_path}", f"results_dir={tmp_path}/out")
    node = {**(shipped("model", "dummy-tiny") or {}), "path": str(tmp_path), "weights": "pretrained"}
    with pytest.raises(ConfigError, match="rope_scaling.factor=four"):
        load(node, "cpu")
