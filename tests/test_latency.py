"""task=latency: exact prompts, steps that all run, what they are held to, and the tables and pictures of it."""

from __future__ import annotations

import csv
import gc
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashinfer_twin
import pytest
import report_runs
import torch
import yaml
from driver import slow
from twin import Twin, device
from words import other, over

from kvbench.attention import flashinfer
from kvbench.backends.hf.loading import Loaded, byte_tokenizer
from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.cli import main as cli
from kvbench.cli.compose import composed
from kvbench.cli.plan import grouped
from kvbench.cli.report import main as report
from kvbench.cli.score import main as score
from kvbench.config import ConfigError, choices, shipped
from kvbench.measure import hardware, latency, machine
from kvbench.measure.job import PromptJob
from kvbench.measure.prompts import prompt_of
from kvbench.measure.synthetic import SYNTHETIC_SPAN, SyntheticAttention, SyntheticEngine
from kvbench.method import Shape
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Footprint, Prompts
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.figures import all as figures
from kvbench.report.tables.runs import summary
from kvbench.runs.run import prepare
from kvbench.runs.sweep import run
from kvbench.tasks.latency import Latency

TABLES = ["latency", "latency_bytes", "latency_parts", "latency_breakeven"]
SMALL = ("model=dummy-tiny", "device=cpu", "task=latency", "task.lengths=[300]", "task.steps=5", "task.warmup=2")


def records(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("runs/latency/*/*/*/samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


# -- samples -----------------------------------------------------------------------------------------------------------


def test_prompts_have_the_exact_length_and_rows_of_their_own() -> None:
    tokenizer = byte_tokenizer()
    task = Latency([100, 7], [1, 3], steps=5, warmup=2, repeats=2)
    samples = list(task.samples(tokenizer, seed=0))
    assert len(samples) == len(task) == 8 and len({sample.id for sample in samples}) == 8
    assert [sample.meta["length"] for sample in samples[:4]] == [100, 100, 7, 7], "every cell once, then again"
    for sample in samples:
        rows = sample.timed.rows  # type: ignore[union-attr]
        assert [len(row) for row in rows] == [sample.meta["length"]] * sample.meta["batch"]
        assert len(set(map(tuple, rows))) == len(rows)
        assert not {token for row in rows for token in row} & set(tokenizer.all_special_ids)
        assert sample.max_new_tokens == 1 + 2 + 5
    assert samples[1].timed.rows[0] == samples[0].timed.rows[0], "a row is the same in any batch"
    assert samples[4].timed.rows != samples[0].timed.rows
    again = list(task.samples(tokenizer, seed=0))
    assert [sample.timed for sample in again] == [sample.timed for sample in samples]
    assert next(iter(task.samples(tokenizer, seed=1))).timed != samples[0].timed


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["task.batch=[0]"], "latency: task.batch=[0]: expected different whole numbers, 1 or more, such as [1,4]"),
        (["task.batch=[2,2]"], "latency: task.batch=[2,2]: expected different whole numbers"),
        (["task.batch=[]"], "latency: task.batch=[]: expected different whole numbers"),
        (["task.batch=4"], "task.batch=4: expected a list, such as [1]"),
        (["task.prefill=false"], "latency: task.prefill=false: the model computes no keys then; add task.keys="),
        (["task.prefill=no thanks"], "task.prefill=no thanks: expected true or false"),
        (["task.keys=made"], "task.keys=made: expected model | synthetic_attention"),
        (["task.steps=0"], "task.steps=0: expected a whole number, 1 or more"),
        (["task.warmup=-1"], "task.warmup=-1: expected a whole number, 0 or more"),
        (["task.own_prefill=false"], "task.own_prefill=false: a fact of latency, not a setting"),
        (["task.lengths=[40000]"], "task.lengths=[40000]: 40000 tokens and 37 new ones do not fit the window of tiny"),
    ],
)
def test_bad_settings_are_refused_in_a_line_before_a_model_loads(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed("task=latency", *words)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize("model", ["tiny", "llama3.1-8b-instruct"])
def test_random_weights_take_a_longer_window_and_the_refusal_says_so(model: str) -> None:
    words = ["task=latency", f"model={model}", "model.weights=dummy", "task.lengths=[524288]"]
    with pytest.raises(ConfigError, match=r"model.config.max_position_embeddings=N"):
        composed(*words)
    assert composed(*words, "model.config.max_position_embeddings=600000").task.token_lengths == [524288]


def test_a_prompt_beyond_a_window_that_only_the_model_tells_is_refused(dummies: Callable[[str], Loaded]) -> None:
    config = other(composed(*SMALL), task={"lengths": [32768]})
    arm = prepare(config, dummies("dummy-tiny"))
    with pytest.raises(ConfigError, match="max_position_embeddings=N"):
        prompt_of(arm, next(iter(arm.task.samples(arm.loaded.tokenizer, 0))))


def test_arms_of_a_sweep_prefill_for_themselves() -> None:
    arms = [composed(*SMALL, f"method={name}") for name in ("full", "quest", "snapkv")]
    assert grouped(arms) == [[0], [1], [2]]
    others = [composed("task=passkey", f"method={name}") for name in ("full", "quest", "snapkv")]
    assert grouped(others) == [[0, 1, 2]]


# -- runs --------------------------------------------------------------------------------------------------------------

METHODS = sorted(set(choices("method")))


FILLED = ["full", "snapkv", "quest", "pariskv"]
OTHERS = sorted({*METHODS} - {*FILLED, "icecache"})


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    ("name", "prefill"),
    [
        *((name, "true") for name in [*FILLED, "icecache"]),
        ("icecache", "false"),
        *slow(*((name, "true") for name in OTHERS), *((name, "false") for name in FILLED)),
    ],
)
def test_every_method_runs_all_steps_of_a_batch(name: str, prefill: str, tmp_path: Path) -> None:
    words = (*SMALL, f"results_dir={tmp_path}", "task.keys=synthetic_attention", f"task.prefill={prefill}")
    found = run(composed(*words, "task.batch=[2]", f"method={name}", "budget=200"))
    (record,) = records(tmp_path)
    assert record["error"] is None and record["scores"] == {"completed": 1.0} and found["score"] == 100
    assert len(record["output_ids"]) == 1 + 2 + 5 and record["prompt_tokens"] == 300
    assert sum(record["breakdown_ms"].values()) == pytest.approx(record["tpot_ms"]["mean"] - 2)
    assert ("ttft_s" in record) == (prefill == "true"), "nothing was read: there is no first token to time"
    told, audit = record["hardware"], record["audit"]
    assert told["floor_ms"] == pytest.approx(1e3 * told["must_read_bytes"] / told["copy_bandwidth"])
    assert told["must_read_bytes"] >= 2 * 2 * 16 * 4 * audit["attended_mean"] + told["weight_bytes"] / 2
    assert told["memory"] == "counted" and told["memory_bytes"] > told["weight_bytes"] + audit["index_bytes"]
    assert told["python_ms"] is None and told["upload_bandwidth"] is None and told["prefill_memory_bytes"] is None
    assert found["hardware"]["memory_bytes"] == told["memory_bytes"]


def test_what_full_attention_must_read_by_hand(tmp_path: Path) -> None:
    """7 steps, the first of which attends 301 tokens: 304 in the mean, whatever is dense."""
    words = [*SMALL, f"results_dir={tmp_path}", "method=full", "budget=null", "task.batch=[1,3]", "dtype=float32"]
    found = run(composed(*words, "protocol.dense_layers=[0]"))
    card = composed(*words).model.card()
    entry = card.layers * card.kv_heads * 2 * card.head_dim * 4
    for record, rows in zip(records(tmp_path), (1, 3), strict=True):
        told = record["hardware"]
        weights = told["must_read_bytes"] - rows * 304 * entry
        assert 0 < weights <= told["weight_bytes"] and weights == int(weights)
        assert told["whole_kv_bytes"] == rows * (300 + 7) * entry
        assert record["audit"]["device_kv_bytes"] == told["whole_kv_bytes"]
    assert found["hardware"]["whole_kv_bytes"] == 3 * (300 + 7) * entry


def test_the_warm_up_counts_for_the_second_token_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted: list[list[float]] = []
    real = latency.generate

    def generate(*arguments: Any, **settings: Any) -> Any:
        made = real(*arguments, **settings)
        noted.append(made.step_ms)
        return made

    monkeypatch.setattr(latency, "generate", generate)
    run(composed(*SMALL, f"results_dir={tmp_path}", "method=full", "budget=null"))
    rehearsal, steps = noted
    (record,) = records(tmp_path)
    assert len(rehearsal) == 2 and len(steps) == 7
    assert record["tpot_ms"]["mean"] == pytest.approx(sum(steps[2:]) / 5)
    assert record["tt2t_s"] == pytest.approx(record["ttft_s"] + steps[0] / 1e3)


def test_a_stop_token_ends_nothing(dummies: Callable[[str], Loaded]) -> None:
    """Whatever ends an answer elsewhere, a timed row goes on."""
    arm = prepare(composed(*SMALL, "method=full"), dummies("dummy-tiny"))
    arm.loaded = replace(arm.loaded, stop_ids=tuple(range(len(arm.loaded.tokenizer))))
    (record,) = PromptJob(arm, [prompt_of(arm, next(iter(arm.task.samples(arm.loaded.tokenizer, 0))))]).run()
    assert len(record["output_ids"]) == 8


@pytest.mark.slow
def test_making_synthetic_keys_is_no_part_of_the_time_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of four layers waits for them while a prompt is read, longer than the small model reads it in."""
    real, wait = SyntheticAttention.keys, 0.5

    def slow_keys(self: SyntheticAttention, layer: int, start: int, stop: int, row: int) -> torch.Tensor:
        time.sleep(wait if (start, stop) == (0, 300) else 0)
        return real(self, layer, start, stop, row)

    monkeypatch.setattr(SyntheticAttention, "keys", slow_keys)
    run(composed(*SMALL, "method=full", "task.keys=synthetic_attention", f"results_dir={tmp_path}"))
    (record,) = records(tmp_path)
    assert record["ttft_s"] < 4 * wait and record["tt2t_s"] < 4 * wait
    assert SYNTHETIC_SPAN not in record["prefill_ms"] and record["prefill_ms"]["model"] > 0


def test_the_rehearsal_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [*SMALL, "method=icecache", "budget=64", "task.keys=synthetic_attention"]
    run(composed(*words, f"results_dir={tmp_path / 'short'}"))
    monkeypatch.setattr(latency, "REHEARSED", 100)
    run(composed(*words, f"results_dir={tmp_path / 'shorter'}"))
    one, other = (records(tmp_path / name)[0] for name in ("short", "shorter"))
    for key in ("output_ids", "audit"):
        assert one[key] == other[key]


def test_probes_tell_recall_in_place_of_times(tmp_path: Path) -> None:
    found = run(composed(*SMALL, f"results_dir={tmp_path}", "method=quest", "budget=64", "probe.every=1"))
    assert 0 < found["probe"]["recall"] <= 1 and "hardware" not in found and found["latency"]["tpot_ms_mean"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "icecache"])
def test_an_index_finds_more_in_synthetic_keys_than_in_those_of_random_weights(name: str, tmp_path: Path) -> None:
    words = ("model=tiny", "model.weights=dummy", "device=cpu", "task=latency", "task.lengths=[2048]", "task.steps=4")
    found = {
        keys: run(composed(*words, f"task.keys={keys}", f"method={name}", "probe.every=2", f"results_dir={tmp_path}"))
        for keys in ("model", "synthetic_attention")
    }
    made, model = (found[keys]["probe"] for keys in ("synthetic_attention", "model"))
    assert made["recall"] > 1.4 * model["recall"] and made["mass"] > 4 * model["mass"]


def test_running_out_of_memory_is_a_sample_that_did_not_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = latency.generate

    def generate(model: Any, rows: Any, engine: Any, **settings: Any) -> Any:
        if len(rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, rows, engine, **settings)

    monkeypatch.setattr(latency, "generate", generate)
    found = run(composed(*SMALL, f"results_dir={tmp_path}", "method=full", "task.batch=[1,2]"))
    assert found["failed"] == 1 and found["score"] == 50 and found["hardware"]["floor_ms"] > 0
    assert "out of memory" in records(tmp_path)[1]["error"]


def test_what_a_step_takes_beyond_the_work_of_the_device_is_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device that was busy for 1 ms in the 8 steps behind the timed ones."""

    def busy(call: Callable[[], Any], device: torch.device) -> float:
        call()
        return 1e-3

    monkeypatch.setattr(hardware, "can_watch", lambda device: True)
    monkeypatch.setattr(hardware, "busy_seconds", busy)
    run(composed(*SMALL, f"results_dir={tmp_path}", "method=icecache", "budget=64"))
    (record,) = records(tmp_path)
    assert len(record["output_ids"]) == 8 and latency.WATCHED == 8
    assert record["hardware"]["python_ms"] == pytest.approx(record["tpot_ms"]["mean"] - 1 / 8)


def test_stored_outputs_are_scored_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(composed(*SMALL, f"results_dir={tmp_path}", "method=full"))
    capsys.readouterr()
    assert score([str(tmp_path), "--json"]) == 0
    assert "completed" in capsys.readouterr().out


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """A timed sample collects garbage before it begins: what other files' tests left need not be looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms with three cells each, one in two runs; one that is filled; and one of another task."""
    folder = tmp_path_factory.mktemp("results")

    def go(*words: str) -> None:
        run(composed(*SMALL, f"results_dir={folder}", *words))

    go("method=full", "task.batch=[1,2]")
    go("method=icecache", "budget=64", "task.batch=[1,2]")
    for method in ("full", "icecache"):
        go(f"method={method}", "budget=64", "task.lengths=[500]", "task.batch=[1]")
    go("method=icecache", "budget=64", "task.prefill=false", "task.keys=synthetic_attention")
    run(composed("model=dummy-tiny", "task.lengths=[300]", "task.limit=2", f"results_dir={folder}", "method=full"))
    return folder


def of_two_cells(runs: Runs, method: str) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """The cells and the samples of the run of a method that has two of them."""
    (run,) = (run for run in runs if run.arm["method"] == method and run.arm["n"] == 2 and run.is_timed)
    return run.cells, run.samples()


def table(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    capsys.readouterr()
    assert report([str(folder), "--format", "csv", *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.slow
def test_a_report_has_a_line_for_each_cell_and_arm(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(results, capsys, "--where", "task=latency")
    assert {line["table"] for line in lines} == {*TABLES}, "and no score"
    times = [line for line in lines if line["table"] == "latency"]
    assert [(line["tokens"], line["batch"], line["method"], line["prefill"]) for line in times] == [
        ("300", "1", "full", "true"),
        ("300", "1", "icecache", "true"),
        ("300", "1", "icecache", "false"),
        ("300", "2", "full", "true"),
        ("300", "2", "icecache", "true"),
        ("500", "1", "full", "true"),
        ("500", "1", "icecache", "true"),
    ]
    assert [line["ttft_s"] == "" for line in times] == [line["prefill"] == "false" for line in times]
    for line in times:
        ratio = float(line["tpot_ms_p50"]) / float(line["floor_ms"])
        assert float(line["floor_ratio"]) == pytest.approx(ratio)
        assert ("e" in line["marks"]) == (line["method"] == "icecache")


def test_the_line_of_a_cell_is_what_its_samples_measured(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = collect([results])
    (full,) = (run for run in runs if run.arm["method"] == "full" and run.is_timed and len(run.cells) > 1)
    samples = {sample["meta"]["batch"]: sample for sample in full.samples()}
    lines = table(results, capsys, "--where", "task=latency", "--where", "method=full", "--where", "task.lengths=[300]")
    for line in lines:
        sample = samples[int(line["batch"])]
        if line["table"] == "latency":
            assert float(line["tpot_ms_p50"]) == sample["tpot_ms"]["p50"]
            assert float(line["floor_ms"]) == sample["hardware"]["floor_ms"]
        if line["table"] == "latency_bytes":
            assert float(line["memory_bytes"]) == sample["hardware"]["memory_bytes"] and "a" in line["marks"]
        if line["table"] == "latency_parts":
            head = "breakdown_ms."
            parts = {
                name.removeprefix(head): float(line[name]) for name in line if name.startswith(head) and line[name]
            }
            assert parts.items() <= sample["breakdown_ms"].items() and set(parts) >= {"model", "attention", "other"}
            assert float(line["tpot_ms_mean"]) == sample["tpot_ms"]["mean"]
            assert float(line["floor_ms"]) == sample["hardware"]["floor_ms"]


def test_what_is_made_is_said(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(results), "--where", "task=latency"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "keys=synthetic_attention: synthetic keys and queries" in told
    assert (
        "prefill=false: stores were filled" in told
        and f"over the bandwidth of a copy ({machine.name_of(torch.device('cpu'))}, 1 threads:" in told
    )
    assert report([str(results), "--where", "method=full", "--where", "task=latency"]) == 0
    assert "are made" not in capsys.readouterr().out


def test_scored_runs_keep_their_table(results: Path) -> None:
    scored, *timed = summary(collect([results]))
    assert scored.id == "summary" and scored.rows == [("dummy-tiny", "passkey", "full", "-")]
    assert [one.id for one in timed] == TABLES
    assert "summary" not in {one.id for one in summary(collect([results]), ["task=latency"])}


def test_any_value_can_be_asked_for(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--rows",
        "method",
        "--columns",
        "task.lengths",
        "--where",
        "task.batch=[1]",
        "--where",
        "task.prefill=true",
    ]
    (one, other) = table(results, capsys, *words, "--values", "floor_ms,floor_ratio,memory_bytes,whole_kv_bytes")
    assert (one["method"], other["method"]) == ("full", "icecache")
    assert float(one["whole_kv_bytes"]) == float(other["whole_kv_bytes"]) > float(other["memory_bytes"]) * 0


def test_runs_by_an_older_kvbench_have_no_floor_and_still_load(results: Path, tmp_path: Path) -> None:
    (path,) = results.glob("runs/passkey/*/*/*")
    copied = tmp_path / "runs" / "passkey" / "dummy-tiny" / "full" / path.name
    copied.mkdir(parents=True)
    for file in ("run.yaml", "samples.jsonl", "status.json", "summary.json"):
        (copied / file).write_bytes((path / file).read_bytes())
    assert "hardware" not in json.loads((copied / "summary.json").read_text())
    runs = collect([tmp_path])
    assert not runs[0].is_timed and runs[0].arm["floor_ratio"] is None


def test_the_picture_has_a_panel_for_each_cell_with_its_floor(results: Path) -> None:
    runs = collect([results])
    figure = figures.draw("latency", runs)
    titles = [axis.texts[-1].get_text() for axis in figure.axes[::3]]
    # that of other keys has a single bar, which nothing stands beside
    assert [title.partition(": ")[2] for title in titles] == [
        "300 tokens, batch 1, keys of model",
        "300 tokens, batch 2, keys of model",
        "500 tokens, batch 1, keys of model",
    ]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["Full", "IceCache 64"]
    assert {"floor", "attention"} <= {text.get_text() for text in figure.legends[0].get_texts()}
    parts = figure.axes[2]
    (floors,) = (lines for lines in parts.collections if lines.get_label() == "floor")
    cells = {run.arm["method"]: run.cells for run in runs if run.is_timed and len(run.cells) > 1}
    here = f"{machine.name_of(torch.device('cpu'))}, 1 threads"
    expected = [cells[method][300, 1, here]["floor_ms"] for method in ("full", "icecache")]
    assert [segment[0][0] for segment in floors.get_segments()] == expected
    with pytest.raises(ConfigError, match="no run"):
        figures.draw("budget", runs.only(run for run in runs if run.is_timed))


def test_times_of_ours_stand_beside_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the run at the figure's own length, the parts that its bars name."""
    parts = {"query": 5, "select": 1, "transfer": 15, "attention": 10, "model": 20, "index_update": 2, "insert": 3}
    for length, more in ((36000, 0), (4096, 500)):
        one = report_runs.timed(length, 57.0 + more, breakdown_ms={**parts, "other": 1.0 + more})
        options = {"lengths": [length], "keys": "synthetic_attention", "prefill": True}
        report_runs.stored(
            tmp_path, "icecache", 256, [one], task="latency", model="llama3.1-8b-instruct", options=options
        )
    assert report([str(tmp_path), "--paper", "icecache_fig7c", "--format", "csv"]) == 0
    lines = {line["column"]: line for line in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    ours = {column: float(line["score"]) for column, line in lines.items()}
    assert ours == pytest.approx(
        {"query s": 0.006, "decode s": 0.030, "loading s": 0.015, "other s": 0.006, "total s": 0.057}
    )
    assert float(lines["total s"]["difference"]) == pytest.approx(0.057 - 0.11)
    assert lines["total s"]["timed_on"] == "cpu, 1 threads"


@pytest.mark.slow
def test_the_command_line_sweeps_it(tmp_path: Path) -> None:
    words = ["task.lengths=[200],[300]", "method=full,snapkv", "budget=64"]
    assert cli.main(["-m", *over(SMALL, words), f"results_dir={tmp_path}"]) == 0
    found = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/latency/*/*/*/run.yaml")]
    assert len(found) == 4 and not any("shared_prefill" in one["identity"] for one in found)
    composed(*SMALL)


# -- a GPU that is not there -------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twin]:
    """The twin of a CUDA device, whose bandwidth is measured with small buffers."""
    monkeypatch.setitem(hardware.COPIED, "cuda", 2**12)
    monkeypatch.setattr(hardware, "UPLOADED", 2**12)
    hardware.bandwidth.cache_clear()
    with device() as cuda:
        yield cuda
    hardware.bandwidth.cache_clear()


@pytest.mark.parametrize(
    ("name", "prefill"),
    [
        ("quest", "false"),
        ("icecache", "true"),
        *slow(("full", "true"), ("pariskv", "false")),
    ],
)
def test_a_gpu_has_peaks_and_a_busy_time(name: str, prefill: str, cuda: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "busy_seconds", lambda call, device: (call(), 1e-3)[1])
    words = (*SMALL, f"method={name}", "budget=64", "task.keys=synthetic_attention", f"task.prefill={prefill}")
    config = other(composed(*words, "task.lengths=[600]"), device="cuda", dtype="float32")
    arm = prepare(config)
    (record,) = PromptJob(arm, [prompt_of(arm, next(iter(arm.task.samples(arm.loaded.tokenizer, 0))))]).run()
    told = record["hardware"]
    assert record["error"] is None and len(record["output_ids"]) == 8
    assert told["memory"] == "allocated" and told["upload_bandwidth"] > 0
    assert told["weight_bytes"] < told["memory_bytes"] <= told["prefill_memory_bytes"]
    if name == "full":
        assert told["memory_bytes"] > told["weight_bytes"] + told["whole_kv_bytes"]
    if name in ("icecache", "pariskv"):
        assert told["memory_bytes"] < told["weight_bytes"] + told["whole_kv_bytes"]
    assert told["python_ms"] == pytest.approx(record["tpot_ms"]["mean"] - 1 / 8)


@pytest.mark.slow
def test_batches_and_lengths_on_a_gpu_make_its_figures_and_take_the_memory_that_was_estimated(
    cuda: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_twin.install(monkeypatch)
    flashinfer_twin.take_small_models(monkeypatch)
    flashinfer.workspace.cache_clear()  # which is of this device, too
    monkeypatch.setattr(machine, "_spent", lambda: None)  # figures leave out what was disturbed
    monkeypatch.setattr(hardware, "busy_seconds", lambda call, device: (call(), 1e-3)[1])
    words = over(SMALL, ["task.lengths=[300,600]", "task.batch=[1,16]", "budget=64", f"results_dir={tmp_path}"])
    for method in ("full", "snapkv"):
        run(other(composed(*words, f"method={method}"), device="cuda", dtype="float32"))
    runs = collect([tmp_path])
    for name in ("capacity", "breakeven"):
        figures.write(figures.draw(name, runs), tmp_path / f"{name}.png")
    node = shipped("model", "dummy-tiny")
    assert node is not None
    (full,) = (run for run in runs if run.arm["method"] == "full")
    for sample in full.samples():
        length, rows = sample["meta"]["length"], sample["meta"]["batch"]
        prompts = Prompts(length + len(sample["output_ids"]), rows)
        estimate = Footprint.of(ModelCard.of(node["config"]), torch.float32, prompts)
        assert estimate is not None
        # on top: what a step computes, and whole pages
        taken = sample["hardware"]["memory_bytes"] - flashinfer.WORKSPACE
        assert 1 <= taken / (estimate.weights + estimate.cache) <= 1.15


def test_synthetic_keys_make_no_step_wait(cuda: Twin) -> None:
    """They were made before: a step takes them from where they are."""
    shape = Shape(2, 4, 2, 16, (100,), torch.float32, torch.device("cuda:0"), 0.25, (0, 1))
    engine = SyntheticEngine(shape, method_named("full"), Budget(None), new_tokens=3)
    engine.fill_prompt([[1] * 100])
    one = torch.zeros(1, 4, 1, 16, device="cuda")
    for _ in range(3):
        engine.start_step(torch.zeros(1, dtype=torch.int64))
        with cuda.no_sync():
            for layer in range(2):
                engine.attend(layer, one, one[:, :2], one[:, :2])
