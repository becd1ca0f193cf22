"""Kernels are built before a run waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from kvbench.kernels.library import FILES, CppFile


def load_kernels(console: Console, files: Iterable[CppFile] = FILES) -> None:
    """Load C++ that was imported, built side by side first if nobody has built it, and say so, or
    why there is none.
    """
    if unbuilt := [file for file in files if file.is_unbuilt()]:
        console.print("building kernels in C++, once: some seconds", soft_wrap=True)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda file: file.why_missing, unbuilt)]
    if reasons := [*filter(None, (file.why_missing for file in files))]:
        console.print(f"attention=torch, which is slower: {reasons[0]}", soft_wrap=True)
