"""Which KV heads look back to where a token stood before (RazorAttention, Tang et al. 2024, section 3).

A model reads random tokens that are repeated a few times, so that nothing but the copies says what comes next. An echo
head attends to the earlier copies of the token that it reads, an induction head to the tokens that followed them.
"""

from __future__ import annotations

from typing import Any

import torch

from kvbench.backends.hf.generate import EngineCache, prefill
from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.loading import Loaded
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.method import HeadScores, Method, Needs, Prompt
from kvbench.models.types import Tokenizer

TOKENS, COPIES = 2500, 4
FEWEST = 16  # tokens of a copy, below which a score would be chance
BLOCK = 512  # queries whose probabilities are held at once


def calibrate(loaded: Loaded, seed: int = 0) -> tuple[HeadScores, dict[str, Any]]:
    """The scores of a model's KV heads, and how they were measured.

    Raises:
        ConfigError: the window or the vocabulary is too small.
    """
    tokens, bos = random_tokens(loaded.tokenizer, loaded.model.config.vocab_size, loaded.window, seed)
    prompt = [*bos, *(tokens * COPIES)]
    shape = shape_of(loaded.model, [len(prompt)], (), loaded.model.dtype, loaded.model.device)
    scorer = CopyScorer(len(prompt), len(tokens))
    engine = Engine(shape, scorer, Budget(None), new_tokens=1)
    with torch.inference_mode():
        prefill(loaded.model, [prompt], EngineCache(engine))
    dtype = str(shape.dtype).removeprefix("torch.")
    how = {"tokens": len(tokens), "copies": COPIES, "first": bos, "seed": seed, "dtype": dtype}
    return HeadScores(tuple(scorer.echo), tuple(scorer.induction)), how


def random_tokens(tokenizer: Tokenizer, vocabulary: int, window: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Different ordinary tokens in random order, and what a prompt begins with: the model's first token, if it has one.

    They are `TOKENS`, or as many as the vocabulary has, or of which `COPIES` copies and a new token fit the window.

    Raises:
        ConfigError: these are fewer than `FEWEST`.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(min(vocabulary, len(tokenizer))) if token not in special]
    room = TOKENS if window is None else (window - len(bos) - 1) // COPIES
    count = min(TOKENS, len(ordinary), room)
    if count < FEWEST:
        raise ConfigError(
            f"model: calibration takes {COPIES} copies of {FEWEST} different tokens or more; its window has room for "
            f"{room}, its vocabulary has {len(ordinary)}"
        )
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    return [ordinary[place] for place in order[:count].tolist()], bos


class CopyScorer(Method):
    """Scores the heads of each layer as the prompt is read; of a group, its best query head counts.

    Args:
        length: tokens of the prompt.
        tokens: of a copy; copies end with the prompt.
    """

    def __init__(self, length: int, tokens: int) -> None:
        self.needs = Needs(query_window=length)
        self.tokens = tokens
        self.echo: list[tuple[float, ...]] = []
        self.induction: list[tuple[float, ...]] = []

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Layers come in order."""
        first = prompt.lengths[0] % self.tokens
        scores = copy_scores(prompt.queries[0], prompt.keys[0], self.shape.scaling, self.tokens, first)
        for found, own in zip((self.echo, self.induction), scores, strict=True):
            best = own.unflatten(0, (self.shape.kv_heads, -1)).amax(dim=1)
            found.append(tuple(round(score, 6) for score in best.tolist()))


def copy_scores(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, tokens: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Echo and induction score of each query head, [Hq] each, between 0 and 1.

    Attention probability that a token after the first copy gives to all earlier copies of itself, or to the tokens that
    followed them; the mean over these tokens.

    Args:
        queries: [Hq, N, D].
        keys: [Hkv, N, D].
        scaling: factor on the logits.
        tokens: of a copy.
        first: position of the first one.
    """
    heads, length, _ = queries.shape
    group = heads // keys.shape[0]
    echo, induction = torch.zeros(2, heads, dtype=torch.float64, device=keys.device)
    for head in range(keys.shape[0]):
        own, key = queries[head * group : (head + 1) * group], keys[head].float()
        for start in range(first + tokens, length, BLOCK):
            position = torch.arange(start, min(start + BLOCK, length), device=keys.device)
            end = int(position[-1]) + 1
            logits = own[:, start:end].float() @ key[:end].T * scaling  # [G, BLOCK, end] is the largest tensor alive
            future = torch.arange(end, device=keys.device) > position[:, None]
            probabilities = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
            copies = position[:, None] - tokens * torch.arange(1, -(-length // tokens), device=keys.device)
            there = copies >= first
            for scores, wanted in ((echo, copies), (induction, copies + 1)):
                places = wanted.clamp(min=0).expand(group, -1, -1)
                received = probabilities.gather(2, places) * there
                scores[head * group : (head + 1) * group] += received.sum(dim=(1, 2), dtype=torch.float64)
    asked = length - first - tokens
    return echo / asked, induction / asked
