"""What is stored of a run, read as data: whoever made it, nothing in it is imported, called or
followed elsewhere.

A folder may come from anybody. A file here is a regular one of bounded size; YAML has no aliases,
by which a small file means a huge one; numbers are finite and fit 64 bits; a record has the types
that `kvbench.measure` gives it. What does not keep to that is a `ResultsError`, never a traceback.
Run folders may lie in an archive (`kvbench.runs.archive`), whose name their paths then go through:
results/reference.tar.xz/runs/passkey. No torch.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from kvbench.config import ConfigError, first_line
from kvbench.runs.archive import SUFFIX, unpacked
from kvbench.runs.quantities import DECODED

FORMAT = 1  # of everything in a run folder; raised when an older reader would misread it
# Seconds between two signs of life of a process that holds a folder, and without one; clocks of
# machines differ, and a busy one is late.
BEAT_SECONDS, DEAD_SECONDS = 15.0, 90.0
SHARDS = "shards"  # in a run folder, the folders of jobs that share out its samples
MOST_BYTES = {"run.yaml": 2**22, "samples.jsonl": 2**30}  # of a file that is read, by its name
MOST_OTHERS = 2**28
# and mappings in the JSON of a file: empty ones of three bytes take 70 in memory
MOST_LISTS = 2**22
MOST_NODES = 2**13  # values in a run.yaml, which are slow to read; ours have up to 600
MOST_ARCHIVED_NODES = 2**20  # in all run.yaml of an archive: of 1,700 runs
# of the numbers of all samples of a run: a summary goes over the samples for each
MOST_NAMES = 1000
OF_RUNS = MOST_BYTES.keys()  # a folder with one of these is a run's
DEEPEST = 32  # levels of a run.yaml; ours have six

# What a computation raises on values that no kvbench wrote. Whoever computes from stored data says
# what is wrong.
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Record = dict[str, Any]

# The types of what a record may hold, beside None; other keys hold anything.
WORDS = ("id", "sample", "group", "content", "decode", "error", "output")
COUNTS = ("prompt_tokens", "cut_tokens", "question_tokens", "new_tokens")
LISTS = ("answers", "output_ids")
MAPPINGS = (
    *(
        "meta",
        "scores",
        "audit",
        "probe",
        "fidelity",
        "hardware",
        "machine",
        "tpot_ms",
        "breakdown_ms",
        "prefill_ms",
    ),
    "written",
)
TYPES: dict[str, type] = {
    **dict.fromkeys(WORDS, str),
    **dict.fromkeys(COUNTS, int),
    **dict.fromkeys(LISTS, list),
    **dict.fromkeys(MAPPINGS, dict),
}
# What stands before a value in YAML, of any style and with any end of a line.
_BEFORE_NODES = (
    *(b"\n", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b",", b"[", b"{"),
    *(mark + space for mark in (b"-", b":", b"?") for space in (b" ", b"\t")),
)
# where a number may be that does not fit, or text like it
_LARGE = re.compile(r"\d{19}|[eE]\+?\d{3}|NaN|Infinity")

# up to the end where it has none: one pass over any bytes
_TEXT = re.compile(rb'(?s)"(?:[^"\\]++|\\.)*+"?')
_ENTERED = re.compile(re.escape(SUFFIX) + "/")  # in a path that may lead into an archive
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class _Plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Of YAML what kvbench writes: no dates, no numbers to other bases than ten, and none of
    hundreds of digits.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping, each of whose keys stands there once."""
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            names = [str(key.value) for key, _ in node.value]
            raise ValueError(f"{_first_twice(names)[:80]}: there twice")
        return mapping


for kind, pattern, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9]\d{0,18})", list("-+0123456789")),
    ("float", r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]\d+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Plain.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})$"), first)
_Plain.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: _fitting(loader.construct_scalar(node))
)


class ResultsError(RuntimeError):
    """A run folder cannot be used: held by another process, of another format, damaged, or not
    writable.
    """


# --------------------------------------------------------------------------------------------------
# Files


def contents(path: Path) -> bytes:
    """All of a regular file, on the disk or in an archive.

    Raises
    ------
    ResultsError
        it is a pipe, a device or a folder, larger than any that kvbench writes, or in a damaged
        archive.
    OSError
        it is not there, or cannot be read.
    """
    most = MOST_BYTES.get(path.name, MOST_OTHERS)
    if place := _in_archive(path):
        archive, name = place
        if (data := _files_in(archive).get(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if len(data) > most:
            raise ResultsError(f"{path}: has {len(data)} bytes; expected at most {most}")
        return bytes(data)
    # without the second a pipe would be waited for
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        stats = os.fstat(opened)
        if not stat.S_ISREG(stats.st_mode):
            raise ResultsError(f"{path}: not a regular file")
        if stats.st_size > most:
            raise ResultsError(f"{path}: has {stats.st_size} bytes; expected at most {most}")
        with open(opened, "rb", closefd=False) as file:
            return file.read(stats.st_size)
    finally:
        os.close(opened)


def is_there(path: Path) -> bool:
    """Whether there is something at a path, on the disk or in an archive.

    Raises
    ------
    ResultsError
        the archive is damaged.
    OSError
        nobody may look there.
    """
    if place := _in_archive(path):
        return place[1] in _files_in(place[0])
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def refuse_archive(folder: Path) -> None:
    """Refuse to write into an archive.

    Raises
    ------
    ResultsError
        the folder is in one.
    """
    if archive := archive_of(folder):
        raise ResultsError(
            f"{folder}: an archive is not written to; unpack it: tar -xf"
            f" {shlex.quote(str(archive))}"
        )


def archive_of(folder: Path) -> Path | None:
    """The archive that a folder is, or is in; None for one on the disk."""
    place = _in_archive(folder / "run.yaml")
    return place and place[0]


def _in_archive(path: Path) -> tuple[Path, str] | None:
    """The archive that a path leads into, and the rest of the path; None for a path on the disk."""
    whole = str(path)
    for match in _ENTERED.finditer(whole):
        if os.path.isfile(archive := whole[: match.end() - 1]):
            return Path(archive), whole[match.end() :]
    return None


def archive_version(path: Path) -> tuple[int, ...] | None:
    """What an archive that a path leads into is told from another of its name by.

    None for a path on the disk.
    """
    if not (place := _in_archive(path)):
        return None
    stats = place[0].stat()
    return stats.st_ino, stats.st_size, stats.st_mtime_ns


def _files_in(archive: Path) -> Mapping[str, memoryview]:
    """The files of an archive by their names there.

    Raises
    ------
    ResultsError
        it is damaged.
    """
    stats = archive.stat()
    files, wrong = _unpacked(
        str(archive.absolute()), (stats.st_ino, stats.st_size, stats.st_mtime_ns)
    )
    if wrong:
        raise ResultsError(wrong)
    return files


# samples are read again, run by run, and a damaged archive is not unpacked again
@functools.lru_cache(maxsize=8)
def _unpacked(archive: str, _: tuple[int, ...]) -> tuple[Mapping[str, memoryview], str]:
    """The files of an archive, and what is wrong with it."""
    try:
        files = unpacked(contents(Path(archive)))
        nodes = sum(
            _nodes_in(bytes(data)) for name, data in files.items() if name.endswith("run.yaml")
        )
        if nodes > MOST_ARCHIVED_NODES:
            raise ResultsError(
                f"{nodes} values in all run.yaml; expected at most {MOST_ARCHIVED_NODES}"
            )
        return files, ""
    except (OSError, MemoryError, ResultsError, ValueError) as error:
        return {}, f"{Path(archive).name}: no archive that kvbench reads ({printable(str(error))})"


def json_of(data: bytes) -> Any:
    """The JSON value in some bytes of UTF-8.

    Raises
    ------
    ValueError
        it is none, is nested too deeply, has a number that is not finite or does not fit 64 bits, a
        text with half a character, a key twice in one mapping, or more than `MOST_LISTS` lists and
        mappings.
    """
    _refuse_crowd(data)
    text = data.decode("utf-8")
    try:
        if _LARGE.search(text):
            value = json.loads(
                text,
                object_pairs_hook=_mapping,
                parse_int=_fitting,
                parse_float=_finite,
                parse_constant=_finite,
            )
        else:
            value = json.loads(text, object_pairs_hook=_mapping)
        if _ESCAPED_HALF.search(text):
            # whole characters are written with two such escapes
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_crowd(data: bytes) -> None:
    if _begun(data) > MOST_LISTS and (count := _begun(_TEXT.sub(b"", data))) > MOST_LISTS:
        raise ValueError(f"{count} lists and mappings; expected at most {MOST_LISTS}")


def _begun(data: bytes) -> int:
    """Brackets that begin a list or a mapping, or stand in a text."""
    return data.count(b"[") + data.count(b"{")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError(f"{_first_twice([key for key, _ in pairs])[:80]}: there twice")
    return mapping


def _first_twice(names: Sequence[str]) -> str:
    return next(name for place, name in enumerate(names) if name in names[:place])


def _fitting(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) >= 2**63:
        raise ValueError(f"{digits[:24]}: expected a number of 64 bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text}: expected a finite number")
    return number


def json_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} where it cannot be read."""
    try:
        value = json_of(contents(path))
    except (OSError, ResultsError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def using(folder: Path) -> Iterator[None]:
    """Say that a folder cannot be used where reading it, or computing from what it holds, fails.

    Raises
    ------
    ResultsError
        why; a ResultsError or a ConfigError from inside passes as it is.
    """
    try:
        yield
    except (ConfigError, ResultsError):
        raise
    except (OSError, MemoryError, RuntimeError, *DAMAGED) as error:
        # RuntimeError: a path with ~name, of no user
        raise ResultsError(f"{folder}: not as kvbench writes it ({what_of(error)})") from error


def what_of(error: BaseException) -> str:
    """An error of `DAMAGED` in a line: its class and what it says."""
    return printable(f"{type(error).__name__}: {first_line(error)}"[:200])


def printable(text: str) -> str:
    """A text for a terminal, on one line: characters that would command it are written out."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# --------------------------------------------------------------------------------------------------
# Folders


def runs_in(paths: Sequence[Path]) -> Iterator[Path]:
    """The run folders at or under these paths, on the disk and in archives, in order and none
    twice.

    An archive or a folder that cannot be read stands for itself: whoever reads a run there says
    why.

    Raises
    ------
    ResultsError
        there is none at one of them.
    """
    right = "a run is a folder such as results/runs/<task>/<model>/<arm>/<run id>"
    if not paths:
        raise ResultsError(f"no run given; {right}")
    visited: set[Path] = set()
    for path in paths:
        folders = [path] if os.path.isfile(path / "run.yaml") else sorted(set(runs_below(path)))
        if not folders:
            raise ResultsError(f"{path}: {_no_run(path)}; {right}")
        yield from (folder for folder in folders if folder not in visited)
        visited.update(folders)


def runs_below(path: Path) -> Iterator[Path]:
    """The run folders at or under a path, with those that lost their run.yaml and folders that
    cannot be read; some of them twice.
    """
    if archive := archive_of(path):
        yield from _runs_in_archive(archive, path)
        return
    unreadable: list[OSError] = []
    for top, folders, files in os.walk(path, onerror=unreadable.append):
        here = Path(top)
        lost = {"status.json", "samples.jsonl"} <= {*files} and here.parent.name != SHARDS
        if lost or "run.yaml" in files or "run.yaml" in folders:
            yield here
        for archive in (here / name for name in files if name.endswith(SUFFIX)):
            if os.path.isfile(archive):
                yield from _runs_in_archive(archive, archive)
    gone = (FileNotFoundError, NotADirectoryError)
    yield from (Path(error.filename) for error in unreadable if not isinstance(error, gone))


def _runs_in_archive(archive: Path, path: Path) -> Iterator[Path]:
    try:
        folders = {
            archive / file.parent
            for file in map(PurePosixPath, _files_in(archive))
            if file.name in OF_RUNS
        }
    except (OSError, ResultsError):
        yield archive
        return
    yield from (
        folder for folder in folders if folder.is_relative_to(path) and folder.parent.name != SHARDS
    )


def _no_run(path: Path) -> str:
    """Why there is no run at a path."""
    if os.path.isdir(path) or archive_of(path):
        return "no run in it"
    if not os.path.exists(path):
        return "no such folder"
    is_run = os.path.isfile(path.parent / "run.yaml")
    return f"a file; name its folder, {path.parent}" if is_run else "a file, and no run"


# --------------------------------------------------------------------------------------------------
# run.yaml


def read_run_yaml(folder: Path) -> dict[str, Any]:
    """What run.yaml holds: plain values, and under "config" the names of model, method and task.

    Raises
    ------
    ResultsError
        it is not there, of another format, or not as kvbench writes it.
    """
    path = folder / "run.yaml"
    try:
        data = contents(path)
        if (nodes := _nodes_in(data)) > MOST_NODES:
            raise ResultsError(f"run.yaml has some {nodes} values; expected at most {MOST_NODES}")
        text = data.decode("utf-8")
        if "*" in text and any(
            isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Plain)
        ):
            raise ResultsError("run.yaml has YAML aliases, which kvbench never writes")
        written = yaml.load(text, _Plain)
    except (OSError, MemoryError, yaml.YAMLError, *DAMAGED) as error:
        raise ResultsError(f"run.yaml cannot be read ({printable(first_line(error))})") from error
    if not isinstance(written, dict) or "format" not in written:
        raise ResultsError("run.yaml is not kvbench's")
    if written["format"] != FORMAT:
        raise ResultsError(
            f"of format {printable(str(written['format'])[:40])}; this kvbench reads format"
            f" {FORMAT}"
        )
    if (
        reason := _strange(written, "run.yaml")
        or _nameless(written)
        or _undecoded(written["identity"])
    ):
        raise ResultsError(f"not as kvbench writes it ({printable(reason)})")
    return written


def _nodes_in(data: bytes) -> int:
    """About how many values there are in YAML, and no fewer than half."""
    return sum(map(data.count, _BEFORE_NODES))


def _strange(value: Any, where: str, level: int = 0) -> str:
    """What in a value is not plain: other types than JSON has, numbers that do not fit, too many
    levels; or "".
    """
    if level > DEEPEST:
        return f"{where[:80]}...: more than {DEEPEST} levels"
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) or not _is_whole(key) for key in value):
            return f"{where}: a key that is no word"
        inside: Iterator[tuple[str, Any]] = (
            (f"{where}.{key}", item) for key, item in value.items()
        )
    elif isinstance(value, list):
        inside = ((f"{where}[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, float):
        return "" if math.isfinite(value) else f"{where}: {value} is not finite"
    elif isinstance(value, int):
        return "" if abs(value) < 2**63 else f"{where}: a number of more than 64 bits"
    elif isinstance(value, str):
        return "" if value.isascii() or _is_whole(value) else f"{where}: half a character"
    else:
        return "" if value is None else f"{where}: a {type(value).__name__}"
    return next(filter(None, (_strange(item, name, level + 1) for name, item in inside)), "")


def _is_whole(text: str) -> bool:
    """Whether a text can be written, as halves of characters cannot."""
    return text.isprintable() or text.encode(errors="replace").decode() == text


def _nameless(written: Mapping[str, Any]) -> str:
    """Which section or name is missing, or is no line of text; or ""."""
    for section in ("identity", "config"):
        if not isinstance(written.get(section), dict):
            return f"{section}: expected a mapping"
    for where, config in (
        ("config", written["config"]),
        ("identity.config", written["identity"].get("config", {})),
    ):
        if not isinstance(config, dict):
            return f"{where}: expected a mapping"
        for group in {"model", "method", "task"} & config.keys():
            choice = config[group]
            name = choice.get("name", "") if isinstance(choice, dict) else None
            if not isinstance(name, str) or not name.isprintable() or len(name) > 200:
                return f"{where}.{group}.name: expected a line of at most 200 letters"
    return ""


def _undecoded(written: Mapping[str, Any]) -> str:
    """What is wrong with the `decode` of an identity or of a record; or ""."""
    decode = written.get("decode")
    return "" if decode is None or decode in DECODED else f"decode: expected {' or '.join(DECODED)}"


def stored_task(folder: Path) -> tuple[dict[str, Any], str]:
    """The config of a run's task, as run.yaml holds it, and the name of the user's folder of
    choices that the run was made with, or "". What they name is not trusted: see
    `kvbench.tasks.known`.

    Raises
    ------
    ResultsError
        there is none that can be read.
    """
    try:
        config = read_run_yaml(folder)["config"]
    except ResultsError as error:
        raise ResultsError(
            f"{folder / 'run.yaml'}: damaged, its task cannot be read ({error})"
        ) from error
    task = config.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("_target_"), str):
        raise ResultsError(
            f"{folder / 'run.yaml'}: damaged, its task cannot be read (config.task._target_: no"
            " name)"
        )
    return task, str(config.get("config_dir") or "")


# --------------------------------------------------------------------------------------------------
# samples.jsonl


def read_samples(path: Path) -> tuple[dict[str, Record], int]:
    """Newest record of every id, and the size in bytes up to the last whole line; what follows it
    was torn off.

    Raises
    ------
    ResultsError
        a line is damaged, or the file is none.
    """
    try:
        data = contents(path)
        _refuse_crowd(data)
    except FileNotFoundError:
        data = b""
    except ValueError as error:
        raise ResultsError(f"{path}: {error}") from error
    lines = data.split(b"\n")[:-1]
    records: dict[str, Record] = {}
    names: set[str] = set()
    end = 0
    for number, line in enumerate(lines, 1):
        record, reason = record_in(line)
        if record is None and number == len(lines) and not reason:
            break  # after a power cut the last line can be there in length but not in content
        if record is None:
            raise ResultsError(
                f"{path}: line {number} is damaged{reason and f' ({printable(reason)})'}; delete"
                f" that line (sed -i {number}d {shlex.quote(str(path))}), and its sample runs again"
            )
        if (before := records.get(record["id"])) and not _follows(record, before):
            raise ResultsError(
                f"{path}: line {number} has a second answer of {printable(record['id'])[:80]};"
                " delete one of its lines"
            )
        names.update(*(record.get(part) or () for part in MAPPINGS if part != "meta"))
        if len(names) > MOST_NAMES:
            raise ResultsError(f"{path}: more than {MOST_NAMES} names of numbers")
        records[record["id"]] = record
        end += len(line) + 1
    return records, end


def _follows(record: Record, before: Record) -> bool:
    """Whether a later record of a sample may stand for an earlier one: either failed, or it is the
    same, or scored anew.
    """
    if before.get("error") or record.get("error") or record == before:
        return True
    of_scoring = ("scores", "rescored")
    rest, earlier = (
        {key: version[key] for key in version.keys() - of_scoring} for version in (record, before)
    )
    return "rescored" in record and rest == earlier


def record_in(line: bytes) -> tuple[Record | None, str]:
    """The record in a line; or None and, where the line is whole, what is wrong with it."""
    try:
        record = json_of(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None, ""
    except ValueError as error:
        return None, first_line(error)
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None, ""
    for key, right in TYPES.items():
        value = record.get(key)
        if value is not None and type(value) is not right:
            return None, f"{key}: expected {right.__name__}, found {type(value).__name__}"
    return (None, reason) if (reason := _undecoded(record)) else (record, "")


def read_run(folder: Path) -> dict[str, Record]:
    """The record of every sample of a run, whichever of its shards has it."""
    records, _ = read_samples(folder / "samples.jsonl")
    return records | of_shards(folder, records)


def samples_so_far(folder: Path) -> dict[str, Record]:
    """The record of every sample of a finished run; of another what its shards have, too.

    Those of an archive are read once, and nobody changes them.
    """
    if not is_there(folder / "summary.json"):
        return read_run(folder)
    path = folder / "samples.jsonl"
    version = archive_version(path)
    return read_samples(path)[0] if version is None else _archived_samples(path, version)


@functools.lru_cache(maxsize=2048)
def _archived_samples(path: Path, version: tuple[int, ...]) -> dict[str, Record]:
    return read_samples(path)[0]


def of_shards(folder: Path, records: Mapping[str, Record]) -> dict[str, Record]:
    """What the shards of a run know beyond these records: a sample that ran stands above one that
    failed.
    """
    newer: dict[str, Record] = {}
    for shard in shards_of(folder):
        for key, record in read_samples(shard / "samples.jsonl")[0].items():
            there = newer.get(key, records.get(key))
            if there is None or (there.get("error") and there != record):
                newer[key] = record
    return newer


def shards_of(folder: Path) -> list[Path]:
    """The folders of the jobs that share out a run's samples, in order.

    Raises
    ------
    OSError
        they cannot be read.
    """
    try:
        return sorted(path for path in (folder / SHARDS).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def backend_name(stored: Mapping[str, Any]) -> str:
    """What ran the model of a stored config, "hf" or "vllm"."""
    return str(stored["backend"]["name"])
