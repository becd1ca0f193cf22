"""RULER's samples as files: of its own scripts, for a tokenizer and length, or of the hub.

A file ends every prompt in the answer prefix, or has it in a field of its own; the set, made by
NVIDIA/kvpress, has it and the question in columns. A file's `index` is not read: for needles RULER
overwrites it by the place of the answer in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.tasks.ruler.writers import STRINGS
from kvbench.tasks.sources import HubFile, LocalFile, read_jsonl

HUB = "hub"
KEY = "task.data_dir"
REPOSITORY = "simonjegou/ruler"
MEGABYTES = {4096: 60, 8192: 120, 16384: 240}  # about, of all thirteen subsets

File = LocalFile | HubFile

_FIELDS: dict[str, type | tuple[type, ...]] = {"input": str, "outputs": list}
_COLUMNS = ["context", "question", "answer_prefix", "answer", "task"]


class Stored(NamedTuple):
    """A sample of a file, or what is wrong with its line."""

    row: int
    prompt: str = ""
    question: str = ""
    answer_prefix: str = ""
    answers: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class ValidationFile(LocalFile):
    """A file of the folder of its subset, as RULER's scripts write it."""

    @property
    def label(self) -> str:
        """The subset and the file's name, which all subsets' have."""
        return f"{self.file.parent.name}/{self.file.name}"


def source(
    data_dir: str,
    subset: str,
    lengths: Sequence[int],
    length: int,
    samples: int,
    subsets: Sequence[str] = (),
) -> File:
    """The file of a subset and a length, or the hub's file with all subsets of a length.

    In a folder it is `<length>/<subset>.jsonl`, or, of RULER's scripts,
    `<length>/data/<subset>/validation.jsonl`, also without `data`, and without the length where
    that is the only one of `lengths`. It has as many samples as are read; `subsets` are those that
    could be chosen in its place.
    """
    if data_dir == HUB:
        return HubFile(REPOSITORY, f"{length}/test-00000-of-00001.parquet", MEGABYTES[length], KEY)
    folder = Path(data_dir).expanduser()
    file = folder / str(length) / f"{subset}.jsonl"
    roots = [folder / str(length), *([folder] if len(lengths) == 1 else [])]
    written = (root / data / subset / "validation.jsonl" for root in roots for data in ("data", ""))
    validation_file = next(
        (path for path in written if path.is_file() and not file.is_file()), None
    )
    if validation_file is not None:
        return ValidationFile(validation_file, KEY, lines=samples)
    return LocalFile(file, KEY, tuple(subsets), lines=samples)


def stored(file: File, subset: str, samples: int, length: int) -> list[Stored]:
    """The first samples of a subset and a length, in the order of the file.

    Raises
    ------
    ValueError
        it has fewer, or was made for another length, or for a model's chat template.
    """
    rows = _table(file, subset) if isinstance(file, HubFile) else _lines(file, subset, length)
    chosen = list(islice(rows, samples))
    if len(chosen) < samples:
        raise ValueError(f"task.samples={samples}: {file.label} has {len(chosen)} of {subset}")
    return chosen


def family(subset: str) -> str:
    """Which of RULER's templates a subset has."""
    return {"vt": "vt", "cwe": "cwe", "fwe": "fwe"}.get(subset, subset.partition("_")[0])


def _lines(file: LocalFile, subset: str, length: int) -> Iterator[Stored]:
    fields = _FIELDS if str(length) in file.file.parts else _FIELDS | {"length": int}
    with file.path().open("rb") as lines:
        for row, line in enumerate(read_jsonl(file.label, lines, fields)):
            if line.error:
                yield Stored(row, error=line.error)
            else:
                if reason := _mismatch(line.data, subset, length if "length" in fields else None):
                    raise ValueError(f"{KEY}: {file.file}, line {line.line}: {reason}")
                prefix, outputs = line.data.get("answer_prefix", ""), line.data["outputs"]
                if error := _unfit(prefix, outputs):
                    yield Stored(row, error=f"{file.label}, line {line.line}: {error}")
                else:
                    yield _stored(row, subset, line.data["input"], prefix, outputs)


def _mismatch(data: Mapping[str, Any], subset: str, length: int | None) -> str:
    """Why a line is of another file than is asked for, or "".

    `length` where no folder's name says it.
    """
    if length is not None and not length // 2 < data["length"] <= length:
        return (
            f"field length: {data['length']}; of prompts for task.lengths=[{length}] expected more"
            " than half of it"
        )
    start = STRINGS[family(subset)]["template"].partition("{")[0].partition("\n")[0]
    before = min(
        (data["input"].partition(text)[0] for text in (start, start.replace("Some", "A", 1))),
        key=len,
    )
    if before and before != data["input"]:
        return (
            f"field input: {before[:40]!r} stands before the task; expected --model_template_type"
            " base"
        )
    return ""


def _unfit(prefix: Any, outputs: Sequence[Any]) -> str:
    """What is wrong with the fields of a line that need not be there, or hold anything.

    "" if nothing.
    """
    if not isinstance(prefix, str):
        return f"field answer_prefix: expected str, not {type(prefix).__name__}"
    if not outputs or not all(
        isinstance(output, str | int | float) and str(output).strip() for output in outputs
    ):
        return "field outputs: expected one text or number, or more, not blank"
    return ""


def _table(file: HubFile, subset: str) -> Iterator[Stored]:
    import pandas

    try:
        table = pandas.read_parquet(file.path(), columns=_COLUMNS, filters=[("task", "==", subset)])
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{KEY}={HUB}: {file.label}: {error}") from error
    for row, values in enumerate(table.to_dict("records")):
        text = values["context"] + values["question"]
        sample = _stored(row, subset, text, values["answer_prefix"], values["answer"])
        yield sample._replace(question=values["question"])


def _stored(row: int, subset: str, text: str, prefix: str, outputs: Any) -> Stored:
    if prefix:
        is_spaced = prefix[0].isspace() or text[-1:].isspace()
        prefix = prefix if is_spaced else f" {prefix}"
        prompt = text.removesuffix(prefix)
    else:
        prompt, prefix = _cut(text, subset)
    return Stored(row, prompt, _question(prompt, subset), prefix, tuple(map(str, outputs)))


def _cut(text: str, subset: str) -> tuple[str, str]:
    """Prompt and answer prefix; the latter is empty where the text does not end in one."""
    start = STRINGS[family(subset)]["answer_prefix"].partition("{")[0]
    start_of_prefix = text.rfind(start)
    if start_of_prefix < 0 or "\n" in text[start_of_prefix:]:
        return text, ""
    return text[:start_of_prefix], text[start_of_prefix:]


def _question(prompt: str, subset: str) -> str:
    """The end of a prompt that asks, or "": from where the words of RULER's question stand last."""
    asking = STRINGS[family(subset)]["question"].partition("{")[0]
    start = max(map(prompt.rfind, (asking, asking.replace("are all", "is"))))
    return prompt[start:] if start >= 0 else ""
