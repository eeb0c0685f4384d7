"""One image file or array to the pixels that the networks take. Blocks: call it in a thread."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from scheduler.inputs import Pixels
from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia

__all__ = ["Decoded", "ImageLimits", "decode_image", "fit"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one image may cost."""

    max_pixels: int
    max_file_bytes: int


@dataclass(frozen=True, slots=True)
class Decoded:
    pixels: Pixels
    """[height, width, 3] as the networks take it."""
    resized_from: tuple[int, int] | None
    """Height and width as sent, where they were others."""


def decode_image(data: bytes | memoryview, name: str, shape: tuple[int, int, int], limits: ImageLimits) -> Decoded:
    """Decode one file to RGB of `shape` (height, width, 3).

    Upright by its EXIF orientation; first frame of an animation; transparent areas on white; 16-bit values by their
    upper 8 bits; other sizes are resampled (the aspect ratio is not kept, as the networks were trained on squares).

    Raises:
        UnsupportedMedia: no PNG, JPEG or WebP.
        TooLarge: more bytes or pixels than the limits; found before anything is decoded.
        InvalidInput: damaged or cut short.
    """
    if len(data) > limits.max_file_bytes:
        raise TooLarge(f"{name}: {len(data)} bytes; one image may have {limits.max_file_bytes}")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)  # reads the header alone
    except UnidentifiedImageError:
        if _looks_like_an_image(bytes(data[:12])):
            raise InvalidInput(f"{name}: damaged image (its header cannot be read)") from None
        raise UnsupportedMedia(f"{name}: not a PNG, JPEG or WebP image") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # Pillow's own bound; ours is never higher
        raise TooLarge(f"{name}: more pixels than the {limits.max_pixels} that one image may have") from None
    except Exception as exc:  # what Pillow's plugins raise on damaged headers is not one family
        raise InvalidInput(f"{name}: damaged image ({exc})") from exc
    with image:
        width, height = image.size
        if width * height > limits.max_pixels:
            raise TooLarge(f"{name}: {width} x {height} pixels; one image may have {limits.max_pixels}")
        try:
            rgb = _to_rgb(ImageOps.exif_transpose(image))
        except Exception as exc:  # as above, for damaged or truncated pixel data
            raise InvalidInput(f"{name}: damaged or truncated image ({exc})") from exc
    return fit(np.asarray(rgb), shape)


def _looks_like_an_image(start: bytes) -> bool:
    return start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) or (start[:4], start[8:]) == (b"RIFF", b"WEBP")


def fit(pixels: Pixels, shape: tuple[int, int, int]) -> Decoded:
    """Resample one [h, w, 3] image to `shape` where it has another size."""
    height, width, _ = pixels.shape
    if (height, width) == shape[:2]:
        return Decoded(pixels, None)
    resized = Image.fromarray(pixels).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
    return Decoded(np.asarray(resized), (height, width))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), transparent).convert("RGB")
    return image.convert("RGB")  # for an RGB image this loads it and copies nothing but the result
