"""The progress of a run: on a terminal a bar over samples and one inside the sample that runs,
elsewhere a line now and then; and what is said once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as Bar
from rich.text import Text

from kvbench.kernels.often import LINE_SECONDS, every


def remaining_seconds(elapsed: float, share: float) -> float | None:
    """Seconds left by the share of the work that is done, not by counting: samples may differ a
    hundredfold.

    Parameters
    ----------
    elapsed
        seconds.
    share
        of the work, 0..1; None where nothing is done.
    """
    return elapsed * (1 - share) / share if share > 0 else None


@dataclass
class JointDecodeProgress:
    """The work of arms that decode together: prompts are read one by one, and their rows go on side
    by side.

    Attributes
    ----------
    read
        the share of the prompts that are read, 0..1.
    expected
        tokens to decode of these prompts, in all their rows, at most.
    decoded
        of them.
    seconds
        that it took.
    rows
        of the last pass.
    """

    read: float = 0.0
    expected: int = 0
    decoded: int = 0
    seconds: float = 0.0
    rows: int = 0

    def remaining(self, elapsed: float) -> float | None:
        """Seconds left, by what reading and decoding have taken so far, each by itself; None before
        the first pass.
        """
        if not (self.read and self.decoded):
            return None
        reading = remaining_seconds(max(0.0, elapsed - self.seconds), min(1.0, self.read))
        decoding = remaining_seconds(
            self.seconds, min(1.0, self.decoded * self.read / max(1, self.expected))
        )
        return (reading or 0.0) + (decoding or 0.0)


class TimeLeft(ProgressColumn):
    """A reporter's time left as a column."""

    def render(self, bar: Bar) -> Text:
        """The time left, "" while it is not known."""
        report: Reporter | None = bar.fields.get("report")
        remaining = "" if report is None or bar.finished else report.remaining()
        return Text(remaining, style="progress.remaining")


class Speed(ProgressColumn):
    """The pace beside the bar of a sample's tokens."""

    def render(self, bar: Bar) -> Text:
        """Its words, "" of a bar over samples."""
        return Text(str(bar.fields.get("pace") or ""))


class Pace:
    """Tokens a second over the last half minute; where a step takes longer, over the last step.

    Attributes
    ----------
    tokens
        in all.
    """

    def __init__(self, now: float) -> None:
        self.tokens = 0
        self._marks = deque([(now, 0)])

    def add(self, tokens: int, now: float) -> None:
        """So many more are read or written at this time."""
        self.tokens += tokens
        self._marks.append((now, self.tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= now - LINE_SECONDS:
            self._marks.popleft()

    def __str__(self) -> str:
        (began, before), (ended, tokens) = self._marks[0], self._marks[-1]
        return f"{(tokens - before) / max(ended - began, 1e-3):.0f} tokens/s"


class Reporter:
    """What a run prints while it goes on.

    Attributes
    ----------
    share
        of the work of this start that is done.
    part
        of this work, what is done of the samples that run.
    joint_decode
        of arms that decode together.
    """

    def __init__(self, bars: Progress, total: int, done: int) -> None:
        self.bars = bars
        self.share = self.part = 0.0
        self.joint_decode = JointDecodeProgress()
        self._samples = bars.add_task("samples", total=total, completed=min(done, total))
        bars.update(self._samples, report=self)  # which is drawn at once
        self._pace = Pace(bars.get_time())
        self._inside = bars.add_task(
            "tokens of this sample", total=None, visible=False, pace=self._pace
        )
        self._printed: set[str] = set()
        self._at = self._of = 0
        self._reads = False

    def begin(self, at: int = 0) -> None:
        """A generation begins, with `at` tokens of its prompt read already."""
        self._at, self._of = at, 0
        self._reads = not at

    def tokens(self, done: int, total: int) -> None:
        """`done` of `total` tokens of the current generation are read or written."""
        self._pace.add(done - self._at, self.bars.get_time())
        self._at, self._of = done, total
        self._reads = False
        self.bars.update(self._inside, completed=done, total=total, visible=True)

    def rows(self, count: int, seconds: float) -> None:
        """A token of each of so many rows was decoded, of several arms and samples, in so many
        seconds.
        """
        joint = self.joint_decode
        self._pace.add(count, self.bars.get_time())
        self._at = self._of = 0
        joint.rows = count
        joint.decoded, joint.seconds = joint.decoded + count, joint.seconds + seconds
        self.bars.update(
            self._inside,
            description=f"tokens, {count} rows",
            completed=joint.decoded,
            total=max(joint.decoded, joint.expected),
            visible=True,
        )

    def remaining(self) -> str:
        """The time left; "" while it is not known, and where there is none."""
        elapsed = self.bars.tasks[self._samples].elapsed or 0.0
        remaining = self.joint_decode.remaining(elapsed)
        remaining = (
            remaining_seconds(elapsed, self.share + self.part) if remaining is None else remaining
        )
        return (
            f"{timedelta(seconds=round(remaining))} left" if remaining and round(remaining) else ""
        )

    def line(self) -> None:
        """How far it is, as a line: over all samples, at what pace, and what is running."""
        samples = self.bars.tasks[self._samples]
        pace = [str(self._pace)] if self._pace.tokens else []
        remaining = self.remaining() or str(timedelta(seconds=round(samples.elapsed or 0.0)))
        line = ", ".join([f"{samples.completed:.0f}/{samples.total:.0f} samples", *pace, remaining])
        self.bars.console.print(
            "; ".join([line, *self._running()]), highlight=False, soft_wrap=True
        )

    def _running(self) -> Iterator[str]:
        """What goes on now."""
        joint = self.joint_decode
        if 0 < joint.read < 0.995:
            yield f"{joint.read:.0%} of the prompts are read"
        if self._reads:
            yield "reading a prompt"
        elif self._at < self._of:
            yield f"of this one {self._at:,} of {self._of:,} tokens"
        elif joint.rows:
            done = f"{joint.decoded:,} of {max(joint.decoded, joint.expected):,} tokens"
            yield f"{joint.rows} rows decode together, {done}"

    def covered(self, record: dict[str, Any]) -> None:
        """Say once where a sample's budget covers its prompt."""
        budget = record.get("audit", {}).get("budget")
        if budget is not None and budget >= record["prompt_tokens"]:
            self.once(
                "budget",
                f"budget: C = {budget} covers the {record['prompt_tokens']} tokens of"
                f" {record['id']}, which is full attention (said once)",
            )

    def advance(self, share: float) -> None:
        """One more sample is done, `share` of the work; one that ended early has no
        tokens to come.
        """
        self._of, self.part = 0, 0.0
        self.share += share
        self.bars.update(self._samples, advance=1)
        self.bars.update(self._inside, completed=self.bars.tasks[self._inside].total)

    def failed(self, record: dict[str, Any]) -> None:
        """Say why, where a sample failed."""
        if record["error"]:
            self.bars.console.print(f"{record['id']} failed: {record['error']}")

    def name(self, arm: str) -> None:
        """Which of several arms the sample is in."""
        self.bars.update(self._inside, description=f"tokens, {arm}")

    def once(self, key: str, text: str) -> None:
        """Say something the first time that it is so."""
        if key not in self._printed:
            self._printed.add(key)
            self.bars.console.print(text)


@contextmanager
def progress(console: Console, total: int, done: int) -> Iterator[Reporter]:
    """Bars while the block runs; off a terminal a line every `LINE_SECONDS`, whatever runs, and one
    at its end.

    Parameters
    ----------
    console
        where they are drawn.
    total
        samples in all.
    done
        samples that an earlier start finished.
    """
    drawn = console.is_terminal or console.is_jupyter
    columns = TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeLeft(), Speed()
    with Progress(
        *columns, *times, console=console, disable=not drawn, get_time=time.monotonic
    ) as bars:
        report = Reporter(bars, total, done)
        lines = nullcontext() if drawn else every(LINE_SECONDS, report.line)
        with lines:
            yield report
        if not drawn:
            report.line()
