"""C++ of kvbench (`cpp/`) and of methods: built for this processor by the compiler that is here,
once, and loaded.

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
import struct
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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

# The types of arrays as `cpp/methods.h` numbers them; the number of dimensions is added.
TYPE_CODES = {
    **{getattr(torch, f"uint{8 * size}"): 32 * size for size in (1, 2, 4, 8)},
    **{getattr(torch, f"int{8 * size}"): 32 * size + 8 for size in (1, 2, 4, 8)},
    **{getattr(torch, f"float{8 * size}"): 32 * size + 16 for size in (4, 8)},
    torch.bfloat16: 64,  # its bits
}
WRONG_TYPES = -(2**63)


class NoKernels(Exception):
    """There are none here; says why."""


FILES: list[CppFile] = []  # all that this process has imported


class CppFile:
    """Functions of a C++ file, built when the first is called if nobody has built them.

    Each `KERNEL` of the file (`cpp/methods.h`) is an attribute: called with contiguous tensors or
    arrays on a CPU and numbers, it returns an int, and releases the GIL.

    Parameters
    ----------
    path
        of the file.
    is_exact
        products and sums are rounded each, as in torch; else together, where the processor can.
    """

    def __init__(self, path: Path, is_exact: bool = False) -> None:
        self.path = path
        self.flags = *FLAGS, f"-ffp-contract={'off' if is_exact else 'fast'}", f"-I{SOURCES}"
        FILES.append(self)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_") or name == "loaded":
            raise AttributeError(name)
        function = self.loaded[f"kvbench_{name}"]
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64

        def call(*arguments: Any) -> int:
            line = array("q", _line(arguments))
            result: int = function(line.buffer_info()[0])
            if result == WRONG_TYPES:
                kinds = ", ".join(f"{getattr(of, 'dtype', type(of).__name__)}" for of in arguments)
                raise TypeError(f"{self.path}: {name} does not take {kinds}")
            return result

        setattr(self, name, call)
        return call

    @functools.cached_property
    def loaded(self) -> ctypes.CDLL:
        """The library.

        Raises
        ------
        NoKernels
            no compiler is here, or it could not build them.
        """
        loaded = ctypes.CDLL(str(self.built() or self.build()))
        gnu = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
        if gnu:  # torch's threads, see `cpp/threads.h`
            openmp = ctypes.CDLL(str(gnu[0]))
            loaded.kvbench_use_threads(openmp.GOMP_parallel, openmp.omp_get_thread_num)
        return loaded

    @functools.cached_property
    def why_missing(self) -> str | None:
        """Why it cannot be loaded, or None."""
        try:
            self.loaded  # noqa: B018
        except NoKernels as error:
            return str(error)
        return None

    def require(self) -> None:
        """Refuse to go on without it.

        Raises
        ------
        ValueError
            says why it is not there, and what would be right.
        """
        if self.why_missing is not None:
            right = "install a compiler, or choose a method that torch computes, too"
            raise ValueError(f"{self.why_missing}; {right}")

    def is_unbuilt(self) -> bool:
        """Whether it would be built now."""
        return "loaded" not in self.__dict__ and self.built() is None and _compiler() is not None

    def built(self) -> Path | None:
        """What was built of these sources for this processor, or None.

        Where no compiler is here, by any.
        """
        compiler = _compiler()
        name = f"{self._name(_identity(compiler) if compiler else '*')}.so"
        for folder in _folders(self.path.parent):
            with suppress(OSError):
                path = next(folder.glob(name), None)
                if path is not None and self._is_trusted(path):
                    return path
        return None

    def build(self) -> Path:
        """Build it; where.

        Raises
        ------
        NoKernels
            see `loaded`.
        """
        compiler = _compiler()
        if compiler is None:
            raise NoKernels(f"no C++ compiler is here ({', '.join(COMPILERS)})")
        folder = _writable_folder(self.path.parent)
        path = folder / f"{self._name(_identity(compiler))}.so"
        # two processes that build at once each write a file of their own, and either may stay
        number, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(number)
        try:
            command = [compiler, *self.flags, f"-march={_level()}", str(self.path)]
            done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), "")
                raise NoKernels(f"{compiler} does not build {self.path}: {said or done.returncode}")
            os.chmod(temporary, 0o755)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return path

    def _name(self, compiler: str) -> str:
        headers = {*SOURCES.glob("*.h"), *self.path.parent.glob("*.h")}
        parts = [*self.flags[:-1], *(path.read_text() for path in [self.path, *sorted(headers)])]
        sources = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        processor = f"{platform.machine()}-{_processor()}" if _level() == "native" else _level()
        return f"{self.path.parent.name}-{processor}-{sources}-{compiler}"

    def _is_trusted(self, built: Path) -> bool:
        """Whether nobody else can have written it; beside the sources, who could write these."""
        owners = {0, os.geteuid(), self.path.stat().st_uid}
        return built.stat().st_uid in owners and not built.stat().st_mode & 0o022


def _line(arguments: tuple[Any, ...]) -> list[int]:
    """Arguments as `cpp/methods.h` reads them."""
    line: list[int] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            argument = torch.from_numpy(argument)
        if isinstance(argument, torch.Tensor):
            shape = argument.shape
            if not argument.is_contiguous():
                raise TypeError(f"a kernel reads contiguous arrays, and got one of {[*shape]}")
            line += (argument.data_ptr(), TYPE_CODES[argument.dtype] + len(shape), *shape)
        elif isinstance(argument, float):
            line += struct.unpack("q", struct.pack("d", argument))
        else:
            line.append(int(argument))
    return line


class Kernels:
    """The functions of `cpp/kernels.cpp`, each under its name in `FUNCTIONS`; they release the
    GIL.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        for name, kinds in FUNCTIONS.items():
            function = loaded[f"kvbench_{name}"]
            function.argtypes = [TYPES[kind] for kind in kinds]
            function.restype = ctypes.c_int64
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


KVBENCH = CppFile(SOURCES / "kernels.cpp")


@functools.cache
def library() -> Kernels:
    """The kernels of kvbench.

    Raises
    ------
    NoKernels
        see `CppFile.loaded`.
    """
    return Kernels(KVBENCH.loaded)


def why_missing() -> str | None:
    """Why there are no kernels, or None."""
    return KVBENCH.why_missing


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


@functools.cache
def _processor() -> str:
    """A digest of the features of a processor that has no levels."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = sorted({line for line in lines if line.startswith("Features")})
        return hashlib.sha256("".join(features).encode()).hexdigest()[:8]
    return platform.processor()


# -- folders ---------------------------------------------------------------------------------------


def _folders(sources: Path) -> Iterator[Path]:
    """Beside the sources, and of the user."""
    yield sources / "__pycache__"
    folder = user_cache_path("kvbench").resolve() / "kernels"
    with suppress(OSError):
        if open_to_others(folder) is None:
            yield folder


def _writable_folder(sources: Path) -> Path:
    for folder in _folders(sources):
        with suppress(OSError):
            make_private(folder)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="kvbench-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
