"""The progress of a run: on a terminal a bar over samples and one inside the sample that runs, elsewhere a line now and
then; and what is said once."""

from __future__ import annotations

import time
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
    """Tokens a second inside a sample, of the last half minute."""

    def render(self, bar: Bar) -> Text:
        """The speed, "" of a bar over samples."""
        return Text(f"{bar.speed:.0f} tokens/s" if bar.fields.get("tokens") and bar.speed else "")


class Reporter:
    """What a run prints while it goes on.

    Attributes:
        share: of the work of this start that is done.
    """

    def __init__(self, bars: Progress, total: int, done: int) -> None:
        self.bars, self.share = bars, 0.0
        self._samples = bars.add_task("samples", total=total, completed=min(done, total), share=0.0)
        self._inside = bars.add_task("tokens of this sample", total=None, visible=False, tokens=True)
        self._said: set[str] = set()
        self._tokens = self._at = self._of = self._rows = 0
        self._line_tokens = 0  # when the last line was printed, as is _line_at
        self._began = self._line_at = time.monotonic()

    def begin(self, at: int = 0) -> None:
        """A generation begins, with `at` tokens of its prompt read already."""
        self._at, self._of = at, 0

    def tokens(self, done: int, total: int) -> None:
        """`done` of `total` tokens of the current generation are read or written."""
        self._tokens += done - self._at
        self._at, self._of = done, total
        self.bars.update(self._inside, completed=done, total=total, visible=True)
        self._line_now_and_then()

    def _line_now_and_then(self) -> None:
        if self.bars.disable and time.monotonic() - self._line_at >= LINE_SECONDS:
            self.line()

    def rows(self, count: int) -> None:
        """A token of each of so many rows was decoded, of several arms and samples."""
        self._tokens, self._rows = self._tokens + count, count
        self._at = self._of = 0
        self.bars.update(
            self._inside, description=f"tokens, {count} rows", completed=self._tokens, total=None, visible=True
        )
        self._line_now_and_then()

    def line(self) -> None:
        """How far it is, as a line: over all samples, and inside the one that runs, its speed since the last line."""
        now = time.monotonic()
        elapsed, samples = now - self._began, self.bars.tasks[self._samples]
        left = time_left(elapsed, self.share) or str(timedelta(seconds=round(elapsed)))
        rate = self._tokens / max(elapsed, 1e-3)
        line = f"{samples.completed:.0f}/{samples.total:.0f} samples, {rate:.0f} tokens/s, {left}"
        if self._at < self._of:
            speed = (self._tokens - self._line_tokens) / max(now - self._line_at, 1e-3)
            line += f"; of this one {self._at:,} of {self._of:,} tokens, {speed:.0f} tokens/s"
        elif self._rows:
            line += f"; {self._rows} rows decode together"
        self._line_at, self._line_tokens = now, self._tokens
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
    """Says why nothing moves while Numba compiles a kernel that is in no cache yet."""

    def __init__(self, report: Reporter) -> None:
        self._report = report

    def on_start(self, event: event.Event) -> None:
        self._report.once("kernels", "compiling kernels, up to a minute, the first time that they are used (said once)")

    def on_end(self, event: event.Event) -> None:
        pass


@contextmanager
def progress(console: Console, total: int, done: int) -> Iterator[Reporter]:
    """Bars while the block runs; off a terminal a line every `LINE_SECONDS`, and one at its end.

    Args:
        console: where they are drawn.
        total: samples in all.
        done: samples that an earlier start finished.
    """
    drawn = console.is_terminal or console.is_jupyter
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeLeft(), Speed(), console=console, disable=not drawn) as bars:
        report = Reporter(bars, total, done)
        with event.install_listener("numba:compile", _Compilations(report)):
            yield report
        if not drawn:
            report.line()
