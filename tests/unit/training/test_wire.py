"""Weights and updates as bytes: what comes back, how long they are, and what hostile bytes meet."""

import json
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from tierkit.errors import MalformedMessage
from training.units import Flat
from training.wire import Format, compress, decompress, pack, packed_bytes, unpack, worth_compressing

FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")
EMPTY = np.zeros(0, np.float32)

numbers = arrays(
    np.float32,
    st.integers(1, 600),
    elements=st.one_of(st.just(0.0), st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)),
)


def there_and_back(values: Flat, format: Format, *, sparse: bool = False, buffers: Flat = EMPTY) -> Flat:
    found, other = unpack(pack(values, buffers, format, sparse=sparse), values=len(values), buffers=len(buffers))
    assert found.dtype == other.dtype == np.float32
    assert found.flags.writeable
    assert other.tobytes() == buffers.tobytes()
    return found


@pytest.mark.parametrize("sparse", [False, True])
@given(values=numbers)
def test_fp32_comes_back_to_the_bit(sparse: bool, values: Flat) -> None:
    assert (there_and_back(values, "fp32", sparse=sparse) == values).all()


@pytest.mark.parametrize("sparse", [False, True])
@given(values=numbers)
def test_bf16_is_off_by_at_most_a_256th(sparse: bool, values: Flat) -> None:
    found = there_and_back(values, "bf16", sparse=sparse)
    assert (np.abs(found - values) <= np.abs(values) * 2.0**-8).all()
    assert there_and_back(found, "bf16").tobytes() == found.tobytes()


@pytest.mark.parametrize("sparse", [False, True])
@given(values=numbers)
def test_int8_is_off_by_at_most_half_a_127th_of_its_blocks_largest(sparse: bool, values: Flat) -> None:
    found = there_and_back(values, "int8", sparse=sparse)
    kept = (
        values[values != 0]
        if sparse and len(pack(values, EMPTY, "int8", sparse=True)) != packed_bytes(len(values), 0, "int8")
        else values
    )
    got = found[values != 0] if len(kept) != len(values) else found
    for start in range(0, len(kept), 256):
        block, back = kept[start : start + 256], got[start : start + 256]
        assert (np.abs(back - block) <= np.abs(block).max(initial=0.0) / 127 * 0.5001).all()


def test_bf16_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, np.nan], np.float32)
    found = there_and_back(values, "bf16")
    np.testing.assert_array_equal(found, np.array([1.0, 1 + 4 * 2**-8, np.inf, -np.inf, np.nan], np.float32))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so_in_int8(bad: float) -> None:
    assert not np.isfinite(there_and_back(np.array([1, bad, 2], np.float32), "int8").sum())


@pytest.mark.parametrize("format", FORMATS)
@given(values=st.integers(1, 70_000), buffers=st.integers(0, 2_000))
@settings(max_examples=40)
def test_the_formula_counts_the_bytes(format: Format, values: int, buffers: int) -> None:
    packed = pack(np.ones(values, np.float32), np.zeros(buffers, np.float32), format)
    assert len(packed) == packed_bytes(values, buffers, format)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_are_left_out_only_where_that_is_shorter(format: Format) -> None:
    values = np.ones(10_000, np.float32)
    dense = packed_bytes(len(values), 0, format)
    assert len(pack(values, EMPTY, format, sparse=True)) == dense
    values[::2] = 0
    shorter = pack(values, EMPTY, format, sparse=True)
    assert len(shorter) < 0.7 * dense
    np.testing.assert_array_equal(unpack(shorter, values=10_000, buffers=0)[0], values)


def test_buffers_travel_in_fp32() -> None:
    buffers = np.random.default_rng(0).normal(size=77).astype(np.float32)
    for format in FORMATS:
        there_and_back(np.ones(5, np.float32), format, buffers=buffers)


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def vector(dtype: str, length: int, start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": [length], "data_offsets": [start, stop]}


NO_BUFFERS = {"buffers": vector("F32", 0, 0, 0)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        file_of(b"{" * 2_000),
        file_of({}),
        file_of(NO_BUFFERS),
        file_of({"values": vector("F32", 4, 0, 16)}, bytes(16)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16)}, bytes(15)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16)}, bytes(17)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 2**62)}, bytes(16)),
        file_of(NO_BUFFERS | {"values": vector("F32", 2**62, 0, 16)}, bytes(16)),
        file_of(NO_BUFFERS | {"values": vector("F64", 4, 0, 32)}, bytes(32)),
        file_of(NO_BUFFERS | {"values": vector("I32", 4, 0, 16)}, bytes(16)),
        file_of(NO_BUFFERS | {"values": vector("F32", 3, 0, 12)}, bytes(12)),
        file_of(NO_BUFFERS | {"values": vector("F32", 5, 0, 20)}, bytes(20)),
        file_of(NO_BUFFERS | {"values": vector("I8", 4, 0, 4)}, bytes(4)),
        file_of(NO_BUFFERS | {"scales": vector("F32", 2, 0, 8), "values": vector("I8", 4, 8, 12)}, bytes(12)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16), "more": vector("U8", 1, 16, 17)}, bytes(17)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16), "mask": vector("U8", 1, 16, 17)}, bytes(16) + b"\xe0"),
        file_of({"buffers": vector("F32", 1, 0, 4), "values": vector("F32", 4, 4, 20)}, bytes(20)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16)}, bytes(100_000)),
    ],
)
def test_what_is_no_update_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(body, values=4, buffers=0)


@given(st.sampled_from(FORMATS), st.booleans(), st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_refused_or_are_other_numbers(format: Format, sparse: bool, data: st.DataObject) -> None:
    body = bytearray(pack(np.repeat(np.array([0, 1], np.float32), 500), np.ones(3, np.float32), format, sparse=sparse))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(body[: data.draw(st.integers(0, len(body)))]) if data.draw(st.booleans()) else bytes(body)
    try:
        found, buffers = unpack(cut, values=1_000, buffers=3)
    except MalformedMessage:
        return
    assert (found.shape, buffers.shape) == ((1_000,), (3,))
    assert found.dtype == buffers.dtype == np.float32


@given(st.binary(max_size=2_000))
def test_compression_gives_back_what_it_was_given(body: bytes) -> None:
    assert decompress(compress(body), most_bytes=len(body)) == body


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zstd at all",
        compress(bytes(1_000_000)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1_000_000)),
        compress(bytes(1_000))[:-3],
    ],
    ids=["empty", "other", "long", "long without a size", "cut"],
)
def test_what_is_no_zstd_or_unpacks_to_too_much_is_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decompress(packed, most_bytes=2_000)


def test_slow_links_get_compressed_bodies() -> None:
    assert [worth_compressing(speed) for speed in (None, 1e9, 1e6)] == [False, False, True]
