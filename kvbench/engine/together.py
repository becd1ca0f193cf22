"""Engines whose rows are in one forward pass: each attends for its own, and what fails one touches
no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.engine.captured import Forward
from kvbench.engine.engine import Engine, LayerMemory, surely_finite
from kvbench.memory.transfer import uploaded
from kvbench.method import Method
from kvbench.spans import Spans

Answer = TypeVar("Answer")


class EngineGroup:
    """What a cache asks of an engine in decode passes, answered by several: rows of the batch are
    theirs in turn.

    Where one of them raises an error its rows are zeros from there on, and it is asked nothing
    more.

    Parameters
    ----------
    engines
        of one model; all have read their prompts.
    windowed
        the layers with a window, by index, which all rows fill.

    Attributes
    ----------
    errors
        what an engine raised, by its index.
    shape
        sizes of the model; lengths and batch are the first engine's alone.
    offsets
        columns of padding before each row, where layers have a window: all rows end in the last
        column.
    """

    prefilled = True

    def __init__(self, engines: Sequence[Engine], windowed: Mapping[int, LayerMemory]) -> None:
        self._engines, self.windowed = engines, windowed
        self._rows = [engine.shape.batch for engine in engines]
        self.shape, self.method = engines[0].shape, Method()
        self.spans = Spans(self.shape.device)
        self.errors: dict[int, Exception] = {}
        lengths = self.lengths
        self.offsets = [max(lengths) - length if windowed else 0 for length in lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far."""
        return [length for engine in self._engines for length in engine.lengths]

    def start_step(self, tokens: Tensor, active: Sequence[bool]) -> None:
        """A decode forward begins, see `Engine.start_step`."""
        at = 0
        for index, (engine, row_tokens) in enumerate(
            zip(self._engines, tokens.split(self._rows), strict=True)
        ):
            row_active, at = active[at : at + len(row_tokens)], at + len(row_tokens)
            self._ask(index, engine.start_step, row_tokens, row_active)

    def run(self, inputs: Tensor, forward: Forward, count: Callable[[int], object]) -> Tensor:
        """Logits of the decode step that was started, see `Engine.run`; none is captured."""
        return forward(*uploaded(inputs, self.shape.device))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention [B, Hq, 1, D] of one layer, see `Engine.attend`."""
        valid, out = surely_finite(query, key), list[Tensor]()  # all at once
        parts = zip(*(part.split(self._rows) for part in (query, key, value)), strict=True)
        for index, (engine, row_parts) in enumerate(zip(self._engines, parts, strict=True)):
            attended = self._ask(
                index, partial(engine.attend, valid=valid), layer, *row_parts, sinks
            )
            out.append(torch.zeros_like(row_parts[0]) if attended is None else attended)
        return torch.cat(out)

    def _ask(self, index: int, ask: Callable[..., Answer], *arguments: object) -> Answer | None:
        """What an engine answers; None of one that has failed, now or before."""
        if index not in self.errors:
            try:
                return ask(*arguments)
            except Exception as error:
                self.errors[index] = error
        return None
