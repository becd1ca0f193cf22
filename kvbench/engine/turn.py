"""Later turns of a conversation, whose tokens are read at once, and tokens that are taken back.

The tokens of a turn attend all that any tier still has, and themselves, causally. After the last
layer they are stored one after the other, and the method learns of each as of a generated token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.attention import torch as dense
from kvbench.attention.executor import Executor
from kvbench.attention.sinks import with_sinks
from kvbench.engine.audit import Audit
from kvbench.engine.positions import CachePositions
from kvbench.engine.probes import Probe
from kvbench.memory.store import LayerStore
from kvbench.method import Method, Shape
from kvbench.spans import Spans


@dataclass(eq=False)
class Turn:
    """One forward pass of several tokens after the prompt, token_ids [B, q] on the CPU, with all
    else of the engine that reads it.
    """

    token_ids: Tensor
    shape: Shape
    method: Method
    stores: Mapping[int, LayerStore]
    positions: CachePositions | None
    executor: Executor
    audit: Audit
    spans: Spans
    probe: Probe | None

    def __post_init__(self) -> None:
        self._asks = self.method.needs.queries or self.method.needs.probabilities
        # of each layer so far: query, key and value [B, H, q, D], and its sinks
        self._read: dict[int, tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]] = {}
        self.audit.start_turn()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of the next layer; arguments as of `Engine.attend`."""
        store, sparse = self.stores[layer], layer in self.shape.sparse_layers
        self._read[layer] = (query if sparse and self._asks else query[:, :0], key, value), sinks
        with self.spans("attention"):
            self.audit.moved(store.remote_bytes())
            past = store.remaining()
            if self.positions is not None and sparse:
                past = past._replace(key=self.positions.of_turn(past.key, store))
            weights = self.method.turn_weights(layer) if sparse else None
            out = dense.turn(query, key, value, past, self.shape.scaling, sinks, weights)
        if layer == self.shape.full_layers[-1]:
            with self.spans("index_update"):
                self._take_in()
        return out

    def _take_in(self) -> None:
        """Store the tokens, and have the method learn of them: a decode step each, without its
        attention.
        """
        everyone = torch.ones(len(self.token_ids), dtype=torch.bool)
        last = self.stores[self.shape.full_layers[-1]]
        for at, tokens in enumerate(self.token_ids.T):
            self.method.step(tokens, torch.tensor(last.lengths), everyone)
            for layer, (parts, sinks) in self._read.items():
                query, key, value = (part[:, :, at : at + 1] for part in parts)
                self.stores[layer].append(key, value)
                if layer in self.shape.sparse_layers:
                    if self.probe is not None:
                        self.probe.append(layer, key, value)
                    self._learn(layer, query, key, value, sinks)
            self.method.end_step()
        self._read.clear()
        self.audit.end_turn(self.token_ids.shape[1])

    def _learn(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> None:
        self.method.append(layer, key, value)
        if not self._asks:
            return
        selection = self.method.select(layer, query)
        if self.method.needs.probabilities:
            store = self.stores[layer]
            attended = with_sinks(selection, store, sinks, key)
            _, weights = self.executor(query, store, attended, self.shape.scaling, True)
            assert weights is not None
            self.method.observe(layer, selection, weights if sinks is None else weights[..., :-1])


def take_back(
    method: Method, stores: Mapping[int, LayerStore], sparse_layers: Collection[int], count: int
) -> None:
    """Take the last `count` tokens of every row back.

    Raises
    ------
    ValueError
        the method cannot, or tokens were dropped.
    """
    if not method.needs.crops or not all(store.complete for store in stores.values()):
        raise ValueError(
            f"{type(method).__name__} takes no tokens back: its needs do not say crops=True, or it"
            " dropped some"
        )
    for layer, store in stores.items():
        store.device.crop(count)
        store.lengths = [length - count for length in store.lengths]
        if layer in sparse_layers:
            method.crop(layer)


class Transcript:
    """The token ids that a cache has read, which the next turn goes on from."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, token_ids: torch.Tensor) -> None:
        """The next columns, [B, q]; -1 where the id is not known, or is padding."""
        self._parts.append(token_ids)

    def cut(self, count: int) -> None:
        """Forget the last `count` columns."""
        ids = self._ids()
        self._parts = [ids[:, : ids.shape[1] - count]]

    def check(self, token_ids: torch.Tensor) -> None:
        """Refuse token_ids [B, n] that do not go on from what was read.

        Raises
        ------
        ValueError
            they do not, or hold nothing new.
        """
        previous, columns = self._ids(), token_ids.shape[1]
        length, previous = previous.shape[1], previous[:, :columns]
        same = previous == token_ids[:, :length].to(previous.device)
        differ = (~same & (previous >= 0)).any(dim=0).nonzero().flatten().tolist()
        if differ or columns <= length:
            why = f"column {differ[0]} differs" if differ else f"it has {columns} columns"
            raise ValueError(
                f"this KVCache has read {length} tokens, and the input does not go on from them"
                f" ({why}): give it the tokens that generate returned and the new turn after them,"
                " or take a new KVCache (or reset() this one)"
            )

    def _ids(self) -> torch.Tensor:
        self._parts = [torch.cat(self._parts, dim=1)]
        return self._parts[0]
