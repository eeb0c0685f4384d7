"""The images of zip files, within bounds that are checked before unpacking. Blocks.

Bounds of the whole are checked when the archive is opened, and bounds of an entry when the entry is opened: one bad
picture must not refuse the others.
"""

from __future__ import annotations

import itertools
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import IO

from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia
from tierkit.picture_files import NO_PICTURE, START_BYTES, kind_of, left_out_by_name, needs_look, told

__all__ = ["EntryFile", "entry_path", "image_entries", "open_archive", "open_entry", "read_entry"]

_BOMB_RATIO = 200
_BOMB_FREE_BYTES = 1024**2
"""Entries below this may shrink as much as they like: a small plain picture compresses very well."""

_UTF8_FLAG = 0x800
_DIRECTORY_ENTRY = b"PK\x01\x02"
_LOCAL_HEADER_BYTES = 30
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Unpacked as far as is asked for; the library unpacks the others in one go, to any size."""

_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".npz")


def open_archive(file: IO[bytes], name: str, limits: SchedulerSettings) -> zipfile.ZipFile:
    """Open a zip and check all its entries, using only its directory.

    Raises:
        UnsupportedMedia: not a zip.
        InvalidInput: an entry that is encrypted, a link, or leads outside the archive's root.
        TooLarge: more entries or unpacked bytes than the limits.
    """
    # Folders are entries, too, and there may be as many as images. Counted before the directory is read: it takes some
    # hundred bytes of memory for each entry.
    max_entries = 2 * limits.max_images
    if _count(file, _DIRECTORY_ENTRY) > max_entries:
        raise TooLarge(f"{name}: more than the {max_entries} entries that are accepted")
    try:
        archive = zipfile.ZipFile(file)
    except Exception as exc:  # what the library raises on damaged directories is not one family
        raise UnsupportedMedia(f"{name}: not a zip file, or damaged ({exc})") from exc
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if total > limits.max_inflated_bytes:
        raise TooLarge(
            f"{name}: unpacks to {total} bytes; {limits.max_inflated_bytes} are accepted (setting max_inflated_bytes)"
        )
    for entry in entries:
        _check(entry, name)
    for first, second in itertools.pairwise(sorted(entries, key=lambda entry: entry.header_offset)):
        if first.header_offset + _LOCAL_HEADER_BYTES + first.compress_size > second.header_offset:
            raise InvalidInput(f"{name}: the entries {first.filename!r} and {second.filename!r} overlap")
    return archive


def image_entries(
    archive: zipfile.ZipFile, name: str, left_out: Counter[str]
) -> Iterator[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Yield the pictures and their paths, in the order of the archive; folders may be nested. The rules are the same as
    for pictures of a folder.

    Args:
        left_out: counts the other files, by reason.

    Raises:
        UnsupportedMedia: an archive inside the archive.
        InvalidInput: no pictures.
    """
    found = False
    for entry in archive.infolist():
        path = entry_path(entry)
        if entry.is_dir() or (entry.filename.endswith("\\") and not entry.file_size):
            continue
        reason = left_out_by_name(path)
        if reason in _ARCHIVES:
            raise UnsupportedMedia(f"{name}: {str(path)!r} is an archive inside the archive; unpack it first")
        if reason is None and needs_look(path) and not _begins_like_a_picture(archive, entry, name):
            reason = NO_PICTURE
        if reason is not None:
            left_out[reason] += 1
            continue
        found = True
        yield entry, path
    if not found:
        raise InvalidInput(f"{name}: no picture in it: {told(left_out) or 'it is empty'}")


def _begins_like_a_picture(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> bool:
    try:
        with open_entry(archive, entry, name) as file:
            return kind_of(file.read(START_BYTES)) is not None
    except InvalidInput:
        return False


def entry_path(entry: zipfile.ZipInfo) -> PurePosixPath:
    """Return the path of an entry in the archive.

    Some programs for Windows write backslashes between folders, and some others names in UTF-8 without the flag that
    says so.
    """
    name = entry.filename
    if not entry.flag_bits & _UTF8_FLAG:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return PurePosixPath(name.replace("\\", "/"))


class EntryFile:
    """An entry as it is unpacked."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes. Raises InvalidInput."""
        with _damage(self._name):
            return self._file.read(count)


@contextmanager
def open_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> Iterator[EntryFile]:
    """Unpack one entry as it is read.

    Raises:
        TooLarge: it has the shape of a zip bomb.
        InvalidInput: it is damaged.
    """
    if entry.file_size > max(_BOMB_FREE_BYTES, _BOMB_RATIO * entry.compress_size):
        raise TooLarge(
            f"{name}: the entry {entry.filename!r} grows more than {_BOMB_RATIO} times when unpacked: a zip bomb?"
        )
    what = f"{name}: the entry {entry.filename!r}"
    with _damage(what):
        file = archive.open(entry)
    with file:
        yield EntryFile(file, what)


def read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, *, max_bytes: int) -> bytes:
    """Unpack one entry; never more than its directory says.

    Raises:
        TooLarge: it has more than `max_bytes`, or the shape of a zip bomb.
        InvalidInput: it is damaged.
    """
    if entry.file_size > max_bytes:
        raise TooLarge(f"{name}: the entry {entry.filename!r} has {entry.file_size} bytes; {max_bytes} are accepted")
    with open_entry(archive, entry, name) as file:
        data = file.read(entry.file_size)
        if len(data) == entry.file_size and not file.read(1):
            return data
    raise InvalidInput(f"{name}: the entry {entry.filename!r} has another length than the directory says")


@contextmanager
def _damage(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # as above
        raise InvalidInput(f"{what} is damaged ({exc})") from exc


def _count(file: IO[bytes], sought: bytes) -> int:
    found, end = 0, b""
    file.seek(0)
    while piece := file.read(1024**2):
        piece = end + piece
        found += piece.count(sought)
        end = piece[1 - len(sought) :]
    return found


def _check(entry: zipfile.ZipInfo, name: str) -> None:
    filename = entry.filename
    path = entry_path(entry)
    # A drive letter means a path to some programs, and to no honest one in a zip.
    if path.is_absolute() or ".." in path.parts or filename[1:2] == ":" or not path.parts:
        raise InvalidInput(f"{name}: the entry {filename!r} leads outside the archive")
    if "\0" in entry.orig_filename:  # the library reads the name up to there, other programs may not
        raise InvalidInput(f"{name}: the name {entry.orig_filename[:64]!r} of an entry holds a zero byte")
    if entry.compress_type not in _METHODS:
        raise UnsupportedMedia(
            f"{name}: the entry {filename!r} is compressed by method {entry.compress_type}; "
            "0 (stored) and 8 (deflated) are read"
        )
    if entry.flag_bits & 0x1:
        raise InvalidInput(f"{name}: the entry {filename!r} is encrypted")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise InvalidInput(f"{name}: the entry {filename!r} is a link")
