"""The Method interface: what a KV-cache method is told, and the three questions it answers.

The harness owns keys and values, runs the attention kernel, counts what is attended and moved, and applies the rules
that are the same for all (dense layers, budget, when sparsity starts). A method owns only its index and says what to
keep, what to look at and what to remember. This module knows no method and no model.

Symbols: B sequences, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head dim, N longest prompt, M selected entries,
W query window. Keys and queries are post-RoPE; KV heads are never repeated. A token id is the token's logical position
in its own sequence, 0 .. length-1, whatever padding the caller had.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from kvbench.meters import Spans
    from kvbench.store import View

Accounting = Literal["paper", "unified"]


@dataclass(frozen=True)
class Needs:
    """What a method asks of the harness; read once, before the first token.

    Attributes:
        query_window: last W prompt queries to hand over in `Prompt.queries`.
        attention_sums: hand over, per key, the attention received from all prompt queries (H2O).
        probabilities: call `observe` with the attention probabilities of every decode step.
        token_text: hand over the text of every vocabulary entry in `Context.pieces`.
        home: where prompt and generated tokens live: "device", or "host" with selected rows moved up.
        on_drop: what `View.keep` does with the other tokens: forget them, or move them to the host.
        positions: "original" RoPE positions, or "cache": re-rotated to the place inside the selection (StreamingLLM).
    """

    query_window: int = 0
    attention_sums: bool = False
    probabilities: bool = False
    token_text: bool = False
    home: Literal["device", "host"] = "device"
    on_drop: Literal["discard", "offload"] = "discard"
    positions: Literal["original", "cache"] = "original"


@dataclass(frozen=True)
class Shape:
    """The sizes of one generation.

    Attributes:
        layers, query_heads, kv_heads, head_dim: counts.
        lengths: prompt tokens of each row.
        dtype, device: of keys, values and queries.
        scaling: attention logits are `scaling * (query . key)`.
        sparse_layers: true indices of the layers a method is asked about; the others stay dense and are never shown.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    scaling: float
    sparse_layers: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Rows, B."""
        return len(self.lengths)

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class Budget:
    """The budget C of a run and the way of counting.

    Attributes:
        size: tokens (int >= 1), a fraction of the prompt (float in (0, 1]), or None: the preset's own sizes.
        accounting: "paper", the published rule; "unified", everything attended counts inside C.
        generated: "free", generated tokens stay outside C where the published rule leaves them; "counted", never.
        minimum: smallest C, in tokens, with which the method keeps its rule.
    """

    size: int | float | None
    accounting: Accounting = "paper"
    generated: Literal["free", "counted"] = "free"
    minimum: int = 1

    @property
    def unified(self) -> bool:
        return self.accounting == "unified"

    @property
    def counts_generated(self) -> bool:
        """Generated tokens must stay inside C."""
        return self.unified or self.generated == "counted"

    def tokens(self, length: int) -> int:
        """C in tokens for a prompt of `length` tokens; a fraction rounds up.

        Raises:
            ValueError: the size is None, so only the method knows its sizes.
        """
        if self.size is None:
            raise ValueError("budget=null leaves the sizes to the method, and this method has none of its own")
        if isinstance(self.size, float):
            # 0.1 * 30 is 3.0000000000000004 in binary: rounding first keeps "a tenth of 30" at 3.
            return max(1, math.ceil(round(self.size * length, 9)))
        return self.size


@dataclass(frozen=True)
class Context:
    """What one generation may use besides its tensors.

    Attributes:
        seed, sample: everything random derives from these two and the layer, never from the order of calls.
        pool: the one worker pool for background index work.
        spans: timing spans, `with context.spans("gather"): ...` inside a method refines the breakdown; of the thread
            that calls the method, not of the pool's.
        pieces: text of every vocabulary entry, when `Needs.token_text` asked for it.
        new_tokens: decode steps to come at most; None: unknown, as under `model.generate`.
    """

    seed: int
    sample: str
    pool: Pool
    spans: Spans
    pieces: Sequence[str] | None = None
    new_tokens: int | None = None

    def layer_seed(self, layer: int) -> int:
        """A 63-bit seed for `layer`, the same in any order, process and thread count."""
        digest = hashlib.sha256(f"{self.seed}/{self.sample}/{layer}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def generator(self, layer: int, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator seeded by `layer_seed`."""
        return torch.Generator(device).manual_seed(self.layer_seed(layer))


@dataclass(frozen=True)
class Prompt:
    """One layer's prompt after its last prefill chunk.

    Rows are left-aligned; entries of a row at and beyond its length are undefined and must not be used.

    Attributes:
        lengths: tokens of each row, as Python ints (no device sync).
        token_ids: [B, N].
        keys, values: [B, Hkv, N, D], in place in the store.
        queries: [B, Hq, W, D], the last W queries of each row, right-aligned (W = `Needs.query_window`, at most N).
        attention_sums: [B, Hq, N] fp32, or None.
        on_host: resolves to (keys, values) in host memory when home is "host"; background work waits on it. It is the
            store's own memory, so join what reads it before `View.arrange` moves it.
    """

    lengths: tuple[int, ...]
    token_ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    attention_sums: torch.Tensor | None = None
    on_host: Future[tuple[torch.Tensor, torch.Tensor]] | None = None

    def valid(self) -> torch.Tensor | None:
        """[B, N] bool, True on real tokens; None when no row is shorter than N."""
        longest = self.keys.shape[2]
        if all(length == longest for length in self.lengths):
            return None
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        return torch.arange(longest, device=self.keys.device) < lengths[:, None]


@dataclass(frozen=True, eq=False)
class Extra:
    """Synthetic entries attended beside the selected ones (RazorAttention's compensation token).

    Attributes:
        key, value: [B, Hkv, E, D].
        log_weight: [B, Hq, E], added to the logits.
    """

    key: torch.Tensor
    value: torch.Tensor
    log_weight: torch.Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """What one layer attends at one decode step, complete: the harness adds nothing, not even the current token.

    Attributes:
        index: [B, Hs, M] int64 token ids, Hs in {1, Hkv, Hq}; unique in a row, best first, trailing -1 = none. On the
            device, or on the CPU where the method's index is: then nothing has to wait for the device.
        log_weight: [B, Hq, M], added to the logits (MagicPIG's sampling correction), or None.
        keys: [B, Hkv, M, D], used in place of the stored keys (ShadowKV), or None; needs Hs in {1, Hkv}.
        extra: synthetic entries in the same softmax, or None.
    """

    index: torch.Tensor
    log_weight: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    extra: Extra | None = None


class Method:
    """A KV-cache method. Subclass, declare `needs`, override what the method does; every hook has a default.

    Order: `begin`; per sparse layer `prefill` once after its last chunk; `end_prefill`; then per decode step `step`,
    per sparse layer `append -> select -> (attention) -> observe`, and `end_step`.
    """

    needs: Needs = Needs()
    shape: Shape
    budget: Budget
    view: View
    context: Context

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """A new generation starts; forget the last one. `view` reads the store and evicts from it.

        Raises:
            ValueError: what only the prompts or the model's shape tell is wrong.
        """
        self.shape, self.budget, self.view, self.context = shape, budget, view, context
        self.check_budget()

    def check_budget(self) -> None:
        """Refuse a fraction that leaves a prompt fewer tokens than the method can keep to."""
        for length in self.shape.lengths if isinstance(self.budget.size, float) else ():
            tokens = self.budget.tokens(length)
            if tokens < min(self.budget.minimum, length):
                raise ValueError(
                    f"budget={self.budget.size}: {tokens} of a prompt's {length} tokens, below the minimum of "
                    f"{self.budget.minimum} tokens"
                )

    @property
    def capacities(self) -> list[int]:
        """The budget C of each row in tokens."""
        return [self.budget.tokens(length) for length in self.shape.lengths]

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Build the index of `layer`; may submit background work to `context.pool`."""

    def end_prefill(self) -> None:
        """All layers are prefilled; may call `view.keep` on any sparse layer."""

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """A decode step begins, before layer 0; [B] each, on the CPU: token ids, positions, rows still running."""

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The current token's key and value, [B, Hkv, 1, D], are now in the store of `layer`."""

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """What `query` [B, Hq, 1, D] shall attend; None = everything resident, attended in place."""
        return None

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        """Attention probabilities [B, Hq, M (+ E)] of this step, if `needs.probabilities`; M = resident for None."""

    def end_step(self) -> None:
        """After the last layer: insert, re-encode, compress, evict."""

    def rule(self, length: int, generated: int) -> int | None:
        """Most entries one KV head may attend in a sparse layer, by this method's line of the budget table.

        The audit measures what was attended and compares; it never believes this number. None = no limit.

        Args:
            length: prompt tokens of the row.
            generated: decode steps so far, the current one included.
        """
        return None if self.budget.size is None else self.budget.tokens(length)

    def report(self) -> dict[str, float]:
        """Numbers of the method's own, shown beside the audit's; peaks end in _max. The audit does not read them."""
        return {}
