"""Many run folders in one file: a tar archive compressed with xz, as `scripts/compact_runs.py`
packs them.

An archive may come from anybody. It is read in memory and never unpacked to the disk, and holds
nothing but regular files, of bounded size and number, each under a relative name of its own. No
torch.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

SUFFIX = ".tar.xz"
MOST_BYTES = 2**28  # unpacked; the largest that kvbench ships has 2**24
MOST_MEMBERS = 20_000  # files and folders; a run has four
MOST_MEMORY = 2**27  # that decompression may take; files of xz -9 take half of it
# of every file, in seconds since 1970: the year 2000, as tar warns of much earlier ones
DATE = 946_684_800


def packed(files: Mapping[str, bytes]) -> bytes:
    """The archive of these files by their names: the same bytes for the same files.

    Raises
    ------
    ValueError
        a name is too long for the plainest kind of tar archive, 255 bytes.
    """
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(files[name]), DATE
            archive.addfile(member, io.BytesIO(files[name]))
    return lzma.compress(whole.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def rounded(value: Any) -> Any:
    """A record in which every number has at most five digits, as in the archives that kvbench
    packs.
    """
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_archive(target: Path, files: Mapping[str, bytes]) -> int:
    """Write the archive of these files, whole or not at all; one that is there goes away.

    Returns its bytes.

    Raises
    ------
    ValueError
        as `packed`.
    OSError
        it cannot be written there.
    """
    archive = packed(files)
    whole = target.with_name(f".{target.name}.new")
    whole.write_bytes(archive)
    whole.replace(target)
    return len(archive)


def unpacked(data: bytes) -> dict[str, memoryview]:
    """The files in an archive by their names.

    Headers are read one by one, without `tarfile.open`, which follows whatever an archive says of
    later headers.

    Raises
    ------
    ValueError
        it is damaged or too large, or holds anything but regular files under plain names.
    """
    whole = memoryview(_decompressed(data))
    files: dict[str, memoryview] = {}
    at = members = 0
    while any(header := whole[at : at + tarfile.BLOCKSIZE]):  # zeros end it
        try:
            member = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ValueError(f"damaged at byte {at}: {error}") from error
        start = at + tarfile.BLOCKSIZE
        at = start + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        name = str(path := PurePosixPath(member.name))
        if (members := members + 1) > MOST_MEMBERS:
            raise ValueError(f"more than {MOST_MEMBERS} files and folders")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise ValueError(
                f"{name}: of type {member.type!r}; expected files, as tar --format=ustar packs them"
            )
        if not 0 <= member.size <= len(whole) - start:
            raise ValueError(
                f"{name}: of {member.size} bytes; expected at most {len(whole) - start}"
            )
        if member.type == tarfile.DIRTYPE:
            continue
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name}: expected a name inside the archive")
        if name in files:
            raise ValueError(f"{name}: there twice")
        files[name] = whole[start : start + member.size]
    return files


def _decompressed(data: bytes) -> bytes:
    """The tar archive in xz data.

    Raises
    ------
    ValueError
        it is damaged, cut short, or too large.
    """
    xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
    try:
        whole = xz.decompress(data, MOST_BYTES + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"damaged: {error}") from error
    if len(whole) > MOST_BYTES:
        raise ValueError(f"unpacks to more than {MOST_BYTES} bytes")
    if not xz.eof or xz.unused_data:
        raise ValueError("cut short" if not xz.eof else "with more data after its end")
    return whole
