"""The host tier of a layer's store, and how tokens travel between it and the device.

Without a GPU host memory is a second block of the same RAM: the same code runs and the same bytes
are counted. With one it is pinned, and copies run beside the computation: the prompt leaves on a
side stream, a new token lands in a small buffer and is put into its slot a step later. The host
waits for the device only where it needs the result.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvbench.kernels import tokens as kernels
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import HeadTokens, more_slots, rows
from kvbench.memory.transfer import pinned_zeros, side_stream, zeros


class HostTier:
    """Keys and values in host memory, a slot reserved for every token.

    Parameters
    ----------
    rows
        B and Hkv.
    codecs
        how it holds keys and values.
    device
        that its tokens go to.
    capacity
        token ids to make room for.
    grows
        more may come; the blocks are then reallocated.
    read_in_place
        a method reads the keys in place, so coded ones are there decoded, too.

    Attributes
    ----------
    key, value
        [B, Hkv, capacity, width], pinned where there is a GPU.
    codecs
        how they hold keys and values.
    slot_of
        [B, Hkv, capacity] int64, slot of each token id.
    present
        [B, Hkv, capacity] bool, token ids that live here.
    total
        how many these are.
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
        size = (*rows, capacity)
        self.key, self.value = (self._zeros((*size, codec.width), codec.stored) for codec in codecs)
        twice = read_in_place and codecs.key.stored != codecs.key.dtype
        self._decoded = (
            self._zeros((*size, codecs.key.head_dim), codecs.key.dtype) if twice else None
        )
        self.slot_of = torch.arange(capacity).repeat(*rows, 1)
        self.present = torch.zeros(size, dtype=torch.bool)
        self.total = 0
        self.arranged = False
        self.copied: torch.cuda.Event | None = None
        self._landing: deque[_Landing] = deque()

    def _zeros(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._device.type != "cuda":
            return zeros(size, dtype, torch.device("cpu"))
        block = pinned_zeros(size, dtype, self)
        # bytes of an earlier use may be no numbers
        return block.zero_() if dtype == torch.uint8 else block

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTier:
        """A tier of its own, pinned where this one is."""
        self.settle()
        twin = memo[id(self)] = copy.copy(self)
        twin.key, twin.value = (
            twin._zeros(block.shape, block.dtype).copy_(block) for block in (self.key, self.value)
        )
        if self._decoded is not None:
            twin._decoded = twin._zeros(self._decoded.shape, self._decoded.dtype).copy_(
                self._decoded
            )
        twin.slot_of, twin.present = self.slot_of.clone(), self.present.clone()
        twin._landing = deque()
        return twin

    @property
    def capacity(self) -> int:
        """Token ids that there is room for."""
        return self.key.shape[2]

    @property
    def plain_keys(self) -> torch.Tensor:
        """[B, Hkv, capacity, D], the keys decoded; in place where they are not coded, or are read
        in place.
        """
        return self.codecs.key.decode(self.key) if self._decoded is None else self._decoded

    @property
    def decoded_bytes(self) -> int:
        """Bytes that a key takes in one KV head beside its coded form."""
        return 0 if self._decoded is None else self._decoded.shape[3] * self._decoded.element_size()

    def blocks(self) -> list[torch.Tensor]:
        """All that is held."""
        return [self.key, self.value] + ([] if self._decoded is None else [self._decoded])

    def write_prompt(self, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]) -> None:
        """Store the first `lengths[b]` tokens of each row of blocks [B, Hkv, capacity, D].

        They are coded first. From a GPU they are copied on a side stream, beside what the device
        computes next.
        """
        for row, length in enumerate(lengths):
            self.present[row, :, :length] = True
        self.total = key.shape[1] * sum(lengths)
        parts = self._with_decoded(*self.codecs.encode(key, value))
        if not key.is_cuda:
            for block, part in zip(self.blocks(), parts, strict=True):
                for row, length in enumerate(lengths):
                    block[row, :, :length] = part[row, :, :length]
            return
        side = side_stream(key.device)
        side.wait_stream(torch.cuda.current_stream(key.device))
        with torch.cuda.stream(side):
            for row, length in enumerate(lengths):
                # each a contiguous block: one copy without a buffer between
                for head in range(key.shape[1]):
                    for block, part in zip(self.blocks(), parts, strict=True):
                        block[row, head, :length].copy_(part[row, head, :length], non_blocking=True)
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
        self._landing.append(
            _Landing(tuple(lengths), buffers, torch.cuda.current_stream(key.device).record_event())
        )

    def _land(self) -> None:
        """Put new tokens that have left the device into their slots; waits for the last of them."""
        while self._landing:
            landing = self._landing.popleft()
            if not landing.event.query():
                landing.event.synchronize()
            self._put(landing.lengths, *landing.tokens)

    def _put(self, lengths: Sequence[int], *rows: torch.Tensor) -> None:
        """Put keys and values [B, Hkv, ..., width] of each row's token `lengths[b]`, on the CPU,
        into their slots.
        """
        ids = torch.tensor(lengths)
        for block, source in zip(self.blocks(), self._with_decoded(*rows), strict=True):
            kernels.put_in_place(source.contiguous(), block, self.slot_of, self.present, ids)

    def _with_decoded(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows as `blocks` hold them."""
        return (key, value) if self._decoded is None else (key, value, self.codecs.key.decode(key))

    def write(self, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens; ids [B, Hkv, M] (-1 = none), key and value [B, Hkv, M, width] of either
        side, as held here.
        """
        at = (ids >= 0).cpu().nonzero(as_tuple=True)
        row, head = at[:2]
        token = ids.cpu()[at]
        slot = self.slot_of[row, head, token]
        on_device = tuple(axis.to(key.device) for axis in at)
        for block, source in zip(
            self.blocks(), self._with_decoded(key[on_device], value[on_device]), strict=True
        ):
            block[row, head, slot] = source.cpu()
        self.total += int((~self.present[row, head, token]).sum())
        self.present[row, head, token] = True

    def remove(self, ids: torch.Tensor) -> None:
        """Mark token ids [B, Hkv, M] (-1 = none) as gone from here; no other token gets their
        slots.
        """
        at = (ids >= 0).nonzero(as_tuple=True)
        gone = at[0].cpu(), at[1].cpu(), ids[at].cpu()
        self.total -= int(self.present[gone].sum())
        self.present[gone] = False

    def reserve(self, capacity: int) -> None:
        """Make room for token ids up to capacity - 1.

        Raises
        ------
        RuntimeError
            the tier may not grow.
        """
        if capacity > self.capacity:
            self._grow(more_slots(capacity, self.capacity, self._grows))

    def read(
        self, row: torch.Tensor, head: torch.Tensor, token: torch.Tensor, values_only: bool = False
    ) -> torch.Tensor:
        """Of single tokens, all three [n] on the CPU, what `rows_in` finds in one
        (pinned) buffer.
        """
        if not bool(self.present[row, head, token].all()):
            lost = token[~self.present[row, head, token]][0].item()
            raise LookupError(f"token {lost} is not in the store: dropped earlier, or not seen yet")
        self.arrived()
        if any(
            bool((token >= torch.tensor(landing.lengths)[row]).any()) for landing in self._landing
        ):
            self._land()
        slot = self.slot_of[row, head, token]
        pinned = self._device.type == "cuda"
        blocks, flat = (
            self.moving(values_only),
            (row * self.key.shape[1] + head) * self.capacity + slot,
        )
        buffer = torch.empty(sum(_sizes(blocks, len(token))), dtype=torch.uint8, pin_memory=pinned)
        for block, out in zip(blocks, rows_in(buffer, blocks, len(token)), strict=True):
            torch.index_select(block.view(-1, block.shape[3]), 0, flat, out=out)
        return buffer

    def moving(self, values_only: bool) -> list[torch.Tensor]:
        """The blocks from which `read` takes rows."""
        return [self.value] if values_only else [self.key, self.value]

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As they are held, [B, Hkv, M, width] each, token ids [B, Hkv, M] on the CPU; any finite
        content for -1.
        """
        self.settle()
        slot = self.slot_of.gather(2, index.clamp(min=0))
        return rows(self.key, slot), rows(self.value, slot)

    def tokens(self, row: int, head: int) -> HeadTokens:
        """Those of one KV head."""
        self.settle()
        ids = self.present[row, head].nonzero()[:, 0]
        slot = self.slot_of[row, head, ids]
        block = self.key[row, head, slot], self.value[row, head, slot]
        return HeadTokens(ids, *self.codecs.decode(*block))

    def _grow(self, capacity: int) -> None:
        self.settle()
        old_capacity, more = self.capacity, capacity - self.capacity
        for name in ("key", "value", "_decoded")[: len(self.blocks())]:
            old = getattr(self, name)
            grown = self._zeros((*old.shape[:2], capacity, old.shape[3]), old.dtype)
            grown[:, :, :old_capacity] = old
            setattr(self, name, grown)
        fresh = torch.arange(old_capacity, capacity).expand(*self.slot_of.shape[:2], more)
        self.slot_of = torch.cat([self.slot_of, fresh], dim=2)
        self.present = torch.nn.functional.pad(self.present, (0, more))

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order: slot s holds token order[b, h, s]; order [B, Hkv, S], a
        permutation of 0 .. S - 1.
        """
        self.settle()
        order = order.cpu()
        count = order.shape[2]
        if not torch.equal(order.sort(dim=2).values, torch.arange(count).expand_as(order)):
            raise ValueError(
                f"arrange needs each of the tokens 0 to {count - 1} once in every KV head"
            )
        source = self.slot_of.gather(2, order)
        occupied = self.slot_of[:, :, :count].sort(dim=2).values
        if not torch.equal(occupied, torch.arange(count).expand_as(occupied)):
            raise ValueError(f"arrange named {count} tokens, fewer than an earlier arrange")
        for tensor in self.blocks():
            rows = source[..., None].expand(*source.shape, tensor.shape[3])
            tensor[:, :, :count] = tensor.gather(2, rows)
        self.slot_of.scatter_(2, order, torch.arange(count).expand_as(order))
        self.arranged = True


def _sizes(blocks: Sequence[torch.Tensor], count: int) -> list[int]:
    """Bytes of so many rows of each of blocks [..., width] in a buffer; each part begins where any
    number may.
    """
    return [-(-count * block.shape[3] * block.itemsize // 16) * 16 for block in blocks]


def rows_in(buffer: torch.Tensor, blocks: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """So many rows of each of blocks [..., width], [n, width], in the bytes of a buffer on either
    side.
    """
    parts = zip(buffer.split(_sizes(blocks, count)), blocks, strict=True)
    return [
        part.view(block.dtype)[: count * block.shape[3]].view(count, -1) for part, block in parts
    ]


@dataclass(frozen=True, eq=False)
class _Landing:
    """A step's new tokens on their way from the device.

    Attributes
    ----------
    lengths
        their ids, one a row.
    tokens
        keys and values [B, Hkv, width], pinned; there once `event` is over.
    """

    lengths: tuple[int, ...]
    tokens: Sequence[torch.Tensor]
    event: torch.cuda.Event


class Arrival(Future[tuple[torch.Tensor, torch.Tensor]]):
    """Held keys and values in host memory; `result` waits until their copies have arrived, in the
    thread that asks.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        codecs: Codecs,
        copied: torch.cuda.Event | None,
    ) -> None:
        super().__init__()
        self._copied, self._codecs = copied, codecs
        self.set_result((key, value))

    def result(self, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values), decoded; waits as long as it takes."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._plain

    @cached_property
    def _plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._codecs.decode(*super().result())
