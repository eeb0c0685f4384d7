"""Reading requests straight from ASGI."""

import asyncio
from collections.abc import Callable, Iterable

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from tierkit.errors import TooLarge
from tierkit.http.asgi import cancelled_on_disconnect, read_body
from tierkit.http.exchange import ON_DISCONNECT


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


async def test_a_body_that_is_larger_than_a_route_takes_is_not_read_to_its_end() -> None:
    messages = [body(b"ab", more=True), body(b"cd", more=True), body(b"e", more=True)]
    with pytest.raises(TooLarge, match="larger than the 4 bytes that this route takes"):
        await read_body(sends(messages), most_bytes=4)
    assert await read_body(sends([*messages[:1], body(b"cd", more=False)]), most_bytes=4) == b"abcd"


async def test_a_client_that_hangs_up_within_the_body() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(sends([body(b"ab", more=True), {"type": "http.disconnect"}]))


class Client:
    """Hangs up when told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.scope: Scope = {"extensions": {ON_DISCONNECT: self.on_disconnect}}

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def hang_up(self) -> None:
        for callback in self.callbacks:
            callback()


async def test_work_goes_on_while_the_client_waits_and_nobody_is_called_afterwards() -> None:
    client = Client()
    with cancelled_on_disconnect(client.scope):
        await asyncio.sleep(0)
        assert len(client.callbacks) == 1
    assert client.callbacks == []


async def test_work_ends_when_the_client_hangs_up() -> None:
    client = Client()
    asyncio.get_running_loop().call_soon(client.hang_up)
    with pytest.raises(ClientDisconnect), cancelled_on_disconnect(client.scope):
        await asyncio.Event().wait()
    # The task itself is not left in a cancelled state.
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_cancelled_from_elsewhere_stays_cancelled() -> None:
    inside = asyncio.Event()

    async def work() -> None:
        with cancelled_on_disconnect(Client().scope):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError), cancelled_on_disconnect(Client().scope):
        raise KeyError
