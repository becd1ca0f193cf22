"""What scripts share: a command line that shows their docstring, times in turns, JSON at the end.

Long work is kept in parts, so that it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.config import ConfigError


def command_line(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring.

    Parameters
    ----------
    options
        by name the default; or the default, a help text and perhaps the valid values. Words are of
        the default's type, of a list as many as are named, and False is a switch.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        default, text, *valid = option if isinstance(option, tuple) else (option, "")
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        example = default[0] if isinstance(default, list) else default
        parser.add_argument(
            flag,
            type=str if example is None else type(example),
            nargs="+" if isinstance(default, list) else None,
            default=default,
            choices=valid[0] if valid else None,
            help=text,
        )
    return parser


def say(text: str) -> None:
    """Progress, on stderr: the result has stdout for itself."""
    print(text, file=sys.stderr, flush=True)


def median_us(
    calls: Mapping[Any, Callable[..., Any]],
    arguments: Iterable[Any],
    clock: Callable[[], float] = time.process_time,
) -> dict[Any, float]:
    """Median microseconds of each call over the arguments.

    For each argument all calls take their turn. The clock is the process's own time, which other
    work on the machine disturbs little.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for argument in arguments:
        for name, call in calls.items():
            start = clock()
            call(argument)
            seconds[name].append(clock() - start)
    return {name: 1e6 * statistics.median(times) for name, times in seconds.items()}


def once(path: Path | None, part: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """What `find` gives for a part of long work, kept in a file of --parts.

    What is there is not found again. It does not know of changes of the code: another state of it
    needs another folder. Without a path nothing is kept.

    Raises
    ------
    ConfigError
        the file is there with other settings or damaged, or its folder cannot be made.
    """
    if path is None:
        return find()
    if path.exists():
        return _stored(path, part)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--parts {path.parent}: {error.strerror}; expected a folder") from None
    result = rounded(find(), 5)
    new_file = path.with_suffix(".new")
    new_file.write_text(json.dumps({"part": part, "found": result}))
    new_file.replace(path)
    return result


def _stored(path: Path, part: Mapping[str, Any]) -> Any:
    """The result in a file of --parts, which must be that of this part."""
    try:
        stored = json.loads(path.read_text())
        was, result = stored["part"], stored["found"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{path}: not a part's result; expected another --parts, or the file removed"
        ) from None
    for name, value in part.items():
        if was.get(name) != value:
            raise ConfigError(
                f"--{name} {value}: {path} was run with {was.get(name)}; expected that, or another"
                " --parts"
            )
    return result


def print_result(result: Any) -> None:
    """One JSON object, the last line of a script; numbers have five digits, more would be noise."""
    print(json.dumps(rounded(result, 5)))


def rounded(value: Any, digits: int) -> Any:
    """The same with at most `digits` significant digits in every float."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
