"""LongProc's countdown: four numbers, each used once, reach a target; the search is written out.

The reference is a depth-first search that tries +, -, * and / on each pair, the larger number
first. A solution is checked by its arithmetic; without a right one a search gets the share of its
lines that take the reference's steps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

STRINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("strings.yaml").read_text(encoding="utf-8")
)["countdown"]

LARGEST = 2000  # results from here on are dropped
TITLE = "# Search Procedure"
# in the order they are sought
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@functools.cache
def examples() -> str:
    """The solved examples of the prompt."""
    return "\n\n".join(
        STRINGS["example"].format(
            numbers=numbers, target=target, text=demonstration(numbers, target)
        )
        for numbers, target in STRINGS["examples"]
    )


def demonstration(numbers: Sequence[int], target: int) -> str:
    """The search for the target, written out, and its solution.

    Raises
    ------
    ValueError
        there is none.
    """
    log = [STRINGS["start"].format(numbers=list(numbers), target=target, options=_options(numbers))]
    steps = _explored(list(numbers), target, 1, log)
    if steps is None:
        raise ValueError(f"{target} cannot be reached from {list(numbers)}")
    solution = {"first": steps[0], "second": steps[1], "third": steps[2]}
    return str(STRINGS["whole"].format(log="\n".join(log), **solution))


def _explored(numbers: list[int], target: int, depth: int, log: list[str]) -> list[str] | None:
    """The steps from these numbers to the target, or None.

    `log` gets what is tried, from this depth on.
    """
    for first, second in combinations(range(len(numbers)), 2):
        a, b = numbers[first], numbers[second]
        remaining = [number for place, number in enumerate(numbers) if place not in (first, second)]
        if remaining:
            log.append(_indent(depth) + STRINGS["pick"].format(a=a, b=b, left=remaining))
        for value, step in _operations(max(a, b), min(a, b)):
            if (
                steps := _tried(value, step, remaining, target, depth + bool(remaining), log)
            ) is not None:
                return [step, *steps]
    return None


def _tried(
    value: float | None, step: str, remaining: list[int], target: int, depth: int, log: list[str]
) -> list[str] | None:
    """The steps to the target after this one, or None."""
    name = _outcome(value, remaining, target)
    numbers = [] if value is None else [int(value), *remaining]
    text = STRINGS[name].format(step=step, value=value, numbers=numbers, target=target)
    if name == "add":
        text += STRINGS["last" if len(numbers) == 2 else "options"].format(
            options=_options(numbers)
        )
    log.append(_indent(depth) + text)
    if name == "add":
        return _explored(numbers, target, depth + 1, log)
    return [] if name == "found" else None


def _outcome(value: float | None, remaining: Sequence[int], target: int) -> str:
    """What comes of a result, by the name of its wording."""
    if value is None:
        return "invalid"
    if value % 1:
        return "decimal"
    if value >= LARGEST:
        return "large"
    if remaining:
        return "add"
    return "found" if value == target else "other"


def _operations(a: int, b: int) -> Iterator[tuple[float | None, str]]:
    """The results of a and b, a >= b, and how they are written; None: there is none."""
    for sign in "+-*":
        value = SIGNS[sign](a, b)
        yield value, f"{a} {sign} {b} = {value}"
    if b == 0:
        yield None, f"{a} / {b} (invalid operation)"
    elif a % b:
        yield a / b, f"{a} / {b} = {a / b:.1f}"
    else:
        yield a // b, f"{a} / {b} = {a // b}"


def _options(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(combinations(numbers, 2))


def _indent(depth: int) -> str:
    return " " * depth + "|- "


def is_solution(numbers: Sequence[int], target: int, text: str) -> bool:
    """Whether three right equations, one a line, use each number once and end in the target."""
    remaining, lines = list(numbers), text.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        try:
            calculation, result = line.split("=")
            sign = next(sign for sign in SIGNS if sign in calculation)
            a, b = map(int, calculation.split(sign))
            if SIGNS[sign](a, b) != int(result):
                return False
            remaining.remove(a)
            remaining.remove(b)
        except (ValueError, StopIteration, ArithmeticError):
            return False
        remaining.append(int(result))
    return remaining[0] == target


def share_of_search(output: str, reference: str) -> float:
    """How much of the reference's search an output repeats before its first other step, 0..1.

    As officially the first line must be the same, and of the lines after it those before the last
    one that was read count: a whole search has not quite 1.
    """
    searched = output.split(TITLE)[-1].strip().split("\n")
    right = reference.split(TITLE)[-1].split("Now we have found the target")[0].strip().split("\n")
    if searched[0] != right[0]:
        return 0.0
    last = 0
    for last, (ours, theirs) in enumerate(zip(searched[1:], right[1:], strict=False)):  # noqa: B007
        if ours != theirs and not _same_step(ours, theirs):
            break
    return last / (len(right) - 1)


def _same_step(ours: str, theirs: str) -> bool:
    """Whether two lines that differ try the same operation and both go on, or both do not."""
    dropped = "drop this branch"
    return (
        "Pick two numbers" not in theirs
        and ours.split("=")[0] == theirs.split("=")[0]
        and (dropped in ours) == (dropped in theirs)
    )
