"""Times are of one machine that does nothing else: what samples record of it, and what reports make of that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import csv_lines as lines
from report_runs import record, stored

from kvbench.cli.report import main as report
from kvbench.measure import machine
from kvbench.report.data.frame import collect
from kvbench.report.figures import all as figures
from kvbench.runs.summary import summarise

CPU = torch.device("cpu")
ONE, TWO = {"device": "a CPU", "threads": 1, "cores": 2}, {"device": "a CPU", "threads": 2, "cores": 2}


def timed(number: int, ms: float, on: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A sample of a time per token."""
    told = {"machine": on} if on else {}
    return record(f"s-{number}", "", 1.0, tpot_ms={"mean": ms, "p50": ms, "p95": ms}, **told, **more)


def repeat(number: int, ms: float, on: dict[str, Any] | None, length: int = 1024) -> dict[str, Any]:
    """A repeat of a timed sample."""
    hardware = {"floor_ms": 1.0, "copy_bandwidth": 1e10, "memory": "counted", "memory_bytes": 1}
    meta = {"length": length, "batch": 1}
    return timed(number, ms, on, meta=meta, hardware=hardware, prompt_tokens=length)


# -- what a sample records ---------------------------------------------------------------------------------------------


def stat(*ticks: tuple[int, ...]) -> str:
    """/proc/stat of a machine whose cores have spent this."""
    cores = [f"cpu{core} {' '.join(map(str, spent))}" for core, spent in enumerate(ticks)]
    return "\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *cores, "intr 5 6 7", "ctxt 9"]) + "\n"


@pytest.fixture
def spending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[tuple[int, ...], tuple[int, ...]], Any]:
    """Observes two seconds, half of one of which is ours, on two of three cores that spend these ticks meanwhile."""

    def observe(first: tuple[int, ...], second: tuple[int, ...]) -> Any:
        clock = {"wall": 0.0, "own": 0.0}
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 2})
        monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(machine.time, "perf_counter", lambda: clock["wall"])
        monkeypatch.setattr(machine.time, "process_time", lambda: clock["own"])
        monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
        machine.STAT.write_text(stat((0,) * 10, (0,) * 10, (5,) * 10))
        with machine.observed(CPU) as told:
            clock |= {"wall": 2.0, "own": 0.5}
            after = tuple(5 + spent for spent in second)
            machine.STAT.write_text(stat(first, (900,) * 10, after))
        return told

    return observe


def test_what_others_took_is_what_the_cores_of_the_process_did_without_it(spending) -> None:
    # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice: 1.7 s busy on both cores
    told = spending((60, 10, 10, 90, 9, 5, 5, 10, 60, 0), (30, 20, 10, 120, 0, 10, 10, 0, 30, 0))
    assert told["cores"] == 2 and told["threads"] == torch.get_num_threads() and told["load"] >= 0
    assert told["others"] == pytest.approx((1.7 - 0.5 - 0.02) / 2)  # a tick a core is within what is told
    assert told["steal"] == pytest.approx(0.1 / 2)


def test_an_idle_machine_took_nothing(spending) -> None:
    told = spending((51, 0, 0, 149, 0, 0, 0, 0, 0, 0), (1, 0, 0, 199, 0, 0, 0, 0, 0, 0))
    assert told["others"] == told["steal"] == 0


def test_a_machine_that_does_not_tell_is_recorded_as_far_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPUINFO", Path("/proc/there is none"))
    machine._cpu.cache_clear()
    with machine.observed(CPU) as told:
        pass
    machine._cpu.cache_clear()
    assert set(told) == {"device", "threads", "cores", "load"} and told["device"] == os.uname().machine


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")
def test_a_busy_neighbour_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STAT", Path("/proc/stat"))
    loop = "import os, time; os.nice(19); end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    with machine.observed(CPU) as told:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", loop], check=True)
        wall = time.perf_counter() - start
    assert told["others"] * wall > 0.3


# -- what may be averaged ----------------------------------------------------------------------------------------------


def test_times_of_two_thread_counts_are_not_averaged() -> None:
    found = summarise([timed(index, 4.0, ONE) for index in range(3)] + [timed(9, 8.0, TWO)], "accuracy")
    assert found["latency"]["tpot_ms_mean"] == 4 and found["n"] == 4
    told = found["machine"]
    assert (told["device"], told["threads"], told["left_out"], told["disturbed"]) == ("a CPU", 1, 1, False)


@pytest.mark.parametrize(
    ("on", "taken", "disturbed"),
    [
        (TWO, {"others": 0.19}, False),
        (TWO, {"others": 0.21}, True),
        (TWO, {"others": 0.15, "steal": 0.06}, True),
        (ONE, {"others": 1.0}, False),  # on the core that it leaves
        (ONE, {"others": 1.2}, True),
        (TWO, {}, False),
    ],
)
def test_a_sample_whose_cores_were_taken_is_disturbed_and_no_part_of_a_mean(on, taken, disturbed) -> None:
    quiet, other = timed(0, 4.0, on), timed(1, 380.0, {**on, **taken})
    found = summarise([quiet, other], "accuracy")
    assert found["latency"]["tpot_ms_mean"] == (4 if disturbed else 192)
    assert found["machine"]["left_out"] == disturbed
    alone = summarise([other], "accuracy")
    assert alone["latency"]["tpot_ms_mean"] == 380 and alone["machine"]["disturbed"] == disturbed


def test_runs_of_a_kvbench_that_recorded_no_machine_are_read_as_before(tmp_path, capsys) -> None:
    stored(tmp_path, samples=[timed(0, 4.0, None), timed(1, 6.0, None)])
    (line,) = lines(capsys, tmp_path)
    assert (float(line["tpot_ms_mean"]), line["marks"], line["timed_on"]) == (5, "", "cpu, 1 threads")


# -- what reports show -------------------------------------------------------------------------------------------------


def test_a_table_marks_what_was_left_out_what_was_disturbed_and_where(tmp_path, capsys) -> None:
    stored(tmp_path, "full", None, [timed(0, 4.0, TWO), timed(1, 4.0, TWO), timed(2, 8.0, ONE)])
    stored(tmp_path, "quest", samples=[timed(0, 380.0, {**TWO, "others": 1.5})])
    stored(tmp_path, "snapkv", samples=[timed(0, 3.0, ONE)])
    found = {line["method"]: line for line in lines(capsys, tmp_path)}
    assert {name: (float(line["tpot_ms_mean"]), line["marks"]) for name, line in found.items()} == {
        "full": (4, "l1"),
        "quest": (380, "n1"),
        "snapkv": (3, "2"),
    }
    assert found["snapkv"]["timed_on"] == "a CPU, 1 threads"
    for style in ("console", "markdown", "latex", "html"):
        assert report([str(tmp_path), "--format", style, "--rows", "method", "--values", "tpot_ms_mean"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        marked = r"380.00\rlap{\textsuperscript{n1}}" if style == "latex" else "380.00 (n1)"  # the best of no column
        assert "1: a CPU, 2 threads; 2: a CPU, 1 threads" in told and f" {marked}" in told.replace(">", "> "), style
        assert "n: timed beside other work" in told and "l: without the times of some samples" in told


def test_repeats_of_a_timed_sample_are_a_median_with_its_ends_a_line_for_each_machine(tmp_path, capsys) -> None:
    times = [(4.0, ONE), (9.0, TWO), (5.0, ONE), (380.0, {**ONE, "others": 1.5}), (4.5, ONE), (8.0, TWO)]
    options = {"lengths": [1024], "keys": "model", "prefill": True}
    samples = [repeat(number, ms, on) for number, (ms, on) in enumerate(times)]
    stored(tmp_path, "full", None, samples, task="latency", options=options)
    found = [line for line in lines(capsys, tmp_path) if line["table"] == "latency"]
    names = ("machine", "tpot_ms_p50", "tpot_ms_p50_low", "tpot_ms_p50_high", "n", "marks")
    assert [tuple(line[name] for name in names) for line in found] == [
        ("a CPU, 1 threads", "4.5", "4.0", "5.0", "3.0", "l"),
        ("a CPU, 2 threads", "8.5", "8.0", "9.0", "2.0", ""),
    ]
    assert report([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "4.50 [4.00, 5.00] (l)" in told and "medians of repeats" in told
    assert not any(name.endswith("_low") for name in found[0] if name.startswith(("breakdown", "index", "floor")))


def test_the_parts_of_a_step_are_of_one_repeat_and_add_up_to_its_time(tmp_path) -> None:
    parts = [{"model": 1.0, "attention": 9.0}, {"model": 9.0, "attention": 2.0}, {"model": 5.0, "attention": 7.0}]
    samples = [{**repeat(index, sum(own.values()), None), "breakdown_ms": own} for index, own in enumerate(parts)]
    stored(tmp_path, "full", None, samples, task="latency", options={"keys": "model", "prefill": True})
    (found,) = collect([tmp_path])[0].cells.values()
    assert found["tpot_ms_mean"] == 11 == found["breakdown_ms.model"] + found["breakdown_ms.attention"]


def test_of_two_repeats_both_time_and_parts_are_the_mean(tmp_path) -> None:
    """And a part that one length alone has is no other's."""
    parts = [{"model": 4.0, "attention": 1.0}, {"model": 9.0, "attention": 6.0}]
    samples = [{**repeat(index, sum(own.values()), None), "breakdown_ms": own} for index, own in enumerate(parts)]
    long = {**repeat(2, 20.0, None), "id": "latency-2048-1-0", "meta": {"length": 2048, "batch": 1}}
    long |= {"breakdown_ms": {"model": 8.0, "gather": 12.0}}
    stored(tmp_path, "full", None, [*samples, long], task="latency", options={"keys": "model", "prefill": True})
    found = {place.tokens: line for place, line in collect([tmp_path])[0].cells.items()}
    short, other = found[min(found)], found[2048]
    assert short["tpot_ms_mean"] == 10 == short["breakdown_ms.model"] + short["breakdown_ms.attention"]
    assert "breakdown_ms.gather" not in short and other["breakdown_ms.gather"] == 12


def test_random_weights_of_two_shapes_are_two_models(tmp_path) -> None:
    for layers in (2, 4):
        shape = {"model_shape": {"num_hidden_layers": layers}, "model_revision": "dummy-0"}
        stored(tmp_path, "full", None, [1.0] * 8, **shape)
        stored(tmp_path, "quest", 64, [1.0] * 8, **shape)
    runs = collect([tmp_path])
    assert len(runs.arms) == 4 and not runs.skipped
    shapes = [(run.settings["model.config.num_hidden_layers"], run.full()) for run in runs]
    assert all(full.settings["model.config.num_hidden_layers"] == layers for layers, full in shapes)


def test_repeats_that_differ_by_more_than_a_factor_are_marked(tmp_path, capsys) -> None:
    options = {"lengths": [1024], "keys": "model", "prefill": True}
    samples = [repeat(number, ms, None) for number, ms in enumerate((4.0, 380.0, 4.2))]
    stored(tmp_path, "full", None, samples, task="latency", options=options)
    (line,) = (line for line in lines(capsys, tmp_path) if line["table"] == "latency")
    assert (line["tpot_ms_p50"], line["marks"]) == ("4.2", "v")


def test_pictures_of_times_have_a_panel_for_each_machine(tmp_path) -> None:
    for method, on in (("full", ONE), ("quest", ONE), ("snapkv", TWO), ("h2o", TWO)):
        stored(tmp_path, method, None if method == "full" else 64, [timed(0, 4.0, on), timed(1, 4.0, on)])
    runs = collect([tmp_path])
    memory, first, second = [axis for axis in figures.draw("tradeoff", runs).axes if axis.axison]
    n = "n\xa0=\xa02"
    assert memory.get_title() == f"passkey, tiny, {n}", "memory is no machine's"
    titles = [axis.get_title().replace("\n", " ") for axis in (first, second)]
    assert titles == [f"passkey, tiny, {n}, a CPU, {threads} threads" for threads in (1, 2)]
    assert len({axis.get_title() for axis in figures.draw("budget", runs).axes}) == 1, "scores are of no machine"


def test_a_method_is_faster_than_full_attention_of_its_own_machine_alone(tmp_path, capsys) -> None:
    options = {"lengths": [1024, 2048], "keys": "model", "prefill": True}
    for method, ms in (("full", {1: 10.0, 2: 4.0}), ("quest", {1: 5.0, 2: 5.0})):
        samples = [
            repeat(10 * threads + length, ms[threads], on, length)
            for threads, on in ((1, ONE), (2, TWO))
            for length in (1024, 2048)
        ]
        stored(tmp_path, method, None if method == "full" else 64, samples, task="latency", options=options)
    found = [line for line in lines(capsys, tmp_path) if line["table"] == "latency_breakeven"]
    assert {line["machine"]: float(line["time_over_full"]) for line in found} == {
        "a CPU, 1 threads": 0.5,
        "a CPU, 2 threads": 1.25,
    }
    figure = figures.draw("breakeven", collect([tmp_path]))
    assert [axis.get_title().replace("\n", " ") for axis in figure.axes] == [
        f"latency, tiny, n\xa0=\xa04, a CPU, {threads} threads" for threads in (1, 2)
    ]
