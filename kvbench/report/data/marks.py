"""Letters that stand beside a number, and what they say of it; those of a score are `Run.marks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.report.data.run import missing, never_bounded
from kvbench.report.data.stats import COVERAGE, LEAST, RANGE_UP_TO
from kvbench.runs.summary import DISTURBED

WIDE = 2  # times of repeats that lie further apart are marked

NO_TIMES = "Runs that decoded together with others have no times of a whole token."

# A table explains below it the marks that it has.
MARKS = {
    "a": (
        "counted: weights, what the stores reserve, and the index; on a GPU the most that torch's"
        " allocator held"
    ),
    "b": (
        "scores better than full attention on the same samples, beyond noise (paired,"
        f" {COVERAGE} %): look for the reason before believing it"
    ),
    "c": "simulated transfers: copies from memory to memory, as there is no GPU",
    "d": "random (dummy) weights: bytes and times have a meaning, scores have none",
    "e": "attended in place: bytes to a device were counted, not copied, and are in no time",
    "f": "with failed samples, which count 0",
    "g": (
        "on texts that kvbench generates, not on the files of RULER's own scripts (task.haystack,"
        " task.squad, task.hotpotqa, task.words): other samples than the paper's, so no difference"
        " is shown"
    ),
    "l": (
        "without the times of some samples, taken on another machine, with other threads or beside"
        " other work"
    ),
    "m": "under another protocol than most of the table",
    "n": (
        f"timed beside other work, which took {100 * DISTURBED:.0f} % of the cores or more: not a"
        " time of the method"
    ),
    "o": "a sample broke its method's own budget rule",
    "p": (
        "decoded together with other runs, and so without a time of a whole token; the same but for"
        " rounding"
    ),
    "q": (
        "against full attention that decoded otherwise, together with other runs or alone: the same"
        " but for rounding"
    ),
    "r": (
        f"of {RANGE_UP_TO} samples or fewer: beside it stands no interval, but the least and the"
        " largest"
    ),
    "s": "of another model than the published number, so no difference is shown",
    "t": (
        "prompts were cut in their middle, to the model's window or task.max_length: part of them"
        " was never read"
    ),
    "u": "unfinished: not all samples yet",
    "v": (
        f"the largest of these times is more than {WIDE} times the least: look for what disturbed"
        " them"
    ),
    "w": (
        f"ranks no method: full attention scores under {LEAST} on these samples or perhaps 0, or"
        " its interval is wider than the methods' scores lie apart"
    ),
    "x": (
        "its budget never applied: every step attended all tokens, as full attention does, and so"
        " it ranks no method"
    ),
    "y": "in some of its samples the budget never applied: every step attended all tokens",
}


def budget_marks(line: Mapping[str, Any]) -> str:
    """The letter for a line in whose samples, all or some, the budget never applied.

    Lines are those of `Runs.arms` or `Run.cells`.
    """
    if never_bounded(line):
        return "x"
    return "" if missing(line["unbounded_samples"]) or not line["unbounded_samples"] else "y"


def transfer_marks(transfer: object) -> str:
    """The letters for times of runs whose tokens came to no GPU, by their `transfer`."""
    return "c" * ("simulated" in str(transfer)) + "e" * ("in place" in str(transfer))


def time_marks(line: Mapping[str, Any], name: str) -> str:
    """The letters for a time by its name: when and where it was taken.

    It is of a line of `Runs.arms` or `Run.cells`.
    """
    low, high = line["spread"].get(name, (0.0, 0.0))
    flags = {
        "l": not missing(line["left_out"]) and line["left_out"] > 0,
        "n": line["disturbed"] in (True,),  # and not NaN
        "v": high > WIDE * low,
    }
    return "".join(mark for mark, there in flags.items() if there)
