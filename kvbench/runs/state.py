"""How a run is doing, from its folder alone: how far it is, and whether whoever runs it is still
there. No torch.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvbench.runs.plausible import impossible_status
from kvbench.runs.stored import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    ResultsError,
    archive_of,
    is_there,
    json_in,
    printable,
    shards_of,
    using,
)

WATCH_SECONDS = BEAT_SECONDS + 5.0
LONGEST_SKEW = 86400.0  # seconds between the clocks of two machines
LEAST_SHARE = 1e-6  # of the work: a smaller share says nothing of what is left
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("state", "began", "updated", "host"), (str,)),
    **dict.fromkeys(("done", "failed", "total", "ran", "pid"), (int,)),
    "share": (float, int),
}


class State(NamedTuple):
    """A run, as its status files say.

    Attributes
    ----------
    path
        the run folder.
    state
        "finished"; "running"; "dead": its file says "running", but its process is gone from this
        machine or gives no sign of life; "stopped" with Ctrl-C or SIGTERM; "interrupted" by an
        error; "waiting" for shards that have not begun; "unknown".
    done, failed
        samples.
    total
        samples in all; None where nobody said.
    rate
        samples a minute of those that run now; None where none does, or none has one yet.
    left_s
        seconds until the slowest of them has no more; None as above.
    silent_s
        seconds since the last sign of life; None where there is none.
    running, shards
        jobs that run now, and jobs that share out the samples, 1 for a run that is not shared out.
    """

    path: Path
    state: str
    done: int
    failed: int
    total: int | None
    rate: float | None
    left_s: float | None
    silent_s: float | None
    running: int
    shards: int


class _Status(NamedTuple):
    """What a status file says, and its age in seconds, below 0 where the clock of who wrote it is
    ahead.

    Attributes
    ----------
    moves
        whether it has got a new time since one looked before; None: nobody did.
    """

    says: Mapping[str, Any]
    age: float
    moves: bool | None = None

    @property
    def state(self) -> str:
        state = str(self.says.get("state", "unknown"))
        if state != "running":
            return state
        is_dead = (
            not self.moves if self.moves is not None else self.age > DEAD_SECONDS or self._gone()
        )
        return "dead" if is_dead else state

    @property
    def is_doubtful(self) -> bool:
        """Whether its age may be that of a run that lives, or of one that is dead, on a machine of
        another clock.
        """
        elsewhere = self.says.get("host") != socket.gethostname()
        return (
            self.says.get("state") == "running"
            and elsewhere
            and DEAD_SECONDS < abs(self.age) < LONGEST_SKEW
        )

    def _gone(self) -> bool:
        """Whether the process ran on this machine and is there no more; of another machine's
        nothing is known.
        """
        pid = self.says.get("pid", 0)
        if pid < 1 or self.says.get("host") != socket.gethostname():
            return False
        try:
            with suppress(PermissionError):  # another user's lives
                os.kill(pid, 0)  # sends nothing
        except (ProcessLookupError, OverflowError):
            return True
        return False

    @property
    def pace(self) -> tuple[float, float | None] | None:
        """Samples a minute since its start, and the seconds that it has left; None before its first
        sample.
        """
        says = self.says
        try:
            elapsed = (
                datetime.fromisoformat(says["updated"]) - datetime.fromisoformat(says["began"])
            ).total_seconds()
            ran, share = says["ran"], says["share"]
        except (KeyError, TypeError, ValueError):
            return None
        if ran < 1 or elapsed <= 0:
            return None
        remaining = elapsed * (1 - share) / share if LEAST_SHARE < share <= 1 else None
        return 60 * ran / elapsed, remaining


def doubtful(folders: Iterable[Path]) -> dict[Path, float]:
    """The status files of runs of which the clocks of two machines may say wrongly that they are
    dead, or not, with their times: who lives gives it another one within `WATCH_SECONDS`. What
    cannot be read is passed over.
    """
    times: dict[Path, float] = {}
    for folder in folders:
        with suppress(ResultsError), using(folder):
            for file in (
                folder / "status.json",
                *(shard / "status.json" for shard in shards_of(folder)),
            ):
                if archive_of(folder) is None and (status := _status(file)) and status.is_doubtful:
                    times[file] = file.stat().st_mtime
    return times


def state_of(folder: Path, before: Mapping[Path, float] = MappingProxyType({})) -> State:
    """The state of a run folder, its shards taken together.

    Parameters
    ----------
    folder
        of the run.
    before
        what `doubtful` gave, `WATCH_SECONDS` ago.

    Raises
    ------
    ResultsError
        it may not be read, or its numbers cannot be.
    """
    with using(folder):
        is_there(folder / "status.json")  # else what may not be read looks as if it were not there
        run_status = _status(folder / "status.json", before)
        files = {
            shard / "status.json": int(number[1])
            for shard in shards_of(folder)
            if (number := _of(shard))
        }
        shards = [status for file in files if (status := _status(file, before))]
    statuses = [*([run_status] if run_status else []), *shards]
    running = [status for status in statuses if status.state == "running"]
    totals = [total for status in statuses if (total := status.says.get("total"))]
    paces = [pace for status in running if (pace := status.pace)]
    return State(
        folder,
        _overall_state(
            [status.state for status in shards] or [status.state for status in statuses]
        ),
        sum(status.says.get("done", 0) for status in statuses),
        sum(status.says.get("failed", 0) for status in statuses),
        max(totals, default=None),
        sum(rate for rate, _ in paces) if paces else None,
        max((seconds for _, seconds in paces if seconds is not None), default=None),
        min((max(0.0, status.age) for status in statuses), default=None),
        len(running),
        max(files.values(), default=1),
    )


def _of(shard: Path) -> re.Match[str] | None:
    """How many jobs share out a run, by the folder of one of them."""
    return re.fullmatch(r"\d{1,6}-of-(\d{1,6})", shard.name)


def _overall_state(states: Sequence[str]) -> str:
    """One word for a run: "running" if any part runs, else the state that most needs a look."""
    for state in ("running", "dead", "interrupted", "stopped"):
        if state in states:
            return state
    return "waiting" if len(states) > 1 else next(iter(states), "unknown")


def _status(file: Path, before: Mapping[Path, float] = MappingProxyType({})) -> _Status | None:
    """A status file, of which what has another type than kvbench writes says nothing; None where it
    cannot be read.
    """
    says = json_in(file)  # opening asks a file server for the file's present time
    try:
        written = (archive_of(file.parent) or file).stat().st_mtime
    except OSError:
        return None
    plain = {key: value for key, value in says.items() if type(value) in TYPES.get(key, ())}
    if reason := impossible_status(plain):
        raise ResultsError(f"{file}: {printable(reason)}")
    moves = written != before[file] if file in before else None
    return _Status(plain, 0.0 if moves else time.time() - written, moves) if says else None
