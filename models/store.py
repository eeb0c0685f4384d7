"""Where a node finds weights: given folders first, then a cache that it fills from another node."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import anyio

from models.atomic import write_atomically
from models.manifest import ModelEntry
from tierkit.errors import WeightsError

__all__ = ["ModelStore"]

Fetch = Callable[[str, str], AsyncIterator[bytes]]
"""`fetch(name, sha256)` yields the bytes of a weights file."""


class ModelStore:
    """Finds weights files, and fetches those that are missing.

    Args:
        folders: searched in order; never written.
        cache: searched last; fetched files are kept here under their sha256.
    """

    def __init__(self, folders: Sequence[Path], cache: Path) -> None:
        self._folders = tuple(folders)
        self._cache = cache

    def find(self, entry: ModelEntry) -> Path | None:
        """Path of the entry's file with the right sha256, or None. A damaged file counts as absent."""
        for path in (*(folder / entry.file for folder in self._folders), self._cached(entry)):
            if _digest(path) == entry.sha256:
                return path
        return None

    async def obtain(self, entry: ModelEntry, fetch: Fetch) -> Path:
        """Path of the entry's file; fetched, verified and kept where it is missing.

        Raises:
            WeightsError: what was fetched is not the file of the manifest; nothing is kept.
            SetupError: the cache cannot be written.
        """
        found = await anyio.to_thread.run_sync(self.find, entry)
        if found is not None:
            return found
        path = self._cached(entry)
        digest, size = hashlib.sha256(), 0
        # Held in memory until it is verified (tens of megabytes): no wrong byte ever reaches the cache.
        blocks = bytearray()
        async for block in fetch(entry.name, entry.sha256):
            size += len(block)
            if size > entry.size_bytes:
                raise WeightsError(
                    f"the fetched weights of {entry.name!r} are longer than the {entry.size_bytes} bytes expected"
                )
            digest.update(block)
            blocks += block
        if digest.hexdigest() != entry.sha256:
            raise WeightsError(
                f"the fetched weights of {entry.name!r} are not those of the manifest: {size} bytes with sha256 "
                f"{digest.hexdigest()}, expected {entry.size_bytes} with {entry.sha256}"
            )
        await anyio.to_thread.run_sync(write_atomically, path, bytes(blocks))
        return path

    def _cached(self, entry: ModelEntry) -> Path:
        # One folder per digest: two versions of a network never overwrite each other.
        return self._cache / entry.sha256 / entry.file


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None
