"""Words of a command line in tests."""

from __future__ import annotations

from collections.abc import Sequence


def over(defaults: Sequence[str], words: Sequence[str]) -> list[str]:
    """Defaults with words that stand above them: a command line takes each key once."""
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in defaults if word.partition("=")[0] not in keys), *words]
