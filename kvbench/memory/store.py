"""Where keys and values live: one `LayerStore` a layer.

A store knows tokens by id (their logical position in a sequence). Each token of a KV head is in one
tier: on the device, on the host, or dropped. Host tokens that a step attends are staged on the
device; what is still there from the last step is not moved again. The store knows no method, no
model and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.memory.codecs import Codecs
from kvbench.memory.device import DeviceTier, Located
from kvbench.memory.host import HostTier
from kvbench.memory.kinds import KV, NATIVE
from kvbench.memory.slots import (
    NO_TOKEN,
    Pool,
    flat,
    index_of,
    joined,
    lists_of,
    repeated,
    whole_pages,
    without,
)
from kvbench.memory.stage import LAST, Stage
from kvbench.memory.tiers import DEVICE, DROPPED, HOST, Tiers
from kvbench.memory.transfer import uploaded
from kvbench.method import DeviceCache
from kvbench.spans import Spans


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
        self._on_drop, self._grows, self._rebuilds_keys, self._host_keys = (
            on_drop,
            grows,
            rebuilds_keys,
            host_keys,
        )
        self._moved, self._spans, self._closed = moved, spans or Spans(), False
        self._stage = partial(
            Stage, in_place=in_place, cache=cache, count_hits=count_hits, values_only=rebuilds_keys
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

    def check_integrity(self) -> None:
        """Assert what holds between any two calls once the prompt has left; waits for the
        device.
        """
        super().check_integrity()
        tiers = self.tiers()
        valid = (
            torch.arange(tiers.shape[2]) < torch.tensor(self.lengths)[:, None, None]
        ).expand_as(tiers)
        if self.home == "host":
            assert bool((tiers[valid] == HOST).all()), "a token whose home is the host is there"
        elif self._on_drop == "offload":
            assert bool((tiers[valid] != DROPPED).all()), (
                "a token that left the device is on the host"
            )
        elif self.device.ids is None:
            assert bool((tiers[valid] == DEVICE).all()), (
                "a token that nobody dropped is on the device"
            )
        if self.host is not None:
            assert self.host.total == int(self.host.present.sum()), (
                "the tokens of the host are counted"
            )


def _moved_tokens(moved: Callable[[int], None], size: int, tokens: int) -> None:
    moved(tokens * size)
