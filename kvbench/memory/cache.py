"""What stays on the device of tokens brought up from the host, beside those that the current step
attends.

Bookkeeping alone, on the CPU: a stage (`kvbench.memory.stage`) asks after each step, and holds and
moves the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvbench.memory.slots import without
from kvbench.method import DeviceCache


class Keeper(Protocol):
    """A policy, with what it remembers of one layer."""

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """A step attended token ids [B, Hkv, U] on the CPU, distinct, -1 = none; rows have seen
        `lengths` tokens.

        Returns
        -------
        torch.Tensor
            [B, Hkv, n] ids that the device holds from now on, attended or not, -1 = none.
        """


def keeper_of(cache: DeviceCache) -> Keeper | None:
    """The policy; None where nothing stays but what the last step attended."""
    if cache.policy == "last":
        return LastSteps(cache.steps) if cache.steps > 1 else None
    return Blocks(cache.tokens // cache.block, cache.block, counts=cache.policy == "lfu")


class LastSteps:
    """What the last `steps` steps attended stays."""

    def __init__(self, steps: int) -> None:
        self._attended: deque[torch.Tensor] = deque(maxlen=steps)

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See `Keeper`."""
        self._attended.append(ids)
        return torch.cat([*self._attended], dim=2)


class Blocks:
    """The blocks of a row that were used last or most often stay, in all its KV heads.

    A step uses a block if it attends a token of it, in any KV head, that the step before did not
    attend; tokens that it did, such as sinks and recent ones, are on the device anyway. If a step
    uses more blocks than there is room for, those with most such tokens count. Blocks of one step
    are noted in ascending order of that number, equal ones in the order of the text.

    Parameters
    ----------
    room
        the most blocks of a row that stay.
    block
        tokens of a block; the last one of a text counts once it is full.
    counts
        the block used least often since it came up leaves first, among equals the one used longest
        ago; without, always the one used longest ago.
    """

    def __init__(self, room: int, block: int, counts: bool) -> None:
        self._room, self._block, self._counts = room, block, counts
        # of each block there, how often and when it was used
        self._rows: list[dict[int, tuple[int, int]]] = []
        self._before: torch.Tensor | None = None  # what the last step attended
        self._clock = 0

    def after(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See `Keeper`."""
        self._rows = self._rows or [{} for _ in lengths]
        fresh = ids if self._before is None else without(ids, self._before)
        self._before = ids
        for blocks, new, length in zip(self._rows, fresh.numpy(), lengths, strict=True):
            # nor the newest
            whole = new[(new >= 0) & (new < min(length // self._block * self._block, length - 1))]
            uses = np.bincount(whole // self._block)
            used = uses.nonzero()[0]
            for block in used[np.argsort(uses[used], kind="stable")][-self._room :].tolist():
                self._use(blocks, block)
        retained = np.full((len(lengths), max(map(len, self._rows)), self._block), -1)
        for row, blocks in enumerate(self._rows):
            retained[row, : len(blocks)] = np.array([*blocks], np.int64)[
                :, None
            ] * self._block + np.arange(self._block)
        return torch.from_numpy(retained).flatten(1)[:, None].expand(-1, ids.shape[1], -1)

    def _use(self, blocks: dict[int, tuple[int, int]], block: int) -> None:
        if block not in blocks and len(blocks) == self._room:
            del blocks[min(blocks, key=blocks.__getitem__)]
        times, _ = blocks.get(block, (0, 0))
        self._clock += 1
        blocks[block] = times + self._counts, self._clock
