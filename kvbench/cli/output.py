"""What commands print on: a reader who has enough (`| head`), a full device, a stream that was
closed (`>&-`), a terminal with few characters (`kvbench.runs.terminal`).

Every command of kvbench goes through `printing`, so that none of them meets these by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from kvbench.runs.terminal import fit_streams


class OutputLost(BaseException):
    """Standard output takes no more.

    No Exception: no sample has failed by it, and a run is stopped as by Ctrl-C.
    """


class Stream:
    """A standard stream that ends once: what it cannot take is dropped, and so is all that follows.

    Parameters
    ----------
    file
        the stream.
    stops
        its end is the command's, by `OutputLost`.

    Attributes
    ----------
    lost
        why it takes no more; None while it does.
    """

    def __init__(self, file: TextIO, stops: bool) -> None:
        self._file, self._stops = file, stops
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Print a text."""
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what is still buffered."""
        self._try(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.lost = error
            # Python writes at exit what is still buffered, and would fail once more.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
            if self._stops:
                raise OutputLost from error


def printing(main: Callable[[], int]) -> int:
    """Run a command; returns its exit code, or one of its output's end.

    These are 141 where nobody reads on, as SIGPIPE would have it, and 2, with a line, where the
    output cannot be written. What cannot be written to standard error is dropped, and what goes to
    a closed stream, too.
    """
    _open_closed()
    fit_streams()
    streams = sys.stdout, sys.stderr
    out, errors = Stream(sys.stdout, stops=True), Stream(sys.stderr, stops=False)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, errors)
    code = 0
    try:
        try:
            code = main()
        finally:
            out.flush()
    except OutputLost:
        pass  # handled below: a thread may have met it, too
    finally:
        sys.stdout, sys.stderr = streams
    if isinstance(out.lost, BrokenPipeError):
        return 128 + signal.SIGPIPE
    if out.lost is not None:
        print(
            f"kvbench: standard output: {out.lost.strerror}; expected one with room",
            file=cast(TextIO, errors),
        )
        return 2
    return code


def _open_closed() -> None:
    """Open to nowhere the standard streams that were closed: the next file would get their number,
    and their output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    # for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
