"""Where keys and values live: one `LayerStore` a layer.

A store knows tokens by id (their logical position in a sequence). Each token of a KV head is in one
tier: on the device, on the host, or dropped. Host tokens that a step attends are staged on the
device; what is still there from the last step is not moved again. The store knows no method, no
model and no attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.nn.functional import pad

from kvbench.memory.codecs import Codecs
from kvbench.memory.device import (
    NO_TOKEN,
    DeviceTier,
    HeadTokens,
    Located,
    Pool,
    Resident,
    flat,
    index_of,
    joined,
    lists_of,
    of_kv_heads,
    repeated,
    whole_pages,
    without,
)
from kvbench.memory.grouped import GroupedTier
from kvbench.memory.host import Arrival, HostTier
from kvbench.memory.kinds import KV, NATIVE, Tier
from kvbench.memory.stage import LAST, Stage, Staged
from kvbench.memory.transfer import uploaded
from kvbench.method import DeviceCache, Selection
from kvbench.spans import Spans

Result = TypeVar("Result")
DROPPED = 0
DEVICE = 1
HOST = 2


class Tiers:
    """The tiers of one layer: a token of a KV head is in one of them, or dropped.

    Parameters
    ----------
    device
        the device tier.
    home
        where tokens live once the prompt is read.
    kinds
        how the tiers hold keys and values once the prompt is over; until then the device has them
        as they came.

    Attributes
    ----------
    home
        as above.
    lengths
        tokens seen by each row, kept or not.
    device
        the device tier.
    host
        the host tier, where there is one.
    stage
        what of the host tier is on the device, where there is one.
    """

    def __init__(
        self, device: DeviceTier, home: Literal["device", "host"] = "device", kinds: KV = NATIVE
    ) -> None:
        self.lengths = [0] * len(device.used)
        self.device = device
        self.host: HostTier | None = None
        self.stage: Stage | None = None
        self.home, self._kinds = home, kinds
        self._worked_out: tuple[tuple[Any, ...], dict[Any, Any]] = (), {}

    def __getstate__(self) -> dict[str, Any]:
        """All but what was worked out, which has addresses."""
        return self.__dict__ | {"_worked_out": ((), {})}

    def worked_out(self, find: Callable[[Any], Result]) -> Result:
        """find(store), which is asked again where the tiers hold their tokens elsewhere than they
        did.

        A token that is appended in place changes none of it but the numbers in `device.numbers`.
        """
        device, host = self.device, self.host
        places = (device.pool, device.numbers, device.ids, None if host is None else host.key)
        previous, answers = self._worked_out
        if not previous or not all(map(operator.is_, previous, places)):
            self._worked_out = places, (answers := {})
        if find not in answers:
            answers[find] = find(self)
        answer: Result = answers[find]
        return answer

    @property
    def kv_heads(self) -> int:
        """KV heads, Hkv."""
        return self.device.numbers.shape[1]

    @property
    def seen(self) -> torch.Tensor:
        """[B] int64 on the device, tokens seen by each row; nothing waits for it.

        On a GPU the next token is counted in it.
        """
        if self.device.counters is not None:
            return self.device.counters.seen
        return uploaded(torch.tensor(self.lengths), self.device.first.device)

    @property
    def layout(self) -> int | None:
        """Changes whenever slots have moved in memory; None: the next token moves them."""
        full = self.device.longest == self.device.reserved
        return None if full else self.device.layout

    def advance(self, tokens: int = 1) -> None:
        """Count tokens of every row that the device has stored by itself; fewer than none: which it
        has not stored.
        """
        self.lengths = [length + tokens for length in self.lengths]
        self.device.advance(tokens)

    @property
    def _staged(self) -> Staged | None:
        return None if self.stage is None else self.stage.staged

    # -- tokens ------------------------------------------------------------------------------------

    def resident_counts(self) -> torch.Tensor:
        """[B, Hkv] tokens on the device, staged ones included."""
        if self._staged is None:
            return self.device.used.clone()
        return self.device.used + (self._staged.ids != NO_TOKEN).sum(dim=2).cpu()

    def resident_ids(self) -> torch.Tensor:
        """Token ids on the device, staged ones included, ascending, [B, Hkv, n] with
        trailing -1.
        """
        ids = self.device.token_ids()
        if self._staged is None:
            return ids
        both = torch.cat([ids, index_of(self._staged.ids.to(ids.device))], dim=2)
        return index_of(lists_of(both))[..., : int(self.resident_counts().max())]

    def tiers(self) -> torch.Tensor:
        """[B, Hkv, longest row] int8: `DEVICE`, `HOST` or `DROPPED` for each token seen (`DROPPED`
        beyond a row).
        """
        tiers = torch.zeros(*self.device.used.shape, max(self.lengths), dtype=torch.int8)
        device_ids = self.device.token_ids().cpu()
        at = (device_ids >= 0).nonzero(as_tuple=True)
        tiers[at[0], at[1], device_ids[at]] = DEVICE
        if self.host is not None:
            on_host = self.host.present[:, :, : tiers.shape[2]]
            assert not bool((on_host & (tiers == DEVICE)).any()), "a token lives in one tier"
            tiers[on_host] = HOST
        return tiers

    def everything(self, row: int, head: int) -> HeadTokens:
        """All tokens that one KV head still has in any tier, on the CPU."""
        tokens = self.device.tokens(row, head)
        if self.host is None:
            return tokens
        both = map(torch.cat, zip(tokens, self.host.tokens(row, head), strict=True))
        tokens = HeadTokens(*both)
        ids, order = tokens.ids.sort()
        return HeadTokens(ids, tokens.key[order], tokens.value[order])

    def on_host(self, count: int) -> Future[tuple[torch.Tensor, torch.Tensor]] | None:
        """The first `count` keys and values in host memory, [B, Hkv, count, D], where the home is
        the host.
        """
        host = self.host
        if host is None:
            return None
        return Arrival(host.key[:, :, :count], host.value[:, :, :count], host.codecs, host.copied)

    def resident(self) -> Resident:
        """Keys and values, [B, Hkv, n, D], and a mask [B, Hkv, n] of used slots (None: all used).

        They are in place but where KV heads were left unequal numbers of tokens. n is the number of
        most used slots; on a GPU that of all slots, so that steps are alike.

        Raises
        ------
        LookupError
            the home is the host.
        """
        if self.home == "host":
            raise LookupError(
                "a method whose tokens live on the host must select: nothing is resident to attend"
            )
        return self.device.resident() if self.device.first.is_cpu else self.device.all_slots()

    @property
    def complete(self) -> bool:
        """Every token seen is on the device."""
        return self.host is None and self.device.ids is None

    def remaining(self) -> Resident:
        """All tokens that any tier still has, on the device. Those of the host are brought up, and
        come last.
        """
        near = self.device.resident()
        if self.host is None:
            return near
        everyone = torch.arange(max(self.lengths)).expand(*self.device.used.shape, -1)
        there = self.host.present[:, :, : everyone.shape[2]]
        far = self.host.codecs.decode(*self.host.gather(everyone))
        more = [uploaded(block, near.key.device) for block in (*far, there)]
        mask, size = near.mask, near.key.shape[:3]
        if mask is None:
            mask = torch.ones(size, dtype=torch.bool, device=near.key.device)
        pairs = zip((near.key, near.value, mask), more, strict=True)
        both = Resident(*(torch.cat(pair, dim=2) for pair in pairs))
        whole = bool(there.all()) and not self.device.used.any()
        return both._replace(mask=None) if whole else both

    def far(self, index: torch.Tensor) -> torch.Tensor:
        """Token ids [B, Hs, M], Hs = 1, Hkv or Hq, as lists of KV heads, -1 for those that do not
        live on the host.
        """
        assert self.host is not None
        index = of_kv_heads(index, self.kv_heads)
        return torch.where(self.host.present.gather(2, index.clamp(min=0)), index, -1)

    @property
    def rebuilds_keys(self) -> bool:
        """Keys of tokens on the host are given by the method, and not moved."""
        return self.stage is not None and self.stage.values_only

    def with_stored_keys(self, selection: Selection) -> Selection:
        """A selection whose keys are the stored ones of tokens on the device, where only the host's
        are rebuilt.
        """
        if selection.keys is None or not self.rebuilds_keys:
            return selection
        index = uploaded(selection.index, selection.keys.device).expand(-1, self.kv_heads, -1)
        slots, on_device = self.device.find(index)
        stored = self.device.codecs.key.decode(
            self.device.pool.key[slots + self.device.first[..., None]]
        )
        rebuilt = pad(selection.keys, (0, 0, 0, stored.shape[2] - selection.keys.shape[2]))
        return replace(selection, keys=torch.where(on_device[..., None], stored, rebuilt))

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order of the host tier; see `HostTier.arrange`.

        Raises
        ------
        ValueError
            there is no host tier, or the order is no permutation.
        """
        if self.host is None:
            raise ValueError("arrange sets the order of host memory; declare Needs(home='host')")
        self.host.arrange(order)

    def encode(self) -> None:
        """Code the device's tokens as its kind says; called after the prompt and the method's
        eviction of it.
        """
        if self._kinds.grouped:
            self.device = GroupedTier(self.device, self._codecs("device"))
        else:
            self.device.encode(self._codecs("device"))

    def _codecs(self, tier: Tier) -> Codecs:
        """How a tier holds keys and values once the prompt is over."""
        plain = self.device.codecs.key
        return Codecs.of(self._kinds, tier, plain.head_dim, plain.dtype)

    # -- bytes -------------------------------------------------------------------------------------

    def resident_bytes(self) -> int:
        """Bytes of the tokens on the device, staged ones included; not those of slots without a
        token.
        """
        if self.host is None:
            return self.device.nbytes
        staged = 0 if self._staged is None else int(self._staged.total)
        return self.device.nbytes + staged * self.host.codecs.nbytes

    def remote_bytes(self) -> int:
        """Bytes that it takes to bring up all tokens that live on the host."""
        return 0 if self.host is None else self.host.total * self.host.codecs.nbytes

    def host_bytes(self) -> int:
        """Bytes of the tokens that live on the host; of a key that is there decoded, too, both."""
        if self.host is None:
            return 0
        return self.host.total * (self.host.codecs.nbytes + self.host.decoded_bytes)

    def allocated_bytes(self) -> int:
        """Bytes that the layer's keys and values take on the device, staged copies included.

        That is more than `resident_bytes` by the slots reserved for tokens to come, by what is left
        of each KV head's last page, and where the prompts of a batch are of unequal length and
        nothing was evicted: each row takes as much as the longest.
        """
        entry_bytes = 0 if self.host is None else self.host.codecs.nbytes
        staged = 0 if self._staged is None else self._staged.ids.numel() * entry_bytes
        return staged + sum(part.untyped_storage().nbytes() for part in self.device.blocks())

    def tensors(self) -> list[torch.Tensor]:
        """The keys and values of both tiers."""
        return self.device.blocks() + ([] if self.host is None else self.host.blocks())

    @property
    def entry_bytes(self) -> float:
        """Bytes of a token's key and value in one KV head, the mean over the tokens of
        both tiers.
        """
        tokens = self.device.total + (0 if self.host is None else self.host.total)
        return (self.device.nbytes + self.remote_bytes()) / max(1, tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a key, and of a value, in the tier that tokens live in."""
        if self.host is None or self.home == "device":
            return self.device.sizes
        return self.host.codecs.key.nbytes, self.host.codecs.value.nbytes


class Sealed(NamedTuple):
    """A layer's prompt: keys and values [B, Hkv, capacity, D], whole pages, of which each row has
    `lengths` tokens.
    """

    key: torch.Tensor
    value: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, store: LayerStore) -> Sealed:
        """That of a sealed store, from which others may begin."""
        return cls(store.device.key, store.device.value, list(store.lengths))

    def first(self, count: int) -> dict[str, Any]:
        """The first tokens, in place, as a `kvbench.method.Prompt` names them."""
        return {"keys": self.key[:, :, :count], "values": self.value[:, :, :count]}


class LayerStore(Tiers):
    """Keys and values of one layer: writes them, brings them up, evicts them.

    Parameters
    ----------
    batch, kv_heads, head_dim, dtype, device
        of keys and values.
    capacity
        tokens a row to reserve memory for.
    home
        where tokens live once the prompt is read.
    on_drop
        what `keep` does with tokens that are not named.
    rebuilds_keys
        a method gives the keys of tokens off the device, so that only their values are moved.
    host_keys
        a method reads the host's keys in place.
    kv
        see `Tiers`.
    grows
        the final length is unknown, so memory may be reallocated; else the reserved blocks never
        move.
    in_place
        attention reads host tokens where they lie, on a CPU; what a device would be sent is counted
        alone.
    cache
        of a home on the host, what stays on the device beside what a step attends.
    moved
        called with the bytes that went from the host to the device.
    count_hits
        called with the attended tokens of KV heads that were staged, and that were moved up.
    spans
        where the time of transfers is counted.
    shared
        a prompt to begin from; its memory is used in place, after the prompt too.
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
        rebuilds_keys: bool = False,
        host_keys: bool = False,
        kv: KV = NATIVE,
        grows: bool = False,
        in_place: bool = False,
        cache: DeviceCache = LAST,
        moved: Callable[[int], None] = lambda size: None,
        count_hits: Callable[[int, int], None] = lambda here, moved: None,
        spans: Spans | None = None,
        shared: Sealed | None = None,
    ) -> None:
        if shared is None:
            super().__init__(
                DeviceTier.zeros((batch, kv_heads, capacity, head_dim), dtype, device, grows),
                home,
                kv,
            )
        else:
            super().__init__(DeviceTier(shared.key, shared.value, capacity, grows), home, kv)
        self._on_drop, self._grows = on_drop, grows
        self._rebuilds_keys, self._host_keys = rebuilds_keys, host_keys
        self._moved, self._spans = moved, spans or Spans()
        self._closed = False
        self._stage = partial(
            Stage,
            in_place=in_place,
            cache=cache,
            count_hits=count_hits,
            values_only=rebuilds_keys,
            spans=self._spans,
        )
        if shared is not None:
            self.seal_prompt(shared.lengths)

    # -- writing -----------------------------------------------------------------------------------

    def write_prompt(
        self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]
    ) -> None:
        """Store a prefill chunk: key, value [B, Hkv, q, D] of columns column .. column + q - 1.

        Row b's first token stands at column `offsets[b]` (left padding); what lies before it is not
        stored. Columns after a row's end are stored as stale slots, which its first generated
        tokens overwrite.
        """
        self.device.write_prompt(key, value, column, offsets)

    def seal_prompt(self, lengths: Sequence[int]) -> None:
        """The prompt is complete; row b has `lengths[b]` tokens.

        With a host tier it is there from now on.
        """
        self.lengths = list(lengths)
        self.device.seal_prompt(self.lengths)
        if self.home == "host":
            self._open_host()[0].write_prompt(self.device.key, self.device.value, self.lengths)

    def leave_device(self) -> None:
        """Free the prompt's device copy of a store whose home is the host; nothing to do for
        another.
        """
        if self.home == "host":
            self.device.clear()

    def close(self) -> None:
        """Give the shared memory after the prompt to another store; this one may not write any
        more.
        """
        self._closed = True

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row; key, value [B, Hkv, 1, D].

        Raises
        ------
        RuntimeError
            no slot is free, or the memory was shared and went to another store.
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

    def _open_host(self) -> tuple[HostTier, Stage]:
        """The host tier and its stage, made where there are none yet."""
        if self.host is None or self.stage is None:
            codecs, device = self._codecs("host"), self.device.first.device
            capacity = max(self.device.reserved, *self.lengths)
            rows = len(self.lengths), self.kv_heads
            self.host = HostTier(rows, codecs, device, capacity, self._grows, self._host_keys)
            size = codecs.value.nbytes if self._rebuilds_keys else codecs.nbytes
            self.stage = self._stage(self.host, device, partial(_moved_tokens, self._moved, size))
        return self.host, self.stage

    # -- reading -----------------------------------------------------------------------------------

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [B, Hkv, M] (-1: any finite content), each [B, Hkv, M, D] on
        the device.

        Raises
        ------
        LookupError
            as `locate`; where keys are rebuilt, any token off the device.
        """
        return (self.device if self._rebuilds_keys else self).locate(index).rows()

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [B, Hkv, M] (-1 = none) lie on the device, on which or on the CPU the
        index may be.

        Host tokens are brought up in one transfer and stay staged until the next call. Nothing
        waits for a GPU but for an index on it that names tokens of a tier which is not in the order
        of its ids.

        Raises
        ------
        LookupError
            a token id that is dropped or was never seen. An index on a GPU is checked there, and
            aborts the kernel instead.
        """
        if self.stage is None:
            return self.device.locate(index)
        with self._spans("transfer"):
            if self.home == "device":
                return self._locate_in_both(self.stage, index)
            return self.stage.locate(index, self.lengths)

    def _locate_in_both(
        self, stage: Stage, index: torch.Tensor, codecs: Codecs | None = None
    ) -> Located:
        """`locate` where some tokens have left the device: all in one block, in the order asked
        for.

        Parameters
        ----------
        codecs
            how the block holds them; None: as both tiers do, or else decoded.
        """
        theirs, ours = self._codecs("host"), self.device.codecs
        codecs = codecs or (
            ours if ours == theirs else Codecs.native(ours.key.head_dim, ours.key.dtype)
        )
        count = index.shape[2]
        ids, present = self.device.upload(pad(index, (0, whole_pages(count) - count), value=-1))
        slots, on_device = self.device.find(ids)
        far = theirs.recoded(
            *stage.locate(torch.where(on_device, -1, ids).cpu(), self.lengths).stored_rows(), codecs
        )
        near = ours.recoded(*self.device.pool.at(slots + self.device.first[..., None]), codecs)
        both = Pool.of(
            *(
                torch.where(on_device[..., None], here, there)
                for here, there in zip(near, far, strict=True)
            )
        )
        order = flat(
            torch.arange(count, device=on_device.device).expand(*index.shape), ids.shape[2]
        )
        return Located(both, order, None if present is None else present[..., :count], codecs)

    def prefetch(self, index: torch.Tensor) -> None:
        """Begin to bring up host tokens of index [B, Hkv or 1, M] on the CPU, beside what the
        device computes.

        Tokens that are not there yet are passed over. The next `locate` finds them on the device.

        Raises
        ------
        ValueError
            there is no host tier.
        """
        if self.stage is None:
            raise ValueError("prefetch brings up tokens of host memory; declare Needs(home='host')")
        with self._spans("transfer"):
            self.stage.prefetch(index, self.lengths)

    def attended(self, index: torch.Tensor) -> None:
        """Note that token ids [B, Hs, M] (-1 = none; Hs = 1, Hkv or Hq) were attended where they
        lie, all in a tier.

        Those of the host are staged without rows and counted as by `locate`, in `count_fetched` or
        at the next change.
        """
        if self.stage is not None:
            far = partial(self.far, index) if self.device.total else lambda: index
            self.stage.attended(far, self.lengths)

    def count_fetched(self) -> None:
        """Count among the moved bytes what the device itself has read from the host, or would have
        been sent.
        """
        if self.stage is not None:
            self.stage.count_fetched()

    def read(self, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values where they lie, without staging: of token ids [B, Hkv, M], or of all
        tokens of the home tier.

        A store whose home is the host answers in host memory. None gives tokens in id order, in
        place where it can.

        Raises
        ------
        LookupError
            as `gather`.
        """
        if self.home == "device":
            return (
                self.resident()[:2]
                if index is None
                else self.gather(uploaded(index, self.device.first.device))
            )
        assert self.host is not None
        if index is None:
            index = torch.arange(max(self.lengths)).expand(*self.device.used.shape, -1)
            return self.host.codecs.decode(*self.host.gather(index))
        index = index.cpu()
        unseen = index >= torch.tensor(self.lengths)[:, None, None]
        if bool(unseen.any()):
            raise LookupError(f"token {index[unseen][0].item()} is not in the store: not seen yet")
        return self.host.codecs.decode(*self.host.gather(index))

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
        ids = lists_of(index.to(self.device.first.device))
        if bool(repeated(ids).any()):
            raise ValueError("keep was given a token id twice in one list")
        ids = joined(ids, self.kv_heads)
        used = (ids != NO_TOKEN).sum(dim=2).cpu()
        ids = ids[:, :, : int(used.max())]
        retained = index_of(ids)
        key, value = self._stored_rows(retained)
        if self._on_drop == "offload":
            host, stage = self._open_host()
            leaving = self.device.codecs.recoded(*self.device.stored_rows()[:2], host.codecs)
            host.write(without(self.device.token_ids(), retained), *leaving)
            host.remove(retained)
            stage.forget()
        self.device.keep(ids, used, key, value, room)

    def _stored_rows(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `gather`, in the rows that the device holds them in."""
        if self.stage is None or self._rebuilds_keys:
            return self.device.locate(index).stored_rows()
        with self._spans("transfer"):
            return self._locate_in_both(self.stage, index, self.device.codecs).stored_rows()


def _moved_tokens(moved: Callable[[int], None], size: int, tokens: int) -> None:
    moved(tokens * size)
