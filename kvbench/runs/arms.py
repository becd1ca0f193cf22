"""The arms of a sweep while they run: which lack a sample, where their records go, and what ends
one of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvbench.backends.hf.prefilled import Prefilled
from kvbench.measure.arm import (
    Arm,
    Batch,
    PromptPrefill,
    TokenizedSample,
    failure,
    is_failed_sample,
    measure,
)
from kvbench.runs.folder import ResultsError, RunFolder
from kvbench.runs.identity import arm_name
from kvbench.runs.progress import Reporter
from kvbench.runs.work import Work
from kvbench.tasks import Sample


class Arms:
    """The arms that run, by their number, and what becomes of them.

    Attributes
    ----------
    first
        any of them: samples are the same for all.
    ended
        what ended an arm.
    """

    def __init__(
        self, running: Mapping[int, tuple[Arm, RunFolder]], work: Work, report: Reporter
    ) -> None:
        self._running, self.ended, self._work, self.report = (
            running,
            dict[int, Exception](),
            work,
            report,
        )
        self.first, _ = next(iter(running.values()))
        self._prefill = PromptPrefill()

    def lacking(self, batch: Sequence[Sample]) -> dict[int, Arm]:
        """Those that go on and have not done all samples of a batch."""
        return {
            index: arm
            for index, (arm, folder) in self._running.items()
            if index not in self.ended and any(sample.id not in folder.done for sample in batch)
        }

    def prefilled(
        self, batch: Batch, waiting: Mapping[int, Arm], divided: bool = False
    ) -> Iterator[tuple[Sequence[TokenizedSample], Prefilled | None, str]]:
        """A batch with the prefill that serves those who wait for it, see `_prefilled`."""
        # An arm that does not wait now may wait for the next answer to this prompt, or question
        # about this context.
        begun = [arm for arm, _ in self._running.values()] if batch.again else [*waiting.values()]
        served = [arm for arm in begun if arm.backend.has_engine] if waiting else []
        return _prefilled(served, batch, self.report, self._prefill, divided)

    def add(
        self, index: int, batch: Sequence[Sample], records: Callable[[], Iterable[dict[str, Any]]]
    ) -> None:
        """Make records of a batch, or of a part of it, and keep them; what goes wrong ends this arm
        alone.
        """
        if index in self.ended:
            return
        arm, folder = self._running[index]
        try:
            for record in records():
                if record["id"] not in folder.done:
                    folder.add(record, self.report.share + self.share(batch))
                    self.report.failed(record)
        except Exception as error:
            self.ended[index] = error
            with suppress(ResultsError):  # where nothing can be written, that is the error
                folder.leave(interrupted=True)
            self.report.bars.console.print(
                f"{arm_name(arm.config)} ends: {type(error).__name__}: {error}"
            )

    @property
    def all_ended(self) -> bool:
        """Whether no arm goes on."""
        return len(self.ended) == len(self._running)

    def share(self, samples: Iterable[Sample]) -> float:
        """The share of samples in the work of this start."""
        return sum(map(self._work.share, samples))

    def over(self, batch: Sequence[Sample]) -> None:
        """All arms are through with a batch."""
        for sample in batch:
            self.report.advance(self._work.share(sample))


def in_turn(arms: Arms, batches: Iterable[Batch]) -> None:
    """Each batch through one arm after the other."""
    for batch in batches:
        if arms.all_ended:
            break
        waiting, prefilled = arms.lacking(batch.samples), None
        for part, prefilled, failed in arms.prefilled(batch, waiting):
            read = max(len(prompt.ids) for prompt in part)
            for number, (index, arm) in enumerate(waiting.items()):
                arms.report.part = number / len(waiting) * arms.share(batch.samples)
                arms.report.name(arm_name(arm.config))
                arms.report.begin(read if prefilled else 0)
                arms.add(
                    index,
                    batch.samples,
                    partial(_measured, arm, part, arms.report, prefilled, failed),
                )
        prefilled = None  # its memory, before the next takes as much
        arms.over(batch.samples)


def _measured(
    arm: Arm,
    prompts: Sequence[TokenizedSample],
    report: Reporter,
    prefilled: Prefilled | None,
    failed: str,
) -> list[dict[str, Any]]:
    """The records of a batch, whose prefill has failed for a reason, or not.

    A shared prefill holds all keys and values on the device: an arm whose tokens go to the host may
    have room alone.
    """
    if failed and arm.method.needs.home == "device":
        return [failure(arm, prompt, failed) for prompt in prompts]
    return measure(arm, prompts, report.tokens, prefilled)


def _prefilled(
    arms: Sequence[Arm], batch: Batch, report: Reporter, prefill: PromptPrefill, divided: bool
) -> Iterator[tuple[Sequence[TokenizedSample], Prefilled | None, str]]:
    """A batch with its prefill, or why that failed; a failed batch of several falls into its
    samples.
    """
    running = [prompt for prompt in batch.prompts if not prompt.record["error"]]
    prefilled, failed = None, ""
    report.begin()
    if arms and running:
        try:
            new_prefill = prefill(arms, running, batch.again, report.tokens)
            if divided:
                new_prefill.divide()
            prefilled = new_prefill
        except Exception as error:
            if not is_failed_sample(error):
                raise
            failed = f"{type(error).__name__}: {error}"
    if failed and len(batch.prompts) > 1:
        for prompt in batch.prompts:
            yield from _prefilled(arms, Batch([prompt]), report, prefill, divided)
    else:
        yield batch.prompts, prefilled, failed
