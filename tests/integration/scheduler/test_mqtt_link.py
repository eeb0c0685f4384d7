"""The connection of a sink to a real broker: events, retained states, Home Assistant, and what a broker refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from scheduler.core.outbox import EventFilter, SinkEvent
from scheduler.sinks.discovery import Topics
from scheduler.sinks.mqtt import MQTT
from scheduler.sinks.mqtt_options import MqttOptions
from scheduler.sinks.protocol import Delivery, SinkContext
from tests.mosquitto import Broker, Subscriber, broker, subscriber, write_password
from tierkit.errors import ConnectionEnded, Forbidden, NotFound, Rejected, UpstreamError
from tierkit.testing import wait_for

STATE = Topics("terrace").state("pi", "gate")
PICTURE, DEVICE = Topics.picture(STATE), Topics.discovery("homeassistant", STATE)
STATUS = "terrace/status"


class Sources:
    """Sources that a test makes."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.version = 0
        self._news = asyncio.Event()

    def sees(self, source: str = "gate", sequence: int = 1, *, picture: int | None = None, **changes: Any) -> None:
        last = {"label": "fish", "confidence": 0.5, "answered_by": "end", "sequence": sequence, "revision": 0}
        last |= {"coarse": {"label": "fish"}, "fine": None, "taken_at": None}
        row = {"node": "pi", "source": source, "state": "running", "health": "alive", "site": None, "last": last}
        self.rows["pi", source] = row | {"last_picture": picture} | changes
        self._changed()

    def loses(self, source: str = "gate") -> None:
        del self.rows["pi", source]
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, version: object) -> None:
        if version == self.version:
            await self._news.wait()

    def marks(self) -> dict[tuple[str, str], Hashable]:
        return {key: json.dumps(row) for key, row in self.rows.items()}

    def now(self, node_id: str, source: str) -> dict[str, Any]:
        return self.rows[node_id, source]


async def picture(node: str, source: str, number: int) -> tuple[bytes, str]:
    if number < 0:
        raise NotFound("no picture")
    return f"{node}/{source}/{number}".encode(), "image/png"


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
async def mosquitto(tmp_path: Path) -> AsyncIterator[Broker]:
    with broker(tmp_path / "broker") as running:
        await running.start()
        yield running


@pytest.fixture
async def seen(mosquitto: Broker) -> AsyncIterator[Subscriber]:
    async with subscriber(mosquitto.port) as seen:
        yield seen


def context(sources: Sources | None = None, **changes: Any) -> SinkContext:
    own: dict[str, Any] = {
        "name": "hall",
        "id": "hall-1",
        "allow_private": True,
        "sources": None if sources is None else lambda: sources,
        "picture": picture,
    }
    return SinkContext(**own | changes)


def opened(port: int, of: SinkContext, **options: Any) -> AbstractAsyncContextManager[Delivery]:
    return MQTT.open(MqttOptions(host="127.0.0.1", port=port, **options), of)


def event(number: int, key: str = "source/pi/gate", **data: Any) -> SinkEvent:
    return SinkEvent(number=number, type="observation.added", key=key, at=1.5, data=data)


def state_of(seen: Subscriber, topic: str = STATE) -> dict[str, Any]:
    return dict(json.loads(seen.retained.get(topic, b"{}")))


async def test_an_event_has_its_topic_its_ids_and_the_payload_of_every_sink(
    mosquitto: Broker, seen: Subscriber
) -> None:
    async with opened(mosquitto.port, context()) as sink:
        await sink.deliver(event(7, label="fish"))
        await sink.deliver(event(8, key="release"))
        await wait_for(lambda: len(seen.messages) == 3)
    topics = [topic for topic, *_ in seen.messages]
    assert topics[:3] == [STATUS, "terrace/events/source/pi/gate", "terrace/events/release"]
    _, content, properties, retained = seen.messages[1]
    assert properties == {"id": "evt_7", "type": "observation.added"}
    assert not retained
    assert json.loads(content) == {
        "id": "evt_7",
        "type": "observation.added",
        "timestamp": "1970-01-01T00:00:01.500000Z",
        "data": {"label": "fish"},
    }


async def test_many_events_at_once_keep_the_order_of_each_key(mosquitto: Broker, seen: Subscriber) -> None:
    async with opened(mosquitto.port, context()) as sink:

        async def send(source: int) -> None:
            for number in range(1, 51):
                await sink.deliver(event(number, key=f"source/pi/{source}"))

        await asyncio.gather(*(send(source) for source in range(32)))
        await wait_for(lambda: len(seen.messages) == 1 + 32 * 50)
    for source in range(32):
        topic = f"terrace/events/source/pi/{source}"
        assert [each[2]["id"] for each in seen.messages if each[0] == topic] == [
            f"evt_{number}" for number in range(1, 51)
        ]


async def test_the_status_is_online_while_the_sink_is_open(mosquitto: Broker, seen: Subscriber) -> None:
    async with opened(mosquitto.port, context()):
        await wait_for(lambda: seen.retained.get(STATUS) == b"online")
    await wait_for(lambda: seen.retained.get(STATUS) == b"offline")


async def test_a_test_next_to_the_open_sink_disturbs_it_not(
    mosquitto: Broker, seen: Subscriber, sources: Sources
) -> None:
    sources.sees()
    async with opened(mosquitto.port, context(sources)) as sink:
        await wait_for(lambda: STATE in seen.retained)
        before = len(seen.messages)
        async with opened(mosquitto.port, context(sources, testing=True)) as test:
            await test.deliver(event(1))
        await sink.deliver(event(2))
        await wait_for(lambda: len(seen.messages) >= before + 2)
        assert [properties["id"] for *_, properties, _ in seen.messages[before:]] == ["evt_1", "evt_2"]
        assert seen.retained[STATUS] == b"online"


async def test_the_retained_state_follows_the_source(mosquitto: Broker, seen: Subscriber, sources: Sources) -> None:
    sources.sees(sequence=1)
    async with opened(mosquitto.port, context(sources)):
        await wait_for(lambda: state_of(seen).get("sequence") == 1)
        assert state_of(seen)["state"] == "online"
        for number in range(2, 40):
            sources.sees(sequence=number)
        await wait_for(lambda: state_of(seen).get("sequence") == 39)
        sources.sees(sequence=39, health="dead")
        await wait_for(lambda: state_of(seen)["state"] == "offline")
    numbers = [json.loads(content)["sequence"] for topic, content, *_ in seen.messages if topic == STATE]
    assert numbers == sorted(numbers)


async def test_a_source_appears_in_home_assistant_and_goes_with_all_that_it_had(
    mosquitto: Broker, seen: Subscriber, sources: Sources
) -> None:
    sources.sees(picture=3)
    sources.sees("door")
    async with opened(mosquitto.port, context(sources), pictures=True):
        await wait_for(lambda: {STATE, PICTURE, DEVICE} <= seen.retained.keys())
        assert seen.retained[PICTURE] == b"pi/gate/3"
        device = json.loads(seen.retained[DEVICE])
        assert device["components"]["picture"]["image_topic"] == PICTURE
        assert device["components"]["picture"]["content_type"] == "image/png"
        assert device["state_topic"] == STATE
        assert device["availability"] == [{"topic": STATUS}]
        sources.sees(picture=4)
        await wait_for(lambda: seen.retained[PICTURE] == b"pi/gate/4")
        sources.loses()
        await wait_for(lambda: seen.retained.keys().isdisjoint({STATE, PICTURE, DEVICE}))
        assert Topics("terrace").state("pi", "door") in seen.retained


async def test_no_pixels_leave_by_default(mosquitto: Broker, seen: Subscriber, sources: Sources) -> None:
    sources.sees(picture=3)
    async with opened(mosquitto.port, context(sources)):
        await wait_for(lambda: {STATE, DEVICE} <= seen.retained.keys())
        sources.sees(sequence=2, picture=4)
        await wait_for(lambda: state_of(seen).get("sequence") == 2)
    assert json.loads(seen.retained[DEVICE])["components"]["picture"] == {"platform": "image"}
    assert not any(topic == PICTURE for topic, *_ in seen.messages)


async def test_a_picture_that_is_gone_holds_nothing_up(mosquitto: Broker, seen: Subscriber, sources: Sources) -> None:
    sources.sees(picture=-1)
    async with opened(mosquitto.port, context(sources), pictures=True):
        await wait_for(lambda: STATE in seen.retained)
        sources.sees(sequence=2, picture=4)
        await wait_for(lambda: seen.retained.get(PICTURE) == b"pi/gate/4")


async def test_what_an_earlier_connection_has_left_is_cleared(
    mosquitto: Broker, seen: Subscriber, sources: Sources
) -> None:
    sources.sees(picture=3)
    sources.sees("door", picture=5)
    async with opened(mosquitto.port, context(sources), pictures=True):
        await wait_for(lambda: len(seen.retained) == 1 + 6)
    sources.loses("door")
    async with opened(mosquitto.port, context(sources), discovery_prefix=""):
        await wait_for(lambda: seen.retained.keys() == {STATUS, STATE})


async def test_retained_topics_of_another_sink_stay(mosquitto: Broker, seen: Subscriber, sources: Sources) -> None:
    sources.sees()
    async with opened(mosquitto.port, context(sources)):
        await wait_for(lambda: {STATE, DEVICE} <= seen.retained.keys())
    other = Sources()
    other.sees("door")
    door = Topics("terrace").state("pi", "door")
    async with opened(mosquitto.port, context(other, id="hall-2")):
        await wait_for(lambda: door in seen.retained)
        other.loses("door")
        await wait_for(lambda: door not in seen.retained)
    assert {STATE, DEVICE} <= seen.retained.keys()


async def test_a_filter_hides_sources_and_answers(mosquitto: Broker, seen: Subscriber, sources: Sources) -> None:
    conditions = EventFilter(sources=("gate",), labels=("dog",))
    sources.sees("door")
    sources.sees()
    async with opened(mosquitto.port, context(sources, filter=conditions)):
        await wait_for(lambda: STATE in seen.retained)
        sources.sees("door", 2)
        sources.sees(sequence=2)
        await wait_for(lambda: state_of(seen).get("sequence") == 2)
    assert state_of(seen)["label"] is None
    assert not any("door" in topic for topic, *_ in seen.messages)


@pytest.mark.parametrize("number", [1, 300])
async def test_all_sources_have_their_state_at_the_begin(
    mosquitto: Broker, seen: Subscriber, sources: Sources, number: int
) -> None:
    for each in range(number):
        sources.sees(f"source-{each}")
    async with opened(mosquitto.port, context(sources)):
        await wait_for(lambda: len(seen.retained) == 1 + 2 * number)


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def deliver_until(broker: Broker, of: SinkContext, *, busy: bool) -> None:
    """Open a sink at a broker that ends then, with events all the time or only before."""
    async with opened(broker.port, of) as sink:
        await sink.deliver(event(1))
        broker.stop()
        while busy:
            await sink.deliver(event(1))
        await asyncio.Event().wait()


@pytest.mark.parametrize("busy", [False, True])
async def test_the_end_of_the_connection_ends_the_block(mosquitto: Broker, sources: Sources, busy: bool) -> None:
    sources.sees()
    with pytest.raises(ConnectionEnded, match=rf"the MQTT broker at 127\.0\.0\.1:{mosquitto.port}"):
        await asyncio.wait_for(deliver_until(mosquitto, context(sources), busy=busy), 20)


async def test_a_broker_that_is_away_is_named(tmp_path: Path) -> None:
    with broker(tmp_path / "broker") as away, pytest.raises(ConnectionEnded, match="Connection refused"):
        async with opened(away.port, context()):
            pass


async def test_a_message_that_the_broker_does_not_allow_is_refused(tmp_path: Path, sources: Sources) -> None:
    (tmp_path / "acl").write_text("topic readwrite terrace/status\ntopic readwrite terrace/events/#\n")
    (tmp_path / "acl").chmod(0o600)
    with broker(tmp_path / "broker", f"acl_file {tmp_path / 'acl'}") as running:
        await running.start()
        async with opened(running.port, context(testing=True), prefix="other") as sink:
            with pytest.raises(UpstreamError, match="Not authorized"):
                await sink.deliver(event(1))
        sources.sees()
        # This broker ends the connection then, or keeps it.
        with contextlib.suppress(ConnectionEnded):
            async with opened(running.port, context(sources)) as sink:
                await wait_for(lambda: "Not authorized (topic homeassistant/" in getattr(sink, "refusal", ""))


async def test_a_message_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    with broker(tmp_path / "broker", "max_packet_size 10000") as running:
        await running.start()
        async with opened(running.port, context()) as sink:
            with pytest.raises(Rejected, match="takes no message of"):
                await sink.deliver(event(1, text="x" * 10_000))
            await sink.deliver(event(2))


async def test_the_password_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    secret, users = tmp_path / "password", tmp_path / "users"
    secret.touch(mode=0o600)
    with broker(tmp_path / "broker", "allow_anonymous false", f"password_file {users}") as running:
        write_password(users, "hall", "right-one")
        await running.start()
        options = {"username": "hall", "password_file": secret}
        secret.write_text("right-one\n")
        async with opened(running.port, context(), **options) as sink:
            await sink.deliver(event(1))
        secret.write_text("wrong-one\n")
        with pytest.raises(ConnectionEnded, match="Not authorized") as caught:
            async with opened(running.port, context(), **options):
                pass
    assert "wrong-one" not in str(caught.value)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Certificate and key of a broker called localhost, and the authority's certificate."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    issued.cert_chain_pems[0].write_to_path(paths[0])
    issued.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return paths


@asynccontextmanager
async def with_tls(tmp_path: Path, keys: tuple[Path, Path, Path]) -> AsyncIterator[int]:
    with broker(tmp_path / "broker", tls=keys[:2]) as running:
        await running.start()
        yield running.port


async def test_tls_verifies_the_name_and_the_authority(tmp_path: Path, keys: tuple[Path, Path, Path]) -> None:
    async with with_tls(tmp_path, keys) as port:
        trusted: dict[str, Any] = {"port": port, "tls": True, "tls_ca": keys[2]}
        async with MQTT.open(MqttOptions(host="localhost", **trusted), context()) as sink:
            await sink.deliver(event(1))
        with pytest.raises(ConnectionEnded, match="for another host"):
            async with MQTT.open(MqttOptions(host="127.0.0.1", **trusted), context()):
                pass
        with pytest.raises(ConnectionEnded, match=r"name\s+(that|its) "):
            async with MQTT.open(MqttOptions(host="localhost", port=port, tls=True), context()):
                pass


async def test_a_private_address_needs_the_permission_and_what_is_checked_is_used(mosquitto: Broker) -> None:
    with pytest.raises(Forbidden, match="private"):
        async with opened(mosquitto.port, context(allow_private=False)):
            pass
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    options = MqttOptions(host="broker.example", port=mosquitto.port)
    async with MQTT.open(options, context(resolve=resolve)) as sink:
        await sink.deliver(event(1))
    assert asked == [("broker.example", mosquitto.port)]
    with pytest.raises(Forbidden, match="metadata"):
        async with MQTT.open(options, context(resolve=resolve)):
            pass


async def test_the_first_address_that_works_is_used(mosquitto: Broker) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.3", "127.0.0.2", "127.0.0.1"]  # the broker listens at the last one

    options = MqttOptions(host="broker.example", port=mosquitto.port)
    async with MQTT.open(options, context(resolve=resolve)) as sink:
        await sink.deliver(event(1))
