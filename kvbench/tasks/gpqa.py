"""GPQA-diamond: 198 questions of science with four choices, asked and scored as simple-evals does.

Its authors ask that the text appears nowhere in the open, so the data is gated and neither prompts
nor choices are stored with results: an answer is a letter. What a model writes is stored, and may
repeat a question: such results are not for publication.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import yaml

from kvbench.tasks import Sample
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, HubFile, local_or_hub

FILE = "gpqa_diamond.csv"
HUB = HubFile("Idavidrein/gpqa", FILE, megabytes=1.4, gated=True, published=198)

_STRINGS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("gpqa.yaml").read_text(encoding="utf-8")
)
LETTERS = "ABCD"
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ANSWER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


class Gpqa(TableTask):
    """All questions.

    The order of a question's choices is simple-evals' of the first of its repeats.

    Attributes
    ----------
    sources
        the file.
    """

    name = "gpqa"
    metric = "accuracy"
    secret = True
    fields = {"Question": str, **dict.fromkeys(CHOICES, (str, int, float))}

    def __init__(self, max_new_tokens: int = 32768, data_dir: str | None = None) -> None:
        """Check the options.

        Parameters
        ----------
        max_new_tokens
            tokens to generate at most.
        data_dir
            folder of gpqa_diamond.csv; None: the hub's, for which a token is needed.
        """
        super().__init__({"": local_or_hub(data_dir, HUB, FILE)}, max_new_tokens)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Whether the letter after the first "Answer:" is the right one."""
        match = ANSWER.search(output)
        # As officially: a letter in lower case is found, and is wrong.
        return {"accuracy": float(match is not None and match[1] == sample.answers[0])}

    @functools.cached_property
    def _orders(self) -> dict[int, list[int]]:
        """In which order the choices of a line stand; the seed does not change it."""
        generator = random.Random(0)
        return {row.line: generator.sample(range(4), 4) for _, row in self.rows}

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A question with its choices."""
        choices = [str(row.data[CHOICES[choice]]) for choice in self._orders[row.line]]
        question = _STRINGS["question"].format(
            question=row.data["Question"], **dict(zip(LETTERS, choices, strict=True))
        )
        return Sample(
            id=id,
            prompt=_STRINGS["before"] + question,
            answers=(LETTERS[choices.index(str(row.data[CHOICES[0]]))],),
            max_new_tokens=self.max_new_tokens,
            question=question,
            chat=True,
        )
