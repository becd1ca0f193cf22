"""Positions inside the cache, against an implementation that keeps keys before RoPE and turns them at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, numbers, run_loop
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench.attention.executor import executor as executor_named
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.rotary import RotaryOf
from kvbench.budget import Budget
from kvbench.config import ConfigError, shipped
from kvbench.engine.positions import CachePositions, ModelRotation
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape

PROMPT = numbers(150)
STEPS = 40  # beyond the step at which StreamingLLM next evicts
SINKS = 4
# The window stays at its positions of up to 190, whose angles are known to 190 * 2^-24; by hand it goes to small ones.
NEAR = 4 * CLOSE


def with_rope(**parameters: Any) -> Loaded:
    """The dummy Llama with other rotary positions."""
    config = shipped("model", "dummy-tiny")
    assert config is not None
    shape = {**config["config"], "rope_parameters": {"rope_theta": 10000.0, **parameters}}
    return load({**config, "config": shape}, device="cpu", dtype="float32")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@torch.inference_mode()
def streaming(
    loaded: Loaded, prompt: Sequence[int], budget: int, fed: Sequence[int], *, in_cache: bool
) -> torch.Tensor:
    """Logits [steps, V] of StreamingLLM by hand: sinks and most recent tokens, pre-RoPE keys, after a dense prefill.

    Args:
        fed: the token read at each step.
        in_cache: turn the m-th token that is kept to position m; else each to its own position.
    """
    model = loaded.model.model
    head_dim, group = model.layers[0].self_attn.head_dim, model.layers[0].self_attn.num_key_value_groups
    cached: list[dict[str, torch.Tensor]] = [{} for _ in model.layers]

    def split(projected: torch.Tensor) -> torch.Tensor:
        return projected.view(projected.shape[0], -1, head_dim).transpose(0, 1)  # [H, n, D]

    def turned(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = model.rotary_emb(vectors[None], positions[None])
        return apply_rotary_pos_emb(vectors[None], vectors[None], cos, sin)[0][0]

    def forward(ids: Sequence[int], first: int, kept: torch.Tensor | None) -> torch.Tensor:
        """Read `ids` at positions from `first`; `kept` are the tokens attended, None: all before each query."""
        hidden = model.embed_tokens(torch.tensor(ids))
        own = torch.arange(first, first + len(ids))
        for layer, cache in zip(model.layers, cached, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, new = split(attention.q_proj(normed)), {"key": split(attention.k_proj(normed))}
            new["value"] = split(attention.v_proj(normed))
            for name, part in new.items():
                cache[name] = part if first == 0 else torch.cat([cache[name], part], dim=1)
            if kept is None:
                key, value = turned(cache["key"], own), cache["value"]
                query = turned(query, own)
                mask = own <= own[:, None]
            else:
                place = torch.arange(len(kept)) if in_cache else kept
                key, value = turned(cache["key"][:, kept], place), cache["value"][:, kept]
                query = turned(query, place[-1:])
                mask = torch.ones(1, len(kept), dtype=torch.bool)
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
            logits = (query @ key.transpose(1, 2)) * head_dim**-0.5
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            attended = (weights @ value).transpose(0, 1).flatten(1)
            hidden = hidden + attention.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return loaded.model.lm_head(model.norm(hidden[-1]))

    forward(prompt, 0, None)
    logits = []
    for step, token in enumerate(fed):
        length = len(prompt) + step + 1
        recent = range(max(SINKS, length - (budget - SINKS)), length)
        logits.append(forward([token], length - 1, torch.tensor([*range(min(SINKS, length)), *recent])))
    return torch.stack(logits)


def streamed(
    loaded: Loaded, prompts: Sequence[Sequence[int]], budget: int | None, steps: int = STEPS, **options: Any
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and decode logits [B, steps, V] of the method streaming_llm in the measured loop."""
    noted: list[torch.Tensor] = []
    hook = loaded.model.lm_head.register_forward_hook(lambda _, __, out: noted.append(out[:, -1].clone()))
    try:
        run_options = {name: options.pop(name) for name in ("executor", "prefill_chunk") if name in options}
        method = method_named(options.pop("name", "streaming_llm"), **options)
        generation, _ = run_loop(loaded, prompts, method, budget, steps=steps, **run_options)
    finally:
        hook.remove()
    return generation.tokens, torch.stack(noted[-steps:], dim=1)


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_streaming_llm_equals_keys_turned_before_every_step(tiny: Loaded, positions: str, executor: str) -> None:
    steps = STEPS if executor == "torch" else 5
    tokens, logits = streamed(tiny, [PROMPT], SMALL, steps, positions=positions, executor=executor)
    expected = streaming(tiny, PROMPT, SMALL, tokens[0][:-1], in_cache=positions == "cache")
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=NEAR)


def test_the_two_kinds_of_positions_differ(tiny: Loaded) -> None:
    """The test above could not fail if positions changed nothing."""
    fed = streamed(tiny, [PROMPT], SMALL, 5)[0][0][:-1]
    by_place, by_origin = (streaming(tiny, PROMPT, SMALL, fed, in_cache=kind) for kind in (True, False))
    assert (by_place - by_origin).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR], ids=lambda rope: rope["rope_type"])
def test_streaming_llm_with_scaled_rope(rope: dict[str, Any]) -> None:
    loaded = with_rope(**rope)
    tokens, logits = streamed(loaded, [PROMPT], SMALL, 6)
    expected = streaming(loaded, PROMPT, SMALL, tokens[0][:-1], in_cache=True)
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=NEAR)


def test_rows_of_a_batch_keep_positions_of_their_own(tiny: Loaded) -> None:
    prompts = [PROMPT, numbers(97, seed=1), numbers(30, seed=2)]  # the last is shorter than the budget at first
    tokens, logits = streamed(tiny, prompts, SMALL)
    for row, prompt in enumerate(prompts):
        expected = streaming(tiny, prompt, SMALL, tokens[row][:-1], in_cache=True)
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize("executor", ["reference", "torch", "cpu"])
def test_probabilities_come_in_the_order_of_the_selection(tiny: Loaded, executor: str) -> None:
    """Of tokens in any order, with gaps, by hand: keys and query without RoPE, turned to the places in the cache."""
    ids = torch.tensor([[[0, 59, -1, 3, 58, 1, 57, 30]]])
    rank = torch.tensor([[[0, 6, 0, 2, 5, 1, 4, 3]]])
    rng = torch.Generator().manual_seed(0)
    key, query = torch.randn(1, 2, 60, 32, generator=rng), torch.randn(1, 4, 1, 32, generator=rng)
    rotation = ModelRotation(RotaryOf(tiny.model, [0]))
    turned, last = rotation.turn(key, torch.arange(60).expand(1, 1, 60)), torch.tensor([[[59]]])
    store = LayerStore(1, 2, 32, 60, torch.float32, torch.device("cpu"))
    store.write_prompt(turned, turned, 0, [0])
    store.seal_prompt([60])
    shape = Shape(1, 4, 2, 32, (60,), torch.float32, torch.device("cpu"), 1.0, (0,))
    positions = CachePositions(shape, RotaryOf(tiny.model, [0]))
    attended = positions(Selection(ids), store, query.device)
    _, weights = executor_named(executor, shape)(rotation.turn(query, last), store, attended, 0.1, True)
    assert weights is not None
    at_places = rotation.turn(key[:, :, ids[0, 0].clamp(min=0)], rank).repeat_interleave(2, dim=1)
    logits = (rotation.turn(query, torch.tensor([[[6]]])) @ at_places.transpose(2, 3))[:, :, 0] * 0.1
    expected = logits.masked_fill(ids < 0, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(positions.in_order(weights), expected, rtol=0, atol=NEAR)


def dynamic() -> Loaded:
    return with_rope(rope_type="dynamic", factor=4.0)


def longrope() -> Loaded:
    factors = [1.0 + place / 16 for place in range(16)]
    return with_rope(
        rope_type="longrope",
        factor=4.0,
        short_factor=factors,
        long_factor=factors[::-1],
        original_max_position_embeddings=64,
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_the_length_is_refused(kind: str) -> None:
    loaded = {"dynamic": dynamic, "longrope": longrope}[kind]()
    with pytest.raises(ConfigError, match=f"{kind} RoPE.*positions=original"):
        engine_for(loaded.model, [30], method_named("streaming_llm"), Budget(SMALL), ())
    engine_for(loaded.model, [30], method_named("streaming_llm", positions="original"), Budget(SMALL), ())
    engine_for(loaded.model, [30], method_named("quest"), Budget(SMALL), ())


# cos and sin of an angle of p radians are known to p * 2^-24, and three of them meet in one number of size 1 to 4.
ANGLES = 4 * 3 * 400 * 2**-24


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3, YARN, LINEAR], ids=lambda rope: rope["rope_type"])
def test_rotation_moves_a_key_to_any_position(rope: dict[str, Any]) -> None:
    """rotate(rope(x, p), d) = rope(x, p + d), another p and d for every row, head and token."""
    loaded = with_rope(**rope)
    rotary = loaded.model.model.rotary_emb
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 20, 32, generator=rng).clamp(-4, 4)
    position = torch.randint(0, 400, (2, 3, 20), generator=rng)
    target = torch.randint(0, 400, (2, 3, 20), generator=rng)

    def rope_at(places: torch.Tensor) -> torch.Tensor:
        flat = x.view(6, 1, 20, 32)
        cos, sin = rotary(flat, places.view(6, 20))
        return apply_rotary_pos_emb(flat, flat, cos, sin)[0].view_as(x)

    own = RotaryOf(loaded.model, [0])
    turned = own.turn(rope_at(position), own.angles(target - position))
    torch.testing.assert_close(turned, rope_at(target), rtol=0, atol=ANGLES)
    assert (rope_at(position) - rope_at(target)).abs().max() > 1


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3, YARN, LINEAR], ids=lambda rope: rope["rope_type"])
def test_keys_are_turned_back_to_what_they_were_before_rope_and_on_again(rope: dict[str, Any]) -> None:
    """YaRN's factor on the attention stays in them, which a turn does not change."""
    loaded = with_rope(**rope)
    before = torch.randn(2, 3, 20, 32, generator=torch.Generator().manual_seed(0))
    position = torch.randint(0, 400, (2, 3, 20), generator=torch.Generator().manual_seed(1))
    flat = before.view(6, 1, 20, 32)
    cos, sin = loaded.model.model.rotary_emb(flat, position.view(6, 20))
    keys = apply_rotary_pos_emb(flat, flat, cos, sin)[0].view_as(before)
    rotation = ModelRotation(RotaryOf(loaded.model, [0]))
    back = rotation.back(keys, position)
    factor = loaded.model.model.rotary_emb.attention_scaling
    torch.testing.assert_close(back, before * factor, rtol=0, atol=CLOSE)
    torch.testing.assert_close(rotation.turn(back, position), keys, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_reaches_positions_later_than_all_before(tiny: Loaded, dtype: torch.dtype) -> None:
    own = RotaryOf(tiny.model, [0])
    rotation, vectors = ModelRotation(own), torch.randn(1, 2, 2, 32).to(dtype)
    for last in (5, 1023, 1024, 5000, 7):
        positions = torch.tensor([[[last, 3]]])
        expected = own.turn(vectors, own.angles(positions))
        torch.testing.assert_close(rotation.turn(vectors, positions), expected, rtol=0, atol=CLOSE)
        torch.testing.assert_close(rotation.back(expected, positions).float(), vectors.float(), rtol=0, atol=0.05)


def test_a_model_whose_keys_cannot_be_turned_back_is_refused_by_shadowkv() -> None:
    with pytest.raises(ConfigError, match="dynamic RoPE.*use another method"):
        engine_for(dynamic().model, [30], method_named("shadowkv"), Budget(SMALL), ())


def test_keys_whose_largest_channels_hardly_turn_are_turned_all_the_same() -> None:
    """Qwen2.5's biases are such, and in bfloat16 all that turns is then near the rounding of the whole key."""
    config = shipped("model", "dummy-tiny")
    assert config is not None
    shape = {**config["config"], "attention_bias": True, "rope_parameters": {"rope_theta": 1e6}}
    model = load({**config, "config": shape}, device="cpu", dtype="bfloat16").model
    for layer in model.model.layers:
        head = layer.self_attn.k_proj.bias.data.view(-1, layer.self_attn.head_dim)
        head[:, head.shape[1] // 2 - 1] = head[:, -1] = 500.0  # the slowest pair
    RotaryOf(model, range(len(model.model.layers)))


def test_rotation_keeps_the_type_of_what_it_turns(tiny: Loaded) -> None:
    vectors = torch.randn(1, 2, 3, 32).bfloat16()
    own = RotaryOf(tiny.model, [0])
    assert torch.equal(own.turn(vectors, own.angles(torch.zeros(1, 1, 3, dtype=torch.int64))), vectors), "a turn by 0"


def test_layers_that_attend_one_list_share_its_angles(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = RotaryOf.angles

    def angles(self: RotaryOf, by: torch.Tensor) -> Any:
        asked.append(by.shape[2])
        return real(self, by)

    monkeypatch.setattr(RotaryOf, "angles", angles)
    RotaryOf(tiny.model, range(tiny.model.config.num_hidden_layers))
    tried, asked = len(asked), []
    streamed(tiny, [PROMPT], SMALL)
    assert len(asked) - tried == 2 * STEPS, "of the sinks, from their old places and to their new ones"
