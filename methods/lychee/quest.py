"""Quest with pages that end where the text ends something, from the pilot study of LycheeCluster
(2026).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.chunking import Text, cutter, keys_of_row
from methods.blocks.pages import bounds
from methods.quest import Quest


class StructureQuest(Quest):
    """As Quest, but pages have page_size / 2 to `page_size` tokens and end at delimiters.

    As many pages are attended as fit into the tokens of Quest's. Arguments as of `Quest`.
    """

    needs = Needs(token_text=True)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No text is cut yet."""
        super().begin(shape, budget, view, context)
        self.cutter = cutter("structure", -(-self.page_size // 2), self.page_size, context.pieces)
        # of each row; its chunks and, after them, its rest are the pages
        self.texts: list[Text] = []

    def _starts(self, prompt: Prompt) -> list[torch.Tensor]:
        if not self.texts:  # the same in all layers
            ids = prompt.token_ids.cpu()
            self.texts = [
                Text(ids[row, :length], self.cutter, self.page_size, self.shape.device)
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

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Widen the last page's bounds; where a page was cut short and its last tokens begin the
        next, sum up both.
        """
        super().append(layer, key, value)
        for row, (text, pages) in enumerate(zip(self.texts, self.pages, strict=True)):
            if text.cut and text.length - text.end > 1:
                first, both = text.end - sum(text.cut), slice(len(pages) - 2, len(pages))
                keys = keys_of_row(self.view, layer, row, first, text.length)
                low, high = bounds(keys, pages.on(keys.device).bounds[-3:] - first, self.page_size)
                self.low[layer][row, :, both], self.high[layer][row, :, both] = low, high

    def _edges(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        return pad_sequence([pages.bounds for pages in self.pages], batch_first=True).numpy()

    def _most(self, room: int) -> int:
        return room // self.cutter.shortest + 2  # the last two may be shorter

    def _tokens(
        self, row: int, room: int, length: int | torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        pages, last = self.pages[row].on(scores.device), scores.shape[1] - 1
        return pages.tokens(pages.fitting(self._ranked(scores, self._most(room), last), room), room)
