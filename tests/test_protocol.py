"""Claims about the protocol: what it accepts, which layers are dense, and how a prompt becomes token ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbench.backends.protocol import Protocol
from kvbench.measure.render import render
from kvbench.tasks import Sample

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] | trim }}\n{% endfor %}"
    "{% if date_string is defined %}[{{ date_string }}]{% endif %}<|assistant|>"
)
QUESTION = "What is the colour? The colour is"
SAMPLE = Sample(id="one", prompt=f"Sky: blue — é.\n{QUESTION}", answers=("blue",), max_new_tokens=4, question=QUESTION)


def byte_level(bos: bool, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte; with `bos`, raw prompts start with <s> as Llama's do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    wrapped.chat_template = template
    return wrapped


@pytest.mark.parametrize("bos", [False, True])
def test_a_raw_prompt_gets_the_tokenizers_own_special_tokens_once(bos):
    tokenizer = byte_level(bos, TEMPLATE)
    rendered = render(SAMPLE, tokenizer, chat=False)
    assert tokenizer.decode(rendered.ids) == "<s>" * bos + SAMPLE.prompt
    assert rendered.ids.count(tokenizer.bos_token_id) == bos


@pytest.mark.parametrize("bos", [False, True])
def test_bos_is_never_doubled_by_the_chat_template(bos):
    tokenizer = byte_level(bos, TEMPLATE)
    rendered = render(SAMPLE, tokenizer, chat=True)
    assert rendered.ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(rendered.ids) == f"<s><|user|>{SAMPLE.prompt}\n[26 Jul 2024]<|assistant|>"


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_question_start_is_the_token_of_its_first_character(bos, chat):
    tokenizer = byte_level(bos, TEMPLATE)
    rendered = render(SAMPLE, tokenizer, chat)
    assert tokenizer.decode(rendered.ids[rendered.question_start :]).startswith(QUESTION)
    assert tokenizer.decode(rendered.ids[: rendered.question_start]).endswith("é.\n")


def test_the_last_of_several_equal_questions_counts():
    twice = Sample(id="two", prompt=f"{QUESTION} red. {QUESTION}", answers=("",), max_new_tokens=1, question=QUESTION)
    assert render(twice, byte_level(False), chat=False).question_start == len(f"{QUESTION} red. ")


def test_a_trimmed_question_is_found_in_the_template():
    padded = Sample(id="pad", prompt="a\nAnswer: ", answers=("",), max_new_tokens=1, question="Answer: ")
    tokenizer = byte_level(False, TEMPLATE)
    rendered = render(padded, tokenizer, chat=True)
    assert tokenizer.decode(rendered.ids[rendered.question_start :]).startswith("Answer:\n")


def test_a_template_that_changes_the_question_is_refused():
    tokenizer = byte_level(False, "{{ messages[0]['content'] | upper }}")
    with pytest.raises(ValueError, match="protocol.chat=off"):
        render(SAMPLE, tokenizer, chat=True)


def test_no_question_has_no_start():
    plain = Sample(id="plain", prompt="Once", answers=("",), max_new_tokens=1)
    assert render(plain, byte_level(True), chat=False).question_start is None


def test_auto_chat_follows_the_sample_and_needs_a_template():
    with_template, without = byte_level(True, TEMPLATE), byte_level(True)
    asking = replace(SAMPLE, chat=True)
    assert not Protocol().uses_chat(SAMPLE, with_template)
    assert Protocol().uses_chat(asking, with_template)
    assert not Protocol().uses_chat(asking, without)
    assert Protocol(chat="on").uses_chat(SAMPLE, with_template)
    assert not Protocol(chat="off").uses_chat(asking, with_template)


def test_chat_on_without_a_template_names_the_key():
    Protocol(chat="on").check_chat(byte_level(True, TEMPLATE))
    Protocol().check_chat(byte_level(True))
    with pytest.raises(ValueError, match="protocol.chat=on"):
        Protocol(chat="on").check_chat(byte_level(True))


@pytest.mark.parametrize(
    "chat, text", [(False, "Ask. It is"), (True, "<|user|>Ask.\n[26 Jul 2024]<|assistant|> It is")]
)
def test_the_answer_prefix_comes_after_the_prompt_or_the_assistants_header(chat, text):
    asking = Sample(id="one", prompt="Ask.", answers=("",), max_new_tokens=1, question="Ask.", answer_prefix=" It is")
    tokenizer = byte_level(True, TEMPLATE)
    rendered = render(asking, tokenizer, chat)
    assert tokenizer.decode(rendered.ids) == f"<s>{text}"
    assert tokenizer.decode(rendered.ids[rendered.question_start :]) == text[text.index("Ask.") :]


LONG = replace(SAMPLE, prompt="".join(map(str, range(1000))) + QUESTION, truncate=True)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("window, most", [(None, 201), (None, 200), (300, None), (301, 10**6), (300, 200)])
def test_a_long_prompt_loses_its_middle_before_the_template(bos, chat, window, most):
    tokenizer = byte_level(bos, TEMPLATE)
    rendered = render(replace(LONG, max_length=most), tokenizer, chat, window)
    raw = tokenizer(LONG.prompt)["input_ids"]
    if window is not None:
        assert window - 2 <= len(rendered.ids) + LONG.max_new_tokens <= window or most == 200
    if most is not None and most < 1000:
        half = most // 2
        kept = tokenizer.decode(raw[:half], skip_special_tokens=True) + tokenizer.decode(raw[-half:])
        assert rendered.cut == len(raw) - 2 * half
        assert kept in tokenizer.decode(rendered.ids)
    assert rendered.ids.count(tokenizer.bos_token_id) == (bos or chat)
    assert tokenizer.decode(rendered.ids[rendered.question_start :]).startswith(QUESTION)


def test_what_fits_is_not_cut():
    tokenizer = byte_level(True, TEMPLATE)
    size = len(render(LONG, tokenizer, True).ids) + LONG.max_new_tokens
    assert render(LONG, tokenizer, True, size) == render(replace(LONG, truncate=False), tokenizer, True)
    assert render(LONG, tokenizer, True, size - 1).cut > 0


def test_a_question_lost_to_the_cut_has_no_start():
    assert render(replace(LONG, max_length=20), byte_level(False), chat=False).question_start is None


def test_a_window_without_room_for_any_prompt_is_an_error():
    with pytest.raises(ValueError, match="window of 10 tokens .* 4 new tokens"):
        render(LONG, byte_level(True, TEMPLATE), True, 10)


def test_the_digest_is_stable_and_tells_protocols_apart():
    variants = [
        Protocol(),
        Protocol(accounting="unified"),
        Protocol(dense_layers="method"),
        Protocol(dense_layers=()),
        Protocol(dense_layers=(0, 1)),
        Protocol(chat="off"),
        Protocol(prefill_chunk=512),
    ]
    assert len({protocol.digest() for protocol in variants}) == len(variants)
    assert Protocol(dense_layers=[1, 0, 1]).digest() == Protocol(dense_layers=(0, 1)).digest()
    assert Protocol(dense_layers=[1, 0]) == Protocol(dense_layers=(0, 1))


def test_dense_layers_come_from_the_model_the_method_or_the_list():
    assert Protocol().dense_layers_of(auto=(0, 1), published=(5,), layers=8) == (0, 1)
    assert Protocol(dense_layers="method").dense_layers_of(auto=(0, 1), published=(5,), layers=8) == (5,)
    assert Protocol(dense_layers=[3, 2]).dense_layers_of(auto=(0, 1), published=(5,), layers=8) == (2, 3)
    assert Protocol(dense_layers=()).dense_layers_of(auto=(0, 1), published=(5,), layers=8) == ()


@pytest.mark.parametrize("chosen, said", [([8], r"\[8\]: "), ([-1], r"\[-1\]: "), ("auto", r"\[0, 9\] \(auto\): ")])
def test_a_dense_layer_outside_the_model_names_the_key(chosen, said):
    with pytest.raises(ValueError, match=rf"protocol\.dense_layers={said}the model has layers 0 to 7"):
        Protocol(dense_layers=chosen).dense_layers_of(auto=(0, 9), published=(), layers=8)


@pytest.mark.parametrize(
    "key, value",
    [
        ("accounting", "fair"),
        ("chat", True),
        ("prefill_chunk", 0),
        ("prefill_chunk", 1.5),
        ("prefill_chunk", True),
        ("dense_layers", "all"),
        ("dense_layers", ""),
        ("dense_layers", 1),
        ("dense_layers", [0.5]),
        ("dense_layers", [True]),
    ],
)
def test_a_bad_value_names_its_key(key, value):
    with pytest.raises(ValueError, match=rf"protocol\.{key}="):
        Protocol(**{key: value})
