"""What a time was measured on: the device and its threads, and what else the machine did meanwhile.

A time is of one machine that does nothing else. Every sample says where it was measured and what
took the cores away from it; `kvbench.runs.summary` decides which times may stand together. All is
read before and after a generation, outside of its times.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

STAT, CPUINFO = Path("/proc/stat"), Path("/proc/cpuinfo")  # where there are such


@contextmanager
def observed(device: torch.device, count: int = 1) -> Iterator[dict[str, Any]]:
    """What the machine is, and what it does while the block runs: the `machine` part of a sample's
    record.

    Parameters
    ----------
    device
        that computes.
    count
        such devices, of a model that is spread over them.

    Yields
    ------
    Iterator[dict[str, Any]]
        A dict, whole once the block has ended: `device` (the GPU's or the CPU's name), `threads` of
        torch, `cores` that this process may use, `load` (the machine's mean of the minute before)
        and, where Linux says so, how many of these cores were taken away in the mean: by `others`,
        processes that are not this one, and by `steal`, other guests of the same host.
    """
    record = {
        "device": name_of(device, count),
        "threads": torch.get_num_threads(),
        "cores": len(_cores()),
    }
    record["load"] = round(os.getloadavg()[0], 2)
    before = _spent()
    yield record
    after = _spent()
    if before and after:
        wall, process, busy, stolen = (
            end - start for start, end in zip(before, after, strict=True)
        )
        tick = len(_cores()) / os.sysconf("SC_CLK_TCK")  # what /proc/stat may be wrong by
        record["others"] = round(max(0.0, busy - process - tick) / wall, 3)
        record["steal"] = round(max(0.0, stolen) / wall, 3)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch compute with so many threads while the block runs; None: with as many as it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of(device: torch.device, count: int = 1) -> str:
    """The name of the card, with how many there are where they are several, or of the CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return name if count == 1 else f"{count} x {name}"


@cache
def _cpu() -> str:
    """The CPU's own name, else that of its architecture."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return " ".join(match[1].split()) if match else platform.machine()


class _Spent(NamedTuple):
    """Seconds so far: on the clock, and of CPU by this process, by all processes, and by other
    guests.
    """

    wall: float
    process: float
    busy: float
    stolen: float


def _spent() -> _Spent | None:
    """What was spent on the cores of this process until now; None where the system does not say."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in _cores()}
    ticks = [
        [int(word) for word in words] for name, *words in map(str.split, lines) if name in names
    ]
    second = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
    busy = sum(sum(spent[:3]) + sum(spent[5:7]) for spent in ticks) / second
    stolen = sum(sum(spent[7:8]) for spent in ticks) / second
    return _Spent(time.perf_counter(), time.process_time(), busy, stolen)


def _cores() -> set[int]:
    """The cores that this process may use."""
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )
