"""Bodies as Zstandard frames: what goes in comes out, and no frame unpacks to more than is accepted."""

import pytest
import zstandard
from hypothesis import given, strategies as st

from tierkit.errors import MalformedMessage, TooLarge
from tierkit.wire.oip.compression import _compress, compress, decompress


@given(st.binary(min_size=1, max_size=5000))
def test_what_goes_in_comes_out(body: bytes):
    assert zstandard.ZstdDecompressor().decompress(_compress(body)) == body


async def test_round_trip():
    body = b"features" * 10_000
    frame = await compress(body)
    assert len(frame) < 1000
    assert await decompress(frame, len(body)) == body


async def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 24))
    assert len(bomb) < 3000
    with pytest.raises(TooLarge, match="unpacks to 16777216 bytes; at most 1000000 are accepted"):
        await decompress(bomb, 1_000_000)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "no zstd frame"),
        (b"not a frame at all", "no zstd frame"),
        (_compress(b"x" * 999)[:-2], "is damaged"),
        (_compress(b"x" * 999) + b"more", "is damaged"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 999), "does not say how long"),
    ],
)
async def test_what_is_no_whole_frame_is_refused(frame: bytes, words: str):
    with pytest.raises(MalformedMessage, match=words):
        await decompress(frame, 10_000)
