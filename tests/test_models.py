"""What loading a model promises: byte-exact text, the same random weights for the same seed, and one-line refusals."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import file_download
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.backends.hf.loading import BYTE_VOCABULARY, Loaded, byte_tokenizer, load, stop_ids_of
from kvbench.config import ConfigError, choices, shipped
from kvbench.models import hub
from kvbench.models.card import ModelCard

TOKENIZER = byte_tokenizer()
DUMMIES = sorted(name for name in choices("model") if name.startswith("dummy-"))
REAL = sorted(name for name in choices("model") if not name.startswith("dummy-"))


def model_config(name: str = "dummy-tiny", **changes: Any) -> dict[str, Any]:
    node = shipped("model", name)
    assert node is not None
    return {**node, **changes}


def weights(loaded: Loaded) -> dict[str, torch.Tensor]:
    return dict(loaded.model.named_parameters())


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return load(model_config(), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Loaded) -> Path:
    path = tmp_path_factory.mktemp("saved") / "my-model"
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No network and an empty cache. The hub reads its settings once, at import: so they are set in its module."""
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "out_of_reach", lambda: "the hub sleeps")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield


# The tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer_gives_back_any_text(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text
    assert ids == [TOKENIZER.bos_token_id, *text.encode()]


def test_byte_tokenizer_reads_the_spelling_of_a_special_token_as_text() -> None:
    text = "a <eos> <bos><pad>"
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_byte_tokenizer_keeps_what_surrounds_a_broken_character() -> None:
    assert TOKENIZER.decode([65, 0xE2, 0x82, 66]) == "A\N{REPLACEMENT CHARACTER}B"


def test_byte_tokenizer_pads_on_the_left() -> None:
    batch = TOKENIZER(["a", "abc"], padding=True)
    assert batch.input_ids[0] == [TOKENIZER.pad_token_id] * 2 + [TOKENIZER.bos_token_id, ord("a")]
    assert batch.attention_mask[0] == [0, 0, 1, 1]


# Random weights


def test_dummy_weights_are_the_same_for_the_same_seed(tiny: Loaded) -> None:
    again, other = load(model_config(), "cpu"), load(model_config(), "cpu", seed=1)
    assert all(torch.equal(value, weights(again)[key]) for key, value in weights(tiny).items())
    assert not torch.equal(weights(tiny)["lm_head.weight"], weights(other)["lm_head.weight"])
    assert (tiny.revision, other.revision) == ("dummy-0", "dummy-1")


def test_loading_leaves_the_callers_random_state_and_config_alone() -> None:
    config = model_config()
    before = copy.deepcopy(config)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(config, "cpu")
    assert torch.equal(torch.rand(3), expected)
    assert config == before


@pytest.mark.parametrize("name", [name for name in DUMMIES if name != "dummy-100m"])
def test_dummies_are_ready_to_run(name: str) -> None:
    loaded = load(model_config(name), "cpu", dtype="float32")
    assert loaded.name == name
    assert loaded.card.context_length == 32768
    assert loaded.dense_layers == ()
    assert loaded.stop_ids == (loaded.tokenizer.eos_token_id,)
    assert loaded.model.config._attn_implementation == "kvbench"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32
    ids = loaded.tokenizer("hello", return_tensors="pt").input_ids
    assert loaded.model(ids).logits.shape == (1, 6, BYTE_VOCABULARY)


def test_dummy_100m_has_about_100_million_parameters() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("dummy-100m")["config"]))
    assert 90e6 < sum(parameter.numel() for parameter in model.parameters()) < 110e6


def test_rotary_frequencies_stay_float32_in_bfloat16_models(tiny: Loaded) -> None:
    half = load(model_config(), "cpu", "bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert torch.equal(half.model.model.rotary_emb.inv_freq, tiny.model.model.rotary_emb.inv_freq)


def test_a_real_shape_can_have_random_weights() -> None:
    config = model_config("qwen3-8b", weights="dummy")
    config["config"] = {**config["config"], "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    loaded = load(config, "cpu")
    assert loaded.name == "qwen3-8b"
    assert loaded.dense_layers == (0, 1)
    assert loaded.stop_ids == (TOKENIZER.eos_token_id,)
    assert len(loaded.tokenizer) == BYTE_VOCABULARY <= loaded.model.config.vocab_size


# The shapes in conf/model


@pytest.mark.parametrize("name", DUMMIES + REAL)
def test_every_shape_is_complete_and_understood_by_transformers(name: str) -> None:
    node = model_config(name)
    assert set(node) - {"fetch"} == {"name", "about", "path", "weights", "dense_layers", "config"}
    assert node["name"] == name
    config = AutoConfig.for_model(**copy.deepcopy(node["config"])).to_dict()
    assert {key: config[key] for key in node["config"]} == node["config"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


# Published parameter counts, in millions; none of these can be right by luck.
PARAMETERS = {
    "deepseek-r1-distill-llama-8b": 8030,
    "deepseek-r1-distill-qwen-14b": 14770,
    "gemma3-1b-it": 1000,
    "gemma3-270m": 268,
    "gpt-oss-20b": 20915,
    "llama3.1-8b-instruct": 8030,
    "llama3.2-1b-instruct": 1236,
    "mistral-7b-instruct-v0.2": 7242,
    "mistral-7b-instruct-v0.3": 7248,
    "qwen2.5-coder-0.5b-instruct": 494,
    "qwen3-0.6b": 596,
    "qwen3-32b": 32762,
    "qwen3-4b-instruct-2507": 4022,
    "qwen3-4b-thinking-2507": 4022,
    "qwen3-8b": 8191,
    "smollm2-135m-instruct": 135,
    "tiny": 5,
}


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config(name)["config"]))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == PARAMETERS[name]


# Folders and hub ids


def test_a_saved_folder_loads_with_its_own_weights_and_tokenizer(folder: Path, tiny: Loaded) -> None:
    loaded = load(model_config(path=str(folder), weights="pretrained"), "cpu")
    assert all(torch.equal(value, weights(loaded)[key]) for key, value in weights(tiny).items())
    assert loaded.tokenizer("a<eos>").input_ids == tiny.tokenizer("a<eos>").input_ids
    assert loaded.stop_ids == tiny.stop_ids
    assert loaded.card == tiny.card
    assert loaded.model.config._attn_implementation == "kvbench"


def test_a_path_given_to_a_dummy_loads_that_path_under_its_own_name(folder: Path) -> None:
    loaded = load(model_config(path=str(folder)), "cpu")
    assert loaded.name == "my-model"
    assert loaded.dense_layers == (0, 1)
    assert loaded.revision.startswith("folder-")


def test_a_local_copy_of_a_named_model_keeps_its_name(folder: Path) -> None:
    loaded = load(model_config("llama3.1-8b-instruct", path=str(folder)), "cpu")
    assert loaded.name == "llama3.1-8b-instruct"


def test_revision_of_a_folder_follows_its_content(folder: Path, tiny: Loaded, tmp_path: Path) -> None:
    def revision(path: Path) -> str:
        return load(model_config(path=str(path)), "cpu").revision

    tiny.model.save_pretrained(tmp_path / "other")
    tiny.tokenizer.save_pretrained(tmp_path / "other")
    assert revision(tmp_path / "other") == revision(folder)
    other = load(model_config(), "cpu", seed=1)
    other.model.save_pretrained(tmp_path / "other")
    assert revision(tmp_path / "other") != revision(folder)


def test_all_stop_ids_of_a_generation_config_count(folder: Path, tmp_path: Path) -> None:
    loaded = load(model_config(path=str(folder)), "cpu")
    loaded.model.generation_config.eos_token_id = [257, 10]
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert load(model_config(path=str(tmp_path)), "cpu").stop_ids == (257, 10)


def test_a_generation_config_that_names_no_stop_id_leaves_it_to_the_next_place() -> None:
    first, second = (SimpleNamespace(eos_token_id=ids) for ids in ([], 5))
    assert stop_ids_of(first, second) == (5,) and stop_ids_of(first) == ()


@pytest.mark.usefixtures("offline")
def test_a_cached_hub_id_loads_without_network_and_at_once(
    folder: Path, tiny: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library would try five times, for half a minute."""
    monkeypatch.setattr(file_download, "get_hf_file_metadata", lambda *_, **__: pytest.fail("asked the hub"))
    commit = "c" * 40
    repository = tmp_path / "cache" / "models--org--name"
    shutil.copytree(folder, snapshot := repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = load(model_config(path="org/name"), "cpu")
    assert (loaded.name, loaded.revision) == ("name", commit)
    assert all(torch.equal(value, weights(loaded)[key]) for key, value in weights(tiny).items())
    (snapshot / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path=org/name: adapter_config\.json in it"):
        load(model_config(path="org/name"), "cpu")


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize("missing", [(), ("original_max_position_embeddings",)])
def test_the_loaded_window_is_the_one_that_was_checked(missing: tuple[str, ...]) -> None:
    rope = {key: value for key, value in YARN.items() if key not in missing}
    config = model_config()
    config["config"] = {**config["config"], "max_position_embeddings": 1024, "rope_parameters": rope}
    assert load(config, "cpu").card.context_length == ModelCard.of(config["config"]).context_length == 4096


@pytest.mark.parametrize("name", DUMMIES + REAL)
def test_a_card_says_the_same_before_a_model_is_loaded_and_of_what_transformers_makes_of_it(name: str) -> None:
    shape = model_config(name)["config"]
    before, after = ModelCard.of_class(shape), ModelCard.of_config(AutoConfig.for_model(**copy.deepcopy(shape)))
    assert before.context_length == after.context_length and before.layer_kinds == after.layer_kinds
    assert (before.head_dim, before.kv_heads) == (after.head_dim, after.kv_heads)
    assert 0 < before.parameters <= after.parameters and before.refusal == after.refusal == ""


# Refusals: each one line, with the key, the value and what would be right


def refusal(config: dict[str, Any], *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, *args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    message = refusal(model_config(path=str(tmp_path / "nowhere"), weights="pretrained"), "cpu")
    assert message.startswith(f"model.path={tmp_path / 'nowhere'}: no such folder")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert "no config.json" in refusal(model_config(path=str(tmp_path)), "cpu")


def test_a_folder_without_weights_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert refusal(model_config(path=str(tmp_path)), "cpu").startswith(
        f"model.path={tmp_path}: not a usable model folder"
    )


def test_weights_that_are_not_those_of_the_config_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would put random ones in their place, and warn."""
    for key, value, line in (
        ("num_hidden_layers", 9, "its weights are without model.layers.4.input_layernorm.weight and "),
        ("intermediate_size", 64, "model.layers.0.mlp.down_proj.weight has the shape "),
        ("num_hidden_layers", 3, "its weights hold model.layers.3.input_layernorm.weight and "),
    ):
        copy_of = shutil.copytree(folder, tmp_path / f"{key}-{value}")
        config = json.loads((copy_of / "config.json").read_text())
        (copy_of / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ConfigError) as caught:
            load(model_config(path=str(copy_of)), device="cpu")
        assert str(caught.value).startswith(f"model.path={copy_of}: {line}") and "\n" not in str(caught.value)


def test_weights_of_a_part_that_is_read_without_them_are_refused_and_other_parts_are_not(
    folder: Path, tmp_path: Path
) -> None:
    for number, (extra, refused) in enumerate(
        {"model.layers.0.mlp.down_proj.bias": True, "mtp.head.weight": False}.items()
    ):
        copy_of = shutil.copytree(folder, tmp_path / str(number))
        held = load_file(copy_of / "model.safetensors")
        save_file({**held, extra: torch.zeros(4)}, copy_of / "model.safetensors", {"format": "pt"})
        if refused:
            assert f"its weights hold {extra}, for which" in refusal(model_config(path=str(copy_of)), "cpu")
        else:
            assert load(model_config(path=str(copy_of)), "cpu").revision.startswith("folder-")


def test_a_folder_s_own_code_is_not_run_whatever_stdin_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    copy_of = shutil.copytree(folder, tmp_path / "strange")
    config = json.loads((copy_of / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "configuration_strange.Strange"}}
    (copy_of / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (copy_of / "configuration_strange.py").write_text(f"open({str(ran)!r}, 'w')\nclass Strange: pass\n")
    assert "strange" in refusal(model_config(path=str(copy_of)), "cpu")
    assert not ran.exists()


def test_a_damaged_folder_is_one_line_whatever_the_damage(folder: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "model.safetensors"):
        copy_of = shutil.copytree(folder, tmp_path / file)
        (copy_of / file).write_bytes((copy_of / file).read_bytes()[:999])
        with pytest.raises(ConfigError, match=f"^model.path={copy_of}: not a usable model folder: ") as caught:
            load(model_config(path=str(copy_of)), device="cpu")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 250},
        {"rms_norm_eps": "x"},
        {"model_type": "nosuch"},
        {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 10000.0}},
    ],
)
def test_a_shape_that_transformers_refuses_is_one_line(change: dict[str, Any]) -> None:
    config = model_config()
    with pytest.raises(ConfigError, match="^model.config of dummy-tiny: ") as caught:
        load({**config, "config": {**config["config"], **change}}, device="cpu")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.usefixtures("offline")
def test_a_hub_id_out_of_reach_points_to_folders() -> None:
    message = refusal(model_config("qwen3-8b"), "cpu")
    assert message.startswith("model.path=Qwen/Qwen3-8B: ")
    assert message.endswith("use model.path=FOLDER")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_without_a_device_is_refused() -> None:
    assert refusal(model_config(), "cuda").startswith("device=cuda: torch sees no CUDA device")


@pytest.mark.parametrize(
    ("device", "dtype", "start"), [("gpu", "auto", "device=gpu: "), ("cpu", "int8", "dtype=int8: ")]
)
def test_unknown_devices_and_dtypes_are_refused(device: str, dtype: str, start: str) -> None:
    message = refusal(model_config(), device, dtype)
    assert message.startswith(start)
    assert "expected auto" in message


def test_a_real_model_without_a_path_is_refused() -> None:
    assert refusal(model_config("qwen3-8b", path=None), "cpu").startswith("model.path=null: ")


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    config = model_config()
    config["config"] = {**config["config"], "vocab_size": 100}
    assert refusal(config, "cpu").startswith("model.config.vocab_size=100: ")


def test_sliding_windows_are_refused_before_weights_are_made() -> None:
    config = model_config("dummy-mistral")
    config["config"] = {**config["config"], "sliding_window": 64}
    assert "dummy-mistral" in refusal(config, "cpu")


def test_a_class_with_attention_of_its_own_is_refused_before_its_weights_are_made() -> None:
    config = model_config()
    config["config"] = {"model_type": "bloom", "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    assert refusal(config, "cpu").startswith("dummy-tiny: BloomForCausalLM computes attention in a way of its own")


def test_positions_of_gpt2_are_its_window() -> None:
    assert ModelCard.of(AutoConfig.for_model("gpt2", n_positions=512).to_dict()).context_length == 512


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    shape = {**model_config("dummy-mistral")["config"], "sliding_window": 64}
    AutoConfig.for_model(**shape).save_pretrained(tmp_path)
    assert "slid" in refusal(model_config(path=str(tmp_path)), "cpu")


def test_the_yaml_as_hydra_composes_it_is_accepted() -> None:
    composed = OmegaConf.to_container(OmegaConf.create(model_config()), resolve=True)
    assert isinstance(composed, dict)
    assert load(composed, "cpu").name == "dummy-tiny"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_tile": True, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.float32),  # not measured
        ({}, torch.float32),
    ],
)
def test_auto_means_bfloat16_where_a_cpu_multiplies_it_in_tiles(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert load(model_config(), "cpu").model.dtype == expected
    assert load(model_config(), "cpu", "float32").model.dtype == torch.float32
