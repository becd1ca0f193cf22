"""Where a task's data comes from: local files, and files of the hub with its local cache.

No download comes unannounced: `check` tells within two seconds that something cannot be had, `path` says what it is
about to fetch and how large it is. Lines of a data file are read one by one, and a bad one costs no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvbench import hub


class DataFile(Protocol):
    """A file that samples are made from."""

    @property
    def label(self) -> str:
        """What messages and results call it."""

    def check(self) -> None:
        """Find out whether `path` will work.

        Raises:
            ValueError: it will not; names the key that helps.
        """

    def path(self) -> Path:
        """The local file, fetched first where need be.

        Raises:
            ValueError: it cannot be had.
        """


@dataclass(frozen=True)
class LocalFile:
    """A file that the user named.

    Attributes:
        file: where it is.
        key: the config key that named it or its folder.
        subsets: where each is a file of that folder: their names.
    """

    file: Path
    key: str
    subsets: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The file's name."""
        return self.file.name

    def check(self) -> None:
        """Whether the file is there, and something in it.

        Raises:
            ValueError: it is not.
        """
        if not self.file.is_file():
            there = "no such file" if self.file.parent.is_dir() else "no such folder"
            others = [name for name in self.subsets if self.file.with_name(f"{name}{self.file.suffix}").is_file()]
            choose = f"; task.subsets=[{','.join(others)}] takes what is there" if others else ""
            raise ValueError(f"{self.key}: {self.file}: {there}{choose}")
        if not self.file.stat().st_size:
            raise ValueError(f"{self.key}: {self.file}: empty")

    def path(self) -> Path:
        """The file itself.

        Raises:
            ValueError: it is not there.
        """
        self.check()
        return self.file


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset on the hub.

    Attributes:
        repo: owner/name.
        name: the file's path in it.
        megabytes: what its download takes, for the message before it.
        key: the config key that names a local copy instead.
        revision: branch or commit.
    """

    repo: str
    name: str
    megabytes: float
    key: str = "task.data_dir"
    revision: str | None = None

    @property
    def label(self) -> str:
        """The dataset's name and the file's in it."""
        return f"{self.repo}/{self.name}"

    def cached(self) -> Path | None:
        """The file in the hub's local cache, or None."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, self.name, revision=self.revision, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None

    def check(self) -> None:
        """Whether the file is in the cache or the hub answers.

        Raises:
            ValueError: neither.
        """
        if self.cached() is None and (reason := hub.out_of_reach()) is not None:
            raise ValueError(
                f"{self.key}: {self.label} is not in the local cache of the hub, and {reason}; "
                f"without network, name a local copy with {self.key}="
            )

    def path(self) -> Path:
        """The local file; what is about to be fetched, and how much, is said first.

        Raises:
            ValueError: it cannot be fetched.
        """
        self.check()
        if (cached := self.cached()) is not None:
            return cached
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        print(f"fetching {self.label} from the hub: {self.megabytes:g} MB", file=sys.stderr)
        try:
            return Path(hf_hub_download(self.repo, self.name, revision=self.revision, repo_type="dataset"))
        except (HfHubHTTPError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{self.key}: {self.label} could not be fetched ({reason})") from error


class Row(NamedTuple):
    """A line of a JSONL file: its data, or what is wrong with it."""

    line: int
    data: dict[str, Any]
    error: str = ""


def read_jsonl(label: str, lines: Iterable[bytes], fields: Mapping[str, type | tuple[type, ...]]) -> Iterator[Row]:
    """The lines of a JSONL file, blank ones left out.

    Args:
        label: what errors call the file.
        lines: its lines, as a file opened for reading bytes gives them.
        fields: names and types that every line must have.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            data, error = _parsed(line, fields)
            yield Row(number, data, f"{label}, line {number}: {error}" if error else "")


def _parsed(line: bytes, fields: Mapping[str, type | tuple[type, ...]]) -> tuple[dict[str, Any], str]:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return {}, "not UTF-8"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error})"
    if not isinstance(data, dict):
        return {}, f"expected an object with the fields {', '.join(fields)}"
    for name, kind in fields.items():
        if name not in data:
            return data, f"field {name}: missing"
        if not isinstance(data[name], kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
            return data, f"field {name}: expected {expected}, not {type(data[name]).__name__}"
        if isinstance(data[name], str) and not _is_unicode(data[name]):
            return data, f"field {name}: holds half a character (a lone surrogate)"
    return data, ""


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON can spell halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
