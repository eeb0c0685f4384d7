"""Weights and updates as bytes: what comes back, how long they are, and what hostile bytes meet."""

import json
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import deserialize

from tierkit.errors import MalformedMessage
from training.payloads import Format, compress, decompress, pack, packed_bytes, rounded, unpack, worth_compressing
from training.units import Flat

FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")
EMPTY = np.zeros(0, np.float32)

numbers = arrays(
    np.float32,
    st.integers(1, 600),
    elements=st.one_of(st.just(0.0), st.floats(-(2.0**127), 2.0**127, width=32)),
)
"""Zeros, numbers that are too small for a full mantissa, and all others."""


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
    # Below 2**-126 steps are as large as there.
    assert (np.abs(found - values) <= np.maximum(np.abs(values), 2.0**-126) * 2.0**-8).all()
    assert there_and_back(found, "bf16").tobytes() == found.tobytes()


@pytest.mark.parametrize("sparse", [False, True])
@given(values=numbers)
@example(values=np.array([190 * 2.0**-149, -190 * 2.0**-149], np.float32)).via("a 127th of it is rounded to less")
def test_int8_is_off_by_at_most_a_254th_of_its_blocks_largest(sparse: bool, values: Flat) -> None:
    found = there_and_back(values, "int8", sparse=sparse)
    kept = (
        values[values != 0]
        if sparse and len(pack(values, EMPTY, "int8", sparse=True)) != packed_bytes(len(values), 0, "int8")
        else values
    )
    got = found[values != 0] if len(kept) != len(values) else found
    for start in range(0, len(kept), 256):
        block, back = kept[start : start + 256], got[start : start + 256]
        most = np.float64(np.abs(block).max(initial=0.0)) / 254 * 1.0001 + 1e-43
        assert (np.abs(back.astype(np.float64) - block) <= most).all()


@pytest.mark.parametrize("format", FORMATS)
@given(values=numbers)
def test_rounded_is_what_comes_back(format: Format, values: Flat) -> None:
    found = rounded(values, format)
    assert found.tobytes() == there_and_back(values, format).tobytes()
    assert not np.shares_memory(found, values)


def test_bf16_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, np.nan], np.float32)
    found = there_and_back(values, "bf16")
    np.testing.assert_array_equal(found, np.array([1.0, 1 + 4 * 2**-8, np.inf, -np.inf, np.nan], np.float32))


@pytest.mark.train
def test_bf16_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    bits = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32)
    values = np.concatenate([bits, bits & 0xFFFF8000, bits | 0x8000]).view(np.float32)  # with many ties
    theirs = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(there_and_back(values, "bf16"), theirs)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_block_with_what_is_not_finite_has_nothing_finite_in_int8(bad: float, sparse: bool) -> None:
    values = np.ones(10_000, np.float32)
    values[5_000:] = 0
    values[300] = bad
    found = there_and_back(values, "int8", sparse=sparse)
    assert not np.isfinite(found[256:512]).any()
    assert (np.delete(found, range(256, 512)) == np.delete(values, range(256, 512))).all()


def test_a_block_of_zeros_has_scale_0_in_int8() -> None:
    values = np.zeros(600, np.float32)
    values[:256] = 3
    tensors = dict(deserialize(pack(values, EMPTY, "int8")))  # type: ignore[no-untyped-call]
    assert np.frombuffer(tensors["scales"]["data"], np.float32).tolist() == [np.float32(3) / np.float32(127), 0, 0]


def test_the_wire_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import training.payloads"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("format", FORMATS)
@given(values=st.integers(1, 70_000), buffers=st.integers(0, 2_000))
@settings(max_examples=40)
def test_the_formula_counts_the_bytes(format: Format, values: int, buffers: int) -> None:
    packed = pack(np.ones(values, np.float32), np.zeros(buffers, np.float32), format)
    assert len(packed) == packed_bytes(values, buffers, format)
    assert struct.unpack_from("<Q", packed)[0] % 8 == 0, "numbers begin where a processor likes them to"


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
        file_of(
            NO_BUFFERS | {"values": vector("F32", 4, 0, 16), "mask": vector("U8", 2, 16, 18)}, bytes(16) + b"\xf0\0"
        ),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16), "mask": vector("I8", 1, 16, 17)}, bytes(16) + b"\xf0"),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16), "mask": vector("U8", 0, 16, 16)}, bytes(16)),
        file_of(NO_BUFFERS | {"mask": vector("U8", 1, 0, 1)}, b"\xf0"),
        file_of(NO_BUFFERS | {"values": {**vector("F32", 4, 0, 16), "shape": [2, 2]}}, bytes(16)),
        file_of(NO_BUFFERS | {"values": {**vector("F32", 1, 0, 4), "shape": []}}, bytes(4)),
        file_of(NO_BUFFERS | {"values": vector("F32", -4, 0, 16)}, bytes(16)),
        file_of({"buffers": vector("F32", 0, 16, 16), "values": vector("F32", 4, 4, 20)}, bytes(20)),
        file_of(NO_BUFFERS | {"\ud800": vector("F32", 4, 0, 16)}, bytes(16)),
        file_of(NO_BUFFERS | {f"t{n}": vector("U8", 0, 0, 0) for n in range(50)}),
        file_of({"buffers": vector("F32", 1, 0, 4), "values": vector("F32", 4, 4, 20)}, bytes(20)),
        file_of(NO_BUFFERS | {"values": vector("F32", 4, 0, 16)}, bytes(100_000)),
    ],
)
def test_what_is_no_update_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(body, values=4, buffers=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sparse", [False, True])
def test_unpacking_needs_three_times_the_memory_of_its_result(format: Format, sparse: bool) -> None:
    values = np.ones(1_000_000, np.float32)
    values[::7] = 0
    body = memoryview(pack(values, EMPTY, format, sparse=sparse))
    assert peak_bytes(body, values=len(values)) < 3 * values.nbytes


def test_a_header_of_many_tensors_costs_no_memory() -> None:
    body = file_of({f"t{n}": vector("U8", 0, 0, 0) for n in range(50_000)})
    assert peak_bytes(body, values=1_000_000) < 100_000


def peak_bytes(body: bytes | memoryview, *, values: int) -> int:
    """Memory that was in use at a time while a body was unpacked."""
    tracemalloc.start()
    try:
        unpack(body, values=values, buffers=0)
    except MalformedMessage:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@given(st.sampled_from(FORMATS), st.booleans(), st.data())
@settings(max_examples=500)
def test_damaged_bytes_are_refused_or_are_other_numbers(format: Format, sparse: bool, data: st.DataObject) -> None:
    body = bytearray(pack(np.repeat(np.array([0, 1], np.float32), 500), np.ones(3, np.float32), format, sparse=sparse))
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of them in the header, which is the smaller part.
        most = data.draw(st.sampled_from([200, len(body) - 1]))
        body[data.draw(st.integers(0, most))] = data.draw(st.integers(0, 255))
    cut = bytes(body[: data.draw(st.integers(0, len(body)))]) if data.draw(st.booleans()) else bytes(body)
    try:
        found, buffers = unpack(cut, values=1_000, buffers=3)
    except MalformedMessage:
        return
    assert (found.shape, buffers.shape) == ((1_000,), (3,))
    assert found.dtype == buffers.dtype == np.float32


@given(st.binary(min_size=1, max_size=2_000))
def test_compression_gives_back_what_it_was_given(body: bytes) -> None:
    assert decompress(compress(body), most_bytes=len(body)) == body


def sized(length: int, body: bytes) -> bytes:
    """A zstd frame whose header says that it unpacks to so many bytes."""
    frame = compress(body)
    kind = frame[4] >> 6
    assert kind == 2, "the length has four bytes, after magic number and descriptor"
    return frame[:5] + struct.pack("<I", length) + frame[9:]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zstd at all",
        sized(1_000, bytes(1_000_000)),
        sized(2_000, bytes(1_000_000)[:100_000]),
        sized(2**32 - 1, bytes(100_000)),
        compress(bytes(1_000)) * 2,
        compress(bytes(1_000)) + b"more",
        compress(b"") + compress(bytes(1_000_000)),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip" + compress(bytes(1_000_000)),
        compress(bytes(1_000_000)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1_000_000)),
        compress(bytes(1_000))[:-3],
    ],
    ids=[
        "empty",
        "other",
        "says less",
        "says little",
        "says much",
        "two frames",
        "more after it",
        "long after nothing",
        "long after a frame to skip",
        "long",
        "long without a size",
        "cut",
    ],
)
def test_what_is_no_zstd_or_unpacks_to_too_much_is_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decompress(packed, most_bytes=2_000)


def test_slow_links_get_compressed_bodies() -> None:
    assert [worth_compressing(speed) for speed in (None, 1e9, 1e6)] == [False, False, True]
