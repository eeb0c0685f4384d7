"""Reading requests straight from ASGI."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from tierkit.asgi import cancelled_on_disconnect, read_body


def sends(messages: Iterable[Message]) -> Receive:
    """A client that sends these messages and then stays silent."""
    left = iter(messages)

    async def receive() -> Message:
        message = next(left, None)
        if message is None:
            await asyncio.Event().wait()
            raise AssertionError
        return message

    return receive


def body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": content, "more_body": more}


async def test_a_body_in_one_piece_is_not_copied() -> None:
    content = b"x" * 1000
    assert await read_body(sends([body(content, more=False)])) is content


async def test_a_body_in_pieces() -> None:
    messages = [body(b"ab", more=True), {"type": "http.request", "more_body": True}, body(b"", more=False)]
    assert await read_body(sends(messages)) == b"ab"


async def test_a_client_that_hangs_up_within_the_body() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(sends([body(b"ab", more=True), {"type": "http.disconnect"}]))


async def test_work_goes_on_while_the_client_waits() -> None:
    async with cancelled_on_disconnect(sends([])):
        await asyncio.sleep(0)


async def test_work_ends_when_the_client_hangs_up() -> None:
    with pytest.raises(ClientDisconnect):
        async with cancelled_on_disconnect(sends([{"type": "http.disconnect"}])):
            await asyncio.Event().wait()
    # The task itself is not left in a cancelled state.
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_cancelled_from_elsewhere_stays_cancelled() -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with cancelled_on_disconnect(sends([])):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with cancelled_on_disconnect(sends([])):
            raise KeyError
