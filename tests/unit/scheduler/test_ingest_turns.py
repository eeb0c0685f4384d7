"""Who decodes next: small uploads wait for no long ones, and uploads that nobody waits for end."""

import asyncio
import threading
from collections.abc import Generator

import pytest

from scheduler.ingest.turns import Turns

WAIT_S = 30


async def run(turns: Turns, steps: Generator[bool, None, str]) -> str:
    async with asyncio.timeout(WAIT_S):
        return await turns.run(steps, threading.Event())


async def test_uploads_take_turns():
    turns = Turns(1, turn_s=0)
    order: list[str] = []

    def steps(name: str) -> Generator[bool, None, str]:
        for _ in range(4):
            yield False
            order.append(name)
        return name

    assert list(await asyncio.gather(run(turns, steps("a")), run(turns, steps("b")))) == ["a", "b"]
    assert order == ["a", "b"] * 4


async def test_one_large_picture_is_decoded_at_a_time():
    turns = Turns(3)
    decoding = most = 0
    lock = threading.Lock()

    def steps() -> Generator[bool, None, str]:
        nonlocal decoding, most
        for _ in range(5):
            yield True
            with lock:
                decoding += 1
                most = max(most, decoding)
            with lock:
                decoding -= 1
        return ""

    await asyncio.gather(*(run(turns, steps()) for _ in range(6)))
    assert most == 1


async def test_large_pictures_leave_a_decoder_to_the_others():
    turns = Turns(2)
    passed = threading.Event()

    def large() -> Generator[bool, None, str]:
        yield True
        assert passed.wait(WAIT_S)
        return "large"

    def small() -> Generator[bool, None, str]:
        yield False
        passed.set()
        return "small"

    others = [asyncio.create_task(run(turns, large())) for _ in range(3)]
    assert await run(turns, small()) == "small"
    assert await asyncio.gather(*others) == ["large"] * 3


async def test_an_upload_that_nobody_waits_for_ends_in_the_middle_of_a_step():
    turns = Turns(1)
    begun, stopped, closed = threading.Event(), threading.Event(), threading.Event()

    def steps() -> Generator[bool, None, str]:
        try:
            yield False
            begun.set()
            assert stopped.wait(WAIT_S)
            yield False
            pytest.fail("went on")
        finally:
            closed.set()

    upload = asyncio.create_task(turns.run(steps(), stopped))
    waiting = asyncio.create_task(turns.run(steps(), threading.Event()))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    waiting.cancel()
    upload.cancel()
    for task in (upload, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert closed.is_set()

    def good() -> Generator[bool, None, str]:
        yield False
        return "good"

    assert await run(turns, good()) == "good"


async def test_the_error_of_a_step_is_that_of_the_upload():
    def steps() -> Generator[bool, None, str]:
        yield False
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(Turns(1), steps())
