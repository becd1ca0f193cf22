"""`python -m kvbench`: overrides are checked here, then Hydra composes each job and hands it to `kvbench.run`.

A typo shall answer at once, in one line and without torch, so every job of a sweep is composed and checked before Hydra
starts the first. Exit codes: 0 done, 1 a failure (with its traceback), 2 bad input, 130 stopped with Ctrl-C, 143 with
SIGTERM. A run that was stopped goes on with the same command.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import signal
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import kvbench
from kvbench import smoke
from kvbench.config import (
    ConfigError,
    bind_methods,
    choices,
    conf_dir,
    documented_keys,
    groups,
    nearest,
    nearest_key,
    sweep_words,
)
from kvbench.results import ResultsError

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

# Composing takes 50 ms, a value put into a composed config 5 ms. What lies beyond is checked when its turn comes.
MOST_COMPOSED = 12
MOST_CHECKED = 100

USAGE = """\
kvbench: KV-cache methods compared on the same model, prompt, attention kernel and budget.

usage: python -m kvbench [-m] [key=value ...]

  python -m kvbench                                          one run with the defaults
  python -m kvbench method=snapkv budget=512 task.limit=5    another method, a bigger budget, five samples
  python -m kvbench -m method=full,quest budget=64,128       a sweep: each method with each budget
  python -m kvbench model.path=FOLDER                        your own model: a folder, or a hub id such as org/name
  python -m kvbench --cfg job method=quest                   print the config of a run, options of the method included
  python -m kvbench +experiment=reference                    a sweep that stands in a file
  python -m kvbench --config-dir FOLDER method=mine          with your own FOLDER/method/mine.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Failures other than bad input and Ctrl-C are raised."""
    # argparse wants the key=value words in one piece; `method=full -m budget=64` is as clear, and becomes that.
    words = sorted(sys.argv[1:] if arguments is None else arguments, key=_is_override)
    if {"-h", "--help"} & set(words):
        print(help_text())
        return 0
    if "--version" in words:
        print(f"kvbench {kvbench.__version__}")
        return 0
    try:
        with _sigterm_as_ctrl_c():
            bind_methods()
            check_command(words)
            return _hand_to_hydra(words)
    except (ConfigError, ResultsError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("kvbench: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the end of a SLURM job's time, or `kill`. All that tidies up after Ctrl-C does so here."""


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def help_text() -> str:
    """Usage, then every choice of every group and every common key, each with one line."""
    parts = [USAGE]
    for group in ["method", "task", "model", *(name for name in groups() if name not in ("method", "task", "model"))]:
        rows = [(f"{group}={name}", about) for name, about in choices(group).items()]
        parts.append(_table(f"{group}s", rows))
    rows = [(f"+experiment={name}", about) for name, about in choices("experiment").items()]
    parts.append(_table("experiments", rows))
    parts.append(_table("keys", [(f"{key}={default}", about) for key, default, about in documented_keys()]))
    parts.append(
        "Any task takes task.limit=N, its first N samples. --cfg job prints the options of a method or a task."
    )
    return "\n".join(parts).rstrip()


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join([f"{title}:", *(f"  {left:<{width}}  {right}" for left, right in rows), ""])


def check_command(words: Sequence[str]) -> None:
    """Check what the command line asks for, each job of a sweep, before anything starts.

    Raises:
        ConfigError: an unknown flag, group choice or key, or a config that `kvbench.checks.check` refuses.
    """
    from hydra import version

    from kvbench.checks import check

    version.setbase("1.3")
    flags = _flags(words)
    if flags.hydra_help or flags.shell_completion or flags.info or flags.config_path:
        return
    loader, name = _loader(flags), flags.config_name or "config"
    for job, here in composed_jobs(loader, name, flags.overrides, flags.multirun):
        if flags.cfg is None:
            check(job, here)
    if flags.cfg == "job":
        _tell_sweep(loader, _compose(loader, name, flags.overrides), flags.overrides)


def _tell_sweep(loader: ConfigLoaderImpl, config: DictConfig, words: Sequence[str]) -> None:
    """Above the config that `--cfg job` prints, the sweep that an experiment makes of it, as comments."""
    from hydra.types import RunMode

    if config.hydra.mode != RunMode.MULTIRUN:
        return
    print("# A sweep of this config, each line with all its combinations:")
    for arm in _arms(loader, config, words):
        print("#  ", *(override.input_line for override in arm if "experiment" not in override.key_or_group))


def _flags(words: Sequence[str]) -> Namespace:
    from hydra._internal.utils import get_args_parser

    flags, unknown = get_args_parser().parse_known_args(words)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; settings are written key=value, as in budget=64 (see --help)")
    if flags.cfg and flags.multirun:
        raise ConfigError("--cfg: shows one run; leave out -m and choose one value of each key")
    return flags


def _loader(flags: Namespace) -> ConfigLoaderImpl:
    """Hydra's loader over kvbench's conf and the user's `--config-dir`, as hydra.main sets it up."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    path = create_config_search_path(str(conf_dir()))
    if flags.config_dir is not None:
        folder = Path(flags.config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={flags.config_dir}: no such folder")
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

    overrides = _parse(loader, words)
    first = _compose(loader, name, [_options(override)[0] for override in overrides])
    if not multirun and first.hydra.mode != RunMode.MULTIRUN:
        _refuse_sweep(overrides)
        yield smoke.applied(_without_hydra(first)), True
        return
    here = str(first.hydra.launcher["_target_"]) in HERE
    product = itertools.product
    combinations: list[tuple[Sequence[str], list[Sequence[str]]]] = []
    for arm in _arms(loader, first, words):
        if not first.hydra.searchpath:
            _check_choices(loader, arm)
        plain = [_options(override) for override in arm if _is_plain_sweep(loader, override)]
        others = [_options(override) for override in arm if not _is_plain_sweep(loader, override)]
        combinations += [(combination, list(product(*plain))) for combination in product(*others)]
    rng = random.Random(0)
    combinations = _sample(combinations, MOST_COMPOSED, rng)
    for combination, rows in combinations:
        base = _compose(loader, name, [*combination, *rows[0]])
        for row in _sample(rows, MOST_CHECKED // len(combinations), rng):
            yield smoke.applied(_with_values(_without_hydra(base), _parse(loader, row))), here


def _arms(loader: ConfigLoaderImpl, config: DictConfig, words: Sequence[str]) -> list[list[Override]]:
    """What each arm of a sweep takes: an experiment may bring its own, and the command line has the last word."""
    sweeper, arms = config.hydra.sweeper, []
    for own in sweep_words(sweeper.get("params"), sweeper.get("arms")):
        by_key = {override.get_key_element(): override for override in _parse(loader, [*own, *words])}
        arms.append(list(by_key.values()))
    return arms


def _sample(items: list[T], most: int, rng: random.Random) -> list[T]:
    # Even steps could meet the same value of a short axis each time.
    return items if len(items) <= most else rng.sample(items, most)


def _refuse_sweep(overrides: Iterable[Override]) -> None:
    for override in overrides:
        if override.is_sweep_override():
            key, _, value = str(override.input_line).partition("=")
            raise ConfigError(
                f"{key}={value}: several values are a sweep and need -m; a list is written {key}=[{value}]"
            )


def _check_choices(loader: ConfigLoaderImpl, overrides: Iterable[Override]) -> None:
    """Every choice of a swept group exists, also those that no composed job holds."""
    for override in overrides:
        valid = loader.get_group_options(override.key_or_group)
        for word in _options(override) if valid and override.is_sweep_override() else []:
            choice = word.partition("=")[2]
            if choice not in valid:
                raise _no_such_choice(override.key_or_group, choice, valid)


def _no_such_choice(group: str, choice: str, valid: Iterable[str]) -> ConfigError:
    return ConfigError(f"{group}={choice}: no such {group}; {nearest(choice, valid)}")


def _parse(loader: ConfigLoaderImpl, words: Sequence[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=loader)
    overrides = []
    for word in words:
        try:
            overrides += parser.parse_overrides([word])
        except HydraException as error:
            right = "expected key=value, and quotes around special characters, \"key='value'\""
            raise ConfigError(f"{word}: {_reason(error)}; {right}") from error
    return overrides


def _options(override: Override) -> list[str]:
    """An override as one word for each value that it sweeps over."""
    from hydra.errors import HydraException

    key = override.get_key_element()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ConfigError(f"{override.input_line}: {_reason(error)}") from error


def _is_plain_sweep(loader: ConfigLoaderImpl, override: Override) -> bool:
    """Whether a sweep changes a value only: no group, nothing added or deleted."""
    key = override.get_key_element()
    return override.is_sweep_override() and key[0] not in "+~" and not loader.get_group_options(key)


def _without_hydra(config: DictConfig) -> DictConfig:
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _with_values(base: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    from omegaconf import OmegaConf

    job = copy.deepcopy(base)
    for override in overrides:
        OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
    return job


def _compose(loader: ConfigLoaderImpl, name: str, words: Sequence[str]) -> DictConfig:
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
            raise ConfigError(f"--config-name={name}: {_reason(error)}") from error
        raise _no_such_choice(group, choice, error.options or []) from error
    except (HydraException, OmegaConfBaseException) as error:
        unknown = _unknown_key(loader, name, words)
        raise ConfigError(unknown or _reason(error)) from error


def _unknown_key(loader: ConfigLoaderImpl, name: str, words: Sequence[str]) -> str | None:
    """What to say where an override names a key that is not there; None where the trouble is another."""
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from kvbench.checks import leaves

    overrides = _parse(loader, words)
    chosen = [str(override.input_line) for override in overrides if loader.get_group_options(override.key_or_group)]
    try:
        config = loader.load_configuration(name, chosen, run_mode=RunMode.RUN, validate_sweep_overrides=False)
    except HydraException:
        return None
    run = OmegaConf.to_container(_without_hydra(config))
    assert isinstance(run, dict)
    known = {key for key, _ in leaves(run)} | set(run)
    for override in overrides:
        missing = object()
        if not override.is_add() and OmegaConf.select(config, override.key_or_group, default=missing) is missing:
            return f"{override.input_line}: no such key; {nearest_key(override.key_or_group, known)}"
    return None


def _reason(error: BaseException) -> str:
    """What Hydra or OmegaConf says, cut to the line that tells."""
    told = str(error) or str(error.__cause__ or type(error).__name__)
    lines = [line for line in told.splitlines() if line and not line.startswith(("See ", "Error parsing "))]
    return lines[0].strip() if lines else type(error).__name__


def _hand_to_hydra(words: Sequence[str]) -> int:
    import hydra

    from kvbench import launcher

    launcher.register()

    # Hydra would print failures its own way and exit; this makes it let them through to us.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = words
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(run_job)()
    except launcher.SweepError as error:
        for line in str(error).splitlines():
            print(f"kvbench: {line}", file=sys.stderr)
        return 1
    return 0


def run_job(cfg: DictConfig) -> Any:
    """One job, in this process or in one that a launcher started.

    Raises:
        ConfigError: in a sweep; Hydra finishes the other jobs first. A single run ends with exit code 2 at once.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from kvbench.checks import check

    try:
        cfg = smoke.applied(cfg)
        check(cfg)
        from kvbench.run import run

        return run(cfg)
    except (ConfigError, ResultsError) as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        # Past Hydra, which would announce "Error executing job" in lines of its own.
        print(f"kvbench: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    sys.exit(main())
