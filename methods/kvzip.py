"""KVzip (Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
section 3).

What a model does not look at when it repeats the context, it needs for no question. After the
prompt the model is asked to repeat the context, chunk by chunk (`kvbench.method.Replay`), and a
pair of key and value is worth the most attention that any query of that pass gives it. Pairs of all
layers and heads compete in one ranking.

KVzip+ is kvpress': attention is multiplied with the length of what the head would add to the hidden
states, over that of the states that asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Replay, Replayed, Shape, View
from methods.blocks.ragged import stacked
from methods.blocks.scorer import ROLLING_WINDOW, Scorer

# As published.
ASK = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP = 8  # last tokens of the chunk before that the question names
BLOCK = 256  # queries whose attention is computed at once


@dataclass(eq=False)
class KVzip(Scorer):
    """Keep C prompt tokens of each KV head on average over the sparse layers; a head may keep all,
    or next to none.

    The tokens before the context, such as the chat template's, stay whatever their scores, inside
    C.

    Parameters
    ----------
    chunk
        tokens that are repeated at once.
    plus
        weigh attention as KVzip+ does.
    layerwise
        each layer keeps C on average, and only its heads compete.
    """

    chunk: int = 2000
    plus: bool = False
    layerwise: bool = False

    def __post_init__(self) -> None:
        self.needs = Needs(prefix=True, replay=Replay(self.chunk, ASK, GO_ON, OVERLAP))

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No layer has scores yet."""
        super().begin(shape, budget, view, context)
        self.scores: dict[int, torch.Tensor] = {}

    # -- scores ------------------------------------------------------------------------------------

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The most attention that a query of the replay gives each token, [B, Hkv, N]; infinite
        before the context.
        """
        scores = prompt.keys.new_zeros(prompt.keys.shape[:3], dtype=torch.float32)
        for row, prefix in enumerate(prompt.prefixes):
            scores[row, :, :prefix] = torch.inf
        for replay in prompt.replayed:
            chunk = slice(replay.start, replay.stop)
            scores[replay.row, :, chunk] = self.most_attention(layer, prompt, replay)
        return scores

    def most_attention(self, layer: int, prompt: Prompt, replay: Replayed) -> torch.Tensor:
        """To each token of a chunk, [Hkv, stop - start], in a softmax over the tokens before the
        context, the chunk's, and those of the pass up to the query.
        """
        before = prompt.prefixes[replay.row]
        chunk = slice(before, before + replay.stop - replay.start)
        position = torch.arange(replay.queries.shape[1], device=replay.keys.device)
        most = []
        for head, queries in enumerate(replay.queries.unflatten(0, (replay.keys.shape[0], -1))):
            stored = prompt.keys[replay.row, head]
            keys = torch.cat(
                [stored[:before], stored[replay.start : replay.stop], replay.keys[head]]
            ).float()
            weight = self.added_lengths(layer, prompt, replay, head) if self.plus else None
            best = keys.new_zeros(replay.stop - replay.start)
            for block in position.split(BLOCK):
                logits = queries[:, block].float() @ keys.T * self.shape.scaling  # [G, block, keys]
                logits[..., chunk.stop :].masked_fill_(position > block[:, None], -torch.inf)
                attention = logits.softmax(dim=-1)[..., chunk]
                if weight is not None:
                    attention = attention * weight[:, None] / replay.norms[block, None]
                best = best.maximum(attention.amax(dim=(0, 1)))
            most.append(best)
        return torch.stack(most)

    def added_lengths(
        self, layer: int, prompt: Prompt, replay: Replayed, head: int
    ) -> torch.Tensor:
        """[G, stop - start], of what each query head of a group adds to the hidden states for each
        token's value.
        """
        assert self.context.output is not None, "KVzip+ weighs values by the model's output weights"
        values = prompt.values[replay.row, head, replay.start : replay.stop].float()
        output = self.context.output(layer).to(values.device)
        weights = output.unflatten(0, (self.shape.kv_heads, -1))[head]
        return torch.stack([(values @ weight.float()).norm(dim=-1) for weight in weights])

    # -- one ranking -------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Score the layer's tokens; what is kept shows once all layers have scores.

        Raises
        ------
        ValueError
            there is nothing before the context and in it to choose from, or no room for it.
        """
        for length, before, capacity in zip(
            prompt.lengths, prompt.prefixes, self.capacities, strict=True
        ):
            check_context(length, before, capacity, self.fixed(capacity) - self.end(capacity))
        self.scores[layer] = self.score(layer, prompt).masked_fill(
            self.protected(prompt), torch.inf
        )

    def end_prefill(self) -> None:
        """Keep the best pairs of all layers and heads."""
        retained = [
            self._retained_mask(row, length) for row, length in enumerate(self.shape.lengths)
        ]
        whole = all(bool(row.all()) for row in retained)
        older = [
            row.index_fill(2, torch.arange(*recent, device=row.device), False)
            for row, recent in zip(retained, self.recents, strict=True)
        ]
        for at, layer in enumerate(self.scores):
            device = self.shape.device_of(layer)
            if not whole:
                room = ROLLING_WINDOW if self.budget.counts_generated else None
                self.view.keep(layer, stacked([_ids(row[at]).to(device) for row in retained]), room)
            if not self.at_rest:
                self.scored[layer] = [_ids(row[at]).to(device) for row in older]
        self.scores = {}

    def _retained_mask(self, row: int, length: int) -> torch.Tensor:
        """[layers, Hkv, length] bool, which tokens of a row stay: of equal scores the first in that
        order.
        """
        layers = [scores[row, :, :length] for scores in self.scores.values()]
        scores = torch.stack([of_layer.to(self.shape.device) for of_layer in layers])
        ranked = scores.view(len(scores) if self.layerwise else 1, -1)
        count = self.capacities[row] * ranked.shape[1] // max(length, 1)
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(ranked, dtype=torch.bool).scatter(1, best, True).view_as(scores)

    def _most_of_head(self, capacity: int, length: int) -> int:
        """All others may keep next to nothing."""
        competing = self.shape.kv_heads * (1 if self.layerwise else len(self.shape.sparse_layers))
        return max(capacity, min(length, capacity * competing))


def check_context(length: int, before: int, capacity: int, recent: int) -> None:
    """Refuse a prompt of `length` tokens without a context, or a budget without room for any of it.

    Parameters
    ----------
    before
        tokens before the context, which stay, as the `recent` last ones do.

    Raises
    ------
    ValueError
        says what would be right.
    """
    if before >= length:
        raise ValueError(
            f"prompt of {length} tokens: {before} come before the context; expected a text after"
            " them"
        )
    if before + recent >= capacity < length:
        newest = f", and the last {recent}" if recent else ""
        raise ValueError(
            f"budget={capacity}: the {before} tokens before the context stay{newest}; expected"
            f" {before + recent + 1} tokens or more"
        )


def _ids(chosen: torch.Tensor) -> torch.Tensor:
    """Ids [H, n] of what is chosen of each list [H, N], ascending, trailing -1."""
    length = chosen.shape[1]
    ids = torch.where(chosen, torch.arange(length, device=chosen.device), length).sort(dim=1).values
    return torch.where(ids < length, ids, -1)[:, : int(chosen.sum(dim=1).max())]
