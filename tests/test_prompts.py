"""Claims about texts as a model reads them: a chat template is bounded, sees no clock, and keeps the user's text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.backends.hf.loading import EOS, byte_tokenizer
from kvbench.config import ConfigError
from kvbench.engine.replay import Template
from kvbench.measure.render import render
from kvbench.models import prompts
from kvbench.tasks import Sample
from kvbench.tasks.ruler.task import counter

TEXT = "What is the colour?"
SAMPLE = Sample(id="one", prompt=TEXT, answers=("blue",), max_new_tokens=4)


def with_template(template: object) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def refusal(tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(ConfigError) as caught:
        prompts.chat_text(TEXT, tokenizer)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


def test_a_template_is_told_the_same_day_always():
    tokenizer = with_template("{{ strftime_now('%Y-%m-%d %H:%M:%S %s') }}|{{ date_string }}|{{ messages[0].content }}")
    stamp, day, text = prompts.chat_text(TEXT, tokenizer).split("|")
    assert stamp.startswith("2024-07-26 00:00:00 ") and day == "26 Jul 2024" and text == TEXT


def test_what_a_template_draws_is_the_same_in_every_process():
    tokenizer = with_template("{{ range(10**4) | random }}{{ lipsum() }}{{ messages[0].content }}")
    first = prompts.chat_text(TEXT, tokenizer)
    assert prompts.chat_text(TEXT, tokenizer) == first
    prompts._worker.cache_clear()
    assert prompts.chat_text(TEXT, tokenizer) == first


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ messages[0].content.x.y }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('only\nsystem') }}", "only system"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "RecursionError"),
        (5, "TypeError"),
        ("{{ messages[0].content }}{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{{ 'ab' * 10**9 }}", "memory"),
        ("{% set ns = namespace(s='a') %}{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
        ("{{ messages[0].content }}{{ 'a' * 10**7 }}", "10000019 characters"),
    ],
)
def test_whatever_a_template_ends_in_is_one_line(template, reason):
    assert reason in refusal(with_template(template))
    with pytest.raises(ConfigError, match="chat template"):
        render(SAMPLE, with_template(template), chat=True)


def test_a_template_that_takes_too_long_is_stopped_and_the_next_one_is_not(monkeypatch):
    monkeypatch.setattr(prompts, "SECONDS", 1)
    prompts._worker.cache_clear()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "takes more than 1 s" in refusal(with_template(endless))
    assert prompts.chat_text(TEXT, with_template("[{{ messages[0].content }}]")) == f"[{TEXT}]"
    prompts._worker.cache_clear()


def test_a_refusal_names_the_folder_and_the_file_of_the_template(tmp_path: Path):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    message = refusal(tokenizer)
    assert str(tmp_path) in message and "chat_template.jinja" in message and "protocol.chat=off" in message
    for use in (counter, lambda tokenizer: Template.of(tokenizer, "kvzip")):
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            use(tokenizer)


PARTS = "{% for part in messages[0].content if part.type == 'text' %}<{{ part.text }}>{% endfor %}"


def test_a_template_that_takes_a_message_in_parts_is_given_parts():
    assert prompts.chat_text(TEXT, with_template(PARTS)) == f"<{TEXT}>"
    picky = "{{ messages[0].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | first }}"
    assert prompts.chat_text(TEXT, with_template(picky)) == TEXT


@pytest.mark.parametrize("template", ["Hello!", "{{ messages[0].content | upper }}", "{{ messages[0].text }}"])
def test_a_template_that_drops_or_changes_the_text_is_refused_without_a_question_too(template):
    assert "user's text" in refusal(with_template(template))


def test_several_templates_without_a_default_are_one_line():
    assert "default" in refusal(with_template({"one": "{{ messages }}", "two": "{{ messages }}"}))


def test_a_raw_prompt_ends_with_its_text_whatever_the_tokenizer_appends():
    tokenizer = byte_tokenizer()
    plain = render(SAMPLE, tokenizer, chat=False).ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<bos> $A {EOS} {EOS}", special_tokens=[("<bos>", bos), (EOS, eos)]
    )
    assert tokenizer("a").input_ids[-2:] == [eos, eos]
    assert render(SAMPLE, tokenizer, chat=False).ids == plain
    asking = Sample(id="two", prompt=TEXT, answers=(), max_new_tokens=4, question="colour?", answer_prefix=" It is")
    rendered = render(asking, tokenizer, chat=False)
    assert tokenizer.decode(rendered.ids[rendered.question_start :]) == "colour? It is"
    assert prompts.treatment(tokenizer, chat=False) == {"left_out": 2}
    assert prompts.raw_ids("", tokenizer) == [bos] and Template.of(tokenizer, "kvzip").bos == bos


@pytest.mark.parametrize(
    "template, expected",
    [
        (None, {}),
        ("{{ messages[0].content }}{{ date_string }}", {}),
        ("{{ 'text' }}{{ messages[0].content }}", {}),
        ("{{ messages[0].content }}{{ strftime_now('%Y') }}", {"day": "2024-07-26"}),
        (PARTS, {"parts": True}),
    ],
)
def test_a_run_is_named_by_what_its_template_would_see_otherwise(template, expected):
    assert prompts.treatment(with_template(template), chat=True) == expected
    assert prompts.treatment(with_template(template), chat=False) == {}


def test_an_answer_that_nobody_waited_for_is_no_later_ones(monkeypatch):
    worker = prompts.TemplateWorker()
    request = {"messages": [], "today": prompts.TODAY, "most": 9, "settings": {}}
    process = worker._running()

    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

    whole, process.stdout = process.stdout, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(worker, "close", lambda: setattr(worker, "_process", None))
        worker.ask(json.dumps({"template": "first", **request}))
    process.stdout = whole
    process.communicate()
    assert worker.ask(json.dumps({"template": "second", **request})) == {"text": "second"}
    monkeypatch.undo()
    worker.close()


def test_the_process_that_renders_ends_with_its_own():
    worker = prompts.TemplateWorker()
    request = {"template": "x", "messages": [], "today": prompts.TODAY, "most": 9, "settings": {}}
    assert worker.ask(json.dumps(request)) == {"text": "x"}
    process = worker._process
    assert process is not None
    worker.close()
    assert process.returncode == 0
