"""A process that renders chat templates for `kvbench.models.prompts`, a line a request and answer.

A template comes with a model's folder and is a program, so it runs here with a bound on time and
memory, and sees nothing that changes from day to day or from start to start: transformers' clock
stands still, and what is random is drawn anew each time.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils


class StandingClock(datetime):
    """The clock that templates read, set by each request."""

    stands_at = datetime(1970, 1, 1)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        """The same day always."""
        return cls.stands_at


def main(seconds: int, memory: int) -> None:
    """Answer requests until there are no more.

    Parameters
    ----------
    seconds
        of the processor's time that one may take; what takes more ends the process by SIGPROF.
    memory
        bytes that the process may take beside those it begins with.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError):  # a lower limit stands already
        resource.setrlimit(resource.RLIMIT_AS, (_in_use() + memory, hard))
    chat_template_utils.datetime = StandingClock
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _in_use() -> int:
    """Bytes of address space of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _answer(
    template: Any, messages: list[Any], today: str, most: int, settings: dict[str, Any]
) -> dict[str, str]:
    """The "text" that a template makes of messages, or the "error" that it ends in."""
    StandingClock.stands_at = datetime.fromisoformat(today)
    random.seed(0)
    try:
        [text], _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **settings
        )
        text.encode()  # half a character is no text for a tokenizer
    except MemoryError:
        return {"error": "takes too much memory"}
    except Exception as error:
        return {"error": f"fails: {type(error).__name__}: {error}"[:1000]}
    return (
        {"text": text}
        if len(text) <= most
        else {"error": f"makes {len(text)} characters, at most {most} may be"}
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
