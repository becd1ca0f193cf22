"""Fidelity: how near to full attention's next-token distribution a method stays, on running text.

The first tokens of a text are the prompt, the next ones are given to the model one by one, whatever
it would have said: method and full attention see the same tokens at every step, and are compared
there (`kvbench.measure.fidelity`). A minute of it separates methods that task scores separate with
hundreds of prompts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config import ASSETS, show
from kvbench.models.prompts import raw_ids
from kvbench.tasks import ForcedOutput, Sample, Task
from kvbench.tasks.sources import LocalFile, read_jsonl

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

PROSE = "prose"  # the texts that kvbench ships
KINDS = (".txt", ".jsonl")


class Fidelity(Task):
    """`samples` stretches of text for each length, none of which goes on into another text.

    The answer of a sample are the tokens that full attention would have chosen, its output those
    that the method would have chosen, both as numbers; the score is the share of steps in which
    they are the same.

    Parameters
    ----------
    lengths
        prompt tokens, those that the tokenizer adds included.
    steps
        tokens that are given after the prompt, each a step that is compared.
    samples
        stretches of each length, of different texts as far as there are.
    texts
        "prose", addresses that kvbench ships; a text file; or a folder of .txt files, and of .jsonl
        files as LongBench's, whose `context` is read.

    Raises
    ------
    ValueError
        lengths that are none, or a path without texts.
    """

    name = "fidelity"
    metric = "agreement"
    stored = True

    def __init__(
        self, lengths: Sequence[int], steps: int = 64, samples: int = 4, texts: str = PROSE
    ) -> None:
        if not lengths or any(type(length) is not int or length < 1 for length in lengths):
            raise ValueError(
                f"task.lengths={show(lengths)}: expected whole numbers, 1 or more, such as"
                " [2048,4096]"
            )
        self.lengths = tuple(lengths)
        self.steps = steps
        self.count = samples
        root = ASSETS / PROSE if texts == PROSE else Path(texts).expanduser()
        files = (
            sorted(file for file in root.glob("*") if file.suffix in KINDS)
            if root.is_dir()
            else [root]
        )
        if not files:
            raise ValueError(f"task.texts={texts}: no .txt or .jsonl file in this folder")
        self.sources = tuple(LocalFile(file, "task.texts") for file in files)

    def __len__(self) -> int:
        return len(self.lengths) * self.count

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The texts by name.

        Raises
        ------
        ValueError
            a file cannot be read.
        """
        texts: dict[str, str] = {}
        for source in self.sources:
            file = source.path()
            try:
                if file.suffix != ".jsonl":
                    texts[file.stem] = file.read_text(encoding="utf-8")
                    continue
                rows = list(read_jsonl(file.name, file.read_bytes().splitlines(), {"context": str}))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"task.texts: {file}: cannot be read ({type(error).__name__}: {error})"
                ) from error
            if not rows:
                raise ValueError(f"task.texts: {file}: no text in it")
            for row in rows:
                if row.error:
                    raise ValueError(f"task.texts: {file}: cannot be read ({row.error})")
                texts[f"{file.stem}-{row.line}"] = row.data["context"]
        return texts

    def samples(self, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
        """A stretch of each length, then the next; each prefix is a fair smaller run.

        Raises
        ------
        ValueError
            no text has as many tokens as a length needs.
        """
        begin = raw_ids("", tokenizer)
        tokens = {
            name: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for name, text in self.texts.items()
        }
        for index in range(self.count):
            for length in self.lengths:
                size = length - len(begin) + self.steps + 1
                fitting = [name for name, ids in sorted(tokens.items()) if len(ids) >= size]
                if not fitting:
                    most = max(map(len, tokens.values()))
                    raise ValueError(
                        f"task.lengths={show(self.lengths)}: a prompt of {length} tokens and"
                        f" {self.steps} steps take {size} tokens of a text, and the longest has"
                        f" {most}; choose shorter ones or other texts"
                    )
                random.Random(f"fidelity/{seed}/{length}").shuffle(fitting)
                yield self._sample(
                    fitting[index % len(fitting)], index, length, size, tokens, begin, seed
                )

    def _sample(
        self,
        text: str,
        index: int,
        length: int,
        size: int,
        tokens: dict[str, list[int]],
        begin: list[int],
        seed: int,
    ) -> Sample:
        ids = tokens[text]
        first = random.Random(f"fidelity/{seed}/{length}/{index}").randint(0, len(ids) - size)
        stretch = ids[first : first + size]
        end = length - len(begin)
        return Sample(
            id=f"fidelity-{length}-{index}",
            prompt="",
            answers=(),
            max_new_tokens=self.steps + 1,
            group=str(length),
            meta={"length": length, "text": text, "first": first},
            forced=ForcedOutput([*begin, *stretch[:end]], stretch[end:]),
        )

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Share of steps whose top token is full attention's."""
        theirs, ours = sample.answers[0].split(), output.split()
        same = sum(expected == other for expected, other in zip(theirs, ours, strict=True))
        return {"agreement": same / len(theirs)}
