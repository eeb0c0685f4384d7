"""JPEG files as cameras and programs leave them: which are whole, and which are damaged."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from models.manifest import Fit
from models.pictures import MAX_PIXELS, Picture
from models.pictures.jpeg import END
from tierkit.errors import InvalidInput, TooLarge

FIT = Fit(32, 32)
RED = (200, 10, 20)
GREY = Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 40), np.uint8)).resize((400, 300))
COLOURED = Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 40, 3), np.uint8)).resize((400, 300))
ARITHMETIC = base64.b85decode(
    "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ6%5fc;@6%`B*"
    "7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6cqo-"
    "01*fPAOIi(0U`hb5di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0NJVJ!~|28yP*Hs"
)
"""32 x 32 pixels of `RED`, made by jpegtran."""


def encoded(image: Image.Image = COLOURED, form: str = "JPEG", **options) -> bytes:
    held = io.BytesIO()
    image.save(held, form, **options)
    return held.getvalue()


def decoded(data: bytes, *, max_pixels: int = 10**6) -> np.ndarray:
    return Picture(data, "x", max_bytes=10**8, max_pixels=max_pixels).decode(FIT)


def within_head(data: bytes, extra: bytes) -> bytes:
    at = data.index(b"\xff\xdb")
    return data[:at] + extra + data[at:]


def overwritten(data: bytes, piece: bytes, *, at: float = 0.5) -> bytes:
    start = int(len(data) * at)
    return data[:start] + piece + data[start + len(piece) :]


BASELINE = encoded()
JUNK = np.random.default_rng(2).bytes(500)
WHOLE = {
    "baseline": BASELINE,
    "4:4:4": encoded(subsampling=0, quality=100),
    "4:1:1": encoded(subsampling="4:1:1"),
    "lowest quality": encoded(quality=1),
    "optimised": encoded(optimize=True),
    "of one colour": encoded(Image.new("RGB", (400, 300), RED), optimize=True),
    "progressive": encoded(progressive=True),
    "progressive grey": encoded(GREY, progressive=True),
    "restart markers by row": encoded(restart_marker_rows=1),
    "restart markers by block": encoded(restart_marker_blocks=3),
    "progressive with restart markers": encoded(progressive=True, restart_marker_rows=1),
    "grey": encoded(GREY),
    "cmyk": encoded(COLOURED.convert("CMYK")),
    "progressive cmyk": encoded(COLOURED.convert("CMYK"), progressive=True),
    "rgb": encoded(keep_rgb=True),
    "profile": encoded(icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
    "comment": encoded(comment=b"\xff\xd9\xff\xda" * 50),
    "odd metadata": within_head(BASELINE, b"\xff\xe2\x00\x10ICC_PROFILE\0\x09\x02"),
    "unknown version": BASELINE.replace(b"JFIF\0\x01\x01", b"JFIF\0\x03\x09"),
    "bytes between segments": within_head(BASELINE, bytes(7)),
    "fill bytes": within_head(BASELINE, b"\xff" * 50),
    "two pictures": encoded(form="MPO", save_all=True, append_images=[GREY.convert("RGB")]),
    "zeros behind": BASELINE + bytes(5000),
    "other bytes behind": BASELINE + JUNK,
    "an end behind": BASELINE + JUNK + END,
    "zeros in front of the end": BASELINE[:-2] + bytes(6) + END,
    "no end": BASELINE[:-2],
    "half an end": BASELINE[:-1],
    "zeros in place of the end": BASELINE[:-2] + bytes(5000),
    "progressive without end": encoded(progressive=True)[:-2],
    "grey without end": encoded(GREY)[:-2],
    "cmyk without end": encoded(COLOURED.convert("CMYK"))[:-2],
    "restart markers without end": encoded(restart_marker_rows=1)[:-2],
    "arithmetic": ARITHMETIC,
}


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_a_whole_picture_is_decoded_to_the_pixels_of_pillow(data: bytes) -> None:
    end = data if END in data[-len(data) // 3 :] else data + END
    image = Image.open(io.BytesIO(end))
    image.draft(image.mode, (8 * 32, 8 * 32))
    plainly = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
    assert int(np.abs(decoded(data).astype(int) - plainly).max()) <= 1


@pytest.mark.parametrize("image", [COLOURED, GREY, COLOURED.convert("CMYK")], ids=["coloured", "grey", "cmyk"])
@pytest.mark.parametrize(
    "options",
    [{}, {"quality": 100}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}],
    ids=["baseline", "best", "progressive", "rows", "blocks"],
)
@pytest.mark.parametrize("end", [END, b""], ids=["end", "no end"])
@pytest.mark.parametrize("at", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("piece", [bytes(400), b"\xff" * 400, JUNK], ids=["zeros", "ones", "junk"])
def test_a_hole_in_the_data_is_damage(
    image: Image.Image, options: dict[str, Any], end: bytes, at: float, piece: bytes
) -> None:
    data = encoded(image, **options).removesuffix(END) + end
    with pytest.raises(InvalidInput, match=r"^x: damaged"):
        decoded(overwritten(data, piece, at=at))


@pytest.mark.parametrize("image", [COLOURED, GREY], ids=["coloured", "grey"])
@pytest.mark.parametrize("marker", [b"\xff\xdb", b"\xff\xc4"], ids=["quantisation", "Huffman"])
def test_a_hole_in_a_table_is_damage(image: Image.Image, marker: bytes) -> None:
    data = encoded(image)
    at = data.index(marker)
    length = int.from_bytes(data[at + 2 : at + 4])
    for place in range(at + 5, at + 2 + length - 16, 5):
        with pytest.raises(InvalidInput, match=r"^x: damaged"):
            decoded(data[:place] + bytes(16) + data[place + 16 :])


DAMAGED = {
    "cut in half": BASELINE[: len(BASELINE) // 2],
    "cut in half, with an end": BASELINE[: len(BASELINE) // 2] + END,
    "cut in half, then zeros": BASELINE[: len(BASELINE) // 2] + bytes(len(BASELINE) // 2),
    "cut in half, then zeros and an end": BASELINE[: len(BASELINE) // 2] + bytes(len(BASELINE) // 2) + END,
    "a few bytes short": BASELINE[:-8],
    "a few bytes short, with an end": BASELINE[:-8] + END,
    "progressive, cut": encoded(progressive=True)[:-900],
    "a piece missing": BASELINE[:5000] + BASELINE[6000:],
    "a piece twice": BASELINE[:6000] + BASELINE[5000:],
    "fewer rows than it holds": BASELINE.replace(b"\x01\x2c\x01\x90", b"\x01\x00\x01\x90", 1),
    "more rows than it holds": BASELINE.replace(b"\x01\x2c\x01\x90", b"\x01\x90\x01\x90", 1),
    "arithmetic, cut": ARITHMETIC[:-6],
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_picture_with_missing_data_is_damaged(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^x: damaged"):
        decoded(data)


def picture(data: bytes) -> Picture:
    return Picture(data, "x", max_bytes=10**8, max_pixels=10**6)


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_nothing_is_mended_of_a_whole_picture(data: bytes) -> None:
    assert picture(data).mended() is None


def test_what_can_be_decoded_of_a_damaged_picture_is_a_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    left = Image.new("RGB", (400, 300), (0, 0, 255))
    left.paste(COLOURED.crop((0, 100, 400, 300)), (0, 100))
    mended = picture(overwritten(encoded(left, exif=exif), bytes(400), at=0.7)).mended()
    assert mended is not None
    data, seen = mended
    assert "premature end" in seen
    upright = picture(data)
    assert upright.size == (400, 300)
    assert upright.decode(Fit(40, 30))[20, 28].tolist() == pytest.approx([0, 0, 255], abs=8)


def test_a_progressive_picture_whose_scans_cannot_be_read_shows_no_memory() -> None:
    broken = overwritten(encoded(progressive=True), b"\xff\x02" * 20, at=0.2)
    with pytest.raises(InvalidInput, match=r"^x: damaged"):
        picture(broken).mended()


# --- pictures of many pixels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_sequential_picture_may_have_four_times_the_pixels(mode: str) -> None:
    colour = RED if mode == "RGB" else 77
    for rows in (0, 1):
        data = encoded(Image.new(mode, (400, 300), colour), restart_marker_rows=rows)
        assert decoded(data, max_pixels=30_000)[0, 0].tolist() == pytest.approx(
            RED if mode == "RGB" else [77] * 3, abs=4
        )
        with pytest.raises(TooLarge, match="400 x 300 pixels"):
            decoded(data, max_pixels=29_999)


def test_a_progressive_picture_may_not() -> None:
    """Its decoder keeps the coefficients of all pixels."""
    data = encoded(Image.new("RGB", (400, 300), RED), progressive=True)
    with pytest.raises(TooLarge, match="one image may have 119999"):
        decoded(data, max_pixels=119_999)


def test_a_network_that_wants_many_pixels_gets_no_more_than_may_be() -> None:
    taken = Picture(encoded(), "x", max_bytes=10**8, max_pixels=30_000)
    assert taken.decode(Fit(300, 400)).shape == (300, 400, 3)


def test_a_photograph_of_108_megapixels() -> None:
    data = encoded(Image.new("RGB", (12_000, 9_000), RED))
    taken = Picture(data, "x", max_bytes=10**8, max_pixels=64 * 1024**2)
    assert taken.size == (9_000, 12_000)
    assert taken.decode(FIT)[9, 9].tolist() == pytest.approx(RED, abs=4)


def test_the_highest_bound_holds_for_sequential_pictures_too() -> None:
    data = encoded(Image.new("L", (16, 16)))
    huge = data.replace(b"\x00\x10\x00\x10", b"\x40\x00\x40\x01", 1)
    with pytest.raises(TooLarge):
        Picture(huge, "x", max_bytes=10**8, max_pixels=MAX_PIXELS)
