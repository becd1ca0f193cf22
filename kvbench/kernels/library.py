"""Kernels in C++ (`cpp/`): built for this processor by the compiler that is here, once, and loaded.

What is built has a name made of the sources, the compiler and the processor's level, so that a
folder may be shared by machines of different kinds. It runs as whoever loads it: a folder that
another user can write to is passed over.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from platformdirs import user_cache_path

from kvbench.kernels.private import make_private, open_to_others

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = "g++", "clang++", "c++"
FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=fast",  # a product and a sum are rounded once, where the processor can
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
)
# What torch calls the features of a level of x86-64, the highest first.
LEVELS = {
    "x86-64-v4": ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"),
    "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"),
}

# What functions of `cpp/kernels.cpp` take: n = int64 or an address, d = double, s = a structure.
FUNCTIONS = {
    "find_format": "nn",
    "use_threads": "nn",
    "attend_resident": "ss",
    "attend_lists": "ss",
    "attend_blocks": "ss",
    "join": "s",
    "gather": "nsnnnn",
    "finite": "nnnnn",
    "put": "snnnn",
    "put_in_place": "nnnnnnnnn",
    "encode": "s",
    "turn": "s",
    "products": "s",
    "linear": "nnnnnnnn",
    "gated": "nnnnnnnnn",
    "rotated": "s",
    "normed": "nnnnnd",
}
TYPES: dict[str, Any] = {"n": ctypes.c_int64, "d": ctypes.c_double, "s": ctypes.c_void_p}


class Kernels:
    """The functions of a library, each under its name in `FUNCTIONS`; they release the GIL."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        for name, kinds in FUNCTIONS.items():
            function = loaded[f"kvbench_{name}"]
            function.argtypes = [TYPES[kind] for kind in kinds]
            function.restype = ctypes.c_int64
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


class NoKernels(Exception):
    """There are none here; says why."""


@functools.cache
def library() -> Kernels:
    """The kernels, built if nobody has built them.

    Raises
    ------
    NoKernels
        no compiler is here, or it could not build them.
    """
    kernels = Kernels(built() or _build())
    gnu = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
    if gnu:  # torch's threads, see `cpp/threads.h`
        openmp = ctypes.CDLL(str(gnu[0]))
        functions = openmp.GOMP_parallel, openmp.omp_get_thread_num
        kernels.use_threads(
            *(ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        )
    return kernels


@functools.cache
def why_missing() -> str | None:
    """Why there are no kernels, or None."""
    try:
        library()
    except NoKernels as error:
        return str(error)
    return None


def is_unbuilt() -> bool:
    """Whether `library` would build them now."""
    return built() is None and _compiler() is not None


def built() -> Path | None:
    """What was built of these sources for this processor, or None.

    Where no compiler is here, by any.
    """
    compiler = _compiler()
    name = f"{_name(_identity(compiler))}.so" if compiler else f"{_name('*')}.so"
    for folder in _folders():
        with suppress(OSError):
            if (path := next(folder.glob(name), None)) is not None and _is_trusted(path):
                return path
    return None


def _build() -> Path:
    compiler = _compiler()
    if compiler is None:
        raise NoKernels(f"no C++ compiler is here ({', '.join(COMPILERS)})")
    folder = _writable_folder()
    path = folder / f"{_name(_identity(compiler))}.so"
    # two processes that build at once each write a file of their own, and either may stay
    number, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(number)
    try:
        command = [compiler, *FLAGS, f"-march={_level()}", str(SOURCES / "kernels.cpp")]
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise NoKernels(f"{compiler} does not build them: {said or done.returncode}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


# -- names -----------------------------------------------------------------------------------------


@functools.cache
def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _identity(compiler: str) -> str:
    """What tells a compiler from another version of it, without a call of it."""
    facts = Path(compiler).resolve().stat()
    content = f"{Path(compiler).resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return hashlib.sha256(content.encode()).hexdigest()[:8]


@functools.cache
def _level() -> str:
    """As `-march` has it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "native"
    has = torch.cpu.get_capabilities()
    levels = (level for level, names in LEVELS.items() if all(has.get(name) for name in names))
    return next(levels, "x86-64")


def _name(compiler: str) -> str:
    parts = [*FLAGS, *(path.read_text() for path in sorted(SOURCES.iterdir()))]
    sources = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    processor = f"{platform.machine()}-{_processor()}" if _level() == "native" else _level()
    return f"kernels-{processor}-{sources}-{compiler}"


@functools.cache
def _processor() -> str:
    """A digest of the features of a processor that has no levels."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = sorted({line for line in lines if line.startswith("Features")})
        return hashlib.sha256("".join(features).encode()).hexdigest()[:8]
    return platform.processor()


# -- folders ---------------------------------------------------------------------------------------


def _folders() -> Iterator[Path]:
    """Beside the sources, and of the user."""
    yield SOURCES.parent / "__pycache__"
    folder = user_cache_path("kvbench").resolve() / "kernels"
    with suppress(OSError):
        if open_to_others(folder) is None:
            yield folder


def _is_trusted(path: Path) -> bool:
    """Whether nobody else can have written it; beside the sources, who could write these."""
    owners = {0, os.geteuid(), SOURCES.stat().st_uid}
    return path.stat().st_uid in owners and not path.stat().st_mode & 0o022


def _writable_folder() -> Path:
    for folder in _folders():
        with suppress(OSError):
            make_private(folder)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="kvbench-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
