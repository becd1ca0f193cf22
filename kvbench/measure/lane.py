"""Generations that go on side by side in one decode pass, as many as memory has room for.

Who brings one waits here until there is room, while those that are there go on; each is handed back
once it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvbench.backends.hf.generate import Decoding
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.together import DecodePass, unfit
from kvbench.measure.arm import is_out_of_memory
from kvbench.measure.room import room

MOST_ROWS = 128  # of one pass; more make a row hardly quicker

# Given a generation that is over, or None and why there is none. Its engine holds keys and values
# for this call alone.
Ended = Callable[[Decoding | None, Exception | None], object]


class Admission(NamedTuple):
    """What a generation takes, and whose it is.

    Attributes
    ----------
    owner
        for `Lane.drop`.
    size
        bytes that it takes by itself.
    prompt
        what it shares with others, and the bytes that this takes as long as any of them goes on.
    ended
        called once, when it joins or later.
    """

    owner: object
    size: float
    prompt: tuple[object, float]
    ended: Ended


class Lane:
    """A decode pass with as much in it as fits; of a model that decodes nothing together, one
    generation.

    Parameters
    ----------
    loaded
        the model.
    stepped
        called after each pass with its rows and its seconds.
    """

    def __init__(
        self, loaded: Loaded, stepped: Callable[[int, float], object] = lambda rows, seconds: None
    ) -> None:
        self._pass, self._stepped, self._room = DecodePass(loaded.model), stepped, room(loaded)
        self._most = 1 if unfit(loaded.model) else MOST_ROWS
        self._running: dict[Decoding, Admission] = {}

    @property
    def busy(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self._running)

    def clear(self, required_bytes: float, rows: int) -> None:
        """Go on until there is room for so many bytes and rows, or nothing is left to wait for."""
        while self._running and (
            self._pass.rows + rows > self._most or self._taken() + required_bytes > self._room
        ):
            self.step()

    def _taken(self) -> float:
        prompts = {
            id(admission.prompt[0]): admission.prompt[1] for admission in self._running.values()
        }
        return sum(prompts.values()) + sum(admission.size for admission in self._running.values())

    def join(self, begin: Callable[[], Decoding], rows: int, admission: Admission) -> None:
        """A generation goes on here, once there is room for it.

        Parameters
        ----------
        begin
            begins it; where that takes more memory than there is, which no estimate knows for sure,
            again when others have left.
        """
        self.clear(admission.size, rows)
        while True:
            try:
                decoding = begin()
                break
            except Exception as error:
                if not (is_out_of_memory(error) and self._running):
                    admission.ended(None, error)
                    return
            before = self._pass.rows
            while self._pass.rows == before:
                self.step()
        self._running[decoding] = admission
        if decoding.over:
            self._end(decoding, None)
        else:
            self._pass.join(decoding)

    def step(self) -> None:
        """Decode a token of each row."""
        rows, began = self._pass.rows, time.monotonic()
        for decoding, error in self._pass.step():
            if decoding in self._running:  # none that an earlier one has dropped
                self._end(decoding, error)
        self._stepped(rows, time.monotonic() - began)

    def finish(self) -> None:
        """Go on until nothing is left."""
        while self._running:
            self.step()

    def drop(self, owner: object) -> None:
        """Nothing of an owner goes on; what did has ended for no reason of its own."""
        for decoding in [
            decoding for decoding, admission in self._running.items() if admission.owner == owner
        ]:
            if decoding in self._running:
                self._pass.leave(decoding)
                self._end(decoding, Dropped())

    def _end(self, decoding: Decoding, error: Exception | None) -> None:
        admission = self._running.pop(decoding)
        try:
            admission.ended(None if error else decoding, error)
        finally:
            decoding.engine.release()


class Dropped(Exception):
    """A generation goes no further, since its owner does not."""
