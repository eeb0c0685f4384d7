"""The weights files of a node: given folders are searched first, then a cache that it fills from another node."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import anyio

from models.manifest import WeightsFile
from tierkit.atomic import made_folder, write_atomically
from tierkit.errors import NoRoom, SetupError, WeightsError

__all__ = ["ModelStore"]

log = logging.getLogger(__name__)

_MOST_IN_MEMORY = 64 << 20
"""Bytes of a file that are kept in memory while it is fetched."""

Fetch = Callable[[str, str], AsyncIterator[bytes]]
"""`fetch(name, sha256)` yields the bytes of a weights file."""


class ModelStore:
    """Finds weights files, and fetches those that are missing.

    Args:
        folders: searched in order; never written.
        cache: searched last; fetched files are kept here under their sha256.
        others: searched after the folders, and never written: wrong files in them are ignored, because they may belong
            to another model set.
    """

    def __init__(self, folders: Sequence[Path], cache: Path, *, others: Sequence[Path] = ()) -> None:
        self._folders = tuple(folders)
        self._others = tuple(others)
        self._cache = cache

    def find(self, entry: WeightsFile) -> Path | None:
        """Path of the entry's file with the right sha256, or None. A damaged file in the cache counts as absent.

        Raises:
            WeightsError: a given folder has the file, but damaged or unreadable. It is a person's to mend: another
                one is not taken in its place.
        """
        for folder in self._folders:
            path = folder / entry.file
            found = _digest(path)
            if found == entry.sha256:
                return path
            if found is not None:
                raise WeightsError(
                    f"{path} is damaged, or of another version: its sha256 is {found}, in the manifest {entry.sha256}"
                )
        candidates = (*(folder / entry.file for folder in self._others), self._cached(entry))
        return next((path for path in candidates if _digest(path) == entry.sha256), None)

    async def obtain(self, entry: WeightsFile, fetch: Fetch) -> Path:
        """Return the path of the entry's file. A missing file is fetched, verified and kept.

        Raises:
            WeightsError: the fetched file differs from the manifest, and nothing is kept; or `find` has raised it.
            NoRoom: the cache cannot be written.
        """
        found = await anyio.to_thread.run_sync(self.find, entry)
        if found is not None:
            return found
        path = self._cached(entry)
        with _keeping():
            damaged = await anyio.to_thread.run_sync(_discard, path)
            made_folder(self._cache)
        if damaged:
            log.warning("a damaged copy in the cache was thrown away", extra={"model": entry.name, "file": str(path)})
        digest, size = hashlib.sha256(), 0
        # Without a name until it is verified: no wrong byte ever reaches the cache.
        with tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY, dir=str(self._cache)) as kept:
            async for block in fetch(entry.name, entry.sha256):
                size += len(block)
                if size > entry.size_bytes:
                    raise WeightsError(
                        f"the fetched weights of {entry.name!r} are longer than the {entry.size_bytes} bytes expected"
                    )
                digest.update(block)
                with _keeping():
                    kept.write(block)
            if digest.hexdigest() != entry.sha256:
                raise WeightsError(
                    f"the fetched weights of {entry.name!r} differ from the manifest: {size} bytes with sha256 "
                    f"{digest.hexdigest()}, expected {entry.size_bytes} with {entry.sha256}"
                )
            with _keeping():
                kept.seek(0)
                await anyio.to_thread.run_sync(write_atomically, path, kept)
        return path

    def adopt(self, entry: WeightsFile, path: Path) -> None:
        """Move a file that was fetched otherwise into the cache, if it is the entry's.

        Raises:
            WeightsError: it cannot be read.
            NoRoom: the cache cannot be written.
        """
        cached = self._cached(entry)
        if path == cached or _digest(path) != entry.sha256:
            return
        with _keeping():
            made_folder(cached.parent)
            path.replace(cached)

    def _cached(self, entry: WeightsFile) -> Path:
        # One folder per digest: two versions of a network never overwrite each other.
        return self._cache / entry.sha256 / entry.file


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    """Raise NoRoom for all that keeps a file out of the cache."""
    try:
        yield
    except (SetupError, OSError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise NoRoom(f"cannot keep the weights that are fetched: {why}; make room, or name another --cache") from exc


def _digest(path: Path) -> str | None:
    """Return the digest of a file; None if there is no such file. Raises WeightsError if it cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise WeightsError(f"cannot read the weights file {path}: {exc.strerror}") from exc


def _discard(path: Path) -> bool:
    """Remove a file; whether there was one."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise SetupError(f"cannot remove the damaged {path}: {exc.strerror}") from exc
    return True
