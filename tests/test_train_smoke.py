"""Claims about the training script: it learns, goes on where it stopped, and marks the answers it trains on."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train_tiny_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(script):
    return script.text_of(script.train_tokenizer(0, 5, 512))


@pytest.mark.slow
def test_the_smoke_run_learns_to_repeat_and_saves_a_model_that_loads():
    """A minute or two on a core; the limit leaves room for one that others use as well."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["last_loss"] < result["first_loss"] / 2


def test_heads_of_layer_0_start_out_looking_one_to_four_tokens_back(script):
    torch.manual_seed(0)
    model = script.new_model(1, 512)
    model.set_attn_implementation("eager")
    attention = model(torch.randint(3, 512, (2, 64)), output_attentions=True).attentions[0]
    for head in range(4):
        back = attention[:, head].diagonal(offset=-head - 1, dim1=-2, dim2=-1)
        assert back[:, 8:].mean() > 0.5


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(script, text, tmp_path):
    curriculum = (
        script.Stage(2, 64, 2, (1e-3, 1e-3), {"repeats": 1}),
        script.Stage(2, 192, 2, (1e-3, 1e-4), script.LOOKUP),
    )

    def new():
        torch.manual_seed(0)
        model = script.new_model(2, 512)
        return script.Training(text, model, script.new_optimizer(model), curriculum, seed=0)

    whole, first, second = new(), new(), new()
    expected = [whole.learn() for _ in range(4)]
    assert [first.learn() for _ in range(3)] == expected[:3]
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    assert [second.learn()] == expected[3:]


def test_a_checkpoint_of_another_seed_is_refused(script, text, tmp_path):
    model = script.new_model(1, 512)
    script.Training(text, model, script.new_optimizer(model), script.SMOKE, seed=0).save(tmp_path / "checkpoint.pt")
    other = script.Training(text, model, script.new_optimizer(model), script.SMOKE, seed=1)
    with pytest.raises(SystemExit, match="another seed"):
        other.load(tmp_path / "checkpoint.pt")


def test_the_first_tokens_of_an_answer_weigh_most(script):
    answers = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    few = script.FOLLOWING_WEIGHT
    expected = torch.tensor([[0, 1, 1, few, few, 0, 0, 1, 0, 1], [1, 1, few, 0, 0, 0, 0, 0, 0, 0]])
    assert torch.equal(script.answer_weights(answers), expected)


def test_every_digit_is_a_token_the_first_with_its_space(script, text):
    tokens = text.tokenizer.encode(" The pass key is 4071. 12-7", add_special_tokens=False).tokens
    assert [token for token in tokens if token[-1].isdigit()] == ["Ġ4", "0", "7", "1", "Ġ1", "2", "7"]
    assert text.tokenizer.decode(text.encode("is: 449 7, a-b.\n x1")) == "is: 449 7, a-b.\n x1"


@pytest.mark.parametrize("length", [192, 512, 1024])
@pytest.mark.parametrize("source", ["lists", "needles", "tasks"])
def test_every_answer_stands_in_the_text_before_it(script, text, source, length):
    for seed in range(5):
        ids, marks = text.row(source, length, random.Random(seed))
        assert len(ids) == len(marks) <= length and ids[0] == script.BOS and any(marks)
        first = marks.index(True)
        last = marks.index(False, first) if False in marks[first:] else len(ids)
        told, answer = (text.tokenizer.decode(part) for part in (ids[:first], ids[first:last]))
        for value in answer.strip(" .").replace(" and ", " ").split(", "):
            assert value.strip(" .") in told
