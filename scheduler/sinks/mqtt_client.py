"""A connection to an MQTT 5 broker: to a checked address, with what aiomqtt leaves out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from socket import socket
from typing import Any

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
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
    async with AsyncExitStack() as stack:
        for number, address in enumerate(addresses, start=1):
            try:
                client = await stack.enter_async_context(_client(address, options, context, password))
                break
            except aiomqtt.MqttError as exc:
                if number == len(addresses) or isinstance(exc, MqttConnectError):
                    raise
        if client.limit("MaximumQoS") == 0 or client.limit("RetainAvailable") == 0:
            raise SetupError(f"{where} does not allow QoS 1 and retained messages")
        yield client


def _client(address: str, options: MqttOptions, context: SinkContext, password: str | None) -> BrokerClient:
    asked, will = _empty_properties(PacketTypes.CONNECT), None
    asked.MaximumPacketSize = _MOST_BYTES
    if context.testing:  # the broker ends the older one of two connections with the same id
        client_id = f"terrace-test-{secrets.token_hex(8)}"
    else:
        client_id = options.client_id or f"terrace-{context.id}"
        will = aiomqtt.Will(Topics(options.prefix).status, b"offline", qos=1, retain=True)
    return BrokerClient(
        address,
        options.tcp_port,
        username=options.username,
        password=password,
        identifier=client_id,
        protocol=aiomqtt.ProtocolVersion.V5,
        clean_start=True,
        properties=asked,
        will=will,
        tls_context=_tls(options, context),
        timeout=_TIMEOUT_S,
        keepalive=_KEEP_ALIVE_S,
        max_inflight_messages=IN_FLIGHT,
        max_queued_incoming_messages=_MOST_UNREAD,
        logger=_log,
    )


def _tls(options: MqttOptions, context: SinkContext) -> Any:
    if not options.tls:
        return None
    return _NamedContext(client_context(options.tls_ca or context.tls_ca, http=False), options.host)


class RefusedError(aiomqtt.MqttError):
    """The broker has answered a message with a failure."""

    def __init__(self, code: ReasonCode) -> None:
        super().__init__(f"the broker refuses a message: {code}")
        self.code = code.value


class BrokerClient(aiomqtt.Client):
    """A client that raises what the broker answers to a message; aiomqtt drops it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pending_calls_threshold = _MOST_UNREAD  # above it, it logs a warning
        self.limits: Properties | None = None
        self._refusals: dict[int, ReasonCode] = {}

    def limit(self, name: str) -> int | None:
        """A limit of the broker, by its name in MQTT 5 (MaximumPacketSize); None if it has named none."""
        return getattr(self.limits, name, None)

    async def ended(self) -> None:
        """Return, or raise the reason, when the connection has ended. aiomqtt's other calls time out only later."""
        await asyncio.shield(self._disconnected)
        raise aiomqtt.MqttError("the broker has ended the connection")

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


class _NamedContext:
    """A TLS context that verifies the name of the broker, while the connection goes to a checked address of it."""

    check_hostname = True  # paho would verify the address otherwise

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._context = context
        self._name = name

    def wrap_socket(self, sock: socket, **_: Any) -> ssl.SSLSocket:
        made = self._context.wrap_socket(sock, server_hostname=self._name, do_handshake_on_connect=False)
        made.settimeout(_TIMEOUT_S)
        try:
            made.do_handshake()
        except BaseException:
            made.close()  # paho would leave it open
            raise
        return made


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
