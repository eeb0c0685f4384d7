"""Payloads of weights and updates: safetensors in fp32, bf16 or int8, compressed for a slow link.

The payload has only arrays; headers of the request describe them. This module needs only numpy and safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from tierkit.errors import MalformedMessage
from training.units import Flat

__all__ = [
    "Format",
    "compress",
    "decompress",
    "format_of_weights",
    "pack",
    "packed_bytes",
    "rounded",
    "unpack",
    "worth_compressing",
]

Format = Literal["fp32", "bf16", "int8"]
"""Format of numbers. int8 is only for updates; the weights of such a run are sent in bf16."""

BLOCK = 256
"""Numbers in int8 that have one scale."""

_COMPRESSION_BYTES_PER_S = 60e6
"""A link that is slower gains by compression."""
_LEVEL = 1

_MOST_HEADER_BYTES = 4096
"""Most bytes of a header; ours have about 200. A longer one could describe enough tensors to fill the memory with their
list.
"""
_CHUNK = 1 << 16
"""Numbers that are converted at a time, a multiple of `BLOCK`. Their intermediate values fit the processor's cache."""
_NAMES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}


def format_of_weights(format: Format) -> Format:
    """Format of the weights in a run whose updates have this format."""
    return "fp32" if format == "fp32" else "bf16"


def pack(values: Flat, buffers: Flat, format: Format, *, sparse: bool = False) -> bytes:
    """A safetensors file of two vectors.

    Args:
        format: number format of `values`; `buffers` are always fp32. In bf16 each number is rounded to the nearest,
            with a relative error of at most 2**-8. In int8 it is off by at most 1/254 of the largest in its block of
            256 (and 1e-43). A block with NaN or an infinity comes back without a finite number.
        sparse: leave out zeros where that makes it shorter: a bitmap says where they are. Nothing is lost by it but the
            sign of a zero.
    """
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    if sparse and (mask := _mask(values, format)) is not None:
        tensors["mask"] = ("uint8", np.packbits(mask))
        values = values[np.flatnonzero(mask)]
    if format == "fp32":
        tensors["values"] = ("float32", values)
    elif format == "bf16":
        tensors["values"] = ("bfloat16", _to_bf16(values))
    else:
        scales, whole = _to_int8(values)
        tensors |= {"scales": ("float32", scales), "values": ("int8", whole)}
    tensors["buffers"] = ("float32", buffers)
    # The library reads the arrays where they are, so they are kept until it has.
    kept = {name: (kind, np.ascontiguousarray(array)) for name, (kind, array) in tensors.items()}
    return bytes(
        serialize(
            {
                name: TensorSpec(dtype=kind, shape=[array.size], data_ptr=array.ctypes.data, data_len=array.nbytes)
                for name, (kind, array) in kept.items()
            }
        )
    )


def rounded(values: Flat, format: Format) -> Flat:
    """Return, in a new vector, the numbers that `unpack` gives after a `pack` that left nothing out."""
    if format == "fp32":
        return values.copy()
    return _from_bf16(_to_bf16(values)) if format == "bf16" else _from_int8(*_to_int8(values))


def packed_bytes(values: int, buffers: int, format: Format) -> int:
    """Length of the result of `pack` for these numbers of values when nothing is left out."""
    each = {"fp32": 4 * values, "bf16": 2 * values, "int8": values + 4 * -(-values // BLOCK)}[format]
    return _header_bytes(values, buffers, format) + each + 4 * buffers


def unpack(body: bytes | memoryview, *, values: int, buffers: int) -> tuple[Flat, Flat]:
    """The two vectors of `pack`, of these lengths, in fp32. Numbers that are not finite are left as they are.

    It needs at most three times the memory of its result, whatever the body contains.

    Raises:
        MalformedMessage: it holds something else.
    """
    if len(body) > packed_bytes(values, buffers, "fp32") + values // 8 + _MOST_HEADER_BYTES:
        raise MalformedMessage(f"{len(body):,} bytes are more than the {values:,} numbers of this network need")
    header_bytes = int.from_bytes(body[:8], "little")
    if header_bytes > _MOST_HEADER_BYTES:
        raise MalformedMessage(f"a header of {header_bytes:,} bytes, expected at most {_MOST_HEADER_BYTES:,}")
    try:
        found = dict(deserialize(bytes(body)))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as exc:
        raise MalformedMessage(f"no vectors in safetensors: {str(exc)[:200]}") from exc
    kinds = {name: _NAMES.get(each["dtype"], "") for name, each in found.items()}
    kind = kinds.get("values", "")
    wanted = {"values", "buffers"} | ({"scales"} if kind == "int8" else set()) | ({"mask"} & found.keys())
    if found.keys() != wanted or kind not in ("float32", "bfloat16", "int8"):
        raise MalformedMessage(
            "the vectors values (F32, BF16, or I8 with scales) and buffers are wanted, and no others"
        )
    count, mask = values, None
    if "mask" in found:
        mask = _mask_of(_vector(found, "mask", "uint8", (values + 7) // 8), values)
        count = int(np.count_nonzero(mask))
    if kind == "int8":
        scales = _vector(found, "scales", "float32", -(-count // BLOCK)).view(np.float32)
        numbers = _from_int8(scales, _vector(found, "values", kind, count).view(np.int8))
    elif kind == "bfloat16":
        numbers = _from_bf16(_vector(found, "values", kind, count).view(np.uint16))
    else:
        numbers = _vector(found, "values", kind, count).view(np.float32)
    if mask is not None:
        numbers = _spread(numbers, mask)
    return numbers, _vector(found, "buffers", "float32", buffers).view(np.float32)


def compress(body: bytes) -> bytes:
    """Compress with zstd."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(body)


def decompress(body: bytes, *, most_bytes: int) -> bytes:
    """The body that `compress` was given.

    Raises:
        MalformedMessage: it is not zstd, is empty or longer than `most_bytes`, or has no length.
    """
    try:
        length = zstandard.frame_content_size(body)
        if 0 < length <= most_bytes:  # the library does not look at what follows a frame of nothing
            return zstandard.ZstdDecompressor().decompress(body, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise MalformedMessage(f"no zstd: {str(exc)[:200]}") from exc
    said = f"{length:,}" if length >= 0 else "an unknown number of"
    raise MalformedMessage(f"the body unpacks to {said} bytes, expected from 1 to {most_bytes:,}")


def worth_compressing(bytes_per_s: float | None) -> bool:
    """True if a compressed body arrives sooner.

    The threshold was measured with gradients of mnist-100, mnist-64-64 and wrn-16-2 in bf16, on one core of a Xeon
    (2026). Level 1 reads 200 to 850 MB/s, leaves 0.62 to 0.79 of the bytes, and decompresses 520 to 780 MB/s. Below 56
    to 82 MB/s the saved bytes would take longer than both. In fp32, of which it leaves 0.93, that is below 21 to 34
    MB/s.
    """
    return bytes_per_s is not None and bytes_per_s < _COMPRESSION_BYTES_PER_S


def _mask(values: Flat, format: Format) -> NDArray[np.bool_] | None:
    """A mask of the numbers that are not zero; None if leaving out the zeros saves nothing."""
    zeros = len(values) - int(np.count_nonzero(values))
    size = {"fp32": 4, "bf16": 2, "int8": 1}[format]
    return values != 0 if zeros * size > len(values) // 8 + 256 else None


def _mask_of(packed: NDArray[np.uint8], values: int) -> NDArray[np.bool_]:
    return np.unpackbits(packed, count=values).view(np.bool_)


def _vector(found: dict[str, Any], name: str, kind: str, length: int) -> NDArray[np.uint8]:
    """The bytes of a vector of this kind and length, writable.

    Raises:
        MalformedMessage: it is another.
    """
    each = found[name]
    if _NAMES.get(each["dtype"]) != kind or list(each["shape"]) != [length]:
        raise MalformedMessage(
            f"{name} is {each['dtype']} of shape {str(list(each['shape']))[:60]}, expected {length:,} numbers as {kind}"
        )
    data = each["data"]
    # What the library hands out is a copy of its own already, where it can be written to.
    return np.frombuffer(data if isinstance(data, bytearray) else bytearray(data), np.uint8)


def _spread(numbers: Flat, mask: NDArray[np.bool_]) -> Flat:
    """Each number where the mask has its bit, zeros elsewhere."""
    spread, taken = np.zeros(len(mask), np.float32), 0
    for chunk in _chunks(len(mask), _CHUNK):
        # Faster than the mask itself, which costs a wrong guess of the processor at each change.
        places = np.flatnonzero(mask[chunk])
        spread[chunk][places] = numbers[taken : taken + len(places)]
        taken += len(places)
    return spread


def _to_bf16(values: Flat) -> NDArray[np.uint16]:
    """Rounded to nearest even; NaN stays NaN."""
    bits, halves = np.ascontiguousarray(values).view(np.uint32), np.empty(len(values), np.uint16)
    for chunk in _chunks(len(values), _CHUNK):
        rounded = bits[chunk] >> 16
        rounded &= 1  # a tie goes to the even neighbour
        rounded += 0x7FFF
        rounded += bits[chunk]
        rounded >>= 16
        halves[chunk] = rounded
        missing = np.isnan(values[chunk])
        if missing.any():
            halves[chunk][missing] = 0x7FC0
    return halves


def _from_bf16(halves: NDArray[np.uint16]) -> Flat:
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _to_int8(values: Flat) -> tuple[Flat, NDArray[np.int8]]:
    """The scale of each block, and whole numbers from -127 to 127."""
    blocks = np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)
    scales, whole = np.empty(len(blocks), np.float32), np.empty(blocks.shape, np.int8)
    # A block with a number that is not finite has a scale like it, so that the receiver refuses the whole update.
    with np.errstate(invalid="ignore", over="ignore"):
        for chunk in _chunks(len(blocks), _CHUNK // BLOCK):
            scale = np.abs(blocks[chunk]).max(axis=1) / np.float32(127)
            steps = np.rint(blocks[chunk] / np.where(scale > 0, scale, np.float32(1))[:, None])
            # fmax takes the other one of NaN and a number.
            scales[chunk], whole[chunk] = scale, np.fmin(np.fmax(steps, -127), 127)
    return scales, whole.reshape(-1)[: len(values)]


def _from_int8(scales: Flat, whole: NDArray[np.int8]) -> Flat:
    numbers, full = whole.astype(np.float32), len(whole) // BLOCK
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = numbers[: full * BLOCK].reshape(-1, BLOCK)
        blocks *= scales[:full, None]
        numbers[full * BLOCK :] *= scales[full:]
    return numbers


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _header_bytes(values: int, buffers: int, format: Format) -> int:
    """Bytes of the header and its length. It has type, shape and place of each vector, and is padded to a multiple of
    8."""
    kind, size = {"fp32": ("F32", 4), "bf16": ("BF16", 2), "int8": ("I8", 1)}[format]
    scales = [("scales", "F32", 4, -(-values // BLOCK))] if format == "int8" else []
    header, start = {}, 0
    for name, dtype, each, length in [("buffers", "F32", 4, buffers), *scales, ("values", kind, size, values)]:
        header[name] = {"dtype": dtype, "shape": [length], "data_offsets": [start, start + each * length]}
        start += each * length
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8
