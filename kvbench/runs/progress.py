"""The progress of a run: on a terminal a bar over samples and one inside the sample that runs, elsewhere a line now and
then; and what is said once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from numba.core import event
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.text import Text

from kvbench.runs.terminal import Console

LINE_SECONDS = 30.0


def time_left(elapsed: float, share: float) -> str:
    """The time left by the share of the work that is done, not by counting: samples may differ a hundredfold.

    Args:
        elapsed: seconds.
        share: of the work, 0..1; "" where nothing is done.
    """
    return f"{timedelta(seconds=round(elapsed * (1 - share) / share))} left" if 0 < share < 1 else ""


class TimeLeft(ProgressColumn):
    """`time_left` as a column."""

    def render(self, bar: Bar) -> Text:
        """The time left, "" while it is not known."""
        if not bar.elapsed or bar.finished:
            return Text("")
        return Text(time_left(bar.elapsed, bar.fields.get("share") or 0.0), style="progress.remaining")


class Speed(ProgressColumn):
    """The pace beside the bar of a sample's tokens."""

    def render(self, bar: Bar) -> Text:
        """Its words, "" of a bar over samples."""
        return Text(str(bar.fields.get("pace") or ""))


class Pace:
    """Tokens a second over the last half minute; where a step takes longer, over the last step.

    Attributes:
        tokens: in all.
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

    Attributes:
        share: of the work of this start that is done.
    """

    def __init__(self, bars: Progress, total: int, done: int) -> None:
        self.bars, self.share = bars, 0.0
        self._samples = bars.add_task("samples", total=total, completed=min(done, total), share=0.0)
        self._pace = Pace(bars.get_time())
        self._inside = bars.add_task("tokens of this sample", total=None, visible=False, pace=self._pace)
        self._said: set[str] = set()
        self._at = self._of = self._rows = 0
        self._line_at = bars.get_time()

    def begin(self, at: int = 0) -> None:
        """A generation begins, with `at` tokens of its prompt read already."""
        self._at, self._of = at, 0

    def tokens(self, done: int, total: int) -> None:
        """`done` of `total` tokens of the current generation are read or written."""
        self._pace.add(done - self._at, self.bars.get_time())
        self._at, self._of = done, total
        self.bars.update(self._inside, completed=done, total=total, visible=True)
        self._line_now_and_then()

    def _line_now_and_then(self) -> None:
        if self.bars.disable and self.bars.get_time() - self._line_at >= LINE_SECONDS:
            self.line()

    def rows(self, count: int) -> None:
        """A token of each of so many rows was decoded, of several arms and samples."""
        self._pace.add(count, self.bars.get_time())
        self._at, self._of, self._rows = 0, 0, count
        self.bars.update(
            self._inside, description=f"tokens, {count} rows", completed=self._pace.tokens, total=None, visible=True
        )
        self._line_now_and_then()

    def line(self) -> None:
        """How far it is, as a line: over all samples, at what pace, and inside the one that runs."""
        samples, elapsed = self.bars.tasks[self._samples], self.bars.tasks[self._samples].elapsed or 0.0
        left = time_left(elapsed, self.share) or str(timedelta(seconds=round(elapsed)))
        line = f"{samples.completed:.0f}/{samples.total:.0f} samples, {self._pace}, {left}"
        if self._at < self._of:
            line += f"; of this one {self._at:,} of {self._of:,} tokens"
        elif self._rows:
            line += f"; {self._rows} rows decode together"
        self._line_at = self.bars.get_time()
        self.bars.console.print(line, highlight=False)

    def sample(self, record: dict[str, Any], share: float) -> None:
        """A sample has ended, `share` of the work of this start."""
        budget = record.get("audit", {}).get("budget")
        if budget is not None and budget >= record["prompt_tokens"]:
            self.once(
                "budget",
                f"budget: C = {budget} covers the {record['prompt_tokens']} tokens of {record['id']}, which is full "
                "attention (said once)",
            )
        self.failed(record)
        self.advance(share)

    def advance(self, share: float) -> None:
        """One more sample is done, `share` of the work; one that ended early has no tokens to come."""
        self._of = 0
        self.share += share
        self.bars.update(self._samples, advance=1, share=self.share)
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
        if key not in self._said:
            self._said.add(key)
            self.bars.console.print(text)


class _Compilations(event.Listener):
    """A clock that stands still while Numba compiles a kernel that is in no cache yet, and says why nothing moves."""

    report: Reporter

    def __init__(self) -> None:
        self._compiled = self._since = 0.0
        self._depth = 0  # one compilation inside the other

    def __call__(self) -> float:
        return (self._since if self._depth else time.monotonic()) - self._compiled

    def on_start(self, event: event.Event) -> None:
        if not self._depth:
            self._since = time.monotonic()
        self._depth += 1
        self.report.once("kernels", "compiling kernels, up to a minute, the first time that they are used (said once)")

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if not self._depth:
            self._compiled += time.monotonic() - self._since


@contextmanager
def progress(console: Console, total: int, done: int) -> Iterator[Reporter]:
    """Bars while the block runs; off a terminal a line every `LINE_SECONDS`, and one at its end.

    Args:
        console: where they are drawn.
        total: samples in all.
        done: samples that an earlier start finished.
    """
    drawn = console.is_terminal or console.is_jupyter
    columns, clock = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn()), _Compilations()
    times = TimeElapsedColumn(), TimeLeft(), Speed()
    with Progress(*columns, *times, console=console, disable=not drawn, get_time=clock) as bars:
        report = clock.report = Reporter(bars, total, done)
        with event.install_listener("numba:compile", clock):
            yield report
        if not drawn:
            report.line()
