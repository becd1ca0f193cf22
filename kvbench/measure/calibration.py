"""Which KV heads look back to where a token stood before (RazorAttention, Tang et al. 2024, section
3), and what each query head asks on average (TriAttention, 2026).

A model reads random tokens that are repeated a few times, so that nothing but the copies says what
comes next. An echo head attends to the earlier copies of the token that it reads, an induction head
to the tokens that followed them. Then it reads plain text, for the mean query of each query head
before RoPE.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ASSETS, ConfigError
from kvbench.engine.replay import Template
from kvbench.method import Method, Needs, Prompt, Shape, Table
from kvbench.models.types import Tokenizer

TOKENS, COPIES = 2500, 4
FEWEST = 16  # tokens of a copy, below which a score would be chance
BLOCK = 512  # queries whose probabilities are held at once
PROSE_TOKENS = 1024  # of the beginning of each text that kvbench ships
FILES, PIECES = 6, 2  # for a method's calibrator so many texts of each of so many of these


def measured(loaded: Loaded, calibrator: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a method's calibrator makes of plain text: numbers, rounded to four digits, and how they
    were measured.

    Raises
    ------
    ConfigError
        the method needs what this model cannot give, or the window is too small.
    """
    template, window = Template.of(loaded.tokenizer, "a calibration"), loaded.card.context_length
    begin = [*template.header] or ([] if template.bos is None else [template.bos])
    # a text may be read again after it, with a few words between
    size = min(PROSE_TOKENS, (window or 4 * PROSE_TOKENS) // 2 - len(begin) - 64)
    if size < FEWEST:
        raise ConfigError(
            f"model: calibration takes texts of {FEWEST} tokens or more, read twice; its window of"
            f" {window} has room for {max(size, 0)}"
        )
    files = sorted((ASSETS / "prose").glob("*.txt"))[:FILES]
    prose = [file.read_text(encoding="utf-8") for file in files]
    texts = [[*begin, *text] for whole in prose for text in mixed_texts(template, whole, size)]
    numbers, facts = calibrator.measure(texts, partial(_read, loaded, scorer=calibrator))
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return _rounded(numbers), facts | {"texts": len(texts), "tokens": size, "dtype": dtype}


def mixed_texts(template: Template, prose: str, size: int) -> list[list[int]]:
    """Texts of `size` tokens: three quarters prose, the rest words of it with random numbers, as
    contexts hold what follows from nothing before.
    """
    part, random, words = 3 * size // 4, Random(0), prose.split()
    tokens = template.encode(prose[: 8 * PIECES * size])
    texts = []
    for piece in range(PIECES):
        lines = [f"{random.choice(words)}: {random.randrange(10**7)}" for _ in range(size // 4)]
        numbers = template.encode("\n" + "\n".join(lines))[: size - part]
        texts.append(tokens[piece * part : (piece + 1) * part] + numbers)
    return texts


def _rounded(numbers: Any) -> Any:
    """Nested numbers to four digits."""
    if isinstance(numbers, dict):
        return {name: _rounded(part) for name, part in numbers.items()}
    if isinstance(numbers, list):
        return [_rounded(part) for part in numbers]
    return float(f"{numbers:.4g}")


def calibrate(loaded: Loaded, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The scores of a model's heads, and how they were measured.

    Raises
    ------
    ConfigError
        the window or the vocabulary is too small.
    """
    card = loaded.card
    tokens, bos = random_tokens(loaded.tokenizer, card.vocabulary, card.context_length, seed)
    copies = [*bos, *(tokens * COPIES)]
    scorer = CopyScorer(len(copies), len(tokens))
    _read(loaded, copies, scorer)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    how = {"tokens": len(tokens), "copies": COPIES, "first": bos, "seed": seed, "dtype": dtype}
    scores = {"echo": tuple(scorer.echo), "induction": tuple(scorer.induction)}
    try:
        means = mean_queries(loaded)
    except ConfigError:  # its keys cannot be turned
        return scores | {"query_means": (), "query_sizes": ()}, how
    query_means, query_sizes = means.averages()
    numbers = scores | {"query_means": query_means, "query_sizes": query_sizes}
    return numbers, how | {"prose": means.count}


def mean_queries(loaded: Loaded) -> QueryScorer:
    """What the query heads of a model ask in each of the texts' first tokens.

    Raises
    ------
    ConfigError
        its keys cannot be turned to other positions.
    """
    scorer = QueryScorer()
    for file in sorted((ASSETS / "prose").glob("*.txt")):
        tokens = loaded.tokenizer(file.read_text(encoding="utf-8")[: 8 * PROSE_TOKENS])["input_ids"]
        window = loaded.card.context_length or PROSE_TOKENS + 1
        _read(loaded, tokens[: min(PROSE_TOKENS, window - 1)], scorer)
    return scorer


def _read(loaded: Loaded, prompt: list[int], scorer: Method) -> None:
    """Let a method see a prompt in every layer."""
    engine = engine_for(
        loaded.model, [len(prompt)], scorer, Budget(1.0), (), loaded.tokenizer, new_tokens=1
    )
    with torch.inference_mode():
        ModelRunner(loaded.model).prefill(engine, [prompt])


def random_tokens(
    tokenizer: Tokenizer, vocabulary: int, window: int | None, seed: int
) -> tuple[list[int], list[int]]:
    """Different ordinary tokens in random order, and what a prompt begins with: the model's first
    token, if it has one.

    They are `TOKENS`, or as many as the vocabulary has, or of which `COPIES` copies and a new token
    fit the window.

    Raises
    ------
    ConfigError
        these are fewer than `FEWEST`.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(min(vocabulary, len(tokenizer))) if token not in special]
    room = TOKENS if window is None else (window - len(bos) - 1) // COPIES
    count = min(TOKENS, len(ordinary), room)
    if count < FEWEST:
        raise ConfigError(
            f"model: calibration takes {COPIES} copies of {FEWEST} different tokens or more; its"
            f" window has room for {room}, its vocabulary has {len(ordinary)}"
        )
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    return [ordinary[place] for place in order[:count].tolist()], bos


class CopyScorer(Method):
    """Scores the heads of each layer as the prompt is read; of a group, its best query head counts.

    Parameters
    ----------
    length
        tokens of the prompt.
    tokens
        of a copy; copies end with the prompt.
    """

    def __init__(self, length: int, tokens: int) -> None:
        self.needs = Needs(query_window=length)
        self.tokens = tokens
        self.echo: list[tuple[float, ...]] = []
        self.induction: list[tuple[float, ...]] = []

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Layers come in order."""
        first = prompt.lengths[0] % self.tokens
        scores = copy_scores(prompt.queries[0], prompt.keys[0], self.shape, self.tokens, first)
        for layers, head_scores in zip((self.echo, self.induction), scores, strict=True):
            best = head_scores.unflatten(0, (self.shape.kv_heads, -1)).amax(dim=1)
            layers.append(tuple(round(score, 6) for score in best.tolist()))


class QueryScorer(Method):
    """The mean query of each head before RoPE, and the mean length of its pairs, over all prompts
    that were read.

    Attributes
    ----------
    count
        tokens.
    """

    needs = Needs(query_window=PROSE_TOKENS, rotation=True)

    def __init__(self) -> None:
        # of each layer, [Hq, D + D / 2]: of queries, and of lengths
        self.sums: dict[int, torch.Tensor] = {}
        self.count = 0

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Take in the queries of a layer; its first layer counts them."""
        assert self.context.rotation is not None, "the harness hands over what `needs` asks for"
        positions = torch.arange(prompt.lengths[0], device=prompt.keys.device)[None, None]
        queries = self.context.rotation.back(prompt.queries.float(), positions)[0].double()
        lengths = torch.hypot(*queries.chunk(2, dim=-1))
        self.sums[layer] = self.sums.get(layer, 0) + torch.cat([queries, lengths], dim=-1).sum(
            dim=1
        )
        self.count += prompt.lengths[0] * (layer == self.shape.sparse_layers[0])

    def averages(self) -> tuple[tuple[Table, ...], tuple[Table, ...]]:
        """The means [layers][Hq][D] and the lengths [layers][Hq][D / 2], to four digits."""
        rows = [(self.sums[layer] / self.count).tolist() for layer in sorted(self.sums)]
        digits = [[[float(f"{x:.4g}") for x in head] for head in layer] for layer in rows]
        width = self.shape.head_dim
        means, sizes = (
            tuple(tuple(tuple(head[part]) for head in layer) for layer in digits)
            for part in (slice(width), slice(width, None))
        )
        return means, sizes


def copy_scores(
    queries: torch.Tensor, keys: torch.Tensor, shape: Shape, tokens: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Echo and induction score of each query head, [Hq] each, between 0 and 1.

    Attention probability that a token after the first copy gives to all earlier copies of itself,
    or to the tokens that followed them; the mean over these tokens.

    Parameters
    ----------
    queries
        [Hq, N, D].
    keys
        [Hkv, N, D].
    shape
        which says how logits are made.
    tokens
        of a copy.
    first
        position of the first one.
    """
    heads, length = queries.shape[:2]
    group = heads // keys.shape[0]
    echo, induction = torch.zeros(2, heads, dtype=torch.float64, device=keys.device)
    for head in range(keys.shape[0]):
        query, key = queries[head * group : (head + 1) * group], keys[head].float()
        for start in range(first + tokens, length, BLOCK):
            position = torch.arange(start, min(start + BLOCK, length), device=keys.device)
            end = int(position[-1]) + 1
            # [G, BLOCK, end] is the largest tensor alive
            logits = shape.logits(query[:, start:end].float() @ key[:end].T)
            future = torch.arange(end, device=keys.device) > position[:, None]
            probabilities = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
            copies = position[:, None] - tokens * torch.arange(
                1, -(-length // tokens), device=keys.device
            )
            there = copies >= first
            for scores, positions in ((echo, copies), (induction, copies + 1)):
                places = positions.clamp(min=0).expand(group, -1, -1)
                received = probabilities.gather(2, places) * there
                scores[head * group : (head + 1) * group] += received.sum(
                    dim=(1, 2), dtype=torch.float64
                )
    count = length - first - tokens
    return echo / count, induction / count
