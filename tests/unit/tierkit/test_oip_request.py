"""What an inference request's headers say before its body is read, and how bodies are read."""

import asyncio
import json

import pytest

from tierkit.errors import Overloaded, TooLarge, UnsupportedMedia
from tierkit.http import asgi
from tierkit.http.asgi import BodyRoom
from tierkit.inference.endpoints.request import RequestReader, announced_images, budget_s
from tierkit.tensors import TensorSpec
from tierkit.wire.oip import InferRequest, Limits
from tierkit.wire.oip.compression import compress

IMAGES = TensorSpec(name="images", datatype="UINT8", shape=(-1, 4, 4, 3))
FEATURES = TensorSpec(name="features", datatype="FP32", shape=(-1, 2, 3))


@pytest.mark.parametrize(
    ("length", "json_length", "spec", "images"),
    [
        (b"240", b"0", IMAGES, 5),
        (b"340", b"100", IMAGES, 5),
        (b"387", b"100", IMAGES, 5),
        (b"340", b"100", FEATURES, 10),
        (b"100", b"100", IMAGES, 1),
        (b"100", b"5000", IMAGES, 1),
        (b"4800", None, IMAGES, 1),  # JSON: a pixel may take from one to thirty bytes
        (None, b"0", IMAGES, 1),
        (b"4800", b"-5", IMAGES, 1),
        (b"4800", b"0", TensorSpec(name="x", datatype="UINT8", shape=(-1, -1, -1)), 1),
    ],
)
def test_announced_images(length: bytes | None, json_length: bytes | None, spec: TensorSpec, images: int) -> None:
    named = {b"content-length": length, b"inference-header-content-length": json_length}
    assert announced_images({name: value for name, value in named.items() if value is not None}, spec) == images


def as_json(elements: int) -> bytes:
    tensor = {"name": "x", "shape": [elements], "datatype": "INT32", "data": [7] * elements}
    return json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("header", "timeout", "expected"),
    [
        (b"1500", 0, 1.5),
        (b"1500", 1_000_000, 1.0),
        (None, 0, None),
        (b"1e308", 0, 1e9),
        (None, 2**64, 1e9),
        (b"1e308", 1e308, 1e9),
    ],
)
def test_a_budget_is_at_most_some_thirty_years(header: bytes | None, timeout: float, expected: float | None) -> None:
    headers = {} if header is None else {b"terrace-budget-ms": header}
    assert budget_s(headers, InferRequest(inputs=(), parameters={"timeout": timeout})) == expected


async def test_large_json_is_read_one_after_the_other_with_a_turn_for_others_before_each() -> None:
    reader = RequestReader(Limits())
    turns = 0
    done: dict[str, int] = {}

    async def read(body: bytes, name: str) -> InferRequest:
        request = await reader.read({}, body, BodyRoom())
        done[name] = turns
        return request

    async def others() -> None:
        nonlocal turns
        while len(done) < 4:
            turns += 1
            await asyncio.sleep(0)

    large = [asyncio.create_task(read(as_json(50_000), f"large {number}")) for number in range(3)]
    await asyncio.gather(read(as_json(10), "small"), others(), *large)
    assert list(done) == ["small", "large 0", "large 1", "large 2"]
    assert done["large 0"] < done["large 1"] < done["large 2"]
    assert (await large[2]).inputs[0].data.sum() == 350_000


_RAW = {b"content-encoding": b"zstd", b"inference-header-content-length": b"0"}


@pytest.mark.parametrize(("coding", "told"), [("zstd", 40_000), ("gzip", 21_845), ("deflate", 21_845)])
async def test_images_of_a_compressed_body_need_room_before_it_is_unpacked(coding: str, told: int) -> None:
    def check_room(images: int) -> None:
        if images > 4:
            raise TooLarge(f"{images} images")

    reader, headers = RequestReader(Limits()), {**_RAW, b"content-encoding": coding.encode()}
    four = await reader.read(
        headers, await compress(bytes(4 * 48), coding), BodyRoom(), raw_input=IMAGES, check_room=check_room
    )
    assert four.inputs[0].data.shape == (4, 4, 4, 3)
    many = await compress(bytes(40_000 * 48), coding)
    # What does not say its length is refused after a mebibyte.
    with BodyRoom() as room, pytest.raises(TooLarge, match=f"{told} images"):
        await reader.read(headers, many, room, raw_input=IMAGES, check_room=check_room)


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate"])
async def test_compressed_json_is_bounded_by_what_it_unpacks_to(coding: str) -> None:
    body = await compress(b"{" + b" " * 1000 + b"}", coding)
    reader = RequestReader(Limits(max_json_bytes=1000))
    with pytest.raises(TooLarge, match="unpacks to"):
        await reader.read({b"content-encoding": coding.encode()}, body, BodyRoom())


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate"])
async def test_what_a_body_unpacks_to_counts_as_held(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_MAX_LARGE_BYTES", 800_000)
    body, headers = await compress(bytes(900_000), coding), {**_RAW, b"content-encoding": coding.encode()}
    pixels = TensorSpec(name="pixels", datatype="UINT8", shape=(-1, 1))
    with BodyRoom() as first, BodyRoom() as second:
        await RequestReader(Limits()).read(headers, body, first, raw_input=pixels)
        assert BodyRoom.total_bytes >= 900_000
        with pytest.raises(Overloaded):
            await RequestReader(Limits()).read(headers, body, second, raw_input=pixels)


@pytest.mark.parametrize("coding", [b"zstd", b"ZSTD", b"identity", b"Identity"])
async def test_codings_are_told_apart_whatever_their_case(coding: bytes) -> None:
    body = bytes(48)
    headers = {**_RAW, b"content-encoding": coding}
    sent = await compress(body) if coding.lower() == b"zstd" else body
    assert (await RequestReader(Limits()).read(headers, sent, BodyRoom(), raw_input=IMAGES)).inputs[0].data.shape == (
        1,
        4,
        4,
        3,
    )
    with pytest.raises(UnsupportedMedia, match="'br'"):
        await RequestReader(Limits()).read({**_RAW, b"content-encoding": b"br"}, body, BodyRoom(), raw_input=IMAGES)
