"""Thumbnails of pictures."""

from __future__ import annotations

import io
import threading
from collections.abc import Generator

from PIL import Image

from models.pictures import Picture, resized, within
from scheduler.core.job import JobImages
from scheduler.settings import SchedulerSettings

__all__ = ["small_copy", "thumbnail"]

_QUALITY = 80


def thumbnail(
    images: JobImages, index: int, longest: int, limits: SchedulerSettings, stopped: threading.Event
) -> Generator[bool, None, tuple[bytes, str]]:
    """A picture of a job, upright and at most `longest` pixels on its longer side, as a file and its media type; for
    `Turns`. Pixels become a PNG, files a JPEG.

    Args:
        index: one that `images` has.
        stopped: ends the decoding when it is set.

    Raises:
        InvalidInput and its kin: the picture is damaged, which shows here where it was not decoded as it came.
    """
    (image,) = images[index : index + 1]
    if not isinstance(image, bytes):
        file = io.BytesIO()
        height, width, _ = image.shape
        Image.fromarray(resized(Image.fromarray(image), within(height, width, longest))).save(file, "PNG")
        return file.getvalue(), "image/png"
    return (yield from small_copy(image, f"image {index}", longest, limits, stopped))


def small_copy(
    content: bytes, name: str, longest: int, limits: SchedulerSettings, stopped: threading.Event
) -> Generator[bool, None, tuple[bytes, str]]:
    """A picture file, upright and at most `longest` pixels on its longer side, as a JPEG and its media type; for
    `Turns`.

    Args:
        name: names it in messages.
        stopped: ends the decoding when it is set.

    Raises:
        InvalidInput and its kin: the picture is damaged.
    """
    picture = Picture(content, name, max_bytes=limits.max_file_bytes, max_pixels=limits.max_pixels, stopped=stopped)
    yield picture.large
    file = io.BytesIO()
    Image.fromarray(picture.thumbnail(longest)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue(), "image/jpeg"
