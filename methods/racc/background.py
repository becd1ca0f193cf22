"""Jobs for the worker pool, handed over together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Job(Future[T]):
    """What a job will have found, which a copy of who waits for it shares."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Job[T]:
        return self


class Batch:
    """Collects jobs, and hands them to a pool together: to wake a thread for each would cost more
    than the job.

    Parameters
    ----------
    submit
        of the pool, whose jobs start in the order of their submission.
    threads
        jobs of one batch are shared out over so many.
    """

    def __init__(self, submit: Callable[..., Future[Any]], threads: int) -> None:
        self._submit, self._threads = submit, threads
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, job: Callable[..., T], *arguments: Any) -> Future[T]:
        """To be run after the next `flush`."""
        future: Job[T] = Job()
        self._waiting.append((future, partial(job, *arguments)))
        return future

    def flush(self) -> None:
        """Start what was collected."""
        waiting, self._waiting = self._waiting, []
        for first in range(min(self._threads, len(waiting))):
            self._submit(_run, waiting[first :: self._threads])


def _run(jobs: Sequence[tuple[Future[Any], Callable[[], Any]]]) -> None:
    for future, job in jobs:
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
