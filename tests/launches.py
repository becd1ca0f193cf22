"""What a decode step launches on a device, by part; `python tests/launches.py` writes the table that the test holds.

Counted on the twin, of a step in the middle of a generation that runs as ever, with FlashInfer: operations that compute
on the device (views and empty memory are none), by what calls for them; copies up and down; waits of the host.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from unittest import mock

import flashinfer_twin
import pytest
import torch
import twin
from driver import METHODS, Case, numbers, scores_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twin_graphs import SILENT

from kvbench.attention import flashinfer
from kvbench.backends.hf.loading import load
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import choices, shipped
from kvbench.engine.batch import generate
from kvbench.engine.engine import Engine
from kvbench.memory import transfer
from kvbench.memory.store import LayerStore

TABLE = Path(__file__).parent / "goldens" / "launches.json"
LAYERS, LENGTH, BUDGET, STEPS = 4, 600, 128, 6
# A layer has the first four, a step the others: `once` is what is done around the layers, or for all of them.
PARTS = ("model", "append", "select", "executor", "once", "up", "down", "waits")
KERNELS = 2  # of an attention of FlashInfer's: the chunks, and what joins them
# Kernels that an operator launches, where it is not one.
OF_OPERATORS = {"search_codes": 6, "best_tokens": 2, "coded_tokens": 4, "cluster_tokens": 3}


class Tape(TorchDispatchMode):
    """Notes operations by the part that they belong to, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.counts = ["once"], Counter[tuple[str, int]]()  # by part and layer
        self.layer = 0
        self._operations: list[tuple[tuple[str, int], list[torch.Tensor]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.parts[-1] == "kernel" or func._opname in SILENT:
            return out
        given, made = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (args, out))
        before = {tensor.untyped_storage()._cdata for tensor in given}
        if func._schema.is_mutable or not all(tensor.untyped_storage()._cdata in before for tensor in made):
            kernels = OF_OPERATORS.get(func._opname, 1)
            kernels += func._opname == "best_tokens" and args[10] is not None  # ranks members of clusters, too
            self._operations.extend(kernels * [((self.parts[-1], self.layer), [*given, *made])])
        return out

    def inside(self, part: str, call: Callable[..., Any], launches: int = 0) -> Callable[..., Any]:
        """A function whose operations are of this part; of a kernel they are so many launches of the part around it."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[self.parts[-1], self.layer] += launches
            self.parts.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.parts.pop()

        return counted

    def noted(self, name: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of which each call is counted by a name."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if current_thread() is main_thread():  # what a search waits for no step waits for
                self.counts[name(*args), self.layer] += 1
            return self.inside("kernel", call)(*args, **kwargs)

        return counted

    def of_layer(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a layer of the model."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.layer = layer
            return self.inside("model", forward)(*args, **kwargs)

        return counted

    def table(self, layers: int) -> dict[str, float]:
        """What was counted, now that all tensors are known to be of the device or not: of a layer, and of a step.

        What the first layer has more than every other a step does once, whichever layer asks for it.
        """
        for part, tensors in self._operations:
            self.counts[part] += any(map(twin.on_device, tensors))
        of_layers = {part: [self.counts[part, layer] for layer in range(layers)] for part in PARTS}
        row = {part: float(sum(counts)) for part, counts in of_layers.items()}
        for part in PARTS[:4]:
            more = max(0, of_layers[part][0] - max(of_layers[part][1:]))
            row["once"] += more
            row[part] = (row[part] - more) / layers
        return row


@contextlib.contextmanager
def attributed(tape: Tape, case: Case) -> Iterator[Any]:
    """The method of a case, and a harness that says what belongs to which part."""
    method = case.build()
    for name in ("append", "select", "observe", "step", "end_step"):
        setattr(method, name, tape.inside("select", getattr(method, name)))
    up = lambda cuda, target, *_: "up" if twin.on_device(target) else "down"  # noqa: E731
    patches = [
        mock.patch.object(LayerStore, "append", tape.inside("append", LayerStore.append)),
        mock.patch.object(LayerStore, "locate", tape.inside("select", LayerStore.locate)),
        mock.patch.object(flashinfer.FlashInfer, "__call__", tape.inside("executor", flashinfer.FlashInfer.__call__)),
        mock.patch.object(
            flashinfer_twin.Kernel, "paged_run", tape.inside("kernel", flashinfer_twin.Kernel.paged_run, KERNELS)
        ),
        *(
            mock.patch.object(flashinfer_twin, name, tape.inside("kernel", getattr(flashinfer_twin, name), 1))
            for name in ("_rmsnorm", "_fused_add_rmsnorm", "_silu_and_mul", "_turned")
        ),
        mock.patch.object(transfer.fetch, "_operator", tape.inside("kernel", transfer.fetch._operator, 1)),
        mock.patch.object(twin.Twin, "copy", tape.noted(up, twin.Twin.copy)),
        mock.patch.object(twin.Twin, "sync", tape.noted(lambda *_: "waits", twin.Twin.sync)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield method


def launches(case: Case) -> dict[str, float]:
    """Launches of a layer by part, and copies and waits of a step."""
    tape, steps = Tape(), 0
    start, settle = Engine.start_step, Engine.settle

    def started(engine: Engine, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == STEPS // 2:
            tape.counts.clear()
            tape.__enter__()
        start(engine, *args)

    def settled(engine: Engine) -> None:
        if steps == STEPS // 2:
            tape.__exit__(None, None, None)
            row.update(tape.table(LAYERS))
        settle(engine)

    row = dict[str, float]()
    with pytest.MonkeyPatch.context() as monkeypatch, twin.device():
        flashinfer_twin.install(monkeypatch)
        flashinfer_twin.take_small_models(monkeypatch)
        model = load(shipped("model", "dummy-tiny"), device="cuda", dtype="bfloat16")
        for number, layer in enumerate(model.model.base_model.layers):
            layer.forward = tape.of_layer(number, layer.forward)
        with attributed(tape, case) as method:
            arguments = model.model, [LENGTH], method, Budget(BUDGET), (), model.tokenizer
            scores = scores_of(model.model)
            options = {"attention": "flashinfer", "new_tokens": STEPS + 1, "head_scores": scores, "cuda_graphs": False}
            engine = engine_for(*arguments, **options)
            monkeypatch.setattr(Engine, "start_step", started)
            monkeypatch.setattr(Engine, "settle", settled)
            generate(ModelRunner(model.model), [numbers(LENGTH)], engine, max_new_tokens=STEPS)
        assert model.model.config.num_hidden_layers == LAYERS
    return row


def preset_cases() -> list[Case]:
    """Each preset with options that suit a short prompt."""
    cases = {case.id: case for case in METHODS}
    return [
        next(case for case in METHODS if case.name == name) if name not in cases else cases[name]
        for name in choices("method")
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = {case.name: launches(case) for case in preset_cases()}
    rows = [f'"{name}": {json.dumps(row)}' for name, row in sorted(table.items())]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
