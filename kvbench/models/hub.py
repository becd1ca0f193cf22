"""Where a model comes from, without torch: random weights, a folder, or the hub and its cache.

`kvbench.cli.checks` refuses with it what cannot be loaded, before anything heavy starts; the
backends load what it names, so that the two cannot disagree.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from kvbench.config import ASSETS, ConfigError, choices, fetched_folder, first_line, shipped, show
from kvbench.models.card import ModelCard, refuse_impossible
from kvbench.models.digests import digests_of, fingerprint
from kvbench.models.folder import holds_weights, refuse_no_weights, refuse_strange_files

ADAPTER = "adapter_config.json"  # what peft writes of an adapter
REAL_DENSE_LAYERS = (0, 1)  # of a model that kvbench has no file for
PATIENCE = 1.0  # seconds to wait for the hub; its own library would try again for half a minute


class ModelSource(NamedTuple):
    """What the keys of a run's `model` group ask for.

    Attributes
    ----------
    name
        the model's name in results.
    path
        where trained weights lie, a folder or a hub id; None: random weights in the shape of
        `model.config`.
    dense_layers
        layers that stay dense under `protocol.dense_layers=auto`.
    """

    name: str
    path: str | None
    dense_layers: tuple[int, ...]

    @property
    def label(self) -> str:
        """What messages call it: by the key that asks for it."""
        return f"model={self.name}" if self.path is None else f"model.path={self.path}"

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that `path` means; None for all else.

        Raises
        ------
        ConfigError
            there is no such file, or it does not begin as GGUF does.
        """
        if self.path is None or not self.path.endswith(".gguf"):
            return None
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.path={self.path}: no such file")
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ConfigError(
                    f"model.path={self.path}: not a GGUF file; expected one that begins with GGUF"
                )
        return file

    @property
    def folder(self) -> Path | None:
        """The local folder that `path` means; None for random weights, GGUF files and hub ids.

        Raises
        ------
        ConfigError
            it can only mean a folder or a file, and that is not there.
        """
        if self.path is None or self.gguf is not None:
            return None
        if not self.path.strip():
            raise ConfigError(
                f"model.path='{self.path}': empty; expected a folder, or a hub id such as org/name"
            )
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            return folder
        if folder == fetched_folder(self.name):
            raise ConfigError(
                f"model={self.name}: not on this machine yet; kvbench fetch {self.name} gets it"
            )
        local = folder.exists() or self.path.startswith(("/", ".", "~"))
        if local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path):
            raise ConfigError(
                f"model.path={self.path}: no such folder; expected a folder, or a hub id such as"
                " org/name"
            )
        return None

    def weights(self, seed: int = 0) -> str | None:
        """What distinguishes the model's weights from others; None: they are not on this machine.

        Parameters
        ----------
        seed
            of random weights.
        """
        folder = self._with_weights
        if folder is None:
            return self.content(seed)
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        return stated_revision(folder) or fingerprint(files, "weights")

    def content(self, seed: int = 0) -> str | None:
        """What distinguishes the model from others by its weights, config, tokenizer and template.

        None: as of `weights`.
        """
        if self.path is None:
            return f"{self.name}-dummy-{seed}"
        if self.gguf is not None:
            return fingerprint([self.gguf], "gguf")
        folder = self._with_weights
        return None if folder is None else revision_of(folder)

    @property
    def _with_weights(self) -> Path | None:
        """The folder of the weights on this machine; None for GGUF files and random weights."""
        if self.path is None or self.gguf is not None:
            return None
        folder = self.folder or cached_folder(self.path)
        return folder if folder is not None and holds_weights(folder) else None


@dataclass(frozen=True)
class ModelConfig:
    """The model that a run asks for, by the keys of its `model` group.

    Attributes
    ----------
    name
        of its file.
    path
        a folder, a GGUF file or a hub id; None: it has no trained weights.
    weights
        "dummy": random ones in the shape of `config`.
    dense_layers
        layers that stay dense under `protocol.dense_layers=auto`.
    config
        the transformers config of its shape, used for random weights.
    device_map
        how its layers lie on several GPUs, see `kvbench.backends.hf.spread`; None: on one device.
    fused
        what computes its layers on a GPU, see `kvbench.backends.hf.fused`.
    """

    name: str
    path: str | None = None
    weights: Literal["pretrained", "dummy"] = "pretrained"
    dense_layers: Sequence[int] | None = None
    config: Mapping[str, Any] | None = None
    device_map: Literal[None, "balanced", "auto"] = None
    fused: Literal["auto", "none", "flashinfer"] = "auto"

    @classmethod
    def of(cls, model: Mapping[str, Any] | ModelConfig) -> ModelConfig:
        """The config of these keys, of which what only describes a model is left out."""
        if isinstance(model, ModelConfig):
            return model
        return cls(**{key.name: model[key.name] for key in fields(cls) if key.name in model})

    @property
    def source(self) -> ModelSource:
        """Where it comes from.

        `model.path=X` over a model of kvbench's own (random weights, or those it ships) asks for X
        itself, under its own name; `model.weights=dummy` over one that has a path asks for random
        weights in that shape.

        Raises
        ------
        ConfigError
            trained weights without a path.
        """
        original = shipped("model", self.name)
        dense_layers = tuple(self.dense_layers or ())
        ours = original is not None and (
            original["path"] is None or "kvbench.assets" in original["path"]
        )
        if self.path is not None and ours and Path(str(self.path)).parent != ASSETS:
            return ModelSource(Path(str(self.path)).name, str(self.path), REAL_DENSE_LAYERS)
        if self.weights == "dummy":
            return ModelSource(self.name, None, dense_layers)
        if self.path is None:
            raise ConfigError(
                f"model.path=null: {self.name} has no weights of its own; give a hub id or a folder"
            )
        return ModelSource(self.name, str(self.path), dense_layers)

    @property
    def title(self) -> str:
        """What a user asked for: a path, or the name of the file in `conf/model` that has it."""
        source, original = self.source, OmegaConf.create(shipped("model", self.name) or {})
        return source.name if source.path in (None, original.get("path")) else str(source.path)

    def card(self, read: Callable[[Mapping[str, Any], str], ModelCard] = ModelCard.of) -> ModelCard:
        """Its card, as far as it can be known before it is loaded.

        Nothing is of a GGUF file, which transformers reads, nor of a hub id never loaded before.

        Parameters
        ----------
        read
            a transformers config, as `ModelCard.of` does, or `ModelCard.of_class`.

        Raises
        ------
        ConfigError
            a folder without config or weights that can be read, or a shape that no model can have.
        """
        source, config = self.source, self._transformers_config()
        if source.path is None and "model_type" not in config:
            raise ConfigError(
                f"model.config={show(self.config)}: random weights need a transformers config"
            )
        if (folder := source.folder) is not None:
            refuse_no_weights(folder, str(source.path))
        where = "model.config." if source.path is None else f"{source.label}: config.json: "
        refuse_impossible(config, where)
        return read(config, where)

    def _transformers_config(self) -> Mapping[str, Any]:
        """What its files say, or else its own; {}: not known."""
        source = self.source
        if source.path is None:
            return self.config or {}
        if source.gguf is not None:
            return {}
        if (folder := source.folder or cached_folder(source.path)) is not None:
            return config_in(folder, source.path)
        original = shipped("model", self.name) or {"path": self.path}
        return self.config or {} if original["path"] == source.path else {}


def how_to_stretch(random_weights: bool) -> str:
    """The end of a message that a context length is too short.

    Random weights read any position as well as another.
    """
    return (
        "; model.config.max_position_embeddings=N stretches that of random weights"
        if random_weights
        else ""
    )


def config_in(folder: Path, path: str) -> Mapping[str, Any]:
    """The transformers config in a model's folder; `path` is what messages call the folder.

    Raises
    ------
    ConfigError
        no config.json, one that cannot be read, or a folder with things that are no files; or an
        adapter.
    """
    refuse_strange_files(folder, path)
    if (folder / ADAPTER).exists():
        refuse_adapter(path)
    try:
        shape = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.path={path}: no config.json in it; expected a transformers model's folder"
        ) from error
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"model.path={path}: config.json cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(shape, dict):
        raise ConfigError(
            f"model.path={path}: config.json is no mapping; expected a transformers model's folder"
        )
    return shape


def refuse_adapter(path: str) -> NoReturn:
    """Refuse a model with an adapter, which transformers applies where peft is installed alone.

    Raises
    ------
    ConfigError
        always.
    """
    raise ConfigError(
        f"model.path={path}: {ADAPTER} in it, of an adapter, which kvbench does not apply; expected"
        " a model with it in its weights, as peft's merge_and_unload() and save_pretrained() make"
        " one, or that file taken out"
    )


STATEMENT = "kvbench.json"
MOMENT = 60.0  # seconds that a fetch may take to put its files in place


def state_revision(folder: Path, revision: str) -> None:
    """Write into the folder of a fetched model what it is, and of which files that is said."""
    statement = {"revision": revision, "files": _files_digest(folder)}
    (folder / STATEMENT).write_text(json.dumps(statement) + "\n")


def stated_revision(folder: Path) -> str | None:
    """What the folder of a fetched model says it is; None where its files are not those fetched."""
    file = folder / STATEMENT
    try:
        statement = json.loads(file.read_text())
        if "files" in statement:
            unchanged = statement["files"] == _files_digest(folder)
        else:  # from before that was written: none may have been changed, or have come, since
            written, others = file.stat(), [other.stat() for other in _files(folder)]
            unchanged = all(
                other.st_mtime_ns <= written.st_mtime_ns
                and other.st_ctime <= written.st_ctime + MOMENT
                for other in others
            )
        return str(statement["revision"]) if unchanged else None
    except (AttributeError, OSError, LookupError, RecursionError, TypeError, ValueError):
        return None


def revision_of(folder: Path) -> str:
    """What a model's folder holds: as it states itself, or by all bytes of its files."""
    return stated_revision(folder) or fingerprint(
        [*_files(folder), *folder.glob(STATEMENT)], "folder"
    )


@functools.cache
def weights_origin(revision: str) -> str:
    """How weights of this revision came about, where kvbench fetched them; "" for any others."""
    sources = [(shipped("model", name) or {}).get("fetch") or {} for name in choices("model")]
    return (
        next((str(one["weights"]) for one in sources if one.get("revision") == revision), "")
        if revision
        else ""
    )


def _files(folder: Path) -> list[Path]:
    """The files of a model's folder, but for what kvbench says of them."""
    entries = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    return [
        file
        for file in entries
        if file.is_file() and not file.name.startswith(".") and file.name != STATEMENT
    ]


def _files_digest(folder: Path) -> str:
    return fingerprint(_files(folder), "files")


def is_as_downloaded(snapshot: Path) -> bool:
    """Whether the files of a commit in the hub's cache are as the hub's library wrote them.

    It links each to one that is named by a hash: large ones by their sha256, others as git names
    them.
    """
    blobs = [file.resolve() for file in _files(snapshot) if file.is_symlink()]
    large = digests_of(blob for blob in blobs if len(blob.name) == 64)
    return all(digest == blob.name for blob, digest in large.items()) and all(
        hashlib.sha1(b"blob %d\0" % blob.stat().st_size + blob.read_bytes()).hexdigest()
        == blob.name
        for blob in blobs
        if len(blob.name) == 40
    )


def cached_folder(hub_id: str) -> Path | None:
    """The folder in the local cache that holds config.json of a hub id, or None.

    Raises
    ------
    ConfigError
        no hub id can be written so.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except ValueError as error:
        raise ConfigError(
            f"model.path={hub_id}: no such folder, and no hub id: {first_line(error)}"
        ) from error
    return Path(config).parent if isinstance(config, str) else None


def refuse_out_of_reach(hub_id: str) -> None:
    """Refuse a hub id that is not in the local cache while the hub does not answer.

    Raises
    ------
    ConfigError
        says why, and that `model.path=FOLDER` needs no network.
    """
    folder = cached_folder(hub_id)
    if folder is not None and holds_weights(folder):
        return
    reason = out_of_reach()
    if reason is not None:
        raise ConfigError(
            f"model.path={hub_id}: not in the local cache of the hub, and {reason}; "
            "without network, use model.path=FOLDER"
        )


@functools.cache
def out_of_reach() -> str | None:
    """Why nothing can be had from the hub, or None; asked once in a process, for about a second."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    host = address.hostname or ""
    if _has_proxy(address.scheme, host) or _answers(
        host, address.port or (80 if address.scheme == "http" else 443)
    ):
        return None
    return f"{host} does not answer"


def _has_proxy(scheme: str, host: str) -> bool:
    """Whether another machine makes our connections: then it alone can say what is within reach."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    return bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host)


def _answers(host: str, port: int) -> bool:
    """Whether a connection to a host opens within `PATIENCE`."""
    opened = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE).close()
            opened.append(True)
        except OSError:
            pass

    # Looking a name up knows no time limit, so it is left in a thread that keeps no process alive.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(opened)
