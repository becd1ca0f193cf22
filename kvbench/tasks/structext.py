"""StrucText-Eval (MikeGu721/StrucText-Eval, Gu et al. 2024): questions about structured texts, which rules have made.

CSV, JSON, LaTeX, Markdown, Org, trees, XML and YAML: what stands somewhere, which path leads there, how deep a tree is.
Prompts are those that the repository's own script writes, scores those of its evaluation.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvbench.tasks import Sample, Task
from kvbench.tasks.metrics import rouge_l
from kvbench.tasks.sources import Row, given_file, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "evaluate_dataset.jsonl"
FIELDS = {"q": str, "a": str, "info": dict}
ASKED = {"few_shot_num", "rule_hint", "type", "task", "depth", "width"}  # of info
LEAST = 0.75  # a lower ROUGE-L counts as 0


class StrucText(Task):
    """The questions with so many worked examples, with or without the rule to follow; a language is a group.

    Attributes:
        sources: the file.
    """

    name = "structext"
    metric = "score"
    stored = True

    def __init__(
        self, shots: int = 0, hint: bool = False, max_new_tokens: int = 512, data_dir: str | None = None
    ) -> None:
        """Check the options.

        Args:
            shots: worked examples in a prompt.
            hint: the prompt says how the answer is found.
            max_new_tokens: tokens to generate at most; officially what the model's server allows.
            data_dir: folder of evaluate_dataset.jsonl.
        """
        self.shots, self.hint, self.max_new_tokens = shots, hint, max_new_tokens
        where = "as Evaluation/generate_dataset.py of the repository MikeGu721/StrucText-Eval writes it"
        self._file = given_file(data_dir, FILE, where)
        self.sources = (self._file,)

    def __len__(self) -> int:
        return len(self._rows)

    def samples(self, tokenizer: PreTrainedTokenizerBase | None, seed: int) -> Iterator[Sample]:
        """All questions, shuffled by the seed.

        Raises:
            ValueError: the file cannot be had or read as what it should be, or has no such questions.
        """
        found = [self._sample(row) for row in self._rows]
        random.Random(f"structext/{seed}").shuffle(found)
        yield from found

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """ROUGE-L, or 0 below `LEAST`, and whether the answer is the very text."""
        # The official script hands over the answer as what is judged, the output as what it is judged by.
        similar = rouge_l(sample.answers[0], output)
        return {"score": similar * (similar >= LEAST), "exact": float(output.strip() == sample.answers[0].strip())}

    @functools.cached_property
    def _rows(self) -> list[Row]:
        found = [self._checked(row) for row in rows_of(self._file, FIELDS)]
        asked = {"few_shot_num": self.shots, "rule_hint": self.hint}
        chosen = [row for row in found if row.error or asked.items() <= row.data["info"].items()]
        if not chosen:
            raise ValueError(
                f"task.shots={self.shots}: {self._file.label} has no such prompts with task.hint={self.hint}"
            )
        return chosen

    def _checked(self, row: Row) -> Row:
        lacking = [] if row.error else sorted(ASKED - row.data["info"].keys())
        if not lacking:
            return row
        return row._replace(error=f"{self._file.label}, line {row.line}: field info: no {lacking[0]}")

    def _sample(self, row: Row) -> Sample:
        id = f"structext-{row.line - 1}"
        if row.error:
            return Sample(id, "", (), self.max_new_tokens, error=row.error)
        info = row.data["info"]
        return Sample(
            id=id,
            prompt=row.data["q"],
            answers=(row.data["a"],),
            max_new_tokens=self.max_new_tokens,
            group=info["type"],
            meta={key: info[key] for key in ("task", "depth", "width")},
            chat=True,
        )
