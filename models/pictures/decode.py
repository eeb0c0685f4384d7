"""A picture in a file, of any size, to the pixels that a network takes. Blocks: call it in a thread.

The scheduler reads the head of each file that is uploaded, and decodes it where its networks take small pictures; a
node decodes what it is sent. What a file may cost is checked before it is decoded, and while it is.
"""

from __future__ import annotations

import io
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from PIL import (
    AvifImagePlugin,
    ExifTags,
    Image,
    ImageFile,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 - or Pillow imports it while the time of a picture is counted
)

from models.manifest import Fit, Resample
from models.pictures import jpeg
from models.pictures.heic import decoded_pixels
from tierkit.distribution import install_command
from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia
from tierkit.memory import give_back
from tierkit.picture_files import kind_of
from tierkit.tensors import Array, Decode

__all__ = ["MAX_PIXELS", "Picture", "check_size", "decoder", "is_large", "resized", "within"]

MAX_PIXELS = 2**28
"""The highest bound of pixels that can be set."""
_SCALED = 4
"""Factor by which a sequential JPEG may exceed the bound of pixels; it is then decoded at 1/2 to 1/8 of its size."""
_MENDED = 2048
"""Pixels on the longer side of the readable remains of a damaged picture."""

_PIECEWISE = ("PNG", "JPEG", "GIF")
"""Formats decoded in small pieces. Rows of the uncompressed formats are longer; the others take the whole file."""

_TIFF_COMPRESSIONS = {"raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "jpeg"}
"""Compressions used for photographs. The decoders of fax write each damaged line to the standard error."""
_MAX_TIFF_SCANS = 4
"""Most scans in a piece of a TIFF that is compressed as JPEG: one for each channel. There is no time budget inside
these.
"""

_HEIC_PARTS = 2
"""Bound of all parts of a HEIC image together, in `max_pixels`: tiles exceed the edges, and transparency counts."""

_WHITE = (255, 255, 255)

_MAX_SIDE = 65_535
"""The bound of JPEG. Resampling takes memory in proportion to the longer side."""

_LARGE_PIXELS = 16 * 1024**2

_PIECE_BYTES = 1024
"""Bytes that a decoder gets at a time; before each piece it can be stopped. A scan of a progressive JPEG may have 100
bytes, and goes through all pixels.
"""

_FEW_SCANS = 20
"""A JPEG with at most this many scans is decoded in one go, since its bytes and pixels bound its time."""
_MAX_SCANS, _MAX_SEGMENTS = 100, 10_000
"""Most scans and segments of a JPEG. A scan goes through all pixels, however few bytes it has; encoders make about
ten.
"""

_SCAN = b"\xff\xda"
"""Marker at the beginning of a scan."""

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
"""Marker in front of a segment. Other bytes after 0xFF belong to the data of a scan."""

_HEAD_S = 1.0
_S_PER_PIXEL = 200e-9
_S_PER_PNG_PIXEL = 1e-6
"""Processor time that a picture may take: for its head and for its pixels. The slowest honest ones take a tenth. A PNG
goes through its pixels once only, but inflating them may take long."""

_A_FILE = "file"
_MAX_BYTES, _MAX_PIXELS = 64 * 1024**2, MAX_PIXELS
"""Most bytes and pixels of a file that a node gets. Its scheduler lets no more through."""
_one_large = threading.Lock()

_DRAFT = 8
"""A JPEG is decoded at a half to an eighth of its size where this leaves so many times the width and height that are
needed."""

_FILTERS: dict[Resample, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition by EXIF orientation."""
_TURNED = (5, 6, 7, 8)
"""Orientations by which width and height change places."""

# Pillow's own bound holds for the whole process, and below ours. Each file is checked here.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Pictures are decoded in a pool of threads already.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# Of odd metadata, which no answer depends on; a file can cause thousands of them, and Python remembers each.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Picture:
    """One image file whose head has been read.

    Args:
        data: the file.
        name: name in messages.
        max_bytes: most bytes that it may have.
        max_pixels: most pixels that it may have.
        stopped: ends the decoding when it is set.

    Raises:
        UnsupportedMedia: in no format that is read here.
        TooLarge: more bytes, pixels or scans than the limits; found before anything is decoded.
        InvalidInput: damaged or cut short.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        name: str,
        *,
        max_bytes: int,
        max_pixels: int,
        stopped: threading.Event | None = None,
    ) -> None:
        if not data:
            raise InvalidInput(f"{name}: an empty file")
        if len(data) > max_bytes:
            raise TooLarge(f"{name}: {len(data)} bytes; one image may have {max_bytes} (setting max_file_bytes)")
        self._name = name
        self._max_pixels = max_pixels
        self._kind = _kind(data, name)
        frame = jpeg.frame_of(data) if self._kind == "JPEG" else 0
        self._data = jpeg.ended(data, frame)
        self._file = _StoppableFile(self._data, name, stopped)
        self._file.allow(_HEAD_S)
        may_have = min(_SCALED * max_pixels, MAX_PIXELS) if jpeg.is_sequential(frame) else max_pixels
        try:
            if self._kind == "HEIF" and (parts := decoded_pixels(data)) > _HEIC_PARTS * max_pixels:
                raise TooLarge(f"{name}: {parts} pixels in all of its parts; one image may have {max_pixels}")
            self._image = Image.open(self._file, formats=[self._kind])
            width, height = self._image.size
            check_size(height, width, name, max_pixels=may_have)
            if isinstance(self._image, TiffImagePlugin.TiffImageFile):
                _check_tiff(self._image, data, name, max_pixels=max_pixels)
            if self._image.mode in ("I", "F"):
                raise UnsupportedMedia(f"{name}: values of 32 bits in no known range; save it with 8 or 16 bits")
        except UnidentifiedImageError:
            raise InvalidInput(f"{name}: damaged image (its header cannot be read)") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise TooLarge(f"{name}: more pixels than the {max_pixels} that one image may have") from None
        except InvalidInput:
            raise
        except Exception as exc:  # what Pillow's plugins raise on damaged headers is not one family
            raise InvalidInput(f"{name}: damaged image ({exc})") from exc
        scans_at_most = _count_scans(data) if self._kind == "JPEG" else 0
        self._scans_at_most = scans_at_most
        if self._kind == "JPEG" and _has_too_many_scans(data, scans_at_most):
            raise TooLarge(f"{name}: more than {_MAX_SCANS} scans or {_MAX_SEGMENTS} segments; save it again")
        # The pixels that an AVIF declares need not be those that its decoder finds inside, up to 16,384 x 16,384.
        self.large = self._kind == "AVIF" or is_large(height, width)
        """True if only a few should be decoded at a time."""

        # Of a PNG the orientation may stand behind the pixels.
        turned = self._kind != "PNG" and self._orientation() in _TURNED
        self.size = (width, height) if turned else (height, width)
        """Height and width, upright; of a PNG that is turned, once it is decoded."""

    def decode(self, fit: Fit) -> Array:
        """Decode it to UINT8 RGB `[height, width, 3]`.

        Upright by its EXIF orientation; first frame of an animation; transparent areas on white; 16-bit values by their
        upper 8 bits.

        Raises:
            TooLarge: takes too long.
            InvalidInput: damaged or cut short.
        """
        return self._whole(*self._decode(max(fit.height, fit.width, fit.resize_to or 0), lambda height, width: fit))

    def thumbnail(self, longest: int) -> Array:
        """Decode it like `decode`, but in its own shape and with at most `longest` pixels on its longer side."""
        return self._whole(*self._decode(longest, lambda height, width: within(height, width, longest)))

    def mended(self) -> tuple[bytes, str] | None:
        """A JPEG of what can be decoded of one with damage behind its head, upright, and what is wrong with it; None
        where nothing is.

        Raises:
            TooLarge: takes too long.
            InvalidInput: nothing can be decoded.
        """
        if self._kind != "JPEG":
            return None
        pixels, damage = self._decode(_MENDED, lambda height, width: within(height, width, _MENDED))
        if damage is None:
            return None
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
        return file.getvalue(), damage

    def _whole(self, pixels: Array, damage: str | None) -> Array:
        if damage is not None:
            raise InvalidInput(f"{self._name}: damaged image ({damage})")
        return pixels

    def _decode(self, needed: int, fit_of: Callable[[int, int], Fit]) -> tuple[Array, str | None]:
        """Decode it to the fit for its height and width; returns also what is wrong with a JPEG that is decoded.

        Args:
            needed: pixels on a side that count; a JPEG may be decoded at less than its own size.
        """
        width, height = self._image.size
        seconds = _S_PER_PNG_PIXEL if self._kind == "PNG" else _S_PER_PIXEL
        self._file.allow(_HEAD_S + width * height * seconds)
        try:
            with self._image as image:
                image.draft(image.mode, self._draft_size(_DRAFT * needed))
                whole, damage = self._loaded(image)
                orientation = self._orientation()
                turned = orientation in _TURNED
                self.size = (width, height) if turned else (height, width)
                # Turned at the end: it is small then, and a large one need not be copied.
                fit = fit_of(*self.size)
                small = resized(_opaque(whole), fit.turned if turned else fit)
                return small if orientation not in _UPRIGHT else _upright(small, _UPRIGHT[orientation]), damage
        except InvalidInput:
            raise
        except Exception as exc:  # as above, for damaged or truncated pixel data
            raise InvalidInput(f"{self._name}: damaged or truncated image ({exc})") from exc

    def _draft_size(self, wanted: int) -> tuple[int, int]:
        """Width and height at which a JPEG is decoded: at least the wanted size, within the bound of pixels."""
        width, height = self._image.size
        scale = next((scale for scale in (8, 4, 2) if min(width, height) // wanted >= scale), 1)
        while width * height > self._max_pixels * scale**2:
            scale *= 2
        return max(1, width // scale), max(1, height // scale)

    def _loaded(self, image: ImageFile.ImageFile) -> tuple[Image.Image, str | None]:
        """The image with its pixels, and what is wrong with them."""
        if self._kind == "JPEG" and image.mode in jpeg.COLOURS and self._scans_at_most <= _FEW_SCANS:
            self._file.check()
            fault = jpeg.fault_in_tables(self._data)
            with suppress(ValueError):  # then Pillow says what it is
                single = self._scans_at_most == 1
                pixels, damage = jpeg.read_pixels(self._data, image.mode, image.size, single_scan=single)
                self._file.check()
                damage = fault or damage
                if image.mode != "CMYK":  # of which Pillow knows whether it is inverted
                    return Image.fromarray(pixels.squeeze(2) if image.mode == "L" else pixels), damage
                image.load()
                return image, damage
            image.load()
            return image, fault
        if self._kind in _PIECEWISE:
            image.decodermaxblock = _PIECE_BYTES
        image.load()
        return image, None

    def _orientation(self) -> int | None:
        if self._kind == "TIFF":  # which Pillow turns upright by itself
            return None
        try:
            return self._image.getexif().get(ExifTags.Base.Orientation)
        except Exception:  # damaged: what Pillow raises then is not one family
            return None


def decoder(fit: Fit) -> Decode:
    """A function that turns files into the pixels of one network, large pictures one at a time."""

    def decode(file: bytes, stopped: threading.Event) -> Array:
        try:
            picture = Picture(file, _A_FILE, max_bytes=_MAX_BYTES, max_pixels=_MAX_PIXELS, stopped=stopped)
            if not picture.large:
                return picture.decode(fit)
            with _one_large:
                try:
                    return picture.decode(fit)
                finally:
                    give_back()
        except InvalidInput as exc:
            raise InvalidInput(str(exc).removeprefix(f"{_A_FILE}: ")) from exc

    return decode


def within(height: int, width: int, longest: int) -> Fit:
    """A picture in its own shape, no larger than it is, and at most `longest` pixels on its longer side."""
    factor = min(1.0, longest / max(height, width))
    return Fit(max(1, round(height * factor)), max(1, round(width * factor)))


def resized(image: Image.Image, fit: Fit) -> Array:
    """UINT8 RGB `[height, width, 3]` of a picture in any mode that converts to RGB."""
    width, height = fit.width, fit.height
    if image.size == (width, height) and fit.resize_to in (None, width, height):
        return _rgb(image)
    filter_ = _FILTERS[fit.resample]
    match fit.rule:
        case "squash" if fit.resize_to is None:
            return _rgb(image.resize((width, height), filter_))
        case "squash" | "shortest-side":
            side = fit.resize_to or max(width, height)
            scaled = (side, side) if fit.rule == "squash" else _by_shortest_side(image.size, side)
            left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
            # Only what is left of the picture is computed.
            across, down = image.width / scaled[0], image.height / scaled[1]
            box = (left * across, top * down, (left + width) * across, (top + height) * down)
            return _rgb(image.resize((width, height), filter_, box=box))
        case "pad":
            factor = min(width / image.width, height / image.height)
            scaled = max(1, round(image.width * factor)), max(1, round(image.height * factor))
            pixels = np.zeros((height, width, 3), np.uint8)
            left, top = (width - scaled[0]) // 2, (height - scaled[1]) // 2
            small = _rgb(image.resize(scaled, filter_))
            pixels[top : top + scaled[1], left : left + scaled[0]] = small
            return pixels


def _by_shortest_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size whose shortest side has that length; the longer one is rounded down, as training libraries do it."""
    width, height = size
    return (side, side * height // width) if width <= height else (side * width // height, side)


def _rgb(image: Image.Image) -> Array:
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _upright(pixels: Array, how: Image.Transpose) -> Array:
    return np.asarray(Image.fromarray(pixels).transpose(how))


class _StoppableFile(io.BytesIO):
    """A file that stops its reader when the time budget is spent or the client has gone."""

    def __init__(self, data: bytes | memoryview, name: str, stopped: threading.Event | None) -> None:
        super().__init__(data)
        self._name = name
        self._stopped = stopped

    def allow(self, seconds: float) -> None:
        """Set the budget of this thread's processor time, from now on. So the same files are accepted on a busy
        machine.
        """
        self._seconds = seconds
        self._until = time.thread_time() + seconds
        self._not_before = time.monotonic() + seconds

    def check(self) -> None:
        """Raises InvalidInput when the client has gone, or TooLarge when the time is over."""
        if self._stopped is not None and self._stopped.is_set():
            raise InvalidInput(f"{self._name}: given up: the client has gone")
        # A thread's time is no longer than the time that passes, which costs less to look at.
        if time.monotonic() > self._not_before and time.thread_time() > self._until:
            raise TooLarge(f"{self._name}: takes more than {self._seconds:.1f} s to decode")

    def read(self, size: int | None = -1, /) -> bytes:
        self.check()
        return super().read(size)


def _count_scans(data: bytes | memoryview) -> int:
    """Number of scans in a JPEG, including pictures that a camera has put inside or behind it. This is four times
    faster than `bytes.count`.
    """
    view = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((view[:-1] == _SCAN[0]) & (view[1:] == _SCAN[1])))


def _has_too_many_scans(data: bytes | memoryview, scans_at_most: int) -> bool:
    """True if a JPEG has too many scans up to the end of its first picture. Cameras append further pictures and
    films.
    """
    # As many as there can be at the most, which is known sooner.
    markers_at_most = np.count_nonzero(np.frombuffer(data, np.uint8) == _SCAN[0])
    if scans_at_most <= _MAX_SCANS and markers_at_most <= _MAX_SEGMENTS:
        return False
    at = scans = 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or found[1] == b"\xd9":  # the end of the picture
            return False
        at = found.end()
        if found[1] in b"\x01\xd8":  # stand alone
            continue
        if found[0].endswith(_SCAN):
            scans += 1
            if scans > _MAX_SCANS:
                return True
        at += max(2, int.from_bytes(data[at : at + 2]))
    return True


def _kind(data: bytes | memoryview, name: str) -> str:
    """Pillow's name of the format. Raises UnsupportedMedia."""
    kind = kind_of(data)
    if kind is None:
        raise UnsupportedMedia(f"{name}: not a PNG, JPEG, WebP, TIFF, BMP, GIF, AVIF or HEIC image")
    if kind == "AVIF" and not AvifImagePlugin.SUPPORTED:
        raise UnsupportedMedia(f"{name}: an AVIF image, which the Pillow that is installed here was built without")
    if kind == "HEIF" and kind not in Image.OPEN:
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            raise UnsupportedMedia(f"{name}: a HEIC image; to read these, {install_command('heic')}") from None
        register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return kind


def _check_tiff(image: TiffImagePlugin.TiffImageFile, data: bytes | memoryview, name: str, *, max_pixels: int) -> None:
    """Bound the memory that the decoder of a TIFF takes in addition to the pixels, because it cannot be stopped."""
    tags = image.tag_v2
    compression = image.info["compression"]
    if compression not in _TIFF_COMPRESSIONS:
        raise UnsupportedMedia(f"{name}: a TIFF compressed by {compression}; save it with LZW, deflate or JPEG")
    tile = tags.get(TiffImagePlugin.TILELENGTH, 0), tags.get(TiffImagePlugin.TILEWIDTH, 0)
    check_size(*tile, f"{name}: its tiles", max_pixels=max_pixels)
    if compression == "jpeg":
        tiled = TiffImagePlugin.TILEOFFSETS in tags
        offsets = tags[TiffImagePlugin.TILEOFFSETS if tiled else TiffImagePlugin.STRIPOFFSETS]
        counts = tags[TiffImagePlugin.TILEBYTECOUNTS if tiled else TiffImagePlugin.STRIPBYTECOUNTS]
        if sum(counts) > len(data):
            raise InvalidInput(f"{name}: damaged image (parts of it overlap)")
        for offset, count in zip(offsets, counts, strict=True):
            if bytes(data[offset : offset + count]).count(b"\xff\xda") > _MAX_TIFF_SCANS:
                raise TooLarge(f"{name}: a TIFF with a progressive JPEG inside; save it again")


def check_size(height: int, width: int, name: str, *, max_pixels: int) -> None:
    """Raises TooLarge."""
    if width * height > max_pixels:
        raise TooLarge(f"{name}: {width} x {height} pixels; one image may have {max_pixels} (setting max_pixels)")
    if max(width, height) > _MAX_SIDE:
        raise TooLarge(f"{name}: {width} x {height} pixels; one image may have {_MAX_SIDE} on a side")


def is_large(height: int, width: int) -> bool:
    """True if only a few of these images should be decoded at a time."""
    return height * width > _LARGE_PIXELS


def _opaque(image: Image.Image) -> Image.Image:
    """Convert to grey or to colours of 8 bits, with as few copies as possible: one of the largest has 256 MB."""
    if image.mode.startswith("I;16"):  # 16-bit grey; Pillow's own conversion would clip it at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGB", image.size, _WHITE)
        transparent = image if image.mode == "RGBA" else image.convert("RGBA")
        background.paste(transparent, mask=transparent)
        return background
    return image if image.mode in ("L", "RGB") else image.convert("RGB")
