"""Which tasks may be built from a stored run.yaml, which anybody may have written. No torch.

Its `_target_` names code that would be imported and called. kvbench's own tasks are known by the
files of `conf/task`, those of installed packages by their entry points; a user's own by the file of
that kind in a folder that the user names on the command line, never in the run.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.config import (
    ConfigError,
    TargetConfig,
    choices,
    choose_from,
    installed,
    plugins,
    read_choice,
)
from kvbench.tasks import Task, task_of


def add_config_dir(parser: ArgumentParser) -> None:
    """The option of a command that reads stored runs."""
    parser.add_argument(
        "--config-dir",
        type=Path,
        metavar="FOLDER",
        help="with your own tasks, FOLDER/task/NAME.yaml",
    )


def stored_task_of(
    folder: Path, config: Mapping[str, Any], recorded_dir: str, config_dir: Path | None
) -> Task:
    """The task of a stored run.

    Parameters
    ----------
    folder
        the run's, for messages.
    config
        the `task` group of its run.yaml.
    recorded_dir
        the folder of choices that the run was made with, for messages; "": kvbench's own.
    config_dir
        a user's own folder of choices, with the files of more tasks.

    Raises
    ------
    ConfigError
        it is no task that is known, which is found out before anything of it is imported; or it
        cannot be built.
    """
    refuse_unknown(folder, config, recorded_dir, config_dir)
    return task_of(TargetConfig.of(config))


def refuse_unknown(
    folder: Path, config: Mapping[str, Any], recorded_dir: str, config_dir: Path | None
) -> None:
    """Refuse a stored task whose target no file of kvbench's, or of the user's folder, names.

    Raises
    ------
    ConfigError
        names the target.
    """
    target = config["_target_"]
    targets = user_targets(config_dir)
    if target in targets:
        assert config_dir is not None
        choose_from(config_dir)
    elif target not in _known_targets():
        where = "" if config_dir is None else f", and in {config_dir}/task no file names it"
        which = (
            f" {recorded_dir}, as when it was run"
            if recorded_dir
            else " with the folder of its task/NAME.yaml"
        )
        raise ConfigError(
            f"{folder}: config.task._target_={target}: no task of kvbench's{where}; a task of your"
            f" own needs --config-dir{which}"
        )


def _known_targets() -> set[str]:
    """The targets of kvbench's own tasks, and of those of installed packages."""
    broken = {name for name, plugin in plugins("task").items() if plugin.file is None}
    names = {*choices("task"), *plugins("task").keys() - broken}
    return {str((installed("task", name) or {}).get("_target_")) for name in names}


def user_targets(config_dir: Path | None) -> set[str]:
    """The targets that the files of a user's own tasks name; none without a folder.

    Raises
    ------
    ConfigError
        there is no such folder.
    """
    if config_dir is None:
        return set()
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir={config_dir}: no such folder")
    return {
        target
        for file in config_dir.glob("task/*.yaml")
        if (target := read_choice(file).get("_target_"))
    }
