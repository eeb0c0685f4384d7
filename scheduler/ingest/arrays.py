"""Images from .npy and .npz files. Blocks: call it in a thread.

Only the header is interpreted, by numpy's own parser, which evaluates literals and nothing else; object arrays, whose
data would be a pickle, are refused by their header. Sizes are checked before memory is taken, and images are read a
few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from models.pictures import check_size, is_large
from scheduler.ingest.inputs import ImageWriter, Pixels
from tierkit.errors import InvalidInput, MalformedMessage, TooLarge, UnsupportedMedia

__all__ = [
    "ArrayHeader",
    "ReadableFile",
    "append_images",
    "check_images",
    "read_header",
    "read_npy_images",
    "read_small",
]

_AT_ONCE_BYTES = 4 * 1024**2
_MAX_SMALL_BYTES = 64 * 1024**2
_MAX_CODE_POINT = 0x10FFFF


class ReadableFile(Protocol):
    """A file, or an entry of an archive."""

    def read(self, count: int = ..., /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """dtype and shape of an array, before any of its data is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def bytes(self) -> int:
        # Python integers: a made-up shape must not overflow into a small product.
        return self.dtype.itemsize * math.prod(self.shape)


def read_header(file: ReadableFile, name: str) -> ArrayHeader:
    """Read the header of a .npy stream and leave `file` at the first byte of data.

    Raises:
        UnsupportedMedia: not a .npy file.
        MalformedMessage: a nonsensical header.
        InvalidInput: an object array, or an array in Fortran order.
    """
    try:
        version = npy.read_magic(file)
    except ValueError as exc:
        raise UnsupportedMedia(f"{name}: not a .npy file") from exc
    if version != (1, 0):  # later ones have headers of up to 4 GB
        raise UnsupportedMedia(f"{name}: .npy version {version[0]}.{version[1]} is not read here; save it as 1.0")
    try:
        shape, fortran, dtype = npy.read_array_header_1_0(file)
    except InvalidInput:
        raise
    except Exception as exc:
        # Python's own parser reads the literal: it fails with errors of a dozen classes, MemoryError among them.
        # What they say is about Python, and may name its objects and their addresses.
        raise MalformedMessage(f"{name}: damaged .npy header; it must hold descr, fortran_order and shape") from exc
    if dtype.hasobject:
        raise InvalidInput(
            f"{name}: an array of Python objects; it would have to be unpickled, which is never done here"
        )
    if any(length < 0 for length in shape):
        raise InvalidInput(f"{name}: a negative length in its shape {list(shape)}")
    if fortran and len(shape) > 1:
        raise InvalidInput(f"{name}: in Fortran order; save numpy.ascontiguousarray(...) of it")
    return ArrayHeader(shape, dtype)


def check_images(header: ArrayHeader, name: str, *, max_pixels: int) -> None:
    """Check that this is an array of images. Raises InvalidInput or TooLarge."""
    if header.dtype != np.uint8:
        raise InvalidInput(f"{name}: images must be uint8, not {header.dtype}")
    if len(header.shape) != 4 or header.shape[3] != 3:
        raise InvalidInput(f"{name}: images must have the shape [n, height, width, 3], not {list(header.shape)}")
    if 0 in header.shape[1:]:
        raise InvalidInput(f"{name}: images without pixels {list(header.shape)}")
    check_size(header.shape[1], header.shape[2], name, max_pixels=max_pixels)


def read_npy_images(
    file: ReadableFile, header: ArrayHeader, name: str, writer: ImageWriter, *, max_bytes: int
) -> Generator[bool, None, dict[int, tuple[int, int]]]:
    """Append all images of a .npy stream, from the end of its header on; returns the sizes of the images that are
    resized.

    It is a generator with turns; see `scheduler.ingest.turns`.

    Raises:
        TooLarge: more images or bytes than may be.
        InvalidInput: fewer or more bytes than the header gives.
    """
    if header.bytes > max_bytes:
        raise TooLarge(f"{name}: {header.bytes} bytes of pixels; {max_bytes} are accepted")
    image_bytes = math.prod(header.shape[1:])

    def read(start: int, end: int) -> Pixels:
        data = _read_exactly(file, (end - start) * image_bytes, name)
        return np.frombuffer(data, np.uint8).reshape(-1, *header.shape[1:])

    resized = yield from append_images(header.shape, read, writer)
    _expect_end(file, name)
    return resized


def append_images(
    shape: tuple[int, ...], read: Callable[[int, int], Pixels], writer: ImageWriter
) -> Generator[bool, None, dict[int, tuple[int, int]]]:
    """Append images of this shape [n, h, w, 3]; returns the sizes of the images that are resized.

    It is a generator with turns; see `scheduler.ingest.turns`.

    Args:
        read: returns the images from one number to another.
    """
    count, height, width = shape[:3]
    writer.check_room(count)
    at_once = max(1, _AT_ONCE_BYTES // (height * width * 3))
    resized: dict[int, tuple[int, int]] = {}
    for start in range(0, count, at_once):
        yield is_large(height, width)
        end = min(count, start + at_once)
        if not writer.keeps((height, width)):
            resized |= dict.fromkeys(range(writer.images, writer.images + end - start), (height, width))
        writer.append(read(start, end))
    return resized


def read_small(file: ReadableFile, name: str) -> NDArray[np.generic]:
    """A whole array of labels or names. Raises InvalidInput or TooLarge."""
    header = read_header(file, name)
    if header.bytes > _MAX_SMALL_BYTES:
        raise TooLarge(f"{name}: {header.bytes} bytes; {_MAX_SMALL_BYTES} are accepted")
    data = _read_exactly(file, header.bytes, name)
    _expect_end(file, name)
    try:
        array = np.frombuffer(data, header.dtype).reshape(header.shape)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidInput(f"{name}: no array of labels or names") from exc
    if header.dtype.kind == "U":
        points = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(header.dtype.byteorder))
        if points.size and int(points.max()) > _MAX_CODE_POINT:
            raise InvalidInput(f"{name}: damaged text")
    return array


def _read_exactly(file: ReadableFile, count: int, name: str) -> bytes:
    parts = []
    while count:
        part = file.read(count)
        if not part:
            raise InvalidInput(f"{name}: cut short: its header promises {count} bytes more")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _expect_end(file: ReadableFile, name: str) -> None:
    if file.read(1):
        raise InvalidInput(f"{name}: more bytes than its header says")
