"""Quest: query-aware page selection (Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference", section 3.3).

Every page of 16 consecutive keys is summed up by its element-wise minimum and maximum. At each step the pages with the
largest possible logit are attended; nothing is ever evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import pad

from kvbench.method import Budget, Context, Method, Prompt, Selection, Shape
from methods.blocks.pages import bounds, tokens_of_pages, upper_bound
from methods.blocks.topk import interleave, top

if TYPE_CHECKING:
    from kvbench.store import View

SPARE_PAGES = 64  # pages of summaries to add when the generated tokens have filled the last ones


class Quest(Method):
    """Attend the max(3, C / page_size) pages with the largest upper bound on q.k; the partial last page competes.

    With unified accounting the pages of the group's query heads are joined by rank, the last page first, and cut to
    C / page_size. A budget of at least the current length attends everything.

    Args:
        page_size: tokens in a page.
        selection: "query_head", each query head its own pages (as published); "kv_head", the pages with the largest
            mean bound over the group.
    """

    def __init__(self, page_size: int = 16, selection: Literal["query_head", "kv_head"] = "query_head") -> None:
        self.page_size, self.selection = page_size, selection

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        super().begin(shape, budget, view, context)
        self.low: dict[int, torch.Tensor] = {}  # [B, Hkv, pages, D]
        self.high: dict[int, torch.Tensor] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.low[layer], self.high[layer] = bounds(prompt.keys, self.page_size, prompt.valid())

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pages = [(length - 1) // self.page_size for length in self.view.lengths(layer)]
        if max(pages) >= self.low[layer].shape[2]:
            self.low[layer] = pad(self.low[layer], (0, 0, 0, SPARE_PAGES), value=torch.inf)
            self.high[layer] = pad(self.high[layer], (0, 0, 0, SPARE_PAGES), value=-torch.inf)
        for row, page in enumerate(pages):
            low, high = self.low[layer][row, :, page], self.high[layer][row, :, page]
            torch.minimum(low, key[row, :, 0], out=low)
            torch.maximum(high, key[row, :, 0], out=high)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        lengths = self.view.lengths(layer)
        filled = [-(-length // self.page_size) for length in lengths]
        most = max(filled)
        score = upper_bound(query, self.low[layer][:, :, :most], self.high[layer][:, :, :most])
        if min(filled) < most:
            real = torch.arange(most, device=score.device) < torch.tensor(filled, device=score.device)[:, None]
            score = score.masked_fill(~real[:, None, None], -torch.inf)
        score = score.mean(dim=2) if self.selection == "kv_head" else score.flatten(1, 2)

        wanted = [self._pages(row, length) for row, length in enumerate(lengths)]
        pages = top(score, wanted)
        if self.budget.unified:
            last = torch.tensor(filled, device=score.device)[:, None, None] - 1
            pages = interleave(pages, self.shape.kv_heads, wanted, last.expand(-1, self.shape.kv_heads, 1))
        return Selection(tokens_of_pages(pages, self.page_size, lengths))

    def _pages(self, row: int, length: int) -> int:
        """Pages row `row` attends when it has `length` tokens."""
        filled, capacity = -(-length // self.page_size), self.capacities[row]
        return filled if capacity >= length else min(filled, max(3, capacity // self.page_size))

    def rule(self, length: int, generated: int) -> int:
        pages = max(3, self.budget.tokens(length) // self.page_size)
        if self.budget.unified:
            return self.budget.tokens(length)
        lists = self.shape.group if self.selection == "query_head" else 1
        # with a budget of the whole sequence the tokens short of a full page are attended too
        return max(lists * pages * self.page_size, self.budget.tokens(length))
