"""Two benchmarks by the name of LongGenBench, both of one short prompt and a very long output.

`longgenbench` is mozhu621's (Wu et al. 2024), which IceCache and RACC run: diaries, menus,
skyscrapers and blocks of a town, part by part. What is counted here is how many of the parts there
are, its completion rate. Whether a part is about the right thing, a judge decides, another model:
`kvbench judge` writes the questions and reads its replies.

`longgenbench_gsm8k` is that of Liu et al. 2024 as SCOPE runs it: thirty or sixty problems of GSM8K
in one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from kvbench.tasks import Sample
from kvbench.tasks.rows import TableTask
from kvbench.tasks.sources import DataRow, user_file

_STRINGS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("longgenbench.yaml").read_text(encoding="utf-8")
)

Size = Literal["short", "long"]
Variant = Literal["plain", "llama3"]

# of a part's number; what goes on with digits is no part, and may be longer than Python reads
MOST_DIGITS = 9
CHECKS = ("once", "range", "periodic")

PROBLEMS = {30: ("gsm8k_30.jsonl", 43), 60: ("gsm8k_60.jsonl", 21)}  # the file, and its rows
ASKING = "Following Question:"  # begins the problems of a prompt, after its worked examples
GOLD = re.compile(r"####\s*(\d+)")
# As officially without a sign, a comma or a fraction, on both sides; an answer without these words
# lends its place to the next one that has them.
BEGINS, ENDS = re.compile(r"Answer_\d+:"), re.compile(r"answer is (\d+)")


def answers_in(output: str) -> list[str]:
    """The numbers of an output's answers: after each "Answer_1:" the first after "answer is"."""
    answers, place = [], 0
    while (start := BEGINS.search(output, place)) and (end := ENDS.search(output, start.end())):
        answers.append(end[1])
        place = end.end()
    return answers


class LongGenBench(TableTask):
    """mozhu621's: four scenarios of 100 prompts, a group each.

    Prompts are raw and end with the output's beginning.

    Attributes
    ----------
    sources
        the file.
    """

    name = "longgenbench"
    metric = "completion"
    fields = {
        "prompt": str,
        "type": str,
        "prefix": str,
        "number": int,
        **{f"checks_{kind}": dict for kind in CHECKS},
    }

    def __init__(
        self, size: Size = "short", max_new_tokens: int = 16000, data_dir: str | None = None
    ) -> None:
        """Check the options.

        Parameters
        ----------
        size
            "short", of 52 or 100 parts, or "long", of 300 to 365.
        max_new_tokens
            tokens to generate at most; officially 16,000 of short ones and 32,000 of long ones.
        data_dir
            folder of Dataset_short.json and Dataset_long.json.
        """
        if size not in get_args(Size):
            raise ValueError(f"task.size={size}: one of {', '.join(get_args(Size))}")
        file = user_file(
            data_dir, f"Dataset_{size}.json", "Dataset of the repository mozhu621/LongGenBench", 400
        )
        super().__init__({"": file}, max_new_tokens)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The share of the parts 1 to N that the output has."""
        there, number = parts(sample.meta, output), sample.meta["number"]
        return {"completion": sum(1 <= part <= number for part in there) / number}

    def questions(self, sample: Sample, output: str) -> dict[str, str]:
        """What a judge is asked, by the check's kind and its part's number.

        "" where the output has no such part.
        """
        there, ask = parts(sample.meta, output), _STRINGS["blocks"]["judge"]
        return {
            f"{kind}/{part}": ask.format(block=there[int(part)], event=event)
            if int(part) in there
            else ""
            for kind in CHECKS
            for part, event in sample.meta[f"checks_{kind}"].items()
        }

    def group_of(self, file: str, data: Mapping[str, Any]) -> str:
        """Its scenario."""
        return str(data.get("type", ""))

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        if data["number"] < 1:
            return "field number: expected at least 1"
        wrong = (
            kind for kind in CHECKS if not all(part.isdecimal() for part in data[f"checks_{kind}"])
        )
        return next((f"field checks_{kind}: expected numbers of parts" for kind in wrong), "")

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A prompt."""
        data = row.data
        return Sample(
            id=id,
            prompt=data["prompt"],
            answers=(),
            max_new_tokens=self.max_new_tokens,
            group=group,
            meta={field: data[field] for field in self.fields if field != "prompt"},
            stop=(_STRINGS["blocks"]["stop"],),
        )


def parts(meta: Mapping[str, Any], output: str) -> dict[int, str]:
    """The parts of an output by their numbers, of each the first.

    A part has its number after the first mention of its type, as in "Floor 7".
    """
    strings = _STRINGS["blocks"]
    blocks: dict[int, str] = {}
    for block in (meta["prefix"] + output.partition(strings["stop"])[0]).split(
        strings["separator"]
    ):
        named = re.search(rf"{re.escape(meta['type'])} (\d+)", block)
        if named and len(named[1]) <= MOST_DIGITS:
            blocks.setdefault(int(named[1]), block)
    return blocks


class ManyProblems(TableTask):
    """Problems of GSM8K, many in one prompt, as SCOPE runs them.

    The share of those with the right number.

    Attributes
    ----------
    sources
        the file.
    """

    name = "longgenbench_gsm8k"
    metric = "accuracy"
    fields = {"prompt": str, "answers": list}

    def __init__(
        self,
        problems: int = 30,
        variant: Variant = "llama3",
        max_new_tokens: int = 4096,
        data_dir: str | None = None,
    ) -> None:
        """Check the options.

        Parameters
        ----------
        problems
            in one prompt, 30 or 60.
        variant
            "llama3", the task in the marks that SCOPE writes for Llama 3, or "plain", as for
            others.
        max_new_tokens
            tokens to generate at most; officially 4,096 for 30 problems and 7,950 for 60.
        data_dir
            folder of gsm8k_30.jsonl and gsm8k_60.jsonl.
        """
        if problems not in PROBLEMS:
            raise ValueError(f"task.problems={problems}: one of {', '.join(map(str, PROBLEMS))}")
        if variant not in get_args(Variant):
            raise ValueError(f"task.variant={variant}: one of {', '.join(get_args(Variant))}")
        name, published = PROBLEMS[problems]
        where = "data/LongGenBench/gsm8k of the repository Linking-ai/SCOPE"
        super().__init__({"": user_file(data_dir, name, where, published)}, max_new_tokens)
        self.variant = variant

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The share of the problems whose number the output has in their place."""
        pairs = zip(sample.answers, answers_in(output), strict=False)
        return {"accuracy": sum(gold == answer for gold, answer in pairs) / len(sample.answers)}

    def unfit(self, data: Mapping[str, Any]) -> str:
        """See `TableTask`."""
        return "" if data["answers"] else "field answers: empty"

    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """A prompt with all its problems."""
        golds = [GOLD.search(str(answer)) for answer in row.data["answers"]]
        strings, prompt = _STRINGS["gsm8k"], row.data["prompt"]
        asked = prompt.rfind(ASKING)
        return Sample(
            id=id,
            prompt=strings[self.variant].format(task=strings["task"]) + prompt,
            # "": none with a number, and never right
            answers=tuple(gold[1] if gold else "" for gold in golds),
            max_new_tokens=self.max_new_tokens,
            question=prompt[asked:] if asked >= 0 else "",
        )
