"""Runs that differ in their seed alone: one row and one point, of all their samples, with what the seeds differ by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import csv_lines as lines
from report_runs import record, stored

from kvbench.cli.report import main as report
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.stats import estimate, mean_score
from kvbench.report.figures import all as figures


def drawn(seed: int, scores: list[float], **more: Any) -> list[dict[str, Any]]:
    """Samples made from a seed: their answers are their own."""
    return [record(f"s-{number}", "", one, answers=[f"{seed}-{number}"], **more) for number, one in enumerate(scores)]


def of_seeds(folder: Path, method: str, scores: dict[int, list[float]], **identity: Any) -> None:
    budget = None if method == "full" else 64
    for seed, own in scores.items():
        stored(folder, method, budget, drawn(seed, own), config={"seed": seed}, **identity)


def one(runs: Runs, method: str) -> Run:
    """The one run of a method over seeds."""
    (run,) = (run for run in over_seeds(runs, runs)[1] if run.arm["method"] == method)
    return run


QUEST = {0: [1.0, 1.0, 1.0, 1.0], 1: [1.0, 0.0, 0.0, 0.0], 10: [1.0, 1.0, 0.0, 0.0]}


def test_seeds_are_one_row_that_says_how_many_and_how_far_apart(tmp_path, capsys) -> None:
    of_seeds(tmp_path, "quest", QUEST)
    expected = mean_score([np.repeat([100.0, 0.0], [7, 5])])
    for words in ([], ["--rows", "method"], ["--rows", "method", "--columns", "task"]):
        (line,) = lines(capsys, tmp_path, *words)
        numbers = {name: float(line[name]) for name in ("score", "score_low", "score_high", "samples")}
        assert numbers == pytest.approx(
            {"score": 700 / 12, "score_low": expected.low, "score_high": expected.high, "samples": 12}
        )
        assert [float(line[name]) for name in ("seeds", "seeds_low", "seeds_high")] == [3, 25, 100]
        assert len({Path(run).name for run in line["run"].split("; ")}) == 3
    for style in ("console", "markdown", "latex", "html"):
        assert report([str(tmp_path), "--format", style]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "3: 25.0 to 100.0" in told and "Seeds: how many there are" in told, style


def test_a_seed_can_be_a_row_or_be_chosen(tmp_path, capsys) -> None:
    of_seeds(tmp_path, "quest", QUEST)
    rows = lines(capsys, tmp_path, "--rows", "method,seed")
    assert {line["seed"]: float(line["score"]) for line in rows} == {"0": 100, "1": 25, "10": 50}
    (line,) = lines(capsys, tmp_path, "--where", "seed=10")
    assert float(line["score"]) == 50 and "seeds" not in line


def test_what_differs_in_more_than_the_seed_stays_apart(tmp_path, capsys) -> None:
    of_seeds(tmp_path, "quest", {0: [1.0, 1.0]}, dtype="bfloat16")
    of_seeds(tmp_path, "quest", {1: [1.0, 0.0]}, dtype="float32")
    assert [float(line["score"]) for line in lines(capsys, tmp_path)] == [100, 50]


def test_random_weights_of_each_seed_are_of_one_row(tmp_path) -> None:
    for seed in (0, 1):
        stored(tmp_path, samples=drawn(seed, [1.0]), config={"seed": seed}, model_revision=f"dummy-{seed}")
    run = one(collect([tmp_path]), "quest")
    assert run.arm["n"] == 2


def test_a_sample_that_all_seeds_share_counts_once(tmp_path) -> None:
    """Thrice the same 20 questions are 20 questions: their interval is that of each one's mean."""
    scores = np.random.default_rng(0).integers(0, 2, (3, 20)).astype(float)
    for seed, own in enumerate(scores):
        stored(tmp_path, samples=list(own), config={"seed": seed})
    run = one(collect([tmp_path]), "quest")
    found, means = run.score(), 100 * scores.mean(0)
    assert found.n == 20 and found.mean == pytest.approx(means.mean())
    error = 1.96 * means.std(ddof=1) / np.sqrt(20)
    assert found.high - found.low == pytest.approx(2 * error, rel=0.15)


def test_each_seed_is_paired_with_full_attention_of_its_own(tmp_path) -> None:
    full = {0: [1.0, 1.0, 1.0, 1.0], 1: [1.0, 1.0, 0.0, 0.0]}
    of_seeds(tmp_path, "full", full)
    of_seeds(tmp_path, "quest", QUEST)
    run = one(collect([tmp_path]), "quest")
    against = run.against_full()
    assert (against.n, against.mean) == (8, pytest.approx(-100 / 8))
    assert one(run.all_runs, "full").against_full() is None


def test_seeds_keep_full_attention_that_was_not_chosen(tmp_path, capsys) -> None:
    of_seeds(tmp_path, "full", {0: [1.0, 1.0], 1: [1.0, 1.0]})
    of_seeds(tmp_path, "quest", {0: [1.0, 0.0], 1: [0.0, 0.0]})
    (line,) = lines(capsys, tmp_path, "--where", "method=quest")
    assert (float(line["against_full"]), float(line["pairs"])) == (-75, 4)


def test_times_of_seeds_are_of_one_machine(tmp_path, capsys) -> None:
    quick, slow = ({"device": "a CPU", "threads": threads, "cores": 2} for threads in (2, 1))
    times = {0: (4.0, quick), 1: (5.0, quick), 2: (90.0, slow), 3: (380.0, {**quick, "others": 2.0}), 4: (6.0, quick)}
    for seed, (ms, on) in times.items():
        samples = drawn(seed, [1.0, 0.0], tpot_ms={"mean": ms, "p50": ms, "p95": ms}, machine=on)
        stored(tmp_path, samples=samples, config={"seed": seed})
    (line,) = lines(capsys, tmp_path)
    names = ("tpot_ms_mean", "tpot_ms_mean_low", "tpot_ms_mean_high", "timed_on", "marks", "samples")
    assert [line[name] for name in names] == ["5.0", "4.0", "6.0", "a CPU, 2 threads", "l", "10.0"]


def test_the_picture_has_one_point_with_the_interval_of_the_table(tmp_path) -> None:
    of_seeds(tmp_path, "quest", QUEST)
    of_seeds(tmp_path, "full", {0: [1.0, 1.0], 1: [1.0, 1.0]})
    runs = collect([tmp_path])
    figure = figures.draw("budget", runs)
    axis, _ = figure.axes
    (bars,) = axis.containers
    (segment,) = bars.lines[2][0].get_segments()
    shared = [score for seed in (0, 1) for score in QUEST[seed][:2]]  # which full attention has as well
    expected = mean_score([100 * np.array(shared)])
    assert segment[:, 1].tolist() == pytest.approx([expected.low, expected.high])
    band = axis.patches[0].get_bbox()
    assert (band.y0, band.y1) == pytest.approx((mean_score([np.full(4, 100.0)]).low, 100))
    assert figure._suptitle.get_text().endswith("with 95 % intervals")
    assert "seeds 0, 1 or 0, 1, 10" in figure.legends[0].get_title().get_text()


def test_kl_has_the_same_interval_in_table_and_picture(tmp_path, capsys) -> None:
    kls = {0: [0.1, 0.2, 0.4], 1: [0.3, 0.5, 0.2]}
    for seed, own in kls.items():
        samples = [
            {**sample, "fidelity": {"kl_mean": kl}} for sample, kl in zip(drawn(seed, [1.0] * 3), own, strict=True)
        ]
        for sample in samples:
            sample["fidelity"] |= {"nll": 1.0, "nll_full": 1.0}
        stored(tmp_path, samples=samples, task="fidelity", config={"seed": seed})
    every = sum(kls.values(), [])
    (line,) = lines(capsys, tmp_path, "--rows", "method", "--values", "kl_mean")
    ends = [float(line[name]) for name in ("kl_mean_low", "kl_mean_high")]
    assert float(line["kl_mean"]) == pytest.approx(np.mean(every))
    spread = estimate([np.array(every)])
    assert ends == pytest.approx([spread.low, spread.high])
    figure = figures.draw("fidelity", collect([tmp_path]))
    (segment,) = figure.axes[0].containers[0].lines[2][0].get_segments()
    assert segment[:, 1].tolist() == pytest.approx(ends)


@pytest.mark.parametrize("chosen", [[], ["--where", "method=quest"]])
def test_a_gain_is_over_the_controls_of_all_seeds_whatever_is_shown(chosen: list[str], tmp_path, capsys) -> None:
    of_seeds(tmp_path, "quest", {0: [1.0] * 4, 1: [1.0] * 4})
    of_seeds(tmp_path, "random", {0: [0.0] * 4, 1: [1.0] * 4})
    found = {line["method"]: line for line in lines(capsys, tmp_path, "--rows", "method", "--values", "gain", *chosen)}
    assert float(found["quest"]["gain"]) == 50


def test_nearness_of_unequal_seeds_is_the_mean_that_its_interval_is_of(tmp_path, capsys) -> None:
    for seed, kls in ((0, [1.0, 2.0, 3.0]), (1, [10.0])):
        near = [{"fidelity": {"kl_mean": kl, "nll": kl, "nll_full": 0.5}} for kl in kls]
        samples = [drawn(seed, [1.0] * len(kls), **more)[at] for at, more in enumerate(near)]
        stored(tmp_path, samples=samples, config={"seed": seed})
    (line,) = lines(capsys, tmp_path, "--rows", "method", "--values", "kl_mean,nll,n")
    assert (float(line["kl_mean"]), float(line["nll"]), int(float(line["n"]))) == (4.0, 4.0, 4)
