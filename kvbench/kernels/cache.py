"""When compiled code is old: one rule for all kernels, of kvbench and of methods. No Numba."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_COMPILED = re.compile(r"^@(kernel|inner|compiled|jit|njit|intrinsic|register_model|overload)\b", re.MULTILINE)


def inlined(package: Path) -> Iterator[Path]:
    """The files of a package that compiled code is made of: those named so, and all with compiled functions."""
    for source in package.rglob("*.py"):
        if "kernels" in (source.stem, source.parent.name) or _COMPILED.search(source.read_text(encoding="utf-8")):
            yield source


def forget_old_kernels(package: Path, *inlines: Path) -> None:
    """Delete what Numba compiled in a package before any file changed that a kernel of it may inline.

    Numba itself compiles a kernel anew when its own file has changed, and keeps it where it calls one of another file
    that has. So a kernel could go on with an older version of what it calls. Indexes and data both: Numba writes the
    index first, and another process that reads it then must find no older data under the same name.

    Args:
        package: a folder; one that cannot be written to is left as it is, as Numba keeps nothing there either.
        inlines: packages whose functions its kernels call.
    """
    newest = max((source.stat().st_mtime for of in (package, *inlines) for source in inlined(of)), default=0.0)
    with suppress(OSError):
        for compiled in package.glob("**/__pycache__/*.nb[ic]"):
            if compiled.stat().st_mtime < newest:
                compiled.unlink(missing_ok=True)
