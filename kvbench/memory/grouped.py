"""KIVI's tier on the device: groups of tokens in few bits, and a window of the newest ones in full
precision.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3. Here a
token's key and value are coded together, a group at a time, once the window is full: 97 to 128
tokens stay in full precision. As published the window of values has exactly 128 tokens and that of
keys 0 to 127, 128 of which are coded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from kvbench.kernels.coded import GROUP
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import (
    DeviceTier,
    Located,
    Pool,
    Resident,
    Span,
    flat,
    more_slots,
    rows,
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

    unit = GROUP

    def __init__(self, plain: DeviceTier, codecs: Codecs) -> None:
        self._coded, self.codecs = codecs, plain.codecs
        self.used, self.ids = plain.used, plain.ids
        self.reserved, self._grows = plain.reserved, plain._grows
        key, value = plain.resident()[:2]
        self.coded = -(-(self.used - WINDOW).clamp(min=0) // GROUP) * GROUP
        begin = self.coded[..., None]
        newest = uploaded(begin + (torch.arange(WINDOW) - begin) % WINDOW, key.device)
        newest = newest.clamp(max=key.shape[2] - 1)
        self.window = Pool.of(rows(key, newest), rows(value, newest))
        key, value = (pad(part, (0, 0, 0, -part.shape[2] % GROUP)) for part in (key, value))
        codes, parameters = codecs.key.encode(key.unflatten(2, (-1, GROUP)))
        self._pack(codes.flatten(2, 3), codecs.value.encode(value), parameters)

    def _pack(self, key: torch.Tensor, value: torch.Tensor, parameters: torch.Tensor) -> None:
        """Take newly allocated room for all slots reserved, with codes [B, Hkv, n, width] and their
        groups' parameters [B, Hkv, n / GROUP, 2, D].
        """
        scale, least = parameters.unbind(3)
        groups = Pool.packed(scale, least, self.coded // GROUP, self._room() // GROUP)
        self.parameters = torch.stack(groups, dim=1)
        self._repack(key, value, self.ids, self.coded)

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
        return [*self.pool, self.parameters, *self.window]

    @torch.inference_mode()  # tensors made in this mode can be written in it alone
    def _put(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Put tokens [B, Hkv, 1, D] into the window; of a full one code the oldest group first."""
        full = (self.used - self.coded == WINDOW).view(-1).nonzero()
        if len(full):
            self._code_oldest(full)
        head = torch.arange(self.used.numel())
        row = uploaded(head * WINDOW + self.used.view(-1) % WINDOW, key.device)
        self._put_counted(lengths, self.window, row, key, value)
        self.numbers = self.numbers + 1  # another array, as other slots are coded now

    def _code_oldest(self, head: torch.Tensor) -> None:
        """Code a group of each KV head [n, 1], counted over the rows."""
        device = self.first.device
        slot = self.coded.view(-1)[head] + torch.arange(GROUP)
        source = uploaded(head * WINDOW + slot % WINDOW, device)
        target = uploaded(slot, device) + self.first.view(-1)[uploaded(head, device)]
        codes, parameters = self._coded.key.encode(self.window.key[source])
        self.pool.key[target] = codes
        self.pool.value[target] = self._coded.value.encode(self.window.value[source])
        self.parameters[target[:, 0] // GROUP] = parameters
        self.coded.view(-1)[head] += GROUP

    def reserve(self, slots: int) -> None:
        if slots <= self.reserved:
            return
        self.reserved = more_slots(slots, self.reserved, self._grows)
        groups = torch.arange(int(self.coded.max()) // GROUP, device=self.first.device)
        most = uploaded((self.coded // GROUP - 1).clamp(min=0), self.first.device)
        group = self.first[..., None] // GROUP + torch.minimum(groups, most[..., None])
        key, value = (part.unflatten(0, (-1, GROUP))[group].flatten(2, 3) for part in self.pool)
        self._pack(key, value, self.parameters[group])

    def keep(self, *tokens: Any, **options: Any) -> None:
        """Refused: it would take tokens out of their groups."""
        raise ValueError(
            "kv=kivi2 and kivi4 code groups of tokens, of which none can be dropped alone"
        )

    def crop(self, count: int) -> None:
        """Refused, as `keep`."""
        raise ValueError("kv=kivi2 and kivi4 code groups of tokens, which cannot be taken back")

    def _slots(self, count: int, masked: bool = True) -> Resident:
        """A copy, decoded, of what is used: which slots are coded changes from step to step."""
        slots = torch.arange(self.longest, device=self.first.device)
        filled = self.filled[..., None]
        key, value = self.at(torch.minimum(slots, filled - 1))
        return Resident(key, value, None if self.uniform else slots < filled)

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, M, D], decoded, of slots each in the room of its head."""
        key, value = super().at(slots)
        parameters = self.parameters[(slots + self.first[..., None]) // GROUP]
        coded = self._coded.key.decode(key, parameters), self._coded.value.decode(value)
        near = self.window.at(flat(slots % WINDOW, WINDOW))
        whole = (slots >= uploaded(self.coded, slots.device)[..., None])[..., None]
        key, value = (torch.where(whole, *pair) for pair in zip(near, coded, strict=True))
        return key, value

    def spans(self) -> list[Span]:
        """See `DeviceTier.spans`: the coded slots, then those of the window, in two stretches where
        it goes round.
        """
        none, turn = torch.zeros_like(self.coded), self.coded // WINDOW * WINDOW
        # of the window, where each KV head's begin
        begin = WINDOW * torch.arange(turn.numel()).view_as(turn) - turn
        again = torch.minimum(turn + WINDOW, self.used)  # the first slot that is back at them
        device, window = self.first.device, (self.window, self.codecs)
        spans = [
            Span(self.pool, self._coded, self.first, none, self.coded, self.parameters),
            Span(*window, uploaded(begin, device), self.coded, again),
        ]
        if bool((again < self.used).any()):
            spans.append(Span(*window, uploaded(begin - WINDOW, device), again, self.used))
        return spans

    def locate(self, index: torch.Tensor) -> Located:
        """See `DeviceTier.locate`; the pool is a decoded copy of the tokens asked for."""
        index, present = self.upload(index)
        slots, here = self.find(index)
        self.refuse_lost(index, here)
        order = torch.arange(index.shape[2], device=index.device).expand(index.shape)
        places = flat(order, index.shape[2])
        return Located(Pool.of(*self.at(slots)), places, present, self.codecs)
