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
from kvbench.method import Method
from kvbench.models.heads import Calibration
from kvbench.tasks import Task


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
