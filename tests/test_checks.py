"""What a config is refused for, and with which line; and what is let through."""

import copy
import functools
import inspect
import json
import math
import os
import tempfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvbench import config
from kvbench.backends.vllm import plan
from kvbench.budget import Budget
from kvbench.cli import checks
from kvbench.cli.checks import check
from kvbench.config import ConfigError, MethodConfig
from kvbench.models import hub


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """The hub answers and nothing of it is cached; call the fixture with a reason, and it is out of reach for that."""

    def be(reason=None):
        monkeypatch.setattr(hub, "out_of_reach", lambda: reason)

    monkeypatch.setattr(hub, "cached_folder", lambda hub_id: None)
    be()
    return be


@functools.cache
def composition(*overrides):
    """Compose overrides over kvbench's conf, once."""
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.fixture
def composed(tmp_path):
    """Compose overrides over kvbench's conf, with results in a temporary folder."""

    def make(*overrides):
        made = copy.deepcopy(composition("results_dir=FOLDER", *overrides))
        if made.results_dir == "FOLDER":
            made.results_dir = f"{tmp_path}/results"
        return made

    return make


@pytest.fixture
def refusal(composed):
    """The one line that overrides are refused with."""

    def make(*overrides):
        with pytest.raises(ConfigError) as caught:
            check(composed(*overrides))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return make


@pytest.fixture
def model_folder(tmp_path):
    """A model folder with these keys in its config.json."""

    def make(**keys):
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **keys}))
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return make


# Tasks whose data no hub gives to anybody.
FROM_FOLDERS = ("gpqa", "leval", "longgenbench", "longgenbench_gsm8k", "longproc", "structext")
ALL = [(group, name) for group in config.groups() for name in config.choices(group)]


@pytest.mark.parametrize(
    ("group", "name"), [pytest.param(*one, marks=[pytest.mark.slow] * (at % 4 > 0)) for at, one in enumerate(ALL)]
)
def test_a_choice_is_named_as_itself_composed_as_it_is_read_and_passes_with_the_default_rest(
    composed, group, name, monkeypatch
):
    """Read without Hydra it is what Hydra composes. Presets name the file that they differ from in their defaults. A
    method takes its preset, and its own minimum in both accountings.
    """
    monkeypatch.setattr(plan, "version", lambda package: f"{plan.SUPPORTED}.0")  # vLLM is there
    shipped, job = config.shipped(group, name), composed(f"{group}={name}", "budget=1024")
    assert shipped["name"] == name and shipped["about"] == config.choices(group)[name] != ""
    read = OmegaConf.create({group: config.root_keys().get(group, {}) | shipped})
    assert OmegaConf.to_container(read[group], resolve=True) == OmegaConf.to_container(job[group], resolve=True)
    if "fetch" in shipped:
        job.model.weights = "dummy"
    if (shipped.get("max_new_tokens") or 0) > 8192:
        job.task.max_new_tokens = 8192  # the small model's window is 16,384
    if name in FROM_FOLDERS:
        with pytest.raises(ConfigError, match="task.data_dir"):
            check(job)
        return
    check(job)
    minimum = config.method_config(name).minimum if group == "method" else {}
    for accounting, least in minimum.items():
        for job.protocol.accounting, job.budget in ((accounting, None), (accounting, least or 1)):
            check(job)


@pytest.mark.parametrize("budget", ["0", "-1", "1.5", "0.0", "-0.1", "256.0", "nan", "inf"])
def test_a_budget_out_of_range_is_refused(refusal, budget):
    line = refusal(f"budget={budget}")
    assert line.startswith("budget=") and "out of range" in line


@pytest.mark.parametrize("budget", ["lots", "true", "12%"])
def test_a_budget_that_is_no_number_is_refused(refusal, budget):
    assert refusal(f"budget={budget}").startswith(f"budget={budget}: not a number; expected tokens (256)")


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("quest", {}, 48),
        ("quest", {"page_size": 32}, 96),
        ("snapkv", {"window": 16}, 17),
        ("rkv", {"window": 64}, 65),
        ("raas", {}, 17),
        ("cake", {"window": 48}, 49),
        ("pyramidkv", {}, 16),
        ("pyramidkv", {"window": 16}, 32),
        ("clusterkv", {"sinks": 64}, 80),
        ("pariskv", {}, 16),
        ("squeeze", {}, 14),
        ("squeeze", {"p": 0.04}, 125),
        ("icecache", {}, 40),
        ("icecache", {"small_page_size": 16}, 80),
        ("icecache", {"sink_pages": 1, "window_pages": 1}, 24),
    ],
    ids=str,
)
def test_the_least_budget_follows_the_options_and_is_named(refusal, composed, method, options, least):
    words = [f"method={method}", *(f"method.{key}={value}" for key, value in options.items())]
    line = f"budget={least - 1}: below the minimum of {method}, {least} tokens (protocol.accounting=paper)"
    assert refusal(*words, f"budget={least - 1}") == line
    check(composed(*words, f"budget={least}"))


def test_the_least_budget_follows_the_accounting(composed):
    check(composed("method=snapkv", "budget=8", "protocol.accounting=unified"))


def test_a_fraction_is_held_against_the_shortest_prompt(refusal, composed):
    assert "11 of a prompt's 1024 tokens" in refusal("budget=0.01")
    check(composed("budget=0.01", "task.lengths=[8000]"))
    check(composed("budget=0.01", "task.unit=words"))


def test_a_preset_below_the_minimum_of_its_options_is_refused(refusal):
    assert refusal("method=quest", "budget=null", "method.page_size=512").startswith(
        "budget=null: the preset, 1024 tokens, is below"
    )


def test_an_accounting_without_a_rule_is_refused():
    with pytest.raises(ConfigError, match=r"protocol.accounting=unified: racc .*expected paper"):
        Budget.of(256, MethodConfig("racc", minimum={"paper": 40}), "unified")


def test_where_generated_tokens_count_the_least_budget_is_that_of_everything_inside():
    facts = MethodConfig("knorm", minimum={"paper": 1, "unified": 4})
    assert Budget.of(3, facts, "paper").minimum == 1 and Budget.of(4, facts, "paper", "counted").minimum == 4
    with pytest.raises(ConfigError, match=r"^budget=3: below .* 4 tokens .*protocol.generated=counted"):
        Budget.of(3, facts, "paper", "counted")


@given(
    budget=st.one_of(st.none(), st.integers(-5, 5000), st.floats(), st.booleans(), st.text(max_size=5)),
    least=st.one_of(st.none(), st.integers(1, 5000)),
)
def test_a_budget_passes_exactly_where_the_rules_allow_it(budget, least):
    whole = type(budget) is int and budget >= max(1, least or 1)
    fraction = type(budget) is float and not math.isnan(budget) and 0 < budget <= 1
    try:
        Budget.of(budget, MethodConfig(minimum={"paper": least}), "paper")
        passed = True
    except ConfigError:
        passed = False
    assert passed == (budget is None or whole or fraction)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=-1", "seed=-1: expected a whole number, 0 or more"),
        ("seed=abc", "seed=abc: expected a whole number, 0 or more"),
        ("threads=0", "threads=0: expected a whole number, 1 or more, or null"),
        ("task.limit=0", "task.limit=0: expected a whole number, 1 or more, or null"),
        ("dtype=fp16", "dtype=fp16: expected auto | float32 | bfloat16 | float16"),
        ("attention=fast", "attention=fast: expected auto | reference | torch | cpu | flashinfer"),
        ("device=gpu", "device=gpu: expected auto | cpu | cuda | cuda:N"),
        ("model.device_map=even", "model.device_map=even: expected null | balanced | auto"),
        ("model.weights=none", "model.weights=none: expected pretrained | dummy"),
        ("protocol.accounting=fair", "protocol.accounting="),
        ("protocol.prefill_chunk=0", "protocol.prefill_chunk=0: "),
        ("protocol.dense_layers=some", "protocol.dense_layers="),
        ("protocol.dense_layers=[0,6]", "protocol.dense_layers=[0, 6]: the model has layers 0 to 5, not [6]"),
        ("model.dense_layers=[9]", "protocol.dense_layers=[9] (auto): the model has layers 0 to 5, not [9]"),
        ("probe.every=-1", "probe.every=-1: expected a whole number, 0 or more"),
        ("protocol.generated=some", "protocol.generated='some': one of free, counted"),
        ("protocol.question=later", "protocol.question='later': one of with, after, decode"),
        ("backend.version=2", "backend.version=2: a fact of hf"),
        (
            "+protocol.question_as_decode=true",
            "protocol.question_as_decode=true: no such key; did you mean protocol.question=",
        ),
        ("task.lengths=[0]", "task.lengths=[0]: expected different whole numbers, 1 or more, such as [1024,4096]"),
        ("task.lengths=[9,9]", "task.lengths=[9,9]: expected different whole numbers, 1 or more"),
        ("task.lengths=[]", "task.lengths=[]: expected different whole numbers, 1 or more"),
        ("task.lengths=1024", "task.lengths=1024: expected a list, such as [1024]"),
        ("method.page_size=big", "method.page_size=big: expected a whole number, such as 16"),
        ("task.new_tokens=20", "task.new_tokens=20: a fact of passkey, not a setting"),
        ("budget=${nothing}", "budget: Interpolation key 'nothing' not found"),
        ("budget={a:1}", "budget={a: 1}: expected one value, and no mapping"),
        ("seed=99999999999999999999", "seed=99999999999999999999: expected at most 9223372036854775807"),
        ("threads=100000", "threads=100000: expected at most 1024"),
        ("sweep.shared_prefill=maybe", "sweep.shared_prefill=maybe: expected true | false"),
        ("model.name=", "model.name=: expected a name, which results are kept under"),
        ("model.path=", "model.path='': empty; expected a folder, or a hub id such as org/name"),
        ("model.dense_layers=all", "model.dense_layers=all: expected a list of layers, such as [0,1]"),
        ("model.config.hidden_size=8", "model.config: sets the shape of random weights; those of tiny have their own"),
        ("method._target_=no_such.Mine", "method._target_=no_such.Mine: no module no_such; "),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_right(refusal, override, line):
    assert refusal(override).startswith(line)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["method=quest", "method.selection=heads"], "method.selection=heads: expected query_head | kv_head"),
        (["task.unit=pages"], "task.unit=pages: expected tokens | words | characters"),
        (["method.page_size=1"], "method.page_size=1: expected a whole number, 2 or more"),
        (["method=snapkv", "method.kernel=4"], "method.kernel=4: expected an odd whole number, 1 or more"),
        (["method=pariskv", "method.beta=1.5"], "method.beta=1.5: expected a number above 0, at most 1, or null"),
        (["method.page_size=${budget}", "budget=0.5"], "method.page_size=0.5: expected a whole number, 2 or more"),
    ],
)
def test_an_option_outside_its_valid_values_is_refused_with_them(refusal, overrides, line):
    assert refusal(*overrides) == line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "hidden_size=250",
            "model.config.hidden_size=250: expected a multiple of num_attention_heads=4, or a head_dim",
        ),
        ("num_key_value_heads=3", "model.config.num_key_value_heads=3: query heads share KV heads evenly; expected a "),
        ("num_hidden_layers=0", "model.config.num_hidden_layers=0: expected a whole number, 1 or more"),
        ("num_hidden_layers=null", "model.config.num_hidden_layers=null: expected a whole number, 1 or more"),
        ("vocab_size=many", "model.config.vocab_size=many: expected a whole number, 1 or more"),
        ("head_dim=31", "model.config.head_dim=31: rotary positions turn pairs; expected an even number"),
    ],
)
def test_a_shape_that_no_model_can_have_is_refused(refusal, override, line):
    without_head_dim = ["model.config.head_dim=null"] if "hidden_size" in override else []
    assert refusal("model=dummy-tiny", *without_head_dim, f"model.config.{override}").startswith(line)


def test_random_weights_without_a_shape_are_refused(refusal):
    line = "model.config=null: random weights need a transformers config"
    assert refusal("model=dummy-tiny", "model.config=null") == line


def test_weights_that_are_cut_short_or_not_all_there_are_refused(refusal, composed, model_folder):
    folder = model_folder()
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    reasons = {
        whole[:-1]: f"has {len(whole) - 1} bytes where its header says {len(whole)}",
        whole[:20]: "is cut short, 20 bytes",
        b"": "is cut short, 0 bytes",
        (2).to_bytes(8, "little") + b"no": "is no safetensors file",
    }
    for damaged, reason in reasons.items():
        (folder / "model.safetensors").write_bytes(damaged)
        line = f"model.path={folder}: model.safetensors {reason}; copy or download it again"
        assert refusal(f"model.path={folder}") == line
    (folder / "model.safetensors").write_bytes(whole)
    check(composed(f"model.path={folder}"))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "b.safetensors is missing" in refusal(f"model.path={folder}")


def test_a_folder_with_some_subsets_alone_says_how_to_choose_them(refusal, composed, tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_text("{}\n")
    words = ["task=longbench", f"task.data_dir={tmp_path}"]
    assert refusal(*words).endswith("narrativeqa.jsonl: no such file; task.subsets=[hotpotqa] takes what is there")
    check(composed(*words, "task.subsets=[hotpotqa]"))
    (tmp_path / "hotpotqa.jsonl").write_text("")
    assert refusal(*words, "task.subsets=[hotpotqa]").endswith("hotpotqa.jsonl: empty")


def test_the_ends_of_what_is_valid_pass(composed):
    check(composed("method=streaming_llm", "method.sinks=0", "budget=1"))
    check(composed("method=snapkv", "method.window=1", "method.kernel=1", "budget=2"))


WITH_OPTIONS = [(group, name) for group in ("method", "task") for name in config.choices(group)]


@pytest.mark.parametrize(("group", "name"), WITH_OPTIONS, ids=lambda value: value)
def test_valid_words_are_those_of_the_constructor_and_the_files_own_values_are_valid(group, name):
    """The file is read without torch, the annotations of options need it: here the two are held against each other."""
    node = config.shipped(group, name)
    valid, target = node.get("valid") or {}, config.locate(node["_target_"])
    said = getattr(target, "options_type", None) or target
    said = said.__init__ if isinstance(said, type) and not is_dataclass(said) else said
    hints = get_type_hints(said, getattr(said, "__globals__", None))
    annotations = {key: hints[key] for key in inspect.signature(said).parameters if key in hints}
    words = {key: get_args(hint) for key, hint in annotations.items() if get_origin(hint) is Literal}
    assert {key: set(map(str, rule)) for key, rule in valid.items() if isinstance(rule, list)} == {
        key: set(map(str, choices)) for key, choices in words.items()
    }
    assert set(valid) <= set(annotations) | config.INHERITED
    config.check_rules(group, node)
    config.check_valid(group, node, valid)


@pytest.mark.parametrize(
    ("key", "value"), [("valid", {"window": {"abovee": 0}}), ("minimum", {"paper": 9, "unifed": 4})]
)
def test_a_misspelt_word_in_a_file_of_ones_own_is_refused_before_a_run(composed, key, value):
    made = composed("method=snapkv")
    made.method.update({"name": "mine", key: value})
    with pytest.raises(ConfigError, match=rf"method\.{key}.*(abovee|unifed)"):
        check(made)


def test_an_added_key_is_unknown_too(refusal):
    assert refusal("+page_size=3") == "page_size=3: no such key; did you mean method.page_size?"
    assert "did you mean page_size or small_page_size? " in refusal("+method.page_sze=3")
    assert "did you mean budget?" in refusal("+buget=3")


def test_a_deleted_key_that_all_runs_need_is_missed(refusal):
    assert refusal("~budget") == "budget: missing; every run needs it"
    assert refusal("~method") == "method._target_: missing; every run needs it"


def test_a_method_of_ones_own_has_its_own_keys(composed):
    check(composed("method.name=mine", "method._target_=json.Mine", "+method.depth=3"))


def test_prompts_longer_than_the_window_are_refused_when_counted_in_tokens(refusal, composed):
    line = refusal("model=dummy-tiny", "task.lengths=[1024,32760]")
    assert "window of dummy-tiny, 32768 tokens" in line
    check(composed("model=dummy-tiny", "task.lengths=[32758]"))
    check(composed("model=dummy-tiny", "task.lengths=[40000]", "task.unit=characters"))


def test_new_tokens_in_the_conf_are_those_that_the_task_generates():
    from kvbench.tasks import passkey

    assert config.shipped("task", "passkey")["new_tokens"] == passkey.NEW_TOKENS


def test_a_model_folder_is_read_for_its_window_and_layers(refusal, composed, model_folder):
    folder = model_folder(num_hidden_layers=2, max_position_embeddings=2048)
    check(composed(f"model.path={folder}", "task.lengths=[2000]"))
    assert "window of model, 2048 tokens" in refusal(f"model.path={folder}", "task.lengths=[3000]")
    assert "layers 0 to 1, not [3]" in refusal(f"model.path={folder}", "protocol.dense_layers=[3]")


def test_random_weights_leave_the_path_of_a_named_model_alone(composed):
    check(composed("model=llama3.1-8b-instruct", "model.weights=dummy", "task.lengths=[100000]"))


def test_random_weights_have_the_named_models_shape_whatever_the_path(refusal, composed):
    words = ["model=llama3.1-8b-instruct", "model.weights=dummy", "model.path=other/model"]
    assert "131072 tokens" in refusal(*words, "task.lengths=[200000]")
    assert "layers 0 to 31" in refusal(*words, "protocol.dense_layers=[32]")
    check(composed(*words))


def test_trained_weights_need_a_path(refusal):
    assert refusal("model=qwen3-8b", "model.path=null").startswith("model.path=null: qwen3-8b has no weights of its")


def test_nothing_is_claimed_about_a_hub_id_never_loaded(composed):
    check(composed("model.path=org/name", "task.lengths=[1000000]", "protocol.dense_layers=[99]"))


def test_a_hub_id_in_the_cache_is_checked_by_its_own_config(refusal, composed, model_folder, monkeypatch):
    folder = model_folder(num_hidden_layers=2, max_position_embeddings=2048)
    monkeypatch.setattr(hub, "cached_folder", {"org/name": folder, "Qwen/Qwen3-8B": folder}.get)
    check(composed("model.path=org/name", "task.lengths=[2000]"))
    assert "window of name, 2048 tokens" in refusal("model.path=org/name", "task.lengths=[3000]")
    assert "window of qwen3-8b, 2048 tokens" in refusal("model=qwen3-8b", "task.lengths=[3000]")
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "index_topk": 512}))
    assert refusal("model.path=org/name").startswith("model.path=org/name: mistral has layers that attend what")


@pytest.mark.parametrize("words", [["model=qwen3-8b"], ["model.path=Qwen/Qwen3-8B"]], ids=lambda words: words[0])
def test_a_hub_id_out_of_reach_is_refused_unless_it_is_cached(
    refusal, composed, network, model_folder, monkeypatch, words
):
    network("the hub sleeps")
    line = "model.path=Qwen/Qwen3-8B: not in the local cache of the hub, and the hub sleeps; "
    assert refusal(*words) == line + "without network, use model.path=FOLDER"
    folder = model_folder(num_hidden_layers=36)
    monkeypatch.setattr(hub, "cached_folder", lambda hub_id: folder)
    check(composed(*words))
    (folder / "model.safetensors").unlink()  # as after loading the tokenizer alone
    assert refusal(*words).startswith(line)


def test_what_needs_no_hub_needs_no_network(composed, network, model_folder):
    network("the hub sleeps")
    check(composed())
    check(composed("model=qwen3-8b", "model.weights=dummy"))
    check(composed(f"model.path={model_folder()}"))


def test_a_job_for_another_machine_is_not_held_against_this_ones_network_and_device(composed, network, monkeypatch):
    network("the hub sleeps")
    monkeypatch.setattr(checks, "version", lambda name: "2.0+cpu")
    check(composed("model=qwen3-8b", "device=cuda"), here=False)


def test_cuda_is_refused_where_there_is_plainly_none_and_torch_decides_elsewhere(refusal, composed, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: "2.13.0+cpu")
    assert refusal("device=cuda:1").startswith("device=cuda:1: torch 2.13.0+cpu ")
    monkeypatch.setattr(checks, "version", lambda name: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks, "DEVICE_NODES", ("/dev/no-such-node*",))
    assert refusal("device=cuda").startswith("device=cuda: there is no CUDA device here; ")
    monkeypatch.setattr(checks, "DEVICE_NODES", ("/dev/no-such-node*", "/dev/nul*"))
    check(composed("device=cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal("device=cuda").startswith("device=cuda: CUDA_VISIBLE_DEVICES hides every device; ")
    assert refusal("model.device_map=auto").startswith("model.device_map=auto: CUDA_VISIBLE_DEVICES hides every ")
    check(composed("device=cpu"))
    check(composed("device=auto"))


def test_a_spread_model_takes_all_devices_and_is_not_timed_as_one(refusal):
    assert refusal("model.device_map=balanced", "device=cuda:1").startswith("device=cuda:1: model.device_map=balanced ")
    assert refusal("model.device_map=balanced", "task=latency").startswith("model.device_map=balanced: task=latency ")


def test_flashinfer_is_refused_where_it_plainly_cannot_run(refusal, composed, monkeypatch):
    def reason(*words):
        line = refusal("model=qwen3-8b", "attention=flashinfer", *words)
        start, end = "attention=flashinfer: ", "; attention=auto takes what runs"
        assert line.startswith(start) and line.endswith(end)
        return line.removeprefix(start).removesuffix(end)

    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    monkeypatch.setattr(checks, "_no_cuda", lambda: None)
    check(composed("model=qwen3-8b", "attention=flashinfer"))
    check(composed("model=qwen3-8b", "attention=flashinfer", "dtype=float16", "device=cuda"))
    assert reason("model=dummy-tiny") == "head dim 32 is not one of 64, 128, 256"
    assert reason("dtype=float32") == "dtype float32 is not one of bfloat16, float16"
    assert reason("device=cpu") == "cpu is not a CUDA device"
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "flashinfer" else object())
    assert reason() == "the package is not installed, pip install 'kvbench[flashinfer]'"
    monkeypatch.setattr(checks, "_no_cuda", lambda: "there is no CUDA device here")
    assert reason() == "there is no CUDA device here"
    check(composed("model=qwen3-8b", "attention=flashinfer"), here=False)  # for a job on another machine
    check(composed("model=qwen3-8b", "attention=auto"))


def test_head_dim_of_a_model_that_does_not_say_it_is_its_width_shared_by_its_heads(model_folder, refusal):
    folder = model_folder(hidden_size=4096, num_attention_heads=128)
    line = refusal(f"model.path={folder}", "attention=flashinfer")
    assert line.startswith("attention=flashinfer: head dim 32 is not one of 64, 128, 256; ")


@pytest.mark.parametrize("path", ["/not/here", "./not_here", "~/not_here", "a/b/c"])
def test_a_model_path_that_is_not_there_is_refused(refusal, path):
    assert refusal(f"model.path='{path}'").startswith(
        f"model.path={path}: no such folder; expected a folder, or a hub id"
    )


def test_a_folder_that_holds_no_model_is_refused(refusal, tmp_path):
    assert "no config.json in it" in refusal(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("[]")
    assert "config.json is no mapping" in refusal(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert "no weights in it" in refusal(f"model.path={tmp_path}")


def test_a_model_folder_with_an_adapter_is_refused_by_name(refusal, model_folder):
    """Whether transformers applies it depends on whether peft is installed."""
    (folder := model_folder(num_hidden_layers=2)).joinpath("adapter_config.json").write_text("{}")
    line = refusal(f"model.path={folder}")
    assert line.startswith(f"model.path={folder}: adapter_config.json in it") and "merge_and_unload" in line
    (folder / "config.json").unlink()  # an adapter alone
    assert "adapter_config.json in it" in refusal(f"model.path={folder}")


def test_a_model_folder_with_nothing_but_windows_is_refused_by_name(refusal, model_folder):
    kinds = ["sliding_attention"] * 32
    folder = model_folder(model_type="qwen2", num_hidden_layers=32, sliding_window=4096, layer_types=kinds)
    line = refusal(f"model.path={folder}")
    assert line.startswith(f"model.path={folder}: qwen2 has no layer with full attention (")


def test_a_results_folder_that_cannot_be_written_is_refused_and_nothing_is_left(refusal, composed, tmp_path):
    (tmp_path / "file").write_text("")
    assert "(it is a file)" in refusal(f"results_dir={tmp_path}/file/results")
    assert "cannot write in /proc" in refusal("results_dir=/proc/kvbench/results")
    assert refusal("results_dir='~/results'") == "results_dir=~/results: expected a folder, with no ~ in front"
    check(composed(f"results_dir={tmp_path}/new/results"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("where", ["", "runs", "runs/passkey", "runs/passkey/tiny/icecache-256"])
def test_a_link_to_nowhere_on_the_way_to_the_results_is_named_before_a_model_loads(refusal, tmp_path, where):
    link = tmp_path / "results" / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "gone")
    line = refusal(f"results_dir={tmp_path}/results")
    assert line.startswith(f"results_dir={tmp_path}/results: ") and str(link) in line and "gone" in line
    assert not (tmp_path / "gone").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("where", ["runs", "runs/passkey/tiny", "runs/passkey/tiny/icecache-256"])
def test_results_of_another_user_are_named_before_a_model_loads(composed, where):
    with tempfile.TemporaryDirectory() as top:
        (Path(top) / "results" / where).mkdir(parents=True)
        for folder in [Path(top), Path(top) / "results"]:
            folder.chmod(0o777)
        made = composed(f"results_dir={top}/results")
        os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match=rf"results_dir={top}/results: .*{where} \(Permission denied\)"):
                check(made)
        finally:
            os.seteuid(0)


def test_a_model_folder_without_a_tokenizer_is_refused_before_a_model_loads(refusal, model_folder):
    folder = model_folder(model_type="llama", num_hidden_layers=2)
    (folder / "tokenizer.json").unlink()
    line = refusal(f"model.path={folder}")
    assert line.startswith(f"model.path={folder}: ") and "tokenizer.json" in line


def test_a_folder_of_rulers_with_too_few_rows_is_refused_before_a_model_loads(refusal, composed, tmp_path):
    file = tmp_path / "4096" / "vt.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n" * 3)
    words = ["task=ruler", "task.subsets=[vt]", "task.lengths=[4096]", f"task.data_dir={tmp_path}"]
    line = refusal(*words, "task.samples=4")
    assert "task.samples=4" in line and str(file) in line and "3 lines" in line
    check(composed(*words, "task.samples=3"))


def test_results_of_another_format_under_the_same_arm_are_refused(refusal, composed, tmp_path):
    from kvbench.runs.folder import ResultsError, RunFolder

    names = ("passkey", "tiny", "icecache-256")
    with RunFolder.open(tmp_path / "results", *names, {"seed": 1}, {}) as folder:
        pass
    check(composed())
    text = (folder.path / "run.yaml").read_text()
    (folder.path / "run.yaml").write_text(text.replace("format: 1\n", "format: 2\n"))
    with pytest.raises(ResultsError, match=rf"{folder.path} .*format 2.*results_dir"):
        check(composed())
    check(composed("budget=128"))
