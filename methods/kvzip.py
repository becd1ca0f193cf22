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

from kvbench.method import Needs, Prompt, Replay, Replayed
from methods.blocks.one_ranking import OneRanking

# As published.
ASK = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP = 8  # last tokens of the chunk before that the question names
BLOCK = 256  # queries whose attention is computed at once


@dataclass(eq=False)
class KVzip(OneRanking):
    """Keep C prompt tokens of each KV head on average over the sparse layers; a head may keep all,
    or next to none.

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
                # [G, block, keys]
                logits = self.shape.logits(queries[:, block].float() @ keys.T)
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
