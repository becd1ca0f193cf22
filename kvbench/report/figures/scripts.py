"""What a figure draws of the JSON that a script printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvbench.config import ConfigError
from kvbench.runs.stored import DAMAGED, ResultsError, contents, json_of

Parsed = TypeVar("Parsed")


def of_script(
    files: Sequence[Path], figure: str, script: str, read: Callable[[Any], Parsed]
) -> Parsed:
    """What a figure draws of the one file of JSON that a script printed.

    Parameters
    ----------
    files
        that were named.
    figure, script
        for errors.
    read
        takes it out of the JSON, and raises a `LookupError` where there is none.

    Raises
    ------
    ConfigError
        there are several files, or it is another.
    """
    path, *others = files or [Path("results")]
    try:
        parsed = read(json_of(contents(path)))
    except (OSError, ResultsError, *DAMAGED) as error:
        raise ConfigError(
            f"figure={figure}: {path}: expected one file, what scripts/{script}.py prints last,"
            f" such as results/{script}_cpu.json ({type(error).__name__})"
        ) from error
    if others:
        raise ConfigError(f"figure={figure}: {1 + len(others)} files; expected one")
    return parsed
