"""Receivers of webhooks in a second process: one answers at once, the other slowly.

They read HTTP by hand, so that they take little of the machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection as Pipe

from experiments.bench.load import loop_factory

__all__ = ["Received", "Receivers", "receivers"]

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_EVENT = re.compile(rb'^\{"id":"evt_(\d+)","type":"[a-z._]+","timestamp":"([^"]+)"')
_ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass(kw_only=True)
class Received:
    """The events that a receiver has taken."""

    numbers: set[int] = field(default_factory=set)
    repeated: int = 0
    """Events that came again."""
    lag_s: list[float] = field(default_factory=list)
    """Seconds between an event and its arrival, by the clock of this machine."""


class _Receiver:
    def __init__(self, delay_s: float) -> None:
        self.received = Received()
        self._delay_s = delay_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(0 if length is None else int(length[1]))
                self._take(body)
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(_ANSWER)
                await writer.drain()
        writer.close()

    def _take(self, body: bytes) -> None:
        if (found := _EVENT.match(body)) is None:
            return
        number, received = int(found[1]), self.received
        received.repeated += number in received.numbers
        received.numbers.add(number)
        received.lag_s.append(time.time() - datetime.fromisoformat(found[2].decode()).timestamp())


def _serve(pipe: Pipe, delays_s: tuple[float, ...]) -> None:
    """The second process: sends its ports, then what has come whenever it is asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process

    async def run() -> None:
        each = [_Receiver(delay_s) for delay_s in delays_s]
        servers = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in each]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send([one.received for one in each])

    with suppress(EOFError), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


class Receivers:
    """The receivers, by the order of their delays."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.urls = [f"http://127.0.0.1:{port}/" for port in pipe.recv()]

    async def received(self) -> list[Received]:
        """The events of each so far."""
        self._pipe.send(None)
        answer: list[Received] = await asyncio.to_thread(self._pipe.recv)
        return answer


@asynccontextmanager
async def receivers(*delays_s: float) -> AsyncIterator[Receivers]:
    """A receiver for each delay of its answers."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(theirs, delays_s), daemon=True)
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(Receivers, ours)
    finally:
        process.terminate()
        process.join()
