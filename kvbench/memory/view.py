"""What a method sees of the stores, metered, and the eviction that it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kvbench.memory.store import LayerStore
from kvbench.method import View

# What the host counts of a step that a device makes by itself: called with 1 it counts that once
# more, with -1 it takes it back.
Count = Callable[[int], object]


class StoreView(View):
    """`View`, which says what its methods do, over the stores of a generation; `read` is called
    with the bytes of each metered read.

    Where `repeats` is a list, reads are noted there, to be counted again with each repetition of a
    captured step.
    """

    repeats: list[Count] | None = None

    def __init__(self, stores: Mapping[int, LayerStore], read: Callable[[int], None]) -> None:
        self._stores, self._metered = stores, read
        self._seen: dict[torch.device, tuple[list[int], torch.Tensor]] = {}

    def lengths(self, layer: int) -> tuple[int, ...]:
        return tuple(self._stores[layer].lengths)

    def seen(self, layer: int) -> torch.Tensor:
        """See `View`; on a GPU the next token is counted in it."""
        store = self._stores[layer]
        if store.device.counters is not None:
            return store.device.counters.seen
        # of a step, most layers of a device ask for the same
        device = store.device.first.device
        if device not in self._seen or self._seen[device][0] != store.lengths:
            self._seen[device] = store.lengths, store.seen
        return self._seen[device][1]

    def keys(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self._read(layer, ids, 0)

    def values(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self._read(layer, ids, 1)

    def host_keys(self, layer: int) -> torch.Tensor:
        """See `View`; waits until the prompt is there.

        Coded keys are in place for a method whose `Needs` say `host_keys`, else a decoded copy.
        """
        host = self._stores[layer].host
        if host is None:
            raise ValueError("host_keys are those of host memory; declare Needs(home='host')")
        host.arrived()
        return host.blocks[2] if host.decoded_bytes else host.codecs.key.decode(host.key)

    def count_read(self, layer: int, keys: int) -> None:
        store = self._stores[layer]
        codecs = store.device.codecs if store.host is None else store.host.codecs
        decoded = 0 if store.host is None else store.host.decoded_bytes
        self._metered(keys * (decoded or codecs.key.nbytes))

    def resident(self, layer: int) -> torch.Tensor:
        return self._stores[layer].resident_ids()

    def keep(self, layer: int, ids: torch.Tensor, room: int | None = None) -> None:
        self._stores[layer].keep(ids, room)

    def prefetch(self, layer: int, ids: torch.Tensor) -> None:
        self._stores[layer].prefetch(ids)

    def arrange(self, layer: int, order: torch.Tensor) -> None:
        self._stores[layer].arrange(order)

    @torch.inference_mode()  # tensors made in this mode can be written in it alone
    def write(
        self,
        layer: int,
        ids: torch.Tensor,
        values: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> None:
        device, there = self._stores[layer].device, ids >= 0
        if not device.writable:
            raise ValueError(
                "the method writes keys or values anew, and this memory is the engine's;"
                " backend=hf can"
            )
        if device.ids is None or device.pool.value.dtype != device.codecs.value.dtype:
            raise ValueError(
                "write is for tokens that keep has left on the device, before end_prefill has coded"
                " them"
            )
        slots = device.locate(ids).slots[there]
        for block, rows in ((device.pool.key, keys), (device.pool.value, values)):
            if rows is not None:
                block[slots] = rows[there].to(block.dtype)

    def _read(self, layer: int, ids: torch.Tensor | None, which: int) -> torch.Tensor:
        store = self._stores[layer]
        size = store.sizes[which] or store.sizes[0]  # a value within its key is read there
        if ids is not None:
            ids = ids.expand(ids.shape[0], store.kv_heads, ids.shape[2])
            read = store.read(ids)[which]
            self._metered(int((ids >= 0).sum()) * size)
            return read
        read = store.read(None)[which]
        self._meter_all(store, size, 1)
        if self.repeats is not None:
            self.repeats.append(partial(self._meter_all, store, size))
        return read

    def _meter_all(self, store: LayerStore, size: int, times: int) -> None:
        longest = store.device.longest if store.home == "device" else max(store.lengths)
        self._metered(times * longest * store.device.numbers.size * size)
