"""What generates: a model, a method and a budget under a protocol, and the task of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.backends.backend import Backend, backend_of
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for
from kvbench.backends.protocol import Protocol
from kvbench.backends.run_config import RunConfig
from kvbench.budget import Budget
from kvbench.engine.engine import Engine
from kvbench.memory.codecs import Codecs
from kvbench.method import Method
from kvbench.models.footprint import free_memory
from kvbench.models.heads import Calibration
from kvbench.tasks import Task

SHARE = 0.7  # of the memory that is free at the start; the rest is for what no estimate knows
PREFILLING = 2  # times a prompt is in memory while it is copied
INDEX = 0.25  # of a prompt's keys and values: what an index takes, until one was seen


@dataclass
class Setup:
    """Model x method x budget under a protocol: all that generates, whatever it is asked.

    `calibration` is the model's, where the method needs it.
    """

    config: RunConfig
    protocol: Protocol
    loaded: Loaded
    method: Method
    budget: Budget
    dense_layers: tuple[int, ...]
    calibration: Calibration | None

    def engine(
        self,
        rows: Sequence[Sequence[int]],
        new_tokens: int,
        samples: Sequence[str] = ("",),
        kind: type[Engine] = Engine,
    ) -> Engine:
        """A fresh engine for the prompts `rows`, with room for so many new tokens; seeds derive
        from `samples`.
        """
        return engine_for(
            self.loaded.model,
            [len(row) for row in rows],
            self.method,
            self.budget,
            self.dense_layers,
            self.loaded.tokenizer,
            kind,
            new_tokens=new_tokens,
            attention=self.config.attention,
            kv=self.config.kv,
            seed=self.config.seed,
            samples=samples,
            probe_every=self.config.probe.every,
            cuda_graphs=self.config.cuda_graphs,
            head_scores=None if self.calibration is None else self.calibration.scores,
        )

    # -- memory of generations that go on side by side ---------------------------------------------

    @property
    def room(self) -> float:
        """Bytes that generations may take, the device's where it has memory of its own."""
        free = free_memory(self.loaded.device)
        return SHARE * free.get("device", free.get("host", float("inf")))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in layers without a window, as the model gives
        them.
        """
        card = self.loaded.card
        codecs = Codecs.native(card.head_dim, self.loaded.dtype, card.latent_dim)
        return codecs.nbytes * card.kv_heads * (card.layers - len(card.windows))

    def row_bytes(
        self, lengths: Sequence[int], new_tokens: int, index_share: float = INDEX
    ) -> float:
        """Bytes that a generation takes beside its prompts at most, by its method's rule, before it
        begins; `index_share`: what its index takes of its prompts' keys and values.
        """
        tokens, kept = max(lengths), 0
        if self.method.needs.home != "device" or self.config.kv.coded:
            kept = tokens
        elif self.budget.size is not None:  # who evicts copies what it keeps
            kept = min(tokens, max(map(self.budget.tokens, lengths)))
        return len(lengths) * (new_tokens + kept + index_share * tokens) * self.token_bytes


@dataclass
class Arm(Setup):
    """A setup and its task: all that the samples of a run share.

    `decode` says whether tokens are decoded beside those of other arms and samples, "together", or
    "alone".
    """

    task: Task
    decode: Literal["alone", "together"] = "alone"

    @property
    def backend(self) -> Backend:
        """What runs its model."""
        return backend_of(self.config)

    def attends_whole(self, record: dict[str, Any]) -> bool:
        """Whether a method that has sizes of its own attended everything, as with a prompt shorter
        than they are.
        """
        if record["error"] or self.budget.size is not None or not self.backend.has_engine:
            return False
        tokens, method = record["prompt_tokens"], self.method
        limited = any(
            method.rule(layer, tokens, 1) is not None for layer in method.shape.sparse_layers
        )
        return limited and bool(record["audit"].get("attended_mean", 0.0) > tokens)
