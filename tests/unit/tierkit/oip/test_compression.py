"""Compressed bodies: what goes in comes out, and none unpacks to more than is accepted."""

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, strategies as st

from tierkit.errors import MalformedMessage, TooLarge, UnsupportedMedia
from tierkit.wire.oip.compression import CODINGS, accepted_coding, compress, compress_blocking, decompress

READERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdDecompressor().decompress,
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}
WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("coding", CODINGS)
@given(body=st.binary(min_size=1, max_size=5000))
def test_others_read_what_is_written(coding: str, body: bytes):
    assert READERS[coding](compress_blocking(body, coding)) == body


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(
    "body",
    [b"f", b"features" * 10_000, bytes(3 << 20), bytes(range(256)) * 20_000],
    ids=["one byte", "short", "zeros", "long"],
)
async def test_what_others_write_is_read(coding: str, body: bytes):
    assert await decompress(await compress(body, coding), len(body), coding) == body
    held: list[int] = []
    assert await decompress(WRITERS[coding](body), len(body), coding, hold=held.append) == body
    assert held == sorted(held)
    assert held[-1] == len(body)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_content_that_does_not_shrink_is_read(coding: str):
    body = b"".join(zlib.compress(b"%d" % number) for number in range(200_000))  # of several slices and steps
    assert len(body) > 2 << 20
    assert await decompress(WRITERS[coding](body), len(body), coding) == body


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_bomb_is_refused_at_its_bound(coding: str):
    bomb = WRITERS[coding](bytes(1 << 28))
    assert len(bomb) < 300_000
    held: list[int] = []
    with pytest.raises(TooLarge, match="unpacks to"):
        await decompress(bomb, 1_500_000, coding, hold=held.append)
    assert max(held, default=0) <= 1_500_000


@pytest.mark.parametrize("coding", CODINGS)
async def test_where_nobody_holds_the_content_nothing_more_is_unpacked(coding: str):
    def hold(size: int) -> None:
        raise TooLarge(f"no room for {size}")

    with pytest.raises(TooLarge, match="no room for"):
        await decompress(WRITERS[coding](bytes(1 << 24)), 1 << 25, coding, hold=hold)


LONG = b"x" * 999
DAMAGED = {
    "no zstd": ("zstd", b"", "not a zstd frame"),
    "text as zstd": ("zstd", b"not a frame at all", "not a zstd frame"),
    "cut zstd": ("zstd", compress_blocking(LONG, "zstd")[:-2], "is damaged"),
    "more than zstd": ("zstd", compress_blocking(LONG, "zstd") + b"more", "is damaged"),
    "zstd of unknown length": (
        "zstd",
        zstandard.ZstdCompressor(write_content_size=False).compress(LONG),
        "does not say how long",
    ),
    "no gzip": ("gzip", b"", "not one whole gzip stream"),
    "text as gzip": ("gzip", b"not a member at all", "not a gzip stream"),
    "deflate as gzip": ("gzip", zlib.compress(LONG), "not a gzip stream"),
    "cut gzip": ("gzip", gzip.compress(LONG)[:-2], "not one whole gzip stream"),
    "more than gzip": ("gzip", gzip.compress(LONG) + b"more", "not one whole gzip stream"),
    "two gzips": ("gzip", gzip.compress(LONG) * 2, "not one whole gzip stream"),
    "gzip with a wrong sum": ("gzip", gzip.compress(LONG)[:-8] + bytes(8), "not a gzip stream"),
    "no deflate": ("deflate", b"", "not one whole deflate stream"),
    "gzip as deflate": ("deflate", gzip.compress(LONG), "not a deflate stream"),
    "cut deflate": ("deflate", zlib.compress(LONG)[:-1], "not one whole deflate stream"),
    "more than deflate": ("deflate", zlib.compress(LONG) + b"more" * 99_999, "not one whole deflate stream"),
}


@pytest.mark.parametrize("which", DAMAGED)
async def test_what_is_no_whole_stream_is_refused(which: str):
    coding, body, words = DAMAGED[which]
    with pytest.raises(MalformedMessage, match=words):
        await decompress(body, 10_000, coding)


async def test_other_codings_are_refused():
    with pytest.raises(UnsupportedMedia, match="zstd, gzip, deflate"):
        await decompress(b"anything", 10_000, "br")


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("GZip", "gzip"),
        (" deflate ", "deflate"),
        ("gzip;q=1.0, identity; q=0.5", "gzip"),
        ("identity;q=0, gzip", "gzip"),
        ("gzip;q=0.001", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000", None),
        ("identity", None),
        ("*", None),
        ("zstd", None),  # Terrace's own nodes ask for none
        ("br", None),
        ("gzip, deflate", None),
        ("gzip, deflate, br, zstd", None),
        (",,gzip,", "gzip"),
    ],
)
def test_which_coding_an_answer_has(header: str, coding: str | None):
    assert accepted_coding(header) == coding
