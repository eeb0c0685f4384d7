"""The files of networks, each under its sha256: they are added, and never overwritten."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterable, Collection, Iterable, Sequence
from pathlib import Path

from models.manifest import Manifest, WeightsFile
from models.store import ModelStore
from scheduler.store.copies import FileCopies
from tierkit.commandline import NO_ROOM
from tierkit.errors import InvalidInput, NotFound, TooLarge, Unavailable, WeightsError

__all__ = ["NetworkFiles", "files_of"]

_PARTIAL = ".part"
_MOST_BYTES = 2**31
"""Size of the largest ONNX file: its format, protobuf, holds no more."""


def files_of(manifest: Manifest) -> dict[str, WeightsFile]:
    """All files of a manifest, by sha256."""
    parts = (encoder.weights(side) for encoder in manifest.encoders for side in encoder.own_files)
    return {file.sha256: file for file in (*manifest.models, *parts)}


class NetworkFiles:
    """A folder of files.

    Args:
        folder: created when missing; left-overs of writes that a crash cut short are removed.
        others: folders that are searched as well and never written, such as a model set.
        copies: the files for other schedulers; None if no other scheduler shares the database.
    """

    def __init__(self, folder: Path, others: Sequence[Path], copies: FileCopies | None) -> None:
        self._folder = folder
        self._others = others
        self._copies = copies
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for partial in folder.glob(f"*{_PARTIAL}"):
            partial.unlink()

    def path(self, sha256: str) -> Path:
        return self._folder / sha256

    def has(self, file: WeightsFile) -> bool:
        """True if a file seems to be here; it is not read. Blocks."""
        return self.path(file.sha256).is_file() or self._elsewhere(file) is not None

    async def find(self, file: WeightsFile) -> Path:
        """The path of a file, verified.

        Raises:
            NotFound: it is not here, or damaged.
            Unavailable: the database does not answer.
        """
        found = await asyncio.to_thread(self._verified, file)
        if found is None and self._copies is not None:
            await self._copies.fetch(file.sha256, self.path(file.sha256))
            found = await asyncio.to_thread(self._verified, file)
        if found is None:
            raise NotFound(f"the file of {file.name!r} with sha256 {file.sha256} is not here, or damaged")
        return found

    def _verified(self, file: WeightsFile) -> Path | None:
        path = self.path(file.sha256)
        with contextlib.suppress(OSError), path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256:
                return path
        return self._elsewhere(file)

    def _elsewhere(self, file: WeightsFile) -> Path | None:
        for other in self._others:
            with contextlib.suppress(WeightsError):
                if (found := ModelStore([], other, others=[other]).find(file)) is not None:
                    return found
        return None

    async def receive(self, sha256: str, content: AsyncIterable[bytes]) -> bool:
        """Take in a file; returns False if it was here already.

        Raises:
            InvalidInput: the content has another digest; nothing is kept.
            TooLarge: it is larger than any network.
            Unavailable: there is no room for it.
        """
        known = self.path(sha256).is_file()
        partial = self._folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        digest, size = hashlib.sha256(), 0
        try:
            with partial.open("xb") as file:
                async for block in content:
                    size += len(block)
                    if size > _MOST_BYTES:
                        raise TooLarge(f"the file of a network has at most {_MOST_BYTES} bytes")
                    digest.update(block)
                    await asyncio.to_thread(file.write, block)
                await asyncio.to_thread(_flush, file.fileno())
            if digest.hexdigest() != sha256:
                raise InvalidInput(f"the file has sha256 {digest.hexdigest()}, not {sha256}: it changed on the way")
            partial.replace(self.path(sha256))
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            raise Unavailable(f"no room for a network of {size} bytes or more: {exc.strerror}") from exc
        finally:
            partial.unlink(missing_ok=True)
        if self._copies is not None:
            await self._copies.save(sha256, self.path(sha256))
        return not known

    async def keep(self, manifest: Manifest) -> None:
        """Copy the files of a model set in one of the other folders, which may change."""
        for file in files_of(manifest).values():
            path = self.path(file.sha256)
            if not path.is_file() and (found := await asyncio.to_thread(self._elsewhere, file)) is not None:
                await asyncio.to_thread(_copy, found, path)
            if self._copies is not None and path.is_file():
                await self._copies.save(file.sha256, path)

    def unused(self, wanted: Collection[str]) -> dict[str, int]:
        """The size of each file that is here and not wanted, by sha256. Blocks."""
        there: Iterable[Path] = self._folder.iterdir()
        return {path.name: path.stat().st_size for path in there if path.suffix != _PARTIAL and path.name not in wanted}

    def remove(self, sha256: str) -> None:
        """Remove a file and its copy."""
        self.path(sha256).unlink(missing_ok=True)
        if self._copies is not None:
            self._copies.remove(sha256)


def _copy(source: Path, target: Path) -> None:
    """Copy a file: a link would change with a file that is written in place."""
    partial = target.with_name(f"{secrets.token_hex(8)}{_PARTIAL}")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        if exc.errno not in NO_ROOM:
            raise
        raise Unavailable(f"no room for a copy of {source}: {exc.strerror}") from exc


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)
