"""Words of a command line in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.backends.run_config import RunConfig
from kvbench.cli import main as cli
from kvbench.cli.compose import combinations, compose_request, loader_of, run_of


def over(defaults: Sequence[str], words: Sequence[str]) -> list[str]:
    """Defaults with words that stand above them: a command line takes each key once."""
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in defaults if word.partition("=")[0] not in keys), *words]


def configs(*words: str) -> list[DictConfig]:
    """What a command line composes: one config, or those of a sweep's runs."""
    flags = cli.flags_in(words)
    asked = compose_request(loader_of(flags.config_dir), flags.config_name, flags.words, flags.multirun)
    if asked.arms is None:
        return [run_of(asked.config)]
    return [asked.arm_config(arm) for arm in combinations(asked.arms)]


def other(config: RunConfig, **values: Any) -> RunConfig:
    """A config with other values of its keys, group by group."""
    return RunConfig.of(OmegaConf.to_container(OmegaConf.merge(config.resolved, values)))  # type: ignore[arg-type]
