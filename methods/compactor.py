"""Compactor: tokens that are outliers, or that their own chunk attends (Chari and Van Durme 2025,
"Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores").

Leverage scores of keys before RoPE say which are outliers; a Gaussian sketch makes them cheap. How
much the queries of a chunk attend each of its keys, later ones too, times the norm of the value,
says which matter. Both are standardised over the layer and added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.method import Needs, Prompt
from methods.blocks.scorer import Scorer

EVERY_QUERY = 1 << 30


@dataclass(eq=False)
class Compactor(Scorer):
    """Keep both ends and the prompt tokens with the largest sum, as kvpress has it.

    The products of queries and keys are not scaled there. The last chunk is as long as it is, where
    kvpress fills it up with zeros.

    Parameters
    ----------
    sinks, last
        first and last tokens, which stay, and are not scored.
    chunk
        tokens whose queries attend each other's keys.
    sketch
        columns of the Gaussian matrix that keys are multiplied by.
    blending
        weight of the leverage; None: the share of the prompt that is dropped.
    """

    needs = Needs(query_window=EVERY_QUERY, rotation=True)

    sinks: int = 8
    last: int = 4
    chunk: int = 256
    sketch: int = 48
    blending: float | None = None

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The sum for each token; infinite at both ends."""
        scores = torch.full(prompt.keys.shape[:3], torch.inf, device=prompt.keys.device)
        for row, length in enumerate(prompt.lengths):
            inner = slice(self.sinks, length - self.last)
            if length <= self.sinks + self.last + 1:
                continue
            weight = self.blending
            if weight is None:
                weight = 1 - min(1.0, self.capacities[row] / length)
            attended = self._received(prompt, row, inner)
            leverage = self._leverage(layer, prompt, row, inner)
            scores[row, :, inner] = weight * leverage + attended
        return scores

    def _leverage(self, layer: int, prompt: Prompt, row: int, inner: slice) -> torch.Tensor:
        """How far each key before RoPE stands out, [H, n], standardised."""
        keys = prompt.keys[row : row + 1, :, inner].float()
        positions = torch.arange(inner.start, inner.stop, device=keys.device)[None, None]
        assert self.context.rotation is not None
        before = self.context.rotation.back(keys, positions)[0]
        sketched = (before - before.mean(dim=1, keepdim=True)) @ self._sketch(layer, row, keys)
        gram = sketched.transpose(1, 2) @ sketched
        jitter = 0.01 * torch.eye(self.sketch, device=keys.device)
        factor = torch.linalg.cholesky(gram + jitter)
        inverse = torch.cholesky_solve(sketched.transpose(1, 2), factor).transpose(1, 2)
        return _standardised((sketched * inverse).sum(dim=-1).clamp(min=0))

    def _sketch(self, layer: int, row: int, like: torch.Tensor) -> torch.Tensor:
        """A Gaussian matrix [H, D, sketch] that the sample's id decides."""
        generator = self.context.generator(layer, row=row)
        shape = like.shape[1], like.shape[3], self.sketch
        return torch.randn(shape, generator=generator).to(like.device) / self.sketch**0.5

    def _received(self, prompt: Prompt, row: int, inner: slice) -> torch.Tensor:
        """What each key receives of its chunk's queries, times its value's norm, [H, n],
        standardised.
        """
        offset = prompt.queries.shape[2] - prompt.lengths[row]
        queries = prompt.queries[row, :, inner.start + offset : inner.stop + offset].float()
        keys = prompt.keys[row, :, inner].float()
        group = queries.shape[0] // keys.shape[0]
        received = [
            (asked @ key.repeat_interleave(group, 0).transpose(1, 2)).softmax(dim=-1).sum(dim=1)
            for asked, key in zip(
                queries.split(self.chunk, 1), keys.split(self.chunk, 1), strict=True
            )
        ]
        shared = torch.cat(received, dim=1).unflatten(0, (-1, group)).mean(dim=1)
        worth = shared * prompt.values[row, :, inner].float().norm(dim=-1)
        return _standardised(torch.nn.functional.avg_pool1d(worth[None], 3, 1, 1)[0])


def _standardised(scores: torch.Tensor) -> torch.Tensor:
    """Less their mean, over their standard deviation: of all heads of a layer."""
    return (scores - scores.mean()) / scores.std().clamp(min=1e-6)
