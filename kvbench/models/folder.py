"""A model's folder as data, checked before anything in it is read.

`kvbench.models.hub` asks before it reads config.json, so that a pipe, a device or a file of any
size keeps nobody waiting. Imports no torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.config import ConfigError, first_line, show

# What transformers reads of a folder, by pattern.
WEIGHTS = ("*.safetensors", "*.bin")
TEXTS = (
    *("*config*.json", "*.index.json", "*token*.json", "vocab.*", "merges.*", "kvbench.json"),
    *("*.model", "*.tiktoken", "chat_template.*", "additional_chat_templates/*"),
)
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.spm", "tekken.json")
MOST_BYTES = 1 << 27  # of a text; the largest tokenizers have some 2**26
MOST_OF_CONFIG = 1 << 22
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", "kvbench.json")
# bytes before the weights of a safetensors file, which its own library sets
MOST_HEADER = 100_000_000
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def refuse_strange_files(folder: Path, path: str) -> None:
    """Refuse a model's folder where something that is read is no file of a size to be read.

    Parameters
    ----------
    folder
        of the model.
    path
        what messages call it.

    Raises
    ------
    ConfigError
        names the file, and a generation_config.json whose stop tokens are none.
    """
    for file in sorted(file for pattern in (*TEXTS, *WEIGHTS) for file in folder.glob(pattern)):
        if reason := _strange(file):
            raise ConfigError(f"model.path={path}: {file.name} {reason}")
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            eos = json.loads(file.read_bytes()).get("eos_token_id")
        except (AttributeError, OSError, RecursionError, ValueError) as error:
            raise ConfigError(
                f"model.path={path}: {file.name} cannot be read: {first_line(error)}"
            ) from error
        stop_ids(eos, f"model.path={path}: {file.name}: ")


def _strange(file: Path) -> str:
    """What keeps a file from being read; "" for nothing."""
    try:
        status = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if not os.access(file, os.R_OK):
        return "cannot be read: Permission denied"
    most = MOST_OF_CONFIG if file.name in CONFIGS else MOST_BYTES
    if status.st_size > most and not any(map(file.match, WEIGHTS)):
        return f"has {status.st_size} bytes; expected at most {most}"
    return ""


def stop_ids(eos: Any, where: str) -> tuple[int, ...]:
    """The tokens that an `eos_token_id` names.

    Raises
    ------
    ConfigError
        it is neither a whole number nor a list of them; `where` stands before the key in the
        message.
    """
    ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    if any(type(token) is not int for token in ids):
        raise ConfigError(
            f"{where}eos_token_id={show(eos)[:100]}: expected a whole number, or a list of them"
        )
    return ids


def refuse_no_weights(folder: Path, path: str) -> None:
    """Refuse a model's folder without weights, or with weights cut short as by a broken download.

    Raises
    ------
    ConfigError
        names the file.
    """
    if not holds_weights(folder):
        raise ConfigError(
            f"model.path={path}: no weights in it; expected *.safetensors or *.bin beside"
            " config.json"
        )
    files = {file.name for file in folder.glob("*.safetensors")}
    for name in sorted(files):
        if reason := _damage(folder / name):
            raise ConfigError(f"model.path={path}: {name} {reason}; copy or download it again")
    for index in INDEXES:
        there = {file.name for file in folder.iterdir()}
        if missing := sorted(_parts(folder / index) - there):
            raise ConfigError(f"model.path={path}: {missing[0]} is missing, which {index} names")


def refuse_no_tokenizer(folder: Path, path: str) -> None:
    """Refuse a model's folder without any file that a tokenizer is read from.

    Raises
    ------
    ConfigError
        says which are meant.
    """
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path={path}: no tokenizer in it; expected tokenizer.json, or other files of one"
        )


def holds_weights(folder: Path) -> bool:
    """Whether a folder has files as trained weights come in."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def tensor_types(folder: Path) -> Iterator[tuple[str, str, str]]:
    """File, name and type, such as BF16 or I16, of each tensor in a folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            yield file.name, name, str(entry["dtype"])


def _header(file: Path) -> dict[str, Mapping[str, Any]]:
    """What a safetensors file says of its tensors, by their names.

    Raises
    ------
    ValueError
        nothing that can be read, with the reason.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > size:
            raise ValueError(f"is cut short, {size} bytes")
        try:
            header = json.loads(stream.read(min(length, MOST_HEADER)))
            header.pop("__metadata__", None)
            whole = (
                8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            )
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise ValueError("is no safetensors file") from None
    if size != whole:
        raise ValueError(f"has {size} bytes where its header says {whole}")
    return dict(header)


def _damage(file: Path) -> str:
    """What is wrong with a safetensors file by its header; "" for nothing."""
    try:
        _header(file)
    except (OSError, ValueError) as error:
        return first_line(error)
    return ""


def _parts(index: Path) -> set[str]:
    """The files that the weights of a model are spread over; none where no index says so."""
    try:
        return set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except (OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return set()
