"""Latent attention: methods on absorbed queries and stored latents attend what each head's keys and values say they
do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from driver import Case, numbers, run_loop, slow, watch
from torch import Tensor
from zoo import LATENT, random_model

from kvbench import KVCache
from kvbench.backends.hf.layers import attention_modules
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import output_weight, use_kvbench_attention
from kvbench.config import ConfigError
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Footprint, Prompts

LENGTH, STEPS, BUDGET = 150, 5, 48
RANK, ROTARY, PLAIN, VALUE = 32, 8, 16, 12  # of `zoo.LATENT`
CLOSE = 1e-4  # of the largest output: float32 against float64
METHODS = ["full", "snapkv", "quest", "h2o", "icecache", "pariskv", "kvzip"]


class Of(NamedTuple):
    """A random model, as if it was loaded."""

    model: Any
    tokenizer: Any

    @classmethod
    def family(cls, name: str, tokenizer: Any, **changes: Any) -> Of:
        model = random_model(name, **changes)
        use_kvbench_attention(model)
        return cls(model, tokenizer)


class Pass(NamedTuple):
    """What a layer was given in a forward pass of one row, and what it gave: [q, hidden size] in float64."""

    states: Tensor
    out: Tensor


def passes_of(model: Any) -> dict[int, list[Pass]]:
    """From here on the passes of each layer's attention."""
    noted: dict[int, list[Pass]] = {}

    def note(layer: int, module: Any, args: Any, given: Any, out: Any) -> None:
        states = args[0] if args else given["hidden_states"]
        noted.setdefault(layer, []).append(Pass(states[0].double(), out[0][0].double()))

    for layer, module in attention_modules(model).items():
        module.register_forward_hook(
            lambda module, args, given, out, layer=layer: note(layer, module, args, given, out), with_kwargs=True
        )
    return noted


# -- the formula, of each head's keys and values -----------------------------------------------------------------------


def normed(x: Tensor, norm: Any) -> Tensor:
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return x * (x.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt() * norm.weight.double()


def turned(x: Tensor, positions: Tensor, theta: float, by_halves: bool) -> Tensor:
    """RoPE: pairs (2 i, 2 i + 1), or (i, i + d / 2), as complex numbers."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) if by_halves else torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    speed = theta ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angle = positions.double()[:, None] * speed
    out = pairs * torch.polar(torch.ones_like(angle), angle).view(-1, *[1] * (x.ndim - 2), speed.numel())
    return torch.cat([out.real, out.imag], dim=-1)  # a logit does not see the order of the pairs


def expected(module: Any, states: Tensor, attended: list[set[int]], by_halves: bool) -> Tensor:
    """What the last of the tokens whose hidden states [n, H] are given gets, of head h from the tokens attended[h]."""
    heads, theta = module.num_heads, module.config.rope_parameters["rope_theta"]
    last, positions = states[-1:], torch.arange(len(states))
    query = normed(last @ module.q_a_proj.weight.T.double(), module.q_a_layernorm) @ module.q_b_proj.weight.T.double()
    query = query.view(1, heads, PLAIN + ROTARY)
    down = states @ module.kv_a_proj_with_mqa.weight.T.double()
    latent = normed(down[:, :RANK], module.kv_a_layernorm)
    rotary = turned(down[:, RANK:], positions, theta, by_halves)
    up = (latent @ module.kv_b_proj.weight.T.double()).view(len(states), heads, PLAIN + VALUE)
    query_rotary = turned(query[..., PLAIN:], positions[-1:], theta, by_halves)
    outs = []
    for head, tokens in enumerate(attended):
        at = sorted(tokens)
        logits = up[at, head, :PLAIN] @ query[0, head, :PLAIN] + rotary[at] @ query_rotary[0, head]
        weights = (logits / math.sqrt(PLAIN + ROTARY)).softmax(dim=0)
        outs.append(weights @ up[at, head, PLAIN:])
    return torch.cat(outs) @ module.o_proj.weight.T.double()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("deepseek_v3", name) for name in METHODS),
        *slow(*((family, name) for family in LATENT if family != "deepseek_v3" for name in METHODS)),
    ],
)
def test_a_method_attends_what_it_chose_as_the_formula_says(family: str, name: str, tiny: Loaded) -> None:
    loaded, method = Of.family(family, tiny.tokenizer), Case(name, name).build()
    noted, seen = passes_of(loaded.model), watch(method)
    _, engine = run_loop(loaded, [numbers(LENGTH, seed=4)], method, None if name == "full" else BUDGET, steps=STEPS)
    assert (engine.shape.kv_heads, engine.shape.head_dim, engine.shape.latent_dim) == (1, RANK + ROTARY, RANK)
    assert len(seen) == STEPS * engine.shape.layers
    for attended in seen:
        passes = noted[attended.layer]
        steps = [one for one in passes if len(one.states) == 1]
        states = torch.cat([passes[0].states, *(one.states for one in steps[: attended.step])])
        sets = attended.sets(0)
        sets = sets * (engine.shape.query_heads // len(sets))
        assert name == "full" or all(len(tokens) < LENGTH for tokens in sets)
        module = attention_modules(loaded.model)[attended.layer]
        wanted = expected(module, states, sets, family == "minicpm3")
        near = CLOSE * float(wanted.abs().max())
        torch.testing.assert_close(steps[attended.step - 1].out[0], wanted, rtol=0, atol=near)


# -- bytes, and what values are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "entry"), [("native", 4 * (RANK + 32)), ("int8", RANK + 32 + 4)])
def test_a_token_takes_the_bytes_of_its_latent_and_rotary_key(kv: str, entry: int, tiny: Loaded) -> None:
    """Rows of 64 numbers, of which values are 32; int8 has a scale of 4 bytes beside."""
    loaded = Of.family("deepseek_v3", tiny.tokenizer, qk_rope_head_dim=32, head_dim=32)
    cache = KVCache(loaded.model, "full", None, dense_layers=(), kv=kv)
    loaded.model.generate(torch.tensor([numbers(LENGTH)]), past_key_values=cache, max_new_tokens=3, do_sample=False)
    engine = cache.engine
    assert engine is not None
    assert sum(store.resident_bytes() for store in engine.stores.values()) == 4 * (LENGTH + 2) * entry
    for store in engine.stores.values():
        key, value = store.resident()[:2]
        assert torch.equal(value, key[..., :RANK])


def test_a_card_counts_a_latent_once() -> None:
    model = random_model("deepseek_v3")
    card = ModelCard.of_config(model.config)
    assert (card.kv_heads, card.head_dim, card.latent_dim) == (1, RANK + ROTARY, RANK)
    footprint = Footprint.of(card, torch.float32, Prompts(100, 2))
    assert footprint is not None and footprint.cache == 2 * 100 * card.layers * 4 * (RANK + ROTARY)
    assert footprint.weights <= sum(each.nbytes for each in model.parameters())


def test_output_weights_take_a_latent_into_the_hidden_states(tiny: Loaded) -> None:
    model = Of.family("deepseek_v3", tiny.tokenizer).model
    weight, module = output_weight(model, 1), attention_modules(model)[1]
    latents = torch.randn(weight.shape[:2], generator=torch.Generator().manual_seed(0))
    values = module.kv_b_proj.weight.view(len(latents), PLAIN + VALUE, RANK)[:, PLAIN:]
    heads = torch.einsum("hr,hvr->hv", latents, values)
    torch.testing.assert_close(torch.einsum("hr,hre->e", latents, weight), module.o_proj(heads.flatten()))


def test_weights_that_change_are_seen_by_the_next_prompt(tiny: Loaded) -> None:
    model, ids = Of.family("deepseek_v3", tiny.tokenizer).model, torch.tensor([numbers(40)])
    KVCache(model, "full", None, dense_layers=())
    for module in attention_modules(model).values():
        module.kv_b_proj.weight.mul_(1.5)
    ours = model(ids, past_key_values=KVCache(model, "full", None, dense_layers=())).logits
    torch.testing.assert_close(ours, model(ids).logits, rtol=1e-4, atol=1e-4)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("think", {}, "method=ThinK: writes keys or values anew"),
        ("attention_matching", {}, "method=AttentionMatching: writes keys or values anew"),
        ("shadowkv", {}, "method=ShadowKV: moves values without keys"),
        ("full", {"kv": "kivi4"}, "kv=kivi4: codes values apart from keys"),
        ("full", {"kv": {"key": "int8", "value": "int4"}}, "codes values apart from keys"),
    ],
)
def test_what_needs_values_of_their_own_is_refused(
    method: str, options: dict[str, Any], reason: str, tiny: Loaded
) -> None:
    model = Of.family("deepseek_v3", tiny.tokenizer, qk_rope_head_dim=32, head_dim=32).model
    with pytest.raises(ConfigError, match=reason):
        KVCache(model, method, dense_layers=(), tokenizer=tiny.tokenizer, **options)
