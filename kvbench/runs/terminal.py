"""What commands print, in characters that the terminal, file or pipe has: others become plain ones
that mean the same.

Every command begins with `fit_streams`, in `kvbench.cli.output`. Tables are laid out by a `Console`
from here, which knows how wide they become.
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
from typing import Any

import rich.console
from rich.text import Text

# What a character becomes where there is none of it; accents are left out, and other scripts are
# spelled by number.
PLAIN = {
    "±": "+-",
    "×": "x",
    "·": ".",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "→": "->",
    "↑": "^",
    "↓": "v",
    "≤": "<=",
    "≥": ">=",
}
HANDLER = "kvbench.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of `codecs`: the nearest text that the encoding has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    name = unicodedata.name(character, "")
    if character in PLAIN:
        return PLAIN[character]
    if name.startswith("BOX DRAWINGS"):
        return "|" if "VERTICAL" in name else "-"
    if "BLOCK" in name.split():  # of a bar
        return "#"
    bare = "".join(
        part for part in unicodedata.normalize("NFKD", character) if not unicodedata.combining(part)
    )
    return bare if bare.isascii() else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(HANDLER, _plain)


def fit_streams() -> None:
    """Let what is printed from now on be in characters that standard output and standard error
    have.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def fitting(text: str, encoding: str) -> str:
    """A text as a stream of this encoding shows it."""
    return text.encode(encoding, HANDLER).decode(encoding)


class Console(rich.console.Console):
    """A console of rich that lays texts out as its file shows them: what becomes longer has its
    room. A name in square brackets is a name, and no markup.
    """

    def __init__(self, **options: Any) -> None:
        """See rich."""
        super().__init__(**{"markup": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich."""
        return super().render_str(fitting(text, self.encoding), **options)
