"""A submission: an archive of runs, and a manifest with the SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kvbench
from kvbench.runs.archive import unpacked
from kvbench.runs.stored import ResultsError, contents, json_of, printable, what_of

NAME = "submission.json"
FORMAT = 1
MOST_LETTERS = 100  # of a name or a link
# that share shapes of letters
ALPHABETS = {"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "COPTIC", "CHEROKEE", "LISU"}
# kvbench, also in letters of other alphabets that look like its own.
_OURS = re.compile(
    "[k\u03ba\u043a\u1d0b][v\u03bd\u0475\u1d20][b\u0432\u044c\u03b2\u1d03\u0299]"
    "[e3\u0435\u03b5\u0454\u04bd][n\u043f\u0578\u03b7\u0274][c\u0441\u03f2\u1d04]"
    "[h\u04bb\u0570\u043d\u029c]"
)


class Manifest(NamedTuple):
    """What a submission says of itself.

    Attributes
    ----------
    who
        made the runs, as they say.
    link
        to a paper, code or a person, or "".
    version
        of kvbench, which packed it.
    """

    who: str
    link: str
    version: str


def signed(who: str) -> tuple[str, str]:
    """The name and the link in "NAME, https://...".

    Raises
    ------
    ValueError
        says what would be right.
    """
    name, *links = who.split(", ", 1)
    name, link = name.strip(), "".join(links).strip()
    if reason := _unfit(name, link):
        raise ValueError(f"{printable(who)}: {reason}")
    return name, link


def _unfit(who: str, link: str) -> str:
    if not who or not who.isprintable() or len(who) > MOST_LETTERS:
        return f"expected a name of 1 to {MOST_LETTERS} letters, and a link after a comma"
    if _OURS.search(_letters(who)):
        return "expected your own name, as kvbench's runs are the board's"
    if mixed := next((word for word in who.split() if len(_scripts(word)) > 1), ""):
        return (
            f"{printable(mixed)}: letters of {' and '.join(sorted(_scripts(mixed)))} in one word;"
            " expected one script"
        )
    plain = link.isascii() and link.isprintable() and not set(link) & set(" \"'<>\\")
    if link and not (link.startswith("https://") and plain and len(link) <= MOST_LETTERS):
        return (
            f"expected a link https://... of at most {MOST_LETTERS} letters, without spaces and"
            " quotes"
        )
    return ""


def _letters(text: str) -> str:
    """The letters and digits of a text, without marks, wide or styled forms and separators."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    return "".join(letter for letter in plain if letter.isalnum())


def _scripts(word: str) -> set[str]:
    """The alphabets that letters look alike in, of a word."""
    return {
        script
        for letter in word
        if (script := unicodedata.name(letter, "").partition(" ")[0]) in ALPHABETS
    }


def with_manifest(files: Mapping[str, bytes], who: str, link: str) -> dict[str, bytes]:
    """These files and the manifest of them."""
    hashes = {name: _sha256(data) for name, data in sorted(files.items())}
    manifest = {
        "format": FORMAT,
        "kvbench": kvbench.__version__,
        "who": who,
        "link": link,
        "files": hashes,
    }
    return {**files, NAME: (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()}


def read(archive: Path) -> Manifest:
    """The manifest of a submission, whose files are those that it lists.

    Raises
    ------
    ResultsError
        why it is none.
    """
    try:
        files = unpacked(contents(archive))
        written = json_of(bytes(files.pop(NAME, b"{}")))
        listed = written["files"]
        manifest = Manifest(written["who"], written["link"], written["kvbench"])
        format_of, texts = written["format"], all(isinstance(word, str) for word in manifest)
    except (OSError, MemoryError, LookupError, TypeError, ValueError) as error:
        raise ResultsError(f"no submission: kvbench submit packs one ({what_of(error)})") from error
    if format_of != FORMAT or not texts or not isinstance(listed, dict):
        raise ResultsError(
            f"of format {printable(str(format_of)[:40])}; this kvbench reads submissions of"
            f" {FORMAT}"
        )
    if reason := _unfit(manifest.who, manifest.link) or (
        not manifest.version.isprintable() and "a strange version"
    ):
        raise ResultsError(f"not as kvbench submit writes it: {reason}")
    if reason := _changed(files, listed):
        raise ResultsError(reason)
    return manifest._replace(version=manifest.version[:MOST_LETTERS])


def _changed(files: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    """Which file is not the one that was packed; or ""."""
    for name in sorted({*files, *listed}):
        if name not in listed:
            return f"{printable(name)}: not in the manifest; it was added after packing"
        if name not in files:
            return f"{printable(name)}: in the manifest, and not in the archive"
        if _sha256(files[name]) != listed[name]:
            return f"{printable(name)}: another file than was packed, by its SHA-256"
    return ""


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
