"""The host tier of a layer's store, and how tokens travel between it and the device.

Without a GPU host memory is a second block of the same RAM: the same code runs and the same bytes
are counted. With one it is pinned, and copies run beside the computation: the prompt leaves on a
side stream, a new token lands in a small buffer and is put into its slot a step later. The host
waits for the device only where it needs the result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.kernels import tokens as kernels
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import NO_TOKEN, more_slots, rows
from kvbench.memory.transfer import pinned_zeros, side_stream, zeros


class HostTier:
    """Keys and values in host memory, a slot reserved for every token.

    Parameters
    ----------
    rows, capacity
        B and Hkv, and token ids to make room for.
    codecs, device
        how it holds keys and values, and where tokens go to.
    grows
        more may come; the blocks are then reallocated.
    read_in_place
        a method reads the keys in place, so coded ones are there decoded, too.

    Attributes
    ----------
    blocks
        keys and values [B, Hkv, capacity, width], as `codecs` hold them, and decoded keys where
        there are some; pinned where there is a GPU.
    slot_of
        [B, Hkv, capacity] int64, slot of each token id.
    present, total
        [B, Hkv, capacity] bool, token ids that live here, and how many these are.
    arranged
        slots are no longer in the order of the ids.
    copied
        the event after the prompt's copy from the device, for which readers wait; None: it is
        complete.
    """

    def __init__(
        self,
        rows: tuple[int, int],
        codecs: Codecs,
        device: torch.device,
        capacity: int,
        grows: bool = False,
        read_in_place: bool = False,
    ) -> None:
        self.codecs, self._grows = codecs, grows
        self._device = device
        size, key = (*rows, capacity), codecs.key
        kinds = [(codec.width, codec.stored) for codec in codecs]
        if read_in_place and key.stored != key.dtype:
            kinds.append((key.head_dim, key.dtype))
        self.blocks = [self._zeros((*size, width), dtype) for width, dtype in kinds]
        self.slot_of = torch.arange(capacity).repeat(*rows, 1)
        self.present = torch.zeros(size, dtype=torch.bool)
        self.total = 0
        self.arranged = False
        self.copied: torch.cuda.Event | None = None
        self._landing: _Landing | None = None

    def _zeros(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._device.type != "cuda":
            return zeros(size, dtype)
        block = pinned_zeros(size, dtype, self)
        # bytes of an earlier use may be no numbers
        return block.zero_() if dtype == torch.uint8 else block

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTier:
        """A tier of its own, pinned where this one is."""
        self.settle()
        twin = memo[id(self)] = copy.copy(self)
        twin.blocks = [twin._zeros(block.shape, block.dtype).copy_(block) for block in self.blocks]
        twin.slot_of, twin.present = self.slot_of.clone(), self.present.clone()
        return twin

    @property
    def key(self) -> torch.Tensor:
        """Keys as they are held."""
        return self.blocks[0]

    @property
    def value(self) -> torch.Tensor:
        """Values as they are held."""
        return self.blocks[1]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.present.shape[1]

    @property
    def capacity(self) -> int:
        """Token ids that there is room for."""
        return self.present.shape[2]

    @property
    def decoded_bytes(self) -> int:
        """Bytes that a key takes in one KV head beside its coded form."""
        return sum(block.shape[3] * block.itemsize for block in self.blocks[2:])

    def _with_decoded(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows as `blocks` hold them."""
        return (key, value, self.codecs.key.decode(key)) if self.decoded_bytes else (key, value)

    def write_prompt(self, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]) -> None:
        """Code and store the first `lengths[b]` tokens of each row of blocks [B, Hkv, capacity, D];
        from a GPU on a side stream, beside what the device computes next.
        """
        for row, length in enumerate(lengths):
            self.present[row, :, :length] = True
        self.total = key.shape[1] * sum(lengths)
        parts = self._with_decoded(*self.codecs.encode(key, value))
        side = side_stream(key.device) if key.is_cuda else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(key.device))
        with torch.cuda.stream(side):
            for row, length in enumerate(lengths):
                # each a contiguous block: one copy without a buffer between
                for head in range(key.shape[1]):
                    for block, part in zip(self.blocks, parts, strict=True):
                        block[row, head, :length].copy_(part[row, head, :length], non_blocking=True)
        if side is not None:
            self.copied = side.record_event()
            for part in parts:
                # freed earlier, it is not used again before the copies are through
                part.record_stream(side)

    def arrived(self) -> None:
        """Wait until the prompt is here."""
        copied = self.copied  # several threads may wait
        if copied is not None:
            copied.synchronize()
            self.copied = None

    def settle(self) -> None:
        """Wait until every token is in its slot."""
        self.arrived()
        self._land()

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the next token of every row, whose id is `lengths[b]`; key, value [B, Hkv, 1,
        width], as held here.

        From a GPU it lands in a buffer and is in its slot when the next one is appended, or when it
        is read.
        """
        self.total += self.present[..., 0].numel()
        if not key.is_cuda:
            return self._put(lengths, key, value)
        self._land()  # of earlier steps: there by now
        for row, length in enumerate(lengths):
            # torch may refuse to, outside the mode that it was made in
            self.present.numpy()[row, :, length] = True
        new = key[:, :, 0], value[:, :, 0]
        buffers = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in new]
        for buffer, part in zip(buffers, new, strict=True):
            buffer.copy_(part, non_blocking=True)
        event = torch.cuda.current_stream(key.device).record_event()
        self._landing = _Landing(tuple(lengths), buffers, event)

    def _land(self) -> None:
        """Put new tokens that leave the device into their slots, once they have."""
        landing, self._landing = self._landing, None
        if landing is not None:
            if not landing.event.query():
                landing.event.synchronize()
            self._put(landing.lengths, *landing.tokens)

    def _put(self, lengths: Sequence[int], *rows: torch.Tensor) -> None:
        """Put rows [B, Hkv, ..., width] of each row's token `lengths[b]`, on the CPU, in place."""
        ids = torch.tensor(lengths)
        for block, source in zip(self.blocks, self._with_decoded(*rows), strict=True):
            kernels.put_in_place(source.contiguous(), block, self.slot_of, self.present, ids)

    def write(self, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store token ids [B, Hkv, M] (-1 = none), of either side, with rows as held here."""
        tokens, there = _places(ids), ids >= 0
        slots = *tokens[:2], self.slot_of[tokens]
        sources = self._with_decoded(key[there], value[there])
        for block, source in zip(self.blocks, sources, strict=True):
            block[slots] = source.cpu()
        self.total += int((~self.present[tokens]).sum())
        self.present[tokens] = True

    def remove(self, ids: torch.Tensor) -> None:
        """Mark token ids [B, Hkv, M] (-1 = none) as gone; no other token gets their slots."""
        tokens = _places(ids)
        self.total -= int(self.present[tokens].sum())
        self.present[tokens] = False

    def reserve(self, capacity: int) -> None:
        """Make room for token ids up to capacity - 1."""
        before = self.capacity
        if capacity <= before:
            return
        self.settle()
        capacity = more_slots(capacity, before, self._grows)
        for at, block in enumerate(self.blocks):
            grown = self._zeros((*block.shape[:2], capacity, block.shape[3]), block.dtype)
            grown[:, :, :before] = block
            self.blocks[at] = grown
        fresh = torch.arange(before, capacity).expand(*self.slot_of.shape[:2], -1)
        self.slot_of = torch.cat([self.slot_of, fresh], dim=2)
        self.present = pad(self.present, (0, capacity - before))

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order: slot s holds token order[b, h, s]; order [B, Hkv, S], a
        permutation of 0 .. S - 1.
        """
        self.settle()
        order = order.cpu()
        count = order.shape[2]
        slots = torch.arange(count).expand_as(order)
        if not torch.equal(order.sort(dim=2).values, slots):
            raise ValueError(
                f"arrange needs each of the tokens 0 to {count - 1} once in every KV head"
            )
        if not torch.equal(self.slot_of[:, :, :count].sort(dim=2).values, slots):
            raise ValueError(f"arrange named {count} tokens, fewer than an earlier arrange")
        source = self.slot_of.gather(2, order)
        for block in self.blocks:
            block[:, :, :count] = rows(block, source)
        self.slot_of.scatter_(2, order, slots)
        self.arranged = True

    def here(self, ids: torch.Tensor) -> torch.Tensor:
        """Which of token ids [B, Hkv, M] on the CPU live here."""
        token = ids.clamp(0, self.capacity - 1)
        return self.present.gather(2, token) & (ids == token)

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Slots of token ids [B, Hkv, M] on the CPU, any of -1 and `NO_TOKEN`; LookupError: of one
        that is not here.
        """
        lost = (ids >= 0) & (ids != NO_TOKEN) & ~self.here(ids)
        if bool(lost.any()):
            raise LookupError(
                f"token {ids[lost][0].item()} is not in the store: dropped earlier, or not seen yet"
            )
        return self.slot_of.gather(2, ids.clamp(0, self.capacity - 1))

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As they are held, [B, Hkv, M, width] each, token ids [B, Hkv, M] on the CPU; any finite
        content for -1.
        """
        self.settle()
        slot = self.slot_of.gather(2, index.clamp(min=0))
        return rows(self.key, slot), rows(self.value, slot)


def _places(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Row, KV head and id of each of token ids [B, Hkv, M] that is one, on the CPU."""
    ids = ids.cpu()
    at = (ids >= 0).nonzero(as_tuple=True)
    return *at[:2], ids[at]


class _Landing(NamedTuple):
    """A step's new tokens on their way from the device: their ids, one a row, and keys and values
    [B, Hkv, width] in pinned memory, there once the event is over.
    """

    lengths: tuple[int, ...]
    tokens: Sequence[torch.Tensor]
    event: torch.cuda.Event


class Arrival(Future[tuple[torch.Tensor, torch.Tensor]]):
    """The first `count` keys and values of a tier, in place; `result` waits until their copies have
    arrived, in the thread that asks.
    """

    def __init__(self, host: HostTier, count: int) -> None:
        super().__init__()
        self._host, self._count = host, count

    def result(self, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values), decoded; waits as long as it takes."""
        self._host.arrived()
        return self._rows

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self._host.blocks[:2]
        return self._host.codecs.decode(*(block[:, :, : self._count] for block in blocks))
