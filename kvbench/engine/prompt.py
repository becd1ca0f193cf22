"""Reads a prompt chunk by chunk: what its forward passes show, put together across chunks and
aligned by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cosine_similarity

from kvbench.attention.torch import attention_received
from kvbench.memory.store import LayerStore
from kvbench.method import Needs, Prompt


class PromptReader:
    """Collects what a method's `Prompt` holds.

    Parameters
    ----------
    lengths
        prompt tokens of each row.
    offsets
        column of each row's first token in the forward passes (left padding); None: all 0.
    columns
        width of the whole prompt there, padding included; None: the longest row.
    needs
        what to collect besides keys and values.
    scaling, softcap
        of the logits, see `kvbench.method.Shape`.

    Attributes
    ----------
    column, width
        the chunk that is being read.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        offsets: Sequence[int] | None,
        columns: int | None,
        needs: Needs,
        scaling: float,
        softcap: float | None,
    ) -> None:
        self.lengths = tuple(lengths)
        self.offsets = tuple(offsets or [0] * len(lengths))
        self.columns = columns or max(lengths)
        self.column = self.width = 0
        self._needs, self._scaling, self._softcap = needs, scaling, softcap
        self._token_ids: list[torch.Tensor] = []
        self._queries: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._cosines: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, list[torch.Tensor]] = {}

    def start_chunk(self, token_ids: torch.Tensor) -> None:
        """The next columns, token_ids [B, q], are read now."""
        self.column, self.width = self.column + self.width, token_ids.shape[1]
        self._token_ids.append(token_ids)

    @property
    def last_chunk(self) -> bool:
        """The chunk that is being read ends the prompt."""
        return self.column + self.width == self.columns

    def observe(
        self, layer: int, query: torch.Tensor, store: LayerStore, sinks: torch.Tensor | None = None
    ) -> None:
        """Take from a chunk's queries [B, Hq, q, D], whose keys are in the store, what the method
        needs.
        """
        if self._needs.query_window:
            self._observe_window(layer, query)
        if self._needs.attention_sums:
            self._observe_sums(layer, query, store, sinks)

    def observe_last(self, layer: int, query: torch.Tensor) -> None:
        """Take the window from the last queries [B, Hq, n, D] of rows of one length, where no chunk
        was read.

        Raises
        ------
        ValueError
            the method needs what only a forward pass shows.
        """
        if (
            self._needs.attention_sums
            or self._needs.layer_similarity
            or self._needs.inputs
            or self._needs.replay is not None
        ):
            raise ValueError(
                "attention sums, hidden states and replays are those of a model that reads the"
                " prompt"
            )
        if self._needs.query_window:
            self._observe_window(layer, query)

    def observe_inputs(self, layer: int, states: torch.Tensor) -> None:
        """Keep what a layer's attention reads of a chunk, [B, q, E]."""
        self._inputs.setdefault(layer, []).append(states)

    def observe_residual(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Compare a chunk's hidden states [B, q, E] before a layer's attention with those after,
        without padding.
        """
        # a layer's own; the hidden states before it may lie with another layer
        device = after.device
        before = before.to(device)
        columns = torch.arange(self.column, self.column + self.width, device=device)
        first = torch.tensor(self.offsets, device=device)[:, None]
        real = (columns >= first) & (
            columns < first + torch.tensor(self.lengths, device=device)[:, None]
        )
        cosines = (
            cosine_similarity(before.float(), after.float(), dim=2)
            .where(real, 0)
            .sum(dim=1, dtype=torch.float64)
        )
        self._cosines[layer] = self._cosines.get(layer, 0) + cosines

    def similarity(self, layers: int) -> torch.Tensor:
        """[layers, B] fp32, the mean cosine of each row's hidden states before and after each
        layer's attention; 0 of layers that were not watched.
        """
        sums = next(iter(self._cosines.values())).new_zeros(layers, len(self.lengths))
        for layer, cosines in self._cosines.items():
            sums[layer] = cosines
        return (sums / torch.tensor(self.lengths, device=sums.device)).float()

    def prompt(self, layer: int, store: LayerStore) -> Prompt:
        """The whole prompt of one layer, and forget what was collected of it."""
        longest, key = max(self.lengths), store.device.key
        nothing = key.new_zeros(len(self.lengths), 0, 0, key.shape[3])
        sums, inputs = self._sums.pop(layer, None), self._inputs.pop(layer, None)
        return Prompt(
            lengths=self.lengths,
            token_ids=self._aligned(self._token_ids),
            queries=self._queries.pop(layer, nothing),
            attention_sums=None if sums is None else sums[..., :longest],
            inputs=None if inputs is None else self._aligned(inputs),
            **store.first(longest),
        )

    def _observe_window(self, layer: int, query: torch.Tensor) -> None:
        """Copy into the window [B, Hq, W, D] what the chunk's last queries [B, Hq, n, D] hold of
        each row's last W.
        """
        end = self.column + self.width
        column = end - query.shape[2]
        size = min(self._needs.query_window, max(self.lengths))
        if layer not in self._queries:
            self._queries[layer] = query.new_zeros(*query.shape[:2], size, query.shape[3])
        window = self._queries[layer]
        for row, (length, offset) in enumerate(zip(self.lengths, self.offsets, strict=True)):
            # index 0 of the window is column `start`; the row's own tokens begin no earlier than
            # its offset
            start = offset + length - size
            first, last = max(column, start, offset), min(end, offset + length)
            if first < last:
                window[row, :, first - start : last - start] = query[
                    row, :, first - column : last - column
                ]

    def _observe_sums(
        self, layer: int, query: torch.Tensor, store: LayerStore, sinks: torch.Tensor | None
    ) -> None:
        """Add to the sums [B, Hq, columns] what this chunk's own queries give to every
        key so far.
        """
        if layer not in self._sums:
            self._sums[layer] = query.new_zeros(*query.shape[:2], self.columns, dtype=torch.float32)
        received = attention_received(
            query,
            store,
            self.column,
            self.offsets,
            self.lengths,
            self._scaling,
            sinks,
            self._softcap,
        )
        self._sums[layer][..., : received.shape[2]] += received

    def _aligned(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Chunks [B, q, ...] as a whole prompt, [B, N, ...], left-aligned, 0 after a row's end."""
        whole = torch.cat([*chunks], dim=1)
        aligned = whole.new_zeros(len(whole), max(self.lengths), *whole.shape[2:])
        for row, (length, offset) in enumerate(zip(self.lengths, self.offsets, strict=True)):
            aligned[row, :length] = whole[row, offset : offset + length]
        return aligned
