"""Signals that ask a run to stop, as exceptions: all that tidies up after Ctrl-C then does so after
them, too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM came: `kill`, `scancel`, or the end of a job's time."""


@contextmanager
def stopped_by(*signals: signal.Signals) -> Iterator[None]:
    """Let SIGTERM raise `Terminated`, and any other of these signals KeyboardInterrupt, while the
    block runs.
    """

    def stop(number: int, _: object) -> NoReturn:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
