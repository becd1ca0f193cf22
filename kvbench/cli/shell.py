"""Completion of keys and choices as one types: `eval "$(kvbench -sc install=bash)"`, by Hydra's
plugins for shells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from kvbench.config import ConfigError


def complete(loader: ConfigLoader, name: str, words: Sequence[str]) -> None:
    """Print what a shell shall run to have completion, or to lose it; or the completions of
    `$COMP_LINE`.

    Parameters
    ----------
    loader, name
        as for `kvbench.cli.compose.compose`.
    words
        install=SHELL, uninstall=SHELL or query=SHELL.

    Raises
    ------
    ConfigError
        another word, or no such shell.
    """
    kinds = cast(list[type[CompletionPlugin]], Plugins.instance().discover(CompletionPlugin))
    shells = {kind.provides(): kind(loader) for kind in kinds}
    act, _, shell = " ".join(words).partition("=")
    if act not in ("install", "uninstall", "query") or shell not in shells:
        raise ConfigError(
            f"-sc {' '.join(words)}: expected install=SHELL or uninstall=SHELL, of"
            f" {' | '.join(shells)}"
        )
    if act == "query":
        shells[shell].query(name)
    else:
        getattr(shells[shell], act)()
