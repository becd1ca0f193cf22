"""KIVI's tier on the device: groups of tokens in few bits, and a window of the newest ones in full
precision.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3. Here a
token's key and value are coded together, a group at a time, once the window is full: 97 to 128
tokens stay in full precision. As published the window of values has exactly 128 tokens and that of
keys 0 to 127, 128 of which are coded at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.kernels.coded import GROUP
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import (
    DeviceTier,
    HeadTokens,
    Located,
    Pool,
    Resident,
    Span,
    flat,
    more_slots,
    packed_pool,
    rows,
    with_free_slots,
)
from kvbench.memory.transfer import uploaded

WINDOW = 128  # tokens in full precision at most


class GroupedTier(DeviceTier):
    """A device tier whose slots are coded in whole groups, but for those of the newest tokens.

    Parameters
    ----------
    plain
        the tier that this one takes the place of; its memory is not used any more.
    codecs
        of coded keys, which have their parameters by groups of tokens, and of coded values.

    Attributes
    ----------
    coded
        [B, Hkv] int64 on the CPU, slots of each KV head that are coded, whole groups; the window
        has the others.
    parameters
        [slots / GROUP, 2, D], scale and minimum of each group's keys.
    window
        each KV head's `WINDOW` rows; slot s is row s % WINDOW.
    """

    def __init__(self, plain: DeviceTier, codecs: Codecs) -> None:
        self._coded, self.codecs = codecs, plain.codecs
        self.used, self.ids = plain.used, plain.ids
        self.reserved, self._grows = plain.reserved, plain._grows
        key, value = plain.resident()[:2]
        self.coded = ((self.used - WINDOW).clamp(min=0) + GROUP - 1) // GROUP * GROUP
        slot = torch.arange(WINDOW)
        newest = uploaded(
            self.coded[..., None] + (slot - self.coded[..., None]) % WINDOW, key.device
        )
        newest = newest.clamp(max=key.shape[2] - 1)
        self.window = Pool.of(rows(key, newest), rows(value, newest))
        key, value = (
            torch.nn.functional.pad(part, (0, 0, 0, -part.shape[2] % GROUP))
            for part in (key, value)
        )
        codes, parameters = codecs.key.encode(key.unflatten(2, (-1, GROUP)))
        self._pack(codes.flatten(2, 3), codecs.value.encode(value), parameters)

    def _pack(self, key: torch.Tensor, value: torch.Tensor, parameters: torch.Tensor) -> None:
        """Take newly allocated room for all slots reserved, with codes [B, Hkv, n, width] and their
        groups' parameters [B, Hkv, n / GROUP, 2, D].
        """
        room = (self.used + (self.reserved - int(self.used.max()))).clamp(min=1)
        room = -(-room // GROUP) * GROUP
        scale, least = parameters.unbind(3)
        groups = packed_pool(scale, least, self.coded // GROUP, room // GROUP)
        self.parameters = torch.stack(groups, dim=1)
        self._hold(packed_pool(key, value, self.coded, room), room)
        if self.ids is not None:
            self.ids = with_free_slots(
                self.ids[:, :, : min(self.ids.shape[2], self.capacity)], self.capacity
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens here, with the parameters of their groups."""
        coded = int(self.coded.sum())
        return coded * sum(self.sizes) + (self.total - coded) * self.codecs.nbytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a coded key, with its share of its group's parameters, and of a coded value."""
        return self._coded.key.nbytes, self._coded.value.nbytes

    def blocks(self) -> list[torch.Tensor]:
        """All that is held."""
        return [*self.pool, self.parameters, *self.window]

    # -- writing -----------------------------------------------------------------------------------

    @torch.inference_mode()  # tensors made in this mode can be written in it alone
    def _put(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Put tokens [B, Hkv, 1, D] into the window; of a full one the oldest group is
        coded first.
        """
        full = (self.used - self.coded == WINDOW).view(-1).nonzero()
        if len(full):
            self._code_oldest(full)
        head = torch.arange(self.used.numel())
        row = uploaded(head * WINDOW + self.used.view(-1) % WINDOW, key.device)
        self.window.key.index_copy_(0, row, key.flatten(0, 2))
        self.window.value.index_copy_(0, row, value.flatten(0, 2))
        if self.ids is not None or not key.is_cpu:
            self._count(lengths)
        self.numbers = self.numbers + 1  # another array, as other slots are coded now

    def _code_oldest(self, head: torch.Tensor) -> None:
        """Code a group of each KV head [n, 1], counted over the rows."""
        slot = self.coded.view(-1)[head] + torch.arange(GROUP)
        source = uploaded(head * WINDOW + slot % WINDOW, self.first.device)
        target = (
            uploaded(slot, self.first.device)
            + self.first.view(-1)[uploaded(head, self.first.device)]
        )
        codes, parameters = self._coded.key.encode(self.window.key[source])
        self.pool.key[target], self.pool.value[target] = (
            codes,
            self._coded.value.encode(self.window.value[source]),
        )
        self.parameters[target[:, 0] // GROUP] = parameters
        self.coded.view(-1)[head] += GROUP

    def reserve(self, slots: int) -> None:
        """See `DeviceTier.reserve`."""
        if slots <= self.reserved:
            return
        self.reserved = more_slots(slots, self.reserved, self._grows)
        groups = torch.arange(int(self.coded.max()) // GROUP, device=self.first.device)
        most = uploaded((self.coded // GROUP - 1).clamp(min=0), self.first.device)
        group = self.first[..., None] // GROUP + torch.minimum(groups, most[..., None])
        key, value = (part.unflatten(0, (-1, GROUP))[group].flatten(2, 3) for part in self.pool)
        self._pack(key, value, self.parameters[group])

    def keep(
        self,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        room: int | None = None,
    ) -> None:
        """Refused: it would take tokens out of their groups.

        Raises
        ------
        ValueError
            always.
        """
        raise ValueError(
            "kv=kivi2 and kivi4 code groups of tokens, of which none can be dropped alone"
        )

    def crop(self, count: int) -> None:
        """Refused, as `keep`.

        Raises
        ------
        ValueError
            always.
        """
        raise ValueError("kv=kivi2 and kivi4 code groups of tokens, which cannot be taken back")

    # -- reading -----------------------------------------------------------------------------------

    def stored_rows(self) -> Resident:
        """As `resident`: a copy, decoded."""
        slots = torch.arange(int(self.used.max()), device=self.first.device)
        filled = self.filled[..., None]
        key, value = self._at(torch.minimum(slots, filled - 1))
        return Resident(key, value, None if self.uniform else slots < filled)

    def all_slots(self) -> Resident:
        """As `resident`: which slots are coded changes from step to step anyway."""
        return self.resident()

    def spans(self) -> list[Span]:
        """See `DeviceTier.spans`: the coded slots, then those of the window, in two stretches where
        it goes round.
        """
        none, turn = torch.zeros_like(self.coded), self.coded // WINDOW * WINDOW
        # of the window, where each KV head's begin
        row = WINDOW * torch.arange(turn.numel()).view_as(turn)
        again = torch.minimum(turn + WINDOW, self.used)  # the first slot that is back at them
        spans = [
            Span(self.pool, self._coded, self.first, none, self.coded, self.parameters),
            Span(
                self.window, self.codecs, uploaded(row - turn, self.first.device), self.coded, again
            ),
        ]
        if bool((again < self.used).any()):
            first = uploaded(row - turn - WINDOW, self.first.device)
            spans.append(Span(self.window, self.codecs, first, again, self.used))
        return spans

    def tokens(self, row: int, head: int) -> HeadTokens:
        """See `DeviceTier.tokens`."""
        used = int(self.used[row, head])
        ids = torch.arange(used) if self.ids is None else self.ids[row, head, :used].cpu()
        key, value = (part[row, head, :used].cpu() for part in self.stored_rows()[:2])
        return HeadTokens(ids, key, value)

    def locate(self, index: torch.Tensor) -> Located:
        """See `DeviceTier.locate`; the pool is a decoded copy of the tokens asked for."""
        index, present = self.upload(index)
        slots, here = self.find(index)
        self.refuse_lost(index, here)
        key, value = self._at(slots)
        order = torch.arange(index.shape[2], device=index.device).expand(index.shape)
        return Located(Pool.of(key, value), flat(order, index.shape[2]), present, self.codecs)

    def list_tokens(self, index: torch.Tensor, listed: torch.Tensor, last: torch.Tensor) -> bool:
        """See `DeviceTier.list_tokens`."""
        return False

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, M, D] of slots [B, Hkv, M], each in the room of its head."""
        at = slots + self.first[..., None]
        key, value = self.pool.at(at)
        coded = (
            self._coded.key.decode(key, self.parameters[at // GROUP]),
            self._coded.value.decode(value),
        )
        near = self.window.at(flat(slots % WINDOW, WINDOW))
        whole = (slots >= uploaded(self.coded, slots.device)[..., None])[..., None]
        key, value = (
            torch.where(whole, here, there) for here, there in zip(near, coded, strict=True)
        )
        return key, value
