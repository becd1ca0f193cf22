"""A decode step that a GPU repeats by itself, as a CUDA graph, so that it does not wait for Python.

The first step after memory has moved runs as ever; the second is captured, and those after it are
repeated. What a graph cannot do stays on the host and runs in every step: `Method.step` before the
pass, `Method.end_step` and the audit's count after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.spans import Spans

Forward = Callable[[Tensor, Tensor], Tensor]  # from token ids and positions, [B] each, to logits
Repeats = list[Callable[[], object]]  # what the host counts in each repetition of a step


class Repeated(Protocol):
    """What a step belongs to."""

    spans: Spans

    def layout(self) -> object:
        """Differs where a captured step would read or write other memory; None: it would."""

    def note_repeats(self, repeats: Repeats | None) -> None:
        """Note in `repeats` what the host counts in the step that follows; None: no longer."""

    def advance(self) -> None:
        """Count a token of every row that the device has stored by itself."""


class CapturedStep:
    """The decode steps of one generation.

    Parameters
    ----------
    engine
        whose steps they are.
    device
        that of the model.

    Attributes
    ----------
    eager, captured, repeated
        steps so far that ran as ever, were captured, and were repeated.
    """

    def __init__(self, engine: Repeated, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self.eager = self.captured = self.repeated = 0
        self._inputs: Tensor | None = None  # [2, B], which the graph reads
        self._layout: object = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._repeats: Repeats = []
        self._logits: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """That of a copied engine, whose memory is elsewhere."""
        return CapturedStep(memo[id(self._engine)], self._device)

    def __call__(self, inputs: Tensor, forward: Forward, count: Callable[[int], object]) -> Tensor:
        """Logits of the next step.

        Parameters
        ----------
        inputs
            [2, B] on the CPU, token ids and positions.
        forward
            the model's pass, of these on the device.
        count
            told of a token of every row that comes without a call of `forward`.
        """
        ids, positions = self._uploaded(inputs)
        layout = self._engine.layout()
        if layout is None or layout != self._layout:
            # of before the step: where it has moved memory, the next one runs as ever, too
            self._layout, self.eager = layout, self.eager + 1
            self._graph, self._logits = None, None
            self._repeats = []
            return forward(ids, positions)
        if self._graph is None or self._logits is None:
            self._graph = torch.cuda.CUDAGraph()
            self._logits = self._capture(self._graph, ids, positions, forward)
            self.captured += 1
        else:
            self.repeated += 1
            count(1)
            self._engine.advance()
            for repeat in self._repeats:
                repeat()
        with self._engine.spans("captured"):
            self._graph.replay()
        return self._logits.clone()

    def _uploaded(self, inputs: Tensor) -> Tensor:
        """The inputs where the graph reads them."""
        pinned = inputs.pin_memory()
        if self._inputs is None:
            self._inputs = torch.empty_like(inputs, device=self._device)
        return self._inputs.copy_(pinned, non_blocking=True)

    def _capture(
        self, graph: torch.cuda.CUDAGraph, ids: Tensor, positions: Tensor, forward: Forward
    ) -> Tensor:
        """Where the logits of a step will be, which has run on the host, and not yet on the
        device.
        """
        self._engine.note_repeats(self._repeats)
        try:
            # threads that search for a method may use the device meanwhile
            capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
            with self._engine.spans.held(), capture:
                return forward(ids, positions)
        finally:
            self._engine.note_repeats(None)
