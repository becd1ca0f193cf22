"""The command line: flags and words of a run or a sweep, and what it exits with.

A typo shall answer at once, in one line and without torch, so every arm of a sweep is composed and
checked before the first starts. Exit codes: 0 done, 1 a failure (with its traceback, or a line for
each arm that failed), 2 bad input, 130 stopped with Ctrl-C, 141 where nobody reads on, 143 with
SIGTERM. A run that was stopped goes on with the same command.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import kvbench
from kvbench.cli.commands import COMMANDS, other_command
from kvbench.cli.output import printing
from kvbench.cli.stopping import Terminated, stopped_by
from kvbench.cli.threads import wait_briefly
from kvbench.cli.words import refuse_flag
from kvbench.config import ConfigError, bind_methods, choices, documented_keys, groups, plugins
from kvbench.runs.folder import ResultsError

if TYPE_CHECKING:
    from omegaconf import DictConfig

# what a system says of a path that cannot even be looked up
NO_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)
TITLES = {"kv": "keys and values"}  # of groups whose plural is no word
USAGE = """\
kvbench: KV-cache methods compared on the same model, prompt, attention kernel and budget.

usage: kvbench [run] [-m] [key=value ...]          `python -m kvbench` is the same
       kvbench COMMAND ...

  python -m kvbench                                        one run with the defaults
  python -m kvbench method=snapkv budget=512 task.limit=5  another method and budget, five samples
  python -m kvbench -m method=full,quest budget=64,128     a sweep: each method with each budget
  python -m kvbench model.path=FOLDER                      your own model, or a hub id: org/name
  python -m kvbench --cfg job method=quest                 print a config, with the method's options
  python -m kvbench +experiment=reference_tiny             a sweep from a file of conf/experiment
  python -m kvbench --config-dir FOLDER method=mine        with your own FOLDER/method/mine.yaml

flags:
  -m, --multirun          a sweep: keys may have several values, budget=64,128
  --config-dir FOLDER     choices of your own beside kvbench's, such as FOLDER/method/mine.yaml
  --cfg job               print the config of a run and stop
  -h, --help; --version   print this; the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Failures other than bad input and Ctrl-C are raised.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    return printing(lambda: _main(command_line))


def _main(arguments: Sequence[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        print(
            "kvbench: the working directory was removed; go to one that is there, as with cd ~",
            file=sys.stderr,
        )
        return 2
    try:
        if (code := other_command(arguments)) is not None:
            return code
    except ConfigError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    words = arguments[1:] if arguments[:1] == ["run"] else arguments
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
            return _run(flags_in(words))
    except (ConfigError, ResultsError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None or error.errno not in NO_PATH:
            raise
        print(
            f"kvbench: {error.filename}: {error.strerror}; expected a path that can be read",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt as stop:
        print("kvbench: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def help_text() -> str:
    """Usage, then every choice of every group and every common key, each with one line."""
    parts = [
        USAGE,
        _table("commands", [(name, description) for name, (_, description) in COMMANDS.items()]),
    ]
    for group in [
        "method",
        "task",
        "model",
        *(name for name in groups() if name not in ("method", "task", "model")),
    ]:
        rows = [(f"{group}={name}", description) for name, description in choices(group).items()]
        parts.append(_table(TITLES.get(group, f"{group}s"), rows))
    parts += _of_packages()
    rows = [
        (f"+experiment={name}", description) for name, description in choices("experiment").items()
    ]
    parts.append(_table("experiments", rows))
    parts.append(
        _table(
            "keys",
            [(f"{key}={default}", description) for key, default, description in documented_keys()],
        )
    )
    parts.append(
        "Any task takes task.limit=N, its first N samples. --cfg job prints the options of a method"
        " or a task."
    )
    return "\n".join(parts).rstrip()


def _of_packages() -> Iterator[str]:
    """What installed packages add, each with whose it is; what of it cannot be chosen says why."""
    for group in ("method", "task"):
        ours = choices(group)
        rows = []
        for name, plugin in sorted(plugins(group).items()):
            whose = plugin.package
            if name in ours:
                whose += f": not taken, {group}={name} is kvbench's own"
            elif plugin.file is None:
                whose += f": cannot be chosen, it has no {group}/{name}.yaml"
            rows.append((f"{group}={name}", whose))
        if rows:
            yield _table(f"{group}s of installed packages, none of them kvbench's", rows)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max((len(term) for term, _ in rows), default=0)
    return "\n".join([f"{title}:", *(f"  {term:<{width}}  {right}" for term, right in rows), ""])


class _RunParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse a flag in one line, where argparse would print its usage and exit."""
        raise ConfigError(f"{message} (see --help)")


def flags_in(words: Sequence[str]) -> Namespace:
    """The flags of a run or a sweep, and as `words` its key=value words.

    Raises
    ------
    ConfigError
        an unknown flag.
    """
    refuse_flag(words)
    parser = _RunParser(add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    flags, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: no such flag; settings are written key=value, as in budget=64 (see"
            " --help)"
        )
    if flags.cfg and flags.multirun:
        raise ConfigError("--cfg: shows one run; leave out -m and choose one value of each key")
    # Launchers launch sweeps: one run is a sweep of one arm.
    flags.multirun = flags.multirun or any(
        word.startswith("hydra/launcher=") for word in flags.words
    )
    return flags


def _run(flags: Namespace) -> int:
    from kvbench.cli.compose import compose_request, loader_of, run_of

    loader = loader_of(flags.config_dir)
    request = compose_request(
        loader, flags.config_name, flags.words, flags.multirun and not flags.cfg
    )
    if flags.cfg:
        print(request.as_yaml(flags.cfg, flags.package, flags.resolve))
        return 0
    if request.arms is None:
        return _run_single(run_of(request.config))
    from kvbench.cli.sweep import run_sweep
    from kvbench.runs.table import SweepError

    try:
        run_sweep(request)
    except SweepError as error:
        for line in str(error).splitlines():
            print(f"kvbench: {line}", file=sys.stderr)
        return 1
    return 0


def _run_single(cfg: DictConfig) -> int:
    from kvbench.cli.checks import check
    from kvbench.runs.identity import arm_name

    config = check(cfg)
    # torch takes seconds to import, and a cold disk many.
    print(f"{config.task.name}, {arm_name(config)} on {config.model.title}: loading", flush=True)
    from kvbench.runs.sweep import run
    from kvbench.runs.table import all_failed

    summary = run(config)
    if summary and (failed := all_failed(summary)):
        print(f"kvbench: {failed}; the same command tries them again", file=sys.stderr)
        return 1
    return 0
