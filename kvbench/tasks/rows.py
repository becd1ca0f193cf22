"""What tasks share whose samples are rows of files: the loop over them, bad rows, and the order."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.config import nearest
from kvbench.tasks import Sample, Task
from kvbench.tasks.sources import DataRow, HubFile, LocalFile, rows_of

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

Element = TypeVar("Element")


class TableTask(Task):
    """All rows of some tables, shuffled by the seed.

    A subclass sets `fields`, and makes a sample of a row.

    Attributes
    ----------
    fields
        names and types that every row must have.
    files
        the tables, each by the group that its samples count towards, or by "".
    max_new_tokens
        tokens to generate at most.
    """

    stored = True
    fields: Mapping[str, type | tuple[type, ...]]

    def __init__(self, files: Mapping[str, LocalFile | HubFile], max_new_tokens: int) -> None:
        self.files, self.max_new_tokens = files, max_new_tokens
        self.sources = tuple(files.values())

    @abstractmethod
    def sample(self, id: str, group: str, row: DataRow) -> Sample:
        """The sample of a good row."""

    def group_of(self, file: str, data: Mapping[str, Any]) -> str:
        """The group that a row counts towards, bad or not.

        "" if what it holds does not say: its file's.
        """
        return file

    def unfit(self, data: Mapping[str, Any]) -> str:
        """Why a row that has all fields is no sample, or ""."""
        return ""

    def __len__(self) -> int:
        return len(self.rows)

    def samples(self, tokenizer: Tokenizer | None, seed: int) -> Iterator[Sample]:
        """A sample of each row, shuffled by the seed; that of a bad row is its error.

        Raises
        ------
        ValueError
            a file cannot be had or read as what it should be.
        """
        samples = [self._sample(group, row) for group, row in self.rows]
        random.Random(f"{self.name}/{seed}").shuffle(samples)
        yield from samples

    @functools.cached_property
    def rows(self) -> list[tuple[str, DataRow]]:
        """What `read` finds."""
        return self.read()

    def read(self) -> list[tuple[str, DataRow]]:
        """The rows, each with its group.

        Raises
        ------
        ValueError
            as `samples`.
        """
        files = self.files.items()
        return [
            (group, self._checked(file.label, row))
            for group, file in files
            for row in rows_of(file, self.fields)
        ]

    def _checked(self, label: str, row: DataRow) -> DataRow:
        reason = "" if row.error else self.unfit(row.data)
        return row._replace(error=f"{label}, line {row.line}: {reason}") if reason else row

    def _sample(self, file: str, row: DataRow) -> Sample:
        id, group = f"{file or self.name}-{row.line - 1}", self.group_of(file, row.data)
        if row.error:
            return Sample(id, "", (), self.max_new_tokens, group=group, error=row.error)
        return self.sample(id, group, row)


def check_subsets(subsets: Sequence[str], valid_names: Collection[str]) -> None:
    """Whether `task.subsets` is a list of different known ones.

    Raises
    ------
    ValueError
        it is not.
    """
    if isinstance(subsets, str) or not subsets or len(set(map(str, subsets))) < len(subsets):
        raise ValueError(
            f"task.subsets={subsets}: a list of different ones of {', '.join(valid_names)}"
        )
    for name in subsets:
        if str(name) not in valid_names:
            raise ValueError(f"task.subsets: no subset {name}; {nearest(str(name), valid_names)}")


def in_turn(task: str, seed: int, subsets: Mapping[str, list[Element]]) -> Iterator[Element]:
    """One sample, or one list of them, of every subset, then the next.

    In each subset shuffled by the seed alone.
    """
    for name, elements in subsets.items():
        random.Random(f"{task}/{seed}/{name}").shuffle(elements)
    return (
        element
        for element in chain.from_iterable(zip_longest(*subsets.values()))
        if element is not None
    )
