"""KVzap: the scores of KVzip+ without a second reading, guessed from hidden states (Jegou and
Jeblick 2026, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning"; code in NVIDIA/kvpress,
Apache-2.0).

`kvbench calibrate method=kvzap` lets a model repeat texts, as KVzip+ does, and fits a linear map of
what each layer's attention reads to the logarithm of the scores. From then on a score is one
product a token. The rule is published; the weights are of our own texts and regression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.method import Needs, Prompt
from methods.blocks.one_ranking import OneRanking
from methods.kvzip import KVzip

RIDGE = 100.0  # of 1 (the authors', of many more texts), 100 and 1,000 the best on texts held out
LEAST = 1e-12  # of a score, before its logarithm


@dataclass(eq=False)
class KVzap(OneRanking):
    """Keep the prompt tokens that KVzip+ should score best, C of each KV head on average over the
    sparse layers; or of these what scores the threshold or more.

    Parameters
    ----------
    surrogate
        "auto", the file of the model, or another file of `kvbench calibrate method=kvzap`.
    threshold
        of the natural logarithm of KVzip+'s score; None: C tokens.
    window
        last tokens of the prompt, which stay, inside C.
    """

    surrogate: str = "auto"
    threshold: float | None = None
    window: int = 0

    def __post_init__(self) -> None:
        self.needs = Needs(
            prefix=True, inputs=True, head_scores=self.surrogate, measures="surrogate"
        )

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The logarithm that is guessed, [B, Hkv, N]; infinite before the context."""
        measured, states = self.context.head_scores, prompt.inputs
        assert measured is not None and states is not None, "the harness hands over what is needed"
        weights = torch.tensor(measured.surrogate[layer], device=states.device)  # [Hkv, E + 1]
        if weights.shape[1] != states.shape[2] + 1:
            raise ValueError(
                f"method.surrogate: maps of {weights.shape[1] - 1} numbers, and hidden states have"
                f" {states.shape[2]}; kvbench calibrate method=kvzap makes its own"
            )
        scores = (states.float() @ weights[:, :-1].T + weights[:, -1]).transpose(1, 2)
        for row, prefix in enumerate(prompt.prefixes):
            scores[row, :, :prefix] = torch.inf
        return scores

    def calibrator(self) -> Regression:
        """Fits the maps."""
        return Regression(plus=True)


class Regression(KVzip):
    """Sums over all tokens that it is shown of products of hidden states, 1 and the logarithms of
    KVzip+'s scores, [E + 1 + Hkv, E + 1 + Hkv] of each layer: all that least squares need.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs = replace(self.needs, inputs=True)
        self.sums: dict[int, torch.Tensor] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Add a prompt's context."""
        assert prompt.inputs is not None
        context = slice(prompt.prefixes[0], prompt.lengths[0])
        states = prompt.inputs[0, context].float()
        scores = self.score(layer, prompt)[0, :, context].clamp(min=LEAST).log().T
        rows = torch.cat([states, torch.ones_like(states[:, :1]), scores], dim=1)
        self.sums[layer] = self.sums.get(layer, 0) + (rows.T @ rows).double().cpu()

    def end_prefill(self) -> None:
        """Nothing is kept."""

    def measure(
        self, texts: Sequence[list[int]], read: Callable[[list[int]], None]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights from three quarters of the texts, and of each layer R2 in the last quarter, the
        mean over its KV heads.
        """
        held_out = len(texts) // 4
        for text in texts[:-held_out]:
            read(text)
        heads = self.shape.kv_heads
        weights = {layer: _ridge(sums, heads) for layer, sums in self.sums.items()}
        self.sums = {}
        for text in texts[-held_out:]:
            read(text)
        fits = [_explained(self.sums[layer], weights[layer]) for layer in weights]
        table = [weights[layer].T.tolist() for layer in weights]
        return {"surrogate": table}, {"ridge": RIDGE, "held_out": held_out, "r2": fits}


def _ridge(sums: torch.Tensor, heads: int) -> torch.Tensor:
    """[E + 1, Hkv], the weights and an offset that is not penalised."""
    penalty = torch.full((len(sums) - heads,), RIDGE, dtype=torch.float64)
    penalty[-1] = 0
    inner = sums[:-heads, :-heads] + penalty.diag()
    return torch.linalg.solve(inner, sums[:-heads, -heads:])


def _explained(sums: torch.Tensor, weights: torch.Tensor) -> float:
    """R2 of the tokens in the sums, the mean over heads."""
    heads = weights.shape[1]
    both = torch.cat([weights, -torch.eye(heads, dtype=torch.float64)])
    left = (both * (sums @ both)).sum(dim=0)
    ones, count = sums[-heads - 1, -heads:], sums[-heads - 1, -heads - 1]
    total = sums.diag()[-heads:] - ones.square() / count
    return round(float((1 - left / total).mean()), 4)
