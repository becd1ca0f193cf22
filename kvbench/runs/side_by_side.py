"""A sweep whose arms decode together: samples go through all arms side by side, as many as there is room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.backends.hf.generate import Decoding
from kvbench.backends.hf.prefilled import Prefilled
from kvbench.backends.hf.together import concluded
from kvbench.config import ConfigError
from kvbench.measure import room
from kvbench.measure.arm import Arm, Begun, TokenizedSample, begin_reference, failure, is_failed_sample, prompt_of
from kvbench.measure.lane import Going, Lane
from kvbench.runs.arms import Arms
from kvbench.tasks import Sample

PREFILLING = 2  # times the keys and values of a prompt are in memory while it is divided


@dataclass
class _Batch:
    """A batch of samples on its way through the arms.

    Attributes:
        waiting: the arms that lack it, by their number.
        counts: its end is progress; not of a part that is done again.
        to_come: what must end before the batch is over, the bringing itself included.
    """

    samples: list[Sample]
    waiting: dict[int, Arm]
    counts: bool = True
    to_come: int = 1


class SideBySide:
    """Brings batches of samples to the arms' decode pass, and records to their folders."""

    def __init__(self, arms: Arms) -> None:
        self._arms, self._lane = arms, Lane(arms.first.loaded, arms.report.rows)
        self._again = deque[_Batch]()  # samples of a batch that has failed, each by itself
        self._index: dict[int, float] = {}  # what an arm's index took of a prompt's keys and values

    def run(self, samples: Iterator[list[Sample]]) -> None:
        """Until no samples are left, or no arm.

        Raises:
            ConfigError: a sample cannot run as the protocol asks; those that were brought before it have ended.
        """
        while not self._arms.all_ended:
            try:
                if self._again:
                    self._bring(self._again.popleft())
                elif (batch := next(samples, None)) is not None:
                    self._bring(_Batch(batch, self._arms.lacking(batch)))
                elif self._lane.going:
                    self._lane.step()
                else:
                    break
            except ConfigError:
                self._lane.finish()
                raise

    def _bring(self, batch: _Batch) -> None:
        first = self._arms.first
        prompts = [prompt_of(first, sample) for sample in batch.samples]
        if ready := [prompt for prompt in prompts if not prompt.record["error"]]:
            self._lane.clear(PREFILLING * room.prompt_bytes(first, _lengths(ready)), len(ready))
        for part, prefilled, failed in self._arms.prefilled(batch.samples, prompts, batch.waiting):
            if failed and self._lane.going:  # for want of memory, it may be, that others have until they leave
                self._lane.finish()
                self._again.append(_Batch([prompt.sample for prompt in part], batch.waiting, counts=False))
                continue
            ready = [prompt for prompt in part if prefilled is not None and not prompt.record["error"]]
            lost = [prompt for prompt in part if prompt not in ready]
            if prefilled is not None:
                prefilled.divide()
                self._refer(ready, prefilled)
            for index, arm in batch.waiting.items():
                self._arms.add(index, batch.samples, partial(_failures, arm, lost, failed))
                if prefilled is not None and index not in self._arms.ended:
                    self._join(batch, index, arm, ready, prefilled)
        self._through(batch)

    def _refer(self, prompts: Sequence[TokenizedSample], prefilled: Prefilled) -> None:
        """Begin what samples with given tokens are compared with: it goes on ahead of them."""
        if prompts[0].sample.given and prefilled.reference is None:
            prompt = prefilled, room.prompt_bytes(self._arms.first, prefilled.lengths)
            begin = partial(begin_reference, self._arms.first, prompts[0], prefilled)
            self._lane.join(begin, 1, Going(None, 0, prompt, lambda decoding, error: None))

    def _join(
        self, batch: _Batch, index: int, arm: Arm, prompts: Sequence[TokenizedSample], prefilled: Prefilled
    ) -> None:
        lengths, first = _lengths(prompts), prompts[0]
        size = room.row_bytes(arm, lengths, first.sample.max_new_tokens + len(first.question), self._index.get(index))
        begun = Begun(arm, prompts, prefilled)

        def ended(decoding: Decoding | None, error: Exception | None) -> None:
            self._arms.add(index, batch.samples, partial(self._records, index, begun, decoding, error))
            if index in self._arms.ended:
                self._lane.drop(index)
            self._through(batch)

        batch.to_come += 1
        prompt = prefilled, room.prompt_bytes(arm, lengths)
        self._lane.join(begun.begin, len(prompts), Going(index, size, prompt, ended))

    def _records(
        self, index: int, begun: Begun, decoding: Decoding | None, error: Exception | None
    ) -> list[dict[str, Any]]:
        """What samples have come to in an arm; those that have failed beside others are tried again by themselves."""
        arm, prompts = begun.arm, begun.prompts
        try:
            if decoding is None:
                raise error or AssertionError("a generation ends with an error, or is over")
            generation = concluded(decoding)
            records = begun.records(generation)
        except Exception as failed:
            if not is_failed_sample(failed):
                raise
            if len(prompts) == 1:
                return [failure(arm, prompts[0], f"{type(failed).__name__}: {failed}")]
            self._again.extend(_Batch([prompt.sample], {index: arm}, counts=False) for prompt in prompts)
            return []
        share = room.index_share(arm, _lengths(prompts), generation.audit.get("index_bytes", 0))
        self._index[index] = max(share, self._index.get(index, 0.0))
        return records

    def _through(self, batch: _Batch) -> None:
        batch.to_come -= 1
        if batch.counts and not batch.to_come:
            self._arms.over(batch.samples)


def _failures(arm: Arm, prompts: Sequence[TokenizedSample], failed: str) -> list[dict[str, Any]]:
    """The records of samples that cannot run, or whose prefill has failed."""
    return [failure(arm, prompt, prompt.record["error"] or failed) for prompt in prompts]


def _lengths(prompts: Sequence[TokenizedSample]) -> list[int]:
    return [len(prompt.ids) for prompt in prompts]
