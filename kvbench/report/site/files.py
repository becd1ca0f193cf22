"""The files of a site on disk: all inside its folder, none deleted that a site did not write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvbench.config import ConfigError
from kvbench.report.site.pages import File
from kvbench.runs.stored import json_in

MARK = '<meta name="generator" content="kvbench">'  # of a page of ours
ENDINGS = {".html", ".svg", ".css", ".js", ".csv"}
# names the files of the site, so that the next one there knows what it may delete
LIST = "site.json"


def check(folder: Path) -> None:
    """Refuse a folder that holds something else than a site of ours.

    Raises
    ------
    ConfigError
        names it.
    """
    if folder.is_file():
        raise ConfigError(
            f"--out {folder}: is a file; a site takes a folder, or name another --format"
        )
    index = folder / "index.html"
    ours = index.is_file() and MARK in index.read_text(encoding="utf-8", errors="replace")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ConfigError(
            f"--out {folder}: holds other files than a site's; name a new or an empty folder"
        )


def write_files(out: Path, files: Sequence[File]) -> None:
    """Write the files of a site.

    Those that an older site listed there, and that are not of this one, are deleted.

    Raises
    ------
    ConfigError
        one would lie outside the folder, or cannot be written.
    """
    targets = {path: out / path for path in (LIST, *(file.path for file in files))}
    try:
        if strayed := next(
            (path for path, target in targets.items() if not _is_inside(out, target)), ""
        ):
            raise ConfigError(
                f"--out {out}: {strayed} would lie at {(out / strayed).resolve()}; remove that link"
            )
        out.mkdir(parents=True, exist_ok=True)
        for old in _of_older_site(out) - set(targets.values()):
            old.unlink(missing_ok=True)
        for file in files:
            target = targets[file.path]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # whatever it is, a pipe or a link
            target.write_bytes(
                file.content if isinstance(file.content, bytes) else file.content.encode()
            )
        listed = json.dumps({"files": sorted(targets.keys() - {LIST})}, indent=0)
        targets[LIST].write_text(listed + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there ({error.strerror})") from error


def _of_older_site(out: Path) -> set[Path]:
    """The files in a folder that its list names."""
    paths = json_in(out / LIST).get("files")
    named = (
        out / path for path in (paths if isinstance(paths, list) else ()) if isinstance(path, str)
    )
    named = (
        path for path in named if path.suffix in ENDINGS and len(path.relative_to(out).parts) <= 2
    )
    return {
        path
        for path in named
        if "\0" not in str(path) and os.path.isfile(path) and _is_inside(out, path)
    }


def _is_inside(out: Path, path: Path) -> bool:
    """Whether a path leads into a folder, by its name and by the symbolic links on the way."""
    return path.resolve().is_relative_to(out.resolve())
