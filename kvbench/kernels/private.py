"""Files that run as whoever reads them: read where nobody else can have written them, and whole.

Owner and mode decide, as for the keys of ssh, of all folders above, too. What is cut short or
damaged is as good as not there.
"""

from __future__ import annotations

import functools
import grp
import hashlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def open_to_others(folder: Path) -> Path | None:
    """Of a folder and those above it the first that another user can write to; None: there is none.

    Parameters
    ----------
    folder
        absolute, without symbolic links. It, and some above it, may not be there yet.

    Raises
    ------
    OSError
        one cannot be looked at.
    """
    owners = {0, os.geteuid(), os.stat("/").st_uid}  # in a container root may have another number
    for part in (folder, *folder.parents):
        try:
            facts = part.stat()
        except FileNotFoundError:
            continue
        # as /tmp: what is ours in it stays ours
        is_sticky = part != folder and facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in owners or (_others_write(facts) and not is_sticky):
            return part
    return None


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone."""
    for part in reversed([folder, *folder.parents]):
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)


def read_intact(path: Path, is_private: bool) -> bytes | None:
    """What `write_intact` wrote; None where there is no such file.

    Parameters
    ----------
    path
        of the file.
    is_private
        refuse a file that another user can have written.

    Raises
    ------
    ValueError
        it is damaged, or refused; says why.
    """
    try:
        file = open(path, "rb", opener=_unlinked)  # noqa: SIM115  # closed below
    except OSError:
        return None
    with file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("no file")
        if is_private and (facts.st_uid not in (0, os.geteuid()) or _others_write(facts)):
            raise ValueError("another user can have written it")
        digest, content = file.read(_DIGEST), file.read()
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("damaged")
    return content


def write_intact(path: Path, content: bytes) -> None:
    """Replace a file in one step; everybody may read it, and this user alone write it."""
    number, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(number, "wb") as file:
            os.fchmod(number, 0o644)
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unlinked(path: str, flags: int) -> int:
    # a pipe would wait for its other end
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _others_write(facts: os.stat_result) -> bool:
    group = facts.st_mode & stat.S_IWGRP and not _is_of_one(facts.st_gid)
    return bool(facts.st_mode & stat.S_IWOTH or group)


@functools.cache
def _is_of_one(group: int) -> bool:
    """Whether a group is this user's alone: Linux makes one for each user, of the same name."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (group, entry.gr_name) and {*entry.gr_mem} <= {
        user.pw_name
    }
