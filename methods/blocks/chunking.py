"""Chunks of consecutive tokens that end where the text itself ends something: a paragraph, a
sentence, a clause, a word (LycheeCluster, section 4 and appendix A).

What a token ends is read off its text once for a whole vocabulary; cutting a text is then
arithmetic on token ids. A text is cut at the same tokens whether it is read at once or token by
token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch.nn.functional import pad

from kvbench.method import View
from methods.blocks.ragged import entries

Chunking = Literal["structure", "fixed"]
Packing = Literal["buffer", "chunk"]

# What the end of a token's text may hold, strongest first; the index in the list gives the
# strength, 4 .. 1.
DELIMITERS = [
    # paragraphs, Markdown rules and fences, structures
    re.compile(r"\n[ \t]*\n|```|---|\*\*\*|[}\]>]"),
    re.compile(r"[.?!\n。？！．]"),  # sentences and lines
    re.compile(r"[,;:，；：、]"),  # clauses
    re.compile(r"\s"),  # words
]
# where tokens have no text
INSTEAD = "use method.chunking=fixed (lychee) or method=quest (quest_structure)"
PARAGRAPH = len(DELIMITERS)  # the strength of the first
TO_LAST_WORD = re.compile(r".*[^\W_]", re.DOTALL)
LINE_BREAK = re.compile(r"[ \t]*\n")


@dataclass(frozen=True, eq=False)
class Delimiters:
    """What the tokens of a vocabulary end and begin; the last entry of each stands for ids beyond
    the vocabulary.

    Attributes
    ----------
    ends
        [V + 1] int8, the strongest delimiter after the last letter or digit of each token, 4
        (paragraph) .. 1 (word); 0 none.
    begins_word
        [V + 1] bool, the text begins with white space: what stands before it ends a word.
    breaks_line
        [V + 1] bool, the text is a line break: after another line's end it ends a paragraph.
    ends_line
        [V + 1] bool, the text ends with a line break.
    """

    ends: torch.Tensor
    begins_word: torch.Tensor
    breaks_line: torch.Tensor
    ends_line: torch.Tensor

    def strengths(self, ids: torch.Tensor) -> torch.Tensor:
        """How strong a boundary there is after each token of a text: [n] int8, 0 (none) .. 4.

        `ids`: [n].
        """
        last = len(self.ends) - 1
        ids = torch.where((ids < 0) | (ids > last), last, ids)
        before_word = pad(self.begins_word[ids[1:]], (0, 1)).to(torch.int8)
        strengths = torch.maximum(self.ends[ids], before_word)
        paragraph = self.breaks_line[ids] & pad(self.ends_line[ids[:-1]], (1, 0))
        return torch.where(paragraph, PARAGRAPH, strengths)


def delimiters(pieces: Sequence[str]) -> Delimiters:
    """Read a vocabulary. `pieces`: the text of every token id, as `Context.pieces`.

    Raises
    ------
    ValueError
        no token ends anything, so the pieces are no text.
    """
    return _delimiters(tuple(pieces))


def _strength(tail: str) -> int:
    """Of the strongest delimiter in what follows the last letter or digit of a token."""
    for at, pattern in enumerate(DELIMITERS):
        if pattern.search(tail):
            return PARAGRAPH - at
    return 0


@lru_cache(maxsize=4)
def _delimiters(pieces: tuple[str, ...]) -> Delimiters:
    ends = [_strength(TO_LAST_WORD.sub("", piece, count=1)) for piece in pieces]
    if not any(ends):
        raise ValueError(
            f"chunks at delimiters: none of the tokenizer's {len(pieces)} pieces ends a word, a"
            f" clause or a sentence; expected the text of tokens, or {INSTEAD}"
        )
    return Delimiters(
        torch.tensor([*ends, 0], dtype=torch.int8),
        torch.tensor([*(piece[:1].isspace() for piece in pieces), False]),
        torch.tensor([*(LINE_BREAK.fullmatch(piece) is not None for piece in pieces), False]),
        torch.tensor([*(piece.rstrip(" \t").endswith("\n") for piece in pieces), False]),
    )


@dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts a text into chunks, greedily from its beginning.

    A chunk ends at the strongest boundary that gives it `shortest` to `longest` tokens, the
    earliest of equal ones; where there is none it has `longest`. The last one may be shorter.

    Attributes
    ----------
    delimiters
        of the vocabulary; None: chunks of `longest` tokens, whatever the text.
    """

    shortest: int
    longest: int
    delimiters: Delimiters | None = None

    def bounds(self, ids: torch.Tensor, uncut: int = 0) -> torch.Tensor:
        """Where each of M chunks begins and where the last one ends, [M + 1] int64.

        Parameters
        ----------
        ids
            [n], on the CPU.
        uncut
            the first chunk that begins within so many tokens of the end is not cut, nor is any
            after it.
        """
        strengths = torch.zeros_like(ids)
        if self.delimiters is not None:
            strengths = self.delimiters.strengths(ids).long()
        count, choices = len(ids), self.longest - self.shortest + 1
        # of the chunk that begins at each token, how good its end would be, [n, choices]
        ends = pad(strengths, (0, self.longest))[self.shortest - 1 :]
        rank = 2 * ends.unfold(0, choices, 1)[:count]
        rank[:, -1] = rank[:, -1].clamp(min=1)  # a forced cut is weaker than any boundary
        rank = rank * choices - torch.arange(choices)
        leap = torch.arange(count) + self.shortest + rank.argmax(dim=1)
        leap = pad(leap.clamp(max=count), (0, 1), value=count)
        # 0, leap[0], leap[leap[0]], ...: each round finds as many more as it knows
        chain = leap.new_zeros(1)
        while int(chain[-1]) < count:
            chain = torch.cat([chain, leap[chain]])
            leap = leap[leap]
        chunks = int((count - chain > uncut).sum())
        return chain[: chunks + 1]


def cutter(chunking: Chunking, shortest: int, longest: int, pieces: Sequence[str] | None) -> Cutter:
    """What cuts chunks of `shortest` to `longest` tokens by the text's structure, or of `longest`
    whatever the text.

    Parameters
    ----------
    pieces
        the text of every token id, as `Context.pieces`.

    Raises
    ------
    ValueError
        chunks are to follow a text, and there is none.
    """
    if chunking == "fixed":
        return Cutter(longest, longest)
    if pieces is None:
        raise ValueError(
            f"chunks at delimiters: the tokenizer gives no text of its tokens; {INSTEAD}"
        )
    return Cutter(shortest, longest, delimiters(pieces))


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of one sequence.

    Attributes
    ----------
    bounds
        [M + 1] int64, chunk i has the tokens bounds[i] .. bounds[i + 1] - 1.
    """

    bounds: torch.Tensor

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[M], tokens of each chunk."""
        return self.bounds.diff()

    def on(self, device: torch.device) -> Chunks:
        """The same on a device, for a layer that is there."""
        if self.bounds.device == device:
            return self
        return Chunks(self.bounds.to(device, non_blocking=True))

    def extended(self, end: int) -> Chunks:
        """With one chunk more, up to `end`."""
        return Chunks(pad(self.bounds, (0, 1), value=end))

    def fitting(self, chunks: torch.Tensor, room: int) -> torch.Tensor:
        """Each list [..., K] of chunks as far as it has `room` tokens at most; -1 in place of the
        rest.
        """
        return torch.where(self._lengths_of(chunks).cumsum(dim=-1) <= room, chunks, -1)

    def tokens(self, chunks: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """The tokens of each list [..., K] of chunks (-1 = none), in its order: [..., T], trailing
        -1.

        `most`: no list holds more tokens; with it nothing waits for a GPU, as in `entries`.
        """
        return entries(self.bounds[chunks.clamp(min=0)], self._lengths_of(chunks), most)[0]

    def _lengths_of(self, chunks: torch.Tensor) -> torch.Tensor:
        return self.lengths[chunks.clamp(min=0)].masked_fill(chunks < 0, 0)


class Text:
    """A text that grows token by token, and its chunks: when the uncut rest is full, its oldest
    tokens or all of it.

    Parameters
    ----------
    ids
        the prompt, [N] on the CPU.
    cutter
        cuts the text; chunks have at most `rest` tokens.
    rest
        most tokens after the last chunk.
    device
        where the chunks' bounds are wanted.
    first
        where the first chunk begins.
    whole_prompt
        the prompt is cut to its end, and the rest begins after it.
    packing
        what leaves a full rest: its oldest "chunk", or all of the "buffer", in chunks.

    Attributes
    ----------
    chunks
        all chunks so far.
    end
        where the last one ends and the rest begins.
    most
        tokens of the rest at most.
    cut
        tokens of each chunk that the newest token has pushed out of the rest.
    short
        chunks with fewer tokens than the cutter's shortest: they end a prompt or a packed buffer.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        cutter: Cutter,
        rest: int,
        device: torch.device,
        first: int = 0,
        whole_prompt: bool = False,
        packing: Packing = "chunk",
    ) -> None:
        self._cutter, self._packing = cutter, packing
        self.most = rest
        bounds = first + cutter.bounds(ids[first:], 0 if whole_prompt else rest)
        self.chunks, self.end = Chunks(bounds.to(device)), int(bounds[-1])
        self.cut: list[int] = []
        self.short = int((bounds.diff() < cutter.shortest).sum())
        self._rest = ids[self.end :].tolist()

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.end + len(self._rest)

    def append(self, token: int) -> None:
        """Read the next token."""
        self._rest.append(token)
        self.cut = self._pushed_out() if len(self._rest) > self.most else []
        for length in self.cut:
            self.end += length
            self.chunks = self.chunks.extended(self.end)
            self.short += length < self._cutter.shortest
        del self._rest[: sum(self.cut)]

    def _pushed_out(self) -> list[int]:
        """Tokens of each chunk that leaves a full rest, whose last token is the newest."""
        if self._packing == "buffer":
            return self._lengths(self._rest[:-1])
        # a space before a token ends a word, too
        return self._lengths(self._rest[: self._cutter.longest + 1])[:1]

    def _lengths(self, tokens: list[int]) -> list[int]:
        lengths: list[int] = self._cutter.bounds(torch.tensor(tokens)).diff().tolist()
        return lengths


def keys_of_row(view: View, layer: int, row: int, first: int, end: int) -> torch.Tensor:
    """Stored keys [Hkv, n, D] of the tokens first .. end - 1 of one row. Metered."""
    ids = torch.full((len(view.lengths(layer)), 1, end - first), -1)
    ids[row] = torch.arange(first, end)
    return view.keys(layer, ids)[row]
