"""Where a task's data comes from: local files, and files of the hub with its local cache.

No download comes unannounced: `check` finds out within two seconds whether a file can be had,
`path` prints what it is about to fetch and how large it is. Lines of a data file are read one by
one, and a bad one costs no other; how many there are is said where the published file has another
number.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvbench.models import hub


class DataFile(Protocol):
    """A file that samples are made from."""

    @property
    def label(self) -> str:
        """What messages and results call it."""

    def check(self) -> None:
        """Find out whether `path` will work.

        Raises
        ------
        ValueError
            it will not; names the key that helps.
        """

    def path(self) -> Path:
        """The local file, fetched first where need be.

        Raises
        ------
        ValueError
            it cannot be had.
        """


@dataclass(frozen=True)
class LocalFile:
    """A file that the user named.

    Attributes
    ----------
    file
        where it is.
    key
        the config key that named it or its folder.
    subsets
        where each is a file of that folder: their names.
    published
        rows of the file of this name that the benchmark's authors published; None: it is not known.
    lines
        that are read of it, and must be there.
    """

    file: Path
    key: str
    subsets: tuple[str, ...] = ()
    published: int | None = None
    lines: int = 0

    @property
    def label(self) -> str:
        """The file's name."""
        return self.file.name

    def check(self) -> None:
        """Whether the file is there, and in it what is read of it.

        Raises
        ------
        ValueError
            it is not.
        """
        if not self.file.is_file():
            there = "no such file" if self.file.parent.is_dir() else "no such folder"
            if self.file.exists():
                there = (
                    "a folder, and no file"
                    if self.file.is_dir()
                    else "a pipe or a device, and no file"
                )
            others = [
                name
                for name in self.subsets
                if self.file.with_name(f"{name}{self.file.suffix}").is_file()
            ]
            choose = f"; task.subsets=[{','.join(others)}] takes what is there" if others else ""
            raise ValueError(f"{self.key}: {self.file}: {there}{choose}")
        if not self.file.stat().st_size:
            raise ValueError(f"{self.key}: {self.file}: empty")
        with self.file.open("rb") as lines:
            count = sum(1 for _ in itertools.islice(lines, self.lines))
        if count < self.lines:
            raise ValueError(
                f"task.samples={self.lines}: {self.file} has {count} lines; expected as many"
            )

    def path(self) -> Path:
        """The file itself.

        Raises
        ------
        ValueError
            it is not there.
        """
        self.check()
        return self.file


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset on the hub.

    Attributes
    ----------
    repo
        owner/name.
    name
        the file's path in it.
    megabytes
        what its download takes, for the message before it.
    key
        the config key that names a local copy instead.
    gated
        its owners ask who fetches it, so that a token is needed.
    published
        its rows; None: it is not known, or the file is no table.
    """

    repo: str
    name: str
    megabytes: float
    key: str = "task.data_dir"
    gated: bool = False
    published: int | None = None

    @property
    def label(self) -> str:
        """The dataset's name and the file's in it."""
        return f"{self.repo}/{self.name}"

    def cached(self) -> Path | None:
        """The file in the hub's local cache, or None."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo, self.name, repo_type="dataset")
        return Path(path) if isinstance(path, str) else None

    def check(self) -> None:
        """Whether the file is in the cache, or the hub answers and would hand it over.

        Raises
        ------
        ValueError
            neither.
        """
        if self.cached() is not None:
            return
        from huggingface_hub import get_token

        if self.gated and get_token() is None:
            raise ValueError(
                f"{self.key}: {self.label} is gated and there is no token of the hub here; ask for"
                " access on its page and run `hf auth login`, or name a local copy with"
                f" {self.key}="
            )
        if (reason := hub.out_of_reach()) is not None:
            raise ValueError(
                f"{self.key}: {self.label} is not in the local cache of the hub, and {reason}; "
                f"without network, name a local copy with {self.key}="
            )

    def path(self) -> Path:
        """The local file; what is about to be fetched, and how much, is said first.

        Raises
        ------
        ValueError
            it cannot be fetched.
        """
        self.check()
        if (cached := self.cached()) is not None:
            return cached
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        print(f"fetching {self.label} from the hub: {self.megabytes:g} MB", file=sys.stderr)
        try:
            return Path(hf_hub_download(self.repo, self.name, repo_type="dataset"))
        except (HfHubHTTPError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{self.key}: {self.label} could not be fetched ({reason})") from error


def local_or_hub(data_dir: str | None, hub_file: HubFile, *names: str) -> LocalFile | HubFile:
    """The file of these names that is first in a folder of the user's; None: the hub's.

    Parameters
    ----------
    data_dir
        the folder, as `task.data_dir` gives it.
    hub_file
        what is read without one.
    names
        what the file may be called; where none is there, the first is missing.
    """
    if data_dir is None:
        return hub_file
    files = [Path(str(data_dir)).expanduser() / name for name in names]
    there = next((file for file in files if file.is_file()), files[0])
    return LocalFile(there, hub_file.key, published=hub_file.published)


def user_file(
    data_dir: str | None, name: str, where: str, published: int | None = None
) -> LocalFile:
    """A file that is in no hub, in the user's folder; `published` as of a `LocalFile`.

    Raises
    ------
    ValueError
        no folder is named; says which it is.
    """
    if data_dir is None:
        raise ValueError(f"task.data_dir=null: needs the folder of {name}, {where}")
    return LocalFile(Path(str(data_dir)).expanduser() / name, "task.data_dir", published=published)


class DataRow(NamedTuple):
    """A line of a JSONL file: its data, or what is wrong with it."""

    line: int
    data: dict[str, Any]
    error: str = ""


def rows_of(
    source: LocalFile | HubFile, fields: Mapping[str, type | tuple[type, ...]]
) -> list[DataRow]:
    """The rows of a table, one or more.

    A JSONL file, a JSON list, a parquet or a CSV file, by its name's end.

    Parameters
    ----------
    source
        the file; it is fetched where need be.
    fields
        names and types that every row must have.

    Raises
    ------
    ValueError
        it cannot be had, is no such file, or holds nothing.
    """
    path = source.path()
    try:
        rows = list(read_jsonl(source.label, _lines(path), fields))
    except OSError as error:
        raise ValueError(f"{source.key}: {path}: {error.strerror}") from error
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{source.key}: {path}: not a {path.suffix.lstrip('.')} file ({reason})"
        ) from error
    if not rows:
        raise ValueError(f"{source.key}: {path}: nothing in it")
    say_rows(source.label, len(rows), source.published)
    return rows


@functools.cache  # once for all arms of a sweep
def say_rows(label: str, count: int, published: int | None) -> None:
    """Say how many rows a file has, unless as many as were published: part of it may be missing."""
    if count != published:
        suffix = "" if published is None else f"; {published:,} were published"
        print(f"{label}: {count:,} rows{suffix}", file=sys.stderr)


def _lines(path: Path) -> Iterable[bytes]:
    """Each row of a table as a line of JSON."""
    if path.suffix == ".json":
        rows = parsed_json(path.read_bytes())
        if not isinstance(rows, list):
            raise ValueError("expected a list")
        return [json.dumps(row).encode() for row in rows]
    if path.suffix in (".parquet", ".csv"):
        import pandas

        if path.suffix == ".csv":  # its cells are texts: .50 is not .5, and None is a word
            with path.open(encoding="utf-8-sig", newline="") as text:
                _refuse_twice(next(csv.reader(text), []))
            frame = pandas.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
        else:
            frame = pandas.read_parquet(path)
        return (
            frame.to_json(orient="records", lines=True, double_precision=15).encode().splitlines()
        )
    return path.read_bytes().split(b"\n")


def parsed_json(content: bytes | str) -> Any:
    """What a JSON text holds.

    Raises
    ------
    ValueError
        it is none, holds NaN or Infinity, which JSON has not, a key twice in an object, or is
        nested too deep; says so in one line.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word}: no value of JSON")

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(content, parse_constant=refuse, object_pairs_hook=object_of)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse_twice(names: Sequence[str]) -> None:
    """Refuse names of fields of which one would silently take another's place.

    Raises
    ------
    ValueError
        names the first that is there twice.
    """
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"field {twice}: twice")


def read_jsonl(
    label: str, lines: Iterable[bytes], fields: Mapping[str, type | tuple[type, ...]]
) -> Iterator[DataRow]:
    """The lines of a JSONL file, blank ones left out.

    Parameters
    ----------
    label
        what errors call the file.
    lines
        its lines, as a file opened for reading bytes gives them.
    fields
        names and types that every line must have.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            data, error = _parsed(line, fields)
            yield DataRow(number, data, f"{label}, line {number}: {error}" if error else "")


def _parsed(
    line: bytes, fields: Mapping[str, type | tuple[type, ...]]
) -> tuple[dict[str, Any], str]:
    try:
        data = parsed_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return {}, "not UTF-8"
    except ValueError as error:
        return {}, f"not JSON ({error})"
    if not isinstance(data, dict):
        return {}, f"expected an object with the fields {', '.join(fields)}"
    if not _is_unicode(json.dumps(data, ensure_ascii=False)):
        return {}, "holds half a character (a lone surrogate)"
    for name, kind in fields.items():
        if name not in data:
            return data, f"field {name}: missing"
        if not isinstance(data[name], kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(
                "null" if option is type(None) else option.__name__ for option in kinds
            )
            return data, f"field {name}: expected {expected}, not {type(data[name]).__name__}"
    return data, ""


def _is_unicode(text: str) -> bool:
    """Whether a text can be written.

    JSON can spell halves of characters, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
