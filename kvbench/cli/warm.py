"""`kvbench warm`: compile the kernels of methods before anything waits for them, side by side.

    kvbench warm                               of all methods
    kvbench warm method=icecache,quest         of these
    kvbench warm dtype=bfloat16 kv=int8,kivi4  for another dtype and coded keys and values, too

A run does the same for what it needs itself. What is compiled lies beside the sources or, where
these cannot be written to, in the user's cache folder, and stays until sources or Numba change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from kvbench.cli.words import refuse_twice
from kvbench.config import ConfigError, bind_methods, choices, nearest

# and what each is where it is not given; None: all
KEYS = {"method": None, "kv": "native", "dtype": "auto"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "kvbench warm", description="Compiles kernels before a run waits for them."
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="method=, kv=, dtype=: of which (default: all)",
    )
    words = parser.parse_args(arguments).words
    try:
        chosen = _chosen(words)
        bind_methods()
        import torch

        from kvbench.backends.hf.loading import dtype_of
        from kvbench.kernels.listed import required_by
        from kvbench.measure.kernels import compile_kernels, load_library
        from kvbench.runs.terminal import Console

        names = [*chosen["method"], *(f"kv={kind}" for kind in chosen["kv"])]
        dtypes = {
            str(dtype_of(name, torch.device("cpu"))).removeprefix("torch.")
            for name in chosen["dtype"]
        }
        numbers = {number for dtype in dtypes for number in required_by(dtype, names)}
        began, console = time.monotonic(), Console()
        load_library(console)
        count = compile_kernels(sorted(numbers), console)
        console.print(
            f"{count} of {len(numbers)} kernels compiled, in {time.monotonic() - began:.0f} s"
        )
    except ConfigError as error:
        print(f"kvbench warm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbench warm: stopped; what is compiled is kept", file=sys.stderr)
        return 130
    return 0


def _chosen(words: Sequence[str]) -> dict[str, list[str]]:
    """What each key names.

    Raises
    ------
    ConfigError
        a key or a value that there is not.
    """
    refuse_twice(words)
    chosen = {key: list(choices(key)) if value is None else [value] for key, value in KEYS.items()}
    for word in words:
        key, value = word.split("=", 1) if "=" in word else (word, "")
        if key not in KEYS or not value:
            raise ConfigError(
                f"{word}: expected {', '.join(f'{key}=' for key in KEYS)} and names, as in"
                " method=quest"
            )
        chosen[key] = value.split(",")
        for name in chosen[key]:
            if key != "dtype" and name not in choices(key):
                raise ConfigError(f"{key}={name}: no such {key}; {nearest(name, choices(key))}")
    return chosen
