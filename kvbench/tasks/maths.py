"""Mathematics with an answer in a box: the 500 problems of MATH500, and AIME's thirty of a year.

A prompt is a problem and the wish to reason step by step and to box the answer. The answer is read
and compared by math-verify (https://github.com/huggingface/Math-Verify), from the whole output:
what is in the last boxes, what the final answer is said to be, else the last formula or number,
equal as text or as an expression of sympy's. Problems come from the hub, or from the files that
R-KV and others keep.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from kvbench.tasks import Sample
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, HubFile, LocalFile, local_or_hub

Variant = Literal["chat", "rkv"]

_STRINGS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("maths.yaml").read_text(encoding="utf-8")
)
PATIENCE = 30  # seconds for reading, and for comparing, an answer: sympy may never end

MATH500 = (
    HubFile("HuggingFaceH4/MATH-500", "test.jsonl", megabytes=0.5, published=500),
    ("test.jsonl", "math.jsonl"),
)
AIME = {
    2024: (
        HubFile(
            "HuggingFaceH4/aime_2024",
            "data/train-00000-of-00001.parquet",
            megabytes=0.1,
            published=30,
        ),
        ("aime24.jsonl", "aime24/test.jsonl"),
    ),
    2025: (
        HubFile("math-ai/aime25", "test.jsonl", megabytes=0.1, published=30),
        ("aime25.jsonl", "aime25/test.jsonl"),
    ),
}


class BoxedAnswers(TableTask):
    """Problems of one or several files, a file a group.

    Right if math-verify finds the answer equal.

    Attributes
    ----------
    sources
        the files.
    notes
        the versions of what grades.
    """

    metric = "accuracy"
    fields = {"problem": str, "answer": (str, int)}

    def __init__(
        self,
        name: str,
        files: dict[str, LocalFile | HubFile],
        variant: Variant,
        max_new_tokens: int,
    ) -> None:
        """Check the options, and that answers can be graded."""
        if variant not in get_args(Variant):
            raise ValueError(f"task.variant={variant}: one of {', '.join(get_args(Variant))}")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                f"task={name}: math-verify grades the answers; pip install 'kvbench[math]'"
            )
        super().__init__(files, max_new_tokens)
        self.name, self.variant = name, variant
        self.notes = {"grader": f"math-verify {version('math-verify')}, sympy {version('sympy')}"}

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Right or wrong."""
        return {"accuracy": float(equal(sample.answers[0], output))}

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        answer = data["answer"]
        return (
            ""
            if str(answer).strip() and not isinstance(answer, bool)
            else "field answer: no formula and no number"
        )

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A problem."""
        strings, level = _STRINGS[self.variant], row.data.get("level")
        question = row.data["problem"] + strings["after"]
        return Sample(
            id=id,
            prompt=strings["before"] + question,
            answers=(str(row.data["answer"]),),
            max_new_tokens=self.max_new_tokens,
            question=question,
            group=group,
            meta={} if level is None else {"level": level},
            chat=self.variant == "chat",
        )


class Math500(BoxedAnswers):
    """MATH500: 500 problems of the MATH benchmark's test split (Lightman et al. 2023)."""

    def __init__(
        self, variant: Variant = "chat", max_new_tokens: int = 32768, data_dir: str | None = None
    ) -> None:
        """Check the options.

        Parameters
        ----------
        variant
            "chat", or "rkv", R-KV's raw prompt.
        max_new_tokens
            tokens to generate at most.
        data_dir
            folder of test.jsonl or math.jsonl; None: the hub's copy.
        """
        hub_file, names = MATH500
        super().__init__(
            "math500", {"": local_or_hub(data_dir, hub_file, *names)}, variant, max_new_tokens
        )


class Aime(BoxedAnswers):
    """The American Invitational Mathematics Examination: thirty problems a year, answers to 999."""

    def __init__(
        self,
        years: Sequence[int] = (2025,),
        variant: Variant = "chat",
        max_new_tokens: int = 32768,
        data_dir: str | None = None,
    ) -> None:
        """Check the options.

        Parameters
        ----------
        years
            of 2024 and 2025, a group each.
        variant
            "chat", or "rkv", R-KV's raw prompt.
        max_new_tokens
            tokens to generate at most.
        data_dir
            folder of aime24.jsonl and aime25.jsonl, or of aime25/test.jsonl; None: the hub's
            copies.
        """
        if (
            isinstance(years, str)
            or not years
            or len(set(years)) < len(years)
            or not set(years) <= set(AIME)
        ):
            raise ValueError(
                f"task.years={years}: a list of different ones of {', '.join(map(str, AIME))}"
            )
        files = {str(year): local_or_hub(data_dir, AIME[year][0], *AIME[year][1]) for year in years}
        super().__init__("aime", files, variant, max_new_tokens)


def equal(gold: str, output: str) -> bool:
    """Whether math-verify finds the gold answer in an output, which it reads as a whole."""
    from math_verify import parse, verify

    expected, answer = (
        parse(text, parsing_timeout=PATIENCE) for text in (f"\\boxed{{{gold}}}", output)
    )
    return bool(verify(expected, answer, timeout_seconds=PATIENCE))
