"""RazorAttention: a few heads keep everything, the others a window (Tang et al. 2024, "RazorAttention: Efficient KV
Cache Compression Through Retrieval Heads", section 3).

Retrieval heads are those that look back to earlier copies of a token, or to what followed them, found once for a model
by `kvbench calibrate`. All other heads keep sinks and recent tokens; one compensation token, the mean of the
keys and values that a head has dropped, stands for all of these with their number as weight.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Extra, HeadScores, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.recent import sinks_and_recent

DROP_EVERY = 32  # decode steps between two evictions: between them memory holds up to this many tokens more


class RazorAttention(Method):
    """Retrieval heads keep everything, the others the first `sinks` tokens, recent ones and one for the rest.

    C is the mean over the KV heads of all sparse layers. Of the retrieval heads those with the best scores, as many as
    leave the other heads half of C or more; these share out what is left. With budget=null all retrieval heads keep
    everything, and another head max(window, N / ratio) recent tokens of a prompt of N.

    As published the prompt is compressed and all that is generated stays. Where generated tokens count, the retrieval
    heads' are taken from the other heads', down to half of C; from then on they, too, keep recent tokens only.

    Args:
        heads: "auto", the file of the model, or another file of `kvbench calibrate`.
        echo, induction: share of the model's KV heads that are retrieval heads by either score.
        sinks: first tokens that always stay.
        window, ratio: see above (S_0 and C in the paper).
    """

    evicts = "counted"

    def __init__(
        self,
        heads: str = "auto",
        echo: float = 0.01,
        induction: float = 0.14,
        sinks: int = 4,
        window: int = 4000,
        ratio: int = 5,
    ) -> None:
        self.echo, self.induction = echo, induction
        self.sinks, self.window, self.ratio = sinks, window, ratio
        self.needs = Needs(head_scores=heads)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Find the retrieval heads, and how many of them each row has room for.

        Raises:
            ValueError: the head scores are of a model of another shape.
        """
        super().begin(shape, budget, view, context)
        scores = context.head_scores
        assert scores is not None, "the harness hands over what `needs` asks for"
        refuse_other_shape(scores, shape)
        found = retrieval_heads(scores, self.echo, self.induction)
        self.ranked = [(layer, head) for layer, head in found if layer in shape.sparse_layers]
        self.heads = len(shape.sparse_layers) * shape.kv_heads
        rank = {head: number for number, head in enumerate(self.ranked)}
        counts = torch.tensor([self.fitting(length) for length in shape.lengths])[:, None]
        self.retrieves: dict[int, torch.Tensor] = {}  # of each layer, [B, Hkv]
        self.kinds: dict[int, list[set[bool]]] = {}  # the same of each row, whichever head it is
        for layer in shape.sparse_layers:
            ranks = [rank.get((layer, head), self.heads) for head in range(shape.kv_heads)]
            own = torch.tensor(ranks) < counts
            self.retrieves[layer] = own.to(shape.device_of(layer))
            self.kinds[layer] = [set(row) for row in own.tolist()]
        # of each layer, the sums [2, B, Hkv, D] of the keys and of the values that its heads have dropped
        self.dropped: dict[int, torch.Tensor] = {}
        self.generated = 0
        self.starts = [(self.sinks, self.sinks)] * shape.batch
        self._move()

    # -- the budget ------------------------------------------------------------------------------------------------

    def total(self, length: int) -> int:
        """Entries of all heads together, of a prompt of `length` tokens."""
        if self.budget.size is None:
            others = self.heads - len(self.ranked)
            window = max(self.window, length // self.ratio)
            return len(self.ranked) * length + others * (self.sinks + window + 1)
        return self.heads * self.budget.tokens(length)

    def least(self, length: int) -> int:
        """Entries that a head which does not retrieve keeps at least: half of C."""
        share = 0 if self.budget.size is None else self.total(length) // self.heads // 2
        return max(self.sinks + 2, share)

    def fitting(self, length: int) -> int:
        """Retrieval heads that a prompt of `length` tokens leaves room for."""
        room, least = self.total(length) - self.heads * self.least(length), self.least(length)
        return len(self.ranked) if length <= least else min(len(self.ranked), max(0, room) // (length - least))

    def held(self, length: int, generated: int) -> tuple[int, int]:
        """Entries of a retrieval head, and of another, after so many generated tokens."""
        retrieving = self.fitting(length)
        others, total = self.heads - retrieving, self.total(length)
        whole = length + (generated if self.budget.counts_generated else 0)
        other = max((total - retrieving * whole) // others, self.least(length)) if others else 0
        retrieval = (total - others * other) // retrieving if retrieving else other
        free = 0 if self.budget.counts_generated else generated
        return retrieval + free, (other or retrieval) + free

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What a head of the layer holds, a retrieval head where it has one."""
        retrieval, other = self.held(length, generated)
        return retrieval if any(layer == own for own, _ in self.ranked[: self.fitting(length)]) else other

    def mean_rule(self, length: int, generated: int) -> float:
        """C, the mean over heads; generated tokens on top of it, unless they count."""
        return self.total(length) / self.heads + (0 if self.budget.counts_generated else generated)

    def report(self) -> dict[str, float]:
        """Retrieval heads that had room, a row."""
        counts = [self.fitting(length) for length in self.shape.lengths]
        return {"retrieval_heads": sum(counts) / len(counts)}

    # -- one generation --------------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop what lies between the sinks and the recent tokens, and remember its mean."""
        sums = torch.zeros(2, *prompt.keys.shape[:2], prompt.keys.shape[3], device=prompt.keys.device)
        for row, starts in enumerate(self.starts):
            for retrieves, start in enumerate(starts):
                own = self.retrieves[layer][row] == retrieves
                for which, block in enumerate((prompt.keys, prompt.values)):
                    sums[which, row] += block[row, :, self.sinks : start].float().sum(dim=1) * own[:, None]
        self.dropped[layer] = sums
        if self._drops:
            kept = self._attended(layer, self._first(layer, self.starts))
            self.view.keep(layer, kept, DROP_EVERY if self.budget.counts_generated else None)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """The recent tokens move on."""
        self.generated += 1
        self._move()

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, newest first, the sinks, and the compensation token of those between."""
        first = self._first(layer, self.starts)
        self._take_in(layer, first)
        extra = self._compensation(layer, first) if self._drops else None
        return Selection(self._attended(layer, first), extra=extra)

    def end_step(self) -> None:
        """Now and then drop what has left the recent tokens; between two drops it is not attended."""
        if self.budget.counts_generated and self.generated % DROP_EVERY == 0 and self._drops:
            for layer in self.shape.sparse_layers:
                self.view.keep(layer, self._attended(layer, self._first(layer, self.starts)), DROP_EVERY)

    @property
    def _drops(self) -> bool:
        return any(start > self.sinks for starts in self.starts for start in starts)

    def _move(self) -> None:
        """Note of each row the first recent token of a head that does not retrieve, and of one that does."""
        self.former_starts, self.starts = self.starts, []
        for length in self.shape.lengths:
            retrieval, other = self.held(length, self.generated)
            self.starts.append((self._start(length, other), self._start(length, retrieval)))

    def _start(self, length: int, held: int) -> int:
        seen = length + self.generated
        return seen - (held - self.sinks - 1) if seen > held else self.sinks

    def _first(self, layer: int, starts: list[tuple[int, int]]) -> torch.Tensor:
        """The first recent token of each head, [B, Hkv]."""
        other, retrieval = torch.tensor(starts, device=self.shape.device_of(layer)).T[..., None]
        return torch.where(self.retrieves[layer], retrieval, other)

    def _take_in(self, layer: int, now: torch.Tensor) -> None:
        """Add to the sums the tokens that have just left the recent ones, which begin `now` [B, Hkv]."""
        pairs = zip(self.starts, self.former_starts, strict=True)
        most = max(now - before for pair in pairs for now, before in zip(*pair, strict=True))
        if most <= 0:
            return
        before = self._first(layer, self.former_starts)
        ids = before[..., None] + torch.arange(most, device=now.device)
        left = ids < now[..., None]
        ids = torch.where(left, ids, -1)
        for which, read in enumerate((self.view.keys, self.view.values)):
            self.dropped[layer][which] += (read(layer, ids).float() * left[..., None]).sum(dim=2)

    def _attended(self, layer: int, first: torch.Tensor) -> torch.Tensor:
        """Token ids [B, Hkv, M] where recent ones begin with `first` [B, Hkv]: the newest first, the sinks last."""
        seen = self.view.seen(layer)
        counts = seen[:, None] - first + self.sinks
        tokens = zip(self.view.lengths(layer), self.starts, self.kinds[layer], strict=True)
        most = max(length - starts[kind] + self.sinks for length, starts, kinds in tokens for kind in kinds)
        return sinks_and_recent(seen, counts, self.sinks, most)

    def _compensation(self, layer: int, first: torch.Tensor) -> Extra:
        """The mean of what each head has dropped, with its number as weight; none (log 0) where that is nothing."""
        count = (first - self.sinks).clamp(min=0).float()
        key, value = (self.dropped[layer] / count.clamp(min=1)[..., None]).to(self.shape.dtype)[..., None, :]
        return Extra(key, value, count.log().repeat_interleave(self.shape.group, dim=1)[..., None])


def retrieval_heads(scores: HeadScores, echo: float, induction: float) -> list[tuple[int, int]]:
    """(layer, KV head) of a model's retrieval heads, those with the best score first.

    They are the round(echo * n) heads of all n with the largest echo scores, and so for induction.
    """
    heads = [(layer, head) for layer, row in enumerate(scores.echo) for head in range(len(row))]

    def best(of: tuple[tuple[float, ...], ...], share: float) -> list[tuple[int, int]]:
        ranked = sorted(heads, key=lambda head: -of[head[0]][head[1]])
        return ranked[: round(share * len(heads))]

    found = {*best(scores.echo, echo), *best(scores.induction, induction)}
    return sorted(found, key=lambda head: (-max(of[head[0]][head[1]] for of in (scores.echo, scores.induction)), head))


def refuse_other_shape(scores: HeadScores, shape: Shape) -> None:
    """Refuse scores of a model that has other layers or KV heads.

    Raises:
        ValueError: says what they are of.
    """
    layers, heads = len(scores.echo), len(scores.echo[0])
    if (layers, heads) != (shape.layers, shape.kv_heads):
        raise ValueError(
            f"method.heads: scores of {layers} layers of {heads} KV heads, and the model has {shape.layers} of "
            f"{shape.kv_heads}; kvbench calibrate makes its own"
        )
