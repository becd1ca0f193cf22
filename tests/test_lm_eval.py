"""lm-eval's tasks with any method: the scores of lm-eval's own model, and what the results say of the method."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from kvbench.backends.hf.cache import KVCache
from kvbench.cli import lm_eval as command
from kvbench.cli.lm_eval import setup_config
from kvbench.cli.main import main
from kvbench.config import ASSETS, ConfigError
from kvbench.models import hub
from kvbench.runs import versions

TINY = str(ASSETS / "tiny")
PROSE = " ".join((ASSETS / "prose" / "1962-kennedy.txt").read_text().split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "qest"}, "method=qest: no such method; did you mean quest"),
        ({"method": "quest", "method.page_sze": 8}, "method.page_sze=8: no such key; did you mean page_size"),
        ({"method": "snapkv", "budget": 8}, "budget=8: below the minimum of snapkv"),
        ({"pretrained": "/none such"}, "model.path=/none such: no such folder"),
        ({"task": "niah"}, "lm-eval task=niah: here that is --tasks"),
        ({"protocol.chat": "on"}, "lm-eval protocol.chat=on: here that is --apply_chat_template"),
        ({"protocol.temperature": 1}, "lm-eval protocol.temperature=1: here that is nothing: answers are greedy"),
        ({"trust_remote_code": True}, "lm-eval trust_remote_code=true: expected keys of attention, budget, "),
    ],
)
def test_bad_settings_are_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        setup_config(settings)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_settings_are_keys_of_a_run_whatever_characters_a_folder_has(tmp_path: Path) -> None:
    folder = tmp_path / "it's a model, (v=1)"
    folder.symlink_to(TINY)
    settings = {"pretrained": str(folder), "method": "quest", "budget": 0.1, "protocol.dense_layers": [0]}
    config = setup_config({**settings, "protocol.accounting": "unified", "method.page_size": "8"})
    assert (config.model.path, config.budget, config.method.options["page_size"]) == (str(folder), 0.1, 8)
    assert (config.protocol.dense_layers, config.protocol.accounting) == ((0,), "unified")


def test_answers_are_kept_in_a_file_for_each_thing_that_generates() -> None:
    arms = (
        {"method": "full"},
        {"method": "quest"},
        {"method": "quest", "budget": 64},
        {"method": "quest", "kv": "int8"},
    )
    files = {command.cache_of("kept", setup_config(arm)) for arm in arms}
    assert len(files) == 4 and all(file.startswith("kept-") for file in files)
    assert command.cache_of("kept", setup_config({"method": "full", "threads": 1})) in files


def test_answers_of_other_code_are_kept_in_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = command.cache_of("kept", setup_config({"method": "quest"}))
    monkeypatch.setattr(versions, "HARNESS", versions.HARNESS + 1)
    assert command.cache_of("kept", setup_config({"method": "quest"})) != before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_answers_of_a_model_with_another_byte_are_kept_in_another_file(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(ASSETS / "tiny", tmp_path / "model")
    before = command.cache_of("kept", setup_config({"method": "full", "pretrained": str(folder)}))
    held = bytearray((folder / name).read_bytes())
    held[-1:] = bytes([held[-1] ^ 1]) if name == "model.safetensors" else held[-1:] + b"\n"
    (folder / name).write_bytes(held)
    assert command.cache_of("kept", setup_config({"method": "full", "pretrained": str(folder)})) != before


@pytest.mark.parametrize("word", ["--model_args", "--model=hf", "-a", "-M"])
def test_lm_evals_own_words_for_the_model_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^lm-eval {word.partition('=')[0]}: "):
        command.refuse_named_otherwise(["--tasks", "gsm8k", word, "budget=64"])


@pytest.mark.parametrize(
    "words",
    [["method=full", "method=quest"], ["method=full", "--method", "quest"], ["budget=64", "--budget=128"]],
)
def test_a_word_and_a_flag_that_say_otherwise_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "refuse_missing", lambda: None)
    assert main(["lm-eval", *words, "--tasks", "gsm8k"]) == 2
    assert "one key with two values" in capsys.readouterr().err


def test_without_lm_eval_a_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REQUIRED_PACKAGES", ("no_such_package",))
    assert main(["lm-eval", "--tasks", "gsm8k"]) == 2
    assert capsys.readouterr().err == "kvbench: lm-eval: needs no_such_package; pip install 'kvbench[lm-eval]'\n"


# -- with lm-eval ------------------------------------------------------------------------------------------------------

Asked = list[tuple[str, str]]


def asked() -> Asked:
    """Contexts of unlike lengths with two continuations each, unlike in length, too; and one without a context."""
    pairs = [(PROSE[at : at + length], PROSE[at + length :][:24]) for at, length in ((0, 400), (700, 333), (1300, 90))]
    return [(text, end) for text, after in pairs for end in (after, " the")] + [("", "We choose to go")]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    instance = pytest.importorskip("lm_eval.api.instance")
    return [instance.Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def model(batch_size: int, **settings: Any) -> Any:
    pytest.importorskip("lm_eval")
    from kvbench.cli.lm_eval_model import KVBenchLM

    return KVBenchLM(batch_size, "cpu", **{"pretrained": TINY, "dtype": "float32", **settings})


@pytest.mark.parametrize(
    ("error", "reach", "is_line"),
    [
        (ConnectionError("Couldn't reach 'gsm8k' on the Hub"), "HF_HUB_OFFLINE is set", True),
        (LocalEntryNotFoundError("nothing in the cache"), "huggingface.co does not answer", True),
        (ConnectionError("refused"), None, False),
        (IndexError("of a task"), "huggingface.co does not answer", False),
    ],
)
def test_what_lm_eval_cannot_fetch_without_a_network_is_a_line(
    error: Exception, reach: str | None, is_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(given: Any) -> None:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("task gsm8k") from cause

    line = SimpleNamespace(execute=execute, parse_args=lambda: SimpleNamespace(gen_kwargs=None))
    for name, values in {
        "lm_eval._cli": {"HarnessCLI": lambda: line},
        "lm_eval.api.registry": {"model_registry": {"kvbench"}},
        "lm_eval.utils": {"setup_logging": lambda: None},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(hub, "out_of_reach", lambda: reach)
    with pytest.raises(ConfigError if is_line else RuntimeError) as refused:
        command._hand_to_lm_eval({}, "cpu", [])
    if is_line:
        assert "\n" not in str(refused.value) and "gsm8k" in str(refused.value) and str(reach) in str(refused.value)


@pytest.fixture(scope="module")
def own() -> Any:
    """lm-eval's own model."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return huggingface.HFLM(TINY, device="cpu", dtype="float32", batch_size=2)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_full_attention_answers_as_lm_evals_own_model(own: Any, batch_size: int) -> None:
    ours = model(batch_size, method="full")
    scored, window = instances("loglikelihood", asked()), own.max_length
    for (expected, greedy), (found, is_greedy) in zip(
        own.loglikelihood(scored, disable_tqdm=True), ours.loglikelihood(scored, disable_tqdm=True), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-4) and is_greedy == greedy
    likely = PROSE[:300] + own.generate_until(instances("generate_until", [(PROSE[:300], {"max_gen_toks": 5})]))[0]
    assert ours.loglikelihood(instances("loglikelihood", [(PROSE[:300], likely[300:])]), disable_tqdm=True)[0][1]
    options = {"until": ["\n\n", " t"], "max_gen_toks": 12}
    told = instances("generate_until", [(text, options) for text, _ in asked()[:-1:2]])
    assert ours.generate_until(told, disable_tqdm=True) == own.generate_until(told, disable_tqdm=True)
    own._max_length = ours._max_length = 100  # a text of several windows, and contexts that lose their beginnings
    rolling = instances("loglikelihood_rolling", [(PROSE[:250],), (PROSE[:20],)])
    for kind, requests in (("loglikelihood_rolling", rolling), ("loglikelihood", scored)):
        expected, found = (getattr(lm, kind)(requests, disable_tqdm=True) for lm in (own, ours))
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-6)
    own._max_length = window


@pytest.mark.parametrize("method", ["quest", "snapkv"])
def test_every_scored_token_comes_through_the_method(own: Any, method: str) -> None:
    ours = model(2, method=method, budget=64)
    found = ours.loglikelihood(instances("loglikelihood", asked()[:4]), disable_tqdm=True)
    full = own.loglikelihood(instances("loglikelihood", asked()[:4]), disable_tqdm=True)
    for (context, continuation), (score, _), (dense, _) in zip(asked(), found, full, strict=False):
        before, after = ours._encode_pair(context, continuation)
        cache = KVCache(own.model, method, 64, dense_layers=ours.setup.dense_layers)
        with torch.inference_mode():
            own.model(torch.tensor([before[:-1]]), past_key_values=cache)
            expected = 0.0
            for token, following in zip([before[-1], *after[:-1]], after, strict=True):
                logits = own.model(torch.tensor([[token]]), past_key_values=cache).logits
                expected += float(logits[0, -1].log_softmax(-1)[following])
        assert score == pytest.approx(expected, abs=1e-4)
        assert abs(score - dense) > 1e-3  # the method is to be seen, in a continuation of one token, too
    audit = ours.get_model_info()["kvbench"]["audit"]["loglikelihood"]
    assert audit["budget"] == 64 and 0 < audit["attended_share"] < 4 and not audit["over_rule"]


TOLD = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.8},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"suppress_tokens": [32]},
        {"num_beams": 2},
        {"eos_token_id": 32},
        {"max_gen_toks": 0},
        {"made_up": 2},
    ],
)
def test_settings_that_would_change_a_greedy_text_are_refused_by_name(settings: dict[str, Any]) -> None:
    ours, (key, value) = model(1, method="full"), next(iter(settings.items()))
    texts = instances("generate_until", [("A text", TOLD), ("A text", TOLD | settings)])
    with pytest.raises(ConfigError) as refused:
        ours.generate_until(texts, disable_tqdm=True)
    assert str(refused.value).startswith(f"--gen_kwargs {key}={value}: ") and "\n" not in str(refused.value)


def test_a_length_that_is_no_number_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--gen_kwargs: .*'many'"):
        model(1, method="full").generate_until(instances("generate_until", [("A text", {"max_gen_toks": "many"})]))


def test_a_temperature_alone_asks_to_sample() -> None:
    with pytest.raises(ConfigError, match=r"--gen_kwargs temperature=0\.8: .*do_sample=False"):
        model(1, method="full").generate_until(instances("generate_until", [("A text", {"temperature": 0.8})]))


def test_settings_that_leave_a_greedy_text_as_it_is_are_taken(own: Any) -> None:
    ours, settings = model(1, method="full"), {"top_p": 0.5, "repetition_penalty": 1.0, "temperature": 0.7}
    texts = instances("generate_until", [("A text", TOLD | settings)])
    assert ours.generate_until(texts, disable_tqdm=True) == own.generate_until(texts, disable_tqdm=True)


def test_a_penalty_that_the_models_folder_ships_is_refused_until_it_is_turned_off(own: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model")
    shipped = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7, "max_length": 9, "chat_format": "x"}
    (folder / "generation_config.json").write_text(json.dumps(shipped))
    ours = model(1, method="full", pretrained=str(folder))
    with pytest.raises(ConfigError, match=r"^generation_config.* repetition_penalty=1\.3: .* repetition_penalty=1\.0 "):
        ours.generate_until(instances("generate_until", [("A text", TOLD)]), disable_tqdm=True)
    plain = instances("generate_until", [("A text", TOLD | {"repetition_penalty": 1.0})])
    assert ours.generate_until(plain, disable_tqdm=True) == own.generate_until(plain, disable_tqdm=True)
    scored = instances("loglikelihood", [("A text", " the")])
    expected, found = (lm.loglikelihood(scored, disable_tqdm=True) for lm in (own, ours))
    assert found[0][0] == pytest.approx(expected[0][0], abs=1e-4)


@pytest.mark.parametrize("pair", [("A text", ""), ("", "")])
def test_an_empty_continuation_is_refused(pair: tuple[str, str]) -> None:
    ours = model(1, method="full")
    with pytest.raises(ConfigError, match=f"loglikelihood: an empty continuation after '{pair[0]}'"):
        ours.loglikelihood(instances("loglikelihood", [("A text", " the"), pair]), disable_tqdm=True)


def test_batches_to_be_found_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch_size=auto: expected a whole number"):
        model("auto")  # type: ignore[arg-type]


# -- the command -------------------------------------------------------------------------------------------------------

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/data.json}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{context}}}}"
metadata: {{version: 1}}
"""
CHOICE = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT = """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a multiple-choice task and one of generation, and their data."""
    texts = [(PROSE[at : at + 300], [PROSE[at + 300 :][:20], " no", " yes, and"]) for at in (0, 500, 1500)]
    lines = [json.dumps({"context": text, "choices": choices, "answer": 0}) for text, choices in texts]
    (tmp_path / "data.json").write_text("\n".join(lines))
    for name, kind in {"kv_choice": CHOICE, "kv_text": TEXT}.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, folder=tmp_path) + kind)
    return tmp_path


@pytest.mark.slow
def test_the_commands_results_hold_scores_and_audit(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm_eval, its_tasks = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")
    quick = partial(its_tasks.TaskManager, include_defaults=False)  # its own tasks are thousands of files
    monkeypatch.setattr(its_tasks, "TaskManager", quick)
    lm_evals = ["--tasks", "kv_choice,kv_text", "--include_path", str(tasks), "--batch_size", "2", "--limit", "3"]
    found: dict[str, Any] = {}
    for method in ("full", "quest", "icecache"):
        ours = ["dtype=float32", "device=cpu", "--method", method, "--budget", "64", "--model-path", TINY]
        output = tasks / method
        assert main(["lm-eval", *ours, *lm_evals, "--output_path", str(output), "--log_samples"]) == 0
        found[method] = json.loads(next(output.rglob("results_*.json")).read_text())
        told = found[method]["config"]["kvbench"]
        assert told["method"]["name"] == method and told["audit"].keys() == {"generate_until", "loglikelihood"}
        for audit in told["audit"].values():
            assert audit["attended_mean"] > 0 and audit["device_kv_bytes"] > 0
            assert audit["attended_share"] is None if method == "full" else audit["attended_share"] > 0.1
    names, manager = ["kv_choice", "kv_text"], quick(include_path=str(tasks))
    settings = {"pretrained": TINY, "dtype": "float32"}
    own = lm_eval.simple_evaluate("hf", settings, names, device="cpu", limit=3, task_manager=manager)
    for task in names:
        for metric, value in own["results"][task].items():
            assert found["full"]["results"][task][metric] == value
    capsys.readouterr()
    assert main(["lm-eval", "--tasks", "kv_text", "--include_path", str(tasks), "--gen_kwargs", "made_up=2"]) == 2
    assert "kvbench: --gen_kwargs made_up=2" in capsys.readouterr().err.splitlines()[-1]
    assert main(["lm-eval", "--method", "full", "--tasks", "no_such_task"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "kvbench: lm-eval: Tasks not found: no_such_task; see lm_eval ls tasks, lm_eval run --help"
    )
