"""HEIC files that are small and take hours: pictures laid together from the same part, again and again."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import pillow_heif
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from models.manifest import Fit
from models.pictures import Picture
from models.pictures.heic import decoded_pixels
from tierkit.errors import InvalidInput, TooLarge

COLOUR = (9, 200, 9)


def encoded(mode: str = "RGB", size: tuple[int, int] = (1500, 1000), **options: int) -> bytes:
    held = io.BytesIO()
    pillow_heif.from_pillow(Image.new(mode, size, (*COLOUR, 99)[: len(mode)])).save(held, **options)
    return held.getvalue()


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while data:
        length = int.from_bytes(data[:4])
        yield data[4:8], data[8:length]
        data = data[length:]


def box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), kind) + content


def full(kind: bytes, version: int, *parts: bytes) -> bytes:
    return box(kind, bytes([version, 0, 0, 0]), *parts)


def laid_together(kind: bytes, *, side: int, canvas: int, uses: int, nested: bool = False, twice: bytes = b"") -> bytes:
    """A picture that uses one square part so often.

    Args:
        kind: grid (below each other) or iovl (one above the other).
        side: of the part.
        canvas: side of the whole.
        nested: the whole is used again, by a third one.
        twice: a box of the description that stands there a second time, empty.
    """
    whole = dict(boxes(encoded(size=(side, side))))
    properties = dict(boxes(dict(boxes(dict(boxes(whole[b"meta"][4:]))[b"iprp"]))[b"ipco"]))
    stream = whole[b"mdat"]
    if kind == b"grid":
        plan = bytes([0, 0, uses - 1, 0]) + struct.pack(">HH", canvas, canvas)
    else:
        plan = bytes(2) + struct.pack(">6H", 0, 0, 0, 65_535, canvas, canvas) + bytes(4 * uses)
    items = {1: b"hvc1", 2: kind} | ({3: b"iden"} if nested else {})

    def meta(offset: int) -> bytes:
        places = {1: (offset, len(stream)), 2: (offset + len(stream), len(plan)), 3: (offset, 0)}
        return full(
            b"meta",
            0,
            full(b"hdlr", 0, bytes(4), b"pict", bytes(13)),
            full(b"pitm", 0, struct.pack(">H", max(items))),
            full(
                b"iloc",
                0,
                b"\x44\0" + struct.pack(">H", len(items)),
                *(struct.pack(">HHHII", item, 0, 1, *places[item]) for item in items),
            ),
            full(
                b"iinf",
                0,
                struct.pack(">H", len(items)),
                *(full(b"infe", 2, struct.pack(">HH4sx", item, 0, name)) for item, name in items.items()),
            ),
            full(
                b"iref",
                0,
                box(b"dimg", struct.pack(">HH", 2, uses), struct.pack(">H", 1) * uses),
                *([box(b"dimg", struct.pack(">HHHH", 3, 2, 2, 2))] if nested else []),
            ),
            box(
                b"iprp",
                box(
                    b"ipco",
                    box(b"hvcC", properties[b"hvcC"]),
                    box(b"ispe", properties[b"ispe"]),
                    full(b"ispe", 0, struct.pack(">II", canvas, canvas)),
                    full(b"pixi", 0, b"\3\10\10\10"),
                ),
                full(
                    b"ipma",
                    0,
                    struct.pack(">I", len(items)),
                    *(struct.pack(">HB", item, 2) + (b"\x81\2" if item == 1 else b"\3\4") for item in items),
                ),
            ),
            *([full(twice, 0)] if twice else []),
        )

    start = box(b"ftyp", b"heic", bytes(4), b"mif1heic")
    return start + meta(len(start) + len(meta(0)) + 8) + box(b"mdat", stream, plan)


def picture(data: bytes) -> Picture:
    return Picture(data, "x", max_bytes=10**7, max_pixels=10**6)


def test_the_pixels_of_honest_pictures() -> None:
    assert decoded_pixels(encoded()) == 1500 * 1000
    assert decoded_pixels(memoryview(encoded("RGBA"))) == 2 * 1500 * 1000
    assert decoded_pixels(encoded(tile_size=512)) == 6 * 512 * 512


@pytest.mark.parametrize("kind", [b"grid", b"iovl"])
def test_a_part_counts_as_often_as_it_is_used(kind: bytes) -> None:
    honest = laid_together(kind, side=128, canvas=128, uses=1)
    assert decoded_pixels(honest) == 128 * 128
    assert picture(honest).decode(Fit(32, 32))[5, 5].tolist() == pytest.approx(COLOUR, abs=8)
    hostile = laid_together(kind, side=128, canvas=128, uses=200)
    assert decoded_pixels(hostile) == 200 * 128 * 128
    with pytest.raises(TooLarge, match="x: 3276800 pixels in all of its parts"):
        picture(hostile)


def test_a_picture_of_pictures_counts_their_parts() -> None:
    assert decoded_pixels(laid_together(b"grid", side=128, canvas=128, uses=50, nested=True)) == 2 * 50 * 128 * 128


@pytest.mark.parametrize("kind", [b"pitm", b"iref", b"iprp"])
def test_a_description_of_two_minds_is_refused(kind: bytes) -> None:
    with pytest.raises(InvalidInput, match="x: damaged image"):
        picture(laid_together(b"grid", side=128, canvas=128, uses=1, twice=kind))


def test_a_picture_of_itself_is_refused() -> None:
    data = laid_together(b"grid", side=128, canvas=128, uses=1)
    at = data.index(b"dimg") + 8
    with pytest.raises(InvalidInput, match="x: damaged image"):
        picture(data[:at] + b"\0\2" + data[at + 2 :])


@settings(deadline=None)
@given(data=st.data())
def test_a_changed_description_is_counted_or_refused(data: st.DataObject) -> None:
    whole = bytearray(laid_together(b"grid", side=64, canvas=64, uses=2, nested=True))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 600))
        piece = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([bytes(4), b"\xff" * 4]))
        whole[at : at + len(piece)] = piece
    try:
        assert decoded_pixels(memoryview(whole)[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))]) >= 0
    except ValueError as exc:
        assert str(exc)  # noqa: PT017 - most changes do no harm
