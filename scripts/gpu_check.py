"""What is promised of a large GPU, measured on the one that is here; run by scripts/gpu_check.sh.

First the decode steps of Llama 3.1 8B's shape with random weights (`gpu_cells.py`), beside the
floor: the bytes that a step must read over the bandwidth that was measured. Then whether captured
steps are equal to others to the bit, and then the tests and the times of kernels. FOLDER holds one
gpu_check.json, written anew after each cell and each file of tests; what is there is not measured
again, so that the same command goes on where a limit of time cut it. A short table comes last.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

from bench import command_line

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "flashinfer-python", "triton", "numpy")
GIB = 2**30
CELL_S, FIRST_S = 40, 150  # the most that a cell may take; the first loads and compiles
PROMISES_S, TESTS_S = 380, 240  # the most for all cells of a call, and for a file of tests
LEAST_S = 15  # nothing is begun with less

# A step over its floor at most, with one row. Those of `ON_HOST` search on the CPU: that time is
# left out of their step.
GOALS = {
    "full": 1.25,
    **dict.fromkeys(("snapkv", "keydiff", "streaming_llm", "pyramidkv", "adakv_snapkv"), 1.5),
    **dict.fromkeys(("topk", "quest", "lychee", "rocketkv", "think"), 2.0),
    **dict.fromkeys(("h2o", "tova", "raas", "scope"), 2.0),
    "pariskv": 2.5,
    **dict.fromkeys(("icecache", "pqcache", "magicpig"), 1.5),
}
ON_HOST = ("icecache", "pqcache", "magicpig")
SEARCH = ("select", "query", "insert")  # parts of a step that are the search of these
GOAL_16 = 1.25  # of 16 rows, but for those of `ON_HOST`
LEADING = ("full", "snapkv", "quest", "keydiff", "topk", "lychee", "streaming_llm", "pariskv")
INDEX_GIB = 2.0  # of pariskv at the longer length, at most
ALIKE = "test_captured_gpu.py"  # captured steps beside others, to the bit


class Sizes(NamedTuple):
    """What is measured: lengths in tokens, rows of a batch, the budget, and the tests.

    Attributes
    ----------
    agreement, kernels
        files of tests with pytest's words for each.
    attention
        words of `bench_attention.py`.
    """

    lengths: tuple[int, int]
    rows: int
    methods: tuple[str, ...]
    budget: int
    agreement: tuple[str, ...]
    kernels: tuple[tuple[str, ...], ...]
    attention: tuple[str, ...] = ()

    def cells(self) -> Iterator[str]:
        """Names of cells, those that settle most first."""
        one = [f"{method}/{length}/1" for method in self.methods for length in self.lengths]
        many = [f"{method}/{self.lengths[0]}/{self.rows}" for method in self.methods]
        leading = 2 * sum(method in LEADING for method in self.methods)
        few = [name for name in many if name.partition("/")[0] in LEADING[:3]]
        first = [*one[:leading], *few, *one[leading:]]
        return iter([*first, *(name for name in many if name not in few)])


def real_sizes() -> Sizes:
    """Those of a GPU, with every file of its tests."""
    others = sorted(path for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    files = [(str(path), "-m", "gpu") for path in others if path.name != ALIKE]
    methods = (*LEADING, *(name for name in GOALS if name not in LEADING))
    same = str(ROOT / "tests" / "gpu" / ALIKE), "-m", "gpu"
    return Sizes((36000, 131072), 16, methods, 1024, same, tuple(files))


def rehearsed_sizes() -> Sizes:
    """Small ones, on the tests' stand-in for a GPU."""
    same = str(ROOT / "tests" / "test_captured.py"), "-k", "second_prompt or to_the_bit and full"
    kernels = (str(ROOT / "tests" / "test_offload.py"), "-k", "span")
    small = "--device cpu --dtype float32 --context 256 --budget 32 --chunk 16 --heads 4 2"
    words = (*small.split(), "--head-dim", "16")
    return Sizes((300, 450), 2, ("full", "quest", "icecache"), 128, same, (kernels,), words)


def machine() -> dict[str, Any]:
    """What computes."""
    import torch

    facts: dict[str, Any] = {"device": "cpu", "python": platform.python_version()}
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


# -- the parts -------------------------------------------------------------------------------------


class Worker:
    """A process that measures cells, line by line."""

    def __init__(self, names: Sequence[str], budget: int, rehearse: bool) -> None:
        script = [sys.executable, str(ROOT / "scripts" / "gpu_cells.py")]
        words = [*names, "--budget", str(budget), *(["--rehearse"] if rehearse else [])]
        self._process = subprocess.Popen([*script, *words], stdout=subprocess.PIPE, text=True)
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, seconds: float) -> str | None:
        """The next line; "" after the last one, None where none came in time."""
        try:
            return self._lines.get(timeout=max(0.0, seconds))
        except Empty:
            return None

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def tested(words: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Counts of a file's tests, and the names of those that failed."""
    xml = folder / "tests.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    try:
        # what pytest says goes to a log
        with (folder / "tests.log").open("a") as log:
            subprocess.run(
                [*command, f"--junitxml={xml}", *words], stdout=log, stderr=log, timeout=seconds
            )
        suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    except subprocess.TimeoutExpired:
        return {"error": f"took over {seconds:.0f} s"}
    except OSError:
        return {"error": "no test ran"}
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": wrong}


def kernels(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """The JSON object that bench_attention.py prints last."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_attention.py"), *words]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"took over {seconds:.0f} s"}
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {"error": f"exit code {ran.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# -- what is said of it ----------------------------------------------------------------------------

HEADS = ("preset", "tokens", "rows", "ms", "floor", "over it", "goal", "")
HEADS += ("parts / step", "device / step", "repeated")


def goal_of(method: str, rows: int) -> float:
    """The most that a step may take over its floor."""
    return GOALS[method] if rows == 1 or method in ON_HOST else GOAL_16


def over_floor(method: str, cell: dict[str, Any]) -> float:
    """A step's time over its floor, without a search on the CPU."""
    search = sum(cell["parts_ms"].get(part, 0.0) for part in SEARCH) if method in ON_HOST else 0.0
    return float((cell["p50"] - search) / cell["floor_ms"])


def row(name: str, cell: dict[str, Any] | None) -> list[str]:
    """A line of the table; `cell`: None where it was not measured."""
    method, length, rows = name.split("/")
    goal = goal_of(method, int(rows))
    begin = [method, length, rows]
    if cell is None or "error" in cell:
        why = "not measured" if cell is None else cell["error"][:60]
        return [*begin, "-", "-", "-", f"{goal:g}", why, "-", "-", "-"]
    ratio = over_floor(method, cell)
    busy = cell["python_ms"] and 1 - cell["python_ms"] / cell["mean"]
    numbers = f"{cell['p50']:.2f}", f"{cell['floor_ms']:.2f}", f"{ratio:.2f}", f"{goal:g}"
    shares = f"{sum(cell['parts_ms'].values()) / cell['mean']:.3f}", f"{busy:.3f}" if busy else "-"
    verdict = "pass" if ratio <= goal else "MISS"
    return [*begin, *numbers, verdict, *shares, str(cell["steps_repeated"] or "none")]


class Check:
    """What was measured so far, in one file, and what is missing.

    Parameters
    ----------
    folder
        of the file.
    sizes
        what is measured.
    rehearse
        on the tests' stand-in for a GPU.

    Attributes
    ----------
    cells
        by name what `gpu_cells.py` gave, or an error.
    tests
        by file the counts of its tests.
    kernels
        the object of `bench_attention.py`.
    """

    def __init__(self, folder: Path, sizes: Sizes, rehearse: bool) -> None:
        self._folder, self._sizes = folder, sizes
        self._rehearse = rehearse
        self._path = folder / "gpu_check.json"
        stored = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self.cells: dict[str, dict[str, Any]] = stored.get("cells", {})
        self.tests: dict[str, dict[str, Any]] = stored.get("tests", {})
        self.kernels: dict[str, Any] | None = stored.get("kernels")
        self._machine = machine()

    def keep(self) -> None:
        """Write it, whole or not at all."""
        whole = {"machine": self._machine, "cells": self.cells, "tests": self.tests}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({**whole, "kernels": self.kernels}, indent=1) + "\n")
        new.replace(self._path)

    def run(self, until: float) -> None:
        """All parts, as far as there is time."""
        self.promises(min(until, time.monotonic() + PROMISES_S))
        for words in (self._sizes.agreement, *self._sizes.kernels):
            name, left = Path(words[0]).name, until - time.monotonic()
            if name not in self.tests and left >= LEAST_S:
                result = tested(words, self._folder, min(left, TESTS_S))
                if "error" not in result or left >= TESTS_S:  # else the next call has more of it
                    self.tests[name] = result
                    self.keep()
        left = until - time.monotonic()
        if self.kernels is None and left >= LEAST_S:
            self.kernels = kernels(self._sizes.attention, left)
            self.keep()

    def promises(self, until: float) -> None:
        """Measure the cells that are not there yet; one that takes too long is left, and said."""
        while names := [name for name in self._sizes.cells() if name not in self.cells]:
            if until - time.monotonic() < LEAST_S:
                return
            begun, why = self._measured(names, until)
            if time.monotonic() >= until:
                return
            if begun not in self.cells:
                self.cells[begun] = {"error": why}
                self.keep()

    def _measured(self, names: Sequence[str], until: float) -> tuple[str, str]:
        """Cells as far as one worker comes; the last that it began, and why it ended."""
        worker, begun = Worker(names, self._sizes.budget, self._rehearse), names[0]
        limit = float(FIRST_S)
        try:
            while line := worker.line(min(limit, until - time.monotonic())):
                kind, rest = line.split(maxsplit=1)
                begun, found = rest.split(maxsplit=1) if kind == "end" else (rest.strip(), "")
                if found:
                    self.cells[begun] = json.loads(found)
                    self.keep()
                    limit = CELL_S
                print(kind, begun, file=sys.stderr, flush=True)
        finally:
            worker.stop()
        return begun, f"took over {limit:.0f} s" if line is None else "its process ended"

    def table(self) -> Iterator[str]:
        """The promises with what was measured, and what the tests found."""
        rows = [list(HEADS), *(row(name, self.cells.get(name)) for name in self._sizes.cells())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for cells in rows:
            line = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            yield "  ".join(line).rstrip()
        yield "(over it: without the search on the CPU of " + ", ".join(ON_HOST) + ")"
        longest = self.cells.get(f"pariskv/{self._sizes.lengths[1]}/1", {})
        if "index_bytes" in longest:
            size = longest["index_bytes"] / GIB
            yield f"pariskv's index, GiB: {size:.2f}, at most {INDEX_GIB:g}"
        for name, result in self.tests.items():
            wrong = result.get("failures", 0) + result.get("errors", 0)
            yield f"{name}: " + result.get("error", f"{result.get('tests')} ran, {wrong} failed")
            yield from (f"  {failed}" for failed in result.get("failed", []))
        if self.kernels is not None:
            parts = {
                part: self.kernels[part]["ms"]
                for part in ("full", "selected")
                if part in self.kernels
            }
            yield "attention, ms: " + json.dumps(parts or self.kernels)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = command_line(
        __doc__,
        seconds=(520, "end by then"),
        rehearse=(False, "a small model on the tests' stand-in for a GPU"),
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes = rehearsed_sizes() if args.rehearse else real_sizes()
    check = Check(args.folder, sizes, args.rehearse)
    check.run(until)
    check.keep()
    print("\n".join(check.table()))


if __name__ == "__main__":
    main()
