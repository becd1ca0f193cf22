"""A sweep whose arms decode together: samples go through all arms side by side, as many as there is
room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.backends.hf.generate import Decoding
from kvbench.backends.hf.prefilled import Prefilled
from kvbench.backends.hf.together import concluded
from kvbench.config import ConfigError
from kvbench.measure import room
from kvbench.measure.arm import (
    Arm,
    Batch,
    Begun,
    TokenizedSample,
    begin_reference,
    failure,
    is_failed_sample,
)
from kvbench.measure.lane import Admission, Lane
from kvbench.runs.arms import Arms

PREFILLING = 2  # times the keys and values of a prompt are in memory while it is divided


@dataclass
class _Brought:
    """A batch on its way through the arms.

    Attributes
    ----------
    waiting
        the arms that lack it, by their number.
    counts
        its end is progress; not of a part that is done again.
    to_come
        what must end before the batch is over, the bringing itself included.
    """

    batch: Batch
    waiting: dict[int, Arm]
    counts: bool = True
    to_come: int = 1


class SideBySide:
    """Brings batches of samples to the arms' decode pass, and records to their folders."""

    def __init__(self, arms: Arms) -> None:
        self._arms, self._lane = arms, Lane(arms.first.loaded, arms.report.rows)
        self._joint_decode = arms.report.joint_decode
        self._again = deque[_Brought]()  # samples of a batch that has failed, each by itself
        self._index: dict[int, float] = {}  # what an arm's index took of a prompt's keys and values

    def run(self, batches: Iterator[Batch]) -> None:
        """Until no batches are left, or no arm.

        Raises
        ------
        ConfigError
            a sample cannot run as the protocol asks; those that were brought before it have ended.
        """
        while not self._arms.all_ended:
            try:
                if self._again:
                    self._bring(self._again.popleft())
                elif (batch := next(batches, None)) is not None:
                    self._bring(_Brought(batch, self._arms.lacking(batch.samples)))
                elif self._lane.busy:
                    self._lane.step()
                else:
                    break
            except ConfigError:
                self._lane.finish()
                raise

    def _bring(self, brought: _Brought) -> None:
        batch, first = brought.batch, self._arms.first
        if ready := [prompt for prompt in batch.prompts if not prompt.record["error"]]:
            needs = [arm.method.needs for arm in brought.waiting.values()]
            lengths = _lengths(ready)
            recorded = room.recorded_bytes(first, lengths, needs)
            required_bytes = (
                PREFILLING * room.prompt_bytes(first, lengths)
                + recorded
                + self._reference_bytes(ready)
            )
            self._lane.clear(required_bytes, len(ready))
        for part, prefilled, failed in self._arms.prefilled(batch, brought.waiting, True):
            # for want of memory, it may be, that others have until they leave
            if failed and self._lane.busy:
                self._lane.finish()
                self._again.append(_Brought(Batch([*part]), brought.waiting, counts=False))
                continue
            ready = [
                prompt for prompt in part if prefilled is not None and not prompt.record["error"]
            ]
            lost = [prompt for prompt in part if prompt not in ready]
            if prefilled is not None:
                self._refer(ready, prefilled)
            for index, arm in brought.waiting.items():
                self._arms.add(index, batch.samples, partial(_failures, arm, lost, failed))
                if prefilled is not None and index not in self._arms.ended:
                    self._join(brought, index, arm, ready, prefilled)
        if brought.counts:
            self._joint_decode.read += self._arms.share(batch.samples)
        self._through(brought)

    def _refer(self, prompts: Sequence[TokenizedSample], prefilled: Prefilled) -> None:
        """Begin what samples with given tokens are compared with: it goes on ahead of them."""
        if prompts[0].sample.forced and prefilled.reference is None:
            begin = partial(begin_reference, self._arms.first, prompts[0], prefilled)
            admission = Admission(
                None, 0, self._shared(prompts, prefilled), lambda decoding, error: None
            )
            self._lane.join(partial(self._expected, begin), 1, admission)

    def _reference_bytes(self, prompts: Sequence[TokenizedSample]) -> int:
        forced = prompts[0].sample.forced
        return room.reference_bytes(self._arms.first, len(forced.tokens) - 1) if forced else 0

    def _shared(
        self, prompts: Sequence[TokenizedSample], prefilled: Prefilled
    ) -> tuple[Prefilled, int]:
        """What all arms of these prompts share, and its bytes."""
        return prefilled, prefilled.nbytes + self._reference_bytes(prompts)

    def _join(
        self,
        brought: _Brought,
        index: int,
        arm: Arm,
        prompts: Sequence[TokenizedSample],
        prefilled: Prefilled,
    ) -> None:
        lengths = _lengths(prompts)
        size = room.row_bytes(arm, lengths, prompts[0].room, self._index.get(index))
        # what is kept, and a copy, share no page with the prompt
        if prefilled.again or prefilled.has_begun(id(arm)):
            size = 2 * (size + room.prompt_bytes(arm, lengths))
        begun = Begun(arm, prompts, prefilled)

        def ended(decoding: Decoding | None, error: Exception | None) -> None:
            if decoding is not None:  # which may have ended early
                self._joint_decode.expected -= len(prompts) * decoding.to_come
            self._arms.add(
                index, brought.batch.samples, partial(self._records, index, begun, decoding, error)
            )
            if index in self._arms.ended:
                self._lane.drop(index)
            self._through(brought)

        brought.to_come += 1
        self._lane.join(
            partial(self._expected, begun.begin),
            len(prompts),
            Admission(index, size, self._shared(prompts, prefilled), ended),
        )

    def _expected(self, begin: Callable[[], Decoding]) -> Decoding:
        """Begin a generation, whose tokens are work to come from here on."""
        decoding = begin()
        self._joint_decode.expected += len(decoding.generated) * decoding.to_come
        return decoding

    def _records(
        self, index: int, begun: Begun, decoding: Decoding | None, error: Exception | None
    ) -> list[dict[str, Any]]:
        """What samples have come to in an arm; those that have failed beside others are tried again
        by themselves.
        """
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
            self._again.extend(
                _Brought(Batch([prompt]), {index: arm}, counts=False) for prompt in prompts
            )
            return []
        share = room.index_share(arm, _lengths(prompts), generation.audit.get("index_bytes", 0))
        self._index[index] = max(share, self._index.get(index, 0.0))
        return records

    def _through(self, brought: _Brought) -> None:
        brought.to_come -= 1
        if brought.counts and not brought.to_come:
            self._arms.over(brought.batch.samples)


def _failures(arm: Arm, prompts: Sequence[TokenizedSample], failed: str) -> list[dict[str, Any]]:
    """The records of samples that cannot run, or whose prefill has failed."""
    return [failure(arm, prompt, prompt.record["error"] or failed) for prompt in prompts]


def _lengths(prompts: Sequence[TokenizedSample]) -> list[int]:
    return [len(prompt.ids) for prompt in prompts]
