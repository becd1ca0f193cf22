"""Tokens drawn at random: temperature, top-k and top-p, with a stream of random numbers for each
row.

`generate` is greedy without a `Sampler`. What a row draws follows from its own seed and its own
logits alone: not from the rows beside it, the arms that ran before, or the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class Sampler:
    """Draws the next token of each row of one generation.

    A draw is an exponential race: the token with the largest p / e wins, e a standard exponential
    of each token, which happens with probability p. So two methods with the same seed share e, and
    choose the same token wherever their distributions are alike: what differs between them is less
    the luck of the draw than it is with other ways.

    Parameters
    ----------
    temperature
        divides the logits, more than 0.
    seeds
        of each row, a text of all that its random numbers derive from.
    top_p
        the fewest likeliest tokens that together have this probability are drawn from (Holtzman et
        al. 2020).
    top_k
        so many likeliest tokens are drawn from (Fan et al. 2018); 0: all.
    """

    def __init__(
        self, temperature: float, seeds: Sequence[str], top_p: float = 1.0, top_k: int = 0
    ) -> None:
        # In the order of transformers' generate: top-p is of what top-k has left.
        self._warpers = [TemperatureLogitsWarper(float(temperature))]
        self._warpers += [TopKLogitsWarper(top_k)] if top_k else []
        self._warpers += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
        self._seeds = [
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1 for seed in seeds
        ]
        self._generators: list[torch.Generator] = []

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens [B] of logits [B, vocabulary], on their device; the host does not wait
        for it.
        """
        if not self._generators:
            self._generators = [
                torch.Generator(logits.device).manual_seed(seed) for seed in self._seeds
            ]
        scores = logits.float()
        for warper in self._warpers:
            scores = warper(None, scores)
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        # An exponential may come out as 0, and 0 / 0 would win.
        tokens: torch.Tensor = (
            scores.softmax(dim=-1) / noise.clamp_min_(torch.finfo(noise.dtype).tiny)
        ).argmax(dim=-1)
        return tokens
