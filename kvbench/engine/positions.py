"""Keys and queries at other positions: at their places inside a selection (StreamingLLM, section 3.2), or at none."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from kvbench.memory.slots import NO_TOKEN
from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import uploaded
from kvbench.method import Selection, Shape

# cos and sin [B, L, n, D] float32, as the model arranges them
Angles = tuple[torch.Tensor, torch.Tensor]


class Rotary(Protocol):
    """A model's rotary positions."""

    def angles(self, by: torch.Tensor) -> Angles:
        """Those of a turn by a number of positions, [B, L, n]."""
        ...

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D], turned in float32; L is 1 or H."""
        ...


class PromptRotation:
    """Keys of prompt tokens without RoPE, and with it again; see `kvbench.method.Rotation`.

    Args:
        rotary: the model's.
        length: positions 0 .. length - 1 can be asked for.
    """

    def __init__(self, rotary: Rotary, length: int) -> None:
        self._rotary, self._length = rotary, length
        self._tables: dict[torch.device, torch.Tensor] = {}  # cos and sin [2, length, D] on each device

    def back(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys [B, H, n, D] at positions [B, 1 or H, n], as they were before RoPE."""
        cos, sin = self._angles(positions)
        return self._rotary.turn(keys, (cos, -sin))

    def turn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys without RoPE, with that of their positions."""
        return self._rotary.turn(keys, self._angles(positions))

    def _angles(self, positions: torch.Tensor) -> Angles:
        device = positions.device
        if device not in self._tables:
            parts = self._rotary.angles(torch.arange(self._length, device=device)[None, None])
            self._tables[device] = torch.cat(parts)[:, 0]
        cos, sin = self._tables[device]
        return cos[positions], sin[positions]


class CachePositions:
    """The m-th oldest of the selected tokens goes to position m, the query to that of the newest.

    What is stored at its original position is first turned back to position 0: the angle of a difference of large
    positions, rounded once, is not the difference of their rounded angles. Both turns are made as one. A selection that
    one layer attends after the other has its angles computed once.
    """

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        self._shape, self._rotary = shape, rotary
        self._index: torch.Tensor | None = None  # the selection that the angles are of,
        self._device: torch.device | None = None  # and where they are

    def start_step(self) -> None:
        """The current token changes, and with it every angle."""
        self._index = None

    def __call__(self, query: torch.Tensor, selection: Selection, store: LayerStore) -> tuple[torch.Tensor, Selection]:
        """The query [B, Hq, 1, D] and the selection with its keys, at those positions."""
        if selection.index is not self._index or query.device != self._device:
            self._of_query, self._of_keys = self._angles(uploaded(selection.index, query.device), store)
            self._index, self._device = selection.index, query.device
        index = uploaded(selection.index, query.device).expand(-1, self._shape.kv_heads, -1)
        keys = self._rotary.turn(store.gather(index)[0], self._of_keys)
        return self._rotary.turn(query, self._of_query), replace(selection, keys=keys)

    def of_turn(
        self, query: torch.Tensor, key: torch.Tensor, past: torch.Tensor, store: LayerStore
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [B, H, q, D] of new tokens and the stored keys [B, Hkv, n, D], ids ascending, likewise.

        The new tokens are not in the store yet: they come after what is there.
        """
        old = uploaded(store.resident_ids(), query.device)
        held = (old >= 0).sum(dim=2, keepdim=True)
        new = torch.arange(query.shape[2], device=query.device)
        turn = self._from_to((store.seen[:, None, None] + new).expand(-1, held.shape[1], -1), held + new)
        place = torch.arange(old.shape[2], device=query.device).expand_as(old)
        before = self._rotary.turn(past, self._from_to(old.clamp(min=0), place))
        cos, sin = (part.repeat_interleave(self._shape.group, dim=1) for part in turn)
        return self._rotary.turn(query, (cos, sin)), self._rotary.turn(key, turn), before

    def _angles(self, index: torch.Tensor, store: LayerStore) -> tuple[Angles, Angles]:
        lists = index.shape[1]
        if lists not in (1, self._shape.kv_heads):
            raise ValueError('positions="cache" needs one selection per KV head: its keys are rotated once')
        present = index >= 0
        place = torch.where(present, index, NO_TOKEN).argsort(dim=2).argsort(dim=2)
        newest = (present.sum(dim=2, keepdim=True) - 1).repeat_interleave(self._shape.query_heads // lists, dim=1)
        now = store.seen[:, None, None] - 1
        return self._from_to(now, newest if lists > 1 else newest[:, :1]), self._from_to(index.clamp(min=0), place)

    def _from_to(self, old: torch.Tensor, new: torch.Tensor) -> Angles:
        """A turn by -old and one by new [B, L, n], as one."""
        (back, down), (forth, up) = self._rotary.angles(old), self._rotary.angles(new)
        return forth * back + up * down, up * back - forth * down
