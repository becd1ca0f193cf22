"""Quest with pages that end where the text ends something, from the pilot study of LycheeCluster
(2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.chunking import Chunks, Text, cutter, keys_of_row
from methods.blocks.pages import SHORTER, bounds
from methods.quest import Quest

TO_COME = 1 << 62  # after every token id


class StructureQuest(Quest):
    """As Quest, but pages have page_size / 2 to `page_size` tokens and end at delimiters.

    As many pages are attended as fit into the tokens of Quest's. Arguments as of `Quest`.
    """

    needs = Needs(token_text=True, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No text is cut yet."""
        super().begin(shape, budget, view, context)
        self.cutter = cutter("structure", -(-self.page_size // 2), self.page_size, context.pieces)
        # of each row; its chunks and, after them, its rest are the pages
        self.texts: list[Text] = []
        self.tables: dict[torch.device, PageTable] = {}  # where the compiled code does not select

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Cut the prompt and sum up its pages."""
        super().prefill(layer, prompt)
        if prompt.keys.is_cuda:  # a decode step would wait for it
            self._table(layer, prompt.keys.device)

    def _starts(self, prompt: Prompt) -> list[torch.Tensor]:
        if not self.texts:  # the same in all layers
            ids = prompt.token_ids.cpu()
            self.texts = [
                Text(ids[row, :length], self.cutter, self.page_size, ids.device)
                for row, length in enumerate(prompt.lengths)
            ]
            self._note_pages()
        return [pages.on(prompt.keys.device).bounds for pages in self.pages]

    def _note_pages(self) -> None:
        self.pages = [text.chunks.extended(text.length) for text in self.texts]

    def _counts(self, layer: int) -> list[int]:
        return list(map(len, self.pages))

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """Read the new tokens, which may end a page."""
        for text, token in zip(self.texts, tokens.tolist(), strict=bool(self.texts)):
            text.append(token)
        self._note_pages()
        for row, text in enumerate(self.texts):
            if text.cut:
                for table in self.tables.values():
                    table.add(row, len(text.chunks), text.end)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Widen the last page's bounds; where a page was cut short and its last tokens begin the
        next, sum up both.
        """
        super().append(layer, key, value)
        for row, (text, pages) in enumerate(zip(self.texts, self.pages, strict=True)):
            if text.cut and text.length - text.end > 1:
                first, both = text.end - sum(text.cut), slice(len(pages) - 2, len(pages))
                keys = keys_of_row(self.view, layer, row, first, text.length)
                edges = torch.zeros(3, dtype=torch.int64, device=keys.device)
                edges[1], edges[2] = text.end - first, text.length - first  # without a copy up
                low, high = bounds(keys, edges, self.page_size)
                self.low[layer][row, :, both], self.high[layer][row, :, both] = low, high

    def _edges(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        return pad_sequence([pages.bounds for pages in self.pages], batch_first=True).numpy()

    def _most(self, room: int) -> int:
        return room // self.cutter.shortest + SHORTER

    def _most_pages(self, tokens: int) -> int:
        return tokens // self.cutter.shortest + SHORTER

    def _grows(self, layer: int, more: int = 0) -> bool:
        return max(self._counts(layer)) + more > self.low[layer].shape[2]

    @property
    def layout(self) -> object:
        """As Quest's; None: two pages are summed up anew."""
        again = any(text.cut and text.length - text.end > 1 for text in self.texts)
        return None if again else super().layout

    def _table(self, layer: int, device: torch.device) -> PageTable:
        """The pages on a device, as many as there is memory for."""
        pages = self.low[layer].shape[2]
        if device not in self.tables or self.tables[device].starts.shape[1] != pages + 1:
            self.tables[device] = PageTable.of([text.chunks for text in self.texts], pages, device)
        return self.tables[device]

    def _last_page(self, layer: int) -> torch.Tensor:
        if self.shape.device.type == "cpu":
            return torch.tensor(self._counts(layer)) - 1
        return self._table(layer, self.low[layer].device).last

    def _page_starts(self, layer: int) -> torch.Tensor:
        return self._table(layer, self.low[layer].device).starts

    @property
    def _shortest(self) -> int:
        return self.cutter.shortest


class PageTable(NamedTuple):
    """The pages of each row on a device, in memory that does not move as they become more.

    Attributes
    ----------
    starts
        [B, P + 1] int64, where each page begins; `TO_COME` for those to come.
    last
        [B] int64, the last page that has begun.
    """

    starts: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Chunks], pages: int, device: torch.device) -> PageTable:
        """That of rows of chunks, each followed by a page of its rest."""
        more = [pages + 1 - len(chunks.bounds) for chunks in rows]
        pairs = zip(rows, more, strict=True)
        starts = torch.stack([pad(chunks.bounds, (0, n), value=TO_COME) for chunks, n in pairs])
        last = torch.tensor([*map(len, rows)])
        return cls(starts.to(device), last.to(device))

    def add(self, row: int, page: int, start: int) -> None:
        """A page of a row begins; one that has no room here comes with another table."""
        if page >= self.starts.shape[1] - 1:
            return
        self.starts[row, page] = start
        self.last[row] = page
