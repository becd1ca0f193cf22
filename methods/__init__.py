"""KV-cache methods, one file or folder each. They know `kvbench.method`, `kvbench.budget` and `methods.blocks`, and
one that builds on another knows that one.
"""

from contextlib import suppress
from pathlib import Path


def forget_old_kernels(folder: Path) -> None:
    """Delete what Numba has compiled in `methods` before any of its files of kernels, or of blocks, changed.

    Numba itself compiles a kernel anew when its own file has changed, and keeps it where it calls one of another file
    that has. So a kernel could go on with an older version of what it calls. Indexes and data both: Numba writes the
    index first, and another process that reads it then must find no older data under the same name.
    """
    sources = [found for of in ("**/kernels.py", "**/kernels/*.py", "blocks/*.py") for found in folder.glob(of)]
    newest = max(source.stat().st_mtime for source in sources)
    for compiled in folder.glob("**/__pycache__/*.nb[ic]"):
        if compiled.stat().st_mtime < newest:
            compiled.unlink(missing_ok=True)


with suppress(OSError):  # of an installation that this user cannot write to, where Numba keeps nothing either
    forget_old_kernels(Path(__file__).parent)
