"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens (Xiao et
al. 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
section 3).

The authors train a number between 0 and 1 for each KV head, and publish a table of them for six
models: what a head needs of the whole context. The heads with the largest numbers keep it.
"""

from __future__ import annotations

from kvbench.method import HeadScores, Needs
from methods.blocks.two_kinds import TwoKinds


class DuoAttention(TwoKinds):
    """The best heads keep everything, the others the first `sinks` tokens and the `recent` last
    ones, which move on.

    C is the mean over the KV heads of all sparse layers, and says how many of them keep everything:
    of a prompt of N tokens floor(heads * (C - s - r) / (N - s - r)). Sinks s and recent tokens r
    have the published sizes from C = 1024 on; below it C / 16 and C / 4. With budget=null they have
    them, too, and `share` says how many stream.

    Generated tokens stay on the heads that keep everything, outside C. Where they count, such a
    head has what the others leave of C, and once it is full its oldest tokens after the sinks go.
    The prompt is read with full attention; the published code has the streaming heads stream there,
    too.

    Parameters
    ----------
    heads
        "auto", the larger of the two scores of the model's own `kvbench calibrate` file; another
        such file; or a published table, a .tsv file.
    share
        of the KV heads, those that stream where no budget says so.
    sinks, recent
        tokens of a streaming head, at most.
    """

    evicts = "always"

    def __init__(
        self, heads: str = "auto", share: float = 0.5, sinks: int = 64, recent: int = 256
    ) -> None:
        self.share, self.sinks, self.recent = share, sinks, recent
        self.needs = Needs(head_scores=heads)

    def rank(self, scores: HeadScores) -> list[tuple[int, int]]:
        """All heads; of equal ones the first is the better."""
        best = {
            (layer, head): max(pair)
            for layer, rows in enumerate(zip(scores.echo, scores.induction, strict=True))
            for head, pair in enumerate(zip(*rows, strict=True))
        }
        return sorted(best, key=lambda head: -best[head])

    def first_tokens(self, length: int) -> int:
        """The sinks of a streaming head."""
        return (
            self.sinks
            if self.budget.size is None
            else min(self.sinks, self.budget.tokens(length) // 16)
        )

    def streamed(self, length: int) -> int:
        """Entries of a streaming head."""
        recent = (
            self.recent
            if self.budget.size is None
            else min(self.recent, self.budget.tokens(length) // 4)
        )
        return self.first_tokens(length) + recent

    def fitting(self, length: int) -> int:
        """Heads that keep everything of a prompt of `length` tokens."""
        if self.budget.size is None:
            return self.heads - round(self.share * self.heads)
        streamed = self.streamed(length)
        room = self.heads * (self.budget.tokens(length) - streamed)
        return min(self.heads, room // (length - streamed)) if length > streamed else self.heads

    def entries(self, length: int, generated: int) -> tuple[int, int]:
        """Entries of a head that keeps everything, and of a streaming one, after so many generated
        tokens.
        """
        streamed, whole = self.streamed(length), self.fitting(length)
        if self.budget.size is None or not self.budget.counts_generated or not whole:
            return length + generated, streamed
        return (
            self.heads * self.budget.tokens(length) - (self.heads - whole) * streamed
        ) // whole, streamed

    def mean_rule(self, length: int, generated: int) -> float:
        """C, the mean over heads; what is generated stays on top of it, on the heads that
        keep it.
        """
        whole, streamed = self.fitting(length), self.streamed(length)
        if self.budget.size is None:
            return (whole * (length + generated) + (self.heads - whole) * streamed) / self.heads
        free = 0 if self.budget.counts_generated else whole * generated
        return (self.heads * self.budget.tokens(length) + free) / self.heads
