"""One forward pass a step for generations of many arms and samples: each is rows of the batch, and
goes on by itself.

Linear layers then read the weights once for all rows, not once for each. Attention is every
engine's own, as is all that a method does; the logits of a row differ by rounding alone from those
that it has by itself. A generation joins between two passes, and leaves when it is over, or with
its error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvbench.backends.hf import rotary
from kvbench.backends.hf.generate import Decoding, EngineCache, Generation, step_logits
from kvbench.backends.hf.hooks import WindowedLayer, windowed_layers
from kvbench.engine.engine import Engine
from kvbench.engine.together import EngineGroup


def unfit(model: PreTrainedModel) -> str | None:
    """Why generations of this model cannot go on together, or None."""
    if rotary.stretches(model):
        return "the angles of its rotary positions follow the length of the text"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers lie on several devices"
    return None


@contextmanager
def collecting_later() -> Iterator[None]:
    """Leave garbage that refers to itself for later: to find it Python looks at every object of
    every engine.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class DecodePass:
    """Generations that go on together.

    Parameters
    ----------
    model
        with "kvbench" attention; `unfit` says whether it can.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._decodings = model, list[Decoding]()
        # None: generations have joined or left since the last pass
        self._cache: EngineCache | None = None

    @property
    def rows(self) -> int:
        """Rows of the next pass."""
        return sum(len(decoding.generated) for decoding in self._decodings)

    def join(self, decoding: Decoding) -> None:
        """A generation, not over, goes on here from the next pass on."""
        decoding.engine.spans.reset()  # what it has spent on its prompt
        self._decodings.append(decoding)
        self._cache = None

    def leave(self, decoding: Decoding) -> None:
        """A generation does not go on, if it still did."""
        self._decodings = [other for other in self._decodings if other is not decoding]
        self._cache = None

    @torch.inference_mode()
    @collecting_later()
    def step(self) -> list[tuple[Decoding, Exception | None]]:
        """Decode a token of every row.

        Returns
        -------
        list[tuple[Decoding, Exception | None]]
            The generations that left: those that are over, and those that failed, each with its
            error.
        """
        if self._cache is None:
            self._cache = EngineCache(_composed([decoding.engine for decoding in self._decodings]))
        group = self._cache.engine
        tokens = torch.cat([decoding.tokens for decoding in self._decodings])
        active = [is_active for decoding in self._decodings for is_active in decoding.active]
        logits = step_logits(self._model, tokens, self._cache, active)
        finished, at = list[tuple[Decoding, Exception | None]](), 0
        for index, decoding in enumerate(self._decodings):
            row_logits, at = logits[at : at + len(decoding.generated)], at + len(decoding.generated)
            error = group.errors.get(index)
            try:
                if error is None:
                    decoding.choose(row_logits)
                    decoding.settle(row_logits)
            except Exception as failed:  # of this generation alone
                error = failed
            if error is not None or decoding.over:
                self.leave(decoding)
                finished.append((decoding, error))
        return finished


def concluded(decoding: Decoding) -> Generation:
    """What a generation has made that is over, without times of its own but for the engine's parts
    of a step.
    """
    spent, steps = decoding.engine.spans.reset(), max(1, decoding.engine.audit.steps)
    parts = {name: 1e3 * seconds / steps for name, seconds in sorted(spent.items())}
    generation = Generation(
        decoding.generated, breakdown_ms=parts, shared_prefill=True, together=True
    )
    generation.conclude(decoding.engine)
    return generation


# -- layers with a window --------------------------------------------------------------------------


class Share:
    """The rows of one engine in a window that several fill.

    Parameters
    ----------
    window
        of all.
    rows
        which of it.
    held
        tokens of these rows that the window holds now, padding left out.
    """

    def __init__(self, window: WindowedLayer, rows: slice, count: int) -> None:
        self._window, self._rows, self._count, self._before = (
            window,
            rows,
            count,
            window.cumulative_length,
        )

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, n, D], in place."""
        window = self._window
        assert window.keys is not None and window.values is not None
        count = min(window.keys.shape[2], self._count + window.cumulative_length - self._before)
        return window.keys[self._rows, :, -count:], window.values[self._rows, :, -count:]

    def resident_bytes(self) -> int:
        """Bytes of the keys and values that the next token may attend."""
        return sum(part.nbytes for part in self.tokens())

    allocated_bytes = resident_bytes


def _composed(engines: list[Engine]) -> EngineGroup:
    """The engines together, their windows joined: of unequal rows the shorter ones have padding
    before them.
    """
    group = EngineGroup(engines, windowed := windowed_layers(engines[0].shape.windows))
    for layer, window in windowed.items():
        parts = [_tokens(engine.windowed[layer]) for engine in engines]
        longest = max(key.shape[2] for key, _ in parts)
        window.keys, window.values = (
            torch.cat([pad(part, (0, 0, longest - part.shape[2], 0)) for part in states])
            for states in zip(*parts, strict=True)
        )
        window.is_initialized, window.cumulative_length = True, max(group.lengths)
        window.dtype, window.device = window.keys.dtype, window.keys.device
        begin = 0
        for engine, (key, _) in zip(engines, parts, strict=True):
            rows = slice(begin, begin := begin + len(key))
            engine.windowed = {**engine.windowed, layer: Share(window, rows, key.shape[2])}
    return group


def _tokens(window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return window.tokens() if isinstance(window, Share) else (window.keys, window.values)
