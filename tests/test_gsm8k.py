"""Claims about GSM8K: the published prompts, extraction with every known trap, and gold answers that are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import yaml

from kvbench.config import ConfigError, TargetConfig, shipped
from kvbench.tasks import Sample
from kvbench.tasks.gsm8k import NEW_TOKENS, Gsm8k
from kvbench.tasks.sources import HubFile

REAL = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
FORMAL = REAL / "gsm8k_prompt_formal.txt"
real_data = pytest.mark.skipif(not REAL.is_dir(), reason="the real problems are not beside this checkout")

PROBLEMS = [
    {"question": f"How many are {n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(40)
]
EXAMPLES = "Question: One and one?\nLet's think step by step\n1 + 1 = 2\nThe answer is 2"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with forty problems in test.jsonl and a file of worked examples."""
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)) + "\n")
    (tmp_path / "examples.txt").write_text(EXAMPLES)
    return tmp_path


def task(variant: str, folder: Path) -> Gsm8k:
    """A variant over a folder of problems."""
    examples = FORMAL if folder == REAL else folder / "examples.txt"
    return Gsm8k(variant, exemplars=str(examples) if variant == "pqcache" else None, data_dir=str(folder))


def asked(gold: str) -> Sample:
    return Sample(id="x", prompt="", answers=(gold,), max_new_tokens=NEW_TOKENS)


def wei8(output: str, gold: str = "42") -> tuple[float, float]:
    """(flexible, strict)"""
    scores = Gsm8k("wei8").score(asked(gold), output)
    return scores["flexible"], scores["strict"]


def pqcache(output: str, gold: str = "42") -> float:
    return Gsm8k("pqcache", exemplars="not read").score(asked(gold), output)["accuracy"]


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_wei8_is_eight_examples_joined_by_blank_lines_and_ends_in_the_answer_s_beginning(data_dir):
    sample = next(task("wei8", data_dir).samples(None, seed=0))
    *examples, question = sample.prompt.split("\n\n")
    assert len(examples) == 8
    assert all(re.fullmatch(r"Q: .+\nA: .+ The answer is \d+\.", example) for example in examples)
    assert re.fullmatch(r"Q: How many are (\d+) and \1\?\nA:", question)
    assert sample.question == question and sample.prompt.endswith(sample.question)
    assert sample.stop == ("Q:", "</s>", "<|im_end|>")


@real_data
def test_wei8_prompts_are_lm_eval_s():
    """Rendered here from lm-eval's own file: first eight examples, two newlines between, a space before a target."""
    config = yaml.safe_load((REAL / "gsm8k-cot.yaml").read_text())

    def text(question: str) -> str:
        return config["doc_to_text"].replace("{{question}}", question)

    examples = [f"{text(one['question'])} {one['target']}" for one in config["fewshot_config"]["samples"]]
    problems = [json.loads(line) for line in (REAL / "test.jsonl").read_text().splitlines()]
    expected = {f"gsm8k-{row}": "\n\n".join([*examples, text(one["question"])]) for row, one in enumerate(problems)}
    found = {sample.id: sample for sample in task("wei8", REAL).samples(None, seed=0)}
    assert {key: sample.prompt for key, sample in found.items()} == expected
    assert next(iter(found.values())).stop == tuple(config["generation_kwargs"]["until"])


def test_pqcache_is_the_file_then_the_question_and_a_newline(data_dir):
    sample = next(task("pqcache", data_dir).samples(None, seed=0))
    assert sample.prompt == f"{EXAMPLES}\n{sample.question}"
    assert re.fullmatch(r"Question: How many are (\d+) and \1\?\n", sample.question)
    assert sample.stop == ("\nQuestion: ",)


@real_data
def test_pqcache_s_published_file_holds_ten_examples():
    prompts = [sample.prompt for sample in task("pqcache", REAL).samples(None, seed=0)]
    assert len(prompts) == 1319
    assert {prompt.count("Question: ") for prompt in prompts} == {11}
    assert all(prompt.startswith(FORMAL.read_text(encoding="utf-8") + "\nQuestion: ") for prompt in prompts)


@pytest.mark.parametrize("variant", ["wei8", "pqcache"])
def test_prompts_are_raw_and_get_256_new_tokens(variant, data_dir):
    for sample in task(variant, data_dir).samples(None, seed=0):
        assert not sample.chat and not sample.truncate and sample.max_new_tokens == 256
        assert sample.prompt.endswith(sample.question)


# ---------------------------------------------------------------------------------------------------------------------
# Order


def test_the_seed_shuffles_and_ids_stay_with_their_problems(data_dir):
    gsm8k = task("wei8", data_dir)
    first, again, other = (list(gsm8k.samples(None, seed)) for seed in (0, 0, 1))
    assert first == again
    assert [sample.id for sample in first] != [sample.id for sample in other]
    assert {sample.id: sample for sample in first} == {sample.id: sample for sample in other}
    assert [sample.id for sample in first] != [f"gsm8k-{row}" for row in range(40)]
    assert len(gsm8k) == 40 == len({sample.id for sample in first})


def test_every_prefix_is_a_fair_sample(data_dir):
    """The mean row of the first ten of forty, over 200 seeds: 19.5, with a standard error of 0.22; four of them."""
    gsm8k = task("wei8", data_dir)
    rows = [
        int(sample.id.removeprefix("gsm8k-")) for seed in range(200) for sample in islice(gsm8k.samples(None, seed), 10)
    ]
    assert abs(sum(rows) / len(rows) - 19.5) < 0.9


# ---------------------------------------------------------------------------------------------------------------------
# Scores


@pytest.mark.parametrize(
    "output, flexible, strict",
    [
        (" 6 x 7 = 42. The answer is 42.", 1, 1),
        (" The answer is 42.\n\nQ: What are 4 and 4?\nA: The answer is 8.", 1, 1),
        (" The answer is 42.</s> The answer is 8.", 1, 1),
        (" The answer is 42.<|im_end|> The answer is 8.", 1, 1),
        (" The answer is 42. Then the other is 43.", 0, 1),
        (" The answer is 42. The answer is 43.", 0, 1),
        (" The answer is $42.", 1, 0),
        (" So it is 42 dollars.", 1, 0),
        (" The answer is 42.00.", 0, 0),
        (" The answer is 42...", 0, 0),
        (" The answer is -42.", 0, 0),
        (" The answer is 43.", 0, 0),
        (" Q: 42", 0, 0),
        (" none", 0, 0),
        ("", 0, 0),
    ],
)
def test_wei8_reads_outputs_as_lm_eval_does(output, flexible, strict):
    assert wei8(output) == (flexible, strict)


def test_strict_loses_the_last_digit_of_an_output_that_ends_behind_it():
    """lm-eval's pattern wants one character more; this is why flexible is the main score."""
    assert wei8(" The answer is 42") == (1, 0)
    assert wei8(" The answer is 42", gold="4") == (0, 1)
    assert wei8(" The answer is 42\n\nQ: next") == (1, 0)
    assert wei8(" The answer is 4", gold="4") == (1, 0)
    assert Gsm8k("wei8").metric == "flexible"


@pytest.mark.parametrize(
    "output, gold, right",
    [
        (" The answer is 1,450,000.", "1450000", True),
        (" The answer is 1450000.", "1,450,000", True),
        (" The answer is -10.", "-10", True),
        (" The answer is 10.", "-10", False),
        (" The answer is 0.5.", "0.5", True),
    ],
)
def test_signs_commas_and_decimals_of_wei8(output, gold, right):
    assert wei8(output, gold) == (right, right)


@pytest.mark.parametrize(
    "output, gold, right",
    [
        ("6 x 7 = 42\nThe answer is 42", "42", True),
        ("The answer is 42\n\nQuestion: What are 4 and 4?\nThe answer is 8", "42", True),
        ("The answer is 42. Question: 8", "42", False),
        ("The answer is 42.", "42", True),
        ("The answer is 42.00", "42", True),
        ("The answer is $42.", "42", True),
        ("The answer is 1,450,000", "1450000", True),
        ("The answer is 1450000", "1,450,000", True),
        ("The answer is .5", "0.5", True),
        ("The answer is -10", "-10", True),
        ("The answer is -$10", "-10", True),
        ("The answer is $-10", "-10", True),
        ("The answer is (-10)", "-10", True),
        ("The answer is 10", "-10", False),
        ("The answer is -10", "10", False),
        ("52-42", "42", True),
        ("x-42", "42", True),
        ("50 - 8 = 42", "42", True),
        ("The answer is 42 or 43", "42", False),
        ("none", "42", False),
        ("", "42", False),
    ],
)
def test_pqcache_compares_the_last_numbers_sign_included(output, gold, right):
    assert pqcache(output, gold) == right


@real_data
@pytest.mark.parametrize("variant", ["wei8", "pqcache"])
def test_gold_answers_of_all_1319_problems_are_right(variant):
    gsm8k = task(variant, REAL)
    solutions = [json.loads(line)["answer"] for line in (REAL / "test.jsonl").read_text().splitlines()]
    samples = sorted(gsm8k.samples(None, seed=0), key=lambda sample: int(sample.id.removeprefix("gsm8k-")))
    assert len(samples) == len(solutions) == 1319
    for sample, solution in zip(samples, solutions, strict=True):
        assert not sample.error
        assert set(gsm8k.score(sample, f" The answer is {sample.answers[0]}.").values()) == {1.0}
        assert gsm8k.score(sample, solution)[gsm8k.metric] == 1.0
        assert gsm8k.score(sample, f" The answer is {sample.answers[0]}7.")[gsm8k.metric] == 0.0


@real_data
def test_two_gold_answers_are_negative_and_fourteen_have_commas():
    golds = [sample.answers[0] for sample in task("wei8", REAL).samples(None, seed=0)]
    assert sum(gold.startswith("-") for gold in golds) == 2
    assert sum("," in gold for gold in golds) == 14


def test_scoring_needs_neither_data_nor_examples_nor_torch():
    code = (
        "import sys; from kvbench.tasks import Sample; from kvbench.tasks.gsm8k import Gsm8k\n"
        "sample = Sample('x', '', ('42',), 256)\n"
        "assert Gsm8k('pqcache', exemplars='nowhere').score(sample, 'It is 42.') == {'accuracy': 1.0}\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_the_hub_s_parquet_gives_the_same_samples_as_the_json_lines(data_dir, monkeypatch):
    pandas = pytest.importorskip("pandas")
    parquet = data_dir / "test-00000-of-00001.parquet"
    odd = [*PROBLEMS, {"question": 'Größe\u2028 of "5"\n\\?', "answer": "5\r\n#### 5"}]
    pandas.DataFrame(odd).to_parquet(parquet)
    (data_dir / "test.jsonl").write_text("\n".join(json.dumps(one, ensure_ascii=False) for one in odd))
    monkeypatch.setattr(HubFile, "path", lambda self: parquet)
    assert list(Gsm8k().samples(None, seed=3)) == list(task("wei8", data_dir).samples(None, seed=3))


def test_a_download_that_is_no_parquet_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "test.parquet").write_bytes(b"<html>")
    monkeypatch.setattr(HubFile, "path", lambda self: tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="test.parquet: not a parquet file"):
        len(Gsm8k())


def test_sources_are_the_problems_and_the_examples(data_dir):
    (hub,) = Gsm8k().sources
    assert hub.label == "openai/gsm8k/main/test-00000-of-00001.parquet"
    assert [source.path().name for source in task("pqcache", data_dir).sources] == ["test.jsonl", "examples.txt"]


def test_a_bad_line_fails_its_own_sample_and_no_other(data_dir):
    lines = (data_dir / "test.jsonl").read_text().splitlines()
    lines[3] = "{"
    lines[5] = json.dumps({"question": "How many?"})
    lines[7] = json.dumps({"question": "How many?", "answer": "12"})
    lines[9] = json.dumps({"question": "How many?", "answer": "#### 8 apples"})
    (data_dir / "test.jsonl").write_text("\n".join(lines))
    samples = {sample.id: sample for sample in task("wei8", data_dir).samples(None, seed=0)}
    errors = {key: sample.error for key, sample in samples.items() if sample.error}
    assert len(samples) == 40 and set(errors) == {"gsm8k-3", "gsm8k-5", "gsm8k-7", "gsm8k-9"}
    assert errors["gsm8k-3"].startswith("test.jsonl, line 4: not JSON")
    assert errors["gsm8k-5"] == "test.jsonl, line 6: field answer: missing"
    assert errors["gsm8k-7"] == errors["gsm8k-9"].replace("10", "8")
    assert errors["gsm8k-7"] == 'test.jsonl, line 8: field answer: no number after "####"'


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda folder: (folder / "examples.txt").write_bytes(b"Question: \xff"), "task.exemplars.* not a text file"),
        (lambda folder: (folder / "examples.txt").write_text("Q: no"), "task.exemplars.* expected worked examples"),
        (lambda folder: (folder / "examples.txt").unlink(), "task.exemplars.* no such file"),
        (lambda folder: (folder / "test.jsonl").write_text("\n"), "task.data_dir.* nothing in it"),
        (lambda folder: (folder / "test.jsonl").unlink(), "task.data_dir.* no such file"),
    ],
)
def test_a_file_that_is_no_use_is_named_with_its_key(break_it, message, data_dir):
    break_it(data_dir)
    with pytest.raises(ValueError, match=message):
        list(task("pqcache", data_dir).samples(None, seed=0))


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    "options, message",
    [
        ({"variant": "wei9"}, "task.variant=wei9: one of wei8, pqcache"),
        ({"variant": "pqcache"}, "task.exemplars=null: task.variant=pqcache needs the file"),
        ({"exemplars": "x.txt"}, "task.exemplars=x.txt: task.variant=wei8 brings its own"),
    ],
)
def test_a_bad_option_names_its_key(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Gsm8k(**options)


def test_the_conf_builds_the_task_and_passes_every_option_on(data_dir):
    config = shipped("task", "gsm8k")
    assert config is not None and config["valid"] == {"variant": ["wei8", "pqcache"]}
    assert TargetConfig.of(config).build().variant == "wei8"
    own = {"variant": "pqcache", "exemplars": str(data_dir / "examples.txt"), "data_dir": str(data_dir)}
    assert len(list(TargetConfig.of({**config, **own}).build().samples(None, seed=0))) == 40
    with pytest.raises(ConfigError, match="gsm8k: task.exemplars=null"):
        TargetConfig.of({**config, "variant": "pqcache"}).build()
