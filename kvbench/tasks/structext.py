"""StrucText-Eval (Gu et al. 2024): questions about structured texts, which rules have made.

CSV, JSON, LaTeX, Markdown, Org, trees, XML and YAML: what stands somewhere, which path leads there,
how deep a tree is. Prompts are those that the repository's own script writes, scores those of its
evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.tasks import Sample
from kvbench.tasks.metrics import rouge_l
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, user_file

FILE = "evaluate_dataset.jsonl"
INFO_FIELDS = {"few_shot_num", "rule_hint", "type", "task", "depth", "width"}  # of info
LEAST = 0.75  # a lower ROUGE-L counts as 0


class StrucText(TableTask):
    """The questions with so many worked examples, with or without the rule to follow.

    A language is a group.

    Attributes
    ----------
    sources
        the file.
    """

    name = "structext"
    metric = "score"
    fields = {"q": str, "a": str, "info": dict}

    def __init__(
        self,
        shots: int = 0,
        hint: bool = False,
        max_new_tokens: int = 512,
        data_dir: str | None = None,
    ) -> None:
        """Check the options.

        Parameters
        ----------
        shots
            worked examples in a prompt.
        hint
            the prompt says how the answer is found.
        max_new_tokens
            tokens to generate at most; officially what the model's server allows.
        data_dir
            folder of evaluate_dataset.jsonl.
        """
        where = (
            "as Evaluation/generate_dataset.py of the repository MikeGu721/StrucText-Eval writes it"
        )
        super().__init__({"": user_file(data_dir, FILE, where)}, max_new_tokens)
        self.shots, self.hint = shots, hint

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """ROUGE-L, or 0 below `LEAST`, and whether the answer is the very text."""
        # The official script hands over the answer as what is judged, the output as what it is
        # judged by.
        similar = rouge_l(sample.answers[0], output)
        return {
            "score": similar * (similar >= LEAST),
            "exact": float(output.strip() == sample.answers[0].strip()),
        }

    def read(self) -> list[tuple[str, DataRow]]:
        """The questions that are asked for, and bad rows.

        Raises
        ------
        ValueError
            the file has none, or cannot be had.
        """
        options = {"few_shot_num": self.shots, "rule_hint": self.hint}
        chosen = [
            (group, row)
            for group, row in super().read()
            if row.error or options.items() <= row.data["info"].items()
        ]
        if not chosen:
            label = self.files[""].label
            raise ValueError(
                f"task.shots={self.shots}: {label} has no such prompts with task.hint={self.hint}"
            )
        return chosen

    def group_of(self, file: str, data: Mapping[str, Any]) -> str:
        """The language of its text."""
        info = data.get("info")
        return str(info.get("type", "")) if isinstance(info, dict) else ""

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        lacking = sorted(INFO_FIELDS - data["info"].keys())
        return f"field info: no {lacking[0]}" if lacking else ""

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A question."""
        info = row.data["info"]
        return Sample(
            id=id,
            prompt=row.data["q"],
            answers=(row.data["a"],),
            max_new_tokens=self.max_new_tokens,
            group=group,
            meta={key: info[key] for key in ("task", "depth", "width")},
            chat=True,
        )
