"""Which token of a layer is in which tier, and how many bytes that takes.

Nothing here changes a tier but its order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch.nn.functional import pad

from kvbench.memory.codecs import Codecs
from kvbench.memory.device import DeviceTier
from kvbench.memory.grouped import GroupedTier
from kvbench.memory.host import Arrival, HostTier
from kvbench.memory.kinds import KV, NATIVE, Tier
from kvbench.memory.slots import NO_TOKEN, index_of, lists_of, of_kv_heads
from kvbench.memory.stage import Stage, Staged
from kvbench.memory.transfer import uploaded
from kvbench.method import Selection

Result = TypeVar("Result")
DROPPED, DEVICE, HOST = 0, 1, 2


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
        """[B] int64 on the device, tokens seen by each row; nothing waits for it."""
        return uploaded(torch.tensor(self.lengths), self.device.first.device)

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

    def everything(self, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [n] ascending, keys and values [n, D], of all tokens one KV head still has in any
        tier, on the CPU.
        """
        tokens = self.device.tokens(row, head)
        if self.host is None:
            return tokens
        ids, key, value = (
            torch.cat(both) for both in zip(tokens, self.host.tokens(row, head), strict=True)
        )
        ids, order = ids.sort()
        return ids, key[order], value[order]

    def on_host(self, count: int) -> Future[tuple[torch.Tensor, torch.Tensor]] | None:
        """The first `count` keys and values in host memory, [B, Hkv, count, D], where the home is
        the host.
        """
        host = self.host
        if host is None:
            return None
        return Arrival(host.key[:, :, :count], host.value[:, :, :count], host.codecs, host.copied)

    def resident(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values, [B, Hkv, n, D], n = most used slots, and a mask [B, Hkv, n] (None: all
        used).

        They are in place but where KV heads were left unequal numbers of tokens.

        Raises
        ------
        LookupError
            the home is the host.
        """
        if self.home == "host":
            raise LookupError(
                "a method whose tokens live on the host must select: nothing is resident to attend"
            )
        return self.device.resident()

    @property
    def complete(self) -> bool:
        """Every token seen is on the device."""
        return self.host is None and self.device.ids is None

    def remaining(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values of all tokens that any tier still has, [B, Hkv, n, D] each on the device,
        and where in [B, Hkv, n] there are some (None: everywhere). Those of the host are brought
        up, and come last.
        """
        key, value, mask = self.device.resident()
        if self.host is None:
            return key, value, mask
        everyone = torch.arange(max(self.lengths)).expand(*self.device.used.shape, -1)
        there = self.host.present[:, :, : everyone.shape[2]]
        far = self.host.codecs.decode(*self.host.gather(everyone))
        more = [uploaded(block, key.device) for block in (*far, there)]
        here = (
            torch.ones(key.shape[:3], dtype=torch.bool, device=key.device) if mask is None else mask
        )
        key, value, mask = (
            torch.cat(both, dim=2) for both in zip((key, value, here), more, strict=True)
        )
        return key, value, None if bool(there.all()) and not self.device.used.any() else mask

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

    # -- for tests ---------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert what holds between any two calls once the prompt has left; waits for the
        device.
        """
        self.device.check_integrity()
        assert (self.host is None) == (self.stage is None), "a host tier has a stage"
        if self.host is not None and self.stage is not None:
            self.host.check_integrity()
            self.stage.check_integrity()
            beyond = torch.arange(self.host.capacity) >= torch.tensor(self.lengths)[:, None, None]
            assert not bool((self.host.present & beyond).any()), (
                "the host holds no token that was not seen"
            )
        lengths = torch.tensor(self.lengths)[:, None, None]
        assert bool((self.device.token_ids().cpu() < lengths).all()), (
            "the device holds no token that was not seen"
        )
        self.tiers()
