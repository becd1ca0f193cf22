"""The host tier of a layer's store, and the copies of its tokens that are staged on the device.

Without a GPU host memory is a second block of the same RAM: the same code runs and the same bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class HostTier:
    """Keys and values in host memory, a slot reserved for every token.

    Attributes:
        key, value: [B, Hkv, capacity, D], pinned where there is a GPU.
        place: [B, Hkv, capacity] int64, slot of each token id.
        present: [B, Hkv, capacity] bool, token ids that live here.
    """

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        batch, kv_heads, _, head_dim = like.shape
        size = (batch, kv_heads, capacity, head_dim)
        pinned = like.is_cuda
        self.key = torch.zeros(size, dtype=like.dtype, pin_memory=pinned)
        self.value = torch.zeros(size, dtype=like.dtype, pin_memory=pinned)
        self.place = torch.arange(capacity).repeat(batch, kv_heads, 1)
        self.present = torch.zeros(batch, kv_heads, capacity, dtype=torch.bool)

    @property
    def capacity(self) -> int:
        return self.key.shape[2]

    def write(self, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens; ids [B, Hkv, M] (-1 = none), key and value [B, Hkv, M, D] from either side."""
        at = (ids >= 0).cpu().nonzero(as_tuple=True)
        row, head, _ = at
        token = ids.cpu()[at]
        slot = self.place[row, head, token]
        on_device = tuple(axis.to(key.device) for axis in at)
        self.key[row, head, slot] = key[on_device].cpu()
        self.value[row, head, slot] = value[on_device].cpu()
        self.present[row, head, token] = True

    def read(self, row: torch.Tensor, head: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Keys and values of single tokens, all three [n] on the CPU: [2, n, D] in one (pinned) buffer."""
        if not bool(self.present[row, head, token].all()):
            lost = token[~self.present[row, head, token]][0].item()
            raise LookupError(f"token {lost} is not in the store: dropped earlier, or not seen yet")
        slot = self.place[row, head, token]
        buffer = torch.empty(2, len(token), self.key.shape[3], dtype=self.key.dtype, pin_memory=self.key.is_pinned())
        flat = (row * self.key.shape[1] + head) * self.capacity + slot
        torch.index_select(self.key.view(-1, self.key.shape[3]), 0, flat, out=buffer[0])
        torch.index_select(self.value.view(-1, self.value.shape[3]), 0, flat, out=buffer[1])
        return buffer

    def grow(self, capacity: int) -> None:
        """Make room for token ids up to capacity - 1."""
        more = capacity - self.capacity
        self.key = with_slots(self.key, capacity)
        self.value = with_slots(self.value, capacity)
        fresh = torch.arange(self.place.shape[2], capacity).expand(*self.place.shape[:2], more)
        self.place = torch.cat([self.place, fresh], dim=2)
        self.present = torch.nn.functional.pad(self.present, (0, more))

    def arrange(self, order: torch.Tensor) -> None:
        """Set the physical order: slot s holds token order[b, h, s]; order [B, Hkv, S], a permutation of 0 .. S - 1."""
        order = order.cpu()
        count = order.shape[2]
        if not torch.equal(order.sort(dim=2).values, torch.arange(count).expand_as(order)):
            raise ValueError(f"arrange needs each of the tokens 0 to {count - 1} once in every KV head")
        source = self.place.gather(2, order)
        held = self.place[:, :, :count].sort(dim=2).values
        if not torch.equal(held, torch.arange(count).expand_as(held)):
            raise ValueError(f"arrange named {count} tokens, fewer than an earlier arrange")
        for tensor in (self.key, self.value):
            rows = source[..., None].expand(*source.shape, tensor.shape[3])
            tensor[:, :, :count] = tensor.gather(2, rows)
        self.place.scatter_(2, order, torch.arange(count).expand_as(order))


@dataclass(frozen=True, eq=False)
class Staged:
    """Copies of host tokens that the last gather brought up.

    Attributes:
        ids: [B, Hkv, U] ascending, `kvbench.store.NO_TOKEN` behind the last.
        key, value: [B, Hkv, U, D] on the device.
    """

    ids: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def with_slots(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of tensor [B, H, n, D] with `capacity` slots, zero beyond n, on the same (pinned) memory."""
    size = (*tensor.shape[:2], capacity, tensor.shape[3])
    grown = torch.zeros(size, dtype=tensor.dtype, device=tensor.device, pin_memory=tensor.is_pinned())
    grown[:, :, : tensor.shape[2]] = tensor
    return grown
