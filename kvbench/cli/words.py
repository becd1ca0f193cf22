"""The words of a command line: what Hydra makes of them, and what to say of those that it would
take otherwise than they were meant, or not at all.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvbench.config import (
    LISTING,
    ConfigError,
    groups,
    nearest,
    root_keys,
    searched,
    show,
    user_choices,
)

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

# a group whose files are put on top of the others, several of them if need be
ON_TOP = "experiment"

# Of Hydra's own keys those that mean something here.
HYDRAS = (
    *("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper."),
    *("hydra.sweep.dir", "hydra.mode", "hydra.searchpath"),
)

# keys whose values are names
FOLDERS = ("results_dir", "model.path", "task.data_dir", "hydra.sweep.dir")


def parsed(loader: ConfigLoader, words: Sequence[str]) -> list[Override]:
    """The words as Hydra reads them.

    Raises
    ------
    ConfigError
        a word that it cannot read, and what would be right.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=loader)
    overrides = []
    for word in words:
        if word.lstrip("+~").startswith("="):
            raise ConfigError(f"{word}: no key; expected key=value")
        try:
            overrides += parser.parse_overrides([word])
        except HydraException as error:
            raise ConfigError(f"{word}: {_unreadable(loader, word)}") from error
    return overrides


def _unreadable(loader: ConfigLoader, word: str) -> str:
    """What is wrong with a word that is no key=value."""
    if "=" not in word:
        return _no_key(loader, word)
    key, value = word.split("=", 1)
    if value.startswith("="):
        return f"two =; expected {key}={value.lstrip('=')}"
    if "=" in value:
        return (
            "two =; a word is one key=value, and a value with = in it stands in quotes,"
            f" \"{key}='{value}'\""
        )
    if value.startswith(",") or value.endswith(","):
        return "a value is missing beside a comma; several are written a,b without spaces"
    return (
        "cannot be read; expected key=value, and quotes around special characters, \"key='value'\""
    )


def _no_key(loader: ConfigLoader, word: str) -> str:
    """What is wrong with a word without =: a choice without its group, a key without its value, or
    what it is near.
    """
    head = word.split(":")[0]
    rest = word.removeprefix(f"{head}:")
    if rest and rest != word and is_key(head):
        return f"expected {head}={rest}"
    if is_key(word):
        example = (
            f"{word}={show(root_keys()[word])}"
            if not isinstance(root_keys().get(word, {}), dict)
            else ""
        )
        return (
            f"no value; expected key=value{example and f', such as {example}'}, without spaces"
            " around ="
        )
    chosen = word.split(",")
    homes = {group: loader.get_group_options(group) for group in [*groups(), ON_TOP]}
    named = [
        f"{'+' * (group == ON_TOP)}{group}={word}"
        for group, names in homes.items()
        if set(chosen) <= set(names)
    ]
    if named:
        return f"no key; expected {' or '.join(named)}{' with -m' * (len(chosen) > 1)}"
    near = {name: group for group, names in homes.items() for name in names}
    close = difflib.get_close_matches(word, near, n=1, cutoff=0.75)
    hint = (
        f"; did you mean {near[close[0]]}={close[0]}?"
        if close
        else ", without spaces around = and ,"
    )
    return f"no key; expected key=value{hint}"


def is_key(word: str) -> bool:
    """Whether a word is a key of a run, or begins as one."""
    return word.partition(".")[0] in {*groups(), *root_keys()}


def refuse_twice(words: Iterable[str], hint: str = "") -> None:
    """Refuse a key that two words give different values: the second would count in silence.

    Parameters
    ----------
    words
        key=value.
    hint
        what else there is to say, {key} and {values}, both with a comma between them, filled in.

    Raises
    ------
    ConfigError
        names both words.
    """
    first_values: dict[str, str] = {}
    for word in words:
        if "=" not in word or word.startswith("~"):
            continue
        key, value = word.lstrip("+").split("=", 1)
        first = first_values.setdefault(key, value)
        if first != value:
            more = hint.format(key=key, values=f"{first},{value}")
            raise ConfigError(
                f"{key}={first} {key}={value}: one key with two values; expected one of them{more}"
            )


def refuse_numbers(overrides: Iterable[Override]) -> None:
    """Refuse a folder's name that is read as a number or a truth value, and so as another name:
    2024_11_29.

    Raises
    ------
    ConfigError
        says what was typed, and how it is quoted.
    """
    for override in overrides:
        key = override.key_or_group
        if key not in FOLDERS or override.is_sweep_override() or override.is_delete():
            continue
        typed = str(override.input_line).split("=", 1)[1]
        value = override.value()
        if type(value) in (int, float, bool) and (show(value) != typed or key == "results_dir"):
            raise ConfigError(
                f"{key}={typed}: read as {show(value)}; a name that looks like a number stands in"
                f" quotes, \"{key}='{typed}'\""
            )


def refuse_several_choices(loader: ConfigLoader, overrides: Iterable[Override]) -> None:
    """Refuse a list of a group's choices, which Hydra would lay one over the other:
    method=[full,snapkv].

    Raises
    ------
    ConfigError
        says how several are swept.
    """
    for override in overrides:
        # a loader answers slowly
        group, listed = override.key_or_group, "[" in str(override.input_line)
        if (
            not listed
            or override.is_delete()
            or group == ON_TOP
            or not loader.get_group_options(group)
        ):
            continue
        for word in options(override):
            value = word.partition("=")[2]
            if value.startswith("["):
                several = value.strip("[] ").replace(" ", "")
                raise ConfigError(
                    f"{group}={value}: expected one {group}; several are a sweep, {group}={several}"
                    " with -m"
                )


def refuse_hydra_keys(overrides: Iterable[Override]) -> None:
    """Refuse keys of Hydra's own that change nothing here, and several values of one, such as two
    launchers.

    Raises
    ------
    ConfigError
        names the key.
    """
    for override in overrides:
        if override.is_hydra_override():
            if not override.key_or_group.startswith(HYDRAS):
                valid = ", ".join(key.rstrip(".") for key in HYDRAS)
                raise ConfigError(
                    f"{override.input_line}: this key of Hydra's changes nothing here; expected"
                    f" {valid}"
                )
            if override.is_sweep_override() or (
                "/" in override.key_or_group and isinstance(override.value(), list)
            ):
                raise ConfigError(
                    f"{override.input_line}: expected one value, as a sweep has one launcher"
                )


def refuse_sweep(loader: ConfigLoader, overrides: Iterable[Override]) -> None:
    """Refuse several values of a key without -m.

    Raises
    ------
    ConfigError
        names them.
    """
    from hydra.core.override_parser.types import ChoiceSweep

    for override in overrides:
        if override.is_sweep_override():
            key, value = str(override.input_line).split("=", 1)
            swept = override.value()
            plain = isinstance(swept, ChoiceSweep) and swept.simple_form
            number = type(root_keys().get(key)) in (int, float, bool)
            listed = plain and not number and not loader.get_group_options(override.key_or_group)
            more = f"; a list is written {key}=[{value}]" if listed else ""
            raise ConfigError(f"{key}={value}: several values are a sweep and need -m{more}")


def refuse_unknown_choices(loader: ConfigLoader, overrides: Iterable[Override]) -> None:
    """Refuse a choice of a swept group that does not exist, before the many runs of a sweep are
    composed.

    Raises
    ------
    ConfigError
        names it and the nearest that do.
    """
    for override in overrides:
        if not override.is_sweep_override():
            continue
        valid = loader.get_group_options(override.key_or_group)
        for word in options(override) if valid else []:
            choice = word.partition("=")[2]
            if choice not in valid:
                raise no_such_choice(override.key_or_group, choice, valid)


def no_such_choice(group: str, choice: str, valid: Iterable[str]) -> ConfigError:
    """The error of a choice that does not exist."""
    if group == "model" and "/" in choice:
        return ConfigError(
            f"model={choice}: no name of conf/model; a folder or a hub id is model.path={choice}"
        )
    near = nearest(choice, valid, LISTING)
    # a word that is near no name may be of a file that was looked for elsewhere
    others = "" if near.startswith("did you mean") and user_choices() is None else searched(group)
    if group == "model":
        others = "; model.path=FOLDER or a hub id takes any other"
    return ConfigError(f"{group}={choice}: no such {group}; {near}{others}")


def refuse_flag(words: Sequence[str]) -> None:
    """Refuse a key that is written as a flag, --budget 64.

    Raises
    ------
    ConfigError
        says how it is written.
    """
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="-"):
        key = word.lstrip("-").split("=")[0]
        value = word.lstrip("-").removeprefix(key).removeprefix("=")
        if word.startswith("-") and is_key(key):
            value = value or (
                following if not following.startswith("-") and "=" not in following else "VALUE"
            )
            raise ConfigError(
                f"{word}: no such flag; settings are written key=value, as in {key}={value} (see"
                " --help)"
            )


def options(override: Override) -> list[str]:
    """An override as one word for each value that it sweeps over.

    Raises
    ------
    ConfigError
        there is none.
    """
    from hydra.errors import HydraException

    key = override.get_key_element()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    try:
        values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ConfigError(f"{override.input_line}: {reason(error)}") from error
    if not values:
        raise ConfigError(f"{override.input_line}: no value in it")
    return values


def reason(error: BaseException) -> str:
    """What Hydra or OmegaConf says, cut to the line that matters."""
    message = str(error) or str(error.__cause__ or type(error).__name__)
    lines = [
        line
        for line in message.splitlines()
        if line and not line.startswith(("See ", "Error parsing "))
    ]
    return lines[0].strip() if lines else type(error).__name__
