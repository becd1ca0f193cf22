"""Queries, keys and values from a formula, which other codes have been run on: what they chose is in the tests."""

from __future__ import annotations

import torch
from driver import Stream, rotate


def waves(phase: float, heads: int, tokens: int) -> torch.Tensor:
    """2 sin(c + 1.7 h + .9 t + 2.3 d + .37 t d + .11 h t), [heads, tokens, 8] float64."""
    h, t, d = (torch.arange(count, dtype=torch.float64) for count in (heads, tokens, 8))
    h, t = h[:, None, None], t[:, None]
    return 2 * torch.sin(phase + 1.7 * h + 0.9 * t + 2.3 * d + 0.37 * t * d + 0.11 * h * t)


def wave_stream(prompt: int = 40, steps: int = 1, *, rope: bool = False) -> Stream:
    """Four query heads of two KV heads; `rope`: the queries are turned to their positions."""
    tokens = prompt + steps
    queries = waves(0.5, 4, tokens) * (torch.arange(4)[:, None, None] + 1) / 2
    if rope:
        queries = rotate(queries, torch.arange(tokens)[None])
    parts = (part.float()[None, None] for part in (queries, waves(1.0, 2, tokens), waves(2.0, 2, tokens)))
    return Stream((prompt,), steps, *parts, torch.zeros(1, tokens, dtype=torch.int64))
