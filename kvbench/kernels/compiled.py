"""How kernels are compiled, and where what was compiled lies.

A kernel is what Python calls. It is compiled at its first call for each type of arguments, by one
process at a time, and kept on disk under a name that says what it is made of: its module, those of
ours that this imports, and Numba's version. So another version of either finds nothing, and throws
nothing away.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib.util
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import config, njit, types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)
from numba.core.compiler_lock import global_compiler_lock
from platformdirs import user_cache_path

from kvbench.kernels.lean import lean
from kvbench.kernels.private import make_private, open_to_others, read_intact, write_intact

KERNELS: dict[str, Any] = {}  # all that this process has imported, by module:name
UNUSED_DAYS = 30  # after which what was compiled of other sources is deleted
OURS = ("kvbench", "methods")
_IMPORTS = re.compile(r"^from ([\w.]+) import (\([^)]*\)|.*)|^import ([\w.]+)", re.MULTILINE)


def kernel(**options: Any) -> Callable[[Any], Any]:
    """A decorator of functions that Python calls: `numba.njit` with these options, without the GIL,
    kept on disk.
    """

    def decorate(function: Any) -> Any:
        dispatcher = _general(njit(nogil=True, no_cfunc_wrapper=True, **options)(function))
        compile_plainly = dispatcher.compile

        def compile_once(signature: Any) -> Any:
            with global_compiler_lock, on_disk(dispatcher).alone(signature), lean():
                return compile_plainly(signature)

        dispatcher.compile = compile_once
        KERNELS[f"{function.__module__}:{function.__qualname__}"] = dispatcher
        return dispatcher

    return decorate


def inner(**options: Any) -> Callable[[Any], Any]:
    """A decorator of functions that only kernels call, which are compiled with them."""
    return lambda function: _general(
        njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    )


def _general(dispatcher: Any) -> Any:
    """For a compiled function a number from other compiled code is a number, and a whole one int64.

    Numba by itself compiles it once more for each constant, and each width, that it is called with.
    """

    def wider(kind: types.Type) -> types.Type:
        kind = types.unliteral(kind)
        return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind

    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, named: template(
        tuple(map(wider, args)), {name: wider(kind) for name, kind in named.items()}
    )
    return dispatcher


def on_disk(dispatcher: Any) -> _OnDisk:
    """Where what is compiled of a kernel is kept.

    Looked for at the first call, when all is imported that it calls.
    """
    if not isinstance(dispatcher._cache, _OnDisk):
        dispatcher._cache = _OnDisk(dispatcher.py_func)
    cache: _OnDisk = dispatcher._cache
    return cache


@functools.cache
def digest(module: str) -> str:
    """What a module and those of ours that it imports are made of, and which Numba
    compiles them.
    """
    versions = f"{numba.__version__} {llvmlite.__version__}".encode()
    sources = sorted(_sources(module, {}).values())
    return hashlib.sha256(
        b"\0".join([versions, *(source.read_bytes() for source in sources)])
    ).hexdigest()[:16]


def _sources(module: str, files: dict[str, Path]) -> dict[str, Path]:
    """The files of a module and of those of ours that it imports, and that these import."""
    files[module] = path = Path(str(sys.modules[module].__file__))
    top_package = module.partition(".")[0]
    for package, listed, plain in _IMPORTS.findall(path.read_text(encoding="utf-8")):
        if package.startswith("."):
            package = importlib.util.resolve_name(package, sys.modules[module].__package__)
        inside = {f"{package}.{name}" for name in re.findall(r"\w+", listed)} & sys.modules.keys()
        for name in inside or {package or plain}:
            same_folder = (
                Path(str(getattr(sys.modules.get(name), "__file__", ""))).parent == path.parent
            )
            if (
                name not in files
                and name in sys.modules
                and (same_folder or name.partition(".")[0] in (top_package, *OURS))
            ):
                _sources(name, files)
    return files


class _Place(_CacheLocator):  # type: ignore[misc]
    """The first folder that this user alone can write to: what Numba is told, beside the source, of
    the user, of this process.
    """

    def __init__(self, function: Any, path: str) -> None:
        self._py_file, self._digest = path, digest(function.__module__)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Place:
        """Where a function of a file is kept."""
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        """The folder."""
        return str(_folder(Path(self._py_file).parent))

    @property
    def is_private(self) -> bool:
        """Whether nobody else's files are read there."""
        return Path(self.get_cache_path()) != _beside(Path(self._py_file).parent)

    def get_source_stamp(self) -> str:
        """What is in a file's name already."""
        return self._digest

    def get_disambiguator(self) -> str:
        """What a file's name has beside the function's."""
        return self._digest


@functools.cache
def _folder(sources: Path) -> Path:
    path_hash = hashlib.sha256(str(sources).encode()).hexdigest()[:16]
    configured = [Path(config.CACHE_DIR, path_hash)] if config.CACHE_DIR else []
    for folder in (
        *configured,
        _beside(sources),
        user_cache_path("kvbench") / "kernels" / path_hash,
    ):
        with suppress(OSError):
            # who can write there runs code here by Python's own files
            if folder == _beside(sources):
                folder.mkdir(exist_ok=True)
            else:
                folder = folder.resolve()
                if (open_one := open_to_others(folder)) is not None:
                    _say(
                        f"{open_one}: other users can write there; no kernels are kept in"
                        f" {folder.parent}"
                    )
                    continue
                make_private(folder)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="kvbench-kernels-"))  # nobody else can write there
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    # of processes that this one starts, too
    config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"] = str(temporary)
    (temporary / path_hash).mkdir()
    return temporary / path_hash


def _beside(sources: Path) -> Path:
    return sources / "__pycache__"


@functools.cache
def _say(line: str) -> None:
    print(f"kernels: {line}", file=sys.stderr)


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Place,)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """An index and what it lists, as files that hold nobody else's code; a damaged one is as good
    as none.
    """

    def __init__(self, folder: Path, name: str, is_private: bool) -> None:
        super().__init__(str(folder), name, "")
        self._folder, self._is_private = folder, is_private

    def _read(self, name: str) -> Any:
        path = self._folder / name
        try:
            content = read_intact(path, self._is_private)
            return None if content is None else pickle.loads(content)
        except Exception as error:  # unpickling has many
            _say(f"{path}: {error}; compiled anew")
            with suppress(OSError):
                path.unlink()
            return None

    def _load_index(self) -> dict[Any, str]:
        return self._read(self._index_name) or {}

    def _load_data(self, name: str) -> Any:
        return self._read(name)

    def _save_index(self, overloads: dict[Any, str]) -> None:
        write_intact(self._folder / self._index_name, self._dump(overloads))

    def _save_data(self, name: str, data: Any) -> None:
        write_intact(self._folder / name, self._dump(data))


class _OnDisk(FunctionCache):  # type: ignore[misc]
    """Compiled code of one function on disk."""

    _impl_class = _CacheImpl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        folder, is_private = Path(self.cache_path), self._impl.locator.is_private
        self._cache_file = _Files(folder, self._impl.filename_base, is_private)

    def has(self, signature: Any, codegen: Any) -> bool:
        """Whether it was compiled for these types."""
        name = self._cache_file._load_index().get(self._index_key(signature, codegen))
        return name is not None and Path(self.cache_path, name).exists()

    @contextmanager
    def alone(self, what: Any) -> Iterator[None]:
        """No other process compiles, or writes, the same meanwhile; one that is killed leaves
        nothing locked.
        """
        name = f"{self._impl.filename_base}{what}"
        place = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        try:
            file = _locks(self.cache_path)
            fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        except OSError:
            # a file system without locks, a link in its place: at worst the same is compiled twice
            yield
            return
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, and nothing that was made of other sources and is old."""
        with suppress(OSError), self.alone("index"):
            super().save_overload(sig, data)
            base_name, before = self._impl.filename_base, time.time() - UNUSED_DAYS * 86400
            function = base_name.rpartition("-")[0]
            for path in Path(self.cache_path).glob(f"{function}-*.nb[ic]"):
                if not path.name.startswith(base_name) and path.stat().st_mtime < before:
                    path.unlink(missing_ok=True)


@functools.cache
def _locks(folder: str) -> int:
    """The file whose bytes are locks, each of one function and types.

    Open for good: closing it would free them all.
    """
    return os.open(Path(folder, "kernels.lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
