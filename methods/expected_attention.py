"""Expected Attention: what queries to come should attend (Devoto et al. 2025, "Expected Attention:
KV Cache Compression by Estimating Attention from Future Queries Distribution", section 3).

Queries before RoPE are taken to be normally distributed, with the prompt's mean and covariance, and
to come at any of the next positions. What a key will receive has then an expectation in closed
form; times the norm of its value it says how much would change without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.head_budgets import HeadBudgets
from methods.blocks.interval import Interval
from methods.blocks.scorer import Scorer

EVERY_QUERY = 1 << 30


@dataclass(eq=False)
class ExpectedAttention(Scorer):
    """Keep the sinks and the prompt tokens with the largest expected contribution, C in all; no
    window.

    The harness hands over the queries of the whole prompt, which take Hq N D numbers of each layer
    while it is read, and of all layers where several methods share its prefill.

    Parameters
    ----------
    future
        positions after the prompt over which RoPE is averaged.
    sinks
        first tokens, which stay, and count neither among the queries nor in the softmax.
    covariance
        the queries' covariance counts, too; else their mean alone.
    vnorm
        the attention is multiplied by the norm of the value.
    eps
        added to the attention before.
    """

    needs = Needs(query_window=EVERY_QUERY, rotation=True)

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    vnorm: bool = True
    eps: float = 0.0

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No mean rotation is known yet."""
        super().begin(shape, budget, view, context)
        self.turns: dict[tuple[int, torch.device], torch.Tensor] = {}

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The expected contribution of each token; the largest number for sinks."""
        scores = torch.full(
            prompt.keys.shape[:3], torch.finfo(torch.float32).max, device=prompt.keys.device
        )
        for row, length in enumerate(prompt.lengths):
            if length > self.sinks:
                for head in range(prompt.keys.shape[1]):
                    scores[row, head, self.sinks : length] = self._contribution(prompt, row, head)
        return scores

    def _contribution(self, prompt: Prompt, row: int, head: int) -> torch.Tensor:
        """That of the tokens of a KV head after the sinks, [n]."""
        length, scaling = prompt.lengths[row], self.shape.scaling
        keys = prompt.keys[row, head, self.sinks : length].float()
        grouped = prompt.queries[row].unflatten(0, (self.shape.kv_heads, -1))
        mean, covariance = self._queries(grouped[head], length)
        logits = mean @ keys.T * scaling
        if self.covariance:
            logits += (keys @ covariance * keys).sum(dim=2) * scaling**2 / 2
        expected = logits.softmax(dim=1).mean(dim=0)
        if not self.vnorm:
            return expected
        norms = prompt.values[row, head, self.sinks : length].float().norm(dim=1)
        return (expected + self.eps) * norms.nan_to_num(posinf=0)

    def _queries(self, queries: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [G, D] and covariance [G, D, D] of queries to come, by the last ones [G, W, D] of
        `length` tokens.
        """
        rotation = self.context.rotation
        assert rotation is not None, "the harness hands over what `needs` asks for"
        count = min(queries.shape[1], length - self.sinks)
        positions = torch.arange(length - count, length, device=queries.device)[None, None]
        before = rotation.back(queries[None, :, queries.shape[1] - count :].float(), positions)[0]
        mean, turn = before.mean(dim=1, keepdim=True), self._turn(length, queries)
        centred = before - mean
        covariance = turn.T @ (centred.transpose(1, 2) @ centred / count) @ turn
        return (mean @ turn)[:, 0], covariance

    def _turn(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The mean rotation at the `future` positions after `length` tokens, transposed: [D, D]
        fp32, for rows.
        """
        key = length, like.device
        if key not in self.turns:
            assert self.context.rotation is not None
            units = torch.eye(like.shape[-1], device=like.device)[None, :, None].expand(
                -1, -1, self.future, -1
            )
            positions = torch.arange(length, length + self.future, device=like.device)[None, None]
            self.turns[key] = self.context.rotation.turn(units, positions)[0].mean(dim=1)
        return self.turns[key]


@dataclass(eq=False)
class AdaExpectedAttention(ExpectedAttention):
    """Expected Attention whose heads share a layer's budget out by their scores (AdaKV, as kvpress
    has it).

    Parameters
    ----------
    alpha
        share of C that is safe in each head.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        self.heads = HeadBudgets(self.alpha, "top")


@dataclass(eq=False)
class ExpectedAttentionDecode(Interval, ExpectedAttention):
    """Expected Attention over all that is held, every `interval` decode steps."""

    reads_values = True
