"""Writes conf/kernels.json: the kernels that each method calls, and how long each compiles.

In float32 and bfloat16.

    python scripts/list_kernels.py              all methods and kinds of keys and values, minutes
    python scripts/list_kernels.py quest int8   these anew, the others as they are listed

Each is run for a few tokens in a process of its own, and what that process has compiled is listed.
Then all are compiled anew, one after the other, to see how long each takes and which others it
calls.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
PATH = Path(__file__).parents[1] / "conf" / "kernels.json"


def called(dtype: str, name: str) -> list[str]:
    """What a run has compiled, JSON of each.

    Of a method, or of full attention over a kind of keys and values.
    """
    from kvbench.cli.main import main
    from kvbench.kernels import listed
    from kvbench.kernels.build import described
    from kvbench.kernels.compiled import KERNELS

    listed.listed = lambda: ([], {})  # type: ignore[assignment]
    words = [name, "method=full"] if name.startswith("kv=") else [f"method={name}", "budget=256"]
    words += [f"dtype={dtype}", "task.lengths=[700]", "task.limit=1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        code = main([*words, f"results_dir={folder}"])
    if code:
        raise SystemExit(f"{name} in {dtype}: exit code {code}")
    kernels = []
    for kernel, dispatcher in KERNELS.items():
        for signature in dispatcher.overloads:
            try:
                kernels.append(json.dumps([kernel, [described(kind) for kind in signature]]))
            except ValueError as error:
                print(f"{kernel}: {error} is left out", file=sys.stderr)
    return kernels


def costs(kernels: list[str], folder: str) -> list[list[Any]]:
    """Of each kernel name, types, own seconds, and the numbers of those it calls.

    They stand before it.

    Parameters
    ----------
    folder
        empty; what is compiled goes there.
    """
    from numba import config

    from kvbench.kernels.build import Job, described
    from kvbench.kernels.compiled import KERNELS

    config.CACHE_DIR = folder
    numbers: dict[str, int] = {}
    listed: list[list[Any]] = []
    # of each compilation that goes on: the seconds of those in it, and which
    inside: list[list[Any]] = [[0.0, set()]]

    def traced(name: str, compile: Any) -> Any:
        def compile_traced(signature: Any) -> Any:
            began = time.process_time()
            inside.append([0.0, set()])
            entry = compile(signature)
            inner_seconds, calls = inside.pop()
            seconds = time.process_time() - began
            try:
                kernel = [name, [described(kind) for kind in signature]]
            except ValueError:  # a part of who calls it
                inside[-1][0] += inner_seconds
                inside[-1][1] |= calls
                return entry
            if (number := numbers.setdefault(json.dumps(kernel), len(listed))) == len(listed):
                listed.append([*kernel, round(seconds - inner_seconds, 1), sorted(calls)])
            inside[-1][0] += seconds
            inside[-1][1].add(number)
            return entry

        return compile_traced

    jobs = [Job(*json.loads(text), 0.0, ()) for text in kernels]
    for job in jobs:
        job.dispatcher()
    for name, dispatcher in KERNELS.items():
        dispatcher.compile = traced(name, dispatcher.compile)
    for job in jobs:
        print(job.kernel, file=sys.stderr)
        job.compile()
    return listed


def main(names: list[str]) -> None:
    """Write the list."""
    from kvbench.config import choices

    every = [*choices("method"), *(f"kv={kind}" for kind in choices("kv") if kind != "native")]
    chosen = [name for name in every if not names or name.removeprefix("kv=") in names]
    used: dict[str, dict[str, list[str]]] = {dtype: {} for dtype in DTYPES}
    if names:
        before = json.loads(PATH.read_text())
        for dtype, of in before["used"].items():
            listed = {
                name: [json.dumps(before["kernels"][number][:2]) for number in of[name]]
                for name in of
            }
            used[dtype] = {name: kernels for name, kernels in listed.items() if name in every}
    # Each has what is imported here, and compiles for itself.
    import kvbench.runs.sweep  # noqa: F401

    processes = multiprocessing.get_context("fork")
    for dtype in DTYPES:
        for name in chosen:
            with processes.Pool(1) as pool:
                used[dtype][name] = pool.apply(called, (dtype, name))
            print(f"{dtype} {name}: {len(used[dtype][name])} kernels", file=sys.stderr)
    all_kernels = sorted(
        {kernel for of in used.values() for kernels in of.values() for kernel in kernels}
    )
    with tempfile.TemporaryDirectory() as folder, processes.Pool(1) as pool:
        kernels = pool.apply(costs, (all_kernels, folder))
    numbers = {json.dumps(kernel[:2]): number for number, kernel in enumerate(kernels)}
    lists = {
        dtype: {
            name: sorted(numbers[kernel] for kernel in kernels)
            for name, kernels in sorted(of.items())
        }
        for dtype, of in used.items()
    }
    lines = ",\n".join(f"  {json.dumps(kernel)}" for kernel in kernels)
    sets = ",\n".join(
        f' "{dtype}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(of[name])}' for name in of)
        + "\n }"
        for dtype, of in lists.items()
    )
    PATH.write_text(f'{{"kernels": [\n{lines}\n],\n"used": {{\n{sets}\n}}}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
