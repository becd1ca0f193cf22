"""Quest: query-aware page selection (Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient
Long-Context LLM Inference", section 3.3).

Every page of 16 consecutive keys is summed up by its element-wise minimum and maximum. At each step
the pages with the largest possible logit are attended; nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.chunking import Chunks, keys_of_row
from methods.blocks.kernels import is_readable
from methods.blocks.pages import (
    Ranges,
    best_tokens,
    bounds,
    page_bounds,
    page_tokens,
    stacked_pages,
    take_in,
    token_edges,
)
from methods.blocks.ragged import stacked
from methods.blocks.topk import interleave

SPARE_PAGES = 64  # pages of summaries to add when the generated tokens have filled the last ones


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def page_edges(lengths: tuple[int, ...], size: int) -> NDArray[np.int64]:
    """Where each page of `size` tokens of rows of so many tokens begins and the last one ends, [B,
    P + 1].
    """
    edges = np.arange(-(-max(lengths) // size) + 1) * size
    return np.minimum(edges, np.array(lengths)[:, None])


@dataclass(eq=False)
class Quest(Method):
    """Attend the max(3, C / page_size) pages with the largest upper bound on q.k; the partial last
    page competes.

    With unified accounting the pages of the group's query heads are joined by rank, the last page
    first, and cut to C / page_size. A budget of at least the current length attends everything.

    Parameters
    ----------
    page_size
        tokens in a page.
    selection
        "query_head", each query head its own pages (as published); "kv_head", the pages with the
        largest mean bound over the group.
    """

    needs = Needs(crops=True, host_step=False)

    page_size: int = 16
    selection: Literal["query_head", "kv_head"] = "query_head"

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No page is summed up yet."""
        super().begin(shape, budget, view, context)
        if not is_readable(torch.empty(0, dtype=shape.dtype, device=shape.device)):
            # what a row attends, where that is not all
            rooms = [self.share(capacity) * self.page_size for capacity in self.capacities]
            self.capacity_of = shape.for_layers(torch.tensor(self.capacities))
            self.room_of = shape.for_layers(torch.tensor(rooms))
        # of each layer, [B, Hkv, pages, D]; +inf in a page without a key
        self.low: dict[int, torch.Tensor] = {}
        self.high: dict[int, torch.Tensor] = {}  # -inf in a page without a key
        # on each GPU, the last page of each row, which is the same in all layers of a step
        self.last_pages: dict[torch.device, torch.Tensor] = {}

    # -- pages and their bounds --------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Sum up the pages of the prompt."""
        starts = self._starts(prompt)
        rows = [
            bounds(keys, row_starts, self.page_size)
            for keys, row_starts in zip(prompt.keys, starts, strict=True)
        ]
        low, high = zip(*rows, strict=True)
        least = 0
        if prompt.keys.is_cuda:  # all there will be, where that is known, in the same memory
            least = self._most_pages(max(prompt.lengths) + (self.context.new_tokens or 0))
        self.low[layer] = stacked_pages(low, torch.inf, least)
        self.high[layer] = stacked_pages(high, -torch.inf, least)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Widen the bounds of each row's last page by the new key, which may be the first of its
        page.
        """
        take_in(key, *self.last_bounds(layer))

    def last_bounds(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bounds of all pages, low and high, and the newest token's page, [B]."""
        if self._grows(layer):
            self.low[layer] = pad(self.low[layer], (0, 0, 0, SPARE_PAGES), value=torch.inf)
            self.high[layer] = pad(self.high[layer], (0, 0, 0, SPARE_PAGES), value=-torch.inf)
        return self.low[layer], self.high[layer], self._last_page(layer)

    def _last_page(self, layer: int) -> torch.Tensor:
        """The page of each row's newest token, [B]."""
        seen = self.view.seen(layer)
        if seen.is_cpu:
            return (seen - 1) // self.page_size
        # the first layer may come again, where a step was not captured
        if layer == self.shape.sparse_layers[0] or seen.device not in self.last_pages:
            self.last_pages[seen.device] = (seen - 1) // self.page_size
        return self.last_pages[seen.device]

    def end_step(self) -> None:
        """Forget what was the same in all layers of the step."""
        self.last_pages = {}

    def crop(self, layer: int) -> None:
        """Sum up each row's last page anew; those after it are empty."""
        low, high = self.low[layer], self.high[layer]
        for row, length in enumerate(self.view.lengths(layer)):
            page = self._pages(length) - 1
            first = page * self.page_size
            keys = keys_of_row(self.view, layer, row, first, length)
            edges = torch.tensor([0, length - first], device=keys.device)
            low[row, :, page : page + 1], high[row, :, page : page + 1] = bounds(
                keys, edges, self.page_size
            )
            low[row, :, page + 1 :], high[row, :, page + 1 :] = torch.inf, -torch.inf

    def _starts(self, prompt: Prompt) -> list[torch.Tensor]:
        """Where each page of each row begins and the last one ends, [P + 1]."""
        most = self._pages(max(prompt.lengths))
        starts = torch.arange(most + 1, device=prompt.keys.device) * self.page_size
        return [starts[: self._pages(length) + 1].clamp(max=length) for length in prompt.lengths]

    def _counts(self, layer: int) -> list[int]:
        """Pages of each row, the last one included."""
        return [self._pages(length) for length in self.view.lengths(layer)]

    def _pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def _most_pages(self, tokens: int) -> int:
        """Pages to make room for, of so many tokens."""
        return self._pages(tokens) + 1

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The tokens of the pages with the largest bounds, page after page."""
        if not is_readable(query):
            return Selection(self._selected(layer, query))
        lengths, rooms = self.view.lengths(layer), self._rooms(layer)
        most = [self._most(room) for room in rooms]
        rows = np.array([*zip(self._counts(layer), most, rooms, strict=True)])
        asked = self._edges(lengths), rows, self.selection == "kv_head", self.budget.unified
        return Selection(best_tokens(query, self.low[layer], self.high[layer], *asked))

    def _selected(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The same in a few launches, with as many pages in every step; those to come score
        -inf.
        """
        ranges = self.ranges(layer, query)
        if self.budget.unified:
            rows = enumerate(zip(self._rooms(layer), self._last_page(layer), strict=True))
            return stacked([self._joined(row, *pair, ranges) for row, pair in rows])
        ids: torch.Tensor = page_tokens(*ranges)
        return ids

    def ranges(self, layer: int, query: torch.Tensor) -> Ranges:
        """The pages with their scores, and what is attended of them."""
        seen, starts = self.view.seen(layer), self._page_starts(layer)
        mean, size = self.selection == "kv_head", self._shortest
        low, high = self.low[layer], self.high[layer]
        scores = page_bounds(query, low, high, seen, starts, size, mean)
        limits = self.capacity_of[layer], self.room_of[layer]
        return Ranges(scores, seen, *limits, starts, size, max(self._rooms(layer)))

    @property
    def layout(self) -> object:
        """Pages that there is memory for, and tokens that are attended."""
        layer = self.shape.sparse_layers[0]
        if self._grows(layer, 1):
            return None
        return self.low[layer].shape[2], self._rooms(layer, 1)

    def _grows(self, layer: int, more: int = 0) -> bool:
        """The page of the last token, after so many more, is one for which there is no memory."""
        return self._pages(max(self.view.lengths(layer)) + more) > self.low[layer].shape[2]

    def _edges(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Where each page of rows of so many tokens begins and the last one ends, [B, P + 1];
        nothing reads beyond.
        """
        return page_edges(tuple(lengths), self.page_size)

    def _page_starts(self, layer: int) -> torch.Tensor | None:
        """Where each page of each row begins on a device, [B, P + 1]; None: by their size."""
        return None

    @property
    def _shortest(self) -> int:
        """Tokens of a page at least, but for the last ones."""
        return self.page_size

    def _most(self, room: int) -> int:
        """Pages that `room` tokens take at most."""
        return self._pages(room)

    def _joined(self, row: int, room: int, last: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        """Tokens [Hkv, n <= room] that a row attends: the page `last` first, then those of its
        group's lists, joined by rank.
        """
        scores, heads = ranges.scores[row], self.shape.kv_heads
        count = scores.shape[1]
        ranked = scores.topk(min(self._most(room), count), dim=1).indices
        newest = ranked.new_zeros(1, heads, 1) + last
        joined = interleave(ranked[None], heads, count, protected=newest)[0]
        edges = token_edges(ranges.tokens, ranges.starts, count, ranges.page_size)
        pages = Chunks(edges[row])
        return pages.tokens(pages.fitting(joined, room), room)

    def _rooms(self, layer: int, more: int = 0) -> list[int]:
        """Tokens that each row attends, after so many more."""
        return [
            length + more if capacity >= length + more else self.share(capacity) * self.page_size
            for length, capacity in zip(self.view.lengths(layer), self.capacities, strict=True)
        ]

    def share(self, capacity: int) -> int:
        """Pages of a budget of `capacity` tokens."""
        return max(3, capacity // self.page_size)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """The budget's pages, of each query head where they choose for themselves; unified: C
        tokens.
        """
        capacity = self.budget.tokens(length)
        if self.budget.unified:
            return capacity
        lists = self.shape.group if self.selection == "query_head" else 1
        # with a budget of the whole sequence the tokens short of a full page are attended too
        return max(lists * self.share(capacity) * self.page_size, capacity)
