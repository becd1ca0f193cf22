"""Where keys and values live: one `LayerStore` a layer.

A store knows tokens by id (their logical position in a sequence). Each token of a KV head is in one
tier: on the device, on the host, or dropped. Host tokens that a step attends are staged on the
device; what is still there from the last step is not moved again. The store knows no method, no
model and no attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.nn.functional import pad

from kvbench.memory.codecs import Codecs
from kvbench.memory.device import (
    NO_TOKEN,
    DeviceTier,
    Located,
    Pool,
    Resident,
    distinct,
    index_of,
    lists_of,
    of_kv_heads,
    repeated,
    rows_at,
    whole_pages,
    without,
)
from kvbench.memory.grouped import GroupedTier
from kvbench.memory.host import Arrival, HostTier
from kvbench.memory.stage import Stage, StoreSettings
from kvbench.memory.transfer import fetch, uploaded, zeros
from kvbench.method import Selection

Result = TypeVar("Result")


class LayerStore:
    """Keys and values of one layer: writes them, brings them up, evicts them.

    Parameters
    ----------
    capacity
        tokens a row to reserve memory for.
    latent_dim
        see `kvbench.method.Shape`.
    shared
        keys and values [B, Hkv, capacity, width] of a prompt to begin from, which is to be sealed;
        their memory, whole pages, is used in place, after the prompt too.
    settings
        see `StoreSettings`.

    Attributes
    ----------
    lengths
        tokens seen by each row, kept or not.
    device, host, stage
        the tiers, and what of the host's is on the device, where there is one.
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
        latent_dim: int = 0,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        self.how = how = StoreSettings(**settings)
        self.home = how.home
        self.lengths = [0] * batch
        self.host: HostTier | None = None
        self.stage: Stage | None = None
        self._closed = False
        self._places: tuple[Any, ...] = ()  # where tokens were when this was worked out
        self._worked_out: dict[Any, Any] = {}
        if shared is None:
            # Zeros, not empty: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
            size = batch, kv_heads, whole_pages(capacity)
            key, value = (
                zeros((*size, width), dtype, device)
                for width in (head_dim, 0 if latent_dim else head_dim)
            )
            shared = key, value
        self.device = DeviceTier(*shared, capacity, how.grows, latent_dim)

    def __getstate__(self) -> dict[str, Any]:
        """All but what was worked out, which has addresses."""
        return self.__dict__ | {"_places": (), "_worked_out": {}}

    def worked_out(self, find: Callable[[Any], Result]) -> Result:
        """find(store), asked again where the tiers hold their tokens elsewhere than they did; a
        token that is appended in place changes only the numbers in `device.numbers`.
        """
        device, host = self.device, self.host
        places = (device.pool, device.numbers, device.ids, None if host is None else host.key)
        if not self._places or not all(map(operator.is_, self._places, places)):
            self._places, self._worked_out = places, {}
        if find not in self._worked_out:
            self._worked_out[find] = find(self)
        answer: Result = self._worked_out[find]
        return answer

    @property
    def kv_heads(self) -> int:
        """KV heads, Hkv."""
        return self.device.numbers.shape[1]

    @property
    def latent_dim(self) -> int:
        """See `kvbench.method.Shape`."""
        return self.device.codecs.latent_dim

    @property
    def seen(self) -> torch.Tensor:
        """[B] int64 on the device, tokens seen by each row; on a GPU the next is counted in it."""
        if self.device.counters is not None:
            return self.device.counters.seen
        return uploaded(torch.tensor(self.lengths), self.device.first.device)

    @property
    def layout(self) -> int | None:
        """Changes whenever slots have moved in memory; None: the next token moves them."""
        full = self.device.longest == self.device.reserved
        return None if full else self.device.layout

    @property
    def complete(self) -> bool:
        """Every token seen is on the device."""
        return self.host is None and self.device.ids is None

    @property
    def rebuilds_keys(self) -> bool:
        """Keys of tokens on the host are given by the method, and not moved."""
        return self.stage is not None and self.how.rebuilds_keys

    def _codecs(self, tier: Literal["device", "host"]) -> Codecs:
        """How a tier holds keys and values once the prompt is over."""
        plain, latent_dim = self.device.codecs.key, self.latent_dim
        return Codecs.of(self.how.kv, tier, plain.head_dim, plain.dtype, latent_dim)

    # -- writing -----------------------------------------------------------------------------------

    def write_prompt(
        self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]
    ) -> None:
        """Store a prefill chunk: key, value [B, Hkv, q, D] of columns column .. column + q - 1.

        Row b's first token stands at column `offsets[b]` (left padding); what lies before it is not
        stored. Columns after a row's end are stale slots, which its first new tokens overwrite.
        """
        self.device.write_prompt(key, value, column, offsets)

    def seal_prompt(self, lengths: Sequence[int]) -> None:
        """The prompt is complete; row b has `lengths[b]` tokens, from now on at home, too."""
        self.lengths = list(lengths)
        self.device.seal_prompt(self.lengths)
        if self.home == "host":
            self._open_host()[0].write_prompt(self.device.key, self.device.value, self.lengths)

    def leave_device(self) -> None:
        """Free the device's copy of a prompt whose home is the host."""
        if self.home == "host":
            self.device.clear()

    def encode(self) -> None:
        """Code the device's tokens as its kind says: after the method's eviction of the prompt."""
        if self.how.kv.grouped:
            self.device = GroupedTier(self.device, self._codecs("device"))
        else:
            self.device.encode(self._codecs("device"))

    def close(self) -> None:
        """Another store has the shared memory after the prompt; this one may not write any more."""
        self._closed = True

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row; key, value [B, Hkv, 1, D]. It is refused where no slot
        is free, or the memory was shared and went to another store.
        """
        if self._closed:
            raise RuntimeError("another method has begun from the prefill that this store shares")
        if self.host is not None:
            self.host.reserve(max(self.lengths) + 1)
        if self.home == "host":
            assert self.host is not None and self.stage is not None
            self.stage.newest = encoded = self.host.codecs.encode(key, value)
            self.host.append(self.lengths, *encoded)
        else:
            self.device.append(self.lengths, key, value)
        self.lengths = [length + 1 for length in self.lengths]

    def advance(self, tokens: int) -> None:
        """Count tokens of every row that the device has stored by itself; below 0: has not."""
        self.lengths = [length + tokens for length in self.lengths]
        self.device.advance(tokens)

    def _open_host(self) -> tuple[HostTier, Stage]:
        """The host tier and its stage, made where there are none yet."""
        if self.host is None or self.stage is None:
            device, rows = self.device.first.device, (len(self.lengths), self.kv_heads)
            capacity = max(self.device.reserved, *self.lengths)
            settings = capacity, self.how.grows, self.how.host_keys
            self.host = HostTier(rows, self._codecs("host"), device, *settings)
            self.stage = Stage(self.host, device, self.how)
        return self.host, self.stage

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order of the host tier; see `HostTier.arrange`."""
        if self.host is None or self.stage is None:
            raise ValueError("arrange sets the order of host memory; declare Needs(home='host')")
        self.stage.rest()
        self.host.arrange(order)

    # -- where tokens are --------------------------------------------------------------------------

    def resident_ids(self) -> torch.Tensor:
        """Token ids on the device, staged ones too, ascending, [B, Hkv, n] with trailing -1."""
        ids, staged = self.device.token_ids(), self._staged_ids()
        if staged is None:
            return ids
        lists = lists_of(torch.cat([ids, index_of(staged.to(ids.device))], dim=2))
        return index_of(lists[..., : int((lists != NO_TOKEN).sum(dim=2).max())])

    def _staged_ids(self) -> torch.Tensor | None:
        """[B, Hkv, U], `NO_TOKEN` after the last; None: nothing is staged."""
        staged = None if self.stage is None else self.stage.staged
        return None if staged is None else staged.ids

    def far(self, index: torch.Tensor) -> torch.Tensor:
        """Token ids [B, Hs, M] as lists of KV heads, -1 for those that do not live on the host."""
        assert self.host is not None
        index = of_kv_heads(index, self.kv_heads)
        return torch.where(self.host.here(index), index, -1)

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie on the device, on which or on the CPU the
        index may be.

        Host tokens are brought up and stay staged until the next call. Nothing waits for a GPU but
        for an index on it that names tokens of a tier which is not in the order of its ids.

        Raises
        ------
        LookupError
            a token id that is dropped or was never seen. An index on a GPU is checked there, and
            aborts the kernel instead.
        """
        if self.stage is None:
            return self.device.locate(index)
        with self.how.spans("transfer"):
            if self.home == "device":
                return self._locate_in_both(self.stage, index)
            return self.stage.locate(index, self.lengths)

    def _locate_in_both(
        self, stage: Stage, index: torch.Tensor, codecs: Codecs | None = None
    ) -> Located:
        """`locate` where some tokens have left the device: all in one block, in the order asked
        for, held as `codecs` say; None: as both tiers do, or else decoded.
        """
        theirs, ours = self._codecs("host"), self.device.codecs
        plain = Codecs.native(ours.key.head_dim, ours.key.dtype, self.latent_dim)
        codecs = codecs or (ours if ours == theirs else plain)
        count = index.shape[2]
        ids, present = self.device.upload(pad(index, (0, whole_pages(count) - count), value=-1))
        slots, on_device = self.device.find(ids)
        others = torch.where(on_device, -1, ids)
        there = stage.locate(others.cpu(), self.lengths)
        if ids.is_cuda and ours == theirs == codecs:
            near = torch.where(on_device, slots + self.device.first[..., None], -1)
            far = torch.where(others >= 0, there.slots, -1)
            rows = near.view(-1), far.view(-1)
            both = Pool(*fetch(*rows, [*self.device.pool], [], [*there.pool]))
        else:
            near_rows = ours.recoded(*self.device.at(slots), codecs)
            far_rows = theirs.recoded(*there.stored_rows(), codecs)
            pairs = zip(near_rows, far_rows, strict=True)
            both = Pool.of(*(torch.where(on_device[..., None], *pair) for pair in pairs))
        order = torch.arange(ids.numel(), device=on_device.device).view(ids.shape)[..., :count]
        present = None if present is None else present[..., :count]
        return Located(both, order, present, codecs)

    def prefetch(self, index: torch.Tensor) -> None:
        """Begin to bring up host tokens of index [B, Hkv or 1, M] on the CPU for the next `locate`,
        beside what the device computes; tokens that are not there yet are passed over.
        """
        if self.stage is None:
            raise ValueError("prefetch brings up tokens of host memory; declare Needs(home='host')")
        with self.how.spans("transfer"):
            self.stage.prefetch(index, self.lengths)

    def attended(self, index: torch.Tensor) -> None:
        """Note that token ids [B, Hs, M] (-1 = none; Hs = 1, Hkv or Hq) were attended where they
        lie; those of the host are counted as by `locate`, in `count_fetched` or at the next change.
        """
        if self.stage is not None:
            far = partial(self.far, index) if self.device.total else lambda: index
            self.stage.attended(far, self.lengths)

    def count_fetched(self) -> None:
        """See `Stage.count_fetched`."""
        if self.stage is not None:
            self.stage.count_fetched()

    # -- reading -----------------------------------------------------------------------------------

    def resident(self) -> Resident:
        """See `DeviceTier.resident`; on a GPU of all slots, so that steps are alike."""
        if self.home == "host":
            raise LookupError(
                "a method whose tokens live on the host must select: nothing is resident to attend"
            )
        return self.device.resident(whole=not self.device.first.is_cpu)

    def remaining(self) -> Resident:
        """All tokens that any tier still has, on the device, those of the host last."""
        near, device = self.device.resident(), self.device.first.device
        if self.host is None:
            return near
        ids = self._far_ids()
        there = ids >= 0
        far = self.host.codecs.decode(*self.host.gather(ids))
        mask = near.mask
        if mask is None:
            mask = torch.ones(near.key.shape[:3], dtype=torch.bool, device=device)
        pairs = zip((near.key, near.value, mask), (*far, there), strict=True)
        parts = (torch.cat([block, uploaded(more, device)], dim=2) for block, more in pairs)
        both = Resident(*parts)
        whole = bool(there.all()) and not self.device.used.any()
        return both._replace(mask=None) if whole else both

    def remaining_ids(self) -> torch.Tensor:
        """Ids of the tokens in `remaining`, in its order, [B, Hkv, n] on the CPU, -1 for none."""
        near = self.device.token_ids().cpu()
        return near if self.host is None else torch.cat([near, self._far_ids()], dim=2)

    def _far_ids(self) -> torch.Tensor:
        """[B, Hkv, longest row], of each token its id where it is on the host, else -1."""
        assert self.host is not None
        longest = max(self.lengths)
        return torch.where(self.host.present[..., :longest], torch.arange(longest), -1)

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [B, Hkv, M] (-1: any finite content), each [B, Hkv, M, D] on
        the device; raises as `locate`, where keys are rebuilt for any token off the device.
        """
        return (self.device if self.how.rebuilds_keys else self).locate(index).rows()

    def read(self, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values where they live, without staging: of token ids [B, Hkv, M], or (None) of
        all tokens of the home tier by id, in place where it can; raises as `gather`.
        """
        if self.home == "device":
            if index is not None:
                return self.gather(uploaded(index, self.device.first.device))
            near = self.device
            if near.even and not near.first.is_cpu and not self.how.kv.grouped:
                return near.codecs.decode(near.key, near.value)  # no mask is asked for
            return self.resident()[:2]
        assert self.host is not None
        if index is None:
            index = torch.arange(max(self.lengths)).expand(*self.device.used.shape, -1)
        else:
            self.host.slots(index := index.cpu())  # refuses what is not there
        return self.host.codecs.decode(*self.host.gather(index))

    def with_stored_keys(self, selection: Selection) -> Selection:
        """A selection with the stored keys of tokens on the device, the rebuilt ones of others."""
        if selection.keys is None or not self.rebuilds_keys:
            return selection
        index = uploaded(selection.index, selection.keys.device).expand(-1, self.kv_heads, -1)
        slots, on_device = self.device.find(index)
        rows = rows_at(self.device.pool.key, slots + self.device.first[..., None])
        stored = self.device.codecs.key.decode(rows)
        rebuilt = pad(selection.keys, (0, 0, 0, stored.shape[2] - selection.keys.shape[2]))
        return replace(selection, keys=torch.where(on_device[..., None], stored, rebuilt))

    def first(self, count: int) -> dict[str, Any]:
        """The first tokens of a prompt, in place, as a `kvbench.method.Prompt` names them."""
        keys, values = self.device.prompt_rows(count)
        on_host = None if self.host is None else Arrival(self.host, count)
        return {"keys": keys, "values": values, "on_host": on_host}

    # -- evicting ----------------------------------------------------------------------------------

    def keep(self, index: torch.Tensor, room: int | None = None) -> None:
        """Keep token ids [B, Hs, M] (-1 = none, any order) on the device; drop or offload all
        others there.

        Hs is 1, Hkv or Hq: what any query head of a group names stays. Named tokens that live on
        the host come back to the device, in newly allocated memory. Slots for `room` tokens to come
        are reserved; None: as many as were.

        Raises
        ------
        ValueError
            a token id twice in one list, or the home is the host.
        LookupError
            as `locate`.
        """
        if self.home == "host":
            raise ValueError(
                "keep is for stores whose home is the device; this one's tokens live on the host"
            )
        lists = lists_of(index.to(self.device.first.device))
        if bool((repeated(lists) & (lists != NO_TOKEN)).any()):
            raise ValueError("keep was given a token id twice in one list")
        ids = of_kv_heads(lists, self.kv_heads)
        if lists.shape[1] > self.kv_heads:
            ids = distinct(ids.sort(dim=2).values)
        used = (ids != NO_TOKEN).sum(dim=2).cpu()
        ids = ids[:, :, : int(used.max())]
        retained = index_of(ids)
        if self.stage is None or self.how.rebuilds_keys:
            located = self.device.locate(retained)
        else:
            with self.how.spans("transfer"):
                located = self._locate_in_both(self.stage, retained, self.device.codecs)
        key, value = located.stored_rows()
        if self.how.on_drop == "offload":
            host, stage = self._open_host()
            leaving = self.device.codecs.recoded(*self.device.stored_rows()[:2], host.codecs)
            host.write(without(self.device.token_ids(), retained), *leaving)
            host.remove(retained)
            stage.forget()
        self.device.keep(ids, used, key, value, room)

    # -- bytes -------------------------------------------------------------------------------------

    def resident_bytes(self) -> int:
        """Bytes of the tokens on the device, staged ones too; not of slots without a token."""
        staged = self._staged_ids()
        if self.host is None or staged is None:
            return self.device.nbytes
        return self.device.nbytes + int((staged != NO_TOKEN).sum()) * self.host.codecs.nbytes

    def remote_bytes(self) -> int:
        """Bytes that it takes to bring up all tokens that live on the host."""
        return 0 if self.host is None else self.host.total * self.host.codecs.nbytes

    def host_bytes(self) -> int:
        """Bytes of the tokens that live on the host; of a key that is there decoded, too, both."""
        decoded = 0 if self.host is None else self.host.total * self.host.decoded_bytes
        return self.remote_bytes() + decoded

    def allocated_bytes(self) -> int:
        """Bytes that the layer's keys and values take on the device, staged copies included: more
        than `resident_bytes` by slots for tokens to come, by what is left of each KV head's last
        page, and of prompts of unequal length, as each row takes as much as the longest.
        """
        allocated = sum(part.untyped_storage().nbytes() for part in self.device.blocks())
        staged = self._staged_ids()
        if self.host is not None and staged is not None:
            allocated += staged.numel() * self.host.codecs.nbytes
        return allocated

    def tensors(self) -> list[torch.Tensor]:
        """The keys and values of both tiers."""
        return self.device.blocks() + ([] if self.host is None else self.host.blocks)

    @property
    def entry_bytes(self) -> float:
        """Bytes of a token's key and value in one KV head, the mean over both tiers' tokens."""
        tokens = self.device.total + (0 if self.host is None else self.host.total)
        return (self.device.nbytes + self.remote_bytes()) / max(1, tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a key, and of a value, in the tier that tokens live in."""
        if self.host is None or self.home == "device":
            return self.device.sizes
        return self.host.codecs.key.nbytes, self.host.codecs.value.nbytes
