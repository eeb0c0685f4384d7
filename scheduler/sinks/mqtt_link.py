"""The connection of a sink to an MQTT 5 broker, and what it publishes: events, and the retained state of sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiomqtt
from msgspec import Struct
from msgspec.structs import replace
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from scheduler.core.outbox import SinkEvent
from scheduler.sinks.discovery import (
    Topics,
    device_message,
    leftovers,
    ownership,
    shows_answer,
    shows_source,
    state_message,
)
from scheduler.sinks.mqtt_client import IN_FLIGHT, JSON, BrokerClient, RefusedError, connected, message_properties
from scheduler.sinks.mqtt_options import MqttOptions
from scheduler.sinks.protocol import SinkContext, payload
from tierkit.access import tls_trouble
from tierkit.distribution import installed_version
from tierkit.errors import ConnectionEnded, NotFound, Rejected, Unavailable, UpstreamError

__all__ = ["opened"]

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Time between two looks at the sources; a change of the health of a node ends no wait."""
_PAUSE_S = 0.2
_GOODBYE_S = 2.0
_EVENT_EXPIRES_S = 24 * 3600
"""An event is not kept longer for a subscriber that is away."""
_PICTURE_EXPIRES_S = 24 * 3600
"""A retained picture is not kept longer."""
_HEAD_BYTES = 2048
"""More than all of a message except its payload."""
_NEVER_ACCEPTED = (0x90, 0x95, 0x99)
"""Topic name invalid, packet too large, payload format invalid."""

_Key = tuple[str, str]
"""Node id and source."""


@asynccontextmanager
async def opened(options: MqttOptions, context: SinkContext) -> AsyncIterator[MqttLink]:
    """Connect to a broker, and publish what is retained until the block ends.

    Raises:
        ConnectionEnded: the broker cannot be reached, refuses the connection, or ends it.
        SetupError, InvalidInput, Forbidden: a person must change something.
    """
    where = f"the MQTT broker at {options.host}:{options.tcp_port}"
    link: MqttLink | None = None
    try:
        async with connected(options, context, where) as client:
            link = MqttLink(client, options, context, where)
            if context.testing:
                yield link
            else:
                async with link.serving():
                    yield link
    except (ExceptionGroup, aiomqtt.MqttError) as exc:
        first = _first(exc)
        if not isinstance(first, aiomqtt.MqttError):
            raise first from exc
        # Some brokers end the connection after a message that they do not allow.
        why = (link and link.refusal) or tls_trouble(first, where) or f"{where}: {first}"
        raise ConnectionEnded(why) from exc


class MqttLink:
    """An open sink.

    Args:
        client: is connected.
        options: the broker and the topics.
        context: the sink, and the sources of the fleet.
        where: names the broker in messages.
    """

    def __init__(self, client: BrokerClient, options: MqttOptions, context: SinkContext, where: str) -> None:
        self._client = client
        self._options = options
        self._context = context
        self._where = where
        self._topics = Topics(options.prefix)
        self._sources = None if context.sources is None else context.sources()
        self._states: dict[_Key, str | None] = {}
        """The topic of the state of each source; None if the sink does not publish it."""
        self._wanted: set[str | None] = set()
        """These topics."""
        self.refusal = ""
        """Reason why the broker has refused a message; "" if it has not."""

    async def deliver(self, event: SinkEvent) -> None:
        """Publish an event; returns once the broker has it.

        Raises:
            Rejected: the broker never takes this one.
            ConnectionEnded: it may have it.
            UpstreamError: the broker refuses it now.
        """
        content = payload(event)
        if not self._fits(content):
            raise Rejected(f"{self._where} takes no message of {len(content):,} bytes")
        properties = message_properties([("id", event.id), ("type", event.type)], kind=JSON, expires_s=_EVENT_EXPIRES_S)
        try:
            await self._client.publish(self._topics.event(event.key), content, qos=1, properties=properties)
        except RefusedError as exc:
            self.refusal = f"{self._where}: {exc}"
            if exc.code in _NEVER_ACCEPTED:
                raise Rejected(self.refusal) from exc
            raise UpstreamError(self.refusal) from exc
        except aiomqtt.MqttError as exc:
            raise ConnectionEnded(f"{self._where}: {exc}") from exc

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the retained messages up to date while the block runs. The connection ends the block if it ends."""
        self._look()
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(self._client.ended())]
                try:
                    await self._retain(self._topics.status, b"online")
                    working += [tasks.create_task(each) for each in (self._sweep(), self._follow())]
                    yield
                finally:
                    for task in working:
                        task.cancel()
        finally:
            # The broker publishes the will only after a connection that was cut.
            with suppress(aiomqtt.MqttError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._retain(self._topics.status, b"offline")

    def _look(self) -> dict[_Key, Hashable]:
        """The sources whose state the sink publishes; each has another value when it has changed."""
        marks: Mapping[_Key, Hashable] = {} if self._sources is None else self._sources.marks()
        known = self._states
        self._states = {key: known[key] if key in known else self._state_of(key) for key in marks}
        self._wanted = set(self._states.values())
        return {key: mark for key, mark in marks.items() if self._states[key] is not None}

    def _state_of(self, key: _Key) -> str | None:
        return self._topics.state(*key) if shows_source(self._context.filter, *key) else None

    async def _sweep(self) -> None:
        """Clear the retained topics of sources that do not exist any more, as the broker names them."""
        options = SubscribeOptions(qos=1, noLocal=True)
        codes = await self._client.subscribe(self._topics.states, options=options)
        if any(isinstance(code, ReasonCode) and code.is_failure for code in codes):
            name = self._context.name
            _log.warning("sink %s: %s refuses reading: states of removed sources stay there", name, self._where)
        async for message in self._client.messages:  # ends with the connection
            if not message.retain:
                continue
            state, kept = str(message.topic), getattr(message.properties, "UserProperty", [])
            now = self._ownership(has_picture=self._options.pictures)
            for topic in leftovers(state, kept, now=now, is_source=state in self._wanted):
                await self._retain(topic, b"")

    async def _follow(self) -> None:
        """Publish the state of each source when it has changed."""
        sources, shown = self._sources, dict[_Key, _Shown]()
        if sources is None:
            return
        while True:
            version, marks = sources.version, self._look()
            changed = [key for key, mark in marks.items() if key not in shown or shown[key].mark != mark]
            for first in range(0, len(changed), IN_FLIGHT):
                part = changed[first : first + IN_FLIGHT]
                found = await asyncio.gather(
                    *(self._show(sources.now(*key), marks[key], shown.get(key)) for key in part)
                )
                shown |= dict(zip(part, found, strict=True))
            for key in shown.keys() - marks.keys():
                await self._clear(key, shown.pop(key))
            await asyncio.sleep(_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(sources.changed(version), _LOOK_S)

    async def _show(self, source: dict[str, Any], mark: Hashable, before: _Shown | None) -> _Shown:
        """Publish the state of a source, and its device and its picture if they have changed."""
        topics, options, context = self._topics, self._options, self._context
        state = topics.state(source["node"], source["source"])
        now = _Shown(mark=mark, site=source["site"])
        if options.pictures:
            now = await self._show_picture(source, now, before)
        if options.discovery_prefix and (before is None or before.device != now.device):
            device = device_message(source, topics, version=installed_version(), picture_type=now.picture_type)
            await self._retain(topics.discovery(options.discovery_prefix, state), device, kind=JSON)
        message = state_message(source, shows_answer=shows_answer(context.filter, source["last"]))
        owner = self._ownership(has_picture=now.picture is not None)
        await self._retain(state, message, kind=JSON, properties=owner)
        return now

    async def _show_picture(self, source: dict[str, Any], now: _Shown, before: _Shown | None) -> _Shown:
        """Publish the newest picture of a source that the broker does not have yet, if it can be had."""
        key, number = (source["node"], source["source"]), source["last_picture"]
        if before is not None:
            now = replace(now, picture=before.picture, picture_type=before.picture_type)
        if number is None or number == now.picture or self._context.picture is None:
            return now
        try:
            content, kind = await self._context.picture(*key, number)
        except (NotFound, Unavailable):
            return now
        if not self._fits(content):
            return now
        topic = self._topics.picture(self._topics.state(*key))
        await self._retain(topic, content, kind=kind, expires_s=_PICTURE_EXPIRES_S)
        return replace(now, picture=number, picture_type=kind)

    async def _clear(self, key: _Key, shown: _Shown) -> None:
        owner = self._ownership(has_picture=shown.picture is not None)
        for topic in leftovers(self._topics.state(*key), owner, now=owner, is_source=False):
            await self._retain(topic, b"")

    def _ownership(self, *, has_picture: bool) -> list[tuple[str, str]]:
        return ownership(self._context.id, discovery_prefix=self._options.discovery_prefix, has_picture=has_picture)

    def _fits(self, payload: bytes) -> bool:
        most = self._client.limit("MaximumPacketSize")
        return most is None or len(payload) + _HEAD_BYTES <= most

    async def _retain(
        self,
        topic: str,
        payload: bytes,
        *,
        kind: str | None = None,
        expires_s: int | None = None,
        properties: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Publish a retained message; an empty one clears the topic."""
        made = message_properties(properties, kind=kind, expires_s=expires_s)
        try:
            await self._client.publish(topic, payload, qos=1, retain=True, properties=made)
        except RefusedError as exc:
            if not self.refusal:
                _log.warning("sink %s: %s: %s (topic %s)", self._context.name, self._where, exc, topic)
            self.refusal = f"{self._where}: {exc} (topic {topic})"


class _Shown(Struct, frozen=True, kw_only=True):
    """The messages of a source that the broker has."""

    mark: Hashable
    site: str | None
    picture: int | None = None
    """Number of its picture; None without one."""
    picture_type: str | None = None

    @property
    def device(self) -> tuple[str | None, str | None]:
        """Another value when the discovery message is another one."""
        return self.site, self.picture_type


def _first(error: BaseException) -> BaseException:
    """The first error of a group, and of the groups in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
