"""Where the arms of a sweep decode together: their generations join one decode pass, as many as memory has room for.

Who brings a sample waits here until there is room, while the generations that are there go on. What has ended is handed
to whoever brought it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.backends.hf.generate import Decoding
from kvbench.backends.hf.prefilled import Prefilled
from kvbench.backends.hf.together import DecodePass, concluded
from kvbench.measure import room
from kvbench.measure.arm import (
    Arm,
    Begun,
    TokenizedSample,
    begin_reference,
    failure,
    is_failed_sample,
    is_out_of_memory,
    prompt_of,
)
from kvbench.runs.arms import Arms
from kvbench.tasks import Sample

PREFILLING = 2  # times the keys and values of a prompt are in memory while it is divided

Ended = Callable[[list[dict[str, Any]] | Exception], None]  # given the records of a batch, or why it has none


@dataclass
class _Going:
    """A generation in the pass.

    Attributes:
        arm: the number of its arm.
        prefilled: what it began from, and the bytes that this takes as long as any such goes on.
        size: bytes that it takes besides.
        begun: None of a reference, which is nobody's record.
    """

    arm: int
    prefilled: tuple[Prefilled, float]
    size: float
    begun: Begun | None = None
    ended: Ended = lambda found: None


class Lane:
    """The decode pass of a sweep.

    Args:
        arm: any of its arms, which have one model.
        stepped: called after each pass with its rows.
    """

    def __init__(self, arm: Arm, stepped: Callable[[int], None]) -> None:
        self._pass, self._stepped, self._room = DecodePass(arm.loaded.model), stepped, room.room(arm)
        self._going: dict[Decoding, _Going] = {}
        self._index: dict[int, float] = {}  # what an arm's index took of a prompt's keys and values

    @property
    def going(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self._going)

    def clear(self, needed: float, rows: int) -> None:
        """Go on until there is room for so many bytes and rows, or nothing is left to wait for."""
        while self._going and (self._pass.rows + rows > room.MOST_ROWS or self._taken() + needed > self._room):
            self.step()

    def _taken(self) -> float:
        prompts = {id(one.prefilled[0]): one.prefilled[1] for one in self._going.values()}
        return sum(prompts.values()) + sum(one.size for one in self._going.values())

    def join(
        self, number: int, arm: Arm, prompts: Sequence[TokenizedSample], prefilled: Prefilled, ended: Ended
    ) -> None:
        """A batch of an arm's samples goes on here.

        Args:
            number: of the arm.
            prompts: those of the batch that can run.
            prefilled: of these, divided.
            ended: called once, now or in a later `step`.
        """
        size, whole = room.row_bytes(arm, prompts, self._index.get(number)), room.prompt_bytes(arm, prompts)
        self.clear(size, len(prompts))
        try:
            reference = begin_reference(arm, prompts, prefilled)
            if reference is not None:
                self._add(reference, _Going(number, (prefilled, whole), 0))
            begun = self._begun(arm, prompts, prefilled)
        except Exception as error:
            ended(error)
            return
        self._add(begun.decoding, _Going(number, (prefilled, whole), size, begun, ended))

    def _begun(self, arm: Arm, prompts: Sequence[TokenizedSample], prefilled: Prefilled) -> Begun:
        """The estimate may have been too low: then the batch waits for others to leave."""
        while True:
            try:
                return Begun(arm, prompts, prefilled)
            except Exception as error:
                if not (is_out_of_memory(error) and self._going):
                    raise
            rows = self._pass.rows
            while self._pass.rows == rows:
                self.step()

    def _add(self, decoding: Decoding, going: _Going) -> None:
        self._going[decoding] = going
        if decoding.over:
            self._end(decoding, None)
        else:
            self._pass.join(decoding)

    def step(self) -> None:
        """Decode a token of each row."""
        rows = self._pass.rows
        for decoding, error in self._pass.step():
            if decoding in self._going:  # none that an earlier one has dropped
                self._end(decoding, error)
        self._stepped(rows)

    def drop(self, number: int) -> None:
        """Nothing of an arm goes on; it has no records of what did."""
        for decoding in [decoding for decoding, going in self._going.items() if going.arm == number and going.begun]:
            going = self._going.pop(decoding, None)
            if going is not None:
                self._pass.leave(decoding)
                decoding.engine.release()
                going.ended([])

    def _end(self, decoding: Decoding, error: Exception | None) -> None:
        going = self._going.pop(decoding)
        found: list[dict[str, Any]] | Exception = error or []
        if going.begun is not None and error is None:
            try:
                generation = concluded(decoding)
                index = generation.audit.get("index_bytes", 0)
                share = room.index_share(going.begun.arm, going.begun.prompts, index)
                self._index[going.arm] = max(share, self._index.get(going.arm, 0.0))
                found = going.begun.records(generation)
            except Exception as failed:
                found = failed
        decoding.engine.release()
        going.ended(found)


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
        self._arms, self._lane = arms, Lane(arms.first, arms.report.rows)
        self._again = deque[_Batch]()  # samples of a batch that has failed, each by itself

    def run(self, samples: Iterator[list[Sample]]) -> None:
        """Until no samples are left, or no arm."""
        while not self._arms.all_ended:
            if self._again:
                self._bring(self._again.popleft())
            elif (batch := next(samples, None)) is not None:
                self._bring(_Batch(batch, self._arms.lacking(batch)))
            elif self._lane.going:
                self._lane.step()
            else:
                break

    def _bring(self, batch: _Batch) -> None:
        prompts = [prompt_of(self._arms.first, sample) for sample in batch.samples]
        if ready := [prompt for prompt in prompts if not prompt.record["error"]]:
            self._lane.clear(PREFILLING * room.prompt_bytes(self._arms.first, ready), len(ready))
        for part, prefilled, failed in self._arms.prefilled(batch.samples, prompts, batch.waiting):
            ready = [prompt for prompt in part if prefilled is not None and not prompt.record["error"]]
            lost = [prompt for prompt in part if prompt not in ready]
            if prefilled is not None:
                prefilled.divide()
            for index, arm in batch.waiting.items():
                self._arms.add(index, batch.samples, partial(_failures, arm, lost, failed))
                if prefilled is not None and index not in self._arms.ended:
                    batch.to_come += 1
                    self._lane.join(index, arm, ready, prefilled, partial(self._ended, batch, index, arm, ready))
        self._through(batch)

    def _ended(
        self,
        batch: _Batch,
        index: int,
        arm: Arm,
        prompts: Sequence[TokenizedSample],
        found: list[dict[str, Any]] | Exception,
    ) -> None:
        """What a part of a batch has come to in an arm."""

        def records() -> list[dict[str, Any]]:
            if not isinstance(found, Exception):
                return found
            if not is_failed_sample(found):
                raise found
            if len(prompts) == 1:
                return [failure(arm, prompts[0], f"{type(found).__name__}: {found}")]
            self._again.extend(_Batch([prompt.sample], {index: arm}, counts=False) for prompt in prompts)
            return []

        self._arms.add(index, batch.samples, records)
        if index in self._arms.ended:
            self._lane.drop(index)
        self._through(batch)

    def _through(self, batch: _Batch) -> None:
        batch.to_come -= 1
        if batch.counts and not batch.to_come:
            self._arms.over(batch.samples)


def _failures(arm: Arm, prompts: Sequence[TokenizedSample], failed: str) -> list[dict[str, Any]]:
    """The records of samples that cannot run, or whose prefill has failed."""
    return [failure(arm, prompt, prompt.record["error"] or failed) for prompt in prompts]
