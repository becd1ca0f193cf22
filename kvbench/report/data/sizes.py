"""Bytes that a run holds and that its steps read, by its audit and that of full attention."""

from __future__ import annotations

import math

from kvbench.report.data.run import Run, missing


def bytes_read(run: Run) -> float:
    """Bytes of KV that a decode step of a run reads on average; NaN where its audit does not say.

    What is attended in all layers, as it is held (`kv=`), and what the method scanned of the stored
    keys. What a method reads of an index of its own is in no audit.
    """
    attended, scanned = run.arm["attended_bytes_per_step"], run.arm["read_bytes_per_step"]
    return (
        math.nan if missing(attended) else float(attended + (0.0 if missing(scanned) else scanned))
    )


def bytes_stored(run: Run) -> float:
    """Bytes that a run holds for each token of the context.

    Keys and values of both tiers and the index count. NaN where the run does not say, where full
    attention does not say how many tokens there are, and where a sample failed, as it may be the
    longest.
    """
    if (full_run := run.full()) is None:
        return math.nan
    arm, full = run.on_samples_of(full_run), full_run.on_samples_of(run)
    if missing(arm["device_kv_bytes"]) or arm["failed"] or full["failed"]:
        return math.nan
    tokens, rows = full["attended_max"], run.settings["batch"]
    sizes = [arm[name] for name in ("device_kv_bytes", "host_bytes", "index_bytes")]
    if missing(tokens):
        return math.nan
    return sum(0 if missing(size) else size for size in sizes) / tokens / rows


def share_of_full(run: Run) -> float:
    """Percent of the bytes that full attention holds natively; NaN where it is not known."""
    full = run.full()
    return 100 * bytes_stored(run) / bytes_stored(full) if full else math.nan
