"""A connection to an MQTT 5 broker: to a checked address, with what aiomqtt leaves out."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from scheduler.sinks.addresses import check_host
from scheduler.sinks.discovery import Topics
from scheduler.sinks.mqtt_options import MqttOptions
from scheduler.sinks.protocol import SinkContext, read_secret
from tierkit.access import client_context
from tierkit.errors import SetupError

__all__ = ["IN_FLIGHT", "JSON", "BrokerClient", "RefusedError", "connected", "message_properties"]

_log = logging.getLogger(__name__)

JSON = "application/json"
IN_FLIGHT = 10
"""Messages without an acknowledgement. Some brokers allow no more."""
_TIMEOUT_S = 10.0
"""Limit on one exchange with the broker."""
_KEEP_ALIVE_S = 30
_MOST_BYTES = 64 * 1024
"""Largest message that this side reads, which are states of sources."""
_MOST_UNREAD = 10_000


@asynccontextmanager
async def connected(options: MqttOptions, context: SinkContext, where: str) -> AsyncIterator[BrokerClient]:
    """Connect to a broker, by the first of its addresses that works.

    Args:
        where: names the broker in messages.

    Raises:
        aiomqtt.MqttError: it cannot be reached, refuses the connection, or ends it.
        SetupError, InvalidInput, Forbidden: a person must change something.
    """
    async with asyncio.timeout(_TIMEOUT_S):
        addresses = await check_host(
            options.host, options.tcp_port, allow_private=context.allow_private, resolve=context.resolve
        )
    password = None if options.password_file is None else await asyncio.to_thread(read_secret, options.password_file)
    async with _client(await _first_open(addresses, options, context), options, context, password) as client:
        if client.limit("MaximumQoS") == 0 or client.limit("RetainAvailable") == 0:
            raise SetupError(f"{where} does not allow QoS 1 and retained messages")
        yield client


async def _first_open(addresses: Sequence[str], options: MqttOptions, context: SinkContext) -> socket.socket:
    """A socket to the first of the addresses that takes a connection. Raises aiomqtt.MqttError for the last one."""
    tls = client_context(options.tls_ca or context.tls_ca, http=False) if options.tls else None
    for number, address in enumerate(addresses, start=1):
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await _opened(address, options, tls)
        except OSError as exc:
            if number == len(addresses):
                raise aiomqtt.MqttError(_reason(exc)) from exc
    raise aiomqtt.MqttError("no address")


async def _opened(address: str, options: MqttOptions, tls: ssl.SSLContext | None) -> socket.socket:
    """Connect without a thread: a broker that accepts connections and says nothing holds up nothing else.

    TLS verifies the name of the broker, while the connection goes to a checked address of it.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (address, options.tcp_port))
        if tls is None:
            return sock
        sock = secured = tls.wrap_socket(sock, server_hostname=options.host, do_handshake_on_connect=False)
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                await _until(secured, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _until(secured, loop.add_writer, loop.remove_writer)
    except BaseException:
        sock.close()
        raise


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error)
    return os.strerror(error.errno) if error.errno else str(error) or "no answer in time"


async def _until(sock: socket.socket, add: Callable[..., None], remove: Callable[[socket.socket], bool]) -> None:
    ready = asyncio.Event()
    add(sock, ready.set)
    try:
        await ready.wait()
    finally:
        remove(sock)


def _client(sock: socket.socket, options: MqttOptions, context: SinkContext, password: str | None) -> BrokerClient:
    asked, will = _empty_properties(PacketTypes.CONNECT), None
    asked.MaximumPacketSize = _MOST_BYTES
    if context.testing:  # the broker ends the older one of two connections with the same id
        client_id = f"terrace-test-{secrets.token_hex(8)}"
    else:
        client_id = options.client_id or f"terrace-{context.id}"
        will = aiomqtt.Will(Topics(options.prefix).status, b"offline", qos=1, retain=True)
    return BrokerClient(
        sock,
        options.host,
        options.tcp_port,
        username=options.username,
        password=password,
        identifier=client_id,
        protocol=aiomqtt.ProtocolVersion.V5,
        clean_start=True,
        properties=asked,
        will=will,
        timeout=_TIMEOUT_S,
        keepalive=_KEEP_ALIVE_S,
        max_inflight_messages=IN_FLIGHT,
        max_queued_incoming_messages=_MOST_UNREAD,
        logger=_log,
    )


class RefusedError(aiomqtt.MqttError):
    """The broker has answered a message with a failure."""

    def __init__(self, code: ReasonCode) -> None:
        super().__init__(f"the broker refuses a message: {code}")
        self.code = code.value


class BrokerClient(aiomqtt.Client):
    """A client over an open socket that raises what the broker answers to a message; aiomqtt drops it."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sock = made = _Socket(sock)
        # paho would connect itself, and block.
        self._client._create_socket = lambda: made  # type: ignore[method-assign]
        self.pending_calls_threshold = _MOST_UNREAD  # above it, it logs a warning
        self.limits: Properties | None = None
        self._refusals: dict[int, ReasonCode] = {}

    def limit(self, name: str) -> int | None:
        """A limit of the broker, by its name in MQTT 5 (MaximumPacketSize); None if it has named none."""
        return getattr(self.limits, name, None)

    async def __aenter__(self) -> Self:
        disconnected = self._disconnected
        try:
            await super().__aenter__()
            if self._client.socket() is None:  # it ended right after its answer, which aiomqtt forgets
                raise self._end()
            return self
        except BaseException:  # aiomqtt would leave the socket open
            self._client._sock_close()
            self._sock.close()
            raise
        finally:
            if disconnected.done():
                disconnected.exception()  # aiomqtt may forget it, and asyncio would report that

    async def ended(self) -> None:
        """Return, or raise the reason, when the connection has ended. aiomqtt's other calls time out only later."""
        try:
            await asyncio.shield(self._disconnected)
        except aiomqtt.MqttError as exc:
            if not self._sock.fault:
                raise
            raise self._end() from exc
        raise self._end()

    def _end(self) -> aiomqtt.MqttError:
        return aiomqtt.MqttError(self._sock.fault or "the broker has ended the connection")

    def _on_connect(self, *args: Any) -> None:
        self.limits = args[-1]
        super()._on_connect(*args)

    def _on_publish(self, *args: Any) -> None:
        _, _, mid, code, _ = args
        if code.is_failure:
            self._refusals[mid] = code
        super()._on_publish(*args)

    def _on_socket_register_write(self, client: Any, userdata: Any, sock: Any) -> None:
        def write() -> None:
            try:
                client.loop_write()
            except Exception as exc:  # the connection broke
                if not self._disconnected.done():
                    self._disconnected.set_exception(exc)

        def register() -> None:
            if sock.fileno() > -1:  # aiomqtt does not ask, and it may be closed by now
                self._loop.add_writer(sock.fileno(), write)

        self._loop.call_soon_threadsafe(register)

    async def _wait_for(self, fut: Awaitable[Any], timeout: float | None, **_: Any) -> Any:  # noqa: ASYNC109 (aiomqtt's)
        # Python 3.11's `wait_for`, which aiomqtt uses, loses a cancellation that comes with the result.
        try:
            async with asyncio.timeout(self.timeout if timeout is None else timeout):
                return await fut
        except TimeoutError:
            raise aiomqtt.MqttError("no answer in time") from None

    @contextmanager
    def _pending_call(self, mid: int, value: Any, pending: dict[int, Any]) -> Iterator[None]:
        self._refusals.pop(mid, None)
        with super()._pending_call(mid, value, pending):
            yield
        if (code := self._refusals.pop(mid, None)) is not None:
            raise RefusedError(code)


class _Socket:
    """The socket of a connection, which reads no packet beyond the limit that the broker was told.

    paho asks for the rest of a packet at once, and otherwise for single bytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.fault = ""
        """Why nothing more is read; "" while packets are small enough."""

    def recv(self, size: int) -> bytes:
        if size > _MOST_BYTES:
            self.fault = f"the broker sends a packet of {size:,} bytes; the limit is {_MOST_BYTES:,}"
            raise OSError(self.fault)  # paho ends the connection
        return self._sock.recv(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def message_properties(
    user: Sequence[tuple[str, str]], *, kind: str | None = None, expires_s: int | None = None
) -> Properties:
    """The properties of a message.

    Args:
        user: user properties.
        kind: media type of the payload.
    """
    made = _empty_properties(PacketTypes.PUBLISH)
    if user:
        made.UserProperty = list(user)
    if kind is not None:
        made.ContentType = kind
        made.PayloadFormatIndicator = int(kind == JSON)
    if expires_s is not None:
        made.MessageExpiryInterval = expires_s
    return made


def _empty_properties(packet: int) -> Properties:
    return Properties(packet)  # type: ignore[no-untyped-call]
