"""Kernels compiled side by side, in processes of their own, before anything waits for them.

`python -m kvbench.kernels.build` is such a process: it reads a line of JSON for each kernel and
answers with a line.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types

from kvbench.kernels.compiled import KERNELS, on_disk
from kvbench.kernels.often import every

MOST_PROCESSES = 8
TELL_SECONDS = 1.0
WORTH_A_PROCESS = 6.0  # seconds of compilation; a process takes three to start


class Job(NamedTuple):
    """A kernel that is to be compiled.

    Attributes
    ----------
    kernel
        module:name.
    types
        of its arguments, as `described`.
    seconds
        that it took once, without those that it calls.
    calls
        the jobs, by number, of the kernels that it calls, which come first.
    """

    kernel: str
    types: Any
    seconds: float
    calls: tuple[int, ...]

    def compile(self) -> None:
        """Compile it, or read it from disk."""
        self.dispatcher().compile(self.signature())

    def missing(self) -> bool:
        """Whether it is neither here nor on disk.

        A list may be older than the sources: what is gone is not missing.
        """
        try:
            dispatcher, kinds = self.dispatcher(), self.signature()
        except (ImportError, AttributeError, KeyError):
            return False
        return kinds not in dispatcher.overloads and not on_disk(dispatcher).has(
            kinds, dispatcher.targetctx.codegen()
        )

    def dispatcher(self) -> Any:
        """The kernel."""
        importlib.import_module(self.kernel.partition(":")[0])
        return KERNELS[self.kernel]

    def signature(self) -> tuple[types.Type, ...]:
        """The Numba types of its arguments."""
        return tuple(map(_typed, self.types))


def described(kind: types.Type) -> Any:
    """A Numba type as JSON: a number's name, [dtype, dimensions] of a contiguous array, {class:
    types} of a tuple.

    Raises
    ------
    ValueError
        it is of another kind, such as a literal.
    """
    if kind == types.none:
        return None
    if isinstance(kind, types.Array) and kind.layout == "C" and kind.mutable:
        is_record = isinstance(kind.dtype, types.Record)
        of = kind.dtype.dtype if is_record else np.dtype(kind.dtype.name)
        return [of.descr if of.names else of.name, kind.ndim]
    if (of := getattr(kind, "instance_class", None)) is not None:
        return {f"{of.__module__}:{of.__qualname__}": [*map(described, kind.types)]}
    if isinstance(kind, types.BaseTuple):
        return {"": [*map(described, kind)]}
    if isinstance(kind, (types.Integer, types.Float, types.Boolean)) and not isinstance(
        kind, types.Literal
    ):
        return str(kind)
    raise ValueError(str(kind))


def _typed(description: Any) -> types.Type:
    """The Numba type that `described` describes."""
    if description is None:
        return types.none
    if isinstance(description, str):
        return getattr(types, {"bool": "boolean"}.get(description, description))
    if isinstance(description, dict):
        [(name, parts)] = description.items()
        kinds = [_typed(part) for part in parts]
        of: Any = None
        if name:
            module, class_name = name.split(":")
            of = getattr(importlib.import_module(module), class_name)
        if hasattr(of, "numba_type"):
            return of.numba_type(kinds)
        return types.BaseTuple.from_types(kinds, of)
    of, dimensions = description
    fields = [tuple(field) for field in of] if isinstance(of, list) else of
    kind = np.dtype(fields, align=isinstance(of, list))
    return types.Array(from_dtype(kind), dimensions, "C")


def build(jobs: Sequence[Job], numbers: Sequence[int], say: Callable[[int, float], None]) -> None:
    """Compile the wanted ones of the jobs, this process among others; what fails is left to who
    calls it.

    Parameters
    ----------
    say
        called with how many are ready and the seconds that are left, before the first, as each is,
        and every `TELL_SECONDS`.
    """
    many = 1
    if sum(jobs[number].seconds for number in numbers) > WORTH_A_PROCESS:
        many = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(numbers))
    queue = _Queue(jobs, numbers, many, say)
    queue.tell()
    command = [sys.executable, "-m", "kvbench.kernels.build"]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    processes = [
        subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=none)
        for _ in range(many - 1)
    ]
    threads = [
        threading.Thread(target=_ask, args=(process, queue), daemon=True) for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        with every(TELL_SECONDS, queue.tell):
            while (number := queue.take()) is not None:
                with suppress(Exception):  # it comes again, and is said, where the kernel is called
                    jobs[number].compile()
                queue.done(number)
            for thread in threads:
                thread.join()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ask(process: subprocess.Popen[str], queue: _Queue) -> None:
    """Have a process compile one after another."""
    assert process.stdin is not None and process.stdout is not None
    while (number := queue.take()) is not None:
        try:
            process.stdin.write(json.dumps(queue.jobs[number]) + "\n")
            process.stdin.flush()
            process.stdout.readline()
        except OSError:  # it was killed
            pass
        finally:
            queue.done(number)


class _Queue:
    """Which job is next: none before those that it calls, and first what most of the others wait
    for; and how long all of them will take.

    Parameters
    ----------
    jobs, wanted, say
        see `build`.
    many
        processes.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        numbers: Sequence[int],
        many: int,
        say: Callable[[int, float], None],
    ) -> None:
        self.jobs, self._many = jobs, many
        self._say = say
        self._ready, self._began = threading.Condition(), time.monotonic()
        self._waiting, self._open = set(numbers), set(numbers)
        self._weight = {number: jobs[number].seconds for number in numbers}
        for number in sorted(numbers, reverse=True):  # who calls stands after what is called
            for called in self.jobs[number].calls:
                if called in self._weight:
                    path_seconds = self._weight[number] + jobs[called].seconds
                    self._weight[called] = max(self._weight[called], path_seconds)
        self._whole = sum(jobs[number].seconds for number in numbers)

    def take(self) -> int | None:
        """The next job; None where there is no more.

        Waits where all that are left wait themselves.
        """
        with self._ready:
            while self._waiting:
                jobs = self.jobs
                free = [at for at in self._waiting if self._open.isdisjoint(jobs[at].calls)]
                if free:
                    number = max(free, key=self._weight.__getitem__)
                    self._waiting.remove(number)
                    return number
                self._ready.wait()
            return None

    def done(self, number: int) -> None:
        """A job is over, whether it compiled or not."""
        with self._ready:
            self._open.remove(number)
            self.tell()
            self._ready.notify_all()

    def tell(self) -> None:
        """Say how many are ready, and the seconds that are left."""
        with self._ready:
            seconds = self._left(time.monotonic() - self._began)
            self._say(len(self._weight) - len(self._open), seconds)

    def _left(self, elapsed: float) -> float:
        """By what has passed: of the jobs that are compiled now half counts as done, until one has
        ended no job as quicker than it once was.
        """
        done = self._whole - sum(self.jobs[number].seconds for number in self._open)
        halves = sum(self.jobs[number].seconds for number in self._open - self._waiting) / 2
        slowness = elapsed / max(done + halves, 1e-3)
        if not done:
            slowness = max(slowness, 1 / self._many)
        return max(0.0, slowness * self._whole - elapsed) if self._open else 0.0


def main() -> None:
    """Compile what the lines of the standard input name."""
    for line in sys.stdin:
        try:
            Job(*json.loads(line)).compile()
        except Exception as error:
            print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        else:
            print("null", flush=True)


if __name__ == "__main__":
    main()
