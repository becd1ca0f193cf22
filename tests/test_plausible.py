"""Numbers that cannot be reach no table: whoever reads runs names the sample, the key and its value, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import record, stored

from kvbench.cli import score, status
from kvbench.cli.report import main as report
from kvbench.cli.submit import main as submit
from kvbench.config import shipped
from kvbench.report.data.frame import collect
from kvbench.runs import stored as reading
from kvbench.runs.stored import ResultsError, json_of, read_run_yaml

PASSKEY = {"config": {"metric": "accuracy", "task": shipped("task", "passkey")}}
STEPS = {"kl": [0.5, 0.7], "nll": [2.0, 2.0], "nll_full": [1.9, 1.9]}


def audit(**more: Any) -> dict[str, Any]:
    return {"audit": {**record("", "", 1.0)["audit"], "budget": 64, **more}}


# What a sample of 1,024 tokens under a budget of 64 cannot be, and what the reason names.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a score above 1": ({"scores": {"accuracy": 2}}, "scores.accuracy=2"),
    "a score below 0": ({"scores": {"accuracy": 1, "other": -0.5}}, "scores.other=-0.5"),
    "more entries than are countable": (audit(attended_mean=1e18, attended_max=10**18), "audit.attended_mean=1e+18"),
    "more entries than tokens": (audit(attended_mean=5000.0, attended_max=5000), "audit.attended_max=5000"),
    "a mean above the most": (audit(attended_mean=97.0), "audit.attended_mean=97"),
    "a mean below 0": (audit(attended_mean=-3), "audit.attended_mean=-3"),
    "a mean of no entry": (audit(attended_mean=0.1), "audit.attended_mean=0.1"),
    "a spread above the most": (audit(attended_std=200.0), "audit.attended_std=200"),
    "bytes below 0": (audit(device_kv_bytes=-(10**12)), "audit.device_kv_bytes=-1"),
    "bytes of no machine": (audit(index_bytes=2**62), "audit.index_bytes="),
    "a part of a byte": (audit(host_bytes=1234.567), "audit.host_bytes=1234.567"),
    "less room than is held": (audit(device_kv_allocated_bytes=2**19), "audit.device_kv_allocated_bytes="),
    "another run's budget": (audit(budget=128), "audit.budget=128"),
    "a share above 1": (audit(dense_share=1.5), "audit.dense_share=1.5"),
    "a time below 0": ({"tpot_ms": {"mean": -4.0}}, "tpot_ms.mean=-4"),
    "a time of ages": ({"ttft_s": 1e18}, "ttft_s=1e+18"),
    "tokens below 0": ({"prompt_tokens": -5}, "prompt_tokens=-5"),
    "more recall than all": ({"probe": {"recall": 7.0}}, "probe.recall=7"),
    "a KL that its steps have not": ({"fidelity": {"kl_mean": 0.1, "steps": STEPS}}, "fidelity.kl_mean=0.1"),
    "a KL below 0": ({"fidelity": {"kl_mean": -0.1}}, "fidelity.kl_mean=-0.1"),
}


def attended(mean: float, **identity: Any) -> dict[str, Any]:
    return {"samples": [record("s", "", 1.0, **audit(attended_mean=mean))], **identity}


OF_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "a budget below 0": ({"budget": -64}, "budget=-64"),
    "a budget beyond any prompt": ({"budget": 10**12}, "budget=1000000000000"),
    "more than C where all counts": (attended(80.0, protocol={"accounting": "unified"}), "audit.attended_mean=80"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_sample_that_cannot_be_leaves_its_run_out_by_name(case: str, tmp_path: Path) -> None:
    more, said = IMPOSSIBLE[case]
    stored(tmp_path, "snapkv")
    stored(tmp_path, "quest", samples=[record("a", "", 1.0), record("odd", "", 1.0, **more)])
    runs = collect([tmp_path])
    assert [run.arm["method"] for run in runs] == ["snapkv"]
    assert "sample odd" in runs.skipped[0].why and said in runs.skipped[0].why


@pytest.mark.parametrize("case", OF_RUNS)
def test_a_run_whose_settings_its_numbers_cannot_have_is_left_out(case: str, tmp_path: Path) -> None:
    more, said = OF_RUNS[case]
    line = record("s", "", 1.0, **audit())
    stored(tmp_path, "snapkv")
    stored(tmp_path, "quest", **{"samples": [line], **more})
    runs = collect([tmp_path])
    assert [run.arm["method"] for run in runs] == ["snapkv"] and said in runs.skipped[0].why


def test_a_failed_sample_may_have_counted_anything(tmp_path: Path) -> None:
    stored(tmp_path, samples=[record("a", "", None, error="out of memory", **audit(attended_mean=0.0))])
    assert not collect([tmp_path]).skipped


@pytest.mark.parametrize("main", [report, score.main, submit])
def test_every_command_that_reads_samples_names_the_run(
    main: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = stored(tmp_path / "runs", "quest", samples=[record("a", "", 1.0, **audit(attended_mean=-3))], **PASSKEY)
    assert main([str(tmp_path / "runs")]) in (1, 2)
    told = "".join(capsys.readouterr())
    assert bad.name in told and "audit.attended_mean=-3" in told and "Traceback" not in told


def test_a_folder_under_another_name_is_left_out(tmp_path: Path) -> None:
    folder = stored(tmp_path, "quest")
    shutil.copytree(folder, folder.with_name("0123456789ab"))
    runs = collect([tmp_path])
    assert len(runs.arms) == 1 and [path.name for path, _ in runs.skipped] == ["0123456789ab"]


def test_a_run_is_itself_by_whichever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(tmp_path, "quest")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for path in (Path(), tmp_path / "link", folder / "..", folder / "." / ".." / folder.name):
        assert len(collect([path]).arms) == 1, path


def test_one_sample_with_two_scores_is_named_and_may_be_scored_anew(tmp_path: Path) -> None:
    folder = stored(tmp_path, "quest", samples=[record("a", "", 0.0), record("b", "", 0.0)])
    file = folder / "samples.jsonl"
    first = json.loads(file.read_text().splitlines()[0])
    for mark, left_out in (({}, 1), ({"rescored": {"task": "x"}}, 0)):
        again = json.dumps({**first, "scores": {"accuracy": 1.0}, **mark}) + "\n"
        file.write_text("".join([*file.read_text().splitlines(keepends=True)[:2], again]))
        found = collect([tmp_path]).skipped
        assert len(found) == left_out and all("second answer of a" in why for _, why in found)


def test_a_key_that_stands_twice_is_refused_in_json_and_in_yaml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score: there twice"):
        json_of(b'{"scores": {"score": 0, "score": 1}}')
    folder = stored(tmp_path, "quest")
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("    budget: 64\n", "    budget: 64\n    budget: 32\n", 1))
    with pytest.raises(ResultsError, match="budget: there twice"):
        read_run_yaml(folder)


def test_status_leaves_out_counts_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, "snapkv")
    folder = stored(tmp_path, "quest")
    said = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**said, "done": -5}))
    assert status.main([str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 1 and "done=-5" in told.err and folder.name in told.err


# -- bounds of time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x: [" + "[]," * 10**6 + "]", "- a\n" * 10**6, "x: {" + "a: b," * 10**6 + "}"])
def test_a_run_yaml_of_a_million_values_is_refused_before_it_is_read(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.yaml, "load", pytest.fail)
    (tmp_path / "run.yaml").write_text(f"format: 1\n{text}\n"[: 2**22])
    with pytest.raises(ResultsError, match="run.yaml has some .* values; expected at most"):
        read_run_yaml(tmp_path)


# -- what may not be read ----------------------------------------------------------------------------------------------

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Do something as a user who may not read what its owner alone may; where we are no root, as ourselves."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("main", [report, status.main, score.main])
def test_what_may_not_be_read_is_named_and_the_rest_shown(
    main: Callable[[list[str]], int], open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = open_folder / "results"
    stored(results, "snapkv", **PASSKEY)
    closed = stored(results, "quest", **PASSKEY).parent
    assert main([str(results)]) == 0  # what it imports is there before we are somebody else
    for mode in (0o000, 0o400, 0o100):
        closed.chmod(mode)
        capsys.readouterr()
        with as_nobody():
            code = main([str(results)])
        told = capsys.readouterr().err
        assert code == (2 if main is score.main else 0), told
        assert str(closed) in told and "Permission denied" in told and "Traceback" not in told
    results.chmod(0o000)
    with as_nobody():
        assert main([str(results)]) == 2
    told = capsys.readouterr().err
    assert "Permission denied" in told and told.count("\n") == 1
    for folder in (results, closed):
        folder.chmod(0o755)
