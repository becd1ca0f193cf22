"""GSM8K: grade-school word problems after worked examples, in two published set-ups.

`wei8` is lm-eval's `gsm8k_cot`: eight examples of Wei et al. `pqcache` is the script of PQCache,
which IceCache runs too: ten examples from a file without a licence, so the user names it. Both are
raw prompts, as published: without `protocol.chat=on` no chat template is used. The problems are the
1,319 of the test split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from kvbench.tasks import Sample
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, HubFile, LocalFile, local_or_hub

Variant = Literal["wei8", "pqcache"]

_STRINGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("gsm8k.yaml").read_text(encoding="utf-8")
)
HUB = HubFile("openai/gsm8k", "main/test-00000-of-00001.parquet", megabytes=0.4, published=1319)
NEW_TOKENS = 256

# lm-eval's two patterns. STRICT takes one character more than the number, so of an output that ends
# right after it the last digit is lost; FLEXIBLE takes more than numbers, such as "...". Both are
# kept: they are the benchmark.
STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")

GOLD = re.compile(r"-?\$?[\d,]*\.?\d+")

# PQCache's `\d*\.?\d+`, with a sign, which it loses on both sides: -3 would be as good as 3. A
# hyphen after a digit or a word is none ("5-7", "x-7").
NUMBER = re.compile(r"(?P<sign>(?<![\w.)])-)?\$?(?P<digits>\d*\.?\d+)")


class Gsm8k(TableTask):
    """The test split in a shuffled order, which the seed decides.

    `wei8` gives the scores "flexible", the last number in the output, and "strict", the one after
    "The answer is". The main one is flexible. It asks for the result and not for its wording, as
    the scripts of KV-cache papers do (PQCache's and IceCache's take the last number), and strict
    misreads an output that ends right after its number. `pqcache` gives "accuracy", equality of the
    last numbers as floats.

    Attributes
    ----------
    sources
        the problems, and PQCache's examples.
    """

    name = "gsm8k"
    fields = {"question": str, "answer": str}

    def __init__(
        self, variant: Variant = "wei8", exemplars: str | None = None, data_dir: str | None = None
    ) -> None:
        """Check the options.

        Parameters
        ----------
        variant
            "wei8" or "pqcache".
        exemplars
            file of PQCache's worked examples, which end one newline before "Question: ".
        data_dir
            folder of test.jsonl; None: the hub's copy.
        """
        if variant not in get_args(Variant):
            raise ValueError(f"task.variant={variant}: one of {', '.join(get_args(Variant))}")
        if variant == "pqcache" and exemplars is None:
            raise ValueError(
                "task.exemplars=null: task.variant=pqcache needs the file of its worked examples, "
                "GSM8k/gsm8k_prompt_formal.txt of the repository HugoZHL/PQCache"
            )
        if variant == "wei8" and exemplars is not None:
            raise ValueError(
                f"task.exemplars={exemplars}: task.variant=wei8 brings its own; use null"
            )
        self.variant = variant
        self.metric = "flexible" if variant == "wei8" else "accuracy"
        self._strings = _STRINGS[variant]
        super().__init__({"": local_or_hub(data_dir, HUB, "test.jsonl")}, NEW_TOKENS)
        self._exemplars = (
            None
            if exemplars is None
            else LocalFile(Path(str(exemplars)).expanduser(), "task.exemplars")
        )
        self.sources = tuple(
            file for file in (*self.files.values(), self._exemplars) if file is not None
        )

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Right or wrong, by what stands before the first stop text."""
        text = before_any(self._strings["stop"], output)
        gold = sample.answers[0]
        if self.variant == "pqcache":
            number = last_number(text)
            return {"accuracy": float(number is not None and number == last_number(gold))}
        return {name: float(plain(find(text)) == plain(gold)) for name, find in EXTRACTIONS.items()}

    @functools.cached_property
    def _examples(self) -> str:
        """The prompt up to the question."""
        separator: str = self._strings["separator"]
        if self._exemplars is None:
            template = self._strings["question"]
            return "".join(
                f"{template.format(question=question)} {answer}{separator}"
                for question, answer in self._strings["exemplars"]
            )
        try:
            text = self._exemplars.path().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"task.exemplars: {self._exemplars.file}: not a text file ({error})"
            ) from error
        if not text.startswith("Question: "):
            raise ValueError(
                f'task.exemplars: {self._exemplars.file}: expected worked examples, "Question: ..."'
                " first"
            )
        return text + separator

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        return "" if gold_of(data["answer"]) else 'field answer: no number after "####"'

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A problem; its id counts from 0, as lm-eval does."""
        question = self._strings["question"].format(question=row.data["question"])
        return Sample(
            id=id,
            prompt=self._examples + question,
            answers=(gold_of(row.data["answer"]),),
            max_new_tokens=self.max_new_tokens,
            question=question,
            stop=tuple(self._strings["stop"]),
        )


def gold_of(solution: str) -> str:
    """The number after a solution's last "####", or "" where something else is there, too."""
    if "####" not in solution:
        return ""
    gold = solution.rpartition("####")[2].strip()
    return gold if GOLD.fullmatch(gold) else ""


def before_any(stops: Iterable[str], text: str) -> str:
    """`text` up to the first of `stops` in it."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def strict(text: str) -> str:
    """lm-eval's strict-match: the number after the first "The answer is", or ""."""
    match = STRICT.search(text)
    return match[1] if match else ""


def flexible(text: str) -> str:
    """lm-eval's flexible-extract: the last number, or ""."""
    matches = [match.group() for match in FLEXIBLE.finditer(text)]
    return matches[-1] if matches else ""


EXTRACTIONS = {"flexible": flexible, "strict": strict}


def plain(number: str) -> str:
    """A number as lm-eval compares it, as text.

    Commas, dollar signs and one last full stop are left out, so 18.00 is not 18.
    """
    return number.replace(",", "").replace("$", "").removesuffix(".")


def last_number(text: str) -> float | None:
    """PQCache's reading: the last number, commas dropped, or None."""
    matches = list(NUMBER.finditer(text.replace(",", "")))
    if not matches:
        return None
    value = float(matches[-1]["digits"])
    return -value if matches[-1]["sign"] else value
