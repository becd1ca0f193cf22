"""LongBench v1's English subsets: questions, summaries, few-shot learning, retrieval, code.

Prompts, chat templates, cuts and scores follow THUDM/LongBench, `LongBench/pred.py` and `eval.py`.
The table's number is the unweighted mean of the subsets' scores. Data is read from the hub's
archive or from a folder of the user's; the loading script that lies beside the archive is never
run, and nothing is unpacked.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_args

import yaml

from kvbench.tasks import Sample, Task, metrics
from kvbench.tasks.rows import check_subsets, in_turn
from kvbench.tasks.sources import DataFile, DataRow, HubFile, LocalFile, read_jsonl, say_rows

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

ARCHIVE = "data.zip"
HUB = HubFile("zai-org/LongBench", ARCHIVE, megabytes=114)
PUBLISHED = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}  # rows; of all others 200

FIELDS = {"input": str, "context": str, "answers": list, "length": int}


@dataclass(frozen=True)
class LongBenchSubset:
    """What the official scripts know of one subset.

    Attributes
    ----------
    prompt
        with `{context}` and, after it, perhaps `{input}`.
    metric
        a function of `metrics`.
    chat
        chat models get their template.
    first_line
        only the first line of an output is scored, empty ones before it left out.
    end_token
        what ends an output besides the model's own end.
    """

    prompt: str
    metric: str
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    end_token: str = ""

    @property
    def classifies(self) -> bool:
        """Whether an output is scored against all classes."""
        return self.metric == "classification"

    def asking(self, entry: str) -> str:
        """The prompt after the context."""
        return self.prompt.partition("{context}")[2].format(input=entry)

    def metric_functions(self, meta: Mapping[str, Any]) -> dict[str, Callable[[str, str], float]]:
        """Its metrics by name: one, but for code, which has one for each ratio."""
        metric: Callable[..., float] = getattr(metrics, self.metric)
        if self.metric == "code_sim":
            ratios = get_args(metrics.Ratio)
            return {f"code_sim_{ratio}": functools.partial(metric, ratio=ratio) for ratio in ratios}
        if self.classifies:
            metric = functools.partial(metric, classes=meta["classes"])
        return {self.metric: metric}

    def before(self) -> str:
        """The prompt before the context."""
        return self.prompt.partition("{context}")[0]


SUBSETS: dict[str, LongBenchSubset] = {
    name: LongBenchSubset(**entry)
    for name, entry in yaml.safe_load(
        Path(__file__).with_name("data").joinpath("longbench.yaml").read_text(encoding="utf-8")
    ).items()
}

# Where one metric has several readings, the one that is meant.
ROUGE_NOTE = (
    "as rouge 1.0.1; sentences too long for its recursion have their score, there they get 0"
)
CODE_NOTES: dict[metrics.Ratio, str] = {
    "difflib": "as fuzzywuzzy without Levenshtein, by Python's difflib",
    "levenshtein": "as fuzzywuzzy with Levenshtein",
}


class LongBench(Task):
    """All samples of some subsets.

    Attributes
    ----------
    subsets
        names, of `SUBSETS`.
    data_dir
        a folder with `<subset>.jsonl` files or the hub's `data.zip`; None: the hub.
    max_length
        tokens of the longest raw prompt, whose middle is cut out; None: what the model's window has
        room for.
    code_sim
        which ratio of `metrics.code_sim` is the score; the other stands beside it.
    sources
        the files that hold the subsets.
    notes
        what the metrics in use are equal to, where there is a choice.
    """

    name = "longbench"
    metric = "score"
    stored = True

    def __init__(
        self,
        subsets: Sequence[str] = tuple(SUBSETS),
        data_dir: str | None = None,
        max_length: int | None = None,
        code_sim: metrics.Ratio = "difflib",
    ) -> None:
        check_subsets(subsets, SUBSETS)
        if max_length is not None and (type(max_length) is not int or max_length < 2):
            raise ValueError(
                f"task.max_length={max_length}: a number of tokens, 2 or more, or null"
            )
        if code_sim not in get_args(metrics.Ratio):
            raise ValueError(
                f"task.code_sim={code_sim}: one of {', '.join(get_args(metrics.Ratio))}"
            )
        self.subsets = tuple(subsets)
        self.max_length = max_length
        self.code_sim = code_sim
        self.data_dir = None if data_dir is None else Path(str(data_dir)).expanduser()
        self.sources = tuple(dict.fromkeys(map(self._source, self.subsets)))
        used = {SUBSETS[name].metric for name in self.subsets}
        equal_to = {"rouge_l": ROUGE_NOTE, "code_sim": CODE_NOTES[code_sim]}
        self.notes = {metric: note for metric, note in equal_to.items() if metric in used}

    def __len__(self) -> int:
        return sum(len(self._rows(name)) for name in self.subsets)

    def samples(self, tokenizer: Tokenizer | None, seed: int) -> Iterator[Sample]:
        """One sample of every subset, then the next.

        In each subset shuffled by the seed, whatever the others are.

        A bad line is a sample with an error. An empty context is none: the official script asks all
        the same.

        Raises
        ------
        ValueError
            a subset's file cannot be read.
        """
        return in_turn(self.name, seed, {name: self._samples(name) for name in self.subsets})

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The best score over the answers, as "score" and under its metric's name.

        Of code, by both ratios.
        """
        subset = SUBSETS[sample.group]
        # A matter of scoring alone: ended at a newline, a reply that begins with one would be
        # empty.
        text = output.lstrip("\n").split("\n")[0] if subset.first_line else output
        best = {
            name: max((metric(text, answer) for answer in sample.answers), default=0.0)
            for name, metric in subset.metric_functions(sample.meta).items()
        }
        main = f"code_sim_{self.code_sim}" if subset.metric == "code_sim" else subset.metric
        return {self.metric: best[main], **best}

    def _source(self, name: str) -> DataFile:
        if self.data_dir is None:
            return HUB
        file, archive = self.data_dir / f"{name}.jsonl", self.data_dir / ARCHIVE
        there = archive if archive.is_file() and not file.is_file() else file
        return LocalFile(there, "task.data_dir", tuple(SUBSETS))

    def _rows(self, name: str) -> list[DataRow]:
        source = self._source(name)
        path = source.path()
        fields = FIELDS | ({"all_classes": list} if SUBSETS[name].classifies else {})
        try:
            with _opened(path, name) as lines:
                rows = list(read_jsonl(f"{name}.jsonl", lines, fields))
        except (OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"task.data_dir: {path}: cannot be read ({error})") from error
        if not rows:
            raise ValueError(f"task.data_dir: {path}: {name}.jsonl is empty")
        say_rows(f"{name}.jsonl", len(rows), PUBLISHED.get(name, 200))
        return rows

    def _samples(self, name: str) -> list[Sample]:
        """All samples of a subset, in the order of its file."""
        subset = SUBSETS[name]
        rows = [row._replace(error=unfit(f"{name}.jsonl", row, subset)) for row in self._rows(name)]
        meta: dict[str, Any] = {"dataset": name}
        if subset.classifies:
            # As the official script, which scores every row with the classes of the last one.
            meta["classes"] = next(
                (row.data["all_classes"] for row in reversed(rows) if not row.error), []
            )
        keys = _unique(f"{name}-{row.data.get('_id') or row.line}" for row in rows)
        return [self._sample(key, name, row, meta) for key, row in zip(keys, rows, strict=True)]

    def _sample(self, key: str, name: str, row: DataRow, meta: dict[str, Any]) -> Sample:
        subset, data = SUBSETS[name], row.data
        if row.error:
            return Sample(key, "", (), subset.new_tokens, group=name, meta=meta, error=row.error)
        question = subset.asking(data["input"])
        return Sample(
            id=key,
            prompt=subset.before() + data["context"] + question,
            answers=tuple(data["answers"]),
            max_new_tokens=subset.new_tokens,
            question=question,
            group=name,
            meta=meta | {"length": data["length"]},
            chat=subset.chat,
            end_token=subset.end_token,
            truncate=True,
            max_length=self.max_length,
        )


@contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The lines of a subset, in a file of its own or in the hub's archive."""
    if path.name != ARCHIVE:
        with path.open("rb") as file:
            yield file
        return
    member = f"data/{name}.jsonl"
    with zipfile.ZipFile(path) as archive:
        if member not in archive.namelist():
            raise ValueError(f"task.data_dir: {path}: has no {member}")
        with archive.open(member) as lines:
            yield lines


def unfit(label: str, row: DataRow, subset: LongBenchSubset) -> str:
    """Why a line of the file `label` is no sample, or ""."""
    if row.error:
        return row.error
    answers, where = row.data["answers"], f"{label}, line {row.line}: field"
    if not answers or not _are_texts(answers):
        return f"{where} answers: expected one text or more"
    if subset.classifies and not _are_texts(row.data["all_classes"]):
        return f"{where} all_classes: expected texts"
    if subset.metric == "retrieval" and not all(map(metrics.paragraph, answers)):
        return f'{where} answers: expected "Paragraph" and a number'
    return ""


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _unique(keys: Iterable[str]) -> list[str]:
    """Keys in their order; one that was there before gets a number after it."""
    taken: dict[str, None] = {}
    for key in keys:
        number, fresh = 1, key
        while fresh in taken:
            number, fresh = number + 1, f"{key}-{number + 1}"
        taken[fresh] = None
    return list(taken)
