"""What files hold, as a hash: all of their bytes count.

A large file is read once for as long as it stays as it is.

What a file held is remembered under `$KVBENCH_HOME` by its place on the disk, its size and the
times of its last changes. What lies there is read as data, and only if it is the user's own.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from kvbench.config import ConfigError, home

LARGE = 64 << 20  # bytes: what is smaller is read each time
BLOCK = 1 << 22
MOST_REMEMBERED = 1000  # files
MOST_BYTES = 1 << 20  # of what is remembered
SETTLED = 2 * 10**9  # ns: what was changed this recently may change again and keep its times
REPORT_INTERVAL = 20.0  # seconds
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(files: Iterable[Path], kind: str) -> str:
    """A hash of files as `<kind>-<hash>`: of their names, sizes and all of their bytes.

    A line on stderr says where reading takes long.
    """
    digest, listed = hashlib.sha256(), sorted(files)
    large = digests_of(file for file in listed if file.stat().st_size > LARGE)
    for file in listed:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(large[file].encode() if file in large else file.read_bytes())
    return f"{kind}-{digest.hexdigest()[:16]}"


def digests_of(files: Iterable[Path]) -> dict[Path, str]:
    """The sha256 of files, each read whole unless it is remembered."""
    remembered, listed = _remembered(), list(files)
    keys = {file: _key(file.stat()) for file in listed}
    new = [file for file in listed if keys[file] not in remembered]
    progress = ReadProgress(sum(file.stat().st_size for file in new))
    for file in new:
        remembered[keys[file]] = _read(file, progress)
    if fresh := [keys[file] for file in new if _is_settled(file, keys[file])]:
        _remember({key: remembered[key] for key in fresh})
    return {file: remembered[keys[file]] for file in listed}


class ReadProgress:
    """Says on stderr how long reading takes yet, where that is more than a moment."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.begin = time.monotonic()
        self.next = self.begin + 1

    def add(self, count: int) -> None:
        """So many more have been read."""
        self.done += count
        now = time.monotonic()
        if now >= self.next:
            remaining = (self.total - self.done) * (now - self.begin) / self.done
            size = f"{self.total / 1e9:.1f} GB of weights"
            print(
                f"reading all {size}, which a run is named by, once: some {remaining:.0f} s left",
                file=sys.stderr,
            )
            self.next = now + REPORT_INTERVAL


def _read(file: Path, progress: ReadProgress) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            progress.add(len(block))
    return digest.hexdigest()


def _key(status: os.stat_result) -> str:
    """What names a file's content for as long as nobody writes to it.

    The time of the last change of its status moves whatever others are set.
    """
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, (status.st_dev, status.st_ino, status.st_size, *times)))


def _is_settled(file: Path, key: str) -> bool:
    """Whether a file is as it was before it was read, and for some time."""
    after = file.stat()
    return (
        _key(after) == key and time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > SETTLED
    )


def _remembered() -> dict[str, str]:
    file = home() / "digests.json"
    try:
        status = file.lstat()
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size > MOST_BYTES
        ):
            return {}
        listed = json.loads(file.read_bytes())
        return {key: value for key, value in listed.items() if _SHA256.fullmatch(value)}
    except (AttributeError, OSError, RecursionError, TypeError, ValueError):
        # a damaged file is made anew
        return {}


def _remember(new: dict[str, str]) -> None:
    newest = list((_remembered() | new).items())[-MOST_REMEMBERED:]
    # where nothing can be written, files are read again
    with contextlib.suppress(ConfigError, OSError):
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".digests-", dir=home()) as folder:
            file = Path(folder, "digests.json")
            file.write_text(json.dumps(dict(newest)))
            file.replace(home() / file.name)
