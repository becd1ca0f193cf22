"""The last queries of a layer, for methods that ask them again while they decode."""

from __future__ import annotations

from collections import deque

import torch


class LastQueries:
    """The queries of the last tokens: a new one takes the place of the oldest.

    On a GPU they stay in the same memory, so that a step can be captured.

    Parameters
    ----------
    queries
        [B, Hq, n, D], the first ones, oldest first; copied.
    most
        queries that stay.
    """

    def __init__(self, queries: torch.Tensor, most: int) -> None:
        last = queries[:, :, max(0, queries.shape[2] - most) :].clone()
        self._first, self._most = last.shape[2], most
        self._nothing = last.new_empty(*last.shape[:2], 0, last.shape[3])
        if not last.is_cuda:
            self._noted = deque(last.unbind(dim=2), maxlen=most)
            return
        self._ring = last.new_zeros(*last.shape[:2], max(most, 1), last.shape[3])
        self._ring[:, :, : self._first] = last
        # where the next one goes, on the device, where nobody waits for it
        self._at = torch.full((1,), self._first % max(most, 1), device=last.device)

    def append(self, query: torch.Tensor) -> None:
        """The query [B, Hq, 1, D] of the next token."""
        if not query.is_cuda:
            self._noted.append(query[:, :, 0])
        elif self._most:
            self._ring.index_copy_(2, self._at, query)
            self._at.add_(1).remainder_(self._most)

    def ordered(self, appended: int) -> torch.Tensor:
        """[B, Hq, n, D], oldest first, after so many calls of `append`."""
        if not self._most:
            return self._nothing
        if not self._nothing.is_cuda:
            return torch.stack([*self._noted], dim=2) if self._noted else self._nothing
        if self._first + appended < self._most:
            return self._ring[:, :, : self._first + appended]
        places = torch.arange(self._most, device=self._at.device) + self._at
        return self._ring.index_select(2, places % self._most)
