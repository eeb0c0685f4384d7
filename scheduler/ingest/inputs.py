"""The pixels of unfinished jobs: raw uint8 files beside the database, named by their content.

A file appears under its name only when it is complete and on the disk (written beside, fsync, rename), so after
a crash every name that exists holds what it says. Two jobs with the same images share a file. Dispatch maps
the file into memory: a task's body is a view of it, and pixels are never copied in this process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierkit.errors import DataError, TooLarge

__all__ = ["ImageWriter", "InputFiles", "InputWriter", "MemoryWriter", "Pixels"]

Pixels = NDArray[np.uint8]
"""[n, height, width, 3], height and width those of the networks."""

_SUFFIX = ".u8"
_PARTIAL = ".part"


class InputFiles:
    """The folder of input files.

    Args:
        folder: its owner's alone, created when missing; left-overs of writes that a crash cut short are removed.
        shape: (height, width, 3) of the networks' input.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        self.folder = folder
        self.shape = shape
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # one that an older version has made as well
        for partial in folder.glob(f"*{_PARTIAL}"):
            partial.unlink()

    def create(self, *, max_images: int) -> InputWriter:
        """A writer for a new file; it blocks, so use it in a thread."""
        return InputWriter(self, max_images)

    def hold(self, sha256: str) -> None:
        """Keep a file until `release` has been called as often."""
        with self._lock:
            self._holders[sha256] += 1

    def release(self, sha256: str) -> None:
        """Undo one `hold` (or `InputWriter.finish`); the last one removes the file. A mapped file stays readable
        until it is let go."""
        with self._lock:
            self._holders[sha256] -= 1
            if self._holders[sha256] <= 0:
                del self._holders[sha256]
                self.path(sha256).unlink(missing_ok=True)

    def remove_strays(self) -> None:
        """Remove the files that nobody holds: of jobs that ended while nobody was there to clean up."""
        with self._lock:
            for path in self.folder.glob(f"*{_SUFFIX}"):
                if path.stem not in self._holders:
                    path.unlink(missing_ok=True)

    def adopt(self, partial: Path, sha256: str) -> None:
        """Give a complete file its name, and hold it."""
        with self._lock:  # not between a `release` of the same content and its removal
            self._holders[sha256] += 1
            partial.rename(self.path(sha256))

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{_SUFFIX}"

    def open(self, sha256: str, images: int) -> Pixels:
        """The pixels of a file, mapped into memory and read-only.

        Raises:
            DataError: the file is gone or has another size.
        """
        path = self.path(sha256)
        expected = images * int(np.prod(self.shape))
        try:
            found = path.stat().st_size
        except OSError as exc:
            raise DataError(f"the input file {path} of an unfinished job is gone: {exc.strerror}") from exc
        if found != expected:
            raise DataError(f"the input file {path} has {found} bytes instead of {expected}")
        return np.memmap(path, np.uint8, "r", shape=(images, *self.shape)).view(np.ndarray)


class ImageWriter(ABC):
    """Receives images one after the other.

    Args:
        shape: (height, width, 3) of each.
        max_images: in total.
    """

    _bounded = "one job; split it into several"

    def __init__(self, shape: tuple[int, int, int], max_images: int) -> None:
        self.shape = shape
        self.images = 0
        """Received so far."""
        self._max_images = max_images

    def append(self, images: Pixels) -> None:
        """Add [n, height, width, 3] images of the right size. Raises TooLarge beyond the limit."""
        if images.shape[1:] != self.shape or images.dtype != np.uint8:
            raise ValueError(f"images of {images.dtype} {images.shape[1:]} where uint8 {self.shape} is written")
        self.check_room(len(images))
        self._write(images)
        self.images += len(images)

    def check_room(self, images: int) -> None:
        """Raises TooLarge when this number of images more is too many."""
        if self.images + images > self._max_images:
            raise TooLarge(f"more than {self._max_images} images in {self._bounded}")

    @abstractmethod
    def _write(self, images: Pixels) -> None: ...


class MemoryWriter(ImageWriter):
    """A few images, for a request that is answered at once and not stored."""

    _bounded = "one request; submit a job (POST /v1/jobs)"

    def __init__(self, shape: tuple[int, int, int], max_images: int) -> None:
        super().__init__(shape, max_images)
        self._parts: list[Pixels] = []

    def _write(self, images: Pixels) -> None:
        self._parts.append(images)

    def pixels(self) -> Pixels:
        """All images, [n, height, width, 3]."""
        return np.concatenate(self._parts)


class InputWriter(ImageWriter):
    """An input file in the making. `finish` gives the file its name. Left without it, nothing stays behind."""

    def __init__(self, files: InputFiles, max_images: int) -> None:
        super().__init__(files.shape, max_images)
        self._files = files
        self._path = files.folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        self._file = self._path.open("xb")
        # The shape is part of the content: the same bytes cut into other images are another input.
        self._hash = hashlib.sha256(repr(self.shape).encode())

    def _write(self, images: Pixels) -> None:
        view = np.ascontiguousarray(images).data.cast("B")
        self._file.write(view)
        self._hash.update(view)

    def finish(self) -> str:
        """Make the file durable under the name of its content, held once; returns that sha256."""
        sha256 = self._hash.hexdigest()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._files.adopt(self._path, sha256)
        folder = os.open(self._files.folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must survive a power failure
        finally:
            os.close(folder)
        return sha256

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
