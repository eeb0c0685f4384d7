"""Segments of a worker on its disk. A segment gets its name when it is complete and its hash is right."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tierkit.errors import InvalidAnswer, NotFound, SetupError, Unavailable
from training.data.manifest import Piece, SegmentManifest, decoded, sha256_of
from training.data.serving import bounded

__all__ = ["Store"]

_LINGER_S = 10.0
"""Time until a segment that is no longer needed is dropped. Those who copy it from here learn of that meanwhile."""
_WAIT_S = 10.0
"""Wait for a chunk that is on its way here."""

Write = Callable[[int, bytes, int], int]


class Store:
    """Files of one worker, in a separate folder. Files of an earlier process there are checked, and used.

    Args:
        folder: made where it is missing.
        write: `os.pwrite`, or a test's substitute.

    Raises:
        SetupError: the folder cannot be used.
    """

    def __init__(self, folder: Path, manifest: SegmentManifest, *, write: Write = os.pwrite) -> None:
        self.folder, self.manifest = folder, manifest
        self._write = write
        self._numbers = {entry.sha256: number for number, entry in enumerate(manifest.segments)}
        self._whole: set[int] = set()
        self._here: dict[int, set[int]] = {}
        """Chunks that are here, by the segments that are not whole."""
        self._retired: dict[int, float] = {}
        """Segments to be dropped, and since when: others may still be copying them from here."""
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        """Held for one chunk at a time, so that none is written once its segment is given up."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            for path in folder.iterdir():
                self._find(path)
        except OSError as exc:
            raise SetupError(f"cannot use the folder {folder}: {exc.strerror}") from exc

    @property
    def holds(self) -> tuple[int, ...]:
        """Whole segments."""
        return tuple(sorted(self._whole - self._retired.keys()))

    def room(self) -> int:
        """Segments that fit on the disk in addition to those to be dropped; the others that are here count."""
        largest = max(entry.bytes for entry in self.manifest.segments)
        # Of each copy one chunk may be on its way to the disk. That it counts as free also keeps a copy that has begun
        # from being taken for one that does not fit, where the file system needs some bytes for itself.
        free = shutil.disk_usage(self.folder).free + sum(
            min((len(chunks) + 1) * self.manifest.chunk_bytes, largest)
            for number, chunks in tuple(self._here.items())
            if number not in self._retired
        )
        return min(len(self.manifest.segments), len(self.holds) + free // largest)

    def lacks(self, segment: int) -> list[int]:
        """Chunks of a segment that are not here."""
        if segment in self._whole:
            return []
        here = self._here.get(segment, set())
        return [number for number in range(len(self.manifest.segments[segment].chunks)) if number not in here]

    def share(self, segment: int) -> float:
        """Fraction of a segment that is here."""
        return 1 - len(self.lacks(segment)) / len(self.manifest.segments[segment].chunks)

    async def put(self, segment: int, number: int, content: bytes) -> None:
        """Keep a chunk; the last one makes the segment whole.

        Raises:
            InvalidAnswer: it has another hash than the manifest says; nothing is kept of it.
            SetupError: the disk is full, or fails; nothing is left of the segment, so that there is room again.
        """
        if sha256_of(content) != self.manifest.segments[segment].chunks[number]:
            raise InvalidAnswer(f"chunk {number} of segment {segment} is not what the manifest says")
        start = self.manifest.chunk(segment, number).start
        async with self._writing:
            await asyncio.to_thread(self._keep, segment, content, start)
            here = self._here.setdefault(segment, set())
            here.add(number)
            if len(here) == len(self.manifest.segments[segment].chunks):
                await asyncio.to_thread(self._finish, segment)
                self._whole.add(segment)
                del self._here[segment]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, sha256: str, span: range | None) -> tuple[bytes, int]:
        """Some bytes of a segment, all unless a span is given; and how many there are in all. Bytes that are on their
        way here are waited for.

        Raises:
            InvalidInput: as `bounded`.
            NotFound: it is not here, and is not being copied.
            Unavailable: the bytes have not come for long.
        """
        number = self._numbers.get(sha256)
        deadline = asyncio.get_running_loop().time() + _WAIT_S
        while True:
            if number is None or not (number in self._whole or number in self._here):
                raise NotFound("this worker has no such segment")
            size, changed = self.manifest.segments[number].bytes, self._changed
            wanted = bounded(span, size=size, chunk_bytes=self.manifest.chunk_bytes)
            each = self.manifest.chunk_bytes
            chunks = range(wanted.start // each, (wanted.stop - 1) // each + 1)
            if number in self._whole or self._here[number].issuperset(chunks):
                # A copy that has just ended has its last name a moment before this is known here.
                paths = (self._path(number),) if number in self._whole else (self._half(number), self._path(number))
                return await asyncio.to_thread(_read, paths, wanted), size
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                raise Unavailable("these bytes are still on their way here", retry_after_s=1.0) from None

    def begin(self, segment: int) -> None:
        """A segment is about to be copied: others may ask for it."""
        self._retired.pop(segment, None)
        if segment not in self._whole:
            self._here.setdefault(segment, set())

    def pieces(self, segments: Iterable[int]) -> list[Piece]:
        """The content of whole segments, in this order.

        Raises:
            NotFound: one of them is not here.
            DataError: it is damaged.
            SetupError: it cannot be read.
        """
        found = []
        for number in segments:
            if number not in self._whole:
                raise NotFound(f"segment {number} of the training images is not here")
            try:
                content = self._path(number).read_bytes()
            except OSError as exc:
                raise SetupError(f"cannot read {self._path(number)}: {exc.strerror}") from exc
            found.append(decoded(content, self.manifest))
        return found

    def keep_only(self, segments: Collection[int], now: float) -> None:
        """Offer all other segments no longer, and drop them some seconds later."""
        for number in (self._whole | self._here.keys()).difference(segments):
            self._retired.setdefault(number, now)
        for number in list(self._retired):
            if number in segments:
                del self._retired[number]
            elif now - self._retired[number] >= _LINGER_S:
                del self._retired[number]
                self._whole.discard(number)
                self._here.pop(number, None)
                self._path(number).unlink(missing_ok=True)
                self._half(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / self.manifest.segments[number].sha256

    def _half(self, number: int) -> Path:
        return self.folder / f"{self.manifest.segments[number].sha256}.part"

    def _find(self, path: Path) -> None:
        """Use a file of an earlier process."""
        number = self._numbers.get(path.name.removesuffix(".part"))
        if number is None or not path.is_file():
            return
        entry, content = self.manifest.segments[number], path.read_bytes()
        if path.suffix:
            chunks = enumerate(entry.chunks)
            spans = ((each, self.manifest.chunk(number, each), sha256) for each, sha256 in chunks)
            here = {each for each, span, sha256 in spans if sha256_of(content[span.start : span.stop]) == sha256}
            if len(here) < len(entry.chunks):
                self._here[number] = here
            else:
                path.unlink()  # it would be whole, but for its name: rare enough to copy it once more
        elif sha256_of(content) == entry.sha256:
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
            content = path.read_bytes()
            if sha256_of(content) != self.manifest.segments[number].sha256:
                raise SetupError(f"{path} is not what was written to it: check the disk")
            file = os.open(path, os.O_RDWR)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            path.replace(self._path(number))
        except OSError as exc:
            raise self._given_up(number, exc) from exc

    def _given_up(self, number: int, error: OSError) -> SetupError:
        path = self._half(number)
        self._here.pop(number, None)
        path.unlink(missing_ok=True)
        return SetupError(
            f"cannot keep a segment of the training images in {self.folder}: {error.strerror}; nothing of it is left. "
            "Make room there, or name another folder with --cache"
        )


def _read(paths: Sequence[Path], span: range) -> bytes:
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:
            return os.pread(file.fileno(), len(span), span.start)
    raise NotFound("this worker has no such segment")
