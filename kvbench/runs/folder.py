"""Run folders: what a run writes, and how the next start picks it up again.

A folder belongs to one identity (config, protocol, model revision, data, sources) and to one
process at a time, or to several that share out its samples, each with a folder of its own in it
until the last one is done (`Shard`). Samples are appended one line each and are safe once `add`
returns, so `kill -9` costs at most the sample in flight. Nothing here knows a model or a method,
and nothing imports torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import resource
import shlex
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import kvbench
from kvbench.kernels.often import every
from kvbench.runs.command import command_of
from kvbench.runs.identity import earlier_ids, run_id
from kvbench.runs.stored import (
    BEAT_SECONDS,
    FORMAT,
    SHARDS,
    Record,
    ResultsError,
    contents,
    is_there,
    json_in,
    of_shards,
    printable,
    read_run,
    read_run_yaml,
    read_samples,
    record_in,
    refuse_archive,
)
from kvbench.tasks import WHOLE, Shard

# open files that a run needs besides: a model's, data, compiled kernels, what is written and closed
# again
RESERVE = 48
MERGE_SECONDS = 60.0  # the longest that a shard waits for another one that merges


# --------------------------------------------------------------------------------------------------
# The folder


class RunFolder:
    """One run's folder, `<results_dir>/runs/<task>/<model>/<arm>/<run id>`, held by this process
    until closed.

        with RunFolder.open("results", "passkey", "tiny", "quest-64", identity, config) as folder:
            for sample in samples:
                if sample.id not in folder.done:
                    folder.add(run(sample))
            folder.finish(summarise(folder.records.values(), task.metric))

    Files: `run.yaml` (what ran), `samples.jsonl` (one record a line, newest line of an id wins),
    `status.json`, and `summary.json`, which is there only while it covers every line of
    `samples.jsonl`. A record is a dict of JSON values with an "id"; one with an "error" is kept and
    counted, but is not done and runs again at the next start.

    States: "running", "finished", "stopped" (Ctrl-C or SIGTERM), "interrupted" (an error ended it),
    and "waiting", where the shards that ran so far have been merged and others are still to come.
    "running" under a free lock means killed.

    Attributes
    ----------
    path
        the folder.
    records
        newest record of every sample tried, by id, in the order they were first written; those of
        other shards are as they were when this one was opened.
    done
        those without an error.
    finished
        the run had finished when it was opened.
    had
        samples with which it had finished, when it was opened; 0: it had not.
    tear
        what had been lost since it finished, when it was opened; "" for nothing. Lost samples run
        again.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        """Use `open`."""
        self.path = path
        self._job_dir = (
            path if shard == WHOLE else path / SHARDS / f"{shard.number + 1}-of-{shard.of}"
        )
        self._mine, self._run_lock = ExitStack(), ExitStack()
        self._state = "running"
        self._total = self._ran = 0
        self._share = 0.0
        self._began = self._started = _now()
        self._others = (0, 0)

    @classmethod
    def open(
        cls,
        results_dir: str | os.PathLike[str],
        task: str,
        model: str,
        arm: str,
        identity: Mapping[str, Any],
        config: Mapping[str, Any],
        shard: Shard = WHOLE,
    ) -> RunFolder:
        """Take the folder of `identity`, make it if it is new, and read back what is finished.

        Parameters
        ----------
        results_dir
            where all results lie.
        task, model, arm
            folder names for people; characters unfit for a path become "-".
        identity
            all that may change a number; its hash is the run id.
        config
            the resolved config, written to run.yaml for the reader and for reports.
        shard
            which samples this process has. The whole run takes in what shards left.

        Raises
        ------
        ResultsError
            another process holds the folder, another version wrote it, a line in the middle of
            samples.jsonl is damaged, or results_dir cannot be written.
        """
        folder = cls(_of_identity(arm_folder(results_dir, task, model, arm), identity), shard)
        with writing(folder.path), ExitStack() as failed:
            failed.push(folder._run_lock)
            failed.push(folder._mine)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._take(shard)
            folder._begin_facts(identity, config)
            folder._write_status()
            failed.pop_all()  # from here on the locks live until the folder is closed
        return folder

    def _take(self, shard: Shard) -> None:
        """Lock the folder, and read what is there."""
        alone = self._job_dir == self.path
        self._lock = take_lock(self.path, shared=not alone)
        self._run_lock.callback(os.close, self._lock)
        check_format(self.path)
        if alone:
            _merge_shards(self.path)
        else:
            # not before the lock: shards may be merged at this moment
            self._job_dir.mkdir(parents=True, exist_ok=True)
            for other in (self.path / SHARDS).iterdir():
                # its samples are not apart from ours
                if not other.name.endswith(f"-of-{shard.of}"):
                    with run_lock(other):
                        pass
            self._mine.callback(os.close, take_lock(self._job_dir))
        mine, self._end = read_samples(self._job_dir / "samples.jsonl")
        with self._opened(os.O_CREAT) as samples:
            os.ftruncate(samples, self._end)
        self._know(mine if alone else read_run(self.path))
        done = sum(not record.get("error") for record in mine.values())
        self._others = (
            len(self.done) - done,
            len(self.records) - len(self.done) - (len(mine) - done),
        )
        self._started = _started(self._job_dir / "status.json")
        self.finished = (self.path / "summary.json").exists()
        self.had, self.tear = samples_had(self.path), lost_samples(self.path, len(self.records))

    def _begin_facts(self, identity: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """What run.yaml will say; while samples are there it is of those who made them, until
        another one comes.

        Only that more samples are asked for is written at once: fewer are no news of a run that has
        more.
        """
        there = None
        with suppress(ResultsError):
            there = read_run_yaml(self.path) if self.records else None
        if there is not None and "task" in config:
            before, config = there["config"], _asking_most(config, there["config"])
            if before["task"].get("limit") != config["task"]["limit"]:
                before["task"]["limit"] = config["task"]["limit"]
                _write_run_yaml(self.path, there, self._job_dir)
        self._facts: dict[str, Any] | None = _run_yaml(identity, config)
        if there is None:
            self._claim_run_yaml()

    def _claim_run_yaml(self) -> None:
        """From here on run.yaml is of this process."""
        if self._facts is not None:
            _write_run_yaml(self.path, self._facts, self._job_dir)
        self._facts = None

    def _know(self, records: dict[str, Record]) -> None:
        self.records = records
        self.done = {key: record for key, record in records.items() if not record.get("error")}

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._run_lock, self._mine:  # the lock of the run goes last, whatever happens
            if self._state == "running":
                self.leave(interrupted=kind is None or issubclass(kind, Exception))

    def leave(self, interrupted: bool) -> None:
        """No further sample comes from here: an error interrupted the run, or a signal
        stopped it.
        """
        self._state = "interrupted" if interrupted else "stopped"
        self._write_status()

    def expect(self, total: int) -> None:
        """Say how many samples the run shall have, those of other shards included; the pace counts
        from here.

        A run that has more already keeps them.
        """
        self._total, self._began = max(total, len(self.records)), _now()
        self._write_status()

    def add(self, record: Mapping[str, Any], share: float = 0.0) -> None:
        """Append one sample's record; on the disk when this returns.

        NaN and infinity are stored as null.

        Parameters
        ----------
        record
            of the sample.
        share
            of the work of this start that is done with it, 0..1; 0: not known.

        Raises
        ------
        ResultsError
            it could not be read back, or not be written.
        """
        plain: Record = _strict(record)
        if not isinstance(key := plain.get("id"), str):
            raise ValueError(f"a sample record needs an 'id' that is a string, not {key!r}")
        line = json.dumps(plain, allow_nan=False).encode()
        if reason := record_in(line)[1]:
            raise ResultsError(
                f"{self.path}: the record of {key} could not be read back ({printable(reason)})"
            )
        with writing(self.path):
            self._claim_run_yaml()
        if self._job_dir == self.path:
            (self.path / "summary.json").unlink(missing_ok=True)
        with writing(self.path), self._opened() as samples:
            self._append(samples, line + b"\n")
            self.records[key] = plain
            if plain.get("error"):
                self.done.pop(key, None)
            else:
                self.done[key] = plain
            # Most of the time passes here: Ctrl-C now leaves the record where it is.
            os.fsync(samples)
        self._state = "running"
        self._ran += 1
        self._share = share
        self._write_status()

    def gathered(self, ids: Collection[str]) -> bool:
        """Whether the samples of these ids are all here, tried or done; asked when this process has
        no more.

        The last of several shards gathers what all of them have.
        """
        if self._job_dir == self.path:
            return True
        self._state = "finished"
        self._write_status()
        self._mine.close()
        try:
            # Gives up the shared lock first, so that of shards that end at once the last to come
            # here is alone.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with writing(self.path):
            _merge_shards(self.path)
            self._job_dir, self._others = self.path, (0, 0)
            self._know(read_samples(self.path / "samples.jsonl")[0])
        self._started = _started(self.path / "status.json")
        complete = self.records.keys() >= set(ids)
        self._state = "running" if complete else "waiting"
        self._write_status()
        return complete

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        with writing(self.path):
            write_whole(self.path / "summary.json", _json(summary), durable=True)
        self._state = "finished"
        self._write_status()

    def beat(self) -> None:
        """Give a sign of life: status.json gets a new time.

        What cannot be written shows where a sample is.
        """
        with suppress(OSError):
            os.utime(self._job_dir / "status.json", follow_symlinks=False)

    @contextmanager
    def _opened(self, more: int = 0) -> Iterator[int]:
        """samples.jsonl, open no longer than it is written: a sweep has many folders."""
        samples = os.open(
            self._job_dir / "samples.jsonl", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | more, 0o666
        )
        try:
            yield samples
        finally:
            os.close(samples)

    def _append(self, samples: int, line: bytes) -> None:
        """Write one whole line or none: what a full disk or Ctrl-C cuts off is taken back."""
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(samples, rest) :]
        except BaseException:
            os.ftruncate(samples, self._end)
            raise
        self._end += len(line)

    def _write_status(self) -> None:
        done, failed = self._others
        status = {
            "state": self._state,
            "done": len(self.done) - done,
            "failed": len(self.records) - len(self.done) - failed,
            "total": self._total or None,
            "started": self._started,
            "began": self._began,
            "ran": self._ran,
            "share": self._share,
            "updated": _now(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        with writing(self.path):
            write_whole(self._job_dir / "status.json", _json(status))


def unlinked(path: str, flags: int) -> int:
    """An opener that follows no symbolic link: a file to be written lies where it says, whoever
    made its folder.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which folder could not be written, and which key moves it elsewhere."""
    refuse_archive(path)
    try:
        yield
    except OSError as error:
        reason = (
            f"{error.filename} is a symbolic link"
            if error.errno == errno.ELOOP
            else error.strerror or error
        )
        raise ResultsError(f"cannot write results to {path} ({reason}): see results_dir") from error


def _folder_name(name: str) -> str:
    """`name` as one path component; hub ids hold slashes, sweeps hold anything."""
    return re.sub(r"[^\w.=,+-]+", "-", name).lstrip(".") or "-"


def take_lock(folder: Path, shared: bool = False) -> int:
    """A lock on the folder.

    The kernel frees it with the process, however that ends: no stale locks.

    Parameters
    ----------
    folder
        to lock.
    shared
        with others who share it; whoever merges shards is waited for.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    kind, patience = (fcntl.LOCK_SH, MERGE_SECONDS) if shared else (fcntl.LOCK_EX, 0.0)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            holder = os.read(lock, 300).decode(errors="replace").strip() or "another process"
            os.close(lock)
            raise ResultsError(
                f"{folder} is in use by {holder}: two processes never write one run; wait for that"
                " one or stop it"
            ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def refuse_other_formats(arm: Path) -> None:
    """Refuse to add to an arm that holds results of another format, whatever their run ids: one
    table would mix them.

    Parameters
    ----------
    arm
        its folder.

    Raises
    ------
    ResultsError
        names the first such folder.
    """
    with writing(arm):
        for file in sorted(arm.glob("*/run.yaml")):
            check_format(file.parent)


def arm_folder(results_dir: str | os.PathLike[str], task: str, model: str, arm: str) -> Path:
    """The folder of all runs of an arm."""
    return Path(results_dir, "runs", *map(_folder_name, (task, model, arm)))


def _of_identity(arm: Path, identity: Mapping[str, Any]) -> Path:
    """The folder of an identity among those of its arm: one with an earlier id where that
    is there.
    """
    current_id = run_id(identity)
    earlier = (arm / id for id in earlier_ids(current_id) if not (arm / current_id).exists())
    return next((folder for folder in earlier if folder.is_dir()), arm / current_id)


def check_format(folder: Path) -> None:
    """Refuse a folder written by another version of this layout."""
    try:
        # The format stands first, and reading the whole file as YAML would take longer than all
        # else before a run.
        content = contents(folder / "run.yaml")
    except FileNotFoundError:
        return
    if not content:  # after a power cut
        return
    first = re.match(rb"format: (\d{1,9})\n", content)
    written = int(first.group(1)) if first else "unknown"
    if written != FORMAT:
        raise ResultsError(
            f"{folder} holds results of format {written}, this kvbench {kvbench.__version__} writes"
            f" format {FORMAT}: move the folder away or choose another results_dir"
        )


def _run_yaml(identity: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kvbench": kvbench.__version__,
        "run_id": run_id(identity),
        "identity": _strict(identity),
        "config": _strict(config),
    }


def _asking_most(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the larger `task.limit` of two; None: no limit."""
    limits = [candidate["task"].get("limit") for candidate in (config, before)]
    most = max(limits) if all(type(limit) is int for limit in limits) else None
    return {**config, "task": {**config["task"], "limit": most}}


def _write_run_yaml(folder: Path, facts: Mapping[str, Any], within: Path) -> None:
    text = yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True)
    write_whole(folder / "run.yaml", text, durable=True, within=within)


def _merge_shards(folder: Path) -> None:
    """Take in what shards left; the caller alone holds the run.

    Killed in between, the next one does it again.
    """
    if not (folder / SHARDS).is_dir():
        return
    file = folder / "samples.jsonl"
    records, end = read_samples(file)
    if new := of_shards(folder, records):
        (folder / "summary.json").unlink(missing_ok=True)
        append_records(file, list(new.values()), end)
    shutil.rmtree(folder / SHARDS)


def _started(status: Path) -> str:
    """When this run was first started; a status file that cannot be read (never seen, never fatal)
    starts now.
    """
    return str(json_in(status).get("started") or _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_whole(path: Path, text: str, durable: bool = False, within: Path | None = None) -> None:
    """Replace a file in one step: readers and `kill -9` see the old text or the new, never half of
    it.

    Parameters
    ----------
    path
        the file.
    text
        all of it.
    durable
        on the disk when this returns.
    within
        the folder where the new text is written first, for files that several processes replace.
    """
    temporary = (within or path.parent) / f".{path.name}.new"
    temporary.unlink(missing_ok=True)  # of a writer that was killed, or a stranger's pipe
    with open(temporary, "x", encoding="utf-8", opener=unlinked) as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(_strict(value), indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    """`value` as plain JSON: string keys, lists, and null for NaN and infinity, which JSON does not
    have.
    """
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder for a while.

    Raises
    ------
    ResultsError
        another process holds it, or it cannot be written.
    """
    with writing(folder):
        lock = take_lock(folder)
    try:
        yield
    finally:
        os.close(lock)


def append_records(path: Path, records: Sequence[Record], end: int) -> None:
    """All of these records after the last whole line, or none: what a full disk cuts off is taken
    back.
    """
    rest = memoryview(
        b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records)
    )
    with open(
        path, "r+b", buffering=0, opener=lambda path, flags: unlinked(path, flags | os.O_CREAT)
    ) as file:
        file.truncate(end)
        file.seek(end)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def stored_state(folder: Path) -> str:
    """What status.json says of a run: "running", "interrupted", "finished"; "unknown" where it
    cannot be read.
    """
    return str(json_in(folder / "status.json").get("state", "unknown"))


def tear_of(folder: Path, samples: int) -> str:
    """What is missing of a run that had finished, and the command that mends it; "" for nothing.

    Parameters
    ----------
    folder
        the run's.
    samples
        in its samples.jsonl now.
    """
    if not is_there(folder / "run.yaml"):
        return "run.yaml is missing; the command that made the run writes it anew"
    if lost := lost_samples(folder, samples):
        return lost
    finished = json_in(folder / "summary.json").get("n")
    if type(finished) is int and samples > finished:
        return (
            f"samples.jsonl has {samples} samples, and {finished} when the run finished; the same"
            " command says more"
        )
    if stored_state(folder) == "finished" and not is_there(folder / "summary.json"):
        return (
            f"summary.json is missing; kvbench score {shlex.quote(str(folder))} --write writes it"
            " anew"
        )
    return ""


def lost_samples(folder: Path, samples: int) -> str:
    """How many samples a run lacks of those that it had finished with, and the command that runs
    them again; or "".
    """
    had = samples_had(folder)
    if samples >= had:
        return ""
    return f"{had - samples} of its {had} samples are missing; {command_of(folder)} runs them again"


def samples_had(folder: Path) -> int:
    """With how many samples a run had finished; 0: with none, or it is not known."""
    status, summary = json_in(folder / "status.json"), json_in(folder / "summary.json")
    counts = [summary.get("n")]
    if (
        status.get("state") == "finished"
        and type(status.get("failed")) is type(status.get("done")) is int
    ):
        counts.append(status["done"] + status["failed"])
    # One of the two files may be the damaged one.
    return min((count for count in counts if type(count) is int), default=0)


# --------------------------------------------------------------------------------------------------
# Several at once


@contextmanager
def beating(folders: Sequence[RunFolder]) -> Iterator[None]:
    """Give signs of life of these folders while the block runs.

    A lock or a process id says only on its own machine whether the process lives; a file's time
    says it on every machine that has mounted the folder.
    """

    def beat() -> None:
        for folder in folders:
            folder.beat()

    with every(BEAT_SECONDS, beat):
        yield


def folders_at_once(folders: int, shard: Shard = WHOLE) -> int:
    """How many of so many run folders can be held at once, 1 or more; the soft limit of open files
    is raised for them.

    Raises
    ------
    ResultsError
        not even one.
    """
    locks = 1 if shard == WHOLE else 2  # the lock of the run, and that of a shard's own part
    there = len(os.listdir("/dev/fd")) + RESERVE
    limit = _raised(there + folders * locks)
    room = (limit - there) // locks
    if room < 1:
        raise ResultsError(
            f"{limit} open files are allowed, and a run needs {there + locks}; raise them"
            " (ulimit -n)"
        )
    return min(folders, room)


def _raised(required: int) -> int:
    """The limit of open files, raised as far as that is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return required
    most = required if hard == resource.RLIM_INFINITY else min(required, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # some systems allow less than they say
        return soft
    return most
