"""Tables for the terminal: what a run found, and how the arms of a sweep ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


def table(title: str, metric: str, summary: Mapping[str, Any]) -> Table:
    """What a run found, a line each, narrow enough for any terminal and log."""
    latency, audit = summary.get("latency", {}), summary.get("audit", {})
    attended, budget = audit.get("attended_mean"), audit.get("budget")
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    share = f" = {attended / budget:.2f} C" if attended and budget else ""
    transfer = ", simulated" if audit.get("transfer") == "simulated" else ""
    rows = {
        metric: with_error(summary["score"], summary.get("stderr")) + f" ({summary['n']} samples{failed})",
        "attended entries per KV head": number(attended, "{:.1f}") + share,
        "KV on the device": number(audit.get("device_kv_bytes"), "{:.2f} MiB", 2**-20),
        "KV on the host": number(audit.get("host_bytes"), "{:.2f} MiB", 2**-20),
        "moved up per step": number(audit.get("moved_bytes_per_step"), "{:.1f} KiB", 2**-10) + transfer,
        "index": number(audit.get("index_bytes"), "{:.2f} MiB", 2**-20),
        "time to first token": number(latency.get("ttft_s"), "{:.3f} s"),
        "time per further token": number(latency.get("tpot_ms_mean"), "{:.2f} ms"),
    }
    if hardware := summary.get("hardware"):
        rows["floor of a token"] = number(hardware.get("floor_ms"), "{:.2f} ms")
        if "python_ms" in hardware:
            rows["Python, device idle, of a token"] = number(hardware["python_ms"], "{:.2f} ms")
        rows[f"device memory in decoding, {hardware['memory']}"] = number(
            hardware.get("memory_bytes"), "{:.1f} MiB", 2**-20
        )
    for name, group in summary.get("groups", {}).items():
        lost = f", {group['failed']} failed" if group["failed"] else ""
        rows[name] = with_error(group["score"], group["stderr"]) + f" ({group['n']} samples{lost})"
    if "macro" in summary:
        rows[f"mean of {len(summary['groups'])} groups"] = with_error(**summary["macro"])
    for name, value in summary.get("probe", {}).items():
        rows[f"probe: {name}"] = number(value, "{:.3f}")
    drawn = Table("measure", "value", title=title, title_justify="left")
    for row in rows.items():
        drawn.add_row(*row)
    return drawn


def with_error(score: float | None, stderr: float | None) -> str:
    """A score and its standard error, both 0-100."""
    return number(score, "{:.1f}") + (f" ± {stderr:.1f}" if stderr is not None else "")


def number(value: float | None, form: str, scale: float = 1) -> str:
    """`value * scale` in a format, or a dash."""
    return "-" if value is None else form.format(value * scale)


class SweepError(RuntimeError):
    """Arms of a sweep did not finish; all others did. A line for each, and one for all."""


class Ended(NamedTuple):
    """How an arm of a sweep ended.

    Attributes:
        summary: of a finished arm.
        error: what ended it before its last sample, "" for nothing.
    """

    summary: dict[str, Any]
    error: str = ""


def tell(ends: Sequence[tuple[str, Ended]], console: Console | None = None) -> None:
    """A table of how all arms ended, each by the words that make it.

    Raises:
        SweepError: some did not finish.
    """
    table = Table()
    table.add_column("arm", overflow="fold", min_width=min(40, max(len(words) for words, _ in ends)))
    for name in ("score", "samples", "failed", "attended / C", "KV on device, MiB", "ms / token"):
        table.add_column(name, justify="right")
    for words, (summary, error) in ends:
        if error:
            table.add_row(words, "did not finish")
            continue
        audit, score, stderr = summary.get("audit") or {}, summary.get("score"), summary.get("stderr")
        attended, budget, held = audit.get("attended_mean"), audit.get("budget"), audit.get("device_kv_bytes")
        step = (summary.get("latency") or {}).get("tpot_ms_mean")
        table.add_row(
            words,
            "" if score is None else f"{score:.1f}" + ("" if stderr is None else f" ± {stderr:.1f}"),
            str(summary.get("n", "")),
            str(summary.get("failed", "")),
            f"{attended / budget:.2f}" if attended and budget else "",
            "" if held is None else f"{held / 2**20:.2f}",
            "" if step is None else f"{step:.2f}",
        )
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
    console.print(table)
    unfinished = [f"{words}: {error}" for words, (_, error) in ends if error]
    if unfinished:
        last = f"{len(unfinished)} of {len(ends)} arms did not finish; the same command goes on with them"
        raise SweepError("\n".join([*unfinished, last]))
