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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tierkit.errors import DataError, TooLarge

__all__ = ["ImageWriter", "InputFiles", "Pixels"]

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

    @contextmanager
    def create(self, *, max_images: int) -> Iterator[ImageWriter]:
        """A writer for a new file, which `keep` names; without that nothing stays behind. Blocks."""
        partial = self.folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        try:
            with partial.open("xb") as file:
                yield ImageWriter(file, self.shape, max_images, "one job; split it into several")
        finally:
            partial.unlink(missing_ok=True)

    def keep(self, writer: ImageWriter) -> str:
        """Make a file durable under the name of its content, held once; returns that sha256."""
        sha256 = writer.sha256
        writer.file.flush()
        os.fsync(writer.file.fileno())
        with self._lock:  # not between a `release` of the same content and its removal
            self._holders[sha256] += 1
            Path(writer.file.name).rename(self.path(sha256))
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must survive a power failure
        finally:
            os.close(folder)
        return sha256

    def hold(self, sha256: str) -> None:
        """Keep a file until `release` has been called as often."""
        with self._lock:
            self._holders[sha256] += 1

    def release(self, sha256: str) -> None:
        """Undo one `hold` (or `keep`); the last one removes the file. A mapped file stays readable
        until it is let go."""
        with self._lock:
            self._holders[sha256] -= 1
            if self._holders[sha256] <= 0:
                del self._holders[sha256]
                self.path(sha256).unlink(missing_ok=True)

    def remove_strays(self) -> None:
        """Remove the files that no job holds: of jobs that ended while no scheduler was running."""
        with self._lock:
            for path in self.folder.glob(f"*{_SUFFIX}"):
                if path.stem not in self._holders:
                    path.unlink(missing_ok=True)

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


class ImageWriter:
    """Writes raw images to a file, one after the other.

    Args:
        file: takes them.
        shape: (height, width, 3) of each.
        max_images: in total.
        what: takes no more than these, and what to do then.
    """

    def __init__(self, file: IO[bytes], shape: tuple[int, int, int], max_images: int, what: str) -> None:
        self.file = file
        self.shape = shape
        self.images = 0
        """Received so far."""
        self._max_images = max_images
        self._what = what
        # The shape is part of the content: the same bytes cut into other images are another input.
        self._hash = hashlib.sha256(repr(shape).encode())

    @property
    def sha256(self) -> str:
        """Of what has been written."""
        return self._hash.hexdigest()

    def append(self, images: Pixels) -> None:
        """Add [n, height, width, 3] images of the right size. Raises TooLarge beyond the limit."""
        self.check_room(len(images))
        view = np.ascontiguousarray(images).data.cast("B")
        self.file.write(view)
        self._hash.update(view)
        self.images += len(images)

    def check_room(self, images: int) -> None:
        """Raises TooLarge when this number of images more is too many."""
        if self.images + images > self._max_images:
            raise TooLarge(f"more than {self._max_images} images in {self._what}")
