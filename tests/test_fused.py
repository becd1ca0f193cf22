"""Layers in few launches: they are transformers' own but for rounding, on the twins of a GPU and of FlashInfer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import flashinfer_twin
import pytest
import torch
from driver import METHODS, SMALL, numbers, run_loop, slow
from transformers import PreTrainedModel
from twin import Twin, device
from zoo import random_model

from kvbench import KVCache
from kvbench.attention import flashinfer
from kvbench.backends.hf.fused import fuse
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import use_kvbench_attention
from kvbench.config import ASSETS, ConfigError, shipped

CASES = {case.id: case for case in METHODS}
# Of the size of the logits: in float32 the order of a sum's terms is all that differs.
EXACT = 1e-5
# In bfloat16 the fused layers, which round less often, are at least as near to exact numbers, but for chance.
AS_NEAR = 1.1
IDS = torch.tensor([numbers(70), numbers(70, seed=1)])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twin]:
    """A device with FlashInfer."""
    flashinfer_twin.install(monkeypatch)
    flashinfer_twin.take_small_models(monkeypatch)
    with device() as cuda:
        yield cuda


def named(name: str, fused: str, dtype: str = "float32", where: str = "cuda") -> Loaded:
    group = {**(shipped("model", name) or {}), "fused": fused}
    if name == "tiny":
        group["path"] = str(ASSETS / "tiny")
    return load(group, device=where, dtype=dtype)


def of_family(family: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model on the device, and the same to be fused."""
    plain = random_model(family, **changes)
    for parameter in plain.parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros, whose lack none would see
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    both = plain, copy.deepcopy(plain)
    for model in both:
        use_kvbench_attention(model.to("cuda"))
    return both


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    return model(ids.to(model.device), **options).logits.cpu().double()


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far numbers are from others, over the size of these."""
    return float((ours - theirs).norm() / theirs.norm())


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", *slow("dummy-qwen3", "dummy-mistral")])
def test_fused_layers_compute_what_transformers_does(cuda: Twin, name: str) -> None:
    fused = named(name, "flashinfer")
    assert fused.unfused is None
    exact = logits(named(name, "none").model)
    assert apart(logits(fused.model), exact) < EXACT
    rounded = [logits(named(name, word, "bfloat16").model) for word in ("flashinfer", "none")]
    assert apart(rounded[0], exact) <= AS_NEAR * apart(rounded[1], exact)


SCALED: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_positions_are_scaled_as_the_model_scales_them(cuda: Twin, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]}
    plain, fused = of_family("llama", rope_parameters=rope, max_position_embeddings=64)
    assert fuse(fused) is None and apart(logits(fused), logits(plain)) < EXACT


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2-window", {}),
        ("qwen3", {}),
    ],
)
def test_models_are_fused_by_their_parts_whatever_their_name(cuda: Twin, family: str, changes: dict[str, Any]) -> None:
    plain, fused = of_family(family, **changes)
    assert fuse(fused) is None and apart(logits(fused), logits(plain)) < EXACT


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma", "its layers are not "),  # other norms
        ("phi3", "its layers are not "),  # merged by itself
        ("olmo2", "its layers are not "),  # norms behind
        ("gpt2", "its layers are not "),
        ("granite", "its layers compute something else"),  # a factor that is no part
        ("smollm3", "its layers compute something else"),  # some without positions
    ],
)
def test_another_model_runs_as_ever(cuda: Twin, family: str, reason: str) -> None:
    changes = {"residual_multiplier": 0.3} if family == "granite" else {}
    plain, fused = of_family(family, **changes)
    assert (fuse(fused) or "").startswith(reason)
    assert torch.equal(logits(fused), logits(plain))
    with pytest.raises(ConfigError, match=f"^model.fused=flashinfer: .*: {reason}"):
        fuse(fused, "flashinfer")


# -- as part of a generation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "squeeze", *slow("quest", "kvzip", "streaming_llm", "icecache", "duo")])
def test_methods_generate_as_over_layers_as_they_were(cuda: Twin, name: str) -> None:
    """In chunks, of ragged rows; a method may see the inside of a layer (squeeze), and read a prompt again (kvzip)."""
    outcomes = []
    for word in ("none", "auto"):
        steps = list[torch.Tensor]()
        generation, engine = run_loop(
            named("dummy-tiny", word),
            [numbers(150), numbers(90, seed=1)],
            CASES[name].build(),
            SMALL,
            prefill_chunk=64,
            forced_tokens=[numbers(7, seed=2)] * 2,
            watch=lambda step, steps=steps: steps.append(step.cpu()),
        )
        outcomes.append((torch.stack(steps), generation.audit, engine.captured))
    ours, theirs = outcomes[1], outcomes[0]
    assert apart(ours[0], theirs[0]) < EXACT and ours[1] == theirs[1]
    assert (ours[2] is None) == (theirs[2] is None)


def test_turns_in_generate_of_transformers(cuda: Twin) -> None:
    answers = []
    for word in ("none", "auto"):
        model = named("tiny", word).model
        cache, asked = KVCache(model, "snapkv", SMALL), IDS[:1].to("cuda")
        for _ in range(2):
            options = {"attention_mask": torch.ones_like(asked), "max_new_tokens": 6, "do_sample": False}
            out = model.generate(asked, past_key_values=cache, **options)
            asked = torch.cat([out, IDS[1:, :9].to("cuda")], dim=1)
        answers.append(out.tolist())
    assert answers[0] == answers[1]


def test_what_a_caller_gives_or_asks_to_see_is_not_overwritten(cuda: Twin) -> None:
    plain, fused = (named("dummy-tiny", word).model for word in ("none", "auto"))
    embedded = fused.get_input_embeddings()(IDS.to("cuda"))
    before = embedded.clone()
    with torch.inference_mode():
        fused(inputs_embeds=embedded)
        assert torch.equal(embedded, before)
        ours, theirs = (model(IDS.to("cuda"), output_hidden_states=True).hidden_states for model in (fused, plain))
    assert all(apart(one.cpu(), other.cpu()) < EXACT for one, other in zip(ours, theirs, strict=True))


# -- weights, and who is refused ---------------------------------------------------------------------------------------


def test_merged_weights_are_there_once_and_tied_ones_stay_tied(cuda: Twin) -> None:
    named("tiny", "auto")  # makes FlashInfer's workspace
    model = named("tiny", "none").model
    weights = {name: weight.cpu().clone() for name, weight in model.named_parameters()}
    held = cuda.allocated
    assert fuse(model) is None
    assert cuda.allocated - held < 0.01 * held  # what the trial notes of each layer
    assert all(torch.equal(weight.cpu(), weights[name]) for name, weight in model.named_parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_keeps_layers_from_it_is_said(cuda: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("tiny", "auto", where="cpu").unfused == "cpu is not a CUDA device"
    assert named("tiny", "none").unfused == "model.fused=none"
    with pytest.raises(ConfigError, match="^model.fused=flashinfer: LlamaForCausalLM: cpu is not a CUDA device; "):
        named("tiny", "flashinfer", where="cpu")
    monkeypatch.setattr(flashinfer, "FLASHINFER_DTYPES", ("bfloat16", "float16"))
    assert named("tiny", "auto").unfused == "dtype float32 is not one of bfloat16, float16"


def test_operators_that_do_not_run_leave_the_layers_as_they_were(cuda: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("nvcc: not there\nat all")

    monkeypatch.setattr("flashinfer.silu_and_mul", no_compiler)
    plain, loaded = named("tiny", "none"), named("tiny", "auto")
    assert loaded.unfused == "FlashInfer's operators do not run here (nvcc: not there)"
    assert torch.equal(logits(loaded.model), logits(plain.model))
