"""Predictions that other projects stored, scored as ours are.

They are in the files of LongBench's and RULER's own scripts.

A folder has a file a subset, `<subset>.jsonl`, one line a sample: LongBench's `pred`, `answers`,
`all_classes` and perhaps `length`, RULER's `pred` and `outputs`. `kvbench score --predictions`
shows what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kvbench.config import ConfigError, first_line, nearest
from kvbench.tasks import Sample, Task, longbench
from kvbench.tasks.ruler.task import ALL_SUBSETS, Ruler
from kvbench.tasks.sources import DataRow, read_jsonl

# RULER's scripts write the parts of a task side by side: vt-0.jsonl, vt-1.jsonl
_PART = re.compile(r"-\d+$")
# LongBench-E's, in words; each ends before its number
BINS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}


@dataclass(frozen=True)
class ScoredSubset:
    """The predictions of one subset, scored.

    Attributes
    ----------
    scores
        of each sample, 0..1 by name: "score", and its metric's; of code there are two.
    lengths
        words of each sample's text, for LongBench-E's bins; empty unless all samples have theirs.
    empty
        predictions without a letter.
    """

    name: str
    scores: list[dict[str, float]]
    lengths: list[int]
    empty: int

    @property
    def metrics(self) -> list[str]:
        """Names of its metrics, the one that is the score first."""
        return list(self.scores[0])[1:]

    @property
    def by_length(self) -> dict[str, float]:
        """The mean score, 0-100, of each of LongBench-E's bins that has samples."""
        bins: dict[str, list[float]] = {name: [] for name in BINS}
        for length, scores in zip(self.lengths, self.scores, strict=False):
            name = next(name for name, end in BINS.items() if end is None or length < end)
            bins[name].append(scores["score"])
        return {name: 100 * sum(values) / len(values) for name, values in bins.items() if values}


@dataclass(frozen=True)
class Predictions:
    """A folder of predictions, scored.

    Attributes
    ----------
    benchmark
        whose they are.
    subsets
        those of the benchmark that are there, in its order.
    missing
        those that are not.
    others
        files that are none of its subsets, and are not scored.
    """

    benchmark: Benchmark
    folder: Path
    subsets: list[ScoredSubset]
    missing: list[str]
    others: list[str]

    def means(self) -> dict[str, float]:
        """Plain means over subsets, 0-100: of scores, and of a second metric where one has it."""
        second = {name for subset in self.subsets for name in subset.metrics[1:]}
        return {"score": self._mean("score"), **{name: self._mean(name) for name in sorted(second)}}

    def _mean(self, metric: str) -> float:
        means = [
            sum(scores.get(metric, scores["score"]) for scores in subset.scores)
            / len(subset.scores)
            for subset in self.subsets
        ]
        return 100 * sum(means) / len(means)


@dataclass(frozen=True)
class Benchmark:
    """Whose predictions they are.

    Attributes
    ----------
    title
        what messages call its subsets.
    names
        of its subsets.
    answers
        the field with a sample's answers.
    task
        scores a subset.
    in_parts
        a subset may be several files, vt-0.jsonl and vt-1.jsonl.
    """

    title: str
    names: Sequence[str]
    answers: str
    task: Callable[[str], Task]
    in_parts: bool = False

    def scored(self, name: str, paths: Iterable[Path]) -> ScoredSubset:
        """The predictions of a subset's files, scored.

        Raises
        ------
        ConfigError
            a file that cannot be read or a line that is none; names file and line.
        """
        rows = list(chain.from_iterable(self._rows(name, path) for path in paths))
        # The last line's classes serve for all, as officially.
        meta = {"classes": rows[-1].data.get("all_classes")}
        task = self.task(name)
        scores = []
        for row in rows:
            answers = tuple(row.data[self.answers])
            sample = Sample(str(row.line), "", answers, 0, group=name, meta=meta)
            scores.append(task.score(sample, row.data["pred"]))
        # RULER's length is of another kind.
        lengths = [
            length
            for row in rows
            if type(length := row.data.get("length")) is int and name in longbench.SUBSETS
        ]
        empty = sum(not row.data["pred"].strip() for row in rows)
        return ScoredSubset(name, scores, lengths if len(lengths) == len(rows) else [], empty)

    def _rows(self, name: str, path: Path) -> list[DataRow]:
        """The lines of a file, each as its benchmark writes it."""
        subset = longbench.SUBSETS.get(name)
        fields: dict[str, type] = {"pred": str, self.answers: list}
        if subset and subset.classifies:
            fields["all_classes"] = list
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"{path}: no file; expected one of predictions, a line each")
        try:
            with path.open("rb") as lines:
                rows = list(read_jsonl(str(path), lines, fields))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({first_line(error)})") from error
        if not rows:
            raise ConfigError(f"{path}: empty")
        for row in rows:
            if (
                reason := longbench.unfit(str(path), row, subset)
                if subset
                else _unfit(str(path), row)
            ):
                raise ConfigError(reason)
        return rows


BENCHMARKS = {
    "longbench": Benchmark(
        "LongBench's 16 English subsets",
        tuple(longbench.SUBSETS),
        "answers",
        lambda name: longbench.LongBench([name]),
    ),
    "ruler": Benchmark(
        "RULER's 13 tasks", ALL_SUBSETS, "outputs", lambda name: Ruler([name], [1]), in_parts=True
    ),
}


def read(kind: str, folder: Path) -> Predictions:
    """The predictions of a folder, scored.

    Parameters
    ----------
    kind
        of `BENCHMARKS`.
    folder
        with a `<subset>.jsonl` for each subset.

    Raises
    ------
    ConfigError
        none there, or a line that is none; names file and line.
    """
    benchmark = BENCHMARKS[kind]
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: {'a file; name its folder' if folder.is_file() else 'no such folder'}"
        )
    files = _files(folder, benchmark.in_parts)
    there = [name for name in benchmark.names if name in files]
    others = sorted(files.keys() - set(there))
    if not files:
        raise ConfigError(f"{folder}: no <subset>.jsonl in it, such as {benchmark.names[0]}.jsonl")
    if not there:
        close = nearest(others[0], benchmark.names)
        raise ConfigError(f"{folder}: {others[0]}.jsonl is none of {benchmark.title}; {close}")
    subsets = [benchmark.scored(name, files[name]) for name in there]
    missing = [name for name in benchmark.names if name not in files]
    return Predictions(benchmark, folder, subsets, missing, others)


def _files(folder: Path, in_parts: bool) -> dict[str, list[Path]]:
    """The files of each subset, by its name."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name)):
        files.setdefault(_PART.sub("", path.stem) if in_parts else path.stem, []).append(path)
    for name, (first, *parts) in files.items():
        if parts and first.stem == name:
            raise ConfigError(
                f"{folder}: holds both {first.name} and {parts[0].name}; take away what shall not"
                " count"
            )
    return files


def _unfit(label: str, row: DataRow) -> str:
    """Why a line is no prediction of RULER's, or ""."""
    outputs = [] if row.error else row.data["outputs"]
    fit = outputs and all(isinstance(output, str) and output.strip() for output in outputs)
    expected = "field outputs: expected one text or more, not blank"
    return row.error or ("" if fit else f"{label}, line {row.line}: {expected}")
