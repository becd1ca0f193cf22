"""Decode steps that a GPU repeats by itself, as CUDA graphs, so that it does not wait for Python.

The first step after memory has moved runs as ever; the second is captured, and those after it are
repeated. A step is one graph where nothing between its layers needs the host. Else it is captured
in pieces: each layer's part of the host (what it selects and attends) runs as ever, and a graph
has what the model computes from one such part to the next. `Method.step` before the pass, and
`Method.end_step` and the audit's count after it, run on the host in any case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.memory.view import Count
from kvbench.spans import GraphNotes, Spans

Forward = Callable[[Tensor, Tensor], Tensor]  # from token ids and positions, [B] each, to logits
Repeats = list[Count]  # in their order


class Repeated(Protocol):
    """What a step belongs to."""

    spans: Spans

    def layout(self) -> object:
        """Differs where a captured step would read or write other memory; None: the next
        step is like no captured one.
        """

    def note_repeats(self, repeats: Repeats | None) -> None:
        """Note in `repeats` what the host counts in the step that follows; None: no longer."""


@dataclass(eq=False)
class Piece:
    """A stretch of a step that is one graph, and the part of the host that follows it."""

    graph: torch.cuda.CUDAGraph = field(default_factory=lambda: torch.cuda.CUDAGraph())
    notes: GraphNotes = field(default_factory=list)  # times that the graph notes
    # computes what the next piece reads, and where that reads it; None: this is the last one
    part: Callable[[], Tensor] | None = None
    out: Tensor | None = None


class CapturedStep:
    """The decode steps of a generation. Where the driver refuses to capture one, it and those that
    follow run as ever.

    Attributes
    ----------
    eager, captured, repeated
        steps so far that ran as ever, were captured, and were repeated.
    pieces
        of the captured step.
    """

    def __init__(self, engine: Repeated, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self.eager = self.captured = self.repeated = 0
        self.pieces: list[Piece] = []
        self._capturing: ExitStack | None = None  # ends the graph that is being captured
        self._refused = False
        self._parts_done: list[Tensor] = []  # of a refused step, what its parts have given
        self._inputs: Tensor | None = None  # [2, B], which the graphs read
        self._layout: object = None
        self._repeats: Repeats = []
        self._logits = torch.empty(0)  # where the last graph leaves them

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """That of a copied engine, whose memory is elsewhere."""
        return CapturedStep(memo[id(self._engine)], self._device)

    def __call__(self, inputs: Tensor, forward: Forward) -> Tensor:
        """Logits of the next step, of token ids and positions [2, B] on the CPU; `forward` is the
        model's pass of these on the device, whose parts of the host go through `outside`.
        """
        ids, positions = self._uploaded(inputs)
        layout = self._engine.layout()
        if self._refused or layout is None or layout != self._layout:
            # of before the step: where it has moved memory, the next one runs as ever, too
            if layout is not None:
                self._forget(layout)
            self.eager += 1
            return forward(ids, positions)
        if not self.pieces:
            return self._capture(ids, positions, forward)
        self.repeated += 1
        for count in self._repeats:
            count(1)
        with self._engine.spans("model"):
            for piece in self.pieces:
                self._replay(piece)
        return self._logits.clone()

    def outside(self, part: Callable[[], Tensor]) -> Tensor:
        """What a part of the host gives, between two graphs in each step."""
        if self._parts_done:
            return self._parts_done.pop(0)
        if self._capturing is None:
            return part()
        piece = self._end_piece()
        piece.out, piece.part = part(), part
        self._begin_piece()
        return piece.out

    def _uploaded(self, inputs: Tensor) -> Tensor:
        """The inputs where the graphs read them."""
        pinned = inputs.pin_memory()
        if self._inputs is None:
            self._inputs = torch.empty_like(inputs, device=self._device)
        return self._inputs.copy_(pinned, non_blocking=True)

    def _forget(self, layout: object) -> None:
        """What is captured from now on is of this layout."""
        self._layout, self._repeats, self.pieces = layout, [], []
        self._logits = torch.empty(0)

    def _replay(self, piece: Piece) -> None:
        piece.graph.replay()
        self._engine.spans.replayed(piece.notes)
        if piece.part is not None and piece.out is not None:
            piece.out.copy_(piece.part())

    # -- capturing ---------------------------------------------------------------------------------

    def _capture(self, ids: Tensor, positions: Tensor, forward: Forward) -> Tensor:
        """The step's logits, with the graphs that repeat it."""
        with self._engine.spans("model"):
            try:
                self._begin_piece()
                self._logits = forward(ids, positions)
                self._end_piece()
            except BaseException as error:
                if self._capturing is None:  # a part of the host has failed
                    self._forget(None)
                    raise
                with suppress(RuntimeError):
                    self._capturing.close()
                self._capturing = None
                if not isinstance(error, RuntimeError):
                    raise
                self._refuse(error)
                return forward(ids, positions)
        self.captured += 1
        return self._logits.clone()

    def _begin_piece(self) -> None:
        piece, self._capturing = Piece(), ExitStack()
        pool = self.pieces[0].graph.pool() if self.pieces else None
        self.pieces.append(piece)
        # where the driver refuses, torch stays on the stream of the capture
        self._capturing.enter_context(torch.cuda.stream(torch.cuda.current_stream(self._device)))
        self._capturing.enter_context(self._engine.spans.of_graph(piece.notes))
        self._capturing.callback(self._engine.note_repeats, None)
        self._engine.note_repeats(self._repeats)
        # threads that search for a method may use the device meanwhile
        capture = torch.cuda.graph(piece.graph, pool=pool, capture_error_mode="thread_local")
        self._capturing.enter_context(capture)

    def _end_piece(self) -> Piece:
        """The piece that ends here, which the host has run and now the device runs."""
        assert self._capturing is not None
        self._capturing.close()
        self._capturing, piece = None, self.pieces[-1]
        self._replay(piece)
        return piece

    def _refuse(self, error: RuntimeError) -> None:
        """Take back what the host has counted of a step that the device has not made, and capture
        no more.
        """
        reason = str(error).partition("\n")[0]
        print(f"no CUDA graph of a decode step, so steps run one by one: {reason}", file=sys.stderr)
        for count in reversed(self._repeats):
            count(-1)
        self._parts_done = [piece.out for piece in self.pieces if piece.out is not None]
        self._refused, self.eager = True, self.eager + 1
        self._forget(None)
