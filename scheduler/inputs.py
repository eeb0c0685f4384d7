"""The pixels of unfinished jobs: raw uint8 files beside the database, named by their content.

A file appears under its name only when it is complete and on the disk (written beside, fsync, rename), so whatever the
moment of a crash, a name that exists holds what it says. Two jobs with the same images share a file. Dispatch maps
the file into memory: a task's body is a view of it, and pixels are never copied in this process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierkit.errors import DataError, TooLarge

__all__ = ["InputFiles", "InputWriter", "Pixels"]

Pixels = NDArray[np.uint8]
"""[n, height, width, 3], height and width those of the networks."""

_SUFFIX = ".u8"
_PARTIAL = ".part"


class InputFiles:
    """The folder of input files.

    Args:
        folder: created when missing; left-overs of writes that a crash cut short are removed.
        shape: (height, width, 3) of the networks' input.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        self._folder = folder
        self.shape = shape
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"*{_PARTIAL}"):
            partial.unlink()

    def create(self, *, max_images: int) -> InputWriter:
        """A writer for a new file; it blocks, so use it in a thread."""
        return InputWriter(self._folder, self.shape, max_images)

    def open(self, sha256: str, images: int) -> Pixels:
        """The pixels of a file, mapped into memory and read-only.

        Raises:
            DataError: the file is gone or has another size.
        """
        path = self._folder / f"{sha256}{_SUFFIX}"
        expected = images * int(np.prod(self.shape))
        try:
            found = path.stat().st_size
        except OSError as exc:
            raise DataError(f"the input file {path} of an unfinished job is gone: {exc.strerror}") from exc
        if found != expected:
            raise DataError(f"the input file {path} has {found} bytes instead of {expected}")
        return np.memmap(path, np.uint8, "r", shape=(images, *self.shape)).view(np.ndarray)

    def keep_only(self, sha256s: Collection[str]) -> None:
        """Remove all files but these. Mapped ones stay readable until they are let go."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem not in sha256s:
                path.unlink(missing_ok=True)


class InputWriter:
    """Receives images one after the other; `finish` gives the file its name. Left without it, nothing stays behind."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], max_images: int) -> None:
        self.shape = shape
        self.images = 0
        self._max_images = max_images
        self._folder = folder
        self._path = folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        self._file = self._path.open("xb")
        # The shape is part of the content: the same bytes cut into other images are another input.
        self._hash = hashlib.sha256(repr(shape).encode())

    def append(self, images: Pixels) -> None:
        """Add [n, height, width, 3] images of the right size. Raises TooLarge beyond the limit."""
        if images.shape[1:] != self.shape or images.dtype != np.uint8:
            raise ValueError(f"images of {images.dtype} {images.shape[1:]} where uint8 {self.shape} is written")
        self.check_room(len(images))
        view = np.ascontiguousarray(images).data.cast("B")
        self._file.write(view)
        self._hash.update(view)
        self.images += len(images)

    def check_room(self, images: int) -> None:
        """Raises TooLarge when so many more images are more than a job may have."""
        if self.images + images > self._max_images:
            raise TooLarge(f"more than {self._max_images} images in one job; split it into several")

    def finish(self) -> str:
        """Make the file durable under the name of its content; returns that sha256."""
        sha256 = self._hash.hexdigest()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._folder / f"{sha256}{_SUFFIX}")
        folder = os.open(self._folder, os.O_RDONLY)
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
