"""The demo on a random model and small tasks: its table, its picture, its resume, and what it refuses."""

from __future__ import annotations

import json

import pytest
from matplotlib import image
from rich.console import Console

from kvbench import demo


@pytest.fixture
def sizes(monkeypatch):
    """Two arms, two lengths, two samples a cell."""
    monkeypatch.setattr(demo, "ARMS", (("full", None), ("quest", 64)))
    monkeypatch.setattr(demo, "LENGTHS", (1000, 1200))
    monkeypatch.setattr(demo, "TASKS", {"passkey": ["task.positions=2"], "niah": [demo.NEEDLES, "task.samples=2"]})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Where all tests of this file have their results: what one has computed the next reads."""
    return tmp_path_factory.mktemp("demo") / "results"


@pytest.fixture
def small(sizes, results):
    """The words of a small demo."""
    return ["model=dummy-tiny", f"results_dir={results}"]


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


@pytest.mark.slow
def test_a_row_holds_what_the_runs_found(small):
    full, quest = demo.demo(small, Console(quiet=True))
    assert (full.method, full.budget, quest.method, quest.budget) == ("full", None, "quest", 64)
    assert full.recall is None and 0 < quest.recall < 1
    assert set(quest.cells) == {f"{task} {length}" for task in ("passkey", "niah") for length in (1000, 1200)}
    assert full.attended > quest.attended > 0 and full.step_ms > 0 and quest.kv_bytes > 0


@pytest.mark.slow
def test_a_second_start_runs_nothing_again(small, monkeypatch):
    rows = demo.demo(small, Console(quiet=True))
    monkeypatch.setattr("kvbench.runs.shared.measure", lambda *a: pytest.fail("generated again"))
    assert demo.demo(small, Console(quiet=True)) == rows


@pytest.mark.parametrize(
    "word, said",
    [("budget=32", "budget=32: the demo sets "), ("threads=none", "threads"), ("no_such=1", "no_such"), ("x", "x")],
)
def test_bad_input_is_one_line(small, capsys, word, said):
    assert demo.main([*small, word]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("kvbench: ") and said in told[0]


def test_the_demo_has_at_most_eight_arms_and_twenty_samples_a_cell():
    assert len(demo.ARMS) <= 8 and demo.LENGTHS == (2048, 4096)


def test_the_table_shows_scores_and_costs(capsys):
    cells = {"passkey 2048": (100.0, 0.0), "niah 2048": (97.5, 2.5)}
    costs = {"kv_bytes": 3 * 2**19, "moved_bytes": 2048.0, "step_ms": 4.26}
    full = demo.Row("full", None, cells, 98.75, 2900.0, **costs, recall=None)
    quest = demo.Row("quest", 64, cells, 98.75, 96.0, **costs, recall=0.5)
    Console(width=140).print(demo.table([full, quest]))
    told = [line.strip("│┃") for line in capsys.readouterr().out.splitlines() if line[0] in "│┃"]
    head, *lines = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in told]
    assert head == ["method", "C", *cells, "attended/C", "KV MiB", "moved KiB/step", "ms/token", "recall"]
    assert lines == [
        ["full", "-", "100 ± 0", "98 ± 2", "-", "1.50", "2.0", "4.3", "-"],
        ["quest", "64", "100 ± 0", "98 ± 2", "1.50", "1.50", "2.0", "4.3", "0.50"],
    ]
