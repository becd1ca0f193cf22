"""The command line that makes a run again, from its run.yaml: for messages about what is missing.

No torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.config import ASSETS, FACTS, fetched_folder, root_keys, shipped, show
from kvbench.memory.kinds import NATIVE, kv_in
from kvbench.runs.stored import DAMAGED, ResultsError, backend_name, read_run_yaml

OMITTED_KEYS = FACTS | {"name", "_target_"}
UNKNOWN = "the command that made it"


def command_of(folder: Path) -> str:
    """`python -m kvbench` with what the config of a run folder sets otherwise than kvbench's own
    files.

    A folder whose run.yaml cannot be read has none: the answer then says so in words.
    """
    try:
        config = read_run_yaml(folder)["config"]
        words = [*_words(config), f"results_dir={folder.parents[4]}"]
    except (ResultsError, *DAMAGED):
        return UNKNOWN
    command = shlex.join(["python", "-m", "kvbench", *words])
    return command if command.isprintable() else UNKNOWN


def _words(config: Mapping[str, Any]) -> Iterator[str]:
    if "config_dir" in config:
        yield from ("--config-dir", str(config["config_dir"]))
    for group in ("model", "method", "task"):
        choice = config[group]
        yield f"{group}={choice['name']}"
        common = root_keys().get(group) or {}
        original = {**common, **(shipped(group, str(choice["name"])) or {})}
        yield from _differing(
            f"{group}.", {key: choice[key] for key in choice if key not in OMITTED_KEYS}, original
        )
    for key, original in root_keys().items():
        if key in ("results_dir", "sweep", "model"):  # the last stands above
            continue
        if isinstance(original, Mapping):
            yield from _differing(f"{key}.", config.get(key) or {}, original)
        else:
            yield from _differing("", {key: config.get(key, original)}, {key: original})
    yield from _differing("kv.", kv_in(config)._asdict(), NATIVE._asdict())
    if (backend := backend_name(config)) != "hf":
        yield f"backend={backend}"
        choice = {key: value for key, value in config["backend"].items() if key not in OMITTED_KEYS}
        yield from _differing("backend.", choice, shipped("backend", backend) or {})


def _differing(
    prefix: str, values: Mapping[str, Any], original: Mapping[str, Any]
) -> Iterator[str]:
    """A word for each value that is not the file's; what a file interpolates follows from the
    others.
    """
    for key, value in values.items():
        default = original.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _differing(f"{prefix}{key}.", value, default)
        elif value != default and not isinstance(value, Mapping) and not _follows(value, default):
            yield f"{prefix}{key}={show(value)}"


def _follows(value: Any, default: Any) -> bool:
    """Whether a value is what a file's interpolation came to; a folder is if it is kvbench's, here
    or elsewhere.
    """
    if not isinstance(default, str) or "${" not in default:
        return False
    if not re.match(r"\$\{kvbench\.(assets|fetched):", default):
        return True
    kind, name = default.strip("${}").split(":")
    ours = ASSETS / name if kind == "kvbench.assets" else fetched_folder(name)
    path = Path(str(value))
    return path == ours or (path.name == name and not path.exists())
