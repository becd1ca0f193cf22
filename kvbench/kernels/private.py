"""Folders of files that run as whoever reads them, to which nobody else can write.

Owner and mode decide, as for the keys of ssh, of all folders above, too.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


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
