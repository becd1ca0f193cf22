"""The forward passes of a model of transformers, for the decode loop in `kvbench.engine.batch`:
over prompts, over prompts once more where a method asks for that, and after them.

Prompts of unequal length stand right-padded in one batch, each row with its own positions;
causality keeps padding out of every real token's sight. Where layers have a window, which counts
columns, the padding is on the left, and a mask keeps it out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.attention import torch as dense
from kvbench.backends.hf import rotary
from kvbench.backends.hf.continued import refuse_pieces
from kvbench.backends.hf.hooks import Call, CountingCache, CountingLayer
from kvbench.backends.hf.kept import joined
from kvbench.backends.hf.residuals import inputs_noted, residuals_watched
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine, KeptMemory, check_finite
from kvbench.engine.passes import DecodePasses, EngineGroup, TokenRows
from kvbench.engine.replay import Pass
from kvbench.memory.device import Resident
from kvbench.memory.transfer import uploaded
from kvbench.method import Replayed


class EngineCache(CountingCache):
    """The decode loop's cache: that loop itself says which phase each forward pass belongs to."""

    def __init__(self, engine: Engine | EngineGroup) -> None:
        super().__init__(engine.shape.layers, engine.windowed)
        self.engine = engine
        self.logits = engine.shape.scaling, engine.shape.softcap

    def attend(self, call: Call, query: Tensor, padding: Tensor | None) -> Tensor:
        """Attention of one layer by the engine, in the phase that the loop is in; see
        `Engine.attend`.
        """
        self.show_inputs(call)
        return self.engine.attend(call.layer, query, call.key, call.value, call.sinks)

    def recount(self, lengths: Sequence[int]) -> None:
        """Rows have so many tokens, whatever was counted: a graph that a device repeats counts
        none, and one that could not be captured some of the layers.
        """
        columns = max(map(sum, zip(self.engine.offsets, lengths, strict=True)))
        for layer in self.layers:
            if isinstance(layer, CountingLayer):
                layer.counted = columns


class ModelRunner:
    """The passes of a model with "kvbench" attention, see `kvbench.engine.passes.Runner`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def prefill(
        self,
        engine: Engine,
        prompts: TokenRows,
        chunk: int | None = None,
        progress: Callable[[int], object] = lambda done: None,
    ) -> Tensor:
        """Read the prompts; the logits [B, vocabulary] of each row's first new token."""
        cache, offsets = EngineCache(engine), engine.offsets
        ends = [offset + len(prompt) for offset, prompt in zip(offsets, prompts, strict=True)]
        ids = torch.zeros(len(prompts), max(ends), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, ends[row] - len(prompt) : ends[row]] = torch.tensor(prompt)
        ids = ids.to(self.model.device)
        last: dict[int, Tensor] = {}
        with residuals_watched(self.model, engine.method.needs):
            for column in range(0, ids.shape[1], chunk or ids.shape[1]):
                part = ids[:, column : column + (chunk or ids.shape[1])]
                end = column + part.shape[1]
                ending = [row for row, row_end in enumerate(ends) if column < row_end <= end]
                columns = sorted({ends[row] - 1 - column for row in ending})
                engine.start_chunk(part)
                positions = _positions(engine, column, end)
                logits = self._forward(cache, part, positions, engine.shape.lengths, columns)
                for row in ending:
                    # and no more of the chunk's
                    last[row] = logits[row, columns.index(ends[row] - 1 - column)].clone()
                progress(end)
        if engine.waiting:
            read_again(self.model, engine)
        return torch.stack([last[row] for row in range(len(prompts))])

    def passes(self, rows: Engine | EngineGroup) -> DecodePasses:
        """Further passes over what has read its prompts."""
        cache = EngineCache(rows)

        def forward(ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
            cache.recount(lengths)
            after = [length + ids.shape[1] for length in lengths]
            return self._forward(cache, ids, positions, after)[:, -1]

        return DecodePasses(rows, forward)

    def joined(self, engines: Sequence[Engine]) -> Mapping[int, KeptMemory]:
        """What transformers keeps of several engines in one, of which each has its share from now
        on: of unequal rows the shorter ones have padding before them.
        """
        ends = [*itertools.accumulate(engine.shape.batch for engine in engines)]
        rows = [
            slice(end - engine.shape.batch, end) for engine, end in zip(engines, ends, strict=True)
        ]
        longest = max(length for engine in engines for length in engine.lengths)
        together = {}
        for layer in engines[0].windowed:
            parts = [engine.windowed[layer] for engine in engines]
            together[layer], *shares = joined(parts, rows, longest)
            for engine, share in zip(engines, shares, strict=True):
                engine.windowed = {**engine.windowed, layer: share}
        return together

    def alone(self) -> str | None:
        """Why generations of this model cannot share a pass, or None."""
        if rotary.stretches(self.model):
            return "the angles of its rotary positions follow the length of the text"
        if len({weight.device for weight in self.model.parameters()}) > 1:
            return "its layers lie on several devices"
        return None

    def _forward(
        self,
        cache: EngineCache,
        ids: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        columns: Sequence[int] = (),
    ) -> Tensor:
        """Logits [B, len(columns), vocabulary] of columns of the pass, (): of the last one. Rows
        have `lengths` tokens once it, or the whole prompt, is read.
        """
        refuse_pieces(self.model, cache.columns, ids.shape[1])
        engine, end = cache.engine, cache.columns + ids.shape[1]
        # the last layer's device is another one than that of the ids
        spread = bool(engine.shape.elsewhere)
        keep = torch.tensor(columns, device="cpu" if spread else ids.device) if columns else 1
        padding = None
        if any(engine.offsets):
            first = uploaded(torch.tensor(engine.offsets), ids.device)[:, None]
            padding = torch.arange(end, device=ids.device) >= first
        with engine.spans("model"), rotary.angles_of(lengths):
            out = self.model(
                input_ids=ids,
                attention_mask=padding,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: Tensor = out.logits
        return logits


def _positions(engine: Engine, column: int, end: int) -> Tensor:
    """[B, end - column] positions of a prompt's columns in their rows; padding has any."""
    device = engine.shape.device
    first, length = uploaded(torch.tensor([engine.offsets, [*engine.shape.lengths]]), device)
    columns = torch.arange(column, end, device=device)
    return (columns - first[:, None]).clamp(min=0).minimum(length[:, None] - 1)


# -- prompts that are read once more --------------------------------------------------------------


def read_again(model: PreTrainedModel, engine: Engine) -> None:
    """The replay of an engine whose layers wait for it; they begin after that.

    Raises
    ------
    ConfigError
        the prompts were no token ids.
    """
    replay, template = engine.method.needs.replay, engine.template
    assert replay is not None and template is not None, (
        "this engine was made without the tokenizer's template"
    )
    shown = next(prompt for prompt in engine.waiting.values() if prompt is not None)
    whole = zip(shown.token_ids.tolist(), engine.shape.lengths, strict=True)
    rows = [ids[:length] for ids, length in whole]
    if min(map(min, rows)) < 0:
        raise ConfigError(
            f"inputs_embeds: {type(engine.method).__name__} reads prompts again; expected input_ids"
        )
    with engine.spans("replay"):
        replays = replayed(model, engine, template.passes(rows, replay))
    engine.begin_layers(replays)


def replayed(
    model: PreTrainedModel, engine: Engine, passes: Iterable[Pass]
) -> dict[int, tuple[Replayed, ...]]:
    """What passes over prompts, all of which are in the engine's stores, show of each layer with
    full attention.
    """
    by_layer: dict[int, list[Replayed]] = {layer: [] for layer in engine.shape.full_layers}
    for replay_pass in passes:
        cache = ReplayCache(engine, replay_pass.row)
        length = engine.shape.lengths[replay_pass.row]
        end, offset = cache.columns + len(replay_pass.ids), engine.offsets[replay_pass.row]
        refuse_pieces(model, cache.columns, len(replay_pass.ids))
        ids = torch.tensor([replay_pass.ids], device=model.device)
        positions = torch.arange(length, length + len(replay_pass.ids), device=ids.device)[None]
        padding = (torch.arange(end, device=ids.device) >= offset)[None] if offset else None
        arguments = {"input_ids": ids, "attention_mask": padding, "position_ids": positions}
        with inputs_noted(model), rotary.angles_of([length + len(replay_pass.ids)]):
            # its head is not asked
            model.base_model(**arguments, past_key_values=cache, use_cache=True)
        for layer, captured in cache.captured.items():
            by_layer[layer].append(Replayed(*replay_pass[:3], *captured))
    return {layer: tuple(shown) for layer, shown in by_layer.items()}


class ReplayCache(CountingCache):
    """The cache of a pass that comes after one row of the prompts and leaves nothing in the
    engine's stores; `captured` has what `Replayed` has of each layer with full attention: queries,
    keys, and norms of what its attention reads.
    """

    def __init__(self, engine: Engine, row: int) -> None:
        rows, kept = slice(row, row + 1), engine.windowed
        super().__init__(
            engine.shape.layers, {layer: part.copy(rows) for layer, part in kept.items()}
        )
        self.logits = engine.shape.scaling, engine.shape.softcap
        self._stores = engine.stores
        self._row, self._length = row, engine.shape.lengths[row]
        self.count(engine.offsets[row] + self._length)
        self.captured: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the pass, and those of it in a layer that has been read."""
        return self.columns

    def attend(self, call: Call, query: Tensor, padding: Tensor | None) -> Tensor:
        """Attention over the whole row, and over what comes in this pass."""
        check_finite(call.layer, query, call.key, False)
        if call.source is None:
            assert call.inputs is not None, "a replay notes what attention reads"
            self.captured[call.layer] = query[0], call.key[0], call.inputs[0].float().norm(dim=-1)
        store = self._stores[call.layer if call.source is None else call.source]
        row, (key, value) = slice(self._row, self._row + 1), store.device.prompt_rows(self._length)
        past = Resident(key[row], value[row], None)
        logits = call.scaling, call.sinks, None, call.softcap
        return dense.turn(query, call.key, call.value, past, *logits)
