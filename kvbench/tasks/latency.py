"""Latency: prompts of an exact length whose generation is timed; nobody reads the answers.

A prompt is random token ids, so that any length and batch can be had for any model, trained or not.
There is nothing to score: a sample that ran all of its steps has completed. What it cost stands in
its record (`kvbench.measure.latency`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvbench.config import show
from kvbench.tasks import Keys, Sample, Task, Timed

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer


class Latency(Task):
    """A cell for each length and batch size, `repeats` samples in each.

    Parameters
    ----------
    lengths
        prompt tokens of every row.
    batch
        rows that are generated together.
    steps
        decode steps that are timed.
    warmup
        decode steps before these, which count for the second token alone.
    repeats
        samples of each cell, each with tokens of its own.
    keys
        the model's keys and queries, or "synthetic_attention": made ones with the structure of
        trained models', which an index can find and random weights do not have.
    prefill
        false: nothing is read by the model; every layer's store is filled with synthetic keys and
        values.

    Raises
    ------
    ValueError
        no such batch size, or a store filled with keys that the model never computed.
    """

    name, metric = "latency", "completed"

    def __init__(
        self,
        lengths: Sequence[int],
        batch: Sequence[int],
        steps: int = 32,
        warmup: int = 4,
        repeats: int = 1,
        keys: Keys = "model",
        prefill: bool = True,
    ) -> None:
        if (
            not batch
            or any(type(rows) is not int or rows < 1 for rows in batch)
            or len(set(batch)) < len(batch)
        ):
            raise ValueError(
                f"task.batch={show(batch)}: expected different whole numbers, 1 or more, such as"
                " [1,4]"
            )
        if not prefill and keys == "model":
            raise ValueError(
                "task.prefill=false: the model computes no keys then; add"
                " task.keys=synthetic_attention"
            )
        self.lengths = list(lengths)
        self.batch = list(batch)
        self.repeats = repeats
        self.steps = steps
        self.warmup = warmup
        self.keys = keys
        self.prefill = prefill

    def __len__(self) -> int:
        return len(self.lengths) * len(self.batch) * self.repeats

    def samples(self, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
        """Every cell once, then every cell again.

        Rows of a batch differ, and are those of smaller batches too.
        """
        import numpy as np

        special = set(tokenizer.all_special_ids)
        words = np.array([token for token in range(len(tokenizer)) if token not in special])
        for repeat, length, batch in product(range(self.repeats), self.lengths, self.batch):
            rows = [
                # its own, whatever the batch
                np.random.default_rng((seed, repeat, row)).choice(words, length).tolist()
                for row in range(batch)
            ]
            yield Sample(
                id=f"latency-{length}-{batch}-{repeat}",
                prompt="",
                answers=(),
                max_new_tokens=1 + self.warmup + self.steps,
                group=f"{length} x {batch}",
                meta={
                    "length": length,
                    "batch": batch,
                    "repeat": repeat,
                    "keys": self.keys,
                    "prefill": self.prefill,
                },
                timed=Timed(rows, self.warmup, self.keys, self.prefill),
            )

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """1: what does not run to its end is a failed sample."""
        return {"completed": 1.0}
