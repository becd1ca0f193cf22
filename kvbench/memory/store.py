"""Where keys and values live: one `LayerStore` a layer.

A store knows tokens by id (their logical position in a sequence). Each token of a KV head is in one tier: on the
device, on the host, or dropped. Host tokens that a step attends are staged on the device; what is still there from the
last step is not moved again. The store knows no method, no model and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import torch

from kvbench.memory.host import Arrival, HostTier
from kvbench.memory.plan import NO_TOKEN, whole_pages
from kvbench.memory.stage import Located, Stage, Staged, rows
from kvbench.memory.transfer import uploaded
from kvbench.spans import Spans

GROWTH = 256  # slots added at least when a store of unknown final length is full
DROPPED, DEVICE, HOST = 0, 1, 2


class LayerStore:
    """Keys and values of one layer.

    Device slots of a row and head are filled from 0 without holes, in ascending order of token id. Slots beyond are
    zero or stale, finite, and never attended.

    Args:
        home: where tokens live once the prompt is read.
        on_drop: what `keep` does with tokens that are not named.
        grows: the final length is unknown, so memory may be reallocated; else the reserved blocks never move.
        moved: told the bytes that went from the host to the device.
        spans: where the time of transfers is counted.
        shared: a sealed store with a prompt to begin from; its memory is used in place, behind the prompt too.

    Attributes:
        key, value: [B, Hkv, capacity, D], the device tier, whole pages.
        ids: [B, Hkv, capacity] int64, the token in each slot (`NO_TOKEN` beyond the used ones), or None: slot = id.
        used: [B, Hkv] int64 on the CPU, slots filled.
        lengths: tokens seen by each row, kept or not.
        reserved: slots asked for; whole pages may be a few more.
        host: the host tier, where there is one.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        home: Literal["device", "host"] = "device",
        on_drop: Literal["discard", "offload"] = "discard",
        grows: bool = False,
        moved: Callable[[int], None] = lambda size: None,
        spans: Spans | None = None,
        shared: LayerStore | None = None,
    ) -> None:
        size = (batch, kv_heads, whole_pages(capacity), head_dim)
        if shared is None:
            # Zeros, not empty: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
            self.key = torch.zeros(size, dtype=dtype, device=device)
            self.value = torch.zeros(size, dtype=dtype, device=device)
        else:
            self.key, self.value = shared.key, shared.value
        self.ids: torch.Tensor | None = None
        self.used = torch.zeros(batch, kv_heads, dtype=torch.int64)
        self.lengths = [0] * batch
        self.host: HostTier | None = None
        self._home, self._on_drop, self._grows = home, on_drop, grows
        self._moved, self._spans = moved, spans or Spans()
        self.reserved = capacity
        self._stage: Stage | None = None  # of a store with a host tier
        self._closed = False
        if shared is not None:
            self.seal_prompt(shared.lengths)

    @property
    def capacity(self) -> int:
        """Device slots."""
        return self.key.shape[2]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in one KV head."""
        return 2 * self.key.shape[3] * self.key.element_size()

    @property
    def filled(self) -> torch.Tensor:
        """[B, Hkv] int64 on the device, slots filled; nothing waits for it."""
        return uploaded(self.used, self.key.device)

    @property
    def seen(self) -> torch.Tensor:
        """[B] int64 on the device, tokens seen by each row; nothing waits for it."""
        return uploaded(torch.tensor(self.lengths), self.key.device)

    def resident_bytes(self) -> int:
        """Bytes of the tokens on the device, staged ones included, reserved slots not."""
        return int(self.resident_counts().sum()) * self.entry_bytes

    def resident_counts(self) -> torch.Tensor:
        """[B, Hkv] tokens on the device, staged ones included."""
        if self._staged is None:
            return self.used
        return self.used + (self._staged.ids != NO_TOKEN).sum(dim=2).cpu()

    def host_bytes(self) -> int:
        """Bytes of the tokens whose home is the host."""
        return 0 if self.host is None else int(self.host.present.sum()) * self.entry_bytes

    def allocated_bytes(self) -> int:
        """Bytes this store holds on its device, reserved slots and staged copies included."""
        held = [self.key, self.value] + ([] if self._staged is None else [self._staged.key, self._staged.value])
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def tensors(self) -> list[torch.Tensor]:
        """The keys and values of both tiers."""
        return [self.key, self.value] + ([] if self.host is None else [self.host.key, self.host.value])

    def tiers(self) -> torch.Tensor:
        """[B, Hkv, longest row] int8: `DEVICE`, `HOST` or `DROPPED` for each token seen (`DROPPED` beyond a row)."""
        tiers = torch.zeros(*self.used.shape, max(self.lengths), dtype=torch.int8)
        kept = self._device_ids().cpu()
        at = (kept >= 0).nonzero(as_tuple=True)
        tiers[at[0], at[1], kept[at]] = DEVICE
        if self.host is not None:
            on_host = self.host.present[:, :, : tiers.shape[2]]
            assert not bool((on_host & (tiers == DEVICE)).any()), "a token lives in two tiers"
            tiers[on_host] = HOST
        return tiers

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
        """The prompt is complete; row b has `lengths[b]` tokens. With a host tier it is there from now on."""
        self.lengths = list(lengths)
        self.used = torch.tensor(self.lengths).unsqueeze(1).repeat(1, self.key.shape[1])
        if self._home == "host":
            self._open_host().write_prompt(self.key, self.value, self.lengths)

    def _open_host(self) -> HostTier:
        moved, size = self._moved, self.entry_bytes
        self.host = HostTier(self.key, max(self.reserved, *self.lengths))
        self._stage = Stage(self.host, self.key.device, lambda tokens: moved(tokens * size))
        return self.host

    @property
    def _staged(self) -> Staged | None:
        return None if self._stage is None else self._stage.staged

    def close(self) -> None:
        """The shared memory behind the prompt goes to another store."""
        self._closed = True

    def on_host(self, count: int) -> Future[tuple[torch.Tensor, torch.Tensor]] | None:
        """The first `count` keys and values in host memory, [B, Hkv, count, D], where the home is the host."""
        if self.host is None:
            return None
        return Arrival(self.host.key[:, :, :count], self.host.value[:, :, :count], self.host.copied)

    def leave_device(self) -> None:
        """Free the prompt's device copy of a store whose home is the host; nothing to do for another."""
        if self._home == "host":
            self.key, self.value = self.key[:, :, :0].clone(), self.value[:, :, :0].clone()
            self.used = torch.zeros_like(self.used)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row; key, value [B, Hkv, 1, D]."""
        if self._closed:
            raise RuntimeError("another method has begun from the prefill that this store shares")
        if self.host is not None and max(self.lengths) >= self.host.capacity:
            self.host.grow(self._grown(max(self.lengths) + 1, self.host.capacity))
        if self._home == "host":
            assert self.host is not None and self._stage is not None
            self.host.append(self.lengths, key, value)
            self._stage.newest = (key, value)
        else:
            self._append_on_device(key, value)
        self.lengths = [length + 1 for length in self.lengths]

    def _append_on_device(self, key: torch.Tensor, value: torch.Tensor) -> None:
        first = int(self.used[0, 0])
        self._reserve(int(self.used.max()) + 1)
        if self._uniform:
            self.key[:, :, first : first + 1] = key
            self.value[:, :, first : first + 1] = value
        else:
            slot = self.filled[..., None, None].expand_as(key)
            self.key.scatter_(2, slot, key)
            self.value.scatter_(2, slot, value)
        if self.ids is not None:
            token = torch.tensor(self.lengths)[:, None].expand_as(self.used)
            slot, token = uploaded(torch.stack([self.used, token]), key.device)
            self.ids.scatter_(2, slot[..., None], token[..., None])
        self.used = self.used + 1

    def _reserve(self, slots: int) -> None:
        if slots <= self.reserved:
            return
        self.reserved = self._grown(slots, self.reserved)
        capacity = whole_pages(self.reserved)
        self.key, self.value = _with_slots(self.key, capacity), _with_slots(self.value, capacity)
        if self.ids is not None:
            self.ids = _with_free_slots(self.ids, capacity)

    def _grown(self, slots: int, held: int) -> int:
        if not self._grows:
            raise RuntimeError(f"the store reserved {held} tokens and was asked to hold {slots}")
        return max(slots, held + max(GROWTH, held // 8))

    # -- reading ---------------------------------------------------------------------------------------------------

    def resident(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values in place, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all used)."""
        if self._home == "host":
            raise LookupError("a method whose tokens live on the host must select: nothing is resident to attend")
        longest = int(self.used.max())
        key, value = self.key[:, :, :longest], self.value[:, :, :longest]
        if self._uniform:
            return key, value, None
        return key, value, torch.arange(longest, device=key.device) < self.filled[..., None]

    @property
    def _uniform(self) -> bool:
        """All KV heads of all rows have filled as many slots."""
        return int(self.used.min()) == int(self.used.max())

    def resident_ids(self) -> torch.Tensor:
        """Token ids on the device, staged ones included, ascending, [B, Hkv, n] with trailing -1."""
        ids = self._device_ids()
        if self._staged is None:
            return ids
        staged = self._staged.ids.to(ids.device)
        both = torch.cat([torch.where(ids < 0, NO_TOKEN, ids), staged], dim=2).sort(dim=2).values
        return torch.where(both == NO_TOKEN, -1, both)[..., : int(self.resident_counts().max())]

    def _device_ids(self) -> torch.Tensor:
        longest = int(self.used.max())
        if self.ids is not None:
            ids = self.ids[:, :, :longest]
            return torch.where(ids == NO_TOKEN, -1, ids)
        slots = torch.arange(longest, device=self.key.device).expand(*self.used.shape, longest)
        return slots if self._uniform else torch.where(slots < self.filled[..., None], slots, -1)

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [B, Hkv, M] (-1: any finite content), each [B, Hkv, M, D] on the device.

        Raises:
            LookupError: as `locate`.
        """
        return self.locate(index).rows()

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie on the device, on which or on the CPU the index may be.

        Host tokens are brought up in one transfer and stay staged until the next call. Nothing waits for a GPU but
        for an index on it that names tokens of a tier which is not in the order of its ids.

        Raises:
            LookupError: a token id that is dropped or was never seen. An index on a GPU is checked there, and aborts
                the kernel instead.
        """
        if self._stage is None:
            index, present = self._up(index)
            slots, found = self._find(index)
            self._check(index, found)
            return Located(self.key, self.value, slots, present)
        with self._spans("transfer"):
            if self._home == "device":
                return self._both_tiers(self._stage, index)
            return self._stage.locate(index, self.lengths)

    def _up(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An index on the device, and where it names a token (None: everywhere, as far as that is known here)."""
        present = index >= 0
        if not index.is_cuda and bool(present.all()):
            return uploaded(index, self.key.device), None
        return uploaded(index, self.key.device), uploaded(present, self.key.device)

    def _check(self, index: torch.Tensor, found: torch.Tensor) -> None:
        found = found | (index < 0)
        if index.is_cuda:
            torch._assert_async(found.all())
        elif not bool(found.all()):
            raise LookupError(f"token {index[~found][0].item()} is not in the store: dropped earlier, or not seen")

    def _find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Device slots of token ids [B, Hkv, M] on the device (0: there is none), and whether the token is there."""
        wanted = index.clamp(min=0)
        if self.ids is None or not self.capacity:
            slots, found = wanted, wanted < (int(self.used[0, 0]) if self._uniform else self.filled[..., None])
        else:
            slots = torch.searchsorted(self.ids, wanted).clamp(max=self.capacity - 1)
            found = self.ids.gather(2, slots) == wanted
        found = found & (index >= 0)
        return slots.masked_fill(~found, 0), found

    def _both_tiers(self, stage: Stage, index: torch.Tensor) -> Located:
        """`locate` where some tokens have left the device: all in one block, in the order asked for."""
        count = index.shape[2]
        above, present = self._up(torch.nn.functional.pad(index, (0, whole_pages(count) - count), value=-1))
        slots, found = self._find(above)
        key, value = stage.locate(torch.where(found, -1, above).cpu(), self.lengths).rows()
        if self.capacity:
            key = torch.where(found[..., None], rows(self.key, slots), key)
            value = torch.where(found[..., None], rows(self.value, slots), value)
        order = torch.arange(count, device=key.device).expand(*index.shape)
        return Located(key, value, order, None if present is None else present[..., :count])

    def prefetch(self, index: torch.Tensor) -> None:
        """Begin to bring up host tokens of index [B, Hkv or 1, M] on the CPU, beside what the device computes.

        Tokens that are not there yet are passed over. The next `locate` finds them on the device.
        """
        if self._stage is None:
            raise ValueError("prefetch brings up tokens of host memory; declare Needs(home='host')")
        with self._spans("transfer"):
            self._stage.prefetch(index, self.lengths)

    def count_fetched(self) -> None:
        """Tell the audit what the device itself has read from the host; waits for it."""
        if self._stage is not None:
            self._stage.count_fetched()

    def everything(self, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [n] ascending, keys and values [n, D], of all tokens one KV head still has in any tier, on the CPU."""
        if self.host is not None:
            self.host.settle()
        used = int(self.used[row, head])
        ids = torch.arange(used) if self.ids is None else self.ids[row, head, :used].cpu()
        key, value = self.key[row, head, :used].cpu(), self.value[row, head, :used].cpu()
        if self.host is not None:
            there = self.host.present[row, head].nonzero()[:, 0]
            slot = self.host.place[row, head, there]
            ids, order = torch.cat([ids, there]).sort()
            key = torch.cat([key, self.host.key[row, head, slot]])[order]
            value = torch.cat([value, self.host.value[row, head, slot]])[order]
        return ids, key, value

    def read(self, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values where they lie, without staging: of token ids [B, Hkv, M], or of all tokens of the home tier.

        A store whose home is the host answers in host memory. None gives tokens in id order, in place where it can.

        Raises:
            LookupError: as `gather`.
        """
        if self._home == "device":
            return self.resident()[:2] if index is None else self.gather(index)
        assert self.host is not None
        self.host.settle()
        if index is None:
            index = torch.arange(max(self.lengths)).expand(*self.used.shape, -1)
        else:
            index = index.cpu()
            unseen = index >= torch.tensor(self.lengths)[:, None, None]
            if bool(unseen.any()):
                raise LookupError(f"token {index[unseen][0].item()} is not in the store: not seen yet")
        slot = self.host.place.gather(2, index.clamp(min=0))
        return rows(self.host.key, slot), rows(self.host.value, slot)

    # -- evicting --------------------------------------------------------------------------------------------------

    def keep(self, index: torch.Tensor) -> None:
        """Keep token ids [B, Hkv or 1, M] (-1 = none, any order) on the device; drop or offload all others there.

        Named tokens that live on the host come back to the device. As many slots as were reserved for tokens to come
        stay reserved, in newly allocated memory.
        """
        if self._home == "host":
            raise ValueError("keep is for stores whose home is the device; this one's tokens live on the host")
        index = index.expand(index.shape[0], self.key.shape[1], index.shape[2]).to(self.key.device)
        ids = torch.where(index < 0, NO_TOKEN, index).sort(dim=2).values
        if bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != NO_TOKEN)).any()):
            raise ValueError("keep was given a token id twice in one KV head")
        used = (ids != NO_TOKEN).sum(dim=2).cpu()
        count = int(used.max())
        ids = ids[:, :, :count]
        wanted = torch.where(ids == NO_TOKEN, -1, ids)
        key, value = self.gather(wanted)
        if self._on_drop == "offload":
            self._offload_all_but(wanted)
        self.reserved = count + self.reserved - int(self.used.max())
        capacity = whole_pages(self.reserved)
        self.key, self.value = _with_slots(key, capacity), _with_slots(value, capacity)
        self.ids = _with_free_slots(ids, capacity)
        self.used = used

    def _offload_all_but(self, kept: torch.Tensor) -> None:
        host = self.host or self._open_host()
        here = self._device_ids()
        stays = torch.isin(_globally(here), _globally(kept))
        key, value = self.key[:, :, : here.shape[2]], self.value[:, :, : here.shape[2]]
        host.write(torch.where(stays, -1, here), key, value)
        row, head, at = (kept >= 0).nonzero(as_tuple=True)
        host.present[row.cpu(), head.cpu(), kept[row, head, at].cpu()] = False
        assert self._stage is not None
        self._stage.forget()

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order of the host tier; see `HostTier.arrange`."""
        if self.host is None:
            raise ValueError("arrange sets the order of host memory; declare Needs(home='host')")
        self.host.arrange(order)


def _with_slots(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of tensor [B, H, n, D] with `capacity` slots, zero beyond n."""
    grown = tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[3])
    grown[:, :, : tensor.shape[2]] = tensor
    return grown


def _globally(ids: torch.Tensor) -> torch.Tensor:
    """Token ids [B, H, M] as numbers that differ between rows and heads; -1 stays -1."""
    batch, heads, _ = ids.shape
    first = torch.arange(batch * heads, device=ids.device).view(batch, heads, 1) << 40
    return torch.where(ids < 0, -1, ids + first)


def _with_free_slots(ids: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of slot ids [B, H, n] with `capacity` slots, free beyond n."""
    grown = ids.new_full((*ids.shape[:2], capacity), NO_TOKEN)
    grown[:, :, : ids.shape[2]] = ids
    return grown
