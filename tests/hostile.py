"""Results folders as a stranger, or a broken disk, may have made them: mutations by seed of runs that kvbench wrote."""

from __future__ import annotations

import json
import os
import random
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from report_runs import record, stored

from kvbench.config import shipped

LONG = "x" * 5000
# In place of a value: other types, numbers out of range, and texts that mean something to whoever reads or prints them.
VALUES: list[Any] = [
    *(None, True, 0, -1, 0.5, -1e308, 10**18, 10**400, "", [], {}, [[]], {"": {}}, [None, "a", 1], {"name": "x"}),
    *("../../x", "/etc/passwd", "~/x", "=1+1", "@SUM(1)", "a\nb", "\x1b[31mred", "\0", "ä\u202eb", LONG, "NaN", "1"),
    *("$x^$", r"\frac{", r"\input{/etc/passwd}", "a_b^c", "(", "[", "*+?", "a|b", "${oc.env:HOME}", "{x!r}", "%s"),
    *("<script>alert(1)</script>", '"><b onload=x>', "[/red]", "`", "os.system", "subprocess.Popen", "full", "quest"),
]
# Where a text stands in for what JSON and YAML allow and kvbench does not write.
RAW = ["NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000, "[" * 3000 + "]" * 3000, '"\\ud800"', "2024-01-01"]


def base(folder: Path) -> Path:
    """A results folder of a few small runs of several kinds."""
    config = {"metric": "accuracy"}
    for method, budget in (("full", None), ("quest", 64), ("snapkv", 64)):
        scores = {"a": (1.0, 0.0), "b": (1.0, 1.0)}
        stored(folder, method, budget, scores, config={**config, "task": shipped("task", "passkey")})
    of_a_judge(folder)
    steps = {"kl": [0.1, 0.1], "nll": [2.0, 2.0], "nll_full": [1.9, 1.9]}
    near = {"kl_mean": 0.1, "nll": 2.0, "nll_full": 1.9, "steps": steps}
    for method in ("full", "snapkv"):
        texts = [record(f"t{place}", "512", 1.0, fidelity=near) for place in range(2)]
        stored(folder, method, 64, texts, task="fidelity", config={**config, "task": shipped("task", "fidelity")})
    return folder


def of_a_judge(folder: Path) -> Path:
    """A run of LongGenBench, about whose output a judge is asked."""
    task = {**(shipped("task", "longgenbench") or {}), "data_dir": "elsewhere"}
    meta = {"number": 1, "prefix": "", "type": "Week"}
    meta |= {f"checks_{kind}": {"1": "a party"} for kind in ("once", "range", "periodic")}
    diary = record("d", "", 1.0, output="#*# Week 1: a party.", meta=meta)
    return stored(folder, "quest", 64, [diary], task="longgenbench", config={"metric": "accuracy", "task": task})


def mutate(folder: Path, seed: int) -> None:
    """Change a few things in a results folder, the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        file = chance.choice([path for path in files if path.name != "lock"] or files)
        chance.choice([in_value, in_value, in_value, in_value, in_text, in_bytes, in_kind])(file, chance)


def in_value(file: Path, chance: random.Random) -> None:
    """One value is another, has another key, or is gone."""
    try:
        if file.suffix == ".yaml":
            whole = yaml.safe_load(file.read_text())
            changed(whole, chance)
            file.write_text(yaml.safe_dump(whole, sort_keys=False))
        elif file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            changed(chance.choice(lines), chance)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            whole = json.loads(file.read_text())
            changed(whole, chance)
            file.write_text(json.dumps(whole))
    except (ValueError, RecursionError, IndexError, yaml.YAMLError, OSError):
        in_bytes(file, chance)  # another mutation has left nothing to be read


def changed(value: Any, chance: random.Random) -> None:
    """Change a place somewhere in a mapping or a list."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = chance.choice(places)
        if isinstance(value[place], dict | list) and value[place] and chance.random() < 0.85:
            value = value[place]
            continue
        what = chance.random()
        if what < 0.1:
            del value[place]
        elif what < 0.2 and isinstance(value, dict):
            value[str(chance.choice(VALUES))[:50]] = value.pop(place)
        else:
            value[place] = chance.choice(VALUES)
        return


def in_text(file: Path, chance: random.Random) -> None:
    """A number or word in the text is what these formats allow and kvbench does not write."""
    text = file.read_text(errors="replace")
    numbers = [place for place, letter in enumerate(text) if letter.isdigit()]
    if numbers:
        start = end = chance.choice(numbers)
        while end < len(text) and text[end].isdigit():
            end += 1
        file.write_text(text[:start] + chance.choice(RAW) + text[end:], errors="replace")


def in_bytes(file: Path, chance: random.Random) -> None:
    """Some bytes are others, or are lost."""
    data = bytearray(file.read_bytes())
    if len(data) < 2:
        return
    start = chance.randrange(len(data))
    if chance.random() < 0.4:
        del data[start:]
    elif chance.random() < 0.5:
        data[start : start + 5] = chance.randbytes(5)
    else:
        data[start:start] = chance.choice(
            [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"&a [*a, *a]", b"!!python/none x", b"\n"]
        )
    file.write_bytes(bytes(data))


def in_kind(file: Path, chance: random.Random) -> None:
    """A file is something else than a file, or a bomb."""
    file.unlink()
    kinds: list[Callable[[Path], Any]] = [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.parent),
        lambda path: path.write_text(alias_bomb()),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("{a: " * 900 + "1" + "}" * 900),
        lambda path: path.write_bytes(b""),
        lambda path: None,
    ]
    chance.choice(kinds)(file)


def alias_bomb() -> str:
    """YAML of a few hundred bytes that stands for ten thousand million words."""
    lines = ["format: 1", "a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join([*lines, "config: *a9", "identity: *a9"]) + "\n"


def listing(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def copy(source: Path, target: Path) -> Path:
    """A copy to mutate."""
    shutil.copytree(source, target)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Archives


def member(name: str = "runs/x/run.yaml", kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> bytes:
    """A member of a tar archive; `more` are fields of its header, such as a size that is not that of its data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for field, value in more.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict") + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def checked(header: bytes) -> bytes:
    """A header with the checksum that its other bytes have, as tar defines it."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def with_dictionary(xz: bytes) -> bytes:
    """The same xz data, which asks for 4 GiB of memory to be decompressed."""
    size = 4 * (xz[12] + 1)
    block = bytearray(xz[12 : 12 + size - 4])
    block[block.index(b"\x21\x01") + 2] = 40
    return xz[:12] + block + zlib.crc32(block).to_bytes(4, "little") + xz[12 + size :]
