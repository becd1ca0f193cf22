"""A task whose samples come from a file, run as a user's own: order, bad lines, stops, truncation, identity."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.cli.checks import check, read_config
from kvbench.config import ConfigError, conf_dir
from kvbench.engine.batch import Sequence as Decoded
from kvbench.engine.request import Stops
from kvbench.measure.job import stops
from kvbench.runs import sweep as runs
from kvbench.tasks import Sample, Task
from kvbench.tasks.sources import LocalFile, read_jsonl


class Lines(Task):
    """A sample for every line of a JSONL file."""

    name = "lines"
    metric = "exact"
    stored = True

    def __init__(self, file: str, **fields: Any) -> None:
        self.sources = (LocalFile(Path(file), "task.file"),)
        self.fields = fields

    def __len__(self) -> int:
        return len(list(self.rows()))

    def rows(self) -> Iterator[Any]:
        with open(self.sources[0].path(), "rb") as lines:
            yield from read_jsonl(self.sources[0].label, lines, {"prompt": str})

    def samples(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Sample]:
        for row in self.rows():
            fields = {"max_new_tokens": 4, **self.fields, "error": row.error}
            yield Sample(
                str(row.line), "" if row.error else row.data["prompt"], ("yes",), group=f"g{row.line % 2}", **fields
            )

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {self.metric: float(sample.answers[0] == output)}


def run(config: DictConfig) -> dict[str, Any]:
    return runs.run(read_config(config))


PROMPTS = ["short one. " * 3, "the longest one. " * 40, "a middle one. " * 10]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def configured(tmp_path: Path, file: Path) -> Any:
    def make(*overrides: str, **options: Any) -> DictConfig:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = compose("config", ["model=dummy-tiny", "budget=64", f"results_dir={tmp_path / 'out'}", *overrides])
        OmegaConf.set_struct(config, False)
        config.task = {"name": "lines", "about": "", "_target_": f"{__name__}.Lines", "file": str(file), **options}
        return config

    return make


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The lengths of the prompts that were decoded, by sample; each says "yes"."""
    asked: dict[str, Any] = {}

    def decode(sequence: Decoded) -> Decoded:
        asked[sequence.engine.method.context.samples[0]] = sequence.engine.lengths[0]
        sequence.generated[0][:] = byte_tokenizer()("yes", add_special_tokens=False)["input_ids"]
        return sequence

    monkeypatch.setattr(Decoded, "decode", decode)
    return asked


def records(tmp_path: Path) -> dict[str, Any]:
    (path,) = tmp_path.glob("out/runs/**/samples.jsonl")
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_the_longest_sample_runs_first_and_a_limit_takes_the_tasks_own_first(configured, answers, tmp_path):
    run(configured(limit=2))
    assert list(answers) == ["2", "1"]
    answers.clear()
    run(configured())
    assert list(answers) == ["3"], "the rest, once"


def test_a_bad_line_fails_its_sample_alone_and_runs_when_it_is_mended(configured, answers, tmp_path, file, capsys):
    good = file.read_text()
    file.write_text(good + '{"prompt": 3}\n')
    summary = run(configured())
    assert (summary["n"], summary["failed"], summary["score"], summary["score_ok"]) == (4, 1, 75.0, 100.0)
    assert summary["groups"]["g0"] == {"score": 50.0, "stderr": 50.0, "n": 2, "failed": 1}
    assert records(tmp_path)["4"]["error"].startswith("lines.jsonl, line 4: field prompt: ")
    told = " ".join(capsys.readouterr().out.split())
    assert "line 4: field prompt" in told and "1 failed" in told and "mean of 2 groups" in told


def test_the_files_content_is_part_of_the_identity(configured, answers, tmp_path, file):
    run(configured())
    file.write_text(file.read_text().replace("short", "small"))
    run(configured())
    assert len(list(tmp_path.glob("out/runs/**/run.yaml"))) == 2


def test_the_same_file_elsewhere_is_the_same_run(configured, answers, tmp_path, file):
    run(configured())
    elsewhere = tmp_path / "copy" / file.name
    elsewhere.parent.mkdir()
    shutil.copy(file, elsewhere)
    config = configured()
    config.task.file = str(elsewhere)
    answers.clear()
    run(config)
    assert not answers and len(list(tmp_path.glob("out/runs/**/run.yaml"))) == 1


def test_records_hold_what_scoring_needs(configured, answers, tmp_path):
    run(configured())
    for key, record in records(tmp_path).items():
        assert record["answers"] == ["yes"] and record["output"] == "yes" and record["scores"] == {"exact": 1.0}
        assert record["chat"] is False and record["cut_tokens"] == 0 and key in "123"


def test_a_prompt_over_the_window_is_cut_where_the_task_says_so(configured, answers, tmp_path, capsys):
    config = configured(truncate=True)
    config.model.config.max_position_embeddings = 300
    summary = run(config)
    cut = records(tmp_path)["2"]["cut_tokens"]
    read = sum(record["prompt_tokens"] for record in records(tmp_path).values())
    assert (summary["cut_samples"], summary["cut_share"]) == (1, cut / (cut + read))
    told = " ".join(capsys.readouterr().out.split())
    assert f"1 of 3 samples, by {100 * cut / (cut + read):.0f} % of all tokens" in told
    assert answers["2"] + 4 <= 300 and answers["3"] == len(PROMPTS[2]) + 1
    assert cut > 300
    config = configured()
    config.model.config.max_position_embeddings = 300
    with pytest.raises(ConfigError, match="^task: 2 takes 681 tokens .*300 of dummy-tiny"):
        run(config)


def test_a_benchmark_that_asks_for_a_template_is_told_once_that_there_is_none(configured, answers, capsys):
    run(configured(chat=True))
    assert " ".join(capsys.readouterr().out.split()).count("has no chat template") == 1
    run(configured("protocol.chat=off", chat=True))
    assert "chat template" not in capsys.readouterr().out


def test_data_that_is_not_there_is_refused_before_the_model_loads(configured, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.backends.hf.loading.load", lambda *a: pytest.fail("the model was loaded"))
    config = configured()
    config.task.file = str(tmp_path / "none.jsonl")
    config.task.limit = None
    for start in (check, run):
        with pytest.raises(ConfigError, match=r"task\.file: .*none\.jsonl: no such file"):
            start(config)


def test_the_last_token_of_a_text_ends_the_output_but_does_not_begin_it(dummies):
    loaded = dummies("dummy-tiny")
    found = stops(loaded, Sample("one", "", ("",), 4, end_token="a\n"))
    assert found.stop_ids == {*loaded.stop_ids, ord("\n")} == found.not_first
    assert stops(loaded, Sample("one", "", ("",), 4)) == Stops(set(loaded.stop_ids))


@pytest.mark.parametrize(
    "output, ended", [("The Q", False), ("The Q:", True), ("</s", False), ("x" * 99 + "</s>", True)]
)
def test_a_stop_text_ends_the_output_once_it_is_whole(dummies, output, ended):
    loaded = dummies("dummy-tiny")
    ends = stops(loaded, Sample("one", "", ("",), 4, stop=("Q:", "</s>"))).ends
    assert ends(loaded.tokenizer(output, add_special_tokens=False)["input_ids"]) is ended


def test_run_yaml_names_the_tasks_notes(configured, answers, tmp_path, monkeypatch):
    monkeypatch.setattr(Lines, "notes", {"code_sim": "one 1.0"}, raising=False)
    run(configured())
    (path,) = tmp_path.glob("out/runs/**/run.yaml")
    assert yaml.safe_load(path.read_text())["identity"]["notes"] == {"code_sim": "one 1.0"}
