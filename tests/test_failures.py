"""Failures as a user meets them: bad input from the command line, and what goes wrong while a run is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import slow

from kvbench.backends.backend import BACKENDS
from kvbench.backends.hf.loading import quick_in_bfloat16
from kvbench.cli import checks
from kvbench.cli import main as cli
from kvbench.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["task.lengths=[300]", "budget=64", "threads=1"]
ARM = ("passkey", "dummy-tiny", "icecache-64")


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """The command line within this process, where torch is loaded already: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        model = [] if any(word.startswith("model=") for word in words) else ["model=dummy-tiny"]
        code = cli.main([*SMALL, *model, *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def only_folder(results_dir: Path) -> Path:
    (file,) = results_dir.glob("runs/*/*/*/*/run.yaml")
    return file.parent


def records(results_dir: Path) -> dict[str, dict[str, Any]]:
    """The newest record of each sample."""
    lines = (only_folder(results_dir) / "samples.jsonl").read_text().splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- bad input, each with a process of its own ------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The one line that a command line is refused with, beside results that must stay as they are."""
    here, traps = tmp_path / "here", tmp_path / "traps"
    with RunFolder.open(here / "results", *ARM, {"seed": 7}, {}) as folder:
        folder.add({"id": "a", "error": None})
    (here / "file").touch()
    traps.mkdir()
    for module in ("torch", "transformers"):
        (traps / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')\n")

    def run(*words: str, **env: str) -> str:
        before = files(here)
        paths = os.pathsep.join([str(traps), str(ROOT)])
        # Nothing listens on the discard port, so the hub is out of reach wherever this runs.
        hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "no_proxy": "*"}
        done = subprocess.run(
            [sys.executable, "-m", "kvbench", *words],
            cwd=here,
            env=os.environ | {"PYTHONPATH": paths} | hub | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith("kvbench: ") and done.stderr.count("\n") == 1
        assert files(here) == before
        return done.stderr[len("kvbench: ") : -1]

    yield run


BAD = [
    ("method=qest", "method=qest: no such method; did you mean quest? ("),
    ("model=dumy-tiny", "model=dumy-tiny: no such model; did you mean dummy-tiny"),
    ("task=pasky", "task=pasky: no such task; did you mean passkey? ("),
    ("budgt=64", "budgt=64: no such key; did you mean budget? "),
    ("method.page_sise=8", "method.page_sise=8: no such key; did you mean page_size or small_page_size? "),
    ("method.split=half", "method.split=half: expected projection | greedy"),
    ("budget=0", "budget=0: out of range; expected tokens (256), "),
    ("budget=-5", "budget=-5: out of range; expected tokens (256), "),
    ("budget=lots", "budget=lots: not a number; expected tokens (256), "),
    ("budget=39", "budget=39: below the minimum of icecache, 40 tokens (protocol.accounting=paper)"),
    ("budget=1.5", "budget=1.5: out of range; expected tokens (256), a fraction of the prompt in (0, 1] (0.1), "),
    ("task.lengths=[40000]", "task.lengths=[40000]: 40000 tokens and 10 new ones do not fit the window of tiny"),
    ("model.path=/not/here", "model.path=/not/here: no such folder; expected a folder, or a hub id such as org/name"),
    ("model.path=org/name", "model.path=org/name: not in the local cache of the hub, and 127.0.0.1 does not answer; "),
    ("model=qwen3-8b", "model.path=Qwen/Qwen3-8B: not in the local cache of the hub, and 127.0.0.1 does not answer; "),
    (
        "task=longbench",
        "task.data_dir: zai-org/LongBench/data.zip is not in the local cache of the hub, and 127.0.0.1 ",
    ),
    ("task=gsm8k", "task.data_dir: openai/gsm8k/main/test-00000-of-00001.parquet is not in the local cache of the hub"),
    ("results_dir=file", "results_dir=file: cannot write in "),
    ("results_dir=/proc/none", "results_dir=/proc/none: cannot write in /proc"),
    ("protocol.dense_layers=[6]", "protocol.dense_layers=[6]: the model has layers 0 to 5, not [6]"),
    ("protocol.generated=maybe", "protocol.generated='maybe': one of free, counted"),
    ("probe.every=x", "probe.every=x: expected a whole number, 0 or more"),
]


# Each starts a process; the quick tests see one of a kind.
QUICK = ("budget=39", "model=qwen3-8b", "results_dir=file")


@pytest.mark.parametrize(
    ("word", "line"), [pytest.param(*one, id=one[0], marks=[pytest.mark.slow] * (one[0] not in QUICK)) for one in BAD]
)
def test_bad_input_is_one_line_and_loads_no_torch(refused: Callable[..., str], word: str, line: str) -> None:
    assert refused(word).startswith(line)


# -- one sample fails -------------------------------------------------------------------------------------------------

BACKEND: Any = type(BACKENDS["hf"])
generate = BACKEND.generate


def with_weights(value: float) -> Callable[..., Any]:
    """Generate with a model one of whose weights is `value`."""

    def broken(backend: Any, arm: Any, *more: Any) -> Any:
        weight = arm.loaded.model.model.norm.weight
        kept = weight[5].item()
        try:
            weight[5] = value
            return generate(backend, arm, *more)
        finally:
            weight[5] = kept

    return broken


def without_memory(backend: Any, arm: Any, *more: Any) -> Any:
    """Generate with a model whose third layer asks for more memory than any machine has."""
    layer = arm.loaded.model.model.layers[2]
    hook = layer.register_forward_pre_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    try:
        return generate(backend, arm, *more)
    finally:
        hook.remove()


def without_cuda_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (with_weights(float("nan")), "FloatingPointError: the model's logits are NaN or infinite"),
        (without_cuda_memory, "OutOfMemoryError: CUDA out of memory."),
        *slow(
            (with_weights(float("inf")), "FloatingPointError: the model's logits are NaN or infinite"),
            (without_memory, "RuntimeError: "),
        ),
    ],
    ids=["nan", "cuda-memory", "inf", "memory"],
)
def test_a_sample_that_fails_is_recorded_and_leaves_the_others_as_they_were(
    main: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: Callable[..., Any],
    error: str,
) -> None:
    assert main("task.limit=4", "results_dir=whole")[0] == 0
    expected = records(tmp_path / "whole")
    second = list(expected)[1]

    samples: list[Any] = []

    def generate_or_fail(*arguments: Any) -> Any:
        samples.append(arguments)
        return (broken if len(samples) == 2 else generate)(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BACKEND, "generate", generate_or_fail)
        code, out, err = main("task.limit=4", "results_dir=broken")
    assert (code, err) == (0, "")
    assert "(4 samples, 1 failed)" in out
    assert "1 of 4 samples failed and scored 0: " in out and "the same command" in out
    found = records(tmp_path / "broken")
    assert found[second]["error"].startswith(error) and found[second]["scores"] == {"accuracy": 0.0}
    for name in found.keys() - {second}:
        assert found[name]["error"] is None and found[name]["output_ids"] == expected[name]["output_ids"]

    code, out, _ = main("task.limit=4", "results_dir=broken")
    assert code == 0 and "failed" not in out
    again = records(tmp_path / "broken")
    assert {key: record["output_ids"] for key, record in again.items()} == {
        key: record["output_ids"] for key, record in expected.items()
    }


# -- stopped, and started twice ---------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a run of 400 samples as a process of its own; returned when the first sample is on the disk."""
    processes = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbench", *SMALL, "model=dummy-tiny", "task.keys=20", "results_dir=results"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell in the background would have its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        while not any(file.stat().st_size for file in tmp_path.glob("results/runs/**/samples.jsonl")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_says_so_and_the_same_command_goes_on(
    started: Callable[[], subprocess.Popen[str]],
    main: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    stop: signal.Signals,
    code: int,
) -> None:
    process = started()
    refused, _, line = main("task.keys=20", "results_dir=results")
    assert refused == 2 and line.count("\n") == 1
    assert f"is in use by process {process.pid} on " in line and "never write one run" in line

    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "kvbench: stopped; the same command goes on from here\n")
    status = json.loads((only_folder(tmp_path / "results") / "status.json").read_text())
    before = records(tmp_path / "results")
    assert (status["state"], status["done"]) == ("stopped", len(before))
    assert 0 < len(before) < 400

    assert main("task.keys=20", "results_dir=results", f"task.limit={len(before) + 2}")[0] == 0
    lines = (only_folder(tmp_path / "results") / "samples.jsonl").read_text().splitlines()
    after = [json.loads(line) for line in lines]
    assert after[: len(before)] == list(before.values()), "what was there stays as it was"
    assert len(after) == len({record["id"] for record in after}) == len(before) + 2


# -- what a run's identity is made of ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_words_about_a_method_orphan_no_result_and_new_options_do(
    main: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["task.limit=1", "results_dir=results"]
    main(*words)
    first = only_folder(tmp_path / "results")
    # As after an edit of the YAML: these facts cannot be changed from the command line.
    monkeypatch.setattr(checks, "FACTS", frozenset())
    facts = ["method.about=new", "task.about=new", "model.about=new", "+method.valid.page_size.at_least=2"]
    main(*words, *facts)
    main(*words, "device=cpu", f"dtype={'bfloat16' if quick_in_bfloat16() else 'float32'}")  # what auto comes to
    assert only_folder(tmp_path / "results") == first
    main(*words, "method.page_size=8")
    assert len(list(first.parent.iterdir())) == 2
