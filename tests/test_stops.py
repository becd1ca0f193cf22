"""Texts that end an output: in any script, however many tokens a character takes, as transformers' stop strings do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, StopStringCriteria

from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.measure.job import ends_at, stops
from kvbench.tasks import Sample

PIECES = [
    "a",
    "b",
    " the",
    "\n",
    "\n\n",
    "Q:",
    "é",
    "д",
    "Ответ",
    "。",
    "答",
    "答案：",
    "🙂",
    "👩‍👩‍👧",
    "한",
    " ",
    "</s>",
    "x" * 9,
]
STOPS = [
    "Q:",
    "\n\n",
    "。",
    "答案：",
    "Ответ:",
    "🙂🙂",
    "👩‍👩‍👧",
    "한글",
    " the",
    "éд",
    "ab",
    "b。a",
    "答" * 20,
    "🙂" * 12,
]


def byte_level_bpe() -> PreTrainedTokenizerFast:
    """Bytes, and pairs of them that the pieces have often: characters of one token, of several, and parts of two."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    backend.train_from_iterator(["".join(PIECES[:k]) for k in range(3, len(PIECES))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece's: some characters, and bytes for all others."""
    known = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abQ:the答\n"]
    backend = Tokenizer(
        BPE({token: index for index, token in enumerate(known)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = {"bytes": byte_tokenizer, "byte-level BPE": byte_level_bpe, "byte fallback": byte_fallback}


def first_end(ends: Any, tokens: Sequence[int]) -> int | None:
    return next((count for count in range(1, len(tokens) + 1) if ends(tokens[:count])), None)


def outputs(tokenizer: PreTrainedTokenizerBase, seed: int, between: str = "") -> list[int]:
    """Tokens of random pieces, of a stop, and of more, with special tokens or broken characters among them."""
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=draw.randrange(40))) + draw.choice(STOPS) + "".join(draw.choices(PIECES, k=3))
    tokens = list(tokenizer(text, add_special_tokens=False).input_ids)
    for _ in range({"specials": draw.randrange(200), "bytes": draw.randrange(20)}.get(between, 0)):
        more = tokenizer.eos_token_id if between == "specials" else draw.choice(tokenizer("한").input_ids[-3:])
        tokens.insert(draw.randrange(len(tokens)), more)
    return tokens


CASES = [(name, between) for name in TOKENIZERS for between in ("", "specials", "bytes")]
CASES.remove(("byte fallback", "bytes"))  # one broken byte makes all bytes beside it unreadable there


@pytest.mark.parametrize(("name", "between"), CASES)
def test_an_output_ends_with_the_token_that_completes_a_stop(name: str, between: str) -> None:
    tokenizer, ended = TOKENIZERS[name](), 0
    for seed in range(60):
        tokens = outputs(tokenizer, seed, between)
        wanted = random.Random(seed).sample(STOPS, 3)

        def whole(tokens: Sequence[int], wanted: Sequence[str] = wanted) -> bool:
            return any(stop in tokenizer.decode(list(tokens), skip_special_tokens=True) for stop in wanted)

        expected = first_end(whole, tokens)
        assert first_end(ends_at(tokenizer, wanted), tokens) == expected
        ended += expected is not None
    assert ended > 10


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_bpe], ids=["bytes", "byte-level BPE"])
def test_an_output_ends_where_transformers_ends_it(make: Any) -> None:
    """Of characters that are whole tokens: transformers matches no stop whose character is in several."""
    tokenizer, ended = make(), 0
    for seed in range(30):
        tokens = outputs(tokenizer, seed)
        wanted = ["Q:", "\n\n", " the", "ab"]
        criteria = StopStringCriteria(tokenizer, wanted)

        def theirs(tokens: Sequence[int], criteria: StopStringCriteria = criteria) -> bool:
            return bool(criteria(torch.tensor([tokens]), None)[0])

        expected = first_end(theirs, tokens)
        assert first_end(ends_at(tokenizer, wanted), tokens) == expected
        ended += expected is not None
    assert ended > 10


def test_an_end_token_that_is_part_of_a_character_ends_an_output_at_that_character_alone() -> None:
    tokenizer = byte_tokenizer()
    loaded: Any = SimpleNamespace(tokenizer=tokenizer, stop_ids=(257,))
    found = stops(loaded, Sample("one", "", ("",), 4, end_token="。"))
    assert found.stop_ids == {257}
    assert not found.ends(list("あ".encode()))  # the last byte is the same
    assert found.ends(list("い。".encode()))
