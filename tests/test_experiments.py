"""The experiments of conf/experiment: every job can run, large or under `smoke=true`, and covers what is published."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from driver import slow
from omegaconf import DictConfig, OmegaConf
from words import configs

from kvbench.cli import main as cli
from kvbench.cli import smoke as small
from kvbench.cli.checks import check
from kvbench.config import ConfigError, choices, conf_dir
from kvbench.models import hub
from kvbench.report.data import papers as published
from kvbench.tasks.sources import HubFile

NAMES = list(choices("experiment"))
PUBLISHED = [id for id in published.ids() if id in NAMES]

# What must be given by hand, and is nowhere to be fetched from.
GIVEN = {"icecache_table3": "task.exemplars"}
GIVEN |= dict.fromkeys(("icecache_longgenbench", "racc_table2", "racc_table3"), "task.data_dir")
IN_FOLDER = ["Dataset_short.json", "Dataset_long.json"]
IN_FOLDER += [
    f"{kind}/{file}" for kind in ("path_traversal", "tom_tracking") for file in (f"{kind}_8k.json", "prompts.yaml")
]

# To compose the jobs of one takes seconds: the quick tests meet one of each kind, of few jobs.
QUICK = ("claims_latency", "icecache_table1", "lychee_fig10", "pariskv_reasoning")


def each(names: Sequence[str]) -> list[Any]:
    """The names of experiments as parameters; what is not in `QUICK` is slow."""
    return [param for name in names for param in ([name] if name in QUICK else slow(name))]


each_experiment = pytest.mark.parametrize("name", each(NAMES))
plain_and_smoke = pytest.mark.parametrize("smoke", ["false", "true"])


@functools.cache
def composed(words: tuple[str, ...]) -> list[DictConfig]:
    return configs(*words)


def jobs(name: str, *words: str, smoke: str = "false") -> list[DictConfig]:
    """The jobs of an experiment, as the check sees them; composed once for all tests, large and small."""
    large = copy.deepcopy(composed((f"+experiment={name}", *words)))
    for job in large:
        job.smoke = smoke == "true"
    return [small.applied(job) for job in large]


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[DictConfig]]:
    """The jobs of an experiment, which is given what it needs."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "given").write_text("Question: 1 + 1\nLet's think step by step\nThe answer is 2\n")
    for file in map(folder.joinpath, IN_FOLDER):
        file.parent.mkdir(exist_ok=True)
        file.write_text("[]")

    def make(name: str, smoke: str) -> list[DictConfig]:
        given = folder if GIVEN.get(name) == "task.data_dir" else folder / "given"
        return jobs(name, *([f"{GIVEN[name]}={given}"] if name in GIVEN else []), smoke=smoke)

    return make


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], None]:
    """No model was ever fetched, and the hub may be asked for all; call it with why it is out of reach, or None."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.setattr(hub, "cached_folder", lambda hub_id: None)
    monkeypatch.setattr(HubFile, "cached", lambda file: None)
    return lambda reason: monkeypatch.setattr(hub, "out_of_reach", lambda: reason)


@each_experiment
@plain_and_smoke
def test_every_job_can_run_where_there_is_a_network(name: str, smoke: str, asked: Any, network: Any) -> None:
    network(None)
    for job in asked(name, smoke):
        if (
            "fetch" in job.model
            and hub.ModelConfig.of(job.model).source.path is not None
            and not Path(job.model.path).is_dir()
        ):
            with pytest.raises(ConfigError, match="kvbench fetch"):
                check(job)
            continue
        check(job)


@each_experiment
@plain_and_smoke
def test_without_a_network_a_job_runs_or_names_the_key_of_a_local_copy(
    name: str, smoke: str, asked: Any, network: Any
) -> None:
    network("nobody answers")
    for job in asked(name, smoke):
        path = hub.ModelConfig.of(job.model).source.path
        if "fetch" in job.model:
            continue  # of the package registry: test_fetch
        if path is not None and "/assets/" not in path:
            key = f"model.path={path}: "
        elif job.task.name in ("longbench", "longbench_v2", "gsm8k", "math500", "aime", "gpqa"):
            key = "task.data_dir: "
        else:
            check(job)
            continue
        with pytest.raises(ConfigError) as refused:
            check(job)
        assert str(refused.value).startswith(key) and "nobody answers" in str(refused.value)


@pytest.mark.parametrize("name", GIVEN)
def test_what_must_be_given_is_named(name: str, network: Any, capsys: Any) -> None:
    network(None)
    assert cli.main([f"+experiment={name}"]) == 2
    assert f"{GIVEN[name]}=null" in capsys.readouterr().err


@each_experiment
def test_smoke_changes_the_size_of_an_experiment_alone(name: str) -> None:
    for one, other in zip(jobs(name, smoke="true"), jobs(name), strict=True):
        assert (one.model.name, one.smoke) == ("tiny", True)
        assert one.task.limit <= 4 and max(one.task.get("lengths") or [0]) <= 2048
        for key in one:
            if key not in ("model", "task", "device", "dtype", "smoke"):
                assert one[key] == other[key], key
        sizes = {"limit", "lengths", "max_length", "max_new_tokens"}
        assert {key: value for key, value in one.task.items() if key not in sizes} == {
            key: value for key, value in other.task.items() if key not in sizes
        }


def test_every_published_table_that_kvbench_can_fill_has_an_experiment() -> None:
    frames = {id: published.table(id).frame for id in published.ids()}
    fillable = {id for id, frame in frames.items() if ((frame["metric"] != "") & frame["method"].notna()).any()}
    assert len(fillable) >= 8 and fillable <= set(NAMES)


@pytest.mark.parametrize("id", each(PUBLISHED))
def test_an_experiment_runs_the_methods_of_its_table(id: str) -> None:
    frame = published.table(id).frame
    assert set(frame["method"].dropna()) <= {job.method.name for job in jobs(id)}


@pytest.mark.parametrize("id", each([id for id in PUBLISHED if published.table(id).frame["metric"].any()]))
def test_an_experiment_makes_the_runs_that_stand_beside_published_cells_and_no_others(id: str) -> None:
    table, made = published.table(id), jobs(id)
    frame = table.frame.assign(model=table.stand_in) if table.stand_in else table.frame
    cells = frame[(frame["metric"] != "") & frame["method"].notna()]
    # A paper that does not say which Llama it took has rows of no model here; so has one whose model is not in conf.
    rows = {(row.model, row.method, row.budget, row.task) for row in cells.itertuples()}
    arms = {(job.model.name, job.method.name, job.budget, job.task.name) for job in made}
    if any(model for model, *_ in rows):
        rows = {row for row in rows if row[0]}
    else:
        arms = {(None, *arm[1:]) for arm in arms}
    assert arms == rows | BESIDE.get(id, set())
    asked = [[word.partition("=")[::2] for word in words] for words in set(cells["settings"])]
    met = [[all(chosen(job, key) == yaml.safe_load(value) for key, value in one) for one in asked] for job in made]
    assert all(map(any, met)) and all(map(any, zip(*met, strict=True))), (
        "every job is of some cell, every cell has its jobs"
    )
    groups = {group.partition("/")[0] for cell in cells["group"] if cell for group in cell.split(" + ")}
    for job in made:
        assert groups == set(job.task.subsets) if job.task.get("subsets") else True


def chosen(job: DictConfig, key: str) -> Any:
    """The value of a job's key; of a group, the name of its file."""
    found = OmegaConf.select(job, key)
    return found.name if isinstance(found, DictConfig) else found


# Arms of another table of the paper, beside which this one is read.
BESIDE = {
    "icecache_table5": {
        ("llama3.1-8b-instruct", "full", None, "longbench"),
        ("llama3.1-8b-instruct", "icecache", 256, "longbench"),
    }
}


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_a_few_lines_that_say_what_it_is(name: str) -> None:
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# about: ") and len(text.splitlines()) <= 40


@pytest.mark.parametrize("name", ["reference_texts", "reference_tasks"])
def test_the_reference_has_every_method(name: str) -> None:
    text = yaml.safe_load((conf_dir() / "experiment" / f"{name}.yaml").read_text())
    arms = text["hydra"]["sweeper"]["arms"]
    assert sorted(",".join(arm["method"] for arm in arms).split(",")) == sorted([*choices("method")])
