"""One image file or array to the pixels that the networks take. Blocks: call it in a thread."""

from __future__ import annotations

import io
import re
import threading
import time

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from scheduler.ingest.inputs import Pixels
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia

__all__ = ["Picture", "check_size", "fit", "is_large"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_WHITE = (255, 255, 255)

_MAX_SIDE = 65_535
"""The bound of JPEG. Resampling takes memory in proportion to the longer side."""

_LARGE_PIXELS = 16 * 1024**2

_PIECE_BYTES = 1024
"""What a decoder is given at a time; before each piece it can be stopped. A scan of a progressive JPEG may have 100
bytes, and goes through all pixels."""

_MAX_SCANS, _MAX_SEGMENTS = 100, 10_000
"""Of a JPEG. A scan goes through all pixels, however few bytes it has; encoders make some ten of them."""

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
"""In front of a segment; what else follows 0xFF belongs to the data of a scan."""

_HEAD_S = 1.0
_S_PER_PIXEL = 200e-9
_S_PER_PNG_PIXEL = 1e-6
"""Processor time that a picture may take: for its head and for its pixels. The slowest honest ones take a tenth. A PNG
goes through its pixels once only, but inflating them may take long."""

_DRAFT = 8
"""A JPEG is decoded at a half to an eighth of its size where this leaves so many times the width and height that are
needed."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation; from 5 on, width and height change places."""


class Picture:
    """One image file whose head has been read.

    Args:
        data: the file.
        name: for messages.
        limits: what it may cost.
        stopped: ends the decoding when it is set.

    Raises:
        UnsupportedMedia: no PNG, JPEG or WebP.
        TooLarge: more bytes, pixels or scans than the limits; found before anything is decoded.
        InvalidInput: damaged or cut short.
    """

    def __init__(
        self, data: bytes | memoryview, name: str, limits: SchedulerSettings, stopped: threading.Event
    ) -> None:
        if len(data) > limits.max_file_bytes:
            raise TooLarge(f"{name}: {len(data)} bytes; one image may have {limits.max_file_bytes}")
        self._name = name
        self._file = _StoppableFile(data, name, stopped)
        self._file.allow(_HEAD_S)
        try:
            self._image = Image.open(self._file, formats=_FORMATS)
        except UnidentifiedImageError:
            if _looks_like_an_image(bytes(data[:12])):
                raise InvalidInput(f"{name}: damaged image (its header cannot be read)") from None
            raise UnsupportedMedia(f"{name}: not a PNG, JPEG or WebP image") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # Pillow's bound; ours is never higher
            raise TooLarge(f"{name}: more pixels than the {limits.max_pixels} that one image may have") from None
        except InvalidInput:
            raise
        except Exception as exc:  # what Pillow's plugins raise on damaged headers is not one family
            raise InvalidInput(f"{name}: damaged image ({exc})") from exc
        width, height = self._image.size
        check_size(height, width, name, max_pixels=limits.max_pixels)
        if self._image.format == "JPEG" and _has_too_many_scans(data):
            raise TooLarge(f"{name}: more than {_MAX_SCANS} scans or {_MAX_SEGMENTS} segments; save it again")
        self.large = is_large(height, width)
        """Whether few should be decoded at a time."""

    def decode(self, shape: tuple[int, int, int]) -> tuple[Pixels, tuple[int, int]]:
        """Decode it to RGB of `shape` (height, width, 3); returns its own height and width as well.

        Upright by its EXIF orientation; first frame of an animation; transparent areas on white; 16-bit values by their
        upper 8 bits; other sizes are resampled (the aspect ratio is not kept, as the networks were trained on squares).

        Raises:
            TooLarge: takes too long.
            InvalidInput: damaged or cut short.
        """
        width, height = self._image.size
        seconds = _S_PER_PNG_PIXEL if self._image.format == "PNG" else _S_PER_PIXEL
        self._file.allow(_HEAD_S + width * height * seconds)
        try:
            with self._image as image:
                image.draft(image.mode, (_DRAFT * shape[1], _DRAFT * shape[0]))
                if image.format != "WEBP":  # which is decoded in one go, and its pixels copied in these pieces
                    image.decodermaxblock = _PIECE_BYTES
                image.load()
                orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
                turned = orientation in _UPRIGHT and orientation > 4
                # Turned at the end: it is small then, and a large one need not be copied.
                size = (shape[0], shape[1]) if turned else (shape[1], shape[0])
                opaque = _opaque(image)
                if opaque.size != size:
                    opaque = opaque.resize(size, Image.Resampling.BICUBIC)
                if orientation in _UPRIGHT:
                    opaque = opaque.transpose(_UPRIGHT[orientation])
                pixels = np.asarray(opaque.convert("RGB"))
        except InvalidInput:
            raise
        except Exception as exc:  # as above, for damaged or truncated pixel data
            raise InvalidInput(f"{self._name}: damaged or truncated image ({exc})") from exc
        return pixels, (width, height) if turned else (height, width)


class _StoppableFile(io.BytesIO):
    """A file that stops its reader when the time budget is spent or the client has gone."""

    def __init__(self, data: bytes | memoryview, name: str, stopped: threading.Event) -> None:
        super().__init__(data)
        self._name = name
        self._stopped = stopped

    def allow(self, seconds: float) -> None:
        """Of this thread's processor time, from now on: however busy the machine is, the same files are accepted."""
        self._seconds = seconds
        self._until = time.thread_time() + seconds

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stopped.is_set():
            raise InvalidInput(f"{self._name}: given up: the client has gone")
        if time.thread_time() > self._until:
            raise TooLarge(f"{self._name}: takes more than {self._seconds:.1f} s to decode")
        return super().read(size)


def _has_too_many_scans(data: bytes | memoryview) -> bool:
    """Of a JPEG, up to the end of its first picture: cameras append others, and films."""
    at = scans = 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or found[1] == b"\xd9":  # the end of the picture
            return False
        at = found.end()
        if found[1] in b"\x01\xd8":  # stand alone
            continue
        if found[1] == b"\xda":
            scans += 1
            if scans > _MAX_SCANS:
                return True
        at += max(2, int.from_bytes(data[at : at + 2]))
    return True


def _looks_like_an_image(start: bytes) -> bool:
    return start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) or (start[:4], start[8:]) == (b"RIFF", b"WEBP")


def check_size(height: int, width: int, name: str, *, max_pixels: int) -> None:
    """Raises TooLarge."""
    if width * height > max_pixels:
        raise TooLarge(f"{name}: {width} x {height} pixels; one image may have {max_pixels}")
    if max(width, height) > _MAX_SIDE:
        raise TooLarge(f"{name}: {width} x {height} pixels; one image may have {_MAX_SIDE} on a side")


def is_large(height: int, width: int) -> bool:
    """Whether only a few of these images should be decoded at a time."""
    return height * width > _LARGE_PIXELS


def fit(pixels: Pixels, shape: tuple[int, int, int]) -> Pixels:
    """Resample one [h, w, 3] image to `shape`."""
    return np.asarray(Image.fromarray(pixels).resize((shape[1], shape[0]), Image.Resampling.BICUBIC))


def _opaque(image: Image.Image) -> Image.Image:
    """In grey or in colours of 8 bits, with as few copies as can be: one of the largest has 256 MB."""
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it at 255
        return Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGB", image.size, _WHITE)
        transparent = image if image.mode == "RGBA" else image.convert("RGBA")
        background.paste(transparent, mask=transparent)
        return background
    return image if image.mode in ("L", "RGB") else image.convert("RGB")
