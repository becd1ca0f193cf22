"""Tables for the terminal: what a run found, and how the arms of a sweep ended.

What a number is called and how it is shown stands in `kvbench.runs.quantities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from kvbench.runs.quantities import (
    JOINTLY,
    METHOD_TIME,
    PASSED,
    QUANTITIES,
    machine_name,
    named,
    recorded,
)
from kvbench.runs.terminal import Console

SCORE, ALLOCATED = QUANTITIES["score"], QUANTITIES["device_kv_allocated_bytes"]
COSTS = (  # of a run, a line each
    "attended_mean",
    "device_kv_bytes",
    "host_bytes",
    "moved_bytes_per_step",
    "index_bytes",
    "ttft_s",
    "tpot_ms_mean",
)
# Of how near a run stayed to full attention; the rest is for reports.
NEARNESS = (
    *("kl_mean", "kl_stderr", "kl_p50", "kl_p99", "kl_max"),
    *("perplexity", "perplexity_full", "perplexity_ratio", "delta_p_rms", "nll", "nll_full"),
)
NO_TIMES = f"{METHOD_TIME}; arms that decoded together have no other time"
# How tokens came to the device where there was none.
NOT_SENT = {"simulated": "simulated", "in place": "counted, not copied"}
# of arms, a column each
COMPARED = ("attended_share", "device_kv_bytes", "tpot_ms_mean", "own_ms", "new_tokens")


def table(title: str, metric: str, summary: Mapping[str, Any]) -> Table:
    """What a run found, a line each, narrow enough for any terminal and log."""
    numbers = recorded(summary)
    lines = [
        _answers(numbers),
        _fidelity(numbers),
        _costs(numbers, summary.get("decode") == JOINTLY),
        _hardware(numbers),
        _machine(summary),
        _groups(summary),
        _probes(numbers),
        _method_numbers(numbers),
    ]
    drawn = Table("measure", "value", title=title, title_justify="left")
    drawn.add_row(metric, _scored(summary))
    if "cut_samples" in summary:
        share = QUANTITIES["cut_share"].amount(summary["cut_share"])
        drawn.add_row(
            "prompts cut",
            f"{summary['cut_samples']} of {summary['n']} samples, by {share} of all tokens",
        )
    if words := unbounded(summary):
        drawn.add_row("budget", words)
    for line in (line for part in lines for line in part.items()):
        drawn.add_row(*line)
    return drawn


def _scored(group: Mapping[str, Any]) -> str:
    """A score, its standard error, and how many samples it is of: of a summary, or of one of its
    groups.
    """
    failed = f", {group['failed']} failed" if group["failed"] else ""
    answered = f"answers to {group['prompts']} prompts" if "prompts" in group else "samples"
    return f"{with_error(group['score'], group.get('stderr'))} ({group['n']} {answered}{failed})"


def _answers(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What several answers to a prompt come to, how long they are, and whether they end
    in loops.
    """
    rows = {
        QUANTITIES[name].title: QUANTITIES[name].amount(numbers[name])
        for name in PASSED
        if name in numbers
    }
    if "new_tokens" in numbers:
        mean, median = (
            QUANTITIES[name].number(numbers[name]) for name in ("new_tokens", "new_tokens_median")
        )
        rows["new tokens"] = f"{mean} on average, {median} in the middle"
    if numbers.get("looped"):
        rows[QUANTITIES["looped"].title] = QUANTITIES["looped"].amount(numbers["looped"])
    return rows


def _costs(numbers: Mapping[str, Any], jointly: bool) -> dict[str, str]:
    rows = {name: QUANTITIES[name].amount(numbers.get(name)) for name in COSTS}
    if "attended_std" in numbers:
        rows["attended_mean"] += f" ± {QUANTITIES['attended_std'].number(numbers['attended_std'])}"
    if "attended_share" in numbers:
        rows["attended_mean"] += (
            f" = {QUANTITIES['attended_share'].number(numbers['attended_share'])} C"
        )
    if ALLOCATED.name in numbers:
        rows["device_kv_bytes"] += f", {ALLOCATED.amount(numbers[ALLOCATED.name])} allocated"
    if numbers.get("transfer") in NOT_SENT:
        rows["moved_bytes_per_step"] += f", {NOT_SENT[numbers['transfer']]}"
    if jointly:
        rows |= {
            "tpot_ms_mean": "-, decoded together",
            "own_ms": QUANTITIES["own_ms"].amount(numbers.get("own_ms")),
        }
    return {QUANTITIES[name].title: text for name, text in rows.items()}


def _hardware(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What a timed run has besides."""
    there = [
        name for name in ("floor_ms", "busy_ms", "python_ms", "memory_bytes") if name in numbers
    ]
    titles = {name: QUANTITIES[name].title for name in there}
    if "memory_bytes" in titles:
        titles["memory_bytes"] = f"device {titles['memory_bytes']}, {numbers.get('memory')}"
    return {title: QUANTITIES[name].amount(numbers[name]) for name, title in titles.items()}


def _machine(summary: Mapping[str, Any]) -> dict[str, str]:
    """Where the times are from, if not all samples were timed on one machine that nothing else kept
    busy.
    """
    machine = summary.get("machine") or {}
    caveats = (
        [f"{skipped} samples elsewhere or disturbed"]
        if (skipped := machine.get("left_out"))
        else []
    )
    caveats += ["disturbed by other work"] if machine.get("disturbed") else []
    return {"times are of": "; ".join([machine_name(machine), *caveats])} if caveats else {}


def _fidelity(numbers: Mapping[str, Any]) -> dict[str, str]:
    """How near to full attention a method stayed, where that was measured."""
    there = {name: QUANTITIES[name] for name in NEARNESS if name in numbers}
    errors = {
        name: f" ± {there[name].number(numbers[f'{name}_error'])}"
        for name in there
        if f"{name}_error" in numbers
    }
    return {
        quantity.title: (
            f"{quantity.number(numbers[name])}{errors.get(name, '')} {quantity.unit.name}".rstrip()
        )
        for name, quantity in there.items()
    }


def _groups(summary: Mapping[str, Any]) -> dict[str, str]:
    groups = summary.get("groups", {})
    rows = {name: _scored(group) for name, group in groups.items()}
    if "macro" in summary:
        rows[f"mean of {len(groups)} groups"] = with_error(**summary["macro"])
    return rows


def _probes(numbers: Mapping[str, Any]) -> dict[str, str]:
    probes = {
        name: named(name)._replace(digits=3) for name in numbers if named(name).part == "probe"
    }
    return {
        f"probe: {probe.key or name}": probe.amount(numbers[name]) for name, probe in probes.items()
    }


def _method_numbers(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What the method's `report()` says."""
    quantities = {name: named(name) for name in numbers if name.startswith("audit.")}
    return {
        f"method: {quantity.title}": quantity.amount(numbers[name])
        for name, quantity in quantities.items()
    }


def unbounded(summary: Mapping[str, Any]) -> str:
    """What to say of a run whose budget never applied in some samples, "" of any other."""
    count = summary.get("unbounded_samples")
    return (
        f"never applied in {count} of {summary['n']} samples: all tokens were attended"
        if count
        else ""
    )


def with_error(
    score: float | None, stderr: float | None, missing: str = "-", digits: int = SCORE.digits
) -> str:
    """A score and its standard error, both 0-100; `missing` without a score."""
    shown = SCORE._replace(digits=digits)
    return shown.number(score, missing) + (
        f" ± {shown.number(stderr)}" if stderr is not None else ""
    )


class SweepError(RuntimeError):
    """Arms of a sweep did not finish, or have no sample that ran; all others did.

    A line for each, and one for all.
    """


class Ended(NamedTuple):
    """How an arm of a sweep ended.

    Attributes
    ----------
    summary
        of a finished arm.
    error
        what ended it before its last sample, "" for nothing.
    """

    summary: dict[str, Any]
    error: str = ""


def print_ends(ends: Sequence[tuple[str, Ended]], console: Console | None = None) -> None:
    """A table of how all arms ended, each by the words that make it.

    Raises
    ------
    SweepError
        some did not finish, or have no sample that ran.
    """
    table = Table()
    table.add_column(
        "arm", overflow="fold", min_width=min(40, max(len(words) for words, _ in ends))
    )
    # pass@k is in the largest k that prompts have answers for, and there only where they have
    # several.
    passed = [name for name in PASSED if any(name in summary for _, (summary, _) in ends)][1:][-1:]
    joint_decodes = {summary.get("decode") == JOINTLY for _, (summary, _) in ends if summary}
    caveats = [
        f"{words}: its budget {unbounded(summary)}"
        for words, (summary, _) in ends
        if unbounded(summary)
    ]
    needless = (
        {"tpot_ms_mean"}
        if joint_decodes == {True}
        else set()
        if True in joint_decodes
        else {"own_ms"}
    )
    compared = [name for name in (*passed, *COMPARED) if name not in needless]
    table.caption, table.caption_justify = (
        "\n".join([NO_TIMES] * (True in joint_decodes) + caveats),
        "left",
    )
    add_numbers(
        table,
        [SCORE.heading, "samples", "failed", *(QUANTITIES[name].heading for name in compared)],
    )
    for words, (summary, error) in ends:
        if error:
            table.add_row(words, "did not finish")
            continue
        numbers = recorded(summary)
        table.add_row(
            words,
            with_error(summary.get("score"), summary.get("stderr"), missing=""),
            *(
                QUANTITIES[name].number(numbers.get(name), missing="")
                for name in ("n", "failed", *compared)
            ),
        )
    (console or wide_console()).print(table)
    unfinished = [f"{words}: {error}" for words, (_, error) in ends if error]
    failed = [
        f"{words}: {all_failed(summary)}" for words, (summary, _) in ends if all_failed(summary)
    ]
    last = []
    if unfinished:
        last.append(
            f"{len(unfinished)} of {len(ends)} arms did not finish; the same command goes on with"
            " them"
        )
    if failed:
        last.append(
            f"{len(failed)} of {len(ends)} arms have no sample that ran; the same command tries"
            " them again"
        )
    if last:
        raise SweepError("\n".join([*unfinished, *failed, *last]))


def all_failed(summary: Mapping[str, Any]) -> str:
    """What to say of a run none of whose samples ran, "" of any other."""
    tried = summary.get("n", 0)
    return f"all {tried} samples failed" if 0 < tried == summary["failed"] else ""


def add_numbers(table: Table, headings: Sequence[str]) -> None:
    """Add columns of numbers, which stand to the right."""
    for heading in headings:
        table.add_column(heading, justify="right")


def wide_console() -> Console:
    """A console as wide as the terminal; 140 characters where a file or a log takes what is
    printed.
    """
    console = Console()
    return console if console.is_terminal else Console(width=140)
