"""From the words of a command line to composed configs: of one run, or of the arms of a sweep.

Hydra is a library here: it reads words and composes files, and kvbench runs what comes of it
(`kvbench.cli.sweep`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.backends.run_config import RunConfig
from kvbench.cli import smoke
from kvbench.cli.checks import check, leaves
from kvbench.cli.words import (
    ON_TOP,
    no_such_choice,
    options,
    parsed,
    reason,
    refuse_hydra_keys,
    refuse_numbers,
    refuse_several_choices,
    refuse_sweep,
    refuse_twice,
    refuse_unknown_choices,
)
from kvbench.config import (
    ConfigError,
    choose_from,
    conf_dir,
    groups,
    nearest_key,
    plugins,
    show,
    sweep_words,
)


class MoreFolders(SearchPathPlugin):
    """Choices found after kvbench's own: of a user's `--config-dir`, then of installed packages."""

    folders: ClassVar[list[Path]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """What Hydra calls when it is initialised."""
        for folder in self.folders:
            search_path.append("kvbench", f"file://{folder}")


class RunRequest(NamedTuple):
    """What a command line asks for.

    Attributes
    ----------
    loader, name
        what composes, and the primary config.
    config
        composed, Hydra's own part included; of a sweep with the first value of each key.
    arms
        of a sweep what each arm takes, its words and several values in one; None: one run.
    """

    loader: ConfigLoader
    name: str
    config: DictConfig
    arms: list[list[Override]] | None

    def arm_config(self, words: Sequence[str]) -> DictConfig:
        """The config of one run of a sweep, by its words."""
        config = compose(self.loader, self.name, [*self.config.hydra.overrides.hydra, *words])
        # ${now:...} is the same in all
        OmegaConf.copy_cache(from_config=self.config, to_config=config)
        return run_of(config)

    def as_yaml(self, part: str, package: str | None = None, resolve: bool = False) -> str:
        """A composed config as YAML; above a sweep's, as comments, what it sweeps over.

        Parameters
        ----------
        part
            "job", what runs; "hydra", with the keys of the launcher; "all", both.
        package
            the key below which it is shown; None: all of it.
        resolve
            show the values of interpolations.

        Raises
        ------
        ConfigError
            there is no such key.
        """
        keys = [
            str(key)
            for key in self.config
            if part == "all" or (part == "hydra") == (key == "hydra")
        ]
        shown = OmegaConf.masked_copy(self.config, keys)
        if resolve:
            try:
                OmegaConf.resolve(shown)
            except OmegaConfBaseException as error:
                raise ConfigError(f"--resolve: {reason(error)}") from error
        section = shown if package in (None, "_global_") else OmegaConf.select(shown, package)
        if section is None:
            raise ConfigError(f"--package={package}: no such key of the config")
        lines = []
        if self.arms:
            lines.append("# A sweep of this config, each line with all its combinations:")
        for arm in self.arms or []:
            words = [str(word.input_line) for word in arm if word.key_or_group != ON_TOP]
            lines.append(" ".join(["#  ", *words]))
        if package:
            lines.append(f"# @package {package}")
        text = OmegaConf.to_yaml(section) if OmegaConf.is_config(section) else str(section)
        return "\n".join([*lines, text.rstrip()])


def loader_of(config_dir: str | None = None) -> ConfigLoader:
    """Hydra's loader over kvbench's conf and a user's `--config-dir`.

    Raises
    ------
    ConfigError
        there is no such folder.
    """
    users = [] if config_dir is None else [Path(config_dir).absolute()]
    if not all(folder.is_dir() for folder in users):
        raise ConfigError(f"--config-dir={config_dir}: no such folder")
    choose_from(None if config_dir is None else Path(config_dir))
    Plugins.instance().register(MoreFolders)
    installed = [*plugins("method").values(), *plugins("task").values()]
    folders = {plugin.file.parents[1] for plugin in installed if plugin.file is not None}
    MoreFolders.folders = [*users, *sorted(folders)]
    GlobalHydra.instance().clear()  # a notebook may have used Hydra itself
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        MoreFolders.folders = []  # whatever else uses Hydra in this process has none
        return GlobalHydra.instance().config_loader()


def compose_request(
    loader: ConfigLoader, name: str, words: Sequence[str], multirun: bool
) -> RunRequest:
    """What these words ask for, composed but not checked.

    Raises
    ------
    ConfigError
        a word that is no override, an unknown choice or key, a sweep without -m.
    """
    overrides = parsed(loader, words)
    refuse_twice(words, "; several are a sweep, {key}={values} with -m")
    refuse_hydra_keys(overrides)
    refuse_numbers(overrides)
    refuse_several_choices(loader, overrides)
    config = compose(loader, name, [options(override)[0] for override in overrides])
    if multirun or config.hydra.mode == RunMode.MULTIRUN:
        return RunRequest(loader, name, config, list(_arms(loader, config, words)))
    refuse_sweep(loader, overrides)
    if config.sweep.shards != 1:
        raise ConfigError(
            f"sweep.shards={config.sweep.shards}: shares samples out over jobs, and needs -m"
        )
    return RunRequest(loader, name, config, None)


def _arms(
    loader: ConfigLoader, config: DictConfig, words: Sequence[str]
) -> Iterator[list[Override]]:
    """What each arm of a sweep takes: an experiment may bring its own, and the command line has the
    last word.
    """
    sweeper = config.hydra.sweeper
    if "arms" not in sweeper:
        raise ConfigError(
            f"hydra/sweeper={config.hydra.runtime.choices['hydra/sweeper']}: expected arms"
        )
    for arm_words in sweep_words(sweeper.params, sweeper.arms):
        by_key = {
            override.get_key_element(): override
            for override in parsed(loader, [*arm_words, *words])
        }
        arm = [override for override in by_key.values() if not override.is_hydra_override()]
        refuse_several_choices(loader, arm)
        if not config.hydra.searchpath:  # whose choices the loader does not know
            refuse_unknown_choices(loader, arm)
        yield arm


def combinations(arms: Sequence[Sequence[Override]]) -> list[list[str]]:
    """The words of each run of a sweep, one value a key, in the order in which they run."""
    return [list(words) for arm in arms for words in itertools.product(*map(options, arm))]


def run_of(composed: DictConfig) -> DictConfig:
    """The config that runs, of a composed one: without Hydra's own part, and small where it says
    `smoke=true`.
    """
    run = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    OmegaConf.copy_cache(from_config=composed, to_config=run)
    return smoke.applied(run)


def compose(loader: ConfigLoader, name: str, words: Sequence[str]) -> DictConfig:
    """One config, Hydra's own part included.

    Raises
    ------
    ConfigError
        names the choice or key that does not exist, and the nearest that do.
    """
    try:
        return loader.load_configuration(name, list(words), run_mode=RunMode.RUN)
    except MissingConfigException as error:
        group, choice = _split_choice(str(error.missing_cfg_file))
        if not group:
            raise ConfigError(f"--config-name={name}: {reason(error)}") from error
        raise no_such_choice(group, choice, loader.get_group_options(group)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{mark.name if mark else name}: no YAML: {' '.join(str(error).split())}"
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        _refuse_no_name(loader, words)
        unknown = _unknown_key(loader, name, words)
        raise ConfigError(unknown or reason(error)) from error


def _split_choice(path: str) -> tuple[str, str]:
    """The group and the choice, which may have a / itself where somebody took it for a path."""
    for group in (*groups(), ON_TOP):
        if path.startswith(f"{group}/"):
            return group, path.removeprefix(f"{group}/")
    group = path.rpartition("/")[0]
    return group, path.removeprefix(f"{group}/")


def _refuse_no_name(loader: ConfigLoader, words: Sequence[str]) -> None:
    """Refuse a choice that is no name, such as method=null, or an experiment that is not put on
    top.
    """
    for override in parsed(loader, words):
        if override.key_or_group == ON_TOP and not override.is_add():
            raise ConfigError(
                f"{override.input_line}: is put on top of the others; write +{override.input_line}"
            )
        named = override.is_sweep_override() or isinstance(override.value(), str | list)
        if not named and (valid := loader.get_group_options(override.key_or_group)):
            raise no_such_choice(override.key_or_group, show(override.value()), valid)


def _unknown_key(loader: ConfigLoader, name: str, words: Sequence[str]) -> str | None:
    """What to say where an override names a key that is not there; None where the trouble is
    another.
    """
    settings = [
        override
        for override in parsed(loader, words)
        if not loader.get_group_options(override.key_or_group)
    ]
    chosen = [word for word in words if word not in {override.input_line for override in settings}]
    try:
        config = loader.load_configuration(name, chosen, run_mode=RunMode.RUN)
    except HydraException:
        return None
    run = OmegaConf.to_container(run_of(config))
    assert isinstance(run, dict)
    valid_keys = {key for key, _ in leaves(run)} | set(run)
    valid_keys |= {
        f"hydra.{part}.{key}" for part in ("launcher", "sweeper") for key in config.hydra[part]
    }
    missing = object()
    for override in settings:
        if (
            not override.is_add()
            and OmegaConf.select(config, override.key_or_group, default=missing) is missing
        ):
            return (
                f"{override.input_line}: no such key;"
                f" {nearest_key(override.key_or_group, valid_keys)}"
            )
    return None


def composed(*words: str, here: bool = True) -> RunConfig:
    """The checked config that these words make on the command line, for scripts and notebooks.

    Parameters
    ----------
    words
        as on the command line.
    here
        as for `check`.

    Raises
    ------
    ConfigError
        as the command line would say it.
    """
    loader = loader_of()
    refuse_several_choices(loader, parsed(loader, words))
    return check(run_of(compose(loader, "config", words)), here)
