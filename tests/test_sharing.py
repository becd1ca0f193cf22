"""Layers that attend what another one stores, soft caps and chunks: a model under a method answers as a dense model
that sees what the method keeps, and bytes are counted once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from driver import SMALL, numbers
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from zoo import LENGTH, NEW, SHARED, SIZES, WINDOW, generated, inputs, random_model

from kvbench import KVCache
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.engine.audit import Audit
from kvbench.engine.batch import generate
from kvbench.measure.synthetic import Filled, SyntheticEngine
from kvbench.method import Method, Needs, Selection

CAPPED: dict[str, Any] = {"attn_logit_softcapping": 1.5, "sliding_window": WINDOW}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": CAPPED,
    "vaultgemma": CAPPED,
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "no_rope_layer_interval": 2,
        "floor_scale": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
    },
    **{family: {} for family in SHARED},
}
READERS = {4: 2, 5: 2}  # of `SHARED`, with full attention; another one reads the window
METHODS = ["full", "snapkv", "quest", "h2o", "icecache", "pariskv", "kvzip"]
QUICK = [("gemma2", "h2o"), ("gemma3n_text", "quest"), ("gemma3n_text", "h2o"), ("gemma4_text", "snapkv")]
CLOSE = 1e-4  # of the largest logit
MASKED = "masked_by_the_test"

# -- the reference ----------------------------------------------------------------------------------------------------

kept: dict[int, torch.Tensor] = {}  # of a step: what each query head of a layer attends, [Hq, n], -1 for none


def dense(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float = 1.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over all keys, of which a head sees those of `kept`."""
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits + mask
    if module.layer_idx in kept:
        for head, ids in enumerate(kept[module.layer_idx].tolist()):
            hidden = sorted(set(range(key.shape[2])) - set(ids))
            logits[:, head, :, hidden] = -torch.inf
    out = logits.softmax(dim=-1) @ value.repeat_interleave(group, dim=1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(MASKED, dense)
AttentionMaskInterface.register(MASKED, eager_mask)


@torch.no_grad()
def answered(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: torch.Tensor, steps: list[dict[int, torch.Tensor]]
) -> torch.Tensor:
    """Logits [n, V] after the prompt and after each token but the last, read by the dense model."""
    model.set_attn_implementation(MASKED)
    past = DynamicCache(config=model.config)
    kept.clear()
    logits = [model(prompt, past_key_values=past).logits[0, -1]]
    for token, of_step in zip(tokens, steps, strict=False):
        kept.update(of_step)
        logits.append(model(token.view(1, 1), past_key_values=past).logits[0, -1])
    kept.clear()
    return torch.stack(logits)


class Noted:
    """What layers attend in each step of a generation, by the audit's notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[int, torch.Tensor]] = []
        self.cache: Any = None
        note = Audit.attended

        def attended(audit: Audit, layer: int, selection: Selection | None, resident: Any) -> None:
            shape = audit.shape
            stores = self.cache.engine.stores
            index = stores[shape.source(layer)].resident_ids() if selection is None else selection.index
            if not self.steps or layer in self.steps[-1]:
                self.steps.append({})
            heads = index[0].expand(max(index.shape[1], shape.kv_heads), -1)
            self.steps[-1][layer] = heads.repeat_interleave(shape.query_heads // len(heads), dim=0).clone()
            note(audit, layer, selection, resident)

        monkeypatch.setattr(Audit, "attended", attended)


def scored(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [NEW] of a row, and the logits [NEW, V] that chose them."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    out = model.generate(ids, **given, past_key_values=cache, output_logits=True, return_dict_in_generate=True)
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits)


EACH = [(family, method) for family in CHANGES for method in METHODS]


@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param(*run, marks=[pytest.mark.slow] * (run not in QUICK)) for run in EACH],
)
def test_a_model_answers_as_a_dense_one_that_sees_what_is_kept(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    model, noted = random_model(family, "eager", **CHANGES[family]), Noted(monkeypatch)
    theirs, ids = copy.deepcopy(model), inputs(1)["input_ids"]
    for attention in ("reference", "torch", "cpu"):
        noted.steps.clear()
        budget = None if method == "full" else SMALL
        noted.cache = KVCache(model, method, budget, dense_layers=(), attention=attention, tokenizer=tiny.tokenizer)
        tokens, logits = scored(model, ids, noted.cache)
        expected = answered(theirs, ids, tokens, noted.steps)
        near = CLOSE * float(expected.abs().max().clamp(min=1))
        torch.testing.assert_close(logits, expected, rtol=0, atol=near)
        assert len(noted.steps) == NEW - 1 and not noted.cache.audit()["over_rule"]
        attended = max(int((ids >= 0).sum(dim=1).max()) for ids in noted.steps[-1].values())
        assert attended == LENGTH + NEW - 1 if method == "full" else attended < LENGTH
        if family in SHARED:
            assert {2, *READERS} <= noted.steps[-1].keys(), "what is attended is counted in each layer"


# -- whose queries count ----------------------------------------------------------------------------------------------


class Asked(Method):
    """Notes whom it is asked about, and attends everything."""

    def __init__(self, needs: Needs) -> None:
        self.needs, self.asked, self.calls = needs, list[tuple[int, torch.Tensor]](), list[str]()

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        self.asked.append((layer, query.clone()))
        return None

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.calls.append(f"append {layer}")

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.calls.append(f"observe {layer}")


@pytest.mark.parametrize("needs", [Needs(), Needs(probabilities=True), Needs(queries=True)])
def test_a_method_learns_from_the_queries_of_the_layer_that_stores(needs: Needs) -> None:
    """And finds by those of each layer that attends."""
    model, method = random_model("gemma3n_text", "eager"), Asked(needs)
    generated(model, inputs(1), KVCache(model, method, None, dense_layers=()), max_new_tokens=2)
    learns = needs.probabilities or needs.queries
    assert [layer for layer, _ in method.asked] == ([0, 2] if learns else [0, 2, 2, 2])
    assert len({tuple(query.flatten().tolist()) for _, query in method.asked}) == len(method.asked)
    assert [call for call in method.calls if "append" in call] == ["append 0", "append 2"]
    assert [call for call in method.calls if "observe" in call] == ["observe 0", "observe 2"] * needs.probabilities


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "head_dims"), [("gemma3n_text", (16, 16)), ("gemma4_text", (16, 32))])
def test_bytes_are_counted_once_and_what_is_attended_in_each_layer(family: str, head_dims: tuple[int, int]) -> None:
    """Of the layers with full attention two store, and four attend; one window is stored."""
    window, entry = (2 * SIZES["num_key_value_heads"] * width * 4 for width in head_dims)
    model = random_model(family, "eager")
    cache = KVCache(model, "full", None, dense_layers=())
    generated(model, inputs(1), cache)
    audit, held = cache.audit(), LENGTH + NEW - 1
    assert audit["device_kv_bytes"] == 2 * held * entry + (WINDOW - 1) * window
    assert audit["attended_max"] == held and audit["dense_share"] == 0
    cache = KVCache(model, "snapkv", SMALL, dense_layers=(0,))
    generated(model, inputs(1), cache)
    audit = cache.audit()
    assert audit["device_kv_bytes"] <= (held + SMALL + NEW) * entry + (WINDOW - 1) * window
    assert audit["dense_share"] == pytest.approx(1 / 6) and audit["attended_mean"] < SMALL + NEW


# -- turns, copies, arms ----------------------------------------------------------------------------------------------


def turn_after(first: dict[str, torch.Tensor], answers: list[list[int]]) -> dict[str, torch.Tensor]:
    """The conversation so far, with nine more tokens of each row."""
    rows = zip(first["input_ids"].tolist(), answers, strict=True)
    asked = torch.tensor([[*row, *new, *numbers(9, seed=3)] for row, new in rows])
    mask = torch.nn.functional.pad(first["attention_mask"], (0, asked.shape[1] - LENGTH), value=1)
    return {"input_ids": asked, "attention_mask": mask}


def logits_of(model: PreTrainedModel, given: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> Any:
    """New tokens of each row, and the logits [NEW, B, V] that chose them."""
    options = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache, **options}
    out = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
    return out.sequences[:, given["input_ids"].shape[1] :].tolist(), torch.stack(out.logits)


@pytest.mark.parametrize("family", ["gemma4_text", *[pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]])
def test_full_attention_equals_transformers(family: str) -> None:
    """A padded batch, a turn, a copy that goes on, and a prompt in chunks."""
    model = random_model(family, "eager", **CHANGES[family])
    theirs, first = copy.deepcopy(model), inputs(2)
    answers, logits = logits_of(theirs, first)
    turn, cache = turn_after(first, answers), KVCache(model, "full", None)
    found = [logits_of(model, first, cache)]
    twin = copy.deepcopy(cache)
    found += [logits_of(model, turn, cache), logits_of(model, turn, twin)]
    chunked = KVCache(model, "full", None, prompt_length=LENGTH)
    found.append(logits_of(model, first, chunked, prefill_chunk_size=50))
    expected = [(answers, logits), *[logits_of(theirs, turn)] * 2, (answers, logits)]
    for (tokens, ours), (their_tokens, plain) in zip(found, expected, strict=True):
        assert tokens == their_tokens
        torch.testing.assert_close(ours, plain, rtol=0, atol=CLOSE * float(plain.abs().max().clamp(min=1)))


@pytest.mark.parametrize("method", ["quest", pytest.param("h2o", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SHARED)
def test_a_copy_goes_on_as_its_original_does(family: str, method: str) -> None:
    model, first = random_model(family, "eager"), inputs(2)
    cache = KVCache(model, method, SMALL, dense_layers=())
    turn = turn_after(first, generated(model, first, cache))
    twin = copy.deepcopy(cache)
    assert generated(model, turn, twin) == generated(model, turn, cache)


@pytest.mark.parametrize("name", ["quest", "h2o"])
def test_a_synthetic_prompt_is_attended_by_layers_that_store_none(name: str) -> None:
    model, rows = random_model("gemma3n_text", "eager"), [numbers(200, seed=1)]
    use_kvbench_attention(model)
    settings: dict[str, Any] = {"kind": SyntheticEngine, "new_tokens": NEW}
    engine = engine_for(model, [200], method_named(name), Budget(64), (), **settings)
    prefilled = None if method_named(name).needs.attention_sums else Filled(engine, rows)
    audit = generate(ModelRunner(model), rows, engine, max_new_tokens=NEW, prefilled=prefilled).audit
    assert audit["attended_max"] < 200 and not audit["over_rule"]


@pytest.mark.parametrize("family", SHARED)
def test_methods_begin_from_one_prefill(family: str) -> None:
    model, prompts = random_model(family, "eager"), [numbers(LENGTH, seed=1), numbers(61, seed=2)]
    names = ["full", "snapkv", "quest", "h2o"]
    given = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))} for row in prompts]
    plain = [generated(model, alone)[0] for alone in given]
    use_kvbench_attention(model)
    needs = [method_named(name).needs for name in names]
    shared = prefill_once(model, prompts, needs, max_new_tokens=NEW, chunk=50)
    for name in names:
        runs = []
        for options in ({"prefill_chunk": 50}, {"prefilled": shared}):
            budget = Budget(None if name == "full" else SMALL)
            engine = engine_for(model, [len(row) for row in prompts], method_named(name), budget, (), new_tokens=NEW)
            runs.append(generate(ModelRunner(model), prompts, engine, max_new_tokens=NEW, **options))
        assert runs[0].tokens == runs[1].tokens and runs[0].audit == runs[1].audit, name
        assert name != "full" or runs[0].tokens == plain
