"""Claims about run folders: nothing finished is lost, nothing is there twice, and JSON stays strict JSON."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbench
from kvbench.runs import folder as results
from kvbench.runs.folder import ResultsError, RunFolder
from kvbench.runs.identity import run_id
from kvbench.runs.summary import summarise

IDENTITY = {"method": "quest", "budget": 64, "protocol": "abc"}
CHECKOUT = Path(kvbench.__file__).parents[1]


def opened(results_dir: Path | str, identity: dict = IDENTITY) -> RunFolder:
    return RunFolder.open(results_dir, "passkey", "tiny", "quest-64", identity, {"budget": 64, "seed": 0})


def written(results_dir: Path | str, *records: dict) -> Path:
    """A folder into which these records were added; its path."""
    with opened(results_dir) as folder:
        for record in records:
            folder.add(record)
    return folder.path


def lines(path: Path) -> list[dict]:
    """samples.jsonl, every line of which must be whole and strict JSON."""
    data = (path / "samples.jsonl").read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]


def status(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Identity

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_run_id_of_a_known_identity_never_changes():
    assert run_id({"method": "quest", "budget": 64}) == "5edb2c6ad2f8"


@given(st.dictionaries(st.text(), JSON, max_size=5), st.randoms())
def test_the_run_id_does_not_depend_on_key_order(identity, shuffler):
    items = list(identity.items())
    shuffler.shuffle(items)
    assert run_id(dict(items)) == run_id(identity)


def test_run_ids_tell_values_and_types_apart():
    identities = [{"budget": value} for value in (1, 1.0, 0.1, True, None, "1", [1])] + [{"budgets": 1}, {}]
    assert len({run_id(identity) for identity in identities}) == len(identities)


def test_an_identity_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError):
        run_id({"budget": math.nan})


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def test_a_run_is_written_and_read_back(tmp_path):
    record = {"id": "a", "output": "snow \u2603\u2028\n", "scores": {"accuracy": 1.0}, "error": None}
    with opened(tmp_path) as folder:
        assert folder.path == tmp_path / "runs" / "passkey" / "tiny" / "quest-64" / run_id(IDENTITY)
        assert status(folder.path)["state"] == "running"
        folder.add(record)
        folder.finish({"score": 100.0})
    assert lines(folder.path) == [record]
    assert json.loads((folder.path / "summary.json").read_text()) == {"score": 100.0}
    run = yaml.safe_load((folder.path / "run.yaml").read_text())
    assert run["identity"] == IDENTITY and run["config"] == {"budget": 64, "seed": 0} and run["format"] == 1
    with opened(tmp_path) as folder:
        assert folder.done == folder.records == {"a": record}


def test_status_says_running_stopped_interrupted_or_finished_with_counts(tmp_path):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path) as folder:
        folder.add({"id": "a"})
        folder.add({"id": "b", "error": "out of memory"})
        raise KeyboardInterrupt
    first = status(folder.path)
    assert (first["state"], first["done"], first["failed"]) == ("stopped", 1, 1)
    with pytest.raises(RuntimeError), opened(tmp_path):
        raise RuntimeError
    assert status(folder.path)["state"] == "interrupted"
    with opened(tmp_path) as folder:
        assert status(folder.path)["state"] == "running"
        folder.add({"id": "b"})
        folder.finish({})
    last = status(folder.path)
    assert (last["state"], last["done"], last["failed"]) == ("finished", 2, 0)
    assert last["started"] == first["started"] <= last["updated"]


def test_a_sample_that_failed_is_kept_and_runs_again(tmp_path):
    failed, solved = {"id": "a", "error": "NaN logits"}, {"id": "a", "error": None, "output": "7"}
    written(tmp_path, failed, {"id": "b"})
    with opened(tmp_path) as folder:
        assert set(folder.done) == {"b"} and folder.records["a"] == failed
        folder.add(solved)
        assert folder.done["a"] == solved
    with opened(tmp_path) as folder:
        assert folder.records == folder.done == {"a": solved, "b": {"id": "b"}}


def test_the_newest_line_of_an_id_wins(tmp_path):
    written(tmp_path, {"id": "a", "output": "old"}, {"id": "a", "error": "worse"})
    with opened(tmp_path) as folder:
        assert folder.done == {} and folder.records == {"a": {"id": "a", "error": "worse"}}


def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path):
    path = written(tmp_path, {"id": "a"}, {"id": "b"})
    with open(path / "samples.jsonl", "ab") as file:
        file.write(b'{"id": "c", "outp')
    with opened(tmp_path) as folder:
        assert set(folder.done) == {"a", "b"}
        folder.add({"id": "d"})
    assert [line["id"] for line in lines(path)] == ["a", "b", "d"]


def test_a_last_line_of_zeros_is_dropped_as_after_a_power_cut(tmp_path):
    path = written(tmp_path, {"id": "a"})
    with open(path / "samples.jsonl", "ab") as file:
        file.write(b"\0" * 20 + b"\n")
    written(tmp_path, {"id": "b"})
    assert [line["id"] for line in lines(path)] == ["a", "b"]


@pytest.mark.parametrize("damage", [b"{]", b"[]", b'{"no": "id"}', b"\xff"])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_changed(tmp_path, damage):
    path = written(tmp_path, {"id": "a"}, {"id": "b"})
    data = (path / "samples.jsonl").read_bytes()
    (path / "samples.jsonl").write_bytes(damage + b"\n" + data)
    with pytest.raises(ResultsError, match="line 1 is damaged"):
        opened(tmp_path)
    assert (path / "samples.jsonl").read_bytes() == damage + b"\n" + data
    (path / "samples.jsonl").write_bytes(data)
    with opened(tmp_path) as folder:  # the refusal did not keep the lock
        assert set(folder.done) == {"a", "b"}


OUTPUTS = st.lists(st.text(max_size=6), min_size=1, max_size=5)  # no half characters, which no tokenizer makes


@settings(max_examples=30)
@given(OUTPUTS, st.data())
def test_cutting_the_file_anywhere_loses_no_whole_line_and_appending_stays_valid(outputs, data):
    records = [{"id": str(number), "output": output} for number, output in enumerate(outputs)]
    with tempfile.TemporaryDirectory() as results_dir:
        path = written(results_dir, *records) / "samples.jsonl"
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)), label="cut")
        path.write_bytes(whole[:cut])
        kept = records[: whole[:cut].count(b"\n")]
        new = {"id": "new", "output": data.draw(st.text(max_size=6), label="new")}
        with opened(results_dir) as folder:
            assert list(folder.records.values()) == kept
            folder.add(new)
        assert lines(path.parent) == [*kept, new]


def test_a_write_that_fails_half_way_leaves_no_trace(tmp_path, monkeypatch):
    write = os.write

    def full_disk(descriptor, data):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:20])

    with opened(tmp_path) as folder:
        folder.add({"id": "a"})
        with monkeypatch.context() as patch:
            patch.setattr(results.os, "write", full_disk)
            with pytest.raises(ResultsError, match=r"No space left on device.*results_dir"):
                folder.add({"id": "b", "output": "x" * 30})
        assert set(folder.records) == {"a"}
        folder.add({"id": "c"})
    assert [line["id"] for line in lines(folder.path)] == ["a", "c"]


def test_summary_is_there_only_while_it_covers_every_sample(tmp_path):
    with opened(tmp_path) as folder:
        folder.add({"id": "a"})
        folder.finish({"n": 1})
    with opened(tmp_path):
        assert (folder.path / "summary.json").exists()  # opened to read: still true
    with opened(tmp_path) as folder:
        folder.add({"id": "b"})
        assert not (folder.path / "summary.json").exists()
        folder.finish({"n": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == {"n": 2}


def test_nan_and_infinity_become_null(tmp_path):
    with opened(tmp_path) as folder:
        folder.add({"id": "a", "ttft_s": math.nan, "audit": {"attended_mean": [math.inf, (1, -math.inf)]}})
        folder.finish({"score": math.nan})
    assert lines(folder.path) == [{"id": "a", "ttft_s": None, "audit": {"attended_mean": [None, [1, None]]}}]
    assert json.loads((folder.path / "summary.json").read_text()) == {"score": None}


@pytest.mark.parametrize("record", [{}, {"id": 3}])
def test_a_record_that_could_not_be_read_back_is_refused_unwritten(tmp_path, record):
    with opened(tmp_path) as folder, pytest.raises(ValueError, match="'id'"):
        folder.add(record)
    assert lines(folder.path) == []


@pytest.mark.parametrize("odd", [{"meta": {"n": 2**64}}, {"answers": ["\ud83d"]}, {"prompt_tokens": 3.0}])
def test_a_record_that_the_next_start_would_not_take_is_refused_and_the_others_stay(tmp_path, odd):
    with opened(tmp_path) as folder:
        folder.add({"id": "a"})
        with pytest.raises(ResultsError, match="the record of b could not be read back"):
            folder.add({"id": "b", **odd})
    with opened(tmp_path) as folder:
        assert [*folder.records] == ["a"] == [line["id"] for line in lines(folder.path)]


def test_a_whole_last_line_that_is_no_record_is_named_and_not_cut_off(tmp_path):
    path = written(tmp_path, {"id": "a"})
    with (path / "samples.jsonl").open("ab") as file:
        file.write(b'{"id": "b", "n": 18446744073709551616}\n')
    with pytest.raises(ResultsError, match="line 2 is damaged"):
        opened(tmp_path)
    assert len((path / "samples.jsonl").read_bytes().splitlines()) == 2


def made_by(results_dir: Path, limit: int | None, version: str, *ids: str) -> dict:
    """The config in run.yaml after a start of this version that ran these samples."""
    config = {"task": {"limit": limit}, "versions": {"torch": version}}
    with RunFolder.open(results_dir, "passkey", "tiny", "quest-64", IDENTITY, config) as folder:
        folder.expect(limit or 9)
        for id in ids:
            folder.add({"id": id})
    return yaml.safe_load((folder.path / "run.yaml").read_text())["config"]


def test_a_start_that_ran_nothing_leaves_what_the_run_says_of_itself(tmp_path):
    assert made_by(tmp_path, 3, "1", "a", "b", "c") == {"task": {"limit": 3}, "versions": {"torch": "1"}}
    assert made_by(tmp_path, 1, "2") == {"task": {"limit": 3}, "versions": {"torch": "1"}}
    assert made_by(tmp_path, 4, "2") == {"task": {"limit": 4}, "versions": {"torch": "1"}}
    assert made_by(tmp_path, None, "2", "d") == {"task": {"limit": None}, "versions": {"torch": "2"}}
    assert made_by(tmp_path, 1, "3", "a") == {"task": {"limit": None}, "versions": {"torch": "3"}}


def test_an_empty_run_yaml_is_as_none(tmp_path):
    path = written(tmp_path, {"id": "a"})
    (path / "run.yaml").write_text("")
    assert written(tmp_path) == path
    assert yaml.safe_load((path / "run.yaml").read_text())["run_id"] == path.name


def test_other_identities_get_other_folders(tmp_path):
    written(tmp_path, {"id": "a"})
    with opened(tmp_path, IDENTITY | {"budget": 128}) as folder:
        assert folder.records == {}


def test_names_become_single_path_components(tmp_path):
    with RunFolder.open(tmp_path, "passkey", "org/name", "../quest 64", {}, {}) as folder:
        assert folder.path.relative_to(tmp_path).as_posix() == f"runs/passkey/org-name/-quest-64/{run_id({})}"


@pytest.mark.parametrize("text", ["format: 999\n", "format: [", "nothing\n"])
def test_a_folder_of_another_version_is_refused_untouched(tmp_path, text):
    path = written(tmp_path, {"id": "a"})
    (path / "run.yaml").write_text(text)
    with pytest.raises(ResultsError, match=r"holds results of format (999|unknown).* writes format 1: .*results_dir"):
        opened(tmp_path)
    assert (path / "run.yaml").read_text() == text


def test_a_results_dir_that_cannot_be_written_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write results to .*file.*results_dir"):
        opened(tmp_path / "file")


# ---------------------------------------------------------------------------------------------------------------------
# Two processes, and kill -9

WRITER = """
import sys, time
from kvbench.runs.folder import RunFolder
total, pause = int(sys.argv[2]), float(sys.argv[3])
with RunFolder.open(sys.argv[1], "passkey", "tiny", "quest-64", {identity!r}, {{}}) as folder:
    print("open", flush=True)
    for number in range(total):
        if str(number) not in folder.done:
            time.sleep(pause)
            folder.add({{"id": str(number), "output": "x" * 5000 + str(number)}})
    folder.finish({{"n": len(folder.records)}})
"""


def writer(results_dir: Path, total: int, pause: float) -> subprocess.Popen:
    """A process that adds samples 0 .. total-1, returned once it holds the folder."""
    code = WRITER.format(identity=IDENTITY)
    arguments = [sys.executable, "-c", code, str(results_dir), str(total), str(pause)]
    process = subprocess.Popen(arguments, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_process_is_refused_and_told_by_whom_and_kill_9_frees_the_folder(tmp_path):
    holder = writer(tmp_path, total=1, pause=60)
    try:
        with pytest.raises(ResultsError, match=rf"quest-64/{run_id(IDENTITY)} is in use by process {holder.pid} on "):
            opened(tmp_path)
    finally:
        kill(holder)
    with opened(tmp_path) as folder:
        assert folder.records == {}


def test_one_process_cannot_open_a_folder_twice(tmp_path):
    with opened(tmp_path), pytest.raises(ResultsError, match=f"in use by process {os.getpid()}"):
        opened(tmp_path)


@pytest.mark.slow
def test_after_random_kills_every_sample_is_there_exactly_once(tmp_path):
    total, moments = 600, random.Random(3)
    path = tmp_path / "runs" / "passkey" / "tiny" / "quest-64" / run_id(IDENTITY)
    for _ in range(8):
        process = writer(tmp_path, total, pause=0.003)
        time.sleep(moments.uniform(0, 0.12))
        kill(process)
        assert status(path)["state"] == "running" and not (path / "summary.json").exists()
    assert writer(tmp_path, total, pause=0).communicate() and status(path)["state"] == "finished"
    found = lines(path)
    assert sorted(int(line["id"]) for line in found) == list(range(total))
    assert all(line["output"] == "x" * 5000 + line["id"] for line in found)
    assert json.loads((path / "summary.json").read_text()) == {"n": total}


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def sample(number: int, score: float, **more: object) -> dict:
    return {"id": str(number), "scores": {"accuracy": score}, "error": None} | more


def failure(number: int, **more: object) -> dict:
    return {"id": str(number), "scores": {}, "error": "out of memory"} | more


def test_a_failed_sample_counts_zero_and_score_ok_leaves_it_out():
    summary = summarise([sample(0, 1.0), sample(1, 0.5), failure(2)], "accuracy")
    assert summary["score"] == pytest.approx(50.0) and summary["score_ok"] == 75.0
    assert (summary["n"], summary["failed"]) == (3, 1)
    # Scores 1, 0.5, 0: standard deviation 0.5, of the mean 0.5 / sqrt(3), x 100.
    assert summary["stderr"] == pytest.approx(100 * 0.5 / math.sqrt(3))


def test_every_score_has_its_own_mean_over_the_samples_that_have_it():
    """And over those that failed, which may have had it."""
    records = [sample(0, 1.0), sample(1, 0.0), failure(2), failure(3)]
    records[0]["scores"]["f1"] = 0.5
    assert summarise(records, "accuracy")["scores"] == {"accuracy": 25.0, "f1": pytest.approx(50 / 3)}


def test_a_score_of_some_groups_is_a_mean_over_those():
    records = [
        sample(0, 1.0, group="qa"),
        sample(1, 0.5, group="code"),
        failure(2, group="code"),
        failure(3, group="qa"),
    ]
    records[1]["scores"]["code_sim"] = 0.5
    assert summarise(records, "accuracy")["scores"] == {"accuracy": 37.5, "code_sim": 25.0}


def test_groups_are_there_if_there_are_several():
    records = [sample(0, 1.0, group="4096"), sample(1, 0.0, group="8192"), failure(2, group="4096")]
    summary = summarise(records, "accuracy")
    assert summary["groups"] == {
        "4096": {"score": 50.0, "stderr": 50.0, "n": 2, "failed": 1},
        "8192": {"score": 0.0, "stderr": None, "n": 1, "failed": 0},
    }
    assert summary["macro"] == {"score": 25.0, "stderr": None}
    assert not {"groups", "macro"} & summarise(records[::2], "accuracy").keys()


def test_the_macro_mean_weighs_groups_alike():
    records = [sample(index, float(index % 2), group="long") for index in range(8)]
    records += [sample(8, 1.0, group="short"), sample(9, 1.0, group="short")]
    summary = summarise(records, "accuracy")
    assert summary["score"] == 60.0 and summary["macro"]["score"] == 75.0
    assert summary["macro"]["stderr"] == pytest.approx(summary["groups"]["long"]["stderr"] / 2)


def test_no_samples_and_nothing_but_failures_still_make_a_summary():
    assert summarise([], "accuracy")["score"] is None and summarise([], "accuracy")["n"] == 0
    summary = summarise([failure(0), failure(1)], "accuracy")
    assert (summary["score"], summary["score_ok"], summary["failed"]) == (0.0, None, 2)
    assert summary["scores"] == {"accuracy": 0.0} and summary["latency"]["ttft_s"] is None
    assert "audit" not in summary and "probe" not in summary
    json.dumps(summary, allow_nan=False)


def test_one_sample_has_no_standard_error():
    assert summarise([sample(0, 1.0)], "accuracy")["stderr"] is None


def test_latencies_are_means_over_samples_that_have_them():
    tpot = {"mean": 10.0, "p50": 9.0, "p95": 20.0}
    records = [
        sample(
            0,
            1.0,
            ttft_s=1.0,
            tt2t_s=1.5,
            prefill_ms={"index_build": 250.0},
            tpot_ms=tpot,
            breakdown_ms={"attention": 6.0, "select": 4.0},
        ),
        sample(1, 1.0, ttft_s=3.0, tpot_ms={"mean": 20.0}, breakdown_ms={"attention": 20.0}),
        sample(2, 1.0, ttft_s=math.nan),
        failure(3, ttft_s=100.0),
    ]
    latency = summarise(records, "accuracy")["latency"]
    assert latency == {
        "ttft_s": 2.0,
        "index_s": 0.25,
        "tt2t_s": 1.5,
        "tpot_ms_mean": 15.0,
        "tpot_ms_p50": 9.0,
        "tpot_ms_p95": 20.0,
        "breakdown_ms": {"attention": 13.0, "select": 2.0},
    }
    assert sum(latency["breakdown_ms"].values()) == latency["tpot_ms_mean"]


def test_the_audit_takes_peaks_of_bytes_means_of_amounts_and_any_of_flags():
    first = {
        "attended_mean": 60.0,
        "attended_max": 64,
        "budget": 64,
        "device_kv_bytes": 1000,
        "device_kv_allocated_bytes": 5000,
        "index_bytes": 10,
        "host_bytes": 0,
        "moved_bytes_per_step": 100.0,
        "over_rule": False,
        "executor": "torch",
    }
    second = first | {
        "attended_mean": 62.0,
        "attended_max": 63,
        "device_kv_bytes": 3000,
        "device_kv_allocated_bytes": 4000,
        "moved_bytes_per_step": 200.0,
        "over_rule": True,
    }
    assert summarise([sample(0, 1.0, audit=first), sample(1, 1.0, audit=second)], "accuracy")["audit"] == {
        "attended_mean": 61.0,
        "attended_max": 64,
        "budget": 64,
        "device_kv_bytes": 3000,
        "device_kv_allocated_bytes": 5000,
        "index_bytes": 10,
        "host_bytes": 0,
        "moved_bytes_per_step": 150.0,
        "over_rule": True,
        "executor": "torch",
    }


def test_budgets_of_a_fraction_are_averaged_and_missing_ones_are_absent():
    records = [sample(0, 1.0, audit={"budget": 10}), sample(1, 1.0, audit={"budget": 20}), sample(2, 1.0)]
    assert summarise(records, "accuracy")["audit"] == {"budget": 15.0}
    assert "audit" not in summarise([sample(0, 1.0, audit={"budget": None})], "accuracy")


def test_probe_means_leave_nested_values_to_the_sample_lines():
    records = [sample(0, 1.0, probe={"recall": 0.5, "layers": [1, 2]}), sample(1, 1.0, probe={"recall": 1.0})]
    assert summarise(records, "accuracy")["probe"] == {"recall": 0.75}


RECORDS = st.lists(
    st.fixed_dictionaries(
        {"id": st.text()},
        optional={
            "group": st.sampled_from(["a", "b"]),
            "scores": st.none() | st.dictionaries(st.sampled_from(["accuracy", "f1"]), st.none() | st.floats(0, 1)),
            "error": st.none() | st.just("failed"),
            "ttft_s": st.none() | st.floats(width=32),
            "tpot_ms": st.none() | st.dictionaries(st.sampled_from(["mean", "p50", "p95"]), st.floats(width=32)),
            "breakdown_ms": st.none() | st.dictionaries(st.sampled_from(["select", "other"]), st.floats(width=32)),
            "audit": st.none()
            | st.dictionaries(
                st.sampled_from(["attended_mean", "attended_max", "host_bytes", "over_rule"]),
                st.none() | st.booleans() | st.floats(width=32),
            ),
            "probe": st.none() | st.dictionaries(st.sampled_from(["recall", "mass"]), st.none() | st.floats(width=32)),
        },
    ),
    max_size=5,
)


@given(RECORDS, st.randoms())
def test_any_records_make_strict_json_and_their_order_changes_no_number(records, shuffler):
    summary = summarise(records, "accuracy")
    json.dumps(summary, allow_nan=False)
    assert set(summary) >= {"score", "score_ok", "scores", "n", "failed", "stderr", "latency"}
    shuffled = list(records)
    shuffler.shuffle(shuffled)
    assert summarise(shuffled, "accuracy") == summary
