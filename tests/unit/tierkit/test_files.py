"""Pictures that come as files: turns in a bounded pool, damage by position, cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tierkit.errors import InvalidInput
from tierkit.inference.files import Decoded, FileDecoder, are_files
from tierkit.inference.runner import RunResult
from tierkit.tensors import Array, Decode, TensorSpec


def files(*contents: bytes) -> Array:
    array = np.empty(len(contents), object)
    array[:] = contents
    return array


def spec(decode: Decode | None) -> TensorSpec:
    return TensorSpec(name="images", datatype="UINT8", shape=(-1, 2), decode=decode)


def doubled(file: bytes, _stopped: threading.Event) -> Array:
    if not file:
        raise InvalidInput("an empty file")
    return np.array([file[0], 2 * file[0]], np.uint8)


@pytest.fixture
def decoder() -> Iterator[FileDecoder]:
    decoder = FileDecoder()
    yield decoder
    decoder.close()


async def test_each_file_becomes_a_row(decoder: FileDecoder) -> None:
    found = await decoder.decode(spec(doubled), files(*(bytes([number]) for number in range(100))))
    assert found.rows.tolist() == [[number, 2 * number] for number in range(100)]
    assert found.rows.dtype == np.uint8
    assert found.damaged == {}


async def test_damage_is_told_by_position_and_the_others_are_decoded(decoder: FileDecoder) -> None:
    found = await decoder.decode(spec(doubled), files(b"", b"\1", b"", b"\2"))
    assert found.rows.tolist() == [[1, 2], [2, 4]]
    assert found.damaged == {0: "an empty file", 2: "an empty file"}
    nothing = await decoder.decode(spec(doubled), files(b""))
    assert (len(nothing.rows), nothing.damaged) == (0, {0: "an empty file"})


async def test_a_bug_is_no_damage(decoder: FileDecoder) -> None:
    def broken(file: bytes, _stopped: threading.Event) -> Array:
        raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup):
        await decoder.decode(spec(broken), files(b"x"))


async def test_a_short_request_overtakes_a_long_one(decoder: FileDecoder) -> None:
    done: list[int] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def noted(file: bytes, stopped: threading.Event) -> Array:
        loop.call_soon_threadsafe(begun.set)
        done.append(file[0])
        return doubled(file, stopped)

    long = asyncio.create_task(decoder.decode(spec(noted), files(*(b"\1",) * 10_000)))
    await begun.wait()
    await decoder.decode(spec(noted), files(b"\2"))
    await long
    assert done.index(2) < 9_000


async def test_a_cancelled_request_ends_what_is_under_way(decoder: FileDecoder) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(file: bytes, stopped: threading.Event) -> Array:
        begun.set()
        assert stopped.wait(60)
        ended.set()
        raise InvalidInput("given up")

    task = asyncio.create_task(decoder.decode(spec(endless), files(b"x")))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 60)


def test_what_decoding_costs_is_part_of_the_batch() -> None:
    result = RunResult(outputs={}, queue_s=1.0, compute_s=2.0, batch_images=10)
    rows = np.zeros((5, 2), np.uint8)
    assert Decoded(rows, {}, cost_s=1.0).charged(result).compute_s == 2.0 + 10 / 5
    assert Decoded(rows, {}).charged(result) == result


@pytest.mark.parametrize(
    ("decode", "array", "expected"),
    [
        (doubled, files(b"x"), True),
        (None, files(b"x"), False),
        (doubled, np.zeros((1, 2), np.uint8), False),
        (doubled, files(b"x").reshape(1, 1), False),
    ],
)
def test_what_is_a_tensor_of_files(decode: Decode | None, array: Array, expected: bool) -> None:
    assert are_files(spec(decode), array) is expected
