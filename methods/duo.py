"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens (Xiao et
al. 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
section 3).

The authors train a number between 0 and 1 for each KV head, and publish a table of them for six
models: what a head needs of the whole context. The heads with the largest numbers keep it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.method import HeadScores, Needs
from methods.blocks.two_kinds import TwoKinds, by_head


@dataclass(eq=False)
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

    heads: str = "auto"
    share: float = 0.5
    sinks: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        self.needs = Needs(head_scores=self.heads, host_step=False)

    def rank(self, scores: HeadScores) -> list[tuple[int, int]]:
        """All heads; of equal ones the first is the better."""
        echo, induction = by_head(scores.echo), by_head(scores.induction)
        return sorted(echo, key=lambda head: -max(echo[head], induction[head]))

    def first_tokens(self, length: int) -> int:
        """The sinks of a streaming head."""
        return self._at_most(self.sinks, 16, length)

    def streamed(self, length: int) -> int:
        """Entries of a streaming head."""
        return self.first_tokens(length) + self._at_most(self.recent, 4, length)

    def _at_most(self, tokens: int, part: int, length: int) -> int:
        """So many tokens, or with a budget C / `part` where that is less."""
        if self.budget.size is None:
            return tokens
        return min(tokens, self.budget.tokens(length) // part)

    def fitting(self, length: int) -> int:
        """Heads that keep everything of a prompt of `length` tokens."""
        if self.budget.size is None:
            return self.head_count - round(self.share * self.head_count)
        streamed = self.streamed(length)
        if length <= streamed:
            return self.head_count
        room = self.head_count * (self.budget.tokens(length) - streamed)
        return min(self.head_count, room // (length - streamed))

    def entries(self, length: int, generated: int) -> tuple[int, int]:
        """Entries of a head that keeps everything, and of a streaming one, after so many generated
        tokens.
        """
        streamed, whole = self.streamed(length), self.fitting(length)
        if self.budget.size is None or not self.budget.counts_generated or not whole:
            return length + generated, streamed
        rest = self.head_count * self.budget.tokens(length) - (self.head_count - whole) * streamed
        return rest // whole, streamed

    def mean_rule(self, length: int, generated: int) -> float:
        """C, the mean over heads; what is generated stays on top of it, on the heads that
        keep it.
        """
        whole = self.fitting(length)
        if self.budget.size is None:
            streaming = (self.head_count - whole) * self.streamed(length)
            return (whole * (length + generated) + streaming) / self.head_count
        free = 0 if self.budget.counts_generated else whole * generated
        return (self.head_count * self.budget.tokens(length) + free) / self.head_count
