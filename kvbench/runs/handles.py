"""How many run folders a process can hold at once: each takes an open file, and the system allows
so many. No torch.
"""

from __future__ import annotations

import os
import resource

from kvbench.runs.folder import WHOLE, ResultsError, Shard

# open files that a run needs besides: a model's, data, compiled kernels, what is written and closed
# again
RESERVE = 48


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
