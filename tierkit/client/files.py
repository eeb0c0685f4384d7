"""Files that a user hands in: their names in the results, and what is left out of folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkit.errors import InvalidInput
from tierkit.picture_files import SUFFIXES, class_of, pictures_in, told

__all__ = ["File", "Files", "gather", "named_files", "shortened"]

File = str | bytes | os.PathLike[str]

_SHOWN_NAME = 120
_SENT_NAME_BYTES = 1024
"""The scheduler keeps this many characters of a path, from its end; a form has no room for much more."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files to send, in their order."""

    by_name: Mapping[str, Path | bytes]
    """Files by their names in the results, which all differ."""
    classes: tuple[str | None, ...] = ()
    """Name of the folder of each file, which may be its class; None for bytes. For a file below a given folder, it is
    the first folder below the given one, or the given folder itself if all its pictures are directly in it. For a file
    given by itself, it is the folder that holds it."""
    left_out: Mapping[str, int]
    """Number of files of folders that are left out, by reason."""


@dataclass(frozen=True, slots=True)
class _Entry:
    source: Path
    name: str
    """Path below the source."""
    file: Path | bytes


def gather(sources: Sequence[File]) -> Files:
    """Return the files of some sources: each a file, a folder with pictures below it, or encoded bytes.

    A picture's name is its path below its folder, and a file's name is its own. If several sources would give equal
    names, all names begin at the folder that the sources have in common.

    Raises:
        InvalidInput: a source that is not there, a folder without pictures, or a file that is given twice.
    """
    left_out: Counter[str] = Counter()
    entries: list[_Entry] = []
    classes: list[str | None] = []
    for position, source in enumerate(sources):
        if isinstance(source, bytes):
            entries.append(_Entry(Path(), f"image-{position}", source))
            classes.append(None)
            continue
        path = Path(source)
        if not _is_folder(path):
            entries.append(_Entry(path.parent, path.name, path))
            classes.append(path.absolute().parent.name)
            continue
        found, without = pictures_in(path)
        left_out += without
        if not found:
            reasons = told(without) or f"no file ends in {', '.join(SUFFIXES)}"
            raise InvalidInput(f"no picture in {shortened(str(path))}: {reasons}")
        names = [each.relative_to(path).as_posix() for each in found]
        entries += [_Entry(path.parent, name, each) for name, each in zip(names, found, strict=True)]
        folders = [class_of(name) for name in names]
        classes += folders if any(folders) else [path.absolute().name] * len(folders)
    paths = (
        [os.path.realpath(entry.file) for entry in entries if isinstance(entry.file, Path)] if len(sources) > 1 else []
    )
    if twice := _repeated(paths):
        raise InvalidInput(f"given twice: {_few(twice)}")
    names = [entry.name for entry in entries]
    if _repeated(names):
        common = os.path.commonpath([entry.source.absolute() for entry in entries if isinstance(entry.file, Path)])
        names = [
            entry.name if isinstance(entry.file, bytes) else os.path.relpath(os.path.abspath(entry.file), common)
            for entry in entries
        ]
    return Files(by_name=_by_name(names, [entry.file for entry in entries]), classes=tuple(classes), left_out=left_out)


def named_files(files: Mapping[str, File]) -> Files:
    """Files under names of the caller's choice.

    Raises:
        InvalidInput: one that is not there, or is a folder.
    """
    for file in files.values():
        if not isinstance(file, bytes) and _is_folder(Path(file)):
            raise InvalidInput(f"{shortened(str(file))} is a folder: hand it in without a name")
    contents = [file if isinstance(file, bytes) else Path(file) for file in files.values()]
    return Files(by_name=_by_name(list(files), contents), left_out={})


def _by_name(names: Sequence[str], files: Sequence[Path | bytes]) -> dict[str, Path | bytes]:
    sent = [_sent_name(name) for name in names]
    if twice := _repeated(sent):
        raise InvalidInput(f"two files have the same name in the results: {_few(twice)}")
    return dict(zip(sent, files, strict=True))


def _is_folder(path: Path) -> bool:
    try:
        if path.is_dir():
            return True
        if path.is_file():
            return False
    except OSError as exc:
        raise InvalidInput(f"cannot read {shortened(str(path))}: {exc.strerror}") from exc
    raise InvalidInput(f"no such file or folder: {shortened(str(path))}")


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(map(shortened, names[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def shortened(name: str) -> str:
    """A name as a message can bear it: the beginning and the end of a very long one."""
    return name if len(name) <= _SHOWN_NAME else f"{name[: _SHOWN_NAME // 2]}…{name[-_SHOWN_NAME // 2 :]}"


def _sent_name(name: str) -> str:
    """Return the end of a very long name, with bytes outside UTF-8 written like `\\udce9`."""
    return name.encode("utf-8", "backslashreplace")[-_SENT_NAME_BYTES:].decode("utf-8", "ignore")
