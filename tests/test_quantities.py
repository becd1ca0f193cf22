"""Recorded numbers: each stands once, is combined and shown as its line says, and needs no line to be shown at all."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import record, records, stored, with_budget
from rich.console import Console

from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.cli.report import main
from kvbench.report.data.frame import collect
from kvbench.runs.quantities import KIB, MIB, MS, NUMBERS, QUANTITIES, find, named, recorded
from kvbench.runs.stored import json_in, runs_in
from kvbench.runs.summary import summarise
from kvbench.runs.sweep import run
from kvbench.runs.table import Ended, print_ends, table


def shown(summary: dict[str, Any]) -> dict[str, str]:
    """The lines of a run's table on the terminal."""
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(table("a run", "accuracy", summary))
    lines = [line.strip("│ ").split("│") for line in captured.get().splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in lines}


def values(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, str]]:
    """The lines of a report as CSV."""
    capsys.readouterr()
    assert main([*map(str, words), "--format", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


# -- lines -------------------------------------------------------------------------------------------------------------


def test_what_a_full_attention_run_records_has_a_line(tmp_path):
    words = ["model=dummy-tiny", "device=cpu", f"results_dir={tmp_path}", "method=full", "task.limit=1"]
    timed = run(composed(*words, "task=latency", "task.lengths=[300]", "task.repeats=1"))
    probed = run(composed(*words, "task=passkey", "task.lengths=[300]", "probe.every=20"))
    for summary in (timed, probed):
        names = [name for name in recorded(summary) if not name.startswith(("breakdown_ms.", "scores."))]
        assert [name for name in names if name not in QUANTITIES] == []
    assert {"floor_ratio", "attended_mean", "memory"} <= recorded(timed).keys()
    assert {"recall", "output_error", "score"} <= recorded(probed).keys()


def test_a_device_is_busy_while_it_does_not_wait():
    summary = {"latency": {"tpot_ms_mean": 6.0}, "hardware": {"python_ms": 4.5}}
    assert recorded(summary)["busy_ms"] == 1.5
    assert "busy_ms" not in recorded({**summary, "hardware": {"python_ms": None}})


def test_a_ratio_is_of_two_lines():
    ratios = [quantity.ratio for quantity in QUANTITIES.values() if quantity.ratio]
    assert ratios and all(name in NUMBERS for pair in ratios for name in pair)
    summary = {"audit": {"attended_mean": 96.0, "budget": 64}, "latency": {"tpot_ms_p50": 6.0}}
    assert recorded(summary) == {"attended_mean": 96.0, "budget_tokens": 64, "attended_share": 1.5, "tpot_ms_p50": 6.0}


def test_every_score_of_a_task_is_a_value(tmp_path, capsys):
    stored(tmp_path, samples=[record("a", "", 1.0, scores={"accuracy": 1.0, "no_comma": 0.0})])
    [line] = values(capsys, tmp_path, "--values", "scores.no_comma,score")
    assert float(line["scores.no_comma"]) == 0 and float(line["score"]) == 100


def test_a_number_is_shown_in_its_unit_and_digits():
    kv, step = QUANTITIES["device_kv_bytes"], QUANTITIES["tpot_ms_mean"]
    assert (kv.heading, kv.axis, kv.number(3 * 2**19)) == ("KV on the device, MiB", "KV on the device (MiB)", "1.50")
    assert (step.heading, step.narrow_heading, step.amount(4)) == ("ms / token", "TPOT, ms", "4.00 ms")
    assert (step.amount(None), step.number(None), step.number(None, missing="")) == ("-", "-", "")
    assert step.is_time and not kv.is_time
    assert (kv.unit, QUANTITIES["moved_bytes_per_step"].unit) == (MIB, KIB)


def test_a_report_has_a_column_for_each_line_and_the_list_says_which_way_is_better(tmp_path, capsys):
    stored(tmp_path)
    assert set(QUANTITIES) <= set(collect([tmp_path]).arms.columns)
    assert main(["--list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert set(NUMBERS) <= set(listed) and "executor" not in listed
    assert listed["recall"].endswith("; more is better") and listed["index_bytes"].endswith("; less is better")
    assert listed["n"].endswith("  samples"), "neither"


@pytest.mark.parametrize("module", ["quantities", "summary", "table"])
def test_nothing_heavy_is_imported(module):
    code = f"import sys, kvbench.runs.{module}; print({{'torch', 'pandas', 'omegaconf', 'hydra'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- a method's own numbers --------------------------------------------------------------------------------------------


def test_a_number_without_a_line_is_named_by_its_key():
    late, size, wait = find("audit", "searches_late"), find("audit", "cache_bytes"), find("audit", "wait_ms")
    assert (late.name, late.heading, late.combine) == ("audit.searches_late", "searches late", "mean")
    assert (size.heading, size.combine) == ("cache, MiB", "max") and find("audit", "depth_max").combine == "max"
    assert (wait.heading, wait.unit, wait.is_time) == ("wait, ms", MS, True)
    assert find("breakdown_ms", "index_build").heading == "index build, ms / token"
    assert all(named(quantity.name) == quantity for quantity in (late, size, wait, *QUANTITIES.values()))


def test_peaks_of_a_method_s_own_are_peaks_of_the_run_and_all_others_means():
    audits = [{"hops": 1, "hops_max": 3, "cache_bytes": 2**20}, {"hops": 2, "hops_max": 9, "cache_bytes": 2**21}]
    lines = [record | {"audit": audit} for record, audit in zip(records([1.0, 0.0]), audits, strict=True)]
    summary = summarise(lines, "accuracy")
    assert summary["audit"] == {"hops": 1.5, "hops_max": 9, "cache_bytes": 2**21}
    own = {name: value for name, value in shown(summary).items() if name.startswith("method: ")}
    assert own == {"method: hops": "1.50", "method: hops max": "9.00", "method: cache": "2.00 MiB"}


def test_a_real_method_s_own_numbers_are_shown_everywhere(tmp_path, capsys):
    words = ["model=dummy-tiny", "device=cpu", f"results_dir={tmp_path}", "task.lengths=[500]", "task.limit=2"]
    summary = run(composed(*words, "task=passkey", "method=pariskv", "budget=64"))
    told = capsys.readouterr().out
    own = {key: summary["audit"][key] for key in ("candidates", "retrieved")}
    assert own["candidates"] > own["retrieved"] > 0
    for key, value in own.items():
        assert f"method: {key}" in told and shown(summary)[f"method: {key}"] == f"{value:.2f}"
        assert collect([tmp_path]).arms[f"audit.{key}"].to_list() == [value]
    (line,) = values(capsys, tmp_path, "--rows", "method", "--values", "candidates,audit.retrieved")
    assert {key: float(line[f"audit.{key}"]) for key in own} == own


def test_a_method_s_own_number_takes_no_other_s_name(tmp_path, capsys):
    """Whatever a method calls its numbers, the columns that a report has already are what they were."""
    lines = records([1.0, 0.0])
    awkward = {"score": 7.0, "recall": 0.25, "n": 9, "path": 1.0, "method": 2.0, "seed": 3.0, "stderr": 4.0}
    stored(tmp_path, samples=[line | {"audit": line["audit"] | awkward} for line in lines])
    (arm,) = (run.arm for run in collect([tmp_path]))
    assert (arm["score"], arm["n"], arm["method"], arm["seed"], arm["recall"]) == (50.0, 2, "quest", 0, None)
    assert {key: arm[f"audit.{key}"] for key in awkward} == awkward
    (line,) = values(capsys, tmp_path, "--rows", "method", "--values", "n,audit.n,audit.recall")
    assert (float(line["n"]), float(line["audit.n"]), float(line["audit.recall"])) == (2, 9, 0.25)


def test_a_word_that_two_parts_end_with_names_both(tmp_path, capsys):
    lines = [line | {"probe": {"hops": 1.0}, "audit": {"hops": 2.0}} for line in records([1.0])]
    stored(tmp_path, samples=lines)
    assert main([str(tmp_path), "--rows", "method", "--values", "hops"]) == 2
    assert "hops: audit.hops or probe.hops?" in capsys.readouterr().err


# -- the terminal ------------------------------------------------------------------------------------------------------


def test_a_run_s_table_has_a_line_for_each_cost_and_group():
    more = {"hardware": {"floor_ms": 1.0, "python_ms": 0.5, "memory": "counted", "memory_bytes": 2**20}}
    probe = {"recall": 0.5, "error": 0.25, "layers": {}}
    lines = records({"a": [1.0, 0.0], "b": [1.0]}, probe=probe, **more)
    lines = [with_budget(line, Budget(64), "paper") for line in lines]
    lines[0]["audit"] |= {"transfer": "simulated", "device_kv_allocated_bytes": 3 * 2**20}
    assert shown(summarise(lines, "accuracy")) == {
        "accuracy": "66.7 ± 33.3 (3 samples)",
        "attended entries per KV head": "80.0 = 1.25 C",
        "KV on the device": "1.00 MiB, 3.00 MiB allocated",
        "KV on the host": "-",
        "moved up per step": "0.0 KiB, simulated",
        "index": "-",
        "time to first token": "0.500 s",
        "time per further token": "4.00 ms",
        "floor of a token": "1.00 ms",
        "device busy, of a token": "3.50 ms",
        "Python, device idle, of a token": "0.50 ms",
        "device memory in decoding, counted": "1.0 MiB",
        "a": "50.0 ± 50.0 (2 samples)",
        "b": "100.0 (1 samples)",
        "mean of 2 groups": "75.0",
        "probe: recall": "0.500",
        "probe: error": "0.250",
    }


def test_the_arms_of_a_sweep_stand_side_by_side():
    console = Console(width=140, file=io.StringIO())
    with console.capture() as captured:
        lines = [with_budget(line, Budget(64), "paper") for line in records([1.0, 0.0], output_ids=[5, 6, 7])]
        ran = summarise(lines, "accuracy")
        print_ends([("budget=64", Ended(ran)), ("budget=96", Ended({}))], console)
    head, *lines = [
        [cell.strip() for cell in line.strip("│┃").split(line[0])]
        for line in captured.get().splitlines()
        if line[0] in "│┃"
    ]
    costs = ["attended / C", "KV on the device, MiB", "ms / token", "new tokens"]
    assert head == ["arm", "score", "samples", "failed", *costs]
    assert lines == [["budget=64", "50.0 ± 50.0", "2", "0", "1.25", "1.00", "4.00", "3.0"], ["budget=96", *[""] * 7]]


def test_committed_runs_show_what_their_methods_report():
    arm = Path(__file__).parents[1] / "results/reference_tiny.tar.xz/runs/niah/tiny/pariskv-64"
    (folder,) = runs_in([arm])
    summary = json_in(folder / "summary.json")
    assert shown(summary)["method: candidates"] == f"{summary['audit']['candidates']:.2f}"
