"""`python -m kvbench`: overrides are checked here, then Hydra composes each job and hands it to `kvbench.runs.run`.

A typo shall answer at once, in one line and without torch, so every job of a sweep is composed and checked before Hydra
starts the first. Exit codes: 0 done, 1 a failure (with its traceback, or a line for each arm that failed), 2 bad input,
130 stopped with Ctrl-C, 143 with SIGTERM. A run that was stopped goes on with the same command.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import kvbench
from kvbench.cli import smoke
from kvbench.cli.commands import COMMANDS, other_command
from kvbench.cli.compose import compose_one, composed_jobs, loader_of, sweep_arms
from kvbench.cli.stopping import Terminated, stopped_by
from kvbench.cli.threads import wait_briefly
from kvbench.config import (
    ConfigError,
    bind_methods,
    choices,
    conf_dir,
    documented_keys,
    groups,
)
from kvbench.runs.folder import ResultsError
from kvbench.runs.identity import arm_name
from kvbench.runs.terminal import fit_streams

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import DictConfig

TITLES = {"kv": "keys and values"}  # of groups whose plural is no word
USAGE = """\
kvbench: KV-cache methods compared on the same model, prompt, attention kernel and budget.

usage: kvbench [run] [-m] [key=value ...]          `python -m kvbench` is the same
       kvbench COMMAND ...

  python -m kvbench                                          one run with the defaults
  python -m kvbench method=snapkv budget=512 task.limit=5    another method, a bigger budget, five samples
  python -m kvbench -m method=full,quest budget=64,128       a sweep: each method with each budget
  python -m kvbench model.path=FOLDER                        your own model: a folder, or a hub id such as org/name
  python -m kvbench --cfg job method=quest                   print the config of a run, options of the method included
  python -m kvbench +experiment=reference_tiny               a sweep from a file of conf/experiment
  python -m kvbench --config-dir FOLDER method=mine          with your own FOLDER/method/mine.yaml

flags:
  -m, --multirun          a sweep: keys may have several values, budget=64,128
  --config-dir FOLDER     choices of your own beside kvbench's, such as FOLDER/method/mine.yaml
  --cfg job               print the config of a run and stop
  -h, --help; --version   print this; the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Failures other than bad input and Ctrl-C are raised."""
    fit_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if (code := other_command(given)) is not None:
            return code
    except ConfigError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    # argparse wants the key=value words in one piece; `method=full -m budget=64` is as clear, and becomes that.
    words = _as_sweep(sorted(given[1:] if given[:1] == ["run"] else given, key=_is_override))
    if {"-h", "--help"} & set(words):
        print(help_text())
        return 0
    if "--version" in words:
        print(f"kvbench {kvbench.__version__}")
        return 0
    try:
        with stopped_by(signal.SIGTERM):
            wait_briefly()
            bind_methods()
            check_command(words)
            return _hand_to_hydra(words)
    except (ConfigError, ResultsError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("kvbench: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _as_sweep(words: list[str]) -> list[str]:
    """With -m where a launcher is named, as launchers launch sweeps: one run is a sweep of one arm."""
    named = any(word.startswith("hydra/launcher=") for word in words)
    said = any(word in ("-m", "--multirun") or word.startswith("--cfg") or word == "-c" for word in words)
    return ["-m", *words] if named and not said else words


def help_text() -> str:
    """Usage, then every choice of every group and every common key, each with one line."""
    parts = [USAGE, _table("commands", [(name, about) for name, (_, about) in COMMANDS.items()])]
    for group in ["method", "task", "model", *(name for name in groups() if name not in ("method", "task", "model"))]:
        rows = [(f"{group}={name}", about) for name, about in choices(group).items()]
        parts.append(_table(TITLES.get(group, f"{group}s"), rows))
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
        ConfigError: an unknown flag, group choice or key, or a config that `kvbench.cli.checks.check` refuses.
    """
    from hydra import version

    from kvbench.cli.checks import check

    version.setbase("1.3")
    flags = _flags(words)
    if flags.hydra_help or flags.shell_completion or flags.info or flags.config_path:
        return
    loader, name = loader_of(flags), flags.config_name or "config"
    for job, here in composed_jobs(loader, name, flags.overrides, flags.multirun):
        if flags.cfg is None:
            check(job, here)
    if flags.cfg == "job":
        _tell_sweep(loader, compose_one(loader, name, flags.overrides), flags.overrides)


def _tell_sweep(loader: ConfigLoaderImpl, config: DictConfig, words: Sequence[str]) -> None:
    """Above the config that `--cfg job` prints, the sweep that an experiment makes of it, as comments."""
    from hydra.types import RunMode

    if config.hydra.mode != RunMode.MULTIRUN:
        return
    print("# A sweep of this config, each line with all its combinations:")
    for arm in sweep_arms(loader, config, words):
        print("#  ", *(override.input_line for override in arm if "experiment" not in override.key_or_group))


def _flags(words: Sequence[str]) -> Namespace:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]  # argparse would print its usage and exit
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; settings are written key=value, as in budget=64 (see --help)")
    if flags.cfg and flags.multirun:
        raise ConfigError("--cfg: shows one run; leave out -m and choose one value of each key")
    return flags


def _hand_to_hydra(words: Sequence[str]) -> int:
    import hydra

    from kvbench.cli import sweep
    from kvbench.runs.table import SweepError

    sweep.register()

    # Hydra would print failures its own way and exit; this makes it let them through to us.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = words
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(run_job)()
    except SweepError as error:
        for line in str(error).splitlines():
            print(f"kvbench: {line}", file=sys.stderr)
        return 1
    return 0


def run_job(cfg: DictConfig) -> Any:
    """One job, in this process or in one that a launcher started.

    Raises:
        ConfigError: in a sweep; Hydra finishes the other jobs first.
        SystemExit: of a single run: 2 for bad input, 1 where every sample failed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from kvbench.cli.checks import check

    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        cfg = smoke.applied(cfg)
        check(cfg)
        # torch takes seconds to import, and a cold disk many.
        print(f"{cfg.task.name}, {arm_name(cfg)} on {cfg.model.name}: loading", flush=True)
        from kvbench.runs.run import run
        from kvbench.runs.table import all_failed

        summary = run(cfg)
    except (ConfigError, ResultsError) as error:
        if sweep:
            raise
        # Past Hydra, which would announce "Error executing job" in lines of its own.
        print(f"kvbench: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if not sweep and summary and (failed := all_failed(summary)):
        print(f"kvbench: {failed}; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)
    return summary


if __name__ == "__main__":
    sys.exit(main())
