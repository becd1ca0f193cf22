"""The sizes of one generation, and how its model makes logits: of a method's interface, see
`kvbench.method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Attention logits that come no further than a soft cap from 0, c tanh(l / c) (Gemma 2, section
    2); None: as they are. -inf, which stands for no logit, stays.
    """
    if softcap is None:
        return logits
    return ((logits / softcap).tanh() * softcap).where(~logits.isneginf(), logits)


@dataclass(frozen=True)
class Shape:
    """The sizes of one generation.

    Attributes
    ----------
    layers, query_heads, kv_heads, head_dim
        counts.
    lengths
        prompt tokens of each row.
    dtype
        of keys, values and queries.
    device
        where they are, and the model's first layers.
    scaling
        attention logits are `scaling * (query . key)`, capped where there is a `softcap`.
    sparse_layers
        true indices of the layers a method is asked about; the others stay dense and are never
        shown.
    windows
        true indices of layers without full attention, which the model computes and keeps itself,
        and how many of the most recent tokens each attends; 0: none, as where it holds a state.
    elsewhere
        true indices of layers that lie on another device, and which.
    latent_dim
        of latent attention: values are the first so many numbers of their keys; 0: of none.
    softcap
        see `capped`.
    reuses
        true indices of layers that attend with queries of their own what another layer has stored,
        and which that is. A method is asked about them as about that one, see `Needs.queries`.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    scaling: float
    sparse_layers: tuple[int, ...]
    windows: Mapping[int, int] = field(default_factory=dict)
    elsewhere: Mapping[int, torch.device] = field(default_factory=dict)
    latent_dim: int = 0
    softcap: float | None = None
    reuses: Mapping[int, int] = field(default_factory=dict)

    def source(self, layer: int) -> int:
        """The layer that stores what `layer` attends: itself, or the one that it reuses."""
        return self.reuses.get(layer, layer)

    def readers(self, layer: int) -> tuple[int, ...]:
        """The layers that attend what `layer` stores, in their order."""
        return (layer, *(reader for reader, source in self.reuses.items() if source == layer))

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Attention logits of products of queries and keys."""
        return capped(products * self.scaling, self.softcap)

    def device_of(self, layer: int) -> torch.device:
        """Where keys, values and queries of `layer` are."""
        return self.elsewhere.get(layer, self.device)

    def for_layers(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """A tensor for every layer, where the layer is; those of one device share it."""
        placed = {device: values.to(device) for device in {self.device, *self.elsewhere.values()}}
        return {layer: placed[self.device_of(layer)] for layer in range(self.layers)}

    @property
    def full_layers(self) -> tuple[int, ...]:
        """True indices of the layers with full attention, sparse ones included."""
        return tuple(layer for layer in range(self.layers) if layer not in self.windows)

    @property
    def batch(self) -> int:
        """Rows, B."""
        return len(self.lengths)

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.query_heads // self.kv_heads
