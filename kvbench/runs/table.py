"""Tables for the terminal: what a run found, and how the arms of a sweep ended. What a number is called and how it is
shown stands in `kvbench.runs.quantities`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from kvbench.runs.quantities import OWN, PASSED, QUANTITIES, TOGETHER, named, recorded
from kvbench.runs.summary import machine_name
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
NO_TIMES = f"{OWN}; arms that decoded together have no other time"
# How tokens came to the device where there was none.
NOT_SENT = {"simulated": "simulated", "in place": "counted, not copied"}
COMPARED = ("attended_share", "device_kv_bytes", "tpot_ms_mean", "own_ms", "new_tokens")  # of arms, a column each


def table(title: str, metric: str, summary: Mapping[str, Any]) -> Table:
    """What a run found, a line each, narrow enough for any terminal and log."""
    found = recorded(summary)
    lines = [
        _answers(found),
        _fidelity(found),
        _costs(found, summary.get("decode") == TOGETHER),
        _hardware(found),
        _machine(summary),
        _groups(summary),
        _probes(found),
        _methods_own(found),
    ]
    drawn = Table("measure", "value", title=title, title_justify="left")
    drawn.add_row(metric, _scored(summary))
    if "cut_samples" in summary:
        share = QUANTITIES["cut_share"].amount(summary["cut_share"])
        drawn.add_row("prompts cut", f"{summary['cut_samples']} of {summary['n']} samples, by {share} of all tokens")
    if words := unbounded(summary):
        drawn.add_row("budget", words)
    for line in (line for part in lines for line in part.items()):
        drawn.add_row(*line)
    return drawn


def _scored(group: Mapping[str, Any]) -> str:
    """A score, its standard error, and how many samples it is of: of a summary, or of one of its groups."""
    failed = f", {group['failed']} failed" if group["failed"] else ""
    answered = f"answers to {group['prompts']} prompts" if "prompts" in group else "samples"
    return f"{with_error(group['score'], group.get('stderr'))} ({group['n']} {answered}{failed})"


def _answers(found: Mapping[str, Any]) -> dict[str, str]:
    """What several answers to a prompt come to, how long they are, and whether they end in loops."""
    rows = {QUANTITIES[name].title: QUANTITIES[name].amount(found[name]) for name in PASSED if name in found}
    if "new_tokens" in found:
        mean, median = (QUANTITIES[name].number(found[name]) for name in ("new_tokens", "new_tokens_median"))
        rows["new tokens"] = f"{mean} on average, {median} in the middle"
    if found.get("looped"):
        rows[QUANTITIES["looped"].title] = QUANTITIES["looped"].amount(found["looped"])
    return rows


def _costs(found: Mapping[str, Any], together: bool) -> dict[str, str]:
    rows = {name: QUANTITIES[name].amount(found.get(name)) for name in COSTS}
    if "attended_std" in found:
        rows["attended_mean"] += f" ± {QUANTITIES['attended_std'].number(found['attended_std'])}"
    if "attended_share" in found:
        rows["attended_mean"] += f" = {QUANTITIES['attended_share'].number(found['attended_share'])} C"
    if ALLOCATED.name in found:
        rows["device_kv_bytes"] += f", {ALLOCATED.amount(found[ALLOCATED.name])} allocated"
    if found.get("transfer") in NOT_SENT:
        rows["moved_bytes_per_step"] += f", {NOT_SENT[found['transfer']]}"
    if together:
        rows |= {"tpot_ms_mean": "-, decoded together", "own_ms": QUANTITIES["own_ms"].amount(found.get("own_ms"))}
    return {QUANTITIES[name].title: text for name, text in rows.items()}


def _hardware(found: Mapping[str, Any]) -> dict[str, str]:
    """What a timed run has besides."""
    there = [name for name in ("floor_ms", "busy_ms", "python_ms", "memory_bytes") if name in found]
    titles = {name: QUANTITIES[name].title for name in there}
    if "memory_bytes" in titles:
        titles["memory_bytes"] = f"device {titles['memory_bytes']}, {found.get('memory')}"
    return {title: QUANTITIES[name].amount(found[name]) for name, title in titles.items()}


def _machine(summary: Mapping[str, Any]) -> dict[str, str]:
    """Where the times are from, if not all samples were timed on one machine that nothing else kept busy."""
    machine = summary.get("machine") or {}
    caveats = [f"{left_out} samples elsewhere or disturbed"] if (left_out := machine.get("left_out")) else []
    caveats += ["disturbed by other work"] if machine.get("disturbed") else []
    return {"times are of": "; ".join([machine_name(machine), *caveats])} if caveats else {}


def _fidelity(found: Mapping[str, Any]) -> dict[str, str]:
    """How near to full attention a method stayed, where that was measured."""
    there = {name: QUANTITIES[name] for name in NEARNESS if name in found}
    errors = {name: f" ± {there[name].number(found[f'{name}_error'])}" for name in there if f"{name}_error" in found}
    return {
        quantity.title: f"{quantity.number(found[name])}{errors.get(name, '')} {quantity.unit.name}".rstrip()
        for name, quantity in there.items()
    }


def _groups(summary: Mapping[str, Any]) -> dict[str, str]:
    groups = summary.get("groups", {})
    rows = {name: _scored(group) for name, group in groups.items()}
    if "macro" in summary:
        rows[f"mean of {len(groups)} groups"] = with_error(**summary["macro"])
    return rows


def _probes(found: Mapping[str, Any]) -> dict[str, str]:
    probes = {name: named(name)._replace(digits=3) for name in found if named(name).part == "probe"}
    return {f"probe: {probe.key or name}": probe.amount(found[name]) for name, probe in probes.items()}


def _methods_own(found: Mapping[str, Any]) -> dict[str, str]:
    """What the method's `report()` says."""
    own = {name: named(name) for name in found if name.startswith("audit.")}
    return {f"method: {quantity.title}": quantity.amount(found[name]) for name, quantity in own.items()}


def unbounded(summary: Mapping[str, Any]) -> str:
    """What to say of a run whose budget never applied in some samples, "" of any other."""
    count = summary.get("unbounded_samples")
    return f"never applied in {count} of {summary['n']} samples: all tokens were attended" if count else ""


def with_error(score: float | None, stderr: float | None, missing: str = "-", digits: int = SCORE.digits) -> str:
    """A score and its standard error, both 0-100; `missing` without a score."""
    shown = SCORE._replace(digits=digits)
    return shown.number(score, missing) + (f" ± {shown.number(stderr)}" if stderr is not None else "")


class SweepError(RuntimeError):
    """Arms of a sweep did not finish, or have no sample that ran; all others did. A line for each, and one for all."""


class Ended(NamedTuple):
    """How an arm of a sweep ended.

    Attributes:
        summary: of a finished arm.
        error: what ended it before its last sample, "" for nothing.
    """

    summary: dict[str, Any]
    error: str = ""


def print_ends(ends: Sequence[tuple[str, Ended]], console: Console | None = None) -> None:
    """A table of how all arms ended, each by the words that make it.

    Raises:
        SweepError: some did not finish, or have no sample that ran.
    """
    table = Table()
    table.add_column("arm", overflow="fold", min_width=min(40, max(len(words) for words, _ in ends)))
    # pass@k is in the largest k that prompts have answers for, and there only where they have several.
    passed = [name for name in PASSED if any(name in summary for _, (summary, _) in ends)][1:][-1:]
    together = {summary.get("decode") == TOGETHER for _, (summary, _) in ends if summary}
    caveats = [f"{words}: its budget {unbounded(summary)}" for words, (summary, _) in ends if unbounded(summary)]
    needless = {"tpot_ms_mean"} if together == {True} else set() if True in together else {"own_ms"}
    compared = [name for name in (*passed, *COMPARED) if name not in needless]
    table.caption, table.caption_justify = "\n".join([NO_TIMES] * (True in together) + caveats), "left"
    add_numbers(table, [SCORE.heading, "samples", "failed", *(QUANTITIES[name].heading for name in compared)])
    for words, (summary, error) in ends:
        if error:
            table.add_row(words, "did not finish")
            continue
        found = recorded(summary)
        table.add_row(
            words,
            with_error(summary.get("score"), summary.get("stderr"), missing=""),
            *(QUANTITIES[name].number(found.get(name), missing="") for name in ("n", "failed", *compared)),
        )
    (console or wide_console()).print(table)
    unfinished = [f"{words}: {error}" for words, (_, error) in ends if error]
    failed = [f"{words}: {all_failed(summary)}" for words, (summary, _) in ends if all_failed(summary)]
    last = []
    if unfinished:
        last.append(f"{len(unfinished)} of {len(ends)} arms did not finish; the same command goes on with them")
    if failed:
        last.append(f"{len(failed)} of {len(ends)} arms have no sample that ran; the same command tries them again")
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
    """A console as wide as the terminal; 140 characters where a file or a log takes what is printed."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
