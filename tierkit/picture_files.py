"""Finding the pictures in folders and archives, with the reasons for leaving files out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from tierkit.errors import InvalidInput

__all__ = [
    "NO_PICTURE",
    "START_BYTES",
    "SUFFIXES",
    "class_of",
    "kind_of",
    "left_out_by_name",
    "needs_look",
    "pictures_in",
    "told",
]

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".mpo", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"),
    *(".avif", ".heic", ".heif", ".hif"),
)
"""Suffixes of pictures. The first bytes decide for files without a suffix, and for files given by themselves."""

START_BYTES = 64
_STARTS = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "BMP": re.compile(rb"BM.{4}\0{4}", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "AVIF": re.compile(rb".{4}ftyp(.{4})*avi[fs]", re.DOTALL),
    "HEIF": re.compile(rb".{4}ftyp(.{4})*hei[cmsx]", re.DOTALL),
}
"""Formats by Pillow's names, and how their files begin."""

HIDDEN = "hidden"
HIDDEN_FOLDER = "hidden folder, with all that is in it"
NO_PICTURE = "without a suffix, and no picture"
"""Reasons to leave a file out."""
_MOST_KINDS = 8
_NO_SUFFIX = re.compile(r"(\.\d+)?")
_FOLDERS_OF_PROGRAMS = ("__MACOSX", "@eaDir")
"""Folders with copies and small versions of the pictures in the same folder."""


def kind_of(start: bytes | memoryview) -> str | None:
    """Pillow's name of the format of a file that begins so (64 bytes are enough); None for no picture."""
    return next((kind for kind, pattern in _STARTS.items() if pattern.match(bytes(start[:START_BYTES]))), None)


def left_out_by_name(name: PurePosixPath) -> str | None:
    """Return why a file in a folder or an archive is left out, as far as its name shows; None if it is not.

    Args:
        name: below the folder or the root of the archive.
    """
    if any(part.startswith(".") or part in _FOLDERS_OF_PROGRAMS for part in name.parts):
        return HIDDEN
    suffix = name.suffix.lower()
    return None if suffix in SUFFIXES or needs_look(name) else suffix


def needs_look(name: PurePosixPath) -> bool:
    """True if only the first bytes tell if a file is a picture."""
    return _NO_SUFFIX.fullmatch(name.suffix) is not None


def told(left_out: Mapping[str, int]) -> str:
    """One line about what is left out, by reason; "" for nothing."""
    if not (total := sum(left_out.values())):
        return ""
    ranked = Counter(left_out).most_common()
    parts = [f"{count} {reason}" for reason, count in ranked[:_MOST_KINDS]]
    if rest := sum(count for _, count in ranked[_MOST_KINDS:]):
        parts.append(f"{rest} others")
    return f"left out: {total} {'file' if total == 1 else 'files'} ({', '.join(parts)})"


def class_of(name: str) -> str | None:
    """The folder that names the class of a picture: the first one in its name; None for a picture in no folder."""
    folder, slash, _ = name.partition("/")
    return folder if slash else None


def pictures_in(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the pictures below a folder, sorted, and the number of files left out for each reason.

    Links to folders and files are followed. A target is taken once; if it is in the folder itself, then under its own
    name.

    Raises:
        InvalidInput: the folder cannot be read.
    """
    left_out: Counter[str] = Counter()
    found: list[Path] = []
    links: list[Path] = []
    seen: set[tuple[int, int]] = set()
    try:
        os.scandir(folder).close()
    except OSError as exc:
        raise InvalidInput(f"cannot read {folder}: {exc.strerror}") from exc
    for path in _files_below(folder, seen, links, left_out):
        _take(path, found, left_out)
    # Links come after all that is no link.
    targets = {_identity(path) for path in found} if links else set()
    while links:
        following, links = sorted(links), []
        for link in following:
            try:
                if link.is_dir() and _identity(link) in seen:
                    left_out["linked folder that is read already"] += 1
                    continue
                for path in _files_below(link, seen, links, left_out) if link.is_dir() else [link]:
                    if (target := _identity(path)) in targets:
                        left_out["link to a file that is taken"] += 1
                    elif _take(path, found, left_out):
                        targets.add(target)
            except OSError:  # its target is gone, or it leads to itself
                left_out["broken link"] += 1
    return sorted(found), left_out


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _files_below(folder: Path, seen: set[tuple[int, int]], links: list[Path], left_out: Counter[str]) -> Iterator[Path]:
    """Files, folder by folder; links are put aside, and folders noted in `seen`."""
    pending = [folder]
    while pending:
        current = pending.pop()
        try:
            seen.add(_identity(current))
            entries = list(os.scandir(current))
        except OSError:
            left_out["folder that cannot be read"] += 1
            continue
        for entry in entries:
            path = current / entry.name
            if left_out_by_name(PurePosixPath(entry.name)) == HIDDEN:
                left_out[HIDDEN_FOLDER if entry.is_dir(follow_symlinks=False) else HIDDEN] += 1
            elif entry.is_symlink():
                links.append(path)
            elif entry.is_dir():
                pending.append(path)
            else:
                yield path


def _take(path: Path, found: list[Path], left_out: Counter[str]) -> bool:
    """True if a file is a picture; adds it to one or the other."""
    reason = left_out_by_name(PurePosixPath(path.name)) or _why_unfit(path)
    if reason is None:
        found.append(path)
    else:
        left_out[reason] += 1
    return reason is None


def _why_unfit(path: Path) -> str | None:
    """Return why a file whose name is acceptable is left out; None if it is not."""
    if not path.is_file():
        return "no regular file"
    if not os.access(path, os.R_OK):
        return "file that cannot be read"
    if not needs_look(PurePosixPath(path.name)):
        return None
    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
    except OSError:
        return "file that cannot be read"
    return None if kind_of(start) else NO_PICTURE
