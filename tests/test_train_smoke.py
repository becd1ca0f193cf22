"""Claims about the training script: it learns, goes on where it stopped, and marks the answers it trains on."""

from __future__ import annotations

import json
import math
import random
import sys

import pytest
import torch
import train_tiny_model as script
from transformers import AutoModelForCausalLM, AutoTokenizer

# The quickest way to see induction form: two layers, and few enough words that each is met often.
REPEATS = (script.Stage(200, 64, 64, (4e-3, 4e-3), {"repeats": 1}),)


@pytest.fixture(scope="module")
def text():
    return script.text_of(script.train_tokenizer(0, 5, 512))


def begun(text, layers, curriculum=REPEATS, seed=0):
    torch.manual_seed(0)
    model = script.new_model(layers, text.tokenizer.get_vocab_size())
    return script.Training(text, model, script.new_optimizer(model), curriculum, seed)


@pytest.mark.slow
def test_a_training_learns_to_repeat_and_saves_a_model_that_loads(tmp_path):
    training = begun(script.text_of(script.train_tokenizer(0, 20, 768)), 2)
    training.train(tmp_path, math.inf)
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert curve[-1]["step"] == 200 and curve[-1]["answers"] < curve[0]["answers"] / 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and tokenizer("is: 12")["input_ids"][0] == script.BOS


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    stage = script.Stage(2, 64, 2, (1e-3, 1e-3), {"repeats": 1})
    monkeypatch.setattr(script, "CURRICULUM", (stage,))
    tokenizer = script.train_tokenizer(0, 5, 512)
    monkeypatch.setattr(script, "train_tokenizer", lambda seed, prompts: tokenizer)
    monkeypatch.setattr(script, "VOCABULARY", 512)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["train_tiny_model.py", "--out", str(tmp_path), "--threads", "1", *words])
        script.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert (first := command("--minutes", "0"))["step"] == 0 and not first["done"]
    with pytest.raises(SystemExit, match="--resume"):
        command()
    assert command("--resume")["done"]


def test_heads_of_layer_0_start_out_looking_one_to_four_tokens_back():
    torch.manual_seed(0)
    model = script.new_model(1, 512)
    model.set_attn_implementation("eager")
    attention = model(torch.randint(3, 512, (2, 64)), output_attentions=True).attentions[0]
    for head in range(4):
        back = attention[:, head].diagonal(offset=-head - 1, dim1=-2, dim2=-1)
        assert back[:, 8:].mean() > 0.5


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(text, tmp_path):
    curriculum = (
        script.Stage(2, 64, 2, (1e-3, 1e-3), {"repeats": 1}),
        script.Stage(2, 192, 2, (1e-3, 1e-4), script.LOOKUP),
    )
    whole, first, second = (begun(text, 2, curriculum) for _ in range(3))
    expected = [whole.learn() for _ in range(4)]
    assert [first.learn() for _ in range(3)] == expected[:3]
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    assert [second.learn()] == expected[3:]


def test_a_checkpoint_of_another_seed_is_refused(text, tmp_path):
    begun(text, 1).save(tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="seed"):
        begun(text, 1, seed=1).load(tmp_path / "checkpoint.pt")


def test_the_first_tokens_of_an_answer_weigh_most():
    answers = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    few = script.FOLLOWING_WEIGHT
    expected = torch.tensor([[0, 1, 1, few, few, 0, 0, 1, 0, 1], [1, 1, few, 0, 0, 0, 0, 0, 0, 0]])
    assert torch.equal(script.answer_weights(answers), expected)


def test_every_digit_is_a_token_the_first_with_its_space(text):
    tokens = text.tokenizer.encode(" The pass key is 4071. 12-7", add_special_tokens=False).tokens
    assert [token for token in tokens if token[-1].isdigit()] == ["Ġ4", "0", "7", "1", "Ġ1", "2", "7"]
    assert text.tokenizer.decode(text.encode("is: 449 7, a-b.\n x1")) == "is: 449 7, a-b.\n x1"


@pytest.mark.parametrize("length", [192, 512, 1024])
@pytest.mark.parametrize("source", ["lists", "needles", "tasks"])
def test_every_answer_stands_in_the_text_before_it(text, source, length):
    for seed in range(5):
        ids, marks = text.row(source, length, random.Random(seed))
        assert len(ids) == len(marks) <= length and ids[0] == script.BOS and any(marks)
        first = marks.index(True)
        last = marks.index(False, first) if False in marks[first:] else len(ids)
        told, answer = (text.tokenizer.decode(part) for part in (ids[:first], ids[first:last]))
        for value in answer.strip(" .").replace(" and ", " ").split(", "):
            assert value.strip(" .") in told
