"""What a folder that gpu_check.sh filled shows: writes gpu_check.json and gpu_check.md there.

Reads what there is of tests.xml, kernels.log and the runs of task=latency. Each claim stands beside
the number that was measured for it; one for which nothing was measured yet says so.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from bench import command_line

from kvbench.report.data.frame import collect
from kvbench.runs.folder import ResultsError
from kvbench.runs.stored import read_run_yaml

PACKAGES = ("torch", "transformers", "flashinfer-python", "triton", "numpy", "numba")
GIB = 2**30
PLACES = ("path", "paths")  # of a run on the machine it ran on

Cell = dict[str, Any]  # what one arm measured at one length and batch


class Claim(NamedTuple):
    """What must hold, and what was measured.

    Attributes
    ----------
    text
        the claim.
    bound
        the most that may be measured; the least, where `at_least`.
    measured
        None: nothing yet.
    """

    text: str
    bound: float
    measured: float | None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether it holds, as far as is known."""
        if self.measured is None:
            return "not measured"
        return (
            "holds"
            if (self.measured >= self.bound if self.at_least else self.measured <= self.bound)
            else "FAILS"
        )


def machine() -> dict[str, Any]:
    """What computed."""
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


def tests(path: Path) -> dict[str, Any] | None:
    """Counts of the tests, and the names of those that failed."""
    if not path.exists():
        return None
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": failed}


def kernels(path: Path) -> dict[str, Any] | None:
    """The JSON object that bench_attention.py printed last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


def cells(folder: Path) -> list[Cell]:
    """Every length and batch of every arm that has finished."""
    try:
        runs = collect([folder / "runs"])
    except ResultsError:
        return []
    finished = []
    for run in runs:
        if run.is_timed:
            model = read_run_yaml(Path(run.arm["paths"][0]))["config"]["model"]
            layers = (model.get("config") or {}).get("num_hidden_layers")
            for (length, batch, _), measured in run.cells().items():
                finished.append({**measured, "length": length, "batch": batch, "layers": layers})
    return finished


def claims(measured: list[Cell]) -> list[Claim]:
    """What the harness promises of a large GPU."""
    at = {(cell["method"], cell["length"]): cell for cell in measured if cell["batch"] == 1}

    def value(method: str, length: int, name: str) -> float | None:
        number = at.get((method, length), {}).get(name)
        return None if number is None else float(number)

    least = min((_share(cell) for cell in measured), default=None)
    title = "the parts of a step over its time, least of all arms"
    checks = [Claim(title, 0.97, least, at_least=True)]
    whole = value("full", 131072, "breakdown_ms.attention")
    for method in ("quest", "snapkv"):
        parts = [value(method, 131072, f"breakdown_ms.{part}") for part in ("attention", "select")]
        complete = whole is not None and None not in parts
        ratio = sum(filter(None, parts)) / whole if complete else None
        title = f"128k: attention and selection of {method} over full attention"
        checks.append(Claim(title, 0.5, ratio))
    step_ms = value("icecache", 36000, "tpot_ms_p50")
    return [*checks, Claim("36k: icecache, ms per token", 60.0, step_ms), *_on_host(measured)]


def _on_host(measured: list[Cell]) -> Iterator[Claim]:
    """What is promised of the memory of methods that keep keys and values on the host."""
    hosted = [cell for cell in measured if cell["host_bytes"]]
    for cell in hosted:
        if cell["length"] == 131072 and cell["layers"]:
            layer = cell["whole_kv_bytes"] / cell["layers"]
            over = (cell["memory_bytes"] - cell["weight_bytes"] - layer) / GIB
            title = f"128k: memory of {cell['method']} beyond weights and a layer's KV, GiB"
            yield Claim(title, 2.0, over)
    far = [cell for cell in hosted if cell["length"] == 524288]
    most = max((cell["whole_kv_bytes"] / 1e9 for cell in far), default=None)
    over = max((cell["memory_bytes"] / cell["whole_kv_bytes"] for cell in far), default=None)
    title = "512k decodes with KV on the host: what full attention would hold, GB"
    yield Claim(title, 60.0, most, at_least=True)
    yield Claim("512k: device memory, weights included, over that", 1.0, over)


def _share(cell: Cell) -> float:
    parts = sum(
        value for name, value in cell.items() if name.startswith("breakdown_ms.") and value == value
    )
    return float(parts / cell["tpot_ms_mean"])


def written(report: dict[str, Any], promised: Iterable[Claim], table: str) -> str:
    """The same for people."""
    lines = [
        "# GPU check",
        "",
        ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value),
    ]
    if (ran := report["tests"]) is not None:
        wrong = ran["failures"] + ran["errors"]
        lines += ["", f"Tests: {ran['tests']} ran, {wrong} failed, {ran['skipped']} skipped."]
        lines += [f"- {name}" for name in ran["failed"]]
    lines += ["", "| claim | bound | measured | |", "|---|---|---|---|"]
    for claim in promised:
        number = "-" if claim.measured is None else f"{claim.measured:.3g}"
        sign = ">=" if claim.at_least else "<="
        lines.append(f"| {claim.text} | {sign} {claim.bound:g} | {number} | {claim.verdict} |")
    if report["kernels"] is not None:
        lines += ["", *kernel_table(report["kernels"])]
    return "\n".join([*lines, "", table])


def kernel_table(report: dict[str, Any]) -> list[str]:
    """The kernels side by side, a line for each part of bench_attention.py."""
    head = (
        f"One layer at {report['context']} tokens, {report['budget']} selected, ms"
        " (scripts/bench_attention.py):"
    )
    lines = [head, "", "| | torch | FlashInfer |", "|---|---|---|"]
    parts = {"everything, in place": report["full"], "what is selected": report["selected"]}
    parts |= {f"prefill, {name} chunk": part for name, part in report["prefill"].items()}
    for name, part in parts.items():
        torch_ms, flashinfer_ms = (
            part["ms"].get("torch", part["ms"].get("sdpa")),
            part["ms"].get("flashinfer", "-"),
        )
        lines.append(f"| {name} | {torch_ms} | {flashinfer_ms} |")
    lines += [
        "",
        f"| from the host, {report['turnover']:.0%} new in a step | ms | GiB / s |",
        "|---|---|---|",
    ]
    names = {"bulk": "chosen on the CPU", "uva": "chosen on the device"}
    side = {name: part for name, part in report["offload"].items() if isinstance(part, dict)}
    return lines + [
        f"| {names[name]} | {part['ms']} | {part['moved_gib_s']} |" for name, part in side.items()
    ]


def main() -> None:
    """Read, judge, write."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"{folder}: no such folder; scripts/gpu_check.sh makes and fills it")
    measured = cells(folder)
    promised = claims(measured)
    report = {
        "machine": machine(),
        "tests": tests(folder / "tests.xml"),
        "kernels": kernels(folder / "kernels.log"),
        "claims": [{**claim._asdict(), "verdict": claim.verdict} for claim in promised],
        "cells": [
            {name: value for name, value in cell.items() if value == value and name not in PLACES}
            for cell in measured
        ],
    }
    table = ""
    if measured:
        words = ["-m", "kvbench", "report", str(folder / "runs")]
        words += ["--where", "task=latency", "--format", "markdown"]
        command = [sys.executable, *words]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    (folder / "gpu_check.md").write_text(written(report, promised, table))


if __name__ == "__main__":
    main()
