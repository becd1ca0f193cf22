"""`smoke=true`: what it makes of a config, and that every way to start a run takes it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from driver import slow
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from kvbench.cli import main as cli
from kvbench.cli.checks import read_config
from kvbench.cli.compose import composed
from kvbench.cli.smoke import applied
from kvbench.config import ConfigError, choices, conf_dir
from kvbench.models import hub
from kvbench.runs.run import identity, prepare


def config(*words: str) -> DictConfig:
    """Composed and neither checked nor made small."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", list(words))


PLAIN = config("task=niah")


@given(
    lengths=st.lists(st.integers(1, 300_000), min_size=1, unique=True),
    limit=st.none() | st.integers(1, 10_000),
    smoke=st.booleans(),
)
@pytest.mark.slow
def test_a_small_config_is_no_larger_and_no_config_grows(lengths: list[int], limit: int | None, smoke: bool) -> None:
    given = copy.deepcopy(PLAIN)
    given.task.lengths, given.task.limit, given.smoke = lengths, limit, smoke
    before = copy.deepcopy(given)
    small = applied(given)
    assert given == before, "the given one stays"
    assert applied(small) == small, "made small twice is made small"
    if not smoke:
        assert small == given
        return
    made = list(small.task.lengths)
    assert len(made) == len(set(made)) == min(2, len(lengths)) and max(made) <= 2048
    assert all(length <= other for length, other in zip(made, sorted(lengths, reverse=True), strict=False))
    assert small.task.limit == min(limit or 4, 4)


MODELS = list(choices("model"))


@pytest.mark.parametrize("model", [*MODELS[::4], *slow(*(name for at, name in enumerate(MODELS) if at % 4))])
def test_every_model_becomes_the_one_that_kvbench_ships(model: str) -> None:
    small = applied(config(f"model={model}", "device=cuda:1", "dtype=bfloat16", "model.weights=dummy", "smoke=true"))
    assert small.model == config("model=tiny").model
    assert (small.device, small.dtype) == ("auto", "auto")
    assert hub.ModelConfig.of(small.model).source.folder, "it lies on this machine"


def test_texts_are_cut_and_ready_made_samples_stay(tmp_path: Path) -> None:
    assert applied(config("task=longbench", "smoke=true")).task.max_length == 2048
    assert applied(config("task=longbench", "task.max_length=1000", "smoke=true")).task.max_length == 1000
    stored = applied(config("task=ruler", f"task.data_dir={tmp_path}", "task.lengths=[4096]", "smoke=true"))
    assert stored.task.lengths == [4096]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smoke=yes please"], "smoke=yes please: expected true | false"),
        (["smoke=1"], "smoke=1: expected true | false"),
        (["smoke=true", "task.limit=0"], "task.limit=0: expected"),
        (["smoke=true", "task.limit=few"], "task.limit=few: expected"),
        (["smoke=true", "task.lengths=[1024,long]"], r"task.lengths=\[1024,long\]: expected"),
        (["smoke=true", "task.lengths=1024"], "task.lengths=1024: expected"),
        (["smoke=true", "task.unit=lines"], "task.unit=lines: expected"),
    ],
)
def test_smoke_hides_no_bad_input(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}".replace("|", r"\|")):
        composed(*words)


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What run.yaml of each run says, of a command line in this process."""
    assert cli.main([f"results_dir={folder}", "smoke=true", *words]) == 0
    return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("runs/*/*/*/*/run.yaml"))]


LARGE = ["model=qwen3-8b", "method=streaming_llm", "task.lengths=[32768]"]


def test_a_single_run_is_made_small_and_says_so(tmp_path: Path) -> None:
    (told,) = run(tmp_path, *LARGE, "task.limit=1")
    (path,) = tmp_path.glob("runs/*/*/*/*")
    assert path.parts[-3:-1] == ("tiny", "streaming_llm-256"), "apart from those of the large model"
    assert told["config"]["smoke"] is True and told["config"]["model"]["name"] == "tiny"
    assert json.loads((path / "samples.jsonl").read_text())["prompt_tokens"] <= 2048


@pytest.mark.slow
def test_models_of_a_sweep_are_one_run(tmp_path: Path, capsys: Any) -> None:
    words = ["model=qwen3-8b,llama3.1-8b-instruct", "task.lengths=[4096],[8192]", "task.limit=1"]
    (told,) = run(tmp_path, "-m", *LARGE[1:2], *words)
    capsys.readouterr()
    run(tmp_path, "-m", "method=topk,streaming_llm", *words)
    table = capsys.readouterr().out
    assert "method=topk" in table and "qwen3" not in table, (
        "arms are told apart, and no model that did not run is named"
    )
    assert told["config"]["task"]["lengths"] == [2048]


def test_scripts_and_notebooks_get_the_small_config_too() -> None:
    assert composed("smoke=true", *LARGE).model.name == "tiny"


def test_a_small_run_is_the_run_of_the_same_settings() -> None:
    """It is told in run.yaml, and no number depends on it."""
    small = applied(config("smoke=true", *LARGE))
    same = config("model=tiny", "method=streaming_llm", "task.lengths=[2048]")
    one, other = (identity(prepare(read_config(made))) for made in (small, same))
    assert one == other
