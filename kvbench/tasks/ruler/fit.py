"""The length fit of RULER's prompts: how large a haystack a number of tokens has room for.

Counting tokens is nearly all that a sample costs, so sizes are guessed from the tokens that a word,
a line or a document has taken so far, and counted once or twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvbench.tasks.ruler.writers import Draft, RulerCell, Writer, Written

Rule = Literal["official", "tight"]

NEAR_ENOUGH = 100  # a tight sample may leave a hundredth of its length
ATTEMPTS = 12
# so many words or lines never take half the tokens that is usual, which need not be counted
EVEN = 100


@dataclass(frozen=True)
class Fit:
    """How large the samples of a cell may be.

    Attributes
    ----------
    rule
        "official", what fits the cell's first sample, and RULER's unit less until it fits; "tight",
        what fits each sample, to about a hundredth of the length.
    """

    cell: RulerCell
    writer: Writer
    rule: Rule = "official"

    def check(self) -> None:
        """Refuse a length that leaves no room for a small haystack, before any sample is made.

        Raises
        ------
        ValueError
            names the smallest length that does.
        """
        minimum = self._tokens(self.writer.shortest(self.cell))
        if self.cell.length < minimum:
            raise self._too_short(minimum)

    def fitted(self, index: int) -> tuple[Written, int]:
        """Sample `index` and the size of its haystack.

        Raises
        ------
        ValueError
            not even the least haystack fits.
        """
        draft = self.writer.draft(self.cell, index)
        tight = self._tight(draft) if self.rule == "tight" else None
        return tight or self._shrunk(draft)

    def _shrunk(self, draft: Draft) -> tuple[Written, int]:
        """From the first sample's size down by units."""
        least, length = self.writer.least, self.cell.length
        size, rate = self._first
        size = self.writer.official(size, length)
        while True:
            written = draft.write(size)
            tokens = self._tokens(written)
            if tokens <= length:
                return written, size
            if size <= least:
                raise self._too_short(tokens)
            # RULER subtracts a unit however small the rest, and of a unit or less it takes the same
            # again for ever.
            unit = self.writer.unit(length)
            step = min(unit if size > unit else max(1, size // 4), size - least)
            size -= step
            if step >= EVEN and tokens - length < step * rate / 2:
                return draft.write(size), size

    def _tight(self, draft: Draft) -> tuple[Written, int] | None:
        """From the first sample's size by the tokens that are left or too many.

        None if nothing is found to fit.
        """
        best: tuple[Written, int] | None = None
        free_tokens = 0
        length, (size, rate) = self.cell.length, self._first
        # the largest known to fit, the smallest known not to
        low, high = self.writer.least - 1, 2 * size + 2
        size -= size // (2 * NEAR_ENOUGH)  # so that most fit at once
        for _ in range(ATTEMPTS):
            written = draft.write(size)
            room = length - self._tokens(written)
            letters = len(written.text) / (length - room)
            if room >= 0:
                best = (written, size)
                low = size
                free_tokens = room
                if room <= length // NEAR_ENOUGH:
                    break
            else:
                high = size
            if high - low == 1:
                if best is None or not draft.swap(low, int(free_tokens * letters)):
                    break
                high += 1
            size = min(max(size + int(room // rate), low + 1), high - 1)
        return best

    @functools.cached_property
    def _first(self) -> tuple[int, float]:
        """The largest size that fits the first sample, and its tokens for each unit."""
        draft = self.writer.draft(self.cell, 0)

        def tokens(size: int) -> int:
            return self._tokens(draft.write(size))

        return _largest(tokens, self.cell.length, self.writer.least)

    def _tokens(self, written: Written) -> int:
        """Of prompt and answer, with the longest of its questions."""
        return (
            max(self.cell.count(variant.text) for variant in (written, *written.others))
            + self.writer.new_tokens
        )

    def _too_short(self, minimum: int) -> ValueError:
        name, length = self.cell.name, self.cell.length
        return ValueError(
            f"task.lengths: {length} tokens are too few, {name} needs at least {minimum}"
        )


def _largest(tokens: Callable[[int], int], length: int, least: int) -> tuple[int, float]:
    """The largest size of at most `length` tokens, at least `least`, and the tokens of one more.

    By interpolation between a size that fits and one that does not, as tokens grow nearly evenly
    with the size; every third time by half, in case they do not.
    """
    low, few = least, tokens(least)
    if few > length:
        return least, 1.0
    high, many = 4 * least, tokens(4 * least)
    while many <= length:
        rate = max((many - few) / (high - low), 0.1)
        low, few = high, many
        high = low + max(low // 64, int(1.002 * (length - few) / rate)) + 1
        many = tokens(high)
    rate, turn = max((many - few) / (high - low), 0.1), 0
    while high - low > 1:
        turn += 1
        share = 0.5 if turn % 3 == 0 else (length - few) / (many - few)
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        if (count := tokens(middle)) <= length:
            low, few = middle, count
        else:
            high, many = middle, count
    return low, rate
