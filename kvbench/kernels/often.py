"""Something done at intervals while a block runs: signs of life of a run, and lines that say how
far it is.
"""

from __future__ import annotations

import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 30.0  # between two lines about the same, where there is no terminal


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Act so often while the block runs, in a thread of its own, which ends with it.

    What is no Exception, such as the end of standard output, stops the block as Ctrl-C does.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            try:
                act()
            except Exception:
                raise
            except BaseException:
                interrupt_main()
                return

    thread = threading.Thread(target=repeat, name=f"every {seconds:g} s", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
