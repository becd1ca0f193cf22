"""Run folders: what a run writes, and how the next start picks it up again.

A folder belongs to one identity (config, protocol, model revision, data, sources) and to one process at a time.
Samples are appended one line each and are safe once `add` returns, so `kill -9` costs at most the sample in flight.
Nothing here knows a model or a method, and nothing imports torch.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import re
import socket
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import kvbench

FORMAT = 1  # of everything in a run folder; raised when an older reader would misread it

Record = dict[str, Any]


class ResultsError(RuntimeError):
    """A run folder cannot be used: held by another process, of another format, damaged, or not writable."""


# ---------------------------------------------------------------------------------------------------------------------
# Identity


def run_id(identity: Mapping[str, Any]) -> str:
    """12 hex digits naming `identity` (JSON values, finite numbers); key order does not matter, 1 and 1.0 differ."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _short(canonical.encode())


def source_hash(paths: Iterable[Path]) -> str:
    """12 hex digits of the names and bytes of these files, whatever their order and wherever the checkout lies."""
    files = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in set(paths))
    return _short(json.dumps(files).encode())


# What only checks, prints, stores or wires: counting it would throw away hours of results for a new progress bar. Tasks
# come in through `module_sources`, so that an edited task reruns its own runs only.
_NOT_NUMBERS = {
    "__init__.py",
    "__main__.py",
    "checks.py",
    "config.py",
    "demo.py",
    "hub.py",
    "launcher.py",
    "progress.py",
    "results.py",
    "run.py",
    "score.py",
    "smoke.py",
    "report",
    "tasks",
}


def harness_sources() -> list[Path]:
    """The kvbench files that can change a number: everything but what prints, stores, reports or is a task."""
    root = Path(__file__).parent
    return sorted(path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in _NOT_NUMBERS)


def module_sources(target: str) -> list[Path]:
    """The files behind a class or function such as "methods.quest.Quest", found without importing anything.

    The module's own file, every module it imports, directly or not, that belongs to the same package or lies outside
    the installed libraries (shared blocks, a parent method, a helper beside a user's own method), and the data files
    `data/<module>.*` beside each; nothing of the harness.

    Raises:
        ModuleNotFoundError: the module has no Python source.
    """
    module = target.rpartition(".")[0]
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = None if name in found else _source_file(name)
        if path is not None and not _is_harness(path) and (_top(name) == _top(module) or not _is_library(path)):
            found[name] = path
            waiting += _imported_names(name, path)
    if module not in found:
        raise ModuleNotFoundError(f"{target}: no Python source found for module {module!r}")
    data = {file for path in found.values() for file in path.parent.glob(f"data/{path.stem}.*")}
    return sorted({*found.values(), *data})


def _is_harness(path: Path) -> bool:
    """Whether a file is kvbench's own and no task: those that may change a number are `harness_sources`."""
    root = Path(__file__).parent
    return path.is_relative_to(root) and path.relative_to(root).parts[0] != "tasks"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _source_file(module: str) -> Path | None:
    """The file of a dotted module name. Only the top level is looked up by Python, as deeper look-ups would import."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    stems = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    places = [file for stem in stems for file in (stem.with_name(stem.name + ".py"), stem / "__init__.py")]
    candidates = places if rest else [Path(spec.origin)]
    return next((file for file in candidates if file.suffix == ".py" and file.is_file()), None)


def _is_library(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version the run records anyway."""
    standard = Path(sysconfig.get_path("stdlib"))
    return path.is_relative_to(standard) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _imported_names(module: str, path: Path) -> Iterator[str]:
    """Dotted names that may be modules imported by a file: `from a import b` gives both "a" and "a.b"."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(relative, package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


# ---------------------------------------------------------------------------------------------------------------------
# The folder


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
    """

    def __init__(self, path: Path, records: dict[str, Record], samples: int, end: int, held: ExitStack) -> None:
        """Use `open`. `samples` is the descriptor that appends, `end` the size up to the last whole line."""
        self.path = path
        self.records = records
        self.done = {key: record for key, record in records.items() if not record.get("error")}
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
    ) -> RunFolder:
        """Take the folder of `identity`, make it if it is new, and read back what is finished.

        Args:
            results_dir: where all results lie.
            task, model, arm: folder names for people; characters unfit for a path become "-".
            identity: all that may change a number; its hash is the run id.
            config: the resolved config, written to run.yaml for the reader and for reports.

        Raises:
            ResultsError: another process holds the folder, another version wrote it, a line in the middle of
                samples.jsonl is damaged, or results_dir cannot be written.
        """
        path = _arm(results_dir, task, model, arm) / run_id(identity)
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
            raise ResultsError(f"{path}: line {number} is damaged; delete that line, and its sample runs again")
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
    try:
        return str(json.loads(status.read_text())["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return _now()


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


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def summarise(records: Iterable[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """What summary.json holds, from sample records alone.

    Scores are means x 100 over all samples, a failed one counting 0; `score_ok` leaves the failed out; `stderr` is the
    standard error of the mean in the same units. Timings, audit, hardware and probes are over samples that did not
    fail; a broken budget rule, which fails its sample, still shows in the audit. Where samples belong to several groups
    (subsets, lengths), `groups` has each one's own, and `macro` the plain mean of theirs.
    What no sample measured is None or absent.

    Args:
        records: one record a sample, as in samples.jsonl.
        metric: the main score's name.
    """
    records = list(records)
    finished = [record for record in records if not record.get("error")]
    names = sorted({metric}.union(*(record.get("scores") or {} for record in finished)))
    main = [_score(record, metric) for record in records]
    groups = _groups(records, metric)
    summary: dict[str, Any] = {
        "score": _percent(main),
        "score_ok": _percent([_score(record, metric) for record in finished]),
        "scores": {name: _percent(_scores(records, name)) for name in names},
        "n": len(records),
        "failed": len(records) - len(finished),
        "stderr": _standard_error(main),
        "groups": groups,
        "macro": _macro(groups),
        "latency": _latency(finished),
        "audit": _combined([record.get("audit") or {} for record in finished]),
        "hardware": _combined([record.get("hardware") or {} for record in finished]),
        "probe": _combined([record.get("probe") or {} for record in finished]),
    }
    if any((record.get("audit") or {}).get("over_rule") for record in records):
        summary["audit"] = {**summary["audit"], "over_rule": True}
    optional = ("groups", "macro", "audit", "hardware", "probe")
    return {key: value for key, value in summary.items() if value or key not in optional}


def _score(record: Mapping[str, Any], name: str) -> float:
    """A record's score, 0..1; 0 where it failed or the score is missing or not a number."""
    value: Any = (record.get("scores") or {}).get(name)
    return float(value) if not record.get("error") and _is_number(value) else 0.0


def _scores(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The scores of that name, 0..1, in the groups that have it: subsets may have metrics of their own."""
    groups = {record.get("group") for record in records if name in (record.get("scores") or {})}
    return [_score(record, name) for record in records if not groups or record.get("group") in groups]


def _percent(scores: Sequence[float]) -> float | None:
    mean = _mean(scores)
    return None if mean is None else 100 * mean


def _standard_error(scores: Sequence[float]) -> float | None:
    """100 * s / sqrt(n), s the sample standard deviation (n - 1); None for fewer than two samples."""
    if len(scores) < 2:
        return None
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return 100 * math.sqrt(variance / len(scores))


def _groups(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[str, Any]]:
    """Main score, standard error, samples and failures of each group, in order of appearance; {} for a single one."""
    members: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        members.setdefault(record.get("group") or "", []).append(record)
    if len(members) < 2:
        return {}
    found = {}
    for group, own in members.items():
        scores = [_score(record, metric) for record in own]
        failed = sum(bool(record.get("error")) for record in own)
        found[group] = {"score": _percent(scores), "stderr": _standard_error(scores), "n": len(own), "failed": failed}
    return found


def _macro(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The plain mean over groups, whatever their sizes, and its standard error."""
    if not groups:
        return {}
    errors = [group["stderr"] for group in groups.values()]
    known = None not in errors
    return {
        "score": math.fsum(group["score"] for group in groups.values()) / len(groups),
        "stderr": math.sqrt(math.fsum(error**2 for error in errors)) / len(groups) if known else None,
    }


def _latency(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over samples; tpot_ms_p50 and _p95 are the mean of the samples' own percentiles over their steps."""
    tpot = [record.get("tpot_ms") or {} for record in records]
    breakdown = [record["breakdown_ms"] for record in records if record.get("breakdown_ms")]
    parts = dict.fromkeys(part for one in breakdown for part in one)
    return {
        "ttft_s": _mean(record.get("ttft_s") for record in records),
        "tt2t_s": _mean(record.get("tt2t_s") for record in records),
        "tpot_ms_mean": _mean(one.get("mean") for one in tpot),
        "tpot_ms_p50": _mean(one.get("p50") for one in tpot),
        "tpot_ms_p95": _mean(one.get("p95") for one in tpot),
        # A part that a sample never entered took 0 ms there: so the means still add up to the step.
        "breakdown_ms": {part: _mean(one.get(part, 0.0) for one in breakdown) for part in parts},
    }


def _combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value per key of several samples' flat dicts; nested values are left to the sample lines."""
    keys = dict.fromkeys(key for part in parts for key in part)
    values = {key: [part[key] for part in parts if _is_flat(part.get(key))] for key in keys}
    return {key: _combine(key)(found) for key, found in values.items() if found}


def _combine(key: str) -> Callable[[list[Any]], Any]:
    """How values of one audit, hardware or probe key become one: peaks by maximum, flags by any, amounts by mean."""
    if key.endswith(("_max", "_bytes")):
        return max
    return _common


def _common(values: list[Any]) -> Any:
    """True if any flag is; the one value if all agree; the mean of numbers; else the different words, sorted."""
    if all(isinstance(value, bool) for value in values):
        return any(values)
    if all(value == values[0] for value in values):
        return values[0]
    if all(map(_is_number, values)):
        return _mean(values)
    return sorted(set(map(str, values)))


def _mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among `values`, exact in any order; None if there is none."""
    numbers = [value for value in values if _is_number(value)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_flat(value: Any) -> bool:
    return isinstance(value, bool | str) or _is_number(value)
