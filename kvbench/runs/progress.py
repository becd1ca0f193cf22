"""The progress of a run on the terminal: a bar over samples, one inside the sample that runs, and what is said once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.text import Text


class TimeLeft(ProgressColumn):
    """The time left by the share of the work that is done, not by counting: samples may differ a hundredfold."""

    def render(self, bar: Bar) -> Text:
        """The time left, "" while nothing tells it."""
        share = bar.fields.get("share")
        if not share or not bar.elapsed or bar.finished:
            return Text("")
        left = timedelta(seconds=round(bar.elapsed * (1 - share) / share))
        return Text(f"{left} left", style="progress.remaining")


class Reporter:
    """What a run tells while it goes on."""

    def __init__(self, bars: Progress, total: int, done: int) -> None:
        self.bars = bars
        self.samples = bars.add_task("samples", total=total, completed=min(done, total), share=0.0)
        self.inside = bars.add_task("tokens of this sample", total=None, visible=False)
        self._said: set[str] = set()
        self._share = 0.0

    def tokens(self, done: int, total: int) -> None:
        """`done` of `total` tokens of the current sample are read or written."""
        self.bars.update(self.inside, completed=done, total=total, visible=True)

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
        """One more sample is done, `share` of the work."""
        self._share += share
        self.bars.update(self.samples, advance=1, share=self._share)

    def failed(self, record: dict[str, Any]) -> None:
        """Say why, where a sample failed."""
        if record["error"]:
            self.bars.console.print(f"{record['id']} failed: {record['error']}")

    def name(self, arm: str) -> None:
        """Which of several arms the sample is in."""
        self.bars.update(self.inside, description=f"tokens, {arm}")

    def once(self, key: str, text: str) -> None:
        """Say something the first time that it is so."""
        if key not in self._said:
            self._said.add(key)
            self.bars.console.print(text)


@contextmanager
def progress(console: Console, total: int, done: int) -> Iterator[Reporter]:
    """Progress bars while the block runs; off a terminal, one line at its end.

    Args:
        console: where they are drawn.
        total: samples in all.
        done: samples that an earlier start finished.
    """
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeLeft(), console=console) as bars:
        yield Reporter(bars, total, done)
