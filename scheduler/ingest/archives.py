"""Zip files: which entries are images, within bounds that are checked before anything is unpacked. Blocks."""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia

__all__ = ["ArchiveLimits", "image_entries", "open_archive", "read_entry"]

_BOMB_RATIO = 200
_BOMB_FREE_BYTES = 1024**2
"""Entries below this may shrink as much as they like: a small plain picture compresses very well."""

_IGNORED_FILES = (".ds_store", "thumbs.db", "desktop.ini")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLimits:
    """What one archive may cost."""

    max_entries: int
    max_entry_bytes: int
    max_inflated_bytes: int


def open_archive(file: IO[bytes], name: str, limits: ArchiveLimits) -> zipfile.ZipFile:
    """Open a zip and check all its entries by the directory alone.

    Raises:
        UnsupportedMedia: not a zip.
        InvalidInput: an entry that is encrypted, a link, or leads outside the archive's root.
        TooLarge: more entries or unpacked bytes than the limits, or the shape of a zip bomb.
    """
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
        raise UnsupportedMedia(f"{name}: not a zip file, or damaged ({exc})") from exc
    entries = archive.infolist()
    if len(entries) > limits.max_entries:
        raise TooLarge(f"{name}: {len(entries)} entries; {limits.max_entries} are accepted")
    total = sum(entry.file_size for entry in entries)
    if total > limits.max_inflated_bytes:
        raise TooLarge(f"{name}: unpacks to {total} bytes; {limits.max_inflated_bytes} are accepted")
    for entry in entries:
        _check(entry, name, limits)
    return archive


def image_entries(archive: zipfile.ZipFile, name: str) -> Iterator[zipfile.ZipInfo]:
    """The entries that should be images, in the order of the archive; folders may be nested.

    Raises:
        UnsupportedMedia: an archive inside the archive.
    """
    for entry in archive.infolist():
        path = PurePosixPath(entry.filename)
        if entry.is_dir() or path.parts[0] == "__MACOSX" or path.name.lower() in _IGNORED_FILES:
            continue
        if path.suffix.lower() in _ARCHIVES:
            raise UnsupportedMedia(f"{name}: {entry.filename!r} is an archive inside the archive; unpack it first")
        yield entry


def read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> bytes:
    """Unpack one entry; never more than its directory says. Raises InvalidInput."""
    try:
        with archive.open(entry) as file:
            data = file.read(entry.file_size)
            if len(data) == entry.file_size and not file.read(1):
                return data
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as exc:
        raise InvalidInput(f"{name}: the entry {entry.filename!r} is damaged ({exc})") from exc
    raise InvalidInput(f"{name}: the entry {entry.filename!r} has another length than the directory says")


def _check(entry: zipfile.ZipInfo, name: str, limits: ArchiveLimits) -> None:
    filename = entry.filename
    path = PurePosixPath(filename)
    # A drive letter or a backslash means a path to some programs, and to no honest one in a zip.
    if path.is_absolute() or ".." in path.parts or "\\" in filename or filename[1:2] == ":" or not path.parts:
        raise InvalidInput(f"{name}: the entry {filename!r} leads outside the archive")
    if entry.flag_bits & 0x1:
        raise InvalidInput(f"{name}: the entry {filename!r} is encrypted")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise InvalidInput(f"{name}: the entry {filename!r} is a link")
    if entry.file_size > limits.max_entry_bytes:
        raise TooLarge(
            f"{name}: the entry {filename!r} has {entry.file_size} bytes; {limits.max_entry_bytes} are accepted"
        )
    if entry.file_size > max(_BOMB_FREE_BYTES, _BOMB_RATIO * entry.compress_size):
        raise TooLarge(f"{name}: the entry {filename!r} grows more than {_BOMB_RATIO} times when unpacked: a zip bomb?")
