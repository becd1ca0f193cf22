"""Methods and options by name, and what is built of them, without a command line."""

import math
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvbench import config
from kvbench.config import ConfigError, MethodConfig, TargetConfig
from kvbench.models.card import ModelCard


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 32}, "layer_types: sliding_attention"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: linear_attention"),
        ({"layer_types": ["mamba", "chunked_attention"]}, "layer_types: chunked_attention, mamba"),
        ({"text_config": {"layer_types": ["conv"]}}, "layer_types: conv"),
        ({"index_topk": 2048}, "a trained indexer"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_attention_that_kvbench_would_compute_wrong_is_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelCard.of({"num_hidden_layers": 32, **keys}).refuse_unsupported("model=x")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mamba_d_state": 16},
        {"layer_types": ["sliding_attention"] * 32, "use_sliding_window": False, "sliding_window": 131072},
        {"layer_types": ["full_attention"] * 32, "sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 4096},
        {"layer_types": ["full_attention", "linear_attention", "conv", "moe"] * 8},
        {
            "layer_types": ["sliding_attention"] * 32,
            "sliding_window": 262144,
            "max_position_embeddings": 131072,
        },
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ],
)
def test_full_attention_in_a_layer_passes(keys):
    ModelCard.of({"num_hidden_layers": 32, **keys}).refuse_unsupported("model=x")


def test_one_typo_in_a_name_still_finds_it():
    @given(
        name=st.sampled_from(sorted(config.choices("method"))), place=st.integers(0, 20), letter=st.sampled_from("xyz")
    )
    def finds(name, place, letter):
        typo = name[: place % len(name)] + letter + name[place % len(name) + 1 :]
        if typo != name:
            assert name in config.nearest(typo, config.choices("method")).partition("?")[0]

    finds()


def test_a_method_is_read_without_hydra():
    quest = config.method_config("quest", page_size=32)
    assert quest.target == "methods.quest.Quest"
    assert quest.options == {"page_size": 32, "selection": "query_head"}
    assert quest.minimum == {"paper": 96, "unified": 96}


def beyond(rule):
    """Values that a rule of a file's `valid` key leaves out."""
    if isinstance(rule, list):
        return ["no_such_word"]
    if "above" in rule or "from" in rule:
        low = [rule["above"]] if "above" in rule else [rule["from"] - 0.1]
        return [*low, "half", math.nan, True, *([rule["at_most"] + 0.1] if "at_most" in rule else [])]
    least = rule.get("at_least", 1)
    return [least - 1, least + 0.5, *([least + least % 2] if rule.get("odd") else [])]


WITH_VALID = [
    (group, name)
    for group in ("method", "task")
    for name in config.choices(group)
    if config.shipped(group, name).get("valid")
]


@pytest.mark.parametrize(("group", "name"), WITH_VALID)
def test_a_value_that_a_file_leaves_out_is_refused_with_key_and_value(group, name):
    for key, rule in config.shipped(group, name)["valid"].items():
        for value in beyond(rule):
            line = rf"^{group}\.{key}={re.escape(config.show(value))}: expected .*$"
            with pytest.raises(ConfigError, match=line):
                config.check_valid(group, {key: value}, {key: rule})
    if group == "method":
        with pytest.raises(ConfigError, match=line):
            config.method_config(name, **{key: value})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"abovee": 0}, ["{abovee: 0}", "abovee", "above"]),
        ({"at_least": 1, "at_most": 4}, ["at_most", "whole"]),
        ({"at_most": 4}, ["at_most", "above"]),
        ({"above": 0, "odd": True}, ["odd", "any number"]),
        ({"at_least": "one"}, ["at_least", "a whole number"]),
        ({"from": "0"}, ["from", "a number"]),
        ({"or_null": 1}, ["or_null", "true or false"]),
        (3, ["=3", "a list", "at_least"]),
        ("odd", ["=odd", "a list", "at_least"]),
    ],
)
def test_a_rule_that_says_something_unknown_is_refused_and_not_read_as_the_default(rule, words):
    with pytest.raises(ConfigError) as refused:
        config.check_rules("method", {"name": "mine", "window": 8, "valid": {"window": rule}})
    assert all(word in str(refused.value) for word in ["method.valid.window", *words])


@pytest.mark.parametrize("valid", [{"windo": [8]}, {"preset": [8]}, [8], "window"])
def test_a_rule_of_no_option_is_refused(valid):
    with pytest.raises(ConfigError, match=r"method\.valid.*(no such option|expected a mapping)"):
        config.check_rules("method", {"name": "mine", "preset": 8, "window": 8, "valid": valid})


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("qest", {}, r"method=qest: no such method; did you mean quest\?"),
        ("../method/quest", {}, "no such method"),
        ("quest", {"page": 3}, r"page: no such option of method quest; did you mean page_size\?"),
        ("quest", {"preset": 3}, r"preset: no such option of method quest; \(valid: page_size, selection\)"),
    ],
)
def test_a_wrong_method_or_option_in_code_names_the_nearest(name, options, line):
    with pytest.raises(ConfigError, match=line):
        config.method_config(name, **options)


class Example:
    def __init__(self, size=1):
        if size < 0:
            raise ValueError("size=-1: at least 0\nmore")
        self.size = size


HERE = f"{__name__}.Example"


def test_build_calls_the_target_with_all_but_the_harness_keys():
    node = {"_target_": HERE, "name": "example", "about": "", "minimum": {"paper": 1}, "size": 3}
    assert TargetConfig.of(node).build().size == 3
    assert TargetConfig.of(OmegaConf.create({**node, "size": "${minimum.paper}"})).build().size == 1
    assert MethodConfig(target=HERE, options={"size": 2}).build().size == 2


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"_target_": HERE, "sze": 3}, "got an unexpected keyword argument 'sze'; given: sze"),
        ({"_target_": HERE, "name": "example", "size": -1}, "^example: size=-1: at least 0$"),
        ({"_target_": HERE + "s"}, "no Examples in .*did you mean Example"),
        ({"_target_": "nowhere.Thing"}, "_target_=nowhere.Thing: No module named 'nowhere'"),
        ({"_target_": "Thing"}, "expected module.Class"),
    ],
)
def test_a_target_that_cannot_be_built_says_why(node, line):
    with pytest.raises(ConfigError, match=line):
        TargetConfig.of(node).build()


def test_a_choice_follows_the_files_that_it_differs_from(tmp_path, monkeypatch):
    """What was merged once is merged anew when a file of the chain changes, and what a caller changes is its own."""
    monkeypatch.setattr(config, "conf_dir", lambda: tmp_path)
    (tmp_path / "method").mkdir()
    base = tmp_path / "method" / "base.yaml"
    for name, differs_from in (("middle", "base"), ("top", "middle")):
        (base.parent / f"{name}.yaml").write_text(f"defaults: [{differs_from}, _self_]\nname: {name}\n")
    for window in (32, 64):
        base.write_text(f"name: base\nwindow: {window}\n")
        os.utime(base, (window, window))
        found = config.shipped("method", "top")
        assert found == {"name": "top", "window": window}
        found["window"] = 0
        assert config.shipped("method", "top")["window"] == window
