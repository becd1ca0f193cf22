"""Models on two GPUs, the twin's: what is generated and counted is as on one, and no two devices' tensors meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import METHODS, SMALL, Case, numbers, run_loop, slow
from transformers import AutoConfig
from twin import Twin, device

from kvbench.backends.hf import spread
from kvbench.backends.hf.cache import KVCache
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ASSETS, ConfigError, shipped
from kvbench.engine.batch import generate

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
CASES = {case.id: case for case in METHODS}
QUICK = ["quest", "streaming_llm"]
PROMPTS = [numbers(150), numbers(90, seed=1)]


@pytest.fixture
def cuda() -> Iterator[Twin]:
    with device(2) as cuda:
        yield cuda


@pytest.fixture
def both(cuda: Twin) -> Loaded:
    """The dummy Llama, two layers on each of two devices, in the CPU's precision."""
    return load({**(shipped("model", "dummy-tiny") or {}), "device_map": "balanced"}, dtype="float32")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[pytest.mark.slow] * (case.id not in QUICK)) for case in METHODS]
)
def test_a_spread_model_generates_and_counts_as_on_one_device(
    cuda: Twin, both: Loaded, tiny: Loaded, case: Case
) -> None:
    here, _ = run_loop(tiny, PROMPTS, case.build(), SMALL, steps=4)
    there, engine = run_loop(both, PROMPTS, case.build(), SMALL, steps=4, prefill_chunk=64)
    assert there.tokens == here.tokens
    # What is brought up to be read takes room on a device alone, and a constant is there once on each.
    same = here.audit.keys() - {"transfer", "index_bytes", "executor", "device_kv_allocated_bytes"}
    assert {key: there.audit[key] for key in same} == {key: here.audit[key] for key in same}
    for layer, store in engine.stores.items():
        assert store.device.pool.key.device == (FIRST, SECOND)[layer // 2] == engine.shape.device_of(layer)


def conversation(model: Any, name: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Two turns of a padded batch through `model.generate`, the second one in a copy of the cache."""
    prompts = torch.tensor([numbers(120), [0] * 30 + numbers(90, seed=1)], device=model.device)
    mask = torch.ones_like(prompts)
    mask[1, :30] = 0
    cache = KVCache(model, name, SMALL, dense_layers=())
    new = model.generate(prompts, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    asked = torch.cat([new, prompts[:, -9:]], dim=1)
    mask = torch.cat([mask, torch.ones(2, asked.shape[1] - 120, dtype=mask.dtype, device=mask.device)], dim=1)
    twin = cache.copy()
    new = model.generate(asked, attention_mask=mask, past_key_values=twin, max_new_tokens=4, do_sample=False)
    return new.tolist(), twin.audit()


@pytest.mark.parametrize("name", ["quest", *slow("full", "snapkv", "icecache", "streaming_llm")])
def test_so_it_does_over_turns_in_generate_of_transformers(cuda: Twin, both: Loaded, tiny: Loaded, name: str) -> None:
    (there, audit), (here, expected) = conversation(both.model, name), conversation(tiny.model, name)
    assert there == here and audit["attended_mean"] == expected["attended_mean"]
    assert audit["device_kv_bytes"] == expected["device_kv_bytes"]


@pytest.mark.slow
def test_a_model_that_accelerate_has_spread_runs_in_a_kvcache(cuda: Twin, tiny: Loaded) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = load(shipped("model", "dummy-tiny") or {}, device="cpu", dtype="float32").model
    ends = {"model.embed_tokens": "cuda:0", "model.rotary_emb": "cuda:0", "model.norm": "cuda:1", "lm_head": "cuda:1"}
    layers = {f"model.layers.{layer}": f"cuda:{layer // 2}" for layer in range(4)}
    model = accelerate.dispatch_model(model, ends | layers, skip_keys="past_key_values")
    assert conversation(model, "quest")[0] == conversation(tiny.model, "quest")[0]


@pytest.mark.slow
def test_one_prefill_and_probes_serve_a_spread_model_too(cuda: Twin, both: Loaded, tiny: Loaded) -> None:
    cases = [CASES[name] for name in ("squeeze", "cake", "quest", "icecache")]
    methods = [case.build() for case in cases]
    shared = prefill_once(both.model, PROMPTS, [method.needs for method in methods], max_new_tokens=4)
    for case, method in zip(cases, methods, strict=True):
        there, _ = run_loop(both, PROMPTS, method, SMALL, steps=3, prefilled=shared)
        here, _ = run_loop(tiny, PROMPTS, case.build(), SMALL, steps=3)
        assert there.tokens == here.tokens, case.id

    def probed(loaded: Loaded) -> dict[str, Any]:
        engine = engine_for(
            loaded.model, [150, 90], CASES["snapkv"].build(), Budget(SMALL), (), None, new_tokens=4, probe_every=2
        )
        report = generate(ModelRunner(loaded.model), PROMPTS, engine, max_new_tokens=4).probe
        return {name: value for name, value in report.items() if isinstance(value, float)}

    assert probed(both) == pytest.approx(probed(tiny), abs=1e-5)


# -- where the parts are -----------------------------------------------------------------------------------------------


def test_a_tied_output_layer_stays_with_the_embedding(cuda: Twin) -> None:
    config = {**(shipped("model", "tiny") or {}), "path": str(ASSETS / "tiny"), "device_map": "balanced"}
    model = load(config, dtype="float32").model
    ids = torch.arange(20)[None]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.device == FIRST and model.model.norm.weight.device == SECOND
    places = [next(layer.parameters()).device for layer in model.model.layers]
    assert places == [FIRST] * 3 + [SECOND] * 3 and spread.devices_under(model) == 2
    logits = load({**config, "device_map": None}, device="cpu", dtype="float32").model(ids).logits
    assert torch.equal(model(ids.cuda()).logits.cpu(), logits)


@pytest.mark.parametrize(("layers", "devices", "counts"), [(4, 2, [2, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])])
def test_balanced_puts_as_many_layers_on_each(layers: int, devices: int, counts: list[int]) -> None:
    gpus = [torch.device("cuda", index) for index in range(devices)]
    model = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers)))
    model.config = AutoConfig.for_model("llama", num_hidden_layers=layers)
    places = spread.places_of(model, "balanced", gpus)  # type: ignore[arg-type]
    assert [places.count(gpu) for gpu in gpus] == counts and places == sorted(places, key=str)


def test_auto_shares_out_what_room_there_is_as_accelerate_does(
    cuda: Twin, tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    layer = sum(weight.nbytes for weight in spread.decoder_layers(tiny.model)[0].parameters())

    def placed(room: float) -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(room * layer), 0))
        return spread.places_of(tiny.model, "auto", spread.devices_for("auto"))

    assert placed(100) == [FIRST] * 2 + [SECOND] * 2
    assert placed(3) == [FIRST] + [SECOND] * 3
    with pytest.raises(ConfigError, match=r"^model.device_map=auto: . of 4 layers .* 2 GPUs"):
        placed(2)


# -- what cannot be spread ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1])
def test_one_device_is_not_several(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError) as refused:
        load({**(shipped("model", "dummy-tiny") or {}), "device_map": "balanced"})
    expected = f"torch sees {count} CUDA devices here; expected two or more, or null"
    assert str(refused.value) == f"model.device_map=balanced: {expected}"


def test_auto_needs_accelerate(cuda: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^model.device_map=auto: needs accelerate; pip install 'kvbench\[models\]'"):
        spread.devices_for("auto")
