"""What a method sees of the stores, metered, and the eviction that it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import uploaded
from kvbench.method import View


class StoreView(View):
    """`View` over the stores of a generation.

    Args:
        stores: of each layer.
        read: told the bytes of every metered read.
    """

    def __init__(self, stores: Mapping[int, LayerStore], read: Callable[[int], None]) -> None:
        self._stores, self._metered = stores, read
        self._seen: tuple[tuple[int, ...], torch.Tensor] = (), torch.empty(0)

    def lengths(self, layer: int) -> tuple[int, ...]:
        return tuple(self._stores[layer].lengths)

    def seen(self, layer: int) -> torch.Tensor:
        lengths = self.lengths(layer)
        if self._seen[0] != lengths:  # of a step, most layers ask for the same
            self._seen = lengths, uploaded(torch.tensor(lengths), self._stores[layer].key.device)
        return self._seen[1]

    def keys(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self._read(layer, ids, 0)

    def values(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self._read(layer, ids, 1)

    def host_keys(self, layer: int) -> torch.Tensor:
        host = self._stores[layer].host
        if host is None:
            raise ValueError("host_keys are those of host memory; declare Needs(home='host')")
        host.arrived()
        return host.key

    def count_read(self, layer: int, keys: int) -> None:
        self._metered(keys * self._stores[layer].entry_bytes // 2)

    def resident(self, layer: int) -> torch.Tensor:
        return self._stores[layer].resident_ids()

    def keep(self, layer: int, ids: torch.Tensor) -> None:
        self._stores[layer].keep(ids)

    def prefetch(self, layer: int, ids: torch.Tensor) -> None:
        self._stores[layer].prefetch(ids)

    def arrange(self, layer: int, order: torch.Tensor) -> None:
        self._stores[layer].arrange(order)

    def _read(self, layer: int, ids: torch.Tensor | None, which: int) -> torch.Tensor:
        store = self._stores[layer]
        if ids is not None:
            ids = ids.expand(ids.shape[0], store.key.shape[1], ids.shape[2])
        read = store.read(ids)[which]
        self._metered(read.numel() * read.element_size())
        return read
