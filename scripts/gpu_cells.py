"""Decode steps of a list of cells, timed in one process that loads the model once.

`gpu_check.py` starts it with names of cells ("quest/36000/1": preset, tokens, rows) and reads what
it prints: a line `begin NAME`, then a line `end NAME JSON`, with the steps' times, their parts, the
floor and how many steps the GPU repeated by itself, or {"error": "..."}. With --rehearse a model of
a few layers runs on the tests' stand-in for a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from bench import rounded

from kvbench.backends.run_config import RunConfig
from kvbench.cli.compose import composed
from kvbench.config import ConfigError, bind_methods, first_line
from kvbench.measure import hardware
from kvbench.measure.arm import Arm
from kvbench.measure.job import PromptJob
from kvbench.measure.kernels import load_kernels
from kvbench.measure.prompts import read
from kvbench.measure.work import samples
from kvbench.runs.run import prepare
from kvbench.runs.terminal import Console

TESTS = Path(__file__).parents[1] / "tests"
LLAMA = (
    *("model=llama3.1-8b-instruct", "model.weights=dummy", "dtype=bfloat16"),
    *("model.config.max_position_embeddings=1048576", "task.steps=24"),
)
REHEARSED = ("model=dummy-tiny", "model.weights=dummy", "dtype=float32", "task.steps=6")
HEAD_DIMS, BUFFER = {16, 32}, 1 << 20  # of the stand-in: a dummy's heads, bytes that are copied


class Cell(NamedTuple):
    """Steps of one preset at one length, of so many rows at once."""

    method: str
    length: int
    rows: int

    @classmethod
    def of(cls, name: str) -> Cell:
        """The cell of a name."""
        method, length, rows = name.split("/")
        return cls(method, int(length), int(rows))

    @property
    def name(self) -> str:
        """ "quest/36000/1"."""
        return f"{self.method}/{self.length}/{self.rows}"

    def config(self, model: tuple[str, ...], budget: int, prefill: bool) -> RunConfig:
        """Its run: synthetic keys, in a store that is filled unless the model reads the prompt."""
        return composed(
            *model,
            *("task=latency", f"task.lengths=[{self.length}]", f"task.batch=[{self.rows}]"),
            *("task.keys=synthetic_attention", f"task.prefill={str(prefill).lower()}"),
            *(f"method={self.method}", f"budget={'null' if self.method == 'full' else budget}"),
            "seed=0",
        )

    def arm(self, model: tuple[str, ...], budget: int, loaded: Any) -> Arm:
        """What generates; the model reads the prompt only of a method that must see it do so."""
        try:
            return prepare(self.config(model, budget, prefill=False), loaded)
        except ConfigError as error:
            if "task.prefill=false" not in str(error):
                raise
            return prepare(self.config(model, budget, prefill=True), loaded)


def timed(arm: Arm) -> dict[str, Any]:
    """What the table needs of the cell's one sample."""
    load_kernels(Console())
    (record,) = PromptJob(arm, next(read(arm, samples(arm, 1)))[0]).run()
    if record.get("error"):
        return {"error": record["error"]}
    found = {name: record["hardware"].get(name) for name in ("floor_ms", "python_ms")}
    found |= {name: record["tpot_ms"][name] for name in ("mean", "p50", "p95")}
    found["steps_repeated"] = record["hardware"].get("steps_repeated")
    found["index_bytes"] = record["audit"]["index_bytes"]
    found["attended_mean"] = record["audit"]["attended_mean"]
    return {**found, "parts_ms": record["breakdown_ms"]}


@contextmanager
def stand_in() -> Iterator[None]:
    """The tests' twin of a GPU in place of one, with FlashInfer's."""
    sys.path.insert(0, str(TESTS))
    import flashinfer_twin
    import pytest
    import twin

    from kvbench.attention import flashinfer

    with pytest.MonkeyPatch.context() as patched, twin.device():
        flashinfer_twin.install(patched)
        patched.setattr(flashinfer_twin, "HEAD_DIMS", HEAD_DIMS)
        patched.setattr(flashinfer_twin, "DTYPES", {torch.float32})
        patched.setattr(flashinfer, "FLASHINFER_HEAD_DIMS", tuple(HEAD_DIMS))
        patched.setattr(flashinfer, "FLASHINFER_DTYPES", ("float32",))
        patched.setattr(hardware, "COPIED", dict.fromkeys(hardware.COPIED, BUFFER))
        patched.setattr(hardware, "UPLOADED", BUFFER)
        patched.setattr(hardware, "busy_seconds", lambda call, device: None)
        yield


def main() -> None:
    """Measure one cell after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="+", metavar="CELL")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    bind_methods()
    model, loaded = (REHEARSED if args.rehearse else LLAMA), None
    with ExitStack() as stack:
        if args.rehearse:
            stack.enter_context(stand_in())
        # stdout has these lines alone
        out = sys.stdout
        stack.enter_context(mock.patch.object(sys, "stdout", sys.stderr))
        for cell in map(Cell.of, args.cells):
            print("begin", cell.name, file=out, flush=True)
            try:
                arm = cell.arm(model, args.budget, loaded)
                loaded, found = arm.loaded, timed(arm)
            except (ConfigError, RuntimeError, FloatingPointError) as error:
                found = {"error": f"{type(error).__name__}: {first_line(error)}"}
            print("end", cell.name, json.dumps(rounded(found, 5)), file=out, flush=True)
            if "CUDA error" in found.get("error", ""):
                return  # nothing runs on the device after it; another process measures the rest


if __name__ == "__main__":
    main()
