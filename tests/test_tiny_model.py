"""The model that kvbench ships: small, loaded without a network, described as measured, and good for what it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.cli.compose import composed
from kvbench.config import ASSETS, shipped
from kvbench.measure.job import PromptJob, SharedPrompts
from kvbench.measure.prompts import prompt_of
from kvbench.models.hub import ModelConfig
from kvbench.runs.run import prepare

TINY = ASSETS / "tiny"
CARD = (TINY / "README.md").read_text()
MEASURED = json.loads((TINY / "measured.json").read_text())


def test_it_is_small_and_in_half_precision():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 16 * 2**20
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in TINY.iterdir()), "readable for all"


@pytest.mark.slow
def test_it_loads_with_transformers_alone_and_without_a_network(tmp_path):
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; import sys\n"
        "m, t = M.from_pretrained(sys.argv[1]), T.from_pretrained(sys.argv[1])\n"
        "print(m.num_parameters(), t.decode(t('is: 449 7.')['input_ids'], skip_special_tokens=True))"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, str(TINY)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    parameters, text = done.stdout.strip().split(" ", 1)
    assert 4e6 < int(parameters) < 6e6 and text == "is: 449 7."


def test_its_shape_stands_in_its_file():
    config = json.loads((TINY / "config.json").read_text())
    shape = shipped("model", "tiny")["config"]
    assert {key: config[key] for key in shape} == shape
    assert shipped("model", "tiny")["dense_layers"] == []


def test_a_folder_of_ones_own_over_the_default_is_that_model(tmp_path):
    source = ModelConfig.of({**shipped("model", "tiny"), "path": str(tmp_path / "mine")}).source
    assert (source.name, source.path, source.dense_layers) == ("mine", str(tmp_path / "mine"), (0, 1))
    own = ModelConfig.of({**shipped("model", "tiny"), "path": str(TINY)}).source
    assert (own.name, own.dense_layers) == ("tiny", ())


def test_the_tokenizer_keeps_every_digit_apart():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = tokenizer.tokenize(" is: 4071. 12")
    assert tokens == ["Ġis", ":", "Ġ4", "0", "7", "1", ".", "Ġ1", "2"]
    assert tokenizer.padding_side == "left" and not tokenizer.chat_template


def test_it_generates_alike_with_and_without_padding():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    prompts = ["The pass key is 4071. Remember it.\nWhat is the pass key? The pass key is", "The number for a is"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=4, do_sample=False)
        alone = model.generate(**tokenizer(prompts[1], return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert torch.equal(out[1, -alone.shape[1] :], alone[0])


@pytest.fixture(scope="module")
def arms():
    """Full attention and StreamingLLM on the small model, a passkey at 1,024 tokens each."""
    words = ["task.lengths=[1024]", "threads=null"]
    full = prepare(composed("method=full", "budget=null", *words))
    return full, prepare(composed("method=streaming_llm", "budget=128", *words), full.loaded)


@pytest.mark.slow
def test_it_finds_passkeys_and_a_method_that_forgets_them_does_not(arms):
    scores = {"full": 0.0, "streaming_llm": 0.0}
    for sample in islice(arms[0].task.samples(arms[0].loaded.tokenizer, 3), 8):
        prompt = prompt_of(arms[0], sample)
        shared = SharedPrompts(arms, [prompt])
        for name, arm in zip(scores, arms, strict=True):
            scores[name] += PromptJob(arm, [prompt], shared).run()[0]["scores"]["accuracy"]
    assert scores["full"] >= 7 and scores["streaming_llm"] <= 3


def test_the_card_says_what_was_measured():
    for cell, value in MEASURED["accuracy"].items():
        task, _, length = cell.partition("/")
        assert f"| {task} |" in CARD and f"{int(length):,}" in CARD
        assert f"{value['score']:.0f} ± {value['stderr']:.0f}" in CARD
    assert set(MEASURED["mass"]) == set(map(str, range(6))) and all(0 < mass <= 1 for mass in MEASURED["mass"].values())
    assert len(MEASURED["windowed"]) == 7 and f"Seed {json.loads((TINY / 'training.json').read_text())['seed']}" in CARD
