"""Listening for TLS. The event loop's own server allows a handshake a minute and counts connections only after it, so a
client could open any number of connections and send nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sized

from tierkit.settings import ServiceSettings

__all__ = ["TlsListener"]

log = logging.getLogger(__name__)

_RESERVE = 64
"""Handshakes above the limit of connections; those beyond are closed at once."""

_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_FILES_PAUSE_S = 1.0


class TlsListener:
    """Takes connections from a listening socket, until `close`, and hands those that complete a handshake within
    `header_timeout_s` to a protocol. Has those methods of `asyncio.Server` that uvicorn calls.

    Args:
        sock: bound, listening, not blocking.
        context: with the certificate.
        protocol: makes the protocol of a connection.
        connections: those that are established.
        settings: with the limits.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        settings: ServiceSettings,
    ) -> None:
        self._sock = sock
        self._context = context
        self._protocol = protocol
        self._connections = connections
        self._settings = settings
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="TLS listener")

    def close(self) -> None:
        """Accept no more connections; established ones stay open."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return when it has let go of its socket."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError as exc:
                if exc.errno in _NO_FILES:
                    log.error("no more connections can be taken for now: %s", exc.strerror)
                    await asyncio.sleep(_NO_FILES_PAUSE_S)
                continue  # else the client has gone again
            if len(self._connections) + len(self._handshakes) >= self._settings.max_connections + _RESERVE:
                connection.close()
                continue
            task = asyncio.create_task(self._greet(connection), name="TLS handshake")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._settings.header_timeout_s,
            )
        except OSError as exc:  # ssl.SSLError and the handshake's timeout among them
            connection.close()
            log.debug("no TLS handshake", extra={"why": str(exc) or type(exc).__name__})
        except asyncio.CancelledError:
            connection.close()
            raise
