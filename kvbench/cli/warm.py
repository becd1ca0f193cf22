"""`kvbench warm`: build the kernels of kvbench and of all methods before anything waits for them.

A run does the same for what it needs itself. What is built lies beside the sources or, where these
cannot be written to, in the user's cache folder, and stays until the sources, the compiler or the
processor change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from kvbench.config import bind_methods, choices, conf_dir, locate, read_choice


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    description = "Builds kernels before a run waits for them."
    argparse.ArgumentParser("kvbench warm", description=description).parse_args(arguments)
    try:
        bind_methods()
        from kvbench.kernels.library import FILES
        from kvbench.measure.kernels import load_kernels
        from kvbench.runs.terminal import Console

        began, console = time.monotonic(), Console()
        for name in choices("method"):
            target = read_choice(conf_dir() / "method" / f"{name}.yaml").get("_target_")
            if target is not None:  # its module names its kernels
                locate(target)
        load_kernels(console)
        ready = sum(file.why_missing is None for file in FILES)
        seconds = time.monotonic() - began
        console.print(f"{ready} of {len(FILES)} files of kernels are ready, after {seconds:.0f} s")
    except KeyboardInterrupt:
        print("kvbench warm: stopped; what is built is kept", file=sys.stderr)
        return 130
    return 0
