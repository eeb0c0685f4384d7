"""Pictures in files: what each format is decoded to, how it is resized, and which files are refused."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Mapping
from random import Random

import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings, strategies as st
from PIL import AvifImagePlugin, Image, ImageOps

from models.manifest import Fit, ResizeRule
from models.pictures import Picture, decode as pictures, resized, within
from tests.mutations import changed_bytes
from tierkit.errors import InvalidInput, TooLarge, UnsupportedMedia

FIT = Fit(32, 32)
RED = (200, 10, 20)
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF", "HEIF")
ORIENTATION = 0x0112


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    held = io.BytesIO()
    if form == "HEIF":  # also where Pillow does not know the format yet
        pillow_heif.from_pillow(image).save(held, **options)
    else:
        image.save(held, form, **options)
    return held.getvalue()


def picture(
    data: bytes, name: str = "x", *, max_pixels: int = 10**6, stopped: threading.Event | None = None
) -> Picture:
    return Picture(data, name, max_bytes=10**9, max_pixels=max_pixels, stopped=stopped)


def decoded(data: bytes, fit: Fit = FIT) -> np.ndarray:
    return picture(data).decode(fit)


def noise(*size: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)


def smooth(width: int, height: int) -> Image.Image:
    """Different in all corners, and nothing that a codec would lose."""
    return Image.fromarray(noise(4, 6)).resize((width, height), Image.Resampling.BICUBIC)


def difference(first: np.ndarray, second: np.ndarray) -> int:
    assert first.shape == second.shape
    return int(np.abs(first.astype(int) - second).max())


# --- what is decoded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("BMP", {})])
def test_lossless_pixels_pass_unchanged(form, options):
    pixels = noise(32, 32)
    assert np.array_equal(decoded(encoded(Image.fromarray(pixels), form, **options)), pixels)


@pytest.mark.parametrize("form", FORMATS)
def test_colours_are_right(form):
    assert difference(decoded(encoded(Image.new("RGB", (32, 32), RED), form)), np.full((32, 32, 3), RED)) < 8


@pytest.mark.parametrize("form", FORMATS)
def test_another_size_is_said(form):
    taken = picture(encoded(smooth(80, 40), form))
    assert taken.size == (40, 80)
    assert taken.decode(FIT).shape == (32, 32, 3)


@pytest.mark.parametrize("compression", ["raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "jpeg"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_tiff_in_its_usual_compressions(compression, mode):
    image = smooth(32, 32)
    assert difference(decoded(encoded(image.convert(mode), "TIFF", compression=compression)), _in(image, mode)) < 25


def _in(image: Image.Image, mode: str) -> np.ndarray:
    return np.asarray(image.convert(mode).convert("RGB"))


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        ("L", "PNG"),
        ("L", "JPEG"),
        ("L", "TIFF"),
        ("L", "BMP"),
        ("L", "GIF"),
        ("L", "HEIF"),
        ("1", "PNG"),
        ("1", "TIFF"),
        ("1", "BMP"),
        ("1", "GIF"),
        ("LA", "TIFF"),
    ],
)
def test_grey_becomes_three_equal_channels(mode, form):
    grey = Image.new("L", (32, 32), 255 if mode == "1" else 77).convert(mode)
    assert difference(decoded(encoded(grey, form)), _in(grey, "L")) < 3


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_upper_bits(form):
    deep = np.full((32, 32), 0x80FF, np.uint16)
    assert decoded(encoded(Image.fromarray(deep), form))[0, 0].tolist() == [0x80] * 3


@pytest.mark.parametrize("byteorder", "<>")
def test_sixteen_bit_colours_keep_their_upper_bits(byteorder):
    values = np.full((32, 32, 3), 0x80FF, f"{byteorder}u2").tobytes()
    for compression, content in ((1, values), (8, zlib.compress(values))):
        data = tiff(content, order=byteorder, compression=compression, bits=16)
        assert decoded(data)[0, 0].tolist() == [0x80] * 3


def test_values_without_a_known_range_are_refused():
    for values in (np.zeros((32, 32), np.float32), np.zeros((32, 32), np.int32)):
        with pytest.raises(UnsupportedMedia, match=r"map\.tif: values of 32 bits"):
            picture(encoded(Image.fromarray(values), "TIFF"), "map.tif")


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk_is_converted(form):
    colour = decoded(encoded(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), form, quality=95))[9, 9]
    assert colour[0] > 200
    assert max(colour[1], colour[2]) < 60


@pytest.mark.parametrize("form", ["PNG", "TIFF", "BMP", "GIF"])
def test_a_palette_is_looked_up(form):
    image = Image.new("RGB", (32, 32), RED).convert("P", palette=Image.Palette.ADAPTIVE)
    assert decoded(encoded(image, form))[3, 3].tolist() == list(RED)


@pytest.mark.parametrize(
    ("mode", "form"),
    [("RGBA", form) for form in ("PNG", "WEBP", "TIFF", "GIF", "AVIF", "HEIF")]
    + [("LA", "PNG"), ("LA", "TIFF"), ("P", "PNG"), ("P", "GIF")],
)
def test_transparency_lies_on_white(mode, form):
    image = Image.new("RGBA", (32, 32), (*RED, 0))
    if mode == "P":
        palette = Image.new("P", (32, 32), 0)
        palette.putpalette(list(RED))
        data = encoded(palette, form, transparency=0)
    else:
        data = encoded(image.convert(mode), form)
    assert decoded(data)[0, 0].tolist() == [255, 255, 255]


def test_half_transparent_is_blended():
    assert decoded(encoded(Image.new("RGBA", (32, 32), (0, 0, 0, 127))))[0, 0].tolist() == [128, 128, 128]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "GIF", "AVIF", "HEIF"])
def test_the_first_frame_alone_is_decoded(form):
    frames = [Image.new("RGB", (32, 32), RED)] + [Image.new("RGB", (32, 32), (n, 255, n)) for n in range(200)]
    if form == "HEIF":
        held = io.BytesIO()
        file = pillow_heif.from_pillow(frames[0])
        for frame in frames[1:20]:
            file.add_from_pillow(frame)
        file.save(held)
        animation = held.getvalue()
    else:
        animation = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    assert difference(decoded(animation), np.full((32, 32, 3), RED)) < 8


@pytest.mark.parametrize("rest", [b",", b"!\xff", b",\0\0\0\0\xff\xff\xff\xff\0", b"\xff" * 10_000])
def test_what_follows_the_first_frame_of_a_gif_may_be_anything(rest):
    data = encoded(Image.new("RGB", (32, 32), RED), "GIF")
    assert difference(decoded(data.removesuffix(b";") + rest), np.full((32, 32, 3), RED)) < 8


def test_exif_orientation_of_a_small_picture_is_followed():
    pixels = noise(32, 32)
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turn by 90 degrees clockwise to see it upright
    assert np.array_equal(decoded(encoded(Image.fromarray(pixels), exif=exif)), np.rot90(pixels, 3))


@pytest.mark.parametrize(
    ("form", "orientation"),
    [*(("JPEG", each) for each in range(1, 9)), *((form, 6) for form in ("PNG", "WEBP", "TIFF", "AVIF", "HEIF"))],
)
def test_a_large_picture_is_upright_and_the_same_as_its_small_copy(form, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"speed": 10} if form == "AVIF" else {}
    large = encoded(smooth(600, 400), form, exif=exif.tobytes(), quality=95, **options)
    taken = picture(large)
    by_head = taken.size
    pixels = taken.decode(FIT)
    upright = smooth(600, 400)
    upright.getexif()[ORIENTATION] = orientation
    upright = ImageOps.exif_transpose(upright)
    assert difference(pixels, np.asarray(upright.resize((32, 32), Image.Resampling.BICUBIC))) <= 6
    assert taken.size == (upright.height, upright.width)
    assert by_head == taken.size or form == "PNG"  # where it may stand behind the pixels


@pytest.mark.parametrize("form", ["JPEG", "TIFF", "AVIF"])
def test_a_turned_picture_is_fitted_upright(form):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = encoded(smooth(200, 100), form, exif=exif.tobytes(), quality=95)
    upright = smooth(200, 100).transpose(Image.Transpose.ROTATE_270)
    for fit in (Fit(40, 30), Fit(40, 30, "pad"), Fit(40, 30, "shortest-side", 50)):
        assert difference(decoded(turned, fit), resized(upright, fit)) <= 6


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_a_thumbnail_keeps_the_shape_of_an_upright_picture(form, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    upright = ImageOps.exif_transpose(_with_orientation(smooth(600, 400), orientation))
    small = picture(encoded(smooth(600, 400), form, exif=exif.tobytes(), quality=95)).thumbnail(96)
    size = (96, 64) if orientation == 1 else (64, 96)
    assert difference(small, np.asarray(upright.resize(size, Image.Resampling.BICUBIC))) <= 6


def _with_orientation(image: Image.Image, orientation: int) -> Image.Image:
    image.getexif()[ORIENTATION] = orientation
    return image


@pytest.mark.parametrize(
    ("height", "width", "longest", "fit"),
    [
        (400, 600, 96, Fit(64, 96)),
        (600, 400, 96, Fit(96, 64)),
        (32, 32, 96, Fit(32, 32)),
        (96, 96, 96, Fit(96, 96)),
        (1, 65_535, 16, Fit(1, 16)),
    ],
)
def test_what_lies_within_a_thumbnail(height, width, longest, fit):
    assert within(height, width, longest) == fit


# --- resize rules -----------------------------------------------------------------------------------------------------


FILTERS = {name.name.lower(): name for name in Image.Resampling}


def middle(image: Image.Image, fit: Fit) -> Image.Image:
    left, top = (image.width - fit.width) // 2, (image.height - fit.height) // 2
    return image.crop((left, top, left + fit.width, top + fit.height))


def squashed(image: Image.Image, fit: Fit) -> Image.Image:
    sides = (fit.width, fit.height) if fit.resize_to is None else (fit.resize_to, fit.resize_to)
    return middle(image.resize(sides, FILTERS[fit.resample]), fit)


def padded(image: Image.Image, fit: Fit) -> Image.Image:
    return ImageOps.pad(image, (fit.width, fit.height), FILTERS[fit.resample], color=(0, 0, 0))


def cut(image: Image.Image, fit: Fit) -> Image.Image:
    """As torchvision's Resize and CenterCrop do it."""
    side = fit.resize_to or max(fit.height, fit.width)
    short, long = sorted(image.size)
    longer = int(side * long / short)
    size = (side, longer) if image.width <= image.height else (longer, side)
    return middle(image.resize(size, FILTERS[fit.resample]), fit)


PLAINLY = {"squash": squashed, "pad": padded, "shortest-side": cut}


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64), (32, 32), (33, 400), (20, 10), (1, 1)])
@pytest.mark.parametrize(
    "fit",
    [
        Fit(32, 32, "squash"),
        Fit(24, 48, "squash"),
        Fit(24, 32, "squash", 40),
        Fit(32, 32, "squash", None, "bilinear"),
        Fit(32, 32, "squash", None, "nearest"),
        Fit(32, 32, "shortest-side", 36, "lanczos"),
        Fit(24, 48, "pad", None, "box"),
        Fit(32, 32, "pad"),
        Fit(24, 48, "pad"),
        Fit(32, 32, "shortest-side", 36),
        Fit(32, 32, "shortest-side", 32),
        Fit(32, 32, "shortest-side"),
        Fit(24, 48, "shortest-side", 56),
    ],
    ids=lambda fit: "-".join(str(part) for part in fit),
)
def test_a_picture_is_resized_by_the_rule(size: tuple[int, int], fit: Fit):
    image = smooth(*size)
    expected = PLAINLY[fit.rule](image, fit)
    assert difference(resized(image, fit), np.asarray(expected)) <= 2
    assert difference(decoded(encoded(image), fit), np.asarray(expected)) <= 2


@pytest.mark.parametrize("rule", ["shortest-side", "pad"])
@pytest.mark.parametrize("size", [(400, 200), (200, 400)])
def test_a_square_stays_square(size: tuple[int, int], rule: ResizeRule):
    image = Image.new("RGB", size, (0, 0, 255))
    middle = size[0] // 2, size[1] // 2
    image.paste(RED, (middle[0] - 40, middle[1] - 40, middle[0] + 40, middle[1] + 40))
    red = resized(image, Fit(100, 100, rule, 100 if rule == "shortest-side" else None))[..., 0] > 100
    rows, columns = red.any(axis=1).sum(), red.any(axis=0).sum()
    assert rows == columns == (40 if rule == "shortest-side" else 20)


def test_a_picture_of_the_right_size_is_left_alone():
    pixels = noise(32, 48)
    for rule in ("squash", "pad", "shortest-side"):
        assert np.array_equal(resized(Image.fromarray(pixels), Fit(32, 48, rule)), pixels)


# --- what is no picture, damaged or cut short -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"BM the text begins so",
        b"%PDF-1.7",
        b"RIFF\0\0\0\0WAVE",
        b"\0\0\0\x18ftypmp42" + bytes(40),
        bytes(99),
    ],
)
def test_what_is_no_picture_is_said_to_be_none(data):
    with pytest.raises(UnsupportedMedia, match="notes: not a PNG, JPEG"):
        picture(data, "notes")


def test_an_empty_file():
    with pytest.raises(InvalidInput, match="x: an empty file"):
        picture(b"")


def test_the_suffix_does_not_matter():
    assert difference(decoded(encoded(Image.new("RGB", (32, 32), RED), "BMP")), np.full((32, 32, 3), RED)) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_a_picture_with_a_damaged_head_is_not_called_something_else(form):
    data = bytearray(encoded(Image.fromarray(noise(64, 64)), form))
    at = {"TIFF": 4, "BMP": 10, "GIF": 10, "AVIF": data[3], "HEIF": data[3]}.get(form, 12)
    zeroed = len(data) - at if form == "GIF" else 28
    data[at : at + zeroed] = b"\xff" * 28 if form == "TIFF" else bytes(zeroed)
    with pytest.raises(InvalidInput, match=r"cat\.png: damaged") as caught:
        picture(bytes(data), "cat.png").decode(FIT)
    assert not isinstance(caught.value, UnsupportedMedia)


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_picture_is_refused_with_its_name(form):
    data = encoded(Image.fromarray(noise(64, 64)), form)
    for length in (len(data) // 2, len(data) - 30):
        with pytest.raises(InvalidInput, match=r"cat\.png: damaged"):
            picture(data[:length], "cat.png").decode(FIT)


def test_a_file_of_too_many_bytes_is_refused():
    with pytest.raises(TooLarge, match="one image may have 10"):
        Picture(encoded(Image.new("RGB", (32, 32))), "x", max_bytes=10, max_pixels=10_000)


def test_heic_needs_its_extra(monkeypatch):
    data = encoded(Image.new("RGB", (32, 32), RED), "HEIF")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    with pytest.raises(UnsupportedMedia, match=r"IMG_1\.HEIC: .*pip install .*\[heic\]"):
        picture(data, "IMG_1.HEIC")


def test_a_pillow_without_avif(monkeypatch):
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    with pytest.raises(UnsupportedMedia, match=r"x: an AVIF image, which the Pillow"):
        picture(encoded_avif())


def encoded_avif() -> bytes:
    return encoded(Image.new("RGB", (32, 32), RED), "AVIF")


@pytest.mark.filterwarnings("ignore")  # as the module has it outside of tests
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_changed_file_is_decoded_or_refused_in_words(data):
    form = data.draw(st.sampled_from(FORMATS))
    whole = bytearray(SMALL[form])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, min(200, len(whole) - 1)))
        piece = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([bytes(4), b"\xff" * 4]))
        whole[at : at + len(piece)] = piece
    try:
        assert decoded(bytes(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])).shape == (32, 32, 3)
    except InvalidInput as exc:
        assert str(exc).startswith("x: ")  # noqa: PT017 - most changes do no harm


SMALL = {form: encoded(smooth(40, 30), form) for form in FORMATS}

MANY = """
import pickle, resource, sys
from models.manifest import Fit
from models.pictures import Picture
from tierkit.errors import InvalidInput
files, seen = pickle.load(sys.stdin.buffer), {"decoded": 0, "refused": 0}
for number, file in enumerate(files):
    try:
        assert Picture(file, "x", max_bytes=10**7, max_pixels=10**6).decode(Fit(32, 32)).shape == (32, 32, 3)
        seen["decoded"] += 1
    except InvalidInput as exc:
        assert str(exc).startswith("x: ")
        seen["refused"] += 1
    if number == 0:  # which is whole
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seen["decoded"], seen["refused"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("form", ["HEIF", "AVIF", "TIFF"])
def test_a_thousand_changed_files_neither_end_the_process_nor_fill_its_memory(form):
    """Their decoders take the whole file at once; in a process, since a crash in one of them takes that along."""
    wholes = [SMALL[form], encoded(smooth(96, 64).convert("RGBA"), form), encoded(smooth(64, 96).convert("L"), form)]
    if form == "HEIF":
        wholes.append(encoded(smooth(600, 400), form, tile_size=256))
    chance = Random(0)
    files = [SMALL[form], *(changed_bytes(chance.choice(wholes), chance) for _ in range(1000))]
    run = subprocess.run([sys.executable, "-c", MANY], input=pickle.dumps(files), capture_output=True, timeout=100)
    assert run.returncode == 0, run.stderr.decode()
    decoded, refused, grown_kib = map(int, run.stdout.split())
    assert decoded + refused == 1001
    assert min(decoded, refused) > 100
    # What a million pixels may take, three times.
    assert grown_kib * 1024 < 3 * 16 * 10**6


# --- what would cost much ---------------------------------------------------------------------------------------------


def png_header(width: int, height: int) -> bytes:
    """A PNG that says so and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def tiff(
    content: bytes = b"",
    *,
    width: int = 32,
    height: int = 32,
    order: str = "<",
    compression: int = 1,
    bits: int = 8,
    extra: Mapping[int, tuple[int, ...]] | None = None,
    following: int = 0,
) -> bytes:
    """An RGB picture in one strip; `extra` are further tags of 32 bits each."""
    tags: dict[int, tuple[int, ...]] = {
        256: (width,),
        257: (height,),
        258: (bits, bits, bits),
        259: (compression,),
        262: (2,),
        273: (0,),
        277: (3,),
        278: (height,),
        279: (len(content),),
    } | dict(extra or {})
    behind = 8 + 2 + 12 * len(tags) + 4
    values = b""
    if tags[273] == (0,):
        tags[273] = (behind + sum(4 * len(value) for value in tags.values() if len(value) > 1),)
    directory = struct.pack(f"{order}H", len(tags))
    for tag, value in sorted(tags.items()):
        directory += struct.pack(f"{order}HHI", tag, 4, len(value))
        if len(value) == 1:
            directory += struct.pack(f"{order}I", *value)
        else:
            directory += struct.pack(f"{order}I", behind + len(values))
            values += struct.pack(f"{order}{len(value)}I", *value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    return head + directory + struct.pack(f"{order}I", following) + values + content


def changed(form: str, before: bytes, offset: int, size_format: str, width: int, height: int) -> bytes:
    """A picture of 64 x 64 whose head says another size, which stands so many bytes behind something."""
    data = bytearray(encoded(smooth(64, 64), form))
    at = data.index(before) + offset
    struct.pack_into(size_format, data, at, *((height, width) if form == "JPEG" else (width, height)))
    return bytes(data)


LIARS = {
    "PNG": lambda width, height: png_header(width, height),
    "JPEG": lambda width, height: changed("JPEG", b"\xff\xc0", 5, ">HH", min(width, 65_500), min(height, 65_500)),
    "TIFF": lambda width, height: tiff(bytes(3072), width=width, height=height),
    "TIFF deflate": lambda width, height: tiff(zlib.compress(bytes(3072)), width=width, height=height, compression=8),
    "BMP": lambda width, height: changed("BMP", b"BM", 18, "<II", width, height),
    "GIF": lambda width, height: changed("GIF", b"GIF8", 6, "<HH", min(width, 65_535), min(height, 65_535)),
    "GIF frame": lambda width, height: changed("GIF", b",\0\0\0\0", 5, "<HH", min(width, 65_535), min(height, 65_535)),
    "AVIF": lambda width, height: changed("AVIF", b"ispe", 8, ">II", min(width, 16_000), min(height, 16_000)),
    "HEIF": lambda width, height: changed("HEIF", b"ispe", 8, ">II", min(width, 20_000), min(height, 20_000)),
}


@pytest.mark.parametrize("size", [(1001, 1000), (9_500, 9_500), (20_000, 20_000), (100_000, 100_000)])
@pytest.mark.parametrize("form", LIARS)
def test_a_huge_picture_is_refused_by_its_head(form, size):
    # Nothing of this size could be decoded here: the refusal can only come from the header.
    times = 2 if form == "JPEG" else 1  # which is decoded at half its size
    with pytest.raises(TooLarge, match=r"huge: .*pixels"):
        picture(LIARS[form](*(times * side for side in size)), "huge")


@pytest.mark.parametrize(("width", "height"), [(2**26, 1), (1, 2**26), (65_536, 3)])
def test_a_very_long_picture_is_refused_by_its_head(width, height):
    for data in (png_header(width, height), tiff(bytes(99), width=width, height=height)):
        with pytest.raises(TooLarge, match="one image may have 65535 on a side"):
            picture(data, "long", max_pixels=2**26)


@pytest.mark.parametrize("form", LIARS)
def test_a_picture_that_holds_less_than_its_head_says_is_damaged(form):
    try:
        pixels = picture(LIARS[form](900, 900), "liar").decode(FIT)
    except InvalidInput as exc:
        assert str(exc).startswith("liar: damaged")  # noqa: PT017 - or as below
    else:
        # These decoders scale what they find, or leave the rest empty.
        assert form in ("AVIF", "GIF", "JPEG")
        assert pixels.shape == (32, 32, 3)


@pytest.mark.parametrize("form", ["AVIF", "HEIF"])
def test_a_picture_that_holds_more_than_its_head_says_is_bounded_by_its_decoder(form):
    data = bytearray(encoded(Image.new("RGB", (1500, 1500), RED), form, **({"speed": 10} if form == "AVIF" else {})))
    struct.pack_into(">II", data, data.index(b"ispe") + 8, 64, 64)
    taken = picture(bytes(data))
    if form == "AVIF":
        assert taken.large  # so few such files are decoded at a time
        assert taken.decode(FIT).shape == (32, 32, 3)
    else:
        with pytest.raises(InvalidInput, match="damaged"):
            taken.decode(FIT)


def repeated_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan, of some 20 bytes, comes so many times: each goes through all pixels."""
    data = encoded(Image.new("RGB", (side, side), RED), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * scans + data[-2:]


@pytest.mark.parametrize("extra", [b"", b"\xff" * 50, b"\xff\xfe\x00\x06\xff\xd9\xff\xd9"], ids=["", "fill", "comment"])
def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(extra):
    honest, hostile = repeated_scans(64, 80), repeated_scans(64, 200)
    after_head = honest.index(b"\xff\xdb")
    assert decoded(honest[:after_head] + extra + honest[after_head:]).shape == (32, 32, 3)
    with pytest.raises(TooLarge, match="more than 100 scans"):
        picture(hostile[:after_head] + extra + hostile[after_head:])


def test_a_jpeg_of_several_pictures_is_bounded_as_well():
    # As cameras write it, with a smaller picture behind the first one.
    held = io.BytesIO()
    Image.new("RGB", (64, 64), RED).save(held, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32))])
    assert decoded(held.getvalue())[5, 5, 0] > 190
    hostile, whole = repeated_scans(64, 200), held.getvalue()
    index = whole[whole.index(b"\xff\xe2") :]
    index = index[: 2 + int.from_bytes(index[2:4])]
    with pytest.raises(TooLarge, match="more than 100 scans"):
        picture(hostile[:2] + index + hostile[2:] + whole)


def test_a_jpeg_of_too_many_segments_is_refused():
    data = encoded(Image.new("RGB", (64, 64), RED), "JPEG")
    with pytest.raises(TooLarge, match="segments"):
        picture(data[:2] + b"\xff\xfe\x00\x02" * 20_000 + data[2:])


def test_what_follows_a_picture_does_not_count():
    film = b"\xff\xda\x00\x02" * 1000
    data = encoded(Image.new("RGB", (64, 64), RED), "JPEG", progressive=True) + film
    assert decoded(data).shape == (32, 32, 3)


def test_a_directory_of_a_tiff_that_leads_to_itself():
    assert decoded(tiff(bytes([9]) * 3072, following=8))[0, 0].tolist() == [9, 9, 9]
    pointers = {330: (8, 8), 34665: (8,), 34853: (8,)}  # directories below this one, by three names
    assert decoded(tiff(bytes([9]) * 3072, extra=pointers))[0, 0].tolist() == [9, 9, 9]
    with pytest.raises(InvalidInput, match="damaged"):
        picture(b"II*\0\x00\x00\x00\x00" + bytes(50))


def test_a_tiff_with_tens_of_thousands_of_tags():
    many = {tag: (tag,) for tag in range(1000, 45_000) if tag not in (33_432, 34_377, 34_665, 34_853, 40_965)}
    content = bytes([9]) * 3072
    assert decoded(tiff(content, extra=many))[0, 0].tolist() == [9, 9, 9]
    with pytest.raises(InvalidInput, match="x: damaged"):  # the library that unpacks these reads fewer
        decoded(tiff(zlib.compress(content), compression=8, extra=many))


def test_a_tiff_of_huge_tiles_is_refused():
    tiles = {322: (16_384,), 323: (16_384,), 324: (400,), 325: (100,)}
    with pytest.raises(TooLarge, match="x: its tiles: 16384 x 16384 pixels"):
        picture(tiff(bytes(1000), compression=8, extra=tiles))


@pytest.mark.parametrize(("compression", "name"), [(50_000, "zstd"), (4, "group4"), (6, "tiff_jpeg")])
def test_a_tiff_in_another_compression_is_refused(compression, name):
    with pytest.raises(UnsupportedMedia, match=f"a TIFF compressed by {name}"):
        picture(tiff(bytes(1000), compression=compression))


def test_a_progressive_jpeg_inside_a_tiff_is_refused():
    for scans, error in ((50, TooLarge), (0, InvalidInput)):
        data = tiff(repeated_scans(32, scans), compression=7)
        with pytest.raises(error):
            picture(data)
    strip = encoded(Image.new("RGB", (32, 32), RED), "JPEG")
    shared = {278: (1,), 273: (1000,) * 32, 279: (len(strip),) * 32}
    with pytest.raises(InvalidInput, match="overlap"):
        picture(tiff(strip, compression=7, extra=shared))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF"])
def test_a_picture_that_takes_too_long_is_given_up(monkeypatch, form):
    taken = picture(encoded(Image.new("RGB", (2000, 2000), RED), form), "slow", max_pixels=2**26)
    for constant in ("_HEAD_S", "_S_PER_PIXEL", "_S_PER_PNG_PIXEL"):
        monkeypatch.setattr(pictures, constant, 0.0)
    with pytest.raises(TooLarge, match=r"slow: takes more than 0\.0 s to decode"):
        taken.decode(FIT)


def test_a_head_that_takes_too_long_is_given_up():
    start, end = encoded(Image.new("RGB", (32, 32)))[:8], encoded(Image.new("RGB", (32, 32)))[8:]
    empty = b"\0\0\0\0tEXt" + struct.pack(">I", zlib.crc32(b"tEXt"))
    with pytest.raises(InvalidInput, match=r"slow\.png: "):
        picture(start + end[:25] + empty * 4_000_000 + end[25:], "slow.png")


def test_a_directory_of_millions_of_tags_is_given_up():
    count = 3_000_000
    big = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, count) + struct.pack("<HHQQ", 256, 4, 1, 32) * count
    with pytest.raises(TooLarge, match=r"slow\.tif: takes more than"):
        picture(big, "slow.tif")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF"])
def test_the_decoding_of_a_picture_can_be_stopped(form):
    stopped = threading.Event()
    taken = picture(encoded(Image.fromarray(noise(64, 64)), form), stopped=stopped)
    stopped.set()
    with pytest.raises(InvalidInput, match="given up"):
        taken.decode(FIT)


def test_odd_metadata_is_no_news():
    """Of which a hostile file has thousands; pytest sets the filters of warnings itself, hence the process."""
    data = tiff(bytes([9]) * 3072, extra={40_000: (1, 2)})
    data = data.replace(struct.pack("<HHI", 40_000, 4, 2), struct.pack("<HHI", 40_000, 4, 2**20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        picture(data)
    assert caught, "Pillow no longer warns of this: take another example"
    program = (
        "import sys; from models.manifest import Fit; from models.pictures import Picture\n"
        "Picture(sys.stdin.buffer.read(), 'x', max_bytes=10**6, max_pixels=10**6).decode(Fit(32, 32))"
    )
    ran = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=60, check=True)
    assert ran.stderr == b""
