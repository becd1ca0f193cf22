"""Programs that a model wrote, compiled by g++ and run, for LongProc's pseudo_to_code.

Nothing of it runs unless `task.execute=true` allows it. A program runs in a folder of its own that
is deleted, without environment, in a session of its own that ends with it, and with limits on
processor time, memory, files and their size. That is no jail: it could read what the user can read,
so run it where nothing is secret.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

INCLUDES: list[str] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("strings.yaml").read_text(encoding="utf-8")
)["includes"]
HEADER = "".join(f"#include <{name}>\n" for name in INCLUDES) + "using namespace std;\n"

MOST_CASES = 10
# Seconds of processor time for a test case (officially of any time) and for the compiler; KiB of
# memory; blocks of 512 bytes that a file may have; open files; no core dumps. The clock alone ends
# what sleeps.
CASE_LIMITS = "ulimit -t 3; ulimit -v 1048576; ulimit -f 16384; ulimit -n 16; ulimit -c 0"
COMPILER_LIMITS = "ulimit -t 60; ulimit -v 4194304; ulimit -f 131072; ulimit -c 0"
PATIENCE = 120
OUT_OF_TIME = {None, -signal.SIGXCPU, -signal.SIGKILL}  # how a program ends that took too long


def compiler() -> str | None:
    """Where g++ is, or None."""
    return shutil.which("g++")


def program_in(output: str) -> str | None:
    """The program between an output's marks, or None."""
    match = re.search(r"```cpp([\s\S]*)```", output.replace("```c++", "```cpp"))
    return match[1] if match else None


def passes(program: str, cases: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether a program compiles and prints for the first ten test cases what it should.

    Parameters
    ----------
    program
        its lines, without includes.
    cases
        of each the lines of its input and of its output.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-cpp-") as folder:
        home = Path(folder)
        (home / "program.cpp").write_text(HEADER + program, encoding="utf-8", errors="replace")
        compile = f"exec {compiler()} -std=c++11 -O -o program program.cpp"
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "TMPDIR": folder}
        if _run(f"{COMPILER_LIMITS}; {compile}", home, b"", environment) != 0:
            return False
        return all(_prints(home, *case) for case in cases[:MOST_CASES])


def is_case(case: Any) -> bool:
    """Whether this is a test case: the lines of an input, and of its output."""
    return (
        isinstance(case, list)
        and len(case) == 2
        and all(
            isinstance(lines, list) and all(isinstance(line, str) for line in lines)
            for lines in case
        )
    )


def _prints(home: Path, input_lines: Sequence[str], expected: Sequence[str]) -> bool:
    if (
        _run(f"{CASE_LIMITS}; exec ./program", home, ("\n".join(input_lines) + "\n").encode(), {})
        in OUT_OF_TIME
    ):
        return False
    return (home / "printed").read_bytes() == ("\n".join(expected) + "\n").encode()


def _run(command: str, home: Path, stdin: bytes, environment: dict[str, str]) -> int | None:
    """Run a command there with its output in the file "printed".

    Its exit code, or None if it was ended by the clock.

    A program that another signal than that of a time limit ended has what it printed until then, as
    officially.
    """
    (home / "given").write_bytes(stdin)
    with open(home / "given", "rb") as source, open(home / "printed", "wb") as printed:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=home,
            env=environment,
            stdin=source,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what it left behind. While one of a session lives no other gets its number.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
