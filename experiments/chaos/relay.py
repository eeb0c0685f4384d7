"""A TCP relay in front of a service that treats its connections like a bad network.

The relay uses only one rule of HTTP: a client sends nothing more until it is answered. So everything that it has sent
since the last answer is one request. The relay holds at most one such request per connection, to duplicate it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

from experiments.chaos.faults import Direction, Kind

__all__ = ["Relay"]

_CHUNK_BYTES = 64 * 1024
_HELD_BYTES = 1 << 20
_CONNECT_S = 2.0
_SECOND_S = 10.0
"""Seconds that the answer to a duplicate may take; no client waits for it."""


@dataclass(slots=True)
class _Armed:
    kind: Kind
    direction: Direction
    seconds: float
    struck: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    request: bytearray = field(default_factory=bytearray)
    """Bytes that the client has sent since the last answer; only the beginning if they are many."""
    request_bytes: int = 0
    answered: bool = False

    def end(self, *, reset: bool) -> None:
        for writer in (self.client, self.server):
            if reset and (raw := writer.get_extra_info("socket")) is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if reset:
                writer.transport.abort()
            else:
                writer.close()

    async def closed(self) -> None:
        """Wait until both sides have let go of their sockets."""
        for writer in (self.client, self.server):
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Relay:
    """Listens on a separate address and passes everything on to the service, except when a fault strikes.

    Args:
        target: host and port of the service.
        work_bytes: smaller requests are probes, which faults do not strike.
    """

    def __init__(self, target: tuple[str, int], *, work_bytes: int) -> None:
        self._target = target
        self._work_bytes = work_bytes
        # A server of asyncio loses a connection that it has accepted when it is closed in the same moment.
        self._listening: socket.socket | None = None
        self._address = (target[0], 0)
        self._accepted: set[socket.socket] = set()
        """Connections that nothing has been done for yet."""
        self._connections: set[_Connection] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._armed: _Armed | None = None

    @property
    def url(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"

    async def open(self) -> None:
        """Take connections (again), always on the same port."""
        if self._listening is None:
            self._listening = socket.create_server(self._address)
            self._listening.setblocking(False)
            self._address = self._listening.getsockname()[:2]
            asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)

    def refuse(self) -> None:
        """Take no connections, and reset those that stand."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for connection in list(self._connections):
            connection.end(reset=True)

    async def close(self) -> None:
        """End it for good."""
        self.refuse()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for client in self._accepted:
            client.close()

    async def strike(self, kind: Kind, direction: Direction, seconds: float, *, budget_s: float) -> bool:
        """Do this to the next piece of work that passes; False when none has passed within the budget."""
        armed = self._armed = _Armed(kind, direction, seconds)
        try:
            async with asyncio.timeout(budget_s):
                await armed.struck.wait()
        except TimeoutError:
            return False
        finally:
            if self._armed is armed:
                self._armed = None
        return True

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has gone again
            client, _ = listening.accept()
            self._accepted.add(client)
            serving = asyncio.create_task(self._serve(client, listening))
            self._pumps.add(serving)
            serving.add_done_callback(self._pumps.discard)

    async def _serve(self, client: socket.socket, listening: socket.socket) -> None:
        self._accepted.discard(client)
        with contextlib.ExitStack() as ends:
            reader, writer = await asyncio.open_connection(sock=client)
            ends.callback(writer.transport.abort)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    server_reader, server_writer = await asyncio.open_connection(*self._target)
            except OSError:
                return
            ends.callback(server_writer.transport.abort)
            if self._listening is listening:  # it has not been told to refuse meanwhile
                await self._join(reader, writer, server_reader, server_writer)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        """Pass everything on between a client and the service, until one side ends."""
        connection = _Connection(writer, server_writer)
        self._connections.add(connection)
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, connection, Direction.REQUEST)),
            asyncio.create_task(self._pump(server_reader, writer, connection, Direction.ANSWER)),
        ]
        self._pumps.update(pumps)
        for pump in pumps:
            pump.add_done_callback(self._pumps.discard)
        try:
            # Whichever side ends first, the other has nothing to say any more: HTTP knows no half-open connection.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            connection.end(reset=False)
            self._connections.discard(connection)
            await connection.closed()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: _Connection,
        direction: Direction,
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                self._note(connection, chunk, direction)
                armed = self._armed
                if armed is not None and connection.request_bytes >= self._work_bytes and self._meant(armed, direction):
                    self._armed = None
                    passes = await self._strike(armed, connection, writer, chunk)
                    armed.struck.set()
                    if not passes:
                        return
                writer.write(chunk)
                await writer.drain()

    def _note(self, connection: _Connection, chunk: bytes, direction: Direction) -> None:
        if direction is Direction.ANSWER:
            connection.answered = True
            return
        if connection.answered:
            connection.request.clear()
            connection.request_bytes, connection.answered = 0, False
        connection.request_bytes += len(chunk)
        if connection.request_bytes <= _HELD_BYTES:
            connection.request += chunk

    @staticmethod
    def _meant(armed: _Armed, direction: Direction) -> bool:
        # A request can be sent again only when it is complete, which the first piece of its answer shows.
        return direction is (Direction.ANSWER if armed.kind is Kind.DUPLICATE else armed.direction)

    async def _strike(self, armed: _Armed, connection: _Connection, writer: asyncio.StreamWriter, chunk: bytes) -> bool:
        """True if the piece passes all the same."""
        match armed.kind:
            case Kind.RESET:
                connection.end(reset=True)
                return False
            case Kind.CUT:
                writer.write(chunk[: len(chunk) // 2])
                await writer.drain()
                return False
            case Kind.DELAY:
                armed.struck.set()
                await asyncio.sleep(armed.seconds)
            case Kind.DUPLICATE if connection.request_bytes <= _HELD_BYTES:
                second = asyncio.create_task(self._send_again(bytes(connection.request)))
                self._pumps.add(second)
                second.add_done_callback(self._pumps.discard)
        return True

    async def _send_again(self, request: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_SECOND_S):
                reader, writer = await asyncio.open_connection(*self._target)
                try:
                    writer.write(request)
                    await writer.drain()
                    while await reader.read(_CHUNK_BYTES):
                        pass
                finally:
                    writer.close()
                    await writer.wait_closed()
