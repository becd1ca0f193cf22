"""Where keys and values live: one `LayerStore` a layer, and the `View` through which a method sees and evicts.

A store knows tokens by id (their logical position in a sequence) and keeps each at a slot of `[B, Hkv, capacity, D]`.
Until something is evicted, slot = id and no map exists. It knows no method, no model and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvbench.meters import Audit

GROWTH = 256  # slots added at least when a store of unknown final length is full
NO_TOKEN = torch.iinfo(torch.int64).max  # sorts behind every token id


class LayerStore:
    """Keys and values of one layer.

    Slots of a row and head are filled from 0 without holes, in ascending order of token id. Slots beyond are zero or
    stale, finite, and never attended.

    Attributes:
        key, value: [B, Hkv, capacity, D].
        ids: [B, Hkv, capacity] int64, the token in each slot (`NO_TOKEN` beyond the used ones), or None: slot = id.
        used: [B, Hkv] int64 on the CPU, slots filled.
        lengths: tokens seen by each row, kept or not.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        grows: bool = False,
    ) -> None:
        size = (batch, kv_heads, capacity, head_dim)
        # Zeros, not empty: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
        self.key = torch.zeros(size, dtype=dtype, device=device)
        self.value = torch.zeros(size, dtype=dtype, device=device)
        self.ids: torch.Tensor | None = None
        self.used = torch.zeros(batch, kv_heads, dtype=torch.int64)
        self.lengths = [0] * batch
        self.grows = grows

    @property
    def capacity(self) -> int:
        return self.key.shape[2]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in one KV head."""
        return 2 * self.key.shape[3] * self.key.element_size()

    def resident_bytes(self) -> int:
        """Bytes of the tokens kept, reserved slots not counted."""
        return int(self.used.sum()) * self.entry_bytes

    def allocated_bytes(self) -> int:
        """Bytes this store holds on its device, reserved slots included."""
        return self.key.untyped_storage().nbytes() + self.value.untyped_storage().nbytes()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write_prompt(self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]) -> None:
        """Store a prefill chunk: key, value [B, Hkv, q, D] of columns column .. column + q - 1.

        Row b's first token stands at column `offsets[b]` (left padding); what lies before it is not stored. Columns
        behind a row's end are stored as stale slots, which its first generated tokens overwrite.
        """
        end = column + key.shape[2]
        self._reserve(end)
        if not any(offsets):
            self.key[:, :, column:end] = key
            self.value[:, :, column:end] = value
            return
        for row, offset in enumerate(offsets):
            skip = max(0, offset - column)
            if skip < key.shape[2]:
                slots = slice(column + skip - offset, end - offset)
                self.key[row, :, slots] = key[row, :, skip:]
                self.value[row, :, slots] = value[row, :, skip:]

    def seal_prompt(self, lengths: Sequence[int]) -> None:
        """The prompt is complete; row b has `lengths[b]` tokens."""
        self.lengths = list(lengths)
        self.used = torch.tensor(self.lengths).unsqueeze(1).repeat(1, self.key.shape[1])

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row; key, value [B, Hkv, 1, D]."""
        first = int(self.used[0, 0])
        self._reserve(int(self.used.max()) + 1)
        if bool((self.used == first).all()):
            self.key[:, :, first : first + 1] = key
            self.value[:, :, first : first + 1] = value
        else:
            slot = self.used.to(key.device)[..., None, None].expand_as(key)
            self.key.scatter_(2, slot, key)
            self.value.scatter_(2, slot, value)
        if self.ids is not None:
            token = torch.tensor(self.lengths)[:, None, None].expand(*self.used.shape, 1)
            self.ids.scatter_(2, self.used[..., None].to(self.ids.device), token.to(self.ids.device))
        self.used += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _reserve(self, slots: int) -> None:
        if slots <= self.capacity:
            return
        if not self.grows:
            raise RuntimeError(f"the store reserved {self.capacity} tokens and was asked to hold {slots}")
        self._reallocate(max(slots, self.capacity + max(GROWTH, self.capacity // 8)))

    def _reallocate(self, capacity: int) -> None:
        held = self.capacity
        for name in ("key", "value"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, :held] = old
            setattr(self, name, new)
        if self.ids is not None:
            ids = self.ids.new_full((*self.ids.shape[:2], capacity), NO_TOKEN)
            ids[:, :, :held] = self.ids
            self.ids = ids

    # -- reading ---------------------------------------------------------------------------------------------------

    def resident(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values in place, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all used)."""
        longest = int(self.used.max())
        key, value = self.key[:, :, :longest], self.value[:, :, :longest]
        if int(self.used.min()) == longest:
            return key, value, None
        return key, value, torch.arange(longest, device=key.device) < self.used.to(key.device)[..., None]

    def resident_ids(self) -> torch.Tensor:
        """Token ids kept, ascending, [B, Hkv, n] with trailing -1."""
        longest = int(self.used.max())
        if self.ids is not None:
            ids = self.ids[:, :, :longest]
            return torch.where(ids == NO_TOKEN, -1, ids)
        slots = torch.arange(longest, device=self.key.device).expand(*self.used.shape, longest)
        return torch.where(slots < self.used.to(slots.device)[..., None], slots, -1)

    def slots(self, index: torch.Tensor) -> torch.Tensor:
        """Slots of token ids [B, Hkv, M]; -1 goes to slot 0, to be masked by the caller.

        Raises:
            LookupError: a token id that is not kept (checked without a sync on a GPU, where it aborts the kernel).
        """
        wanted = index.clamp(min=0)
        if self.ids is None:
            slots, found = wanted, wanted < self.used.to(index.device)[..., None]
        else:
            slots = torch.searchsorted(self.ids, wanted).clamp(max=self.capacity - 1)
            found = self.ids.gather(2, slots) == wanted
        found = found | (index < 0)
        if index.is_cuda:
            torch._assert_async(found.all())
        elif not bool(found.all()):
            lost = index[~found][0].item()
            raise LookupError(f"token {lost} is not in the store: dropped earlier, or not seen yet")
        return slots.masked_fill(index < 0, 0)

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [B, Hkv, M] (-1: any finite content), each [B, Hkv, M, D]."""
        slots = self.slots(index)
        batch, kv_heads, count = index.shape
        first = torch.arange(batch * kv_heads, device=index.device) * self.capacity
        flat = (slots.view(batch * kv_heads, count) + first[:, None]).view(-1)
        size = (batch, kv_heads, count, self.key.shape[3])
        return self._rows(self.key, flat).view(size), self._rows(self.value, flat).view(size)

    def _rows(self, tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, tensor.shape[3]).index_select(0, flat)

    # -- evicting --------------------------------------------------------------------------------------------------

    def keep(self, index: torch.Tensor) -> None:
        """Keep token ids [B, Hkv or 1, M] (-1 = none, any order) and free the memory of all others.

        As many slots as were reserved for tokens to come stay reserved.
        """
        index = index.expand(index.shape[0], self.key.shape[1], index.shape[2])
        ids = torch.where(index < 0, NO_TOKEN, index).sort(dim=2).values
        if bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != NO_TOKEN)).any()):
            raise ValueError("keep was given a token id twice in one KV head")
        used = (ids != NO_TOKEN).sum(dim=2).cpu()
        count = int(used.max())
        ids = ids[:, :, :count]
        key, value = self.gather(torch.where(ids == NO_TOKEN, -1, ids))
        capacity = count + self.capacity - int(self.used.max())
        self.key = key.new_zeros(*key.shape[:2], capacity, key.shape[3])
        self.value = torch.zeros_like(self.key)
        self.ids = ids.new_full((*ids.shape[:2], capacity), NO_TOKEN)
        self.key[:, :, :count], self.value[:, :, :count], self.ids[:, :, :count] = key, value, ids
        self.used = used


class View:
    """A method's window on the store: metered reads, and the eviction it may ask for.

    Every method takes the true layer index. Token ids are [B, Hkv or 1, M] int64 with -1 = none.
    """

    def __init__(self, stores: dict[int, LayerStore], audit: Audit) -> None:
        self._stores, self._audit = stores, audit

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens seen by each row in `layer`, the current one included after its append."""
        return tuple(self._stores[layer].lengths)

    def keys(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Keys of `ids`, or of all resident tokens in place, [B, Hkv, M, D]. Metered."""
        return self._read(layer, ids, 0)

    def values(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Values, as `keys`. Metered."""
        return self._read(layer, ids, 1)

    def resident(self, layer: int) -> torch.Tensor:
        """Ids of the tokens on the device, ascending, [B, Hkv, M] with trailing -1."""
        return self._stores[layer].resident_ids()

    def keep(self, layer: int, ids: torch.Tensor) -> None:
        """Keep `ids` on the device; what happens to the rest says `Needs.on_drop`."""
        self._stores[layer].keep(ids)

    def _read(self, layer: int, ids: torch.Tensor | None, which: int) -> torch.Tensor:
        store = self._stores[layer]
        if ids is None:
            read = store.resident()[which]
        else:
            read = store.gather(ids.expand(ids.shape[0], store.key.shape[1], ids.shape[2]))[which]
        assert read is not None
        self._audit.read(read.numel() * read.element_size())
        return read
