"""What transformers keeps of a model's cache: windows, and the states of linear attention,
convolutions and Mamba.

Its layers stay objects of its own classes; here they are made, their bytes counted, and what they
hold copied, joined and taken apart again. A state is written in place, so two generations never
share one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from kvbench.backends.hf.hooks import CountingStateLayer, updated
from kvbench.models.rope import FULL

KEYS = ("keys", "values")  # [B, Hkv, n, D]; a layer's other tensors are states [B, ...]


def new_layers(config: PreTrainedConfig, kinds: Sequence[str]) -> dict[int, KeptLayer]:
    """The layers of a new cache that transformers keeps all or a part of, by index.

    Parameters
    ----------
    config
        of the model.
    kinds
        of its layers, see `kvbench.models.card.ModelCard`.
    """
    arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[1]
    classes = {**DYNAMIC_LAYER_TYPE_MAPPING, "hybrid": CountingStateLayer}
    return {
        layer: KeptLayer(classes[kind](**arguments[layer]))
        for layer, kind in enumerate(kinds)
        if kind != FULL
    }


class _Path(NamedTuple):
    """Where a layer has a tensor: an attribute, or an item of one that is a dictionary."""

    attribute: str
    key: Any = None


class KeptLayer:
    """What the rows of a generation hold in a layer of transformers, which others may share.

    Parameters
    ----------
    layer
        the layer of transformers.
    rows
        those of the generation.
    columns
        how many of the layer's keys are theirs by now, the last ones; None: all.
    """

    def __init__(self, layer: Any, rows: slice = slice(None), columns: int | None = None) -> None:
        self.layer, self._rows, self._columns = layer, rows, columns
        self._before = getattr(layer, "cumulative_length", 0)

    @property
    def has_states(self) -> bool:
        """Whether the layer holds more than a window."""
        return isinstance(self.layer, LinearAttentionLayer)

    def tensors(self) -> dict[_Path, Tensor]:
        """Keys, values [B, Hkv, n, D] and states [B, ...] of the rows, in place."""
        states = {path: part[self._rows] for path, part in _tensors(self.layer)}
        return states | {_Path(name): part for name, part in self._window().items()}

    def _window(self) -> dict[str, Tensor]:
        """Keys and values of the rows; {}: the layer holds none."""
        parts = {
            name: part for name in KEYS if (part := getattr(self.layer, name, None)) is not None
        }
        if self._columns is None:
            return parts
        count = self._columns + self.layer.cumulative_length - self._before
        return {name: part[self._rows, :, -count:] for name, part in parts.items()}

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Hold the window of a prompt whose keys and values are [B, Hkv, N, D]."""
        updated(self.layer, keys, values)

    def copy(self, rows: slice = slice(None)) -> KeptLayer:
        """A layer that goes on by itself from what these rows, or some of them, hold."""
        tensors = {path: part[rows].clone() for path, part in self.tensors().items()}
        return KeptLayer(_replaced(self.layer, tensors))

    def resident_bytes(self) -> int:
        """Bytes of the keys and values that the next token may attend."""
        return sum(part.nbytes for part in self._window().values())

    def allocated_bytes(self) -> int:
        """Bytes that they take on the device: a step's one token more, of which they are a part."""
        if self._columns is not None:
            return self.resident_bytes()
        return sum(part.untyped_storage().nbytes() for part in self._window().values())

    def state_bytes(self) -> int:
        """Bytes of the states, which have one size however long the text is."""
        tensors = self.tensors().items()
        return sum(part.nbytes for path, part in tensors if path.attribute not in KEYS)


def joined(parts: Sequence[Any], rows: Sequence[slice], length: int) -> list[KeptLayer]:
    """What several generations hold in a layer as that of one batch, and then the share of each.

    Parameters
    ----------
    parts
        the `KeptLayer` of each.
    rows
        of the batch, each generation's.
    length
        tokens of the longest row; before the keys of shorter ones there is padding.
    """
    every = [part.tensors() for part in parts]
    columns = [_columns(tensors) for tensors in every]
    together = {}
    for path in every[0]:
        held = [tensors[path] for tensors in every]
        if path.attribute in KEYS:
            held = [pad(part, (0, 0, max(columns) - part.shape[2], 0)) for part in held]
        together[path] = torch.cat(held)
    layer = _replaced(parts[0].layer, together)
    if not any(columns):
        return [KeptLayer(layer), *(KeptLayer(layer, share) for share in rows)]
    layer.cumulative_length = length
    shares = zip(rows, columns, strict=True)
    return [KeptLayer(layer), *(KeptLayer(layer, share, count) for share, count in shares)]


def _columns(tensors: Mapping[_Path, Tensor]) -> int:
    """How many keys there are; 0: it holds none."""
    return next((part.shape[2] for path, part in tensors.items() if path.attribute in KEYS), 0)


def _tensors(layer: Any) -> Iterator[tuple[_Path, Tensor]]:
    """The tensors [B, ...] of a layer."""
    for name, value in vars(layer).items():
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for key, part in parts:
            if isinstance(part, Tensor) and part.ndim > 1:
                yield _Path(name, key), part


def _replaced(layer: Any, tensors: Mapping[_Path, Tensor]) -> Any:
    """A layer like another one, with these tensors in the places of that one's."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for path, part in tensors.items():
        if path.key is None:
            setattr(twin, path.attribute, part)
        else:
            getattr(twin, path.attribute)[path.key] = part
    return twin
