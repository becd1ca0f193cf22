"""LongBench v2: 503 questions with four choices about texts of 8k to 2M words.

Prompts, cuts and the reading of an answer follow THUDM/LongBench, `pred.py` and `result.py`,
without its chain of thought, which asks a second time. The score is that of all questions together;
those of the easy and the hard, and of short, medium and long texts, stand beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.tasks import Sample
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, HubFile, local_or_hub

HUB = HubFile("zai-org/LongBench-v2", "data.json", megabytes=465, published=503)

_STRINGS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("longbench_v2.yaml").read_text(encoding="utf-8")
)
NEW_TOKENS = 128
PLACES = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}
KINDS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
ANSWERS = (
    re.compile(r"The correct answer is \(([A-D])\)"),
    re.compile(r"The correct answer is ([A-D])"),
)


class LongBenchV2(TableTask):
    """All questions.

    Attributes
    ----------
    max_length
        tokens of the longest raw prompt, whose middle is cut out; None: what the model's window has
        room for.
    sources
        the file.
    """

    name = "longbench_v2"
    metric = "accuracy"
    fields = dict.fromkeys(("_id", *PLACES.values(), "answer", *KINDS), str)

    def __init__(self, max_length: int | None = 120_000, data_dir: str | None = None) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 2):
            raise ValueError(
                f"task.max_length={max_length}: a number of tokens, 2 or more, or null"
            )
        super().__init__({"": local_or_hub(data_dir, HUB, "data.json")}, NEW_TOKENS)
        self.max_length = max_length

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Right or wrong, once more by the question's difficulty and the text's length."""
        right = float(answer_in(output) == sample.answers[0])
        return {"accuracy": right, **{sample.meta[kind]: right for kind in KINDS}}

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        valid_values = KINDS | {"answer": ("A", "B", "C", "D")}
        wrong = (field for field, names in valid_values.items() if data[field] not in names)
        return next(
            (f"field {field}: expected one of {', '.join(valid_values[field])}" for field in wrong),
            "",
        )

    def read(self) -> list[tuple[str, DataRow]]:
        """See `TableTask`; of questions with one id the first counts."""
        previous_ids, rows = set[str](), list[tuple[str, DataRow]]()
        for group, row in super().read():
            key = str(row.data.get("_id"))
            if not row.error and key in previous_ids:
                row = row._replace(
                    error=(
                        f"{self.files[group].label}, line {row.line}: field _id: {key} was there"
                        " before"
                    )
                )
            previous_ids.add(key)
            rows.append((group, row))
        return rows

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A question, under the id that it has in the data."""
        data = row.data
        question = _filled(_STRINGS["question"], data)
        return Sample(
            id=f"longbench_v2-{data['_id']}",
            prompt=_filled(_STRINGS["before"], data) + question,
            answers=(data["answer"],),
            max_new_tokens=self.max_new_tokens,
            question=question,
            meta={kind: data[kind] for kind in KINDS},
            chat=True,
            truncate=True,
            max_length=self.max_length,
        )


def _filled(text: str, data: dict[str, str]) -> str:
    """The text with a question's parts in it.

    As officially one after the other, so that a part may hold a place.
    """
    for place, field in PLACES.items():
        text = text.replace(place, data[field].strip())
    return text


def answer_in(output: str) -> str | None:
    """The letter that an output says is the correct answer, or None."""
    plain = output.strip().replace("*", "")
    return next((match[1] for pattern in ANSWERS if (match := pattern.search(plain))), None)
