"""Run folders: what a run writes, and how the next start picks it up again.

A folder belongs to one identity (config, protocol, model revision, data, sources) and to one process at a time.
Samples are appended one line each and are safe once `add` returns, so `kill -9` costs at most the sample in flight.
Nothing here knows a model or a method, and nothing imports torch.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import kvbench
from kvbench.runs.command import command_of
from kvbench.runs.identity import run_id

FORMAT = 1  # of everything in a run folder; raised when an older reader would misread it

Record = dict[str, Any]


class ResultsError(RuntimeError):
    """A run folder cannot be used: held by another process, of another format, damaged, or not writable."""


class RunFolder:
    """One run's folder, `<results_dir>/runs/<task>/<model>/<arm>/<run id>`, held by this process until closed.

        with RunFolder.open("results", "passkey", "tiny", "quest-64", identity, config) as folder:
            for sample in samples:
                if sample.id not in folder.done:
                    folder.add(run(sample))
            folder.finish(summarise(folder.records.values(), task.metric))

    Files: `run.yaml` (what ran), `samples.jsonl` (one record a line, newest line of an id wins), `status.json`
    ("running", "interrupted" or "finished"; "running" under a free lock means killed), and `summary.json`, which is
    there only while it covers every line of `samples.jsonl`. A record is a dict of JSON values with an "id"; one with
    an "error" is kept and counted, but is not done and runs again at the next start.

    Attributes:
        path: the folder.
        records: newest record of every sample tried, by id, in the order they were first written.
        done: those without an error.
        finished: the run had finished when it was opened.
        tear: what it lacked then of what it had when it finished, "" for nothing; the samples that it lacks run again.
    """

    def __init__(self, path: Path, records: dict[str, Record], samples: int, end: int, held: ExitStack) -> None:
        """Use `open`. `samples` is the descriptor that appends, `end` the size up to the last whole line."""
        self.path = path
        self.records = records
        self.done = {key: record for key, record in records.items() if not record.get("error")}
        self.finished, self.tear = (path / "summary.json").exists(), lost_samples(path, len(records))
        self._samples, self._end, self._held = samples, end, held
        self._started = _started(path / "status.json")
        self._state = "running"

    @classmethod
    def open(
        cls,
        results_dir: str | os.PathLike[str],
        task: str,
        model: str,
        arm: str,
        identity: Mapping[str, Any],
        config: Mapping[str, Any],
        former: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> RunFolder:
        """Take the folder of `identity`, make it if it is new, and read back what is finished.

        Args:
            results_dir: where all results lie.
            task, model, arm: folder names for people; characters unfit for a path become "-".
            identity: all that may change a number; its hash is the run id.
            config: the resolved config, written to run.yaml for the reader and for reports.
            former: arms and identities under which an older kvbench kept the same run; one that is there goes on.

        Raises:
            ResultsError: another process holds the folder, another version wrote it, a line in the middle of
                samples.jsonl is damaged, or results_dir cannot be written.
        """
        places = [_arm(results_dir, task, model, name) / run_id(known) for name, known in [(arm, identity), *former]]
        path = next((place for place in places if place.exists()), places[0])
        with writing(path), ExitStack() as held:
            path.mkdir(parents=True, exist_ok=True)
            held.callback(os.close, take_lock(path))
            check_format(path)
            records, end = read_samples(path / "samples.jsonl")
            samples = os.open(path / "samples.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            held.callback(os.close, samples)
            os.ftruncate(samples, end)
            write_whole(path / "run.yaml", _run_yaml(identity, config))
            folder = cls(path, records, samples, end, held)
            folder._write_status()
            folder._held = held.pop_all()  # from here on the lock lives until the folder is closed
            return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        with self._held:  # the lock goes last, whatever happens
            if self._state == "running":
                self._state = "interrupted"
                self._write_status()

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one sample's record; on the disk when this returns. NaN and infinity are stored as null."""
        plain: Record = _strict(record)
        if not isinstance(key := plain.get("id"), str):
            raise ValueError(f"a sample record needs an 'id' that is a string, not {key!r}")
        (self.path / "summary.json").unlink(missing_ok=True)
        self._append(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self.records[key] = plain
        if plain.get("error"):
            self.done.pop(key, None)
        else:
            self.done[key] = plain
        # Most of the time passes here: Ctrl-C now leaves the record where it is.
        with writing(self.path):
            os.fsync(self._samples)
        self._state = "running"
        self._write_status()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        with writing(self.path):
            write_whole(self.path / "summary.json", _json(summary), durable=True)
        self._state = "finished"
        self._write_status()

    def _append(self, line: bytes) -> None:
        """Write one whole line or none: what a full disk or Ctrl-C cuts off is taken back."""
        with writing(self.path):
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._samples, rest) :]
            except BaseException:
                os.ftruncate(self._samples, self._end)
                raise
        self._end += len(line)

    def _write_status(self) -> None:
        status = {
            "state": self._state,
            "done": len(self.done),
            "failed": len(self.records) - len(self.done),
            "started": self._started,
            "updated": _now(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        with writing(self.path):
            write_whole(self.path / "status.json", _json(status))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which folder could not be written, and which key moves it elsewhere."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"cannot write results to {path} ({error.strerror or error}): see results_dir") from error


def _folder_name(name: str) -> str:
    """`name` as one path component; hub ids hold slashes, sweeps hold anything."""
    return re.sub(r"[^\w.=,+-]+", "-", name).lstrip(".") or "-"


def take_lock(folder: Path) -> int:
    """An exclusive lock on the folder. The kernel frees it with the process, however that ends: no stale locks."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 300).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise ResultsError(
            f"{folder} is in use by {holder}: two processes never write one run; wait for that one or stop it"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def refuse_other_formats(results_dir: str | os.PathLike[str], task: str, model: str, arm: str) -> None:
    """Refuse to add to an arm that holds results of another format, whatever their run ids: one table would mix them.

    Raises:
        ResultsError: names the first such folder.
    """
    path = _arm(results_dir, task, model, arm)
    with writing(path):
        for file in sorted(path.glob("*/run.yaml")):
            check_format(file.parent)


def _arm(results_dir: str | os.PathLike[str], task: str, model: str, arm: str) -> Path:
    return Path(results_dir, "runs", *map(_folder_name, (task, model, arm)))


def check_format(folder: Path) -> None:
    """Refuse a folder written by another version of this layout."""
    try:
        # The format stands first, and reading the whole file as YAML would take longer than all else before a run.
        with open(folder / "run.yaml", encoding="utf-8", errors="replace") as file:
            first = re.fullmatch(r"format: (\d+)\n", file.readline())
    except FileNotFoundError:
        return
    written = int(first.group(1)) if first else "unknown"
    if written != FORMAT:
        raise ResultsError(
            f"{folder} holds results of format {written}, this kvbench {kvbench.__version__} writes format {FORMAT}: "
            "move the folder away or choose another results_dir"
        )


def _run_yaml(identity: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    run = {
        "format": FORMAT,
        "kvbench": kvbench.__version__,
        "run_id": run_id(identity),
        "identity": _strict(identity),
        "config": _strict(config),
    }
    return yaml.safe_dump(run, sort_keys=False, allow_unicode=True)


def read_samples(path: Path) -> tuple[dict[str, Record], int]:
    """Newest record of every id, and the size in bytes up to the last whole line; what follows it was torn off."""
    data = path.read_bytes() if path.exists() else b""
    lines = data.split(b"\n")[:-1]
    records: dict[str, Record] = {}
    end = 0
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is None and number == len(lines):
            break  # after a power cut the last line can be there in length but not in content
        if record is None:
            raise ResultsError(
                f"{path}: line {number} is damaged; delete that line (sed -i {number}d {shlex.quote(str(path))}), "
                "and its sample runs again"
            )
        records[record["id"]] = record
        end += len(line) + 1
    return records, end


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None


def _started(status: Path) -> str:
    """When this run was first started; a status file that cannot be read (never seen, never fatal) starts now."""
    return str(_json_in(status).get("started") or _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_whole(path: Path, text: str, durable: bool = False) -> None:
    """Replace a file in one step: readers and `kill -9` see the old text or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(_strict(value), indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    """`value` as plain JSON: string keys, lists, and null for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def runs_in(paths: Sequence[Path]) -> Iterator[Path]:
    """The run folders at or under these paths, in order and none twice.

    Raises:
        ResultsError: there is none at one of them.
    """
    right = "a run is a folder such as results/runs/<task>/<model>/<arm>/<run id>"
    if not paths:
        raise ResultsError(f"no run given; {right}")
    seen: set[Path] = set()
    for path in paths:
        found = [path] if (path / "run.yaml").is_file() else sorted(set(_below(path)))
        if not found:
            raise ResultsError(f"{path}: {_no_run(path)}; {right}")
        yield from (folder for folder in found if folder not in seen)
        seen.update(found)


def _below(path: Path) -> Iterator[Path]:
    """The run folders at or under a path, with those that lost their run.yaml."""
    yield from (file.parent for file in path.rglob("run.yaml"))
    yield from (file.parent for file in path.rglob("status.json") if (file.parent / "samples.jsonl").is_file())


def _no_run(path: Path) -> str:
    """Why there is no run at a path."""
    if path.is_dir():
        return "no run in it"
    if not path.exists():
        return "no such folder"
    return f"a file; name its folder, {path.parent}" if (path.parent / "run.yaml").is_file() else "a file, and no run"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder for a while.

    Raises:
        ResultsError: another process holds it, or it cannot be written.
    """
    with writing(folder):
        lock = take_lock(folder)
    try:
        yield
    finally:
        os.close(lock)


def append_records(path: Path, records: Sequence[Record], end: int) -> None:
    """All of these records after the last whole line, or none: what a full disk cuts off is taken back."""
    rest = memoryview(b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records))
    with open(path, "r+b", buffering=0) as file:
        file.truncate(end)
        file.seek(end)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def state_of(folder: Path) -> str:
    """What status.json says of a run: "running", "interrupted", "finished"; "unknown" where it cannot be read."""
    return str(_json_in(folder / "status.json").get("state", "unknown"))


def tear_of(folder: Path, samples: int) -> str:
    """What is missing of a run that had finished, and the command that mends it; "" for nothing.

    Args:
        folder: the run's.
        samples: in its samples.jsonl now.
    """
    if not (folder / "run.yaml").is_file():
        return "run.yaml is missing; the command that made the run writes it anew"
    if lost := lost_samples(folder, samples):
        return lost
    if state_of(folder) == "finished" and not (folder / "summary.json").exists():
        return f"summary.json is missing; python -m kvbench.score {shlex.quote(str(folder))} --write writes it anew"
    return ""


def lost_samples(folder: Path, samples: int) -> str:
    """How many samples a run lacks of those that it had finished with, and the command that runs them again; or ""."""
    status, summary = _json_in(folder / "status.json"), _json_in(folder / "summary.json")
    counts = [summary.get("n")]
    if status.get("state") == "finished" and type(status.get("failed")) is type(status.get("done")) is int:
        counts.append(status["done"] + status["failed"])
    # One of the two files may be the damaged one.
    had = min((count for count in counts if type(count) is int), default=0)
    if samples >= had:
        return ""
    return f"{had - samples} of its {had} samples are missing; {command_of(folder)} runs them again"


def _json_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} where it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
