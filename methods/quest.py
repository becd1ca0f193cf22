"""Quest: query-aware page selection (Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference", section 3.3).

Every page of 16 consecutive keys is summed up by its element-wise minimum and maximum. At each step the pages with the
largest possible logit are attended; nothing is ever evicted. With chunking=structure a page ends where the text ends
something, as in the pilot study of LycheeCluster (2026).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.chunking import Chunking, Chunks, Text, cutter, keys_of_row
from methods.blocks.pages import bounds, upper_bound
from methods.blocks.ragged import stacked
from methods.blocks.topk import interleave

SPARE_PAGES = 64  # pages of summaries to add when the generated tokens have filled the last ones


class Quest(Method):
    """Attend the max(3, C / page_size) pages with the largest upper bound on q.k; the partial last page competes.

    With unified accounting the pages of the group's query heads are joined by rank, the last page first, and cut to
    C / page_size. A budget of at least the current length attends everything.

    Args:
        page_size: tokens in a page.
        selection: "query_head", each query head its own pages (as published); "kv_head", the pages with the largest
            mean bound over the group.
        chunking: "fixed", pages of `page_size` tokens (as published); "structure", pages of half as many up to
            `page_size` that end at delimiters, and as many of them as fit into the same number of tokens.
    """

    def __init__(
        self,
        page_size: int = 16,
        selection: Literal["query_head", "kv_head"] = "query_head",
        chunking: Chunking = "fixed",
    ) -> None:
        self.page_size, self.selection, self.chunking = page_size, selection, chunking
        self.needs = Needs(token_text=chunking == "structure")

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        super().begin(shape, budget, view, context)
        self.cutter = cutter(self.chunking, -(-self.page_size // 2), self.page_size, context.pieces)
        self.texts: list[Text] = []  # of each row; behind its chunks stands the last page
        self.low: dict[int, torch.Tensor] = {}  # [B, Hkv, pages, D]
        self.high: dict[int, torch.Tensor] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        if not self.texts:
            self.texts = [
                Text(ids[:length].cpu(), self.cutter, self.page_size, self.shape.device)
                for ids, length in zip(prompt.token_ids, prompt.lengths, strict=True)
            ]
            self.pages = self._pages()
        ends = [bounds(keys, pages.bounds, self.page_size) for keys, pages in zip(prompt.keys, self.pages, strict=True)]
        most = max(map(len, self.pages))
        low, high = (
            torch.stack([pad(one, (0, 0, 0, most - one.shape[1]), value=empty) for one in side])
            for side, empty in zip(zip(*ends, strict=True), (torch.inf, -torch.inf), strict=True)
        )
        self.low[layer], self.high[layer] = low, high

    def _pages(self) -> list[Chunks]:
        """The pages of each row, the last one included."""
        return [text.chunks.extended(text.length) for text in self.texts]

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        for text, token in zip(self.texts, tokens.tolist(), strict=bool(self.texts)):
            text.append(token)
        self.pages = self._pages()

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if max(map(len, self.pages)) > self.low[layer].shape[2]:
            self.low[layer] = pad(self.low[layer], (0, 0, 0, SPARE_PAGES), value=torch.inf)
            self.high[layer] = pad(self.high[layer], (0, 0, 0, SPARE_PAGES), value=-torch.inf)
        low, high = self.low[layer], self.high[layer]
        for row, (text, pages) in enumerate(zip(self.texts, self.pages, strict=True)):
            last = len(pages) - 1
            if text.cut and text.length - text.end > 1:  # a page was cut short, and some of its tokens begin the next
                first = text.end - text.cut
                keys = keys_of_row(self.view, layer, row, first, text.length, self.shape.device)
                both = bounds(keys, pages.bounds[-3:] - first, self.page_size)
                low[row, :, last - 1 : last + 1], high[row, :, last - 1 : last + 1] = both
            else:
                torch.minimum(low[row, :, last], key[row, :, 0], out=low[row, :, last])
                torch.maximum(high[row, :, last], key[row, :, 0], out=high[row, :, last])

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        most, heads = max(map(len, self.pages)), self.shape.kv_heads
        score = upper_bound(query, self.low[layer][:, :, :most], self.high[layer][:, :, :most])
        score = score.mean(dim=2) if self.selection == "kv_head" else score.flatten(1, 2)
        lists = []
        for row, (text, pages) in enumerate(zip(self.texts, self.pages, strict=True)):
            room = self._room(row, text.length)
            count = min(len(pages), room // self.cutter.shortest + 2)
            ranked = score[row, :, : len(pages)].topk(count, dim=1).indices
            if self.budget.unified:
                last = torch.full((1, heads, 1), len(pages) - 1, device=ranked.device)
                ranked = interleave(ranked[None], heads, len(pages), protected=last)[0]
            lists.append(pages.tokens(pages.fitting(ranked, room), room))
        return Selection(stacked(lists))

    def _room(self, row: int, length: int) -> int:
        """Tokens that row `row` attends when it has `length` tokens."""
        capacity = self.capacities[row]
        return length if capacity >= length else max(3, capacity // self.page_size) * self.page_size

    def rule(self, length: int, generated: int) -> int:
        pages = max(3, self.budget.tokens(length) // self.page_size)
        if self.budget.unified:
            return self.budget.tokens(length)
        lists = self.shape.group if self.selection == "query_head" else 1
        # with a budget of the whole sequence the tokens short of a full page are attended too
        return max(lists * pages * self.page_size, self.budget.tokens(length))
