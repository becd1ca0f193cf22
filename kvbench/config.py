"""The configuration folder: what can be chosen in it, and how a choice becomes an object.

Reads `conf/` with OmegaConf alone. Hydra composes a run on the command line
(`kvbench.cli.compose`); a user's own code, through `kvbench.KVCache(method="quest")`, never meets
it. Imports no torch.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from omegaconf import DictConfig, OmegaConf
from platformdirs import user_cache_dir

PACKAGE = Path(__file__).resolve().parent
ASSETS = PACKAGE / "assets"  # what kvbench ships besides code: the small model

# What a method's or task's YAML says of itself and no run can change.
FACTS = frozenset(
    {
        "about",
        "valid",
        "version",
        "minimum",
        "published_dense_layers",
        "new_tokens",
        "own_prefill",
        "one_by_one",
    }
)

# All of its keys that the harness reads; the others are options of the constructor.
HARNESS_KEYS = FACTS | {"_target_", "name", "preset", "limit"}

# Options of a method that a class below its own has as attributes; constructors do not take them.
INHERITED = frozenset({"protect"})


class ConfigError(ValueError):
    """Bad input. The message is one line: the key, its value, and what would be right."""


class Whole(NamedTuple):
    """Of a field's type: whole numbers from the lowest on, up to the most."""

    lowest: int
    most: int | None = None


def check_fields(config: Any, prefix: str = "") -> None:
    """Refuse a dataclass with a value that its field's type leaves out.

    Parameters
    ----------
    config
        its fields that are `bool`, `Literal` or `Annotated` with `Whole` are checked.
    prefix
        stands before a field's name in messages, "sweep.".

    Raises
    ------
    ConfigError
        names the key, the value and what would be right.
    """
    kinds = get_type_hints(type(config), include_extras=True)
    for name in (key.name for key in fields(config) if key.init):
        kind, value = kinds[name], getattr(config, name)
        shown = f"{prefix}{name}={show(value)}"
        if kind is bool and type(value) is not bool:
            raise ConfigError(f"{shown}: expected true | false")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{shown}: expected {' | '.join(map(show, get_args(kind)))}")
        if get_origin(kind) is Annotated:
            number, (lowest, most) = get_args(kind)
            null = type(None) in get_args(number)
            if not (value is None and null) and (type(value) is not int or value < lowest):
                expected = f"a whole number, {lowest} or more" + ", or null" * null
                raise ConfigError(f"{shown}: expected {expected}")
            if most is not None and value is not None and value > most:
                raise ConfigError(f"{shown}: expected at most {most}")


@dataclass(frozen=True)
class TargetConfig:
    """What a file of the configuration folder says: what to call, and with which options.

    Attributes
    ----------
    name
        what results call it; "" where it has none.
    target
        dotted name of a class or function.
    options
        what that is called with.
    version
        raised when its numbers change; None of a user's own code.
    valid
        rules for options, as `check_valid` reads them.
    """

    name: str = ""
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    version: int | None = None
    valid: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, node: Mapping[str, Any] | DictConfig) -> Self:
        """A choice by its keys, of which those are options that the harness does not read."""
        plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        keys = {str(key): value for key, value in cast(Mapping[str, Any], plain).items()}
        facts = {key.name: keys[key.name] for key in fields(cls) if key.name in keys}
        options = {key: value for key, value in keys.items() if key not in HARNESS_KEYS}
        return cls(**facts | {"target": str(keys.get("_target_", "")), "options": options})

    def build(self) -> Any:
        """Import the target and call it with the options, or with its `options_type` made of them.

        Raises
        ------
        ConfigError
            the target is not there, takes no such options, or refuses their values.
        """
        factory = locate(self.target)
        taker = getattr(factory, "options_type", None) or factory
        accepted = inspect.signature(taker)
        later = INHERITED & self.options.keys() - accepted.parameters.keys()
        arguments = {key: value for key, value in self.options.items() if key not in later}
        try:
            accepted.bind(**arguments)
        except TypeError as error:
            names = ", ".join(arguments) or "nothing"
            if len(names) > MOST_LISTED // 2:
                names = _first([*arguments])
            raise ConfigError(f"_target_={self.target}: {error}; given: {names}") from error
        try:
            instance = factory(**arguments) if taker is factory else factory(taker(**arguments))
        except ValueError as error:
            raise ConfigError(f"{self.name or self.target}: {first_line(error)}") from error
        for key in later:
            value = self.options[key]
            if not hasattr(instance, key):
                raise ConfigError(f"{key}={show(value)}: _target_={self.target} has no such option")
            setattr(instance, key, value)
        return instance


@dataclass(frozen=True)
class MethodConfig(TargetConfig):
    """A method with its options, and what its file says of it.

    Attributes
    ----------
    minimum
        the smallest budget in tokens for each accounting, None for any; no mapping: not known.
    preset
        its own budget, None where it has several or none.
    published_dense_layers
        layers that attended everything in its paper.
    """

    minimum: Mapping[str, int | None] | None = None
    preset: int | float | None = None
    published_dense_layers: Sequence[int] | None = None

    @property
    def has_budget(self) -> bool:
        """Whether a budget sets anything.

        A method whose minimum is null under every accounting, such as full attention, is the same
        under any budget.
        """
        return not self.minimum or any(least is not None for least in self.minimum.values())

    def build(self) -> Any:
        """The method, which refuses a budget below its minimum; see `TargetConfig.build`."""
        method = super().build()
        if self.minimum:
            method.minimum = self.minimum
        return method


def register_resolvers() -> None:
    """Make `${kvbench.add:a,b}`, `${kvbench.mul:a,b}` and `${kvbench.over:a,b}`, a / b rounded up,
    known to OmegaConf, for minima that follow from options, `${kvbench.only:a,value,words}`, a
    where the value is one of the words and null elsewhere, `${kvbench.assets:name}`, a folder that
    kvbench ships, `${kvbench.fetched:name}`, one that `kvbench fetch` makes.
    """
    OmegaConf.register_new_resolver("kvbench.add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_new_resolver(
        "kvbench.mul", lambda *factors: math.prod(factors), replace=True
    )
    OmegaConf.register_new_resolver(
        "kvbench.over", lambda a, b: math.ceil(round(a / (b or 1), 9)), replace=True
    )
    OmegaConf.register_new_resolver(
        "kvbench.only", lambda then, value, words: then if value in words else None, replace=True
    )
    OmegaConf.register_new_resolver("kvbench.assets", lambda name: str(ASSETS / name), replace=True)
    OmegaConf.register_new_resolver(
        "kvbench.fetched", lambda name: str(fetched_folder(name)), replace=True
    )


register_resolvers()


def home() -> Path:
    """What kvbench keeps for a user: `$KVBENCH_HOME`, or a folder in the user's cache."""
    folder = os.environ.get("KVBENCH_HOME") or user_cache_dir("kvbench", appauthor=False)
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"KVBENCH_HOME={folder}: no such user; expected a folder") from error


def fetched_folder(model: str) -> Path:
    """Where `kvbench fetch` keeps a model."""
    return home() / "models" / model


def shipped_folder(name: str) -> Path:
    """A folder that kvbench ships beside its code, "docs" or "results": `kvbench/NAME` in a wheel,
    the checkout's `NAME/` otherwise.
    """
    packaged = PACKAGE / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def conf_dir() -> Path:
    """The configuration folder."""
    return shipped_folder("conf")


def groups() -> list[str]:
    """Names of the groups, such as method and task, in alphabetical order.

    Neither Hydra's own, nor `experiment`, whose files choose from the others and are put on top:
    `+experiment=NAME`.
    """
    folders = {folder.name for folder in conf_dir().iterdir() if folder.is_dir()}
    return sorted(folders - {"hydra", "experiment"})


def choices(group: str) -> dict[str, str]:
    """What can be chosen in `group`, or in "experiment", each with its `about` line, in
    alphabetical order.
    """
    return {
        path.stem: _description(path.read_text())
        for path in sorted((conf_dir() / group).glob("*.yaml"))
    }


def _description(text: str) -> str:
    # A line is read rather than the file parsed: `--help` reads all files, and YAML takes
    # milliseconds for each.
    line = re.search(r"^(?:# )?about: *(.*)$", text, re.MULTILINE)
    return line.group(1).strip("'\"") if line else ""


class Plugin(NamedTuple):
    """What an entry point of an installed package, NAME = "kvbench_mine", leads to.

    Attributes
    ----------
    package
        its name and version, "kvbench-mine 0.1".
    file
        `kvbench_mine/method/NAME.yaml`; None: there is none.
    """

    package: str
    file: Path | None


@functools.cache
def plugins(group: str) -> dict[str, Plugin]:
    """What installed packages add to a group by entry points of "kvbench.methods" or
    "kvbench.tasks", by its name. Nothing of them is imported.
    """
    found = {}
    for point in entry_points(group=f"kvbench.{group}s"):
        spec = importlib.util.find_spec(point.value) if point.value.isidentifier() else None
        places = (spec and spec.submodule_search_locations) or []
        files = [Path(place, group, f"{point.name}.yaml") for place in places]
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        found[point.name] = Plugin(package, next(filter(Path.is_file, files), None))
    return found


def shipped(group: str, name: str) -> dict[str, Any] | None:
    """The unresolved YAML of `name` in `group` as kvbench ships it, with the files its `defaults`
    name, or None.
    """
    file = conf_dir() / group / f"{name}.yaml"
    return _whole(file) if name in choices(group) else None


def installed(group: str, name: str) -> dict[str, Any] | None:
    """As `shipped`, or what an installed package brings under a name that kvbench has not.

    Raises
    ------
    ConfigError
        the package says that it has such a file, and has none.
    """
    plugin = plugins(group).get(name)
    if name in choices(group) or plugin is None:
        return shipped(group, name)
    if plugin.file is None:
        raise ConfigError(
            f"{group}={name}: the package {plugin.package} says that it has one; expected"
            f" {group}/{name}.yaml beside its code"
        )
    return _whole(plugin.file)


def _whole(file: Path) -> dict[str, Any]:
    choice = read_choice(file)
    if "defaults" not in choice:
        return choice
    files = [file, *(conf_dir() / file.parent.name).glob("*.yaml")]
    return copy.deepcopy(_merged(file, tuple(path.stat().st_mtime_ns for path in files)))


@functools.lru_cache(maxsize=256)
def _merged(path: Path, modified: tuple[int, ...]) -> dict[str, Any]:
    # Merging takes ten milliseconds, and a sweep's check asks for the same choices several times
    # for every job.
    choice = read_choice(path)
    parts = [
        choice if part == "_self_" else shipped(path.parent.name, part) or {}
        for part in choice.pop("defaults")
    ]
    return _plain(OmegaConf.merge(*parts))


def root_keys() -> dict[str, Any]:
    """The unresolved keys of `conf/config.yaml` that are kvbench's own: neither the defaults list
    nor Hydra's.
    """
    return {
        key: value
        for key, value in read_choice(conf_dir() / "config.yaml").items()
        if key not in ("defaults", "hydra")
    }


def read_choice(path: Path) -> dict[str, Any]:
    """The unresolved YAML of one choice, as its file has it."""
    return copy.deepcopy(_parsed(path, path.stat().st_mtime_ns))


@functools.lru_cache(maxsize=256)
def _parsed(path: Path, modified: int) -> dict[str, Any]:
    # YAML takes milliseconds, and a sweep's check reads the same few files for every job.
    return _plain(OmegaConf.load(path))


def _plain(node: Any) -> dict[str, Any]:
    container = OmegaConf.to_container(node)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def documented_keys() -> list[tuple[str, str, str]]:
    """(key, default, comment) of every key in `conf/config.yaml` that has a comment beside it."""
    rows, parent = [], ""
    for line in (conf_dir() / "config.yaml").read_text().splitlines():
        if section := re.match(r"(\w+):\s*$", line):
            parent = section.group(1) + "."
        elif key := re.match(r"( *)(\w+): *(\S+) +# (.*)", line):
            rows.append(
                ((parent if key.group(1) else "") + key.group(2), key.group(3), key.group(4))
            )
    return rows


def sweep_words(
    params: Mapping[str, Any] | None, arms: Iterable[Mapping[str, Any]] | None
) -> list[list[str]]:
    """The words `key=value,value` that an experiment's file adds to a sweep: one list, or one for
    each of its arms.

    Parameters
    ----------
    params
        keys that the arms share, `hydra.sweeper.params`.
    arms
        keys of each arm, `hydra.sweeper.arms`; a key of its own stands above a shared one.

    Raises
    ------
    ConfigError
        they are something else.
    """
    if not isinstance(params or {}, Mapping):
        raise ConfigError(
            f"hydra.sweeper.params={show(params)}: expected a mapping of keys to values"
        )
    are_listed = isinstance(arms or [], Iterable) and not isinstance(arms, str)
    if not are_listed or not all(isinstance(arm, Mapping) for arm in arms or []):
        shown = show([*(arms or [])] if are_listed else arms)
        raise ConfigError(
            f"hydra.sweeper.arms={shown}: expected a list of mappings of keys to values"
        )
    shared = dict(params or {})
    return [
        [f"{key}={show(value)}" for key, value in {**shared, **arm}.items()] for arm in arms or [{}]
    ]


LISTING = "kvbench --help lists"  # the choices of each group
MOST_LISTED = 155  # characters of a hint and all valid names in a message


def nearest(name: str, valid: Iterable[str], where: str = "") -> str:
    """The end of a message about an unknown name: the nearest valid ones, and all of them.

    Parameters
    ----------
    name
        what was typed.
    valid
        all names there are.
    where
        what lists them where they are too many for a message, such as "--help lists".
    """
    names = sorted(valid)
    # of a long name, what was typed may be the beginning
    begins = {word[: len(name)]: word for word in names}
    holding = [word for word in names if len(name) > 2 and name in word]
    close = sorted(holding, key=lambda word: (not word.startswith(name), len(word)))[:3]
    close = close or difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    close = close or [
        begins[word] for word in difflib.get_close_matches(name, begins, n=2, cutoff=0.75)
    ]
    hint = f"did you mean {' or '.join(close)}? " if name and close else ""
    listed, more = ", ".join(names) or "none", f"{where} all {len(names)}"
    if len(hint + listed) <= MOST_LISTED:
        return f"{hint}(valid: {listed})"
    if not where:
        return f"{hint}(valid: {_first(names)})"
    return f"{hint}({more})" if hint else f"(valid: {_first(names)}; {more})"


def _first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


# Groups and keys that had another name.
RENAMED = {
    "engine": "backend",
    "protocol.question_as_decode": "protocol.question=with|after|decode",
    "task.samples": "task.limit",
}


def nearest_key(key: str, valid: Iterable[str]) -> str:
    """As `nearest`, for dotted keys: `page_size` finds `method.page_size`, and facts are no
    suggestion.
    """
    if key in RENAMED:
        return f"did you mean {RENAMED[key]}?"
    group = key.split(".")[0]
    if group in RENAMED:
        return f"did you mean {RENAMED[group]}{key.removeprefix(group)}?"
    leaf_of = {valid_key: valid_key.rpartition(".")[2] for valid_key in valid}
    leaf_of = {valid_key: leaf for valid_key, leaf in sorted(leaf_of.items()) if leaf not in FACTS}
    section, leaf = f".{key}".rsplit(".", 1)
    section = section.removeprefix(".")
    elsewhere = [valid_key for valid_key in leaf_of if leaf_of[valid_key] == leaf]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    # Within a section the leaves are compared: a long section in common would make all of its keys
    # alike.
    siblings = [
        leaf_of[valid_key] for valid_key in leaf_of if valid_key.rpartition(".")[0] == section
    ]
    if siblings:
        return nearest(leaf, siblings, "--cfg job prints")
    return nearest(key, leaf_of, "--cfg job prints")


def method_config(name: str, **options: Any) -> MethodConfig:
    """The method `name` with some of its options changed, read without Hydra.

    Parameters
    ----------
    name
        a file of `conf/method`, or a method of an installed package.
    options
        constructor options that differ from the file's.

    Returns
    -------
    MethodConfig
        All of it, resolved.

    Raises
    ------
    ConfigError
        no such method or option, a value of another type than the default's, or one that is not
        valid.
    """
    node = installed("method", name)
    if node is None:
        every = {*choices("method"), *plugins("method")}
        raise ConfigError(f"method={name}: no such method; {nearest(name, every, LISTING)}")
    valid = node.keys() - HARNESS_KEYS
    for key in options:
        if key not in valid:
            raise ConfigError(f"{key}: no such option of method {name}; {nearest(key, valid)}")
    check_types("method", options, node)
    check_rules("method", node)
    check_valid("method", options, node.get("valid") or {})
    return MethodConfig.of(OmegaConf.create({**node, **options}))


def check_types(group: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a value whose type differs from its default's.

    A default of null says nothing of the type, and text with an interpolation is judged when it is
    resolved.

    Raises
    ------
    ConfigError
        names the key, the value and the default.
    """
    for key, value in options.items():
        default = defaults.get(key)
        if default is None or _interpolated(value) or _interpolated(default):
            continue
        # bool is a subclass of int, and an int is a fine float: the exact type decides, but for
        # that one.
        if type(value) is not type(default) and not (
            isinstance(default, float) and type(value) is int
        ):
            raise ConfigError(
                f"{group}.{key}={show(value)}: expected {_kind(default)}, such as {show(default)}"
            )


# What a rule below `valid:` may say, and the types of it: of a whole number, and of any number.
_NUMBER, _SWITCH = (int, float), (bool,)
WHOLE_RULE = {"at_least": (int,), "odd": _SWITCH, "or_null": _SWITCH}
NUMBER_RULE = {"above": _NUMBER, "from": _NUMBER, "at_most": _NUMBER, "or_null": _SWITCH}


def check_rules(group: str, chosen: Mapping[str, Any]) -> None:
    """Refuse a file whose `valid` key has a rule that `check_valid` cannot read: the default rule
    would count instead.

    Parameters
    ----------
    group
        "method" or "task", for the message.
    chosen
        all keys of the choice.

    Raises
    ------
    ConfigError
        names the rule, what is wrong with it and what would be right.
    """
    rules = chosen.get("valid") or {}
    if not isinstance(rules, Mapping):
        raise ConfigError(f"{group}.valid={show(rules)}: expected a mapping of options to rules")
    for key, rule in rules.items():
        if key not in chosen or key in HARNESS_KEYS:
            hint = nearest(str(key), chosen.keys() - HARNESS_KEYS)
            raise ConfigError(
                f"{group}.valid.{key}: {chosen.get('name')} has no such option; {hint}"
            )
        if isinstance(rule, list):
            continue
        where = f"{group}.valid.{key}={show(rule)}"
        if not isinstance(rule, Mapping):
            raise ConfigError(
                f"{where}: expected a list of values, or a mapping such as {{at_least: 1}}"
            )
        kind, words = (
            ("any", NUMBER_RULE) if rule.keys() & {"above", "from"} else ("a whole", WHOLE_RULE)
        )
        for word, value in rule.items():
            if word not in words:
                every = f"{', '.join(WHOLE_RULE)} of a whole one, {', '.join(NUMBER_RULE)} of any"
                raise ConfigError(
                    f"{where}: {word} says nothing of {kind} number; expected {every}"
                )
            if type(value) not in words[word]:
                raise ConfigError(f"{where}: {word}: expected {_kind(words[word][-1]())}")


def check_valid(group: str, options: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    """Refuse a value that the `valid` key of a method's or a task's file leaves out.

    Parameters
    ----------
    group
        "method" or "task", for the message.
    options
        their names and resolved values.
    valid
        for each option a list of its values, or a mapping: of a whole number `at_least` (1), `odd`
        (false); of any number `above` or, itself included, `from`, and `at_most` (no end); of both
        `or_null` (false).

    Raises
    ------
    ConfigError
        names the key, the value and the valid ones.
    """
    for key, rule in valid.items():
        if key not in options:
            continue
        value = options[key]
        if isinstance(rule, Mapping) and rule.keys() & {"above", "from"}:
            above, least = rule.get("above", -math.inf), rule.get("from", -math.inf)
            most = rule.get("at_most", math.inf)
            fits = (
                type(value) in (int, float)
                and math.isfinite(value)
                and above < value <= most
                and value >= least
            )
            expected = f"a number above {above}" if "above" in rule else f"a number from {least} on"
            expected += f", at most {most}" if "at_most" in rule else ""
        elif isinstance(rule, Mapping):
            lowest, odd = rule.get("at_least", 1), rule.get("odd", False)
            fits = type(value) is int and value >= lowest and (not odd or value % 2 == 1)
            expected = f"{'an odd' if odd else 'a'} whole number, {lowest} or more"
        else:
            fits, expected = value in rule, " | ".join(map(show, rule))
        if isinstance(rule, Mapping) and rule.get("or_null", False):
            fits, expected = fits or value is None, f"{expected}, or null"
        if not fits:
            raise ConfigError(f"{group}.{key}={show(value)}: expected {expected}")


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a word",
        list: "a list",
    }
    return names.get(type(value), "a mapping")


def show(value: Any) -> str:
    """`value` as one would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(show(item) for item in value)}]"
    return str(value)


def bind_methods() -> None:
    """Make `import methods` mean the package beside `kvbench`, whatever the current folder holds.

    Raises
    ------
    ConfigError
        another module of that name is already imported in this process.
    """
    home = PACKAGE.parent / "methods"
    loaded = sys.modules.get("methods")
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file is None or Path(file).resolve().parent != home:
            raise ConfigError(
                f"methods={file or loaded}: already imported, and hides kvbench's own package of"
                f" that name ({home}); import kvbench's first with kvbench.config.bind_methods(),"
                " or rename yours"
            )
        return
    spec = importlib.util.spec_from_file_location(
        "methods", home / "__init__.py", submodule_search_locations=[str(home)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["methods"] = module
    spec.loader.exec_module(module)


# in the environment: a user's own folder of choices, that of --config-dir
USER_CONF = "KVBENCH_CONF"


def choose_from(folder: Path | None) -> None:
    """Take choices from a user's folder, too: Python finds its modules, here and in the processes
    that this one starts, and its name is known to them. None: from kvbench's own alone.
    """
    os.environ.pop(USER_CONF, None)
    if folder is None:
        return
    os.environ[USER_CONF], place = str(folder), str(folder.absolute())
    if place not in sys.path:
        sys.path.append(place)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), place])
        )


def user_choices() -> str | None:
    """The name of the user's folder that choices are taken from, too; None: there is none."""
    folder = os.environ.get(USER_CONF)
    return None if folder is None else Path(folder).absolute().name


def searched(group: str) -> str:
    """The end of a message about a choice that is not there: the folders that were searched."""
    folder = os.environ.get(USER_CONF)
    if folder is None:
        return f"; looked in {conf_dir() / group}; --config-dir FOLDER adds FOLDER/{group}"
    there = Path(folder, group)
    missing = "" if there.is_dir() else ", which is not there"
    return f"; looked in {conf_dir() / group} and {there}{missing}"


def locate(target: str) -> Any:
    """The class or function that the dotted name `target` means.

    Raises
    ------
    ConfigError
        no such module, or no such name in it.
    """
    bind_methods()
    if not re.search(r".\.", target):
        raise ConfigError(f"_target_={target}: expected module.Class, such as methods.quest.Quest")
    module_name, attribute = target.rsplit(".", 1)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"_target_={target}: {first_line(error)}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"_target_={target}: no {attribute} in {module_name}; {nearest(attribute, public)}"
        )
    return getattr(module, attribute)


def first_line(error: BaseException) -> str:
    """What `error` says, cut to one line; its class where it says nothing.

    A line that ends in a colon goes on.
    """
    first, *more = (str(error) or type(error).__name__).splitlines()
    return f"{first} {more[0].strip()}" if first.rstrip().endswith(":") and more else first
