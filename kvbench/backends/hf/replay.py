"""Prompts that the model reads once more, for methods that ask what it looks at then
(`Needs.replay`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.attention import torch as dense
from kvbench.backends.hf.hooks import Call, CountingCache, WindowedLayer
from kvbench.backends.hf.layers import attention_modules
from kvbench.backends.hf.rotary import angles_of
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine, check_finite
from kvbench.engine.replay import Pass, Template
from kvbench.memory.device import Resident
from kvbench.method import Replayed
from kvbench.models.prompts import chat_text, raw_ids

TEXTS = ("One.", "Two.")  # of two users: what the template makes of both begins alike


def template_of(tokenizer: PreTrainedTokenizerBase | None, name: str) -> Template:
    """What a tokenizer puts around a user's text.

    Raises
    ------
    ConfigError
        there is none; `name` says what needs it.
    """
    if tokenizer is None:
        raise ConfigError(
            f"tokenizer=None: {name} needs the chat template and the ids of texts; pass the"
            " tokenizer"
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    bos = tokenizer.bos_token_id if tokenizer.bos_token_id in raw_ids("", tokenizer) else None
    if not tokenizer.chat_template:
        return Template(encode, bos=bos)
    wrapped = [chat_text(content, tokenizer) for content in TEXTS]
    header = commonprefix([encode(text) for text in wrapped])
    return Template(encode, tuple(header), tuple(encode(wrapped[0].rpartition(TEXTS[0])[2])), bos)


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
    rows = [
        ids[:length]
        for ids, length in zip(shown.token_ids.tolist(), engine.shape.lengths, strict=True)
    ]
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
        cache, norms = ReplayCache(engine, replay_pass.row), dict[int, torch.Tensor]()
        length = engine.shape.lengths[replay_pass.row]
        end, offset = cache.columns + len(replay_pass.ids), engine.offsets[replay_pass.row]
        ids = torch.tensor([replay_pass.ids], device=model.device)
        positions = torch.arange(length, length + len(replay_pass.ids), device=ids.device)[None]
        padding = (torch.arange(end, device=ids.device) >= offset)[None] if offset else None
        arguments = {"input_ids": ids, "attention_mask": padding, "position_ids": positions}
        with _norms_noted(model, norms), angles_of([length + len(replay_pass.ids)]):
            # its head is not asked
            model.base_model(**arguments, past_key_values=cache, use_cache=True)
        for layer, (query, key) in cache.captured.items():
            by_layer[layer].append(Replayed(*replay_pass[:3], query[0], key[0], norms[layer]))
    return {layer: tuple(shown) for layer, shown in by_layer.items()}


class ReplayCache(CountingCache):
    """The cache of a pass that comes after one row of the prompts and leaves nothing in the
    engine's stores.

    Attributes
    ----------
    seen
        queries and keys [1, H, q, D] of each layer with full attention.
    """

    def __init__(self, engine: Engine, row: int) -> None:
        windowed = {layer: _row_of(windowed, row) for layer, windowed in engine.windowed.items()}
        super().__init__(engine.shape.layers, windowed)
        self.scaling, self._stores = engine.shape.scaling, engine.stores
        self._row, self._length = row, engine.shape.lengths[row]
        self.count(engine.offsets[row] + self._length)
        self.captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the pass, and those of it in a layer that has been read."""
        return self.columns

    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Attention over the whole row, and over what comes in this pass."""
        check_finite(call.layer, query, call.key, False)
        self.captured[call.layer] = query, call.key
        device = self._stores[call.layer].device
        key, value = (
            block[self._row : self._row + 1, :, : self._length]
            for block in (device.key, device.value)
        )
        past = Resident(key, value, None)
        return dense.turn(query, call.key, call.value, past, call.scaling, call.sinks)


def _row_of(windowed: Any, row: int) -> WindowedLayer:
    """A row of what a layer with a window holds."""
    window = WindowedLayer(windowed.sliding_window)
    window.begin_from(windowed)
    assert window.keys is not None and window.values is not None
    window.keys, window.values = window.keys[row : row + 1], window.values[row : row + 1]
    return window


@contextmanager
def _norms_noted(model: PreTrainedModel, norms: dict[int, torch.Tensor]) -> Iterator[None]:
    """Meanwhile note, by layer, the norms [q] of what the tokens of a pass of one row give to its
    attention module.
    """

    def note(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        norms[layer] = states[0].float().norm(dim=-1)

    handles = [
        module.register_forward_pre_hook(partial(note, layer), with_kwargs=True)
        for layer, module in enumerate(attention_modules(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
