"""Files of a worker on its disk. A file gets its name when it is complete and its hash is right."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from tierkit.copies.files import FileParts, sha256_of
from tierkit.copies.serving import bounded
from tierkit.errors import InvalidAnswer, NotFound, SetupError, Unavailable

__all__ = ["Store"]

_LINGER_S = 10.0
"""Seconds until a file that is not needed any more is dropped. Meanwhile, workers that copy it from here learn of
that."""
_WAIT_S = 10.0
"""Wait for a chunk that is on its way here."""

Write = Callable[[int, bytes, int], int]


class Store:
    """Files of one worker, in a separate folder. Files of an earlier process there are checked, and used.

    Args:
        folder: made where it is missing.
        files: that there may be, by their numbers.
        what: one of them, in messages.
        write: `os.pwrite`, or a test's substitute.

    Raises:
        SetupError: the folder cannot be used.
    """

    def __init__(
        self, folder: Path, files: Sequence[FileParts], *, what: str = "the file", write: Write = os.pwrite
    ) -> None:
        self.folder, self.files = folder, files
        self._what, self._write = what, write
        self._numbers = {entry.sha256: number for number, entry in enumerate(files)}
        self._whole: set[int] = set()
        self._here: dict[int, set[int]] = {}
        """Chunks that are here, by the files that are not whole."""
        self._retired: dict[int, float] = {}
        """Files to be dropped, and since when: others may still be copying them from here."""
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        """Held for one chunk at a time, so that none is written once its file is given up."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            for path in folder.iterdir():
                self._find(path)
        except OSError as exc:
            raise SetupError(f"cannot use the folder {folder}: {exc.strerror}") from exc

    @property
    def holds(self) -> tuple[int, ...]:
        """Whole files."""
        return tuple(sorted(self._whole - self._retired.keys()))

    def room(self) -> int:
        """Files that fit on the disk in addition to those to be dropped; the others that are here count."""
        largest = max(entry.bytes for entry in self.files)
        # Of each copy one chunk may be on its way to the disk. That it counts as free also keeps a copy that has begun
        # from being taken for one that does not fit, where the file system needs some bytes for itself.
        free = shutil.disk_usage(self.folder).free + sum(
            min((len(chunks) + 1) * self.files[number].chunk_bytes, largest)
            for number, chunks in tuple(self._here.items())
            if number not in self._retired
        )
        return min(len(self.files), len(self.holds) + free // largest)

    def lacks(self, file: int) -> list[int]:
        """Chunks of a file that are not here."""
        if file in self._whole:
            return []
        here = self._here.get(file, set())
        return [number for number in range(len(self.files[file].chunks)) if number not in here]

    def share(self, file: int) -> float:
        """Fraction of a file that is here."""
        return 1 - len(self.lacks(file)) / len(self.files[file].chunks)

    async def put(self, file: int, number: int, content: bytes) -> None:
        """Keep a chunk; the last one makes the file whole.

        Raises:
            InvalidAnswer: it has another hash than the manifest says; nothing is kept of it.
            SetupError: the disk is full, or fails; nothing is left of the file, so that there is room again.
        """
        if await asyncio.to_thread(sha256_of, content) != self.files[file].chunks[number]:
            raise InvalidAnswer(f"chunk {number} of {self._what} is not what the manifest says")
        start = self.files[file].chunk(number).start
        async with self._writing:
            await asyncio.to_thread(self._keep, file, content, start)
            here = self._here.setdefault(file, set())
            here.add(number)
            if len(here) == len(self.files[file].chunks):
                await asyncio.to_thread(self._finish, file)
                self._whole.add(file)
                del self._here[file]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, sha256: str, span: range | None) -> tuple[bytes, int]:
        """Return some bytes of a file, by default all, and its length. Waits for bytes that are on their way here.

        Raises:
            InvalidInput: see `bounded`.
            NotFound: the file is not here, and is not being copied.
            Unavailable: the bytes have not arrived for a long time.
        """
        number = self._numbers.get(sha256)
        deadline = asyncio.get_running_loop().time() + _WAIT_S
        while True:
            if number is None or not (number in self._whole or number in self._here):
                raise NotFound("this machine has no such file")
            size, each, changed = self.files[number].bytes, self.files[number].chunk_bytes, self._changed
            wanted = bounded(span, size=size, chunk_bytes=each)
            chunks = range(wanted.start // each, (wanted.stop - 1) // each + 1)
            if number in self._whole or self._here[number].issuperset(chunks):
                # A copy that has just ended has its last name a moment before this is known here.
                paths = (self.path(number),) if number in self._whole else (self._half(number), self.path(number))
                return await asyncio.to_thread(_read, paths, wanted), size
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                raise Unavailable("these bytes are still on their way here", retry_after_s=1.0) from None

    def begin(self, file: int) -> None:
        """A file is about to be copied: others may ask for it."""
        self._retired.pop(file, None)
        if file not in self._whole:
            self._here.setdefault(file, set())

    def content(self, file: int) -> bytes:
        """All of a whole file.

        Raises:
            NotFound: it is not here.
            SetupError: it cannot be read.
        """
        if file not in self._whole:
            raise NotFound(f"{self._what} is not here: number {file}")
        try:
            return self.path(file).read_bytes()
        except OSError as exc:
            raise SetupError(f"cannot read {self.path(file)}: {exc.strerror}") from exc

    def keep_only(self, files: Collection[int], now: float) -> None:
        """Offer all other files no longer, and drop them some seconds later."""
        for number in (self._whole | self._here.keys()).difference(files):
            self._retired.setdefault(number, now)
        for number in list(self._retired):
            if number in files:
                del self._retired[number]
            elif now - self._retired[number] >= _LINGER_S:
                del self._retired[number]
                self._whole.discard(number)
                self._here.pop(number, None)
                self.path(number).unlink(missing_ok=True)
                self._half(number).unlink(missing_ok=True)

    def path(self, number: int) -> Path:
        """Path of a file once it is whole."""
        return self.folder / self.files[number].sha256

    def _half(self, number: int) -> Path:
        return self.folder / f"{self.files[number].sha256}.part"

    def _find(self, path: Path) -> None:
        """Use a file of an earlier process."""
        number = self._numbers.get(path.name.removesuffix(".part"))
        if number is None or not path.is_file():
            return
        entry = self.files[number]
        if path.suffix:
            with path.open("rb") as content:
                chunks = iter(lambda: content.read(entry.chunk_bytes), b"")
                here = {
                    each
                    for each, (chunk, sha256) in enumerate(zip(chunks, entry.chunks, strict=False))
                    if sha256_of(chunk) == sha256
                }
            if len(here) < len(entry.chunks):
                self._here[number] = here
            else:
                path.unlink()  # it would be whole, but for its name: rare enough to copy it once more
        elif _digest(path) == entry.sha256:
            self._whole.add(number)
        else:
            path.unlink()

    def _keep(self, number: int, content: bytes, start: int) -> None:
        path = self._half(number)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                written = 0
                while written < len(content):
                    written += self._write(file, content[written:], start + written)
            finally:
                os.close(file)
        except OSError as exc:
            raise self._given_up(number, exc) from exc

    def _finish(self, number: int) -> None:
        path = self._half(number)
        try:
            if _digest(path) != self.files[number].sha256:
                raise SetupError(f"{path} is not what was written to it: check the disk")
            file = os.open(path, os.O_RDWR)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            path.replace(self.path(number))
        except OSError as exc:
            raise self._given_up(number, exc) from exc

    def _given_up(self, number: int, error: OSError) -> SetupError:
        path = self._half(number)
        self._here.pop(number, None)
        path.unlink(missing_ok=True)
        return SetupError(
            f"cannot keep {self._what} in {self.folder}: {error.strerror}; nothing of it is left. "
            "Make room there, or name another folder with --cache"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(paths: Sequence[Path], span: range) -> bytes:
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:
            return os.pread(file.fileno(), len(span), span.start)
    raise NotFound("this machine has no such file")
