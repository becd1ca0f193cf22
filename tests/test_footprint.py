"""Memory is asked for before it is taken: the estimate against what is there, and who is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import twin
from driver import numbers, run_loop
from transformers import AutoConfig, AutoModelForCausalLM

import kvbench.runs.run
from kvbench.backends.hf.loading import Loaded
from kvbench.cli.compose import composed
from kvbench.config import ConfigError, choices, method_config, shipped
from kvbench.models.card import ModelCard
from kvbench.models.footprint import GIB, Footprint, Prompts, free_memory
from kvbench.runs.sweep import run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = {  # weights, published or counted by transformers; norms and biases are left out of the estimate
    "llama3.1-8b-instruct": 8.030e9,
    "mistral-7b-instruct-v0.3": 7.248e9,
    "qwen3-8b": 8.191e9,
    "smollm2-135m-instruct": 134.5e6,
    "tiny": 5.189e6,
}


@pytest.mark.parametrize("name", SIZES)
def test_the_weights_of_a_shape_are_those_that_are_published(name: str) -> None:
    node = shipped("model", name)
    assert node is not None
    config = node.get("config") or json.loads(
        (Path(kvbench.__file__).parent / "assets" / name / "config.json").read_text()
    )
    found = Footprint.of(ModelCard.of(config), torch.bfloat16, Prompts(0))
    assert found is not None and found.weights == pytest.approx(2 * SIZES[name], rel=3e-3) and found.cache == 0


def test_weights_and_cache_are_what_a_model_holds_and_never_more(loaded: Loaded) -> None:
    prompt, steps = numbers(200), 24
    generation, _ = run_loop(loaded, [prompt], method_config("full").build(), None, steps=steps)
    found = Footprint.of(ModelCard.of(loaded.model.config.to_dict()), torch.float32, Prompts(len(prompt) + steps))
    weights = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    assert found is not None and 0.98 * weights < found.weights <= weights
    assert found.cache == generation.audit["device_kv_bytes"]


FITS = Footprint(weights=4 * GIB, cache=3 * GIB, activations=GIB)
ROOM = {"device": 8 * GIB, "host": 8 * GIB}


@pytest.mark.parametrize(
    ("device", "home", "free", "line"),
    [
        (GPU, "device", {}, ""),
        (GPU, "device", {"device": 7 * GIB}, r"task.lengths: 100 tokens x 2: takes 8.0 GiB of device memory at "),
        (GPU, "host", {"device": 5 * GIB, "host": 3 * GIB}, ""),
        (
            GPU,
            "host",
            {"host": 2 * GIB},
            r"task.lengths: .* takes 3.0 GiB of host .*\(KV cache 3.0\), and 2.0 are free; ",
        ),
        (
            GPU,
            "host",
            {"device": 3 * GIB},
            "model=big: takes 5.0 GiB of device memory .* choose a smaller model \\(",
        ),
        (
            CPU,
            "host",
            {"host": 7 * GIB},
            r"weights 4.0, activations 1.0, KV cache 3.0\), and 7.0 are free; choose shorter",
        ),
        (CPU, "device", {"device": 0}, ""),
        (GPU, "by_layer", {"device": 5 * GIB, "host": GIB}, ""),
        (CPU, "by_layer", {"host": 7 * GIB}, "task.lengths: .* takes 8.0 GiB of host memory"),
    ],
)
def test_a_run_is_refused_where_one_of_its_memories_is_too_small(
    device: torch.device, home: str, free: dict[str, int], line: str
) -> None:
    def refuse() -> None:
        FITS.refuse_too_large(device, home, "big", Prompts(100, 2), ROOM | free)

    if not line:
        return refuse()
    with pytest.raises(ConfigError, match=line) as caught:
        refuse()
    assert "\n" not in str(caught.value)


def test_nothing_is_refused_where_what_is_free_or_the_shape_is_not_known() -> None:
    FITS.refuse_too_large(GPU, "host", "big", Prompts(100), {})
    assert Footprint.of(ModelCard.of({"model_type": "llama"}), torch.float32, Prompts(10)) is None


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a sample of the small dummy on a machine with so many bytes free."""

    def make(free: int, *words: str) -> Any:
        monkeypatch.setattr(kvbench.runs.run, "free_memory", lambda device: {"host": free})
        size = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=1", "budget=64", f"results_dir={tmp_path}"]
        return run(composed(*size, *words))

    return make


def test_a_run_that_cannot_fit_is_refused_before_weights_are_made(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("made weights"))
        with pytest.raises(ConfigError, match=r"^model=dummy-tiny: .* GiB of host memory .*weights "):
            small(1 << 20)
        with pytest.raises(ConfigError, match=r"^task.lengths: 30010 tokens x 1: takes "):
            small(1 << 25, "task.lengths=[30000]")
    assert small(1 << 20, "memory_check=false")["n"] == small(1 << 30)["n"] == 1


def test_a_method_that_may_drop_what_a_layer_read_is_not_refused_for_it(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = shipped("model", "dummy-tiny")
    assert node is not None
    needed = Footprint.of(ModelCard.of(node["config"]), torch.float32, Prompts(3010, chunk=4096))
    assert needed is not None
    words = ["task.lengths=[3000]", "dtype=float32"]
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("made weights"))
    with pytest.raises(ConfigError, match="^task.lengths: 3010 tokens x 1: takes "):
        small(sum(needed) - 1, "method=full", *words)
    with pytest.raises(pytest.fail.Exception, match="made weights"):
        small(sum(needed) - 1, "method=snapkv", *words)


def test_keys_that_are_made_are_there_a_layer_at_a_time_whatever_the_batch(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = shipped("model", "dummy-tiny")
    assert node is not None
    needed = Footprint.of(ModelCard.of(node["config"]), torch.float32, Prompts(9011, rows=16))
    assert needed is not None
    words = ["task=latency", "task.lengths=[300,9000]", "task.batch=[1,16]", "task.steps=8", "task.warmup=2"]
    words += ["dtype=float32", "task.keys=synthetic_attention", "task.prefill=false"]
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("made weights"))
    with pytest.raises(ConfigError, match="^task.lengths: 9011 tokens x 16: takes "):
        small(needed.weights + needed.cache - 1, "method=full", *words)
    for free, method in ((needed.weights + needed.cache, "full"), (needed.weights, "snapkv")):
        with pytest.raises(pytest.fail.Exception, match="made weights"):
            small(free, f"method={method}", *words)


def test_what_is_free_is_at_most_what_the_machine_has() -> None:
    total = int(re.findall(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < free_memory(CPU)["host"] <= total


def test_what_ran_before_on_a_gpu_leaves_it_free() -> None:
    """torch keeps what was freed for itself, and what refers to itself is there until somebody looks."""
    with twin.device() as cuda:
        before = free_memory(twin.CUDA)["device"]
        block = SimpleNamespace(keys=torch.zeros(2**20, device="cuda"))
        block.itself = block
        assert free_memory(twin.CUDA)["device"] == before - block.keys.nbytes
        del block
        assert free_memory(twin.CUDA)["device"] == before
        assert cuda.reserved == 2**22


def test_every_model_of_conf_has_a_footprint() -> None:
    for name in choices("model"):
        node = shipped("model", name)
        assert node is not None
        if node.get("config"):
            found = Footprint.of(ModelCard.of(node["config"]), torch.bfloat16, Prompts(4096))
            assert found is not None and min(found) > 0


@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2", "nemotron", "phi", "qwen3_moe", "gemma3_text"])
def test_no_family_has_fewer_weights_than_are_asked_for(family: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 50, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "moe_intermediate_size": 32} if "moe" in family else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads, **experts))
    found = Footprint.of(ModelCard.of(model.config.to_dict()), torch.bfloat16, Prompts(64))
    assert found is not None and found.weights <= 2 * sum(each.numel() for each in model.parameters())
