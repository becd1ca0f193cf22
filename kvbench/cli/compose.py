"""From the words of a command line to composed configs: one run, the jobs of a sweep, or what is wrong with a word."""

from __future__ import annotations

import copy
import itertools
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from kvbench.cli import smoke
from kvbench.cli.checks import check, leaves
from kvbench.cli.words import (
    no_such_choice,
    options,
    parsed,
    reason,
    refuse_several_choices,
    refuse_sweep,
    refuse_twice,
    refuse_unknown_choices,
)
from kvbench.config import ConfigError, conf_dir, find_modules_in, first_line, nearest_key, show, sweep_words

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

T = TypeVar("T")

# Launchers whose jobs run on this machine.
HERE = {
    "hydra_plugins.kvbench.InTurn",
    "hydra_plugins.kvbench.Local",
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
}

# Composing takes 50 ms, a value put into a composed config 5 ms. A sweep checks the others before its first job.
MOST_COMPOSED = 40
MOST_CHECKED = 100


def loader_of(flags: Namespace) -> ConfigLoaderImpl:
    """Hydra's loader over kvbench's conf and the user's `--config-dir`, as hydra.main sets it up."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    path = create_config_search_path(str(conf_dir()))
    if flags.config_dir is not None:
        folder = Path(flags.config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={flags.config_dir}: no such folder")
        find_modules_in(folder)
        path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(config_search_path=path)


def composed_jobs(
    loader: ConfigLoaderImpl, name: str, words: Sequence[str], multirun: bool
) -> Iterator[tuple[DictConfig, bool]]:
    """The configs of a run, or of a sweep's jobs, and whether each will run on this machine; of a large sweep a sample.

    Jobs that differ in plain values alone share one composition, into which the values are put. A launcher that is
    not of `HERE` (SLURM) sends the jobs of a sweep to machines that may have what this one lacks.

    Raises:
        ConfigError: a word that is no override, an unknown choice or key, a sweep without -m.
    """
    from hydra.types import RunMode

    overrides = parsed(loader, words)
    refuse_twice(words, "; several are a sweep, {key}={values} with -m")
    refuse_several_choices(loader, overrides)
    first = compose_one(loader, name, [options(override)[0] for override in overrides])
    if not multirun and first.hydra.mode != RunMode.MULTIRUN:
        refuse_sweep(loader, overrides)
        if first.sweep.shards != 1:
            raise ConfigError(f"sweep.shards={first.sweep.shards}: shares samples out over jobs, and needs -m")
        yield smoke.applied(without_hydra(first)), True
        return
    here = str(first.hydra.launcher["_target_"]) in HERE
    product = itertools.product
    combinations: list[tuple[Sequence[str], list[Sequence[str]]]] = []
    for arm in sweep_arms(loader, first, words):
        refuse_several_choices(loader, arm)
        if not first.hydra.searchpath:
            refuse_unknown_choices(loader, arm)
        plain = [options(override) for override in arm if _is_plain_sweep(loader, override)]
        others = [options(override) for override in arm if not _is_plain_sweep(loader, override)]
        combinations += [(combination, list(product(*plain))) for combination in product(*others)]
    rng = random.Random(0)
    combinations = _covering(combinations, MOST_COMPOSED, rng, lambda one: one[0])
    for combination, rows in combinations:
        base = compose_one(loader, name, [*combination, *rows[0]])
        for row in _covering(rows, MOST_CHECKED // len(combinations), rng, lambda row: row):
            yield smoke.applied(_with_values(without_hydra(base), parsed(loader, row))), here


def sweep_arms(loader: ConfigLoaderImpl, config: DictConfig, words: Sequence[str]) -> list[list[Override]]:
    """What each arm of a sweep takes: an experiment may bring its own, and the command line has the last word."""
    sweeper, arms = config.hydra.sweeper, []
    for own in sweep_words(sweeper.get("params"), sweeper.get("arms")):
        by_key = {override.get_key_element(): override for override in parsed(loader, [*own, *words])}
        arms.append(list(by_key.values()))
    return arms


def _covering(items: list[T], most: int, rng: random.Random, words: Callable[[T], Iterable[str]]) -> list[T]:
    """At most `most` items by chance, first of all such that hold a word of which no other has been chosen."""
    if len(items) <= most:
        return items
    seen: set[str] = set()
    chosen: list[T] = []
    others: list[T] = []
    for item in rng.sample(items, len(items)):
        (others if seen.issuperset(words(item)) else chosen).append(item)
        seen.update(words(item))
    return [*chosen, *others][:most]


def _is_plain_sweep(loader: ConfigLoaderImpl, override: Override) -> bool:
    """Whether a sweep changes a value only: no group, nothing added or deleted."""
    key = override.get_key_element()
    return override.is_sweep_override() and key[0] not in "+~" and not loader.get_group_options(key)


def without_hydra(config: DictConfig) -> DictConfig:
    """A composed config without Hydra's own part."""
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _with_values(base: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    from omegaconf import OmegaConf

    job = copy.deepcopy(base)
    for override in overrides:
        OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
    return job


def compose_one(loader: ConfigLoaderImpl, name: str, words: Sequence[str]) -> DictConfig:
    """One job's config, hydra's own part included.

    Raises:
        ConfigError: names the choice or key that does not exist, and the nearest that do.
    """
    from hydra.errors import HydraException, MissingConfigException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    try:
        return loader.load_configuration(name, list(words), run_mode=RunMode.RUN, validate_sweep_overrides=False)
    except MissingConfigException as error:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if not group:
            raise ConfigError(f"--config-name={name}: {reason(error)}") from error
        raise no_such_choice(group, choice, error.options or []) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{mark.name if mark else name}: no YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        _refuse_no_name(loader, words)
        unknown = _unknown_key(loader, name, words)
        raise ConfigError(unknown or reason(error)) from error


def _refuse_no_name(loader: ConfigLoaderImpl, words: Sequence[str]) -> None:
    """Refuse a choice that is no name, such as method=null, or an experiment that is not put on top."""
    for override in parsed(loader, words):
        if override.key_or_group == "experiment" and not override.is_add():
            raise ConfigError(f"{override.input_line}: is put on top of the others; write +{override.input_line}")
        valid = loader.get_group_options(override.key_or_group)
        if valid and not override.is_sweep_override() and not isinstance(override.value(), str | list):
            raise no_such_choice(override.key_or_group, show(override.value()), valid)


def _unknown_key(loader: ConfigLoaderImpl, name: str, words: Sequence[str]) -> str | None:
    """What to say where an override names a key that is not there; None where the trouble is another."""
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    overrides = parsed(loader, words)
    chosen = [str(override.input_line) for override in overrides if loader.get_group_options(override.key_or_group)]
    try:
        config = loader.load_configuration(name, chosen, run_mode=RunMode.RUN, validate_sweep_overrides=False)
    except HydraException:
        return None
    run = OmegaConf.to_container(without_hydra(config))
    assert isinstance(run, dict)
    known = {key for key, _ in leaves(run)} | set(run) | {f"hydra.launcher.{key}" for key in config.hydra.launcher}
    for override in overrides:
        missing = object()
        if loader.get_group_options(override.key_or_group):
            continue
        if not override.is_add() and OmegaConf.select(config, override.key_or_group, default=missing) is missing:
            return f"{override.input_line}: no such key; {nearest_key(override.key_or_group, known)}"
    return None


def composed(*words: str, here: bool = True) -> DictConfig:
    """The checked config that these words make on the command line, for scripts and notebooks.

    Args:
        words: as on the command line.
        here: as for `check`.

    Raises:
        ConfigError: as the command line would say it.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    loader = loader_of(Namespace(config_dir=None))
    refuse_several_choices(loader, parsed(loader, words))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = smoke.applied(compose("config", list(words)))
    except HydraException as error:
        raise ConfigError(first_line(error)) from error
    check(config, here)
    return config
