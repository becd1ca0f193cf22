"""ArkVale: pages that were evicted can be recalled (Chen et al. 2024, "ArkVale: Efficient
Generative LLM Inference with Recallable Key-Value Eviction").

Every full page of 32 consecutive keys is summed up by a cuboid around its centre. The host has all
pages, the device a cache of some, and all that is cached is attended. At each step the pages that
promise the largest logits are recalled, instead of the cached ones that promise the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.pages import mean_bound
from methods.blocks.ragged import stacked

SPARE_PAGES = 64  # pages of digests to add when the generated tokens have filled the last ones
FIRST_PAGES = 2  # pages that the prompt's end leaves cached at the least, where fewer are sinks

Pages = NDArray[np.int64]


def digests(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cuboid of every page: its centre, halfway between the bounds, less and plus the keys'
    mean distance from it.

    Parameters
    ----------
    keys
        [H, P, page_size, D].

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        low, high: [H, P, D], of the keys' dtype, computed in float32; in half precision throughout
        as published.
    """
    centre = [(head.amax(dim=1).float() + head.amin(dim=1).float()) / 2 for head in keys]
    radius = [
        (head - middle[:, None]).abs().mean(dim=1)
        for head, middle in zip(keys, centre, strict=True)
    ]
    middle, reach = torch.stack(centre), torch.stack(radius)
    return (middle - reach).to(keys.dtype), (middle + reach).to(keys.dtype)


@dataclass(eq=False)
class ArkVale(Method):
    """Attend C / page_size cached pages: sinks, the most recent pages, and those that the last
    queries recalled.

    All heads of a layer share the cache. A page's score is the mean over all query heads of the
    largest logit inside its cuboid. The prompt's last query chooses the first cached pages; a page
    that leaves the window leaves the cache. A budget of at least the current length attends
    everything.

    Parameters
    ----------
    page_size
        tokens in a page.
    sink_pages
        first pages, always attended.
    window_pages
        last pages, the unfinished one among them, always attended.
    topk_share
        of the C / page_size pages, those that each step has cached for sure: the best by their
        scores, with the sinks and all of the window but one page counted among them.
    """

    needs = Needs(query_window=1, queries=True, home="host")

    page_size: int = 32
    sink_pages: int = 1
    window_pages: int = 2
    topk_share: float = 0.25

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Share the cache of each row out; no page is summed up yet."""
        super().begin(shape, budget, view, context)
        self.rooms = [self._room(capacity) for capacity in self.capacities]
        # of each layer, [B, Hkv, pages, D]; of full pages alone
        self.low: dict[int, torch.Tensor] = {}
        self.high: dict[int, torch.Tensor] = {}
        # keys of each row's last page, [B, Hkv, page_size, D]
        self.unfinished: dict[int, torch.Tensor] = {}
        # of each layer and row, pages between sinks and window
        self.cached: dict[int, list[Pages]] = {}

    def _room(self, capacity: int) -> tuple[int, int]:
        """Pages between sinks and window in a cache of `capacity` tokens, and how many of the best
        are recalled.
        """
        pages = capacity // self.page_size
        room = pages - self.sink_pages - self.window_pages
        best = floor(round(self.topk_share * pages, 9)) - self.sink_pages - (self.window_pages - 1)
        return room, min(max(best, 1), room)

    def _pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    # -- digests -----------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Sum up the full pages of the prompt; its last query chooses those that stay cached."""
        heads, width = prompt.keys.shape[:2], prompt.keys.shape[3]
        room = self._pages(prompt.keys.shape[2] + (self.context.new_tokens or 0))
        low, high = (prompt.keys.new_zeros(*heads, room, width) for _ in range(2))
        unfinished = prompt.keys.new_zeros(*heads, self.page_size, width)
        for row, length in enumerate(prompt.lengths):
            full = length // self.page_size
            paged, rest = prompt.keys[row, :, :length].split(
                [full * self.page_size, length % self.page_size], dim=1
            )
            low[row, :, :full], high[row, :, :full] = digests(
                paged.unflatten(1, (full, self.page_size))
            )
            unfinished[row, :, : rest.shape[1]] = rest
        self.low[layer], self.high[layer] = low, high
        self.unfinished[layer] = unfinished
        scores = self._scores(layer, prompt.queries[:, :, -1:])
        self.cached[layer] = [
            self._first(row, length, scores[row]) for row, length in enumerate(prompt.lengths)
        ]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new key joins its page, which is summed up once it is full."""
        for row, length in enumerate(self.view.lengths(layer)):
            page, slot = divmod(length - 1, self.page_size)
            keys = self.unfinished[layer][row]
            keys[:, slot] = key[row, :, 0]
            if slot + 1 < self.page_size:
                continue
            if page >= self.low[layer].shape[2]:
                self.low[layer], self.high[layer] = (
                    pad(side, (0, 0, 0, SPARE_PAGES))
                    for side in (self.low[layer], self.high[layer])
                )
            low, high = digests(keys[:, None])
            self.low[layer][row, :, page], self.high[layer][row, :, page] = low[:, 0], high[:, 0]

    def _scores(self, layer: int, query: torch.Tensor) -> NDArray[np.float32]:
        """[B, pages], the mean over all heads of the largest logit in each page; query [B, Hq, 1,
        D].
        """
        scores: NDArray[np.float32] = (
            mean_bound(query, self.low[layer], self.high[layer]).cpu().numpy()
        )
        return scores

    # -- cache -------------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Recall the best pages; all that are cached then are attended, token after token."""
        rows = zip(self.view.lengths(layer), self._scores(layer, query), strict=True)
        return Selection(
            stacked([self._attended(layer, row, *pair) for row, pair in enumerate(rows)])
        )

    def _attended(
        self, layer: int, row: int, length: int, scores: NDArray[np.float32]
    ) -> torch.Tensor:
        """Token ids [1, n] of a row of `length` tokens."""
        if length <= self.capacities[row]:
            return torch.arange(length)[None]
        pages = self._pages(length)
        sinks, window = self.sink_pages, pages - self.window_pages
        before = self.cached[layer][row] - sinks
        cached = recalled(scores[sinks:window], before, self.rooms[row][1]) + sinks
        self.cached[layer][row] = cached
        attended = np.concatenate([np.arange(sinks), cached, np.arange(window, pages)])
        tokens = (attended[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        return torch.from_numpy(tokens[: len(tokens) - (pages * self.page_size - length)])[None]

    def _first(self, row: int, length: int, scores: NDArray[np.float32]) -> Pages:
        """The pages between sinks and window that the end of a prompt of `length` tokens leaves
        cached.
        """
        room, _ = self.rooms[row]
        if length <= self.capacities[row]:
            return np.arange(
                self.sink_pages, self.sink_pages + room
            )  # until there are more, all are
        first = max(FIRST_PAGES, self.sink_pages)
        always = np.arange(self.sink_pages, first)[:room]
        best = np.argsort(-scores[first : self._pages(length) - self.window_pages], kind="stable")
        return np.concatenate([always, best[: room - len(always)] + first])


def recalled(scores: NDArray[np.float32], cached: Pages, count: int) -> Pages:
    """The pages that are cached after a step.

    Of equal scores the earlier page is better.

    Parameters
    ----------
    scores
        [n], of all pages that can be cached.
    cached
        those that were, in any order.
    count
        the best pages, which are cached now; those that were not replace the worst held.
    """
    order = np.argsort(-scores, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    there = np.zeros(len(order), np.bool_)
    there[cached] = True
    missing = order[:count][~there[order[:count]]]
    retained = cached[np.argsort(rank[cached])][: len(cached) - len(missing)]
    return np.concatenate([retained, missing])
