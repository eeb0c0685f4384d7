"""Input files: the pictures of an unfinished job in one file next to the database, named by its content.

Small pictures are kept in the pixels that the networks take, larger ones in the files that the user sent. A file
appears under its name only when it is complete and on the disk (written under another name, fsync, rename). So after a
crash, every existing name holds what it names. Two jobs with the same images share a file. Dispatch maps it into
memory: pixels of a task's body are a view of it.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.manifest import Fit
from models.pictures import Picture, resized
from scheduler.core.job import JobImages
from tierkit.errors import DataError, TooLarge
from tierkit.tensors import Array

__all__ = [
    "FileWriter",
    "ImageWriter",
    "InputFiles",
    "PixelWriter",
    "Pixels",
    "images_in",
    "remove_inputs",
]

Pixels = NDArray[np.uint8]
"""[n, height, width, 3]."""

_SUFFIX = ".u8"
_PARTIAL = ".part"
_TASK_BYTES = 32 * 1024**2
"""Most bytes of the files of a task; by default, a node takes 64 MiB in a request."""
_PLACE = np.dtype("<u8")


class _Files:
    """Files one after the other, and behind them where each begins and the last one ends.

    Args:
        content: all of that, mapped into memory.
        count: number of images.
    """

    def __init__(self, content: NDArray[np.uint8], count: int) -> None:
        table = (count + 1) * _PLACE.itemsize
        self._content = content
        self._places = np.frombuffer(content[len(content) - table :].tobytes(), _PLACE).tolist() if table else []
        if len(content) < table or self._places != sorted(self._places) or self._places[-1] != len(content) - table:
            raise DataError(f"these are not {count} files and their places")

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, which: slice, /) -> Array:
        chosen = range(len(self))[which]
        files = np.empty(len(chosen), object)
        for at, number in enumerate(chosen):
            files[at] = self._content[self._places[number] : self._places[number + 1]].tobytes()
        return files


def images_in(content: NDArray[np.uint8], count: int, fit: Fit | None) -> JobImages:
    """Return the images that a writer has written.

    Args:
        fit: input size of the networks if pixels are kept; None if files are kept.

    Raises:
        DataError: the content does not fit.
    """
    if fit is None:
        return _Files(content, count)
    expected = count * fit.height * fit.width * 3
    if len(content) != expected:
        raise DataError(f"{len(content)} bytes instead of {expected}")
    return content.reshape(count, fit.height, fit.width, 3)


def remove_inputs(folder: Path) -> None:
    """Remove all input files: their jobs are another scheduler's, and so are these."""
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)


class InputFiles:
    """The folder of input files.

    Args:
        folder: readable only by its owner, created if missing; partial files of writes that a crash cut short are
            removed.
        fit: input size that all networks take; None if files are kept.
    """

    def __init__(self, folder: Path, fit: Fit | None) -> None:
        self.folder = folder
        self.fit = fit
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # one that an older version has made as well
        for partial in folder.glob(f"*{_PARTIAL}"):
            partial.unlink()

    def writer(self, file: IO[bytes], max_images: int, what: str) -> ImageWriter:
        """Writes images to a file; arguments as of `ImageWriter`."""
        return FileWriter(file, max_images, what) if self.fit is None else PixelWriter(file, max_images, what, self.fit)

    @contextmanager
    def create(self, *, max_images: int) -> Iterator[ImageWriter]:
        """A writer for a new file, which `keep` names; without that nothing stays behind. Blocks."""
        partial = self.folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        try:
            with partial.open("xb") as file:
                yield self.writer(file, max_images, "one job (setting max_images); split it into several")
        finally:
            partial.unlink(missing_ok=True)

    def keep(self, writer: ImageWriter) -> str:
        """Make a file durable under the name of its content, held once; returns that sha256."""
        writer.finish()
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

    def release(self, sha256: str) -> bool:
        """Undo one `hold` (or `keep`); the last one removes the file, and returns True. A mapped file stays readable
        until it is let go."""
        with self._lock:
            self._holders[sha256] -= 1
            if self._holders[sha256] <= 0:
                del self._holders[sha256]
                self.path(sha256).unlink(missing_ok=True)
                return True
        return False

    def remove_strays(self) -> None:
        """Remove the files that no job holds: of jobs that ended while no scheduler was running."""
        with self._lock:
            for path in self.folder.glob(f"*{_SUFFIX}"):
                if path.stem not in self._holders:
                    path.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{_SUFFIX}"

    def open(self, sha256: str, images: int) -> JobImages:
        """The images of a file, mapped into memory and read-only.

        Raises:
            DataError: the file is gone or damaged.
        """
        path = self.path(sha256)
        try:
            return images_in(np.memmap(path, np.uint8, "r").view(np.ndarray), images, self.fit)
        except OSError as exc:
            raise DataError(f"the input file {path} of an unfinished job is gone: {exc.strerror}") from exc
        except (DataError, ValueError) as exc:  # an empty file cannot be mapped
            raise DataError(f"the input file {path} is damaged: {exc}") from exc


class ImageWriter(ABC):
    """Writes images to a file, one after the other.

    Args:
        file: takes them.
        max_images: in total.
        what: takes no more than these, and what to do then.
    """

    def __init__(self, file: IO[bytes], max_images: int, what: str) -> None:
        self.file = file
        self.images = 0
        """Received so far."""
        self.largest = 0
        """Bytes of the largest."""
        self._max_images = max_images
        self._what = what
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """sha256 of the content written so far."""
        return self._hash.hexdigest()

    @property
    def images_per_task(self) -> int:
        """Most images that fit the body of one request."""
        return max(1, _TASK_BYTES // max(1, self.largest))

    def check_room(self, images: int) -> None:
        """Raises TooLarge when this number of images more is too many."""
        if self.images + images > self._max_images:
            raise TooLarge(f"more than {self._max_images} images in {self._what}")

    @abstractmethod
    def add(self, picture: Picture, data: bytes | memoryview) -> None:
        """Add a picture from its file. Raises InvalidInput if it is damaged, as far as it is decoded."""

    @abstractmethod
    def append(self, images: Pixels) -> None:
        """Add [n, height, width, 3] images of any size."""

    @abstractmethod
    def skip(self) -> None:
        """Leave the place of an image empty."""

    @abstractmethod
    def keeps(self, size: tuple[int, int]) -> bool:
        """True if a picture of this height and width stays as it is on all its ways."""

    def finish(self) -> None:  # noqa: B027  # pixels need nothing behind them
        """Nothing more comes."""

    def _write(self, content: bytes | memoryview, images: int) -> None:
        self.check_room(images)
        self.file.write(content)
        self._hash.update(content)
        self.images += images
        self.largest = max(self.largest, len(content) // images)


class PixelWriter(ImageWriter):
    """Keeps the pixels that the networks take.

    Args:
        fit: those.
    """

    def __init__(self, file: IO[bytes], max_images: int, what: str, fit: Fit) -> None:
        super().__init__(file, max_images, what)
        self._fit = fit
        # The shape is part of the content: the same bytes cut into other images are another input.
        self._shape = (fit.height, fit.width, 3)
        self._hash.update(repr(self._shape).encode())

    def add(self, picture: Picture, data: bytes | memoryview) -> None:
        self.append(picture.decode(self._fit)[np.newaxis])

    def append(self, images: Pixels) -> None:
        if images.shape[1:] != self._shape:
            images = np.stack([resized(Image.fromarray(image), self._fit) for image in images])
        self._write(np.ascontiguousarray(images).data.cast("B"), len(images))

    def skip(self) -> None:
        self._write(bytes(self._fit.height * self._fit.width * 3), 1)

    def keeps(self, size: tuple[int, int]) -> bool:
        return size == self._shape[:2]


class FileWriter(ImageWriter):
    """Keeps pictures as the files that came; arrays become PNG files."""

    def __init__(self, file: IO[bytes], max_images: int, what: str) -> None:
        super().__init__(file, max_images, what)
        self._places = [0]

    def add(self, picture: Picture, data: bytes | memoryview) -> None:
        self._put(data)

    def append(self, images: Pixels) -> None:
        for image in images:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG", compress_level=1)
            self._put(file.getbuffer())

    def skip(self) -> None:
        self._put(b"")

    def keeps(self, size: tuple[int, int]) -> bool:
        return False

    def finish(self) -> None:
        table = np.array(self._places, _PLACE).tobytes()
        self.file.write(table)
        self._hash.update(table)

    def _put(self, content: bytes | memoryview) -> None:
        self._write(content, 1)
        self._places.append(self._places[-1] + len(content))
