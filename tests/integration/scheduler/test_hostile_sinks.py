"""Sinks whose receivers, packages and options do harm: the scheduler and the other sinks continue to work."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from scheduler.sinks import service
from scheduler.sinks.mqtt import MQTT
from scheduler.sinks.mqtt_options import MqttOptions
from scheduler.sinks.protocol import SinkContext
from tests.receivers import Receiver, receiving
from tierkit.errors import BrokenExtension, ConnectionEnded
from tierkit.extensions import load
from tierkit.testing import listening, wait_for

CONNACK = b"\x20\x03\x00\x00\x00"


@pytest.fixture
async def running(kit: Any, settings: Any) -> AsyncIterator[Any]:
    """A scheduler whose sinks may reach this machine."""
    async with kit.scheduler(settings.model_copy(update={"sink_allow_private": True})) as running:
        yield running


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def add(running: Any, name: str, kind: str = "webhook", **options: Any) -> httpx.Response:
    wanted = {"name": name, "kind": kind, "options": options}
    answer: httpx.Response = await running.http.post("/v1/sinks", json=wanted)
    return answer


async def test(running: Any, name: str) -> httpx.Response:
    answer: httpx.Response = await running.http.post(f"/v1/sinks/{name}/test")
    return answer


async def reason(running: Any, name: str) -> str:
    return str((await running.http.get(f"/v1/sinks/{name}")).json()["reason"])


test.__test__ = False  # type: ignore[attr-defined]

# --- receivers --------------------------------------------------------------------------------------------------------


async def test_brokers_that_say_nothing_occupy_no_thread_of_the_scheduler(running: Any, kit: Any) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    opened = 0

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.read()
        await asyncio.Event().wait()

    async with listening(never) as url:
        port = int(url.rpartition(":")[2])
        for number in range(5):
            answer = await add(running, f"tls-{number}", "mqtt", host="127.0.0.1", port=port, tls=True)
            assert answer.status_code == 201, answer.text
        await wait_for(lambda: opened == 5, what="all connections at once", timeout_s=5)
        async with asyncio.timeout(5):  # a handshake takes 10 s
            assert await asyncio.to_thread(lambda: 7) == 7
            await running.submit(kit.images(2), scheme="end")


async def test_names_that_take_long_occupy_no_thread_of_the_scheduler(
    running: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    never, asked, look_up = threading.Event(), set[str](), socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".example"):
            asked.add(host)
            never.wait()
            raise socket.gaierror("no such name")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        for number in range(5):
            await add(running, f"slow-{number}", url=f"http://slow-{number}.example/")
        await wait_for(lambda: len(asked) == 5, what="the look-ups")
        assert await asyncio.to_thread(lambda: 7) == 7
        await add(running, "good", url=receiver.url.replace("127.0.0.1", "localhost"))
        assert (await test(running, "good")).status_code == 200
    finally:
        never.set()


async def test_a_broker_that_sends_a_huge_message_is_left() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        writer.write(CONNACK + b"\x30\xff\xff\xff\x7f")  # a PUBLISH of 268,435,455 bytes
        while True:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with listening(flood) as url:
        options = MqttOptions(host="127.0.0.1", port=int(url.rpartition(":")[2]))
        with pytest.raises(ConnectionEnded, match="sends a packet of 268,435,455 bytes; the limit is 65,536"):
            async with asyncio.timeout(30), MQTT.open(options, SinkContext(name="hall", allow_private=True)):
                await asyncio.Event().wait()
    assert sent < 20_000_000


# --- packages ---------------------------------------------------------------------------------------------------------


class Options(BaseModel):
    """Options of a kind of a test."""

    model_config = ConfigDict(extra="forbid")

    path: str = ""


class Kind:
    """A kind of sink whose `deliver` raises an error, or does nothing."""

    def __init__(self, error: BaseException | None = None, options: type[BaseModel] = Options) -> None:
        self.Options = options
        self._error = error

    @asynccontextmanager
    async def open(self, options: Any, context: SinkContext) -> AsyncIterator[Any]:
        yield self

    async def deliver(self, event: Any) -> None:
        if self._error is not None:
            raise self._error


class Fails(Options):
    @field_validator("path")
    @classmethod
    def check(cls, value: str) -> str:
        raise RuntimeError("the validator is broken")


class Exits(Options):
    @field_validator("path")
    @classmethod
    def check(cls, value: str) -> str:
        raise SystemExit(3)


class Hidden(Options):
    token: SecretStr


class Aliased(Options):
    place: str = Field(alias="from")


class OneWay(Options):
    place: str = Field(validation_alias="from")


class Unstorable(Options):
    value: Any = None

    @field_validator("path")
    @classmethod
    def check(cls, value: str) -> str:
        return value + "/"


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kinds of sinks by name, next to Terrace's own; a function is called for its kind."""
    known = dict[str, Any]()

    def find(group: str, name: str) -> object:
        if name not in known:
            return load(group, name)
        kind = known[name]
        return kind if isinstance(kind, Kind) else kind()

    monkeypatch.setattr(service, "load", find)
    return known


async def only_that_kind_fails(running: Any, refused: httpx.Response, receiver: Receiver) -> None:
    """The refusal of another sink, and a test of the first one, name the reason; other kinds work."""
    assert (refused.status_code, "takes longer than 0.5 s" in refused.text) == (400, True)
    refused = await test(running, "slow")
    assert (refused.status_code, "takes longer than 0.5 s" in refused.text) == (502, True)
    await add(running, "good", url=receiver.url)
    assert (await test(running, "good")).status_code == 200


async def test_an_import_that_never_ends_is_a_failure_of_its_sink_only(
    running: Any, kinds: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_THREAD_S", 0.5)
    never, stuck = threading.Event(), False

    def slow() -> Kind:
        if stuck:
            never.wait()
        return Kind()

    kinds["slow"] = slow
    try:
        assert (await add(running, "slow", "slow")).status_code == 201
        stuck = True
        assert (await running.http.delete("/v1/sinks/slow/pause")).status_code == 200  # as after a restart

        async def named() -> bool:
            return "takes longer than 0.5 s" in await reason(running, "slow")

        await wait_for(named, what="the reason")
        refused = await add(running, "another", "slow")
        await only_that_kind_fails(running, refused, receiver)
    finally:
        never.set()


async def test_a_check_of_options_that_never_ends_is_a_failure_of_its_sink_only(
    running: Any, kinds: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_THREAD_S", 0.5)
    never, stuck = threading.Event(), False

    class Slow(Options):
        @field_validator("path")
        @classmethod
        def check(cls, value: str) -> str:
            if stuck:
                never.wait()
            return value

    kinds["slow"] = Kind(options=Slow)
    try:
        assert (await add(running, "slow", "slow", path="/x")).status_code == 201
        stuck = True
        refused = await add(running, "another", "slow", path="/y")
        await only_that_kind_fails(running, refused, receiver)
    finally:
        never.set()


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("mine"), asyncio.CancelledError("mine")], ids=repr)
async def test_what_deliver_raises_is_named_and_ends_nothing(
    running: Any, kinds: dict[str, Any], error: BaseException
) -> None:
    kinds["odd"] = Kind(error)
    assert (await add(running, "odd", "odd")).status_code == 201
    answer = await test(running, "odd")
    said = f"{type(error).__name__}: {error}"
    assert (answer.status_code, said in answer.json()["error"]) == (502, True)
    await running.register("edge-0", "edge")

    async def named() -> bool:
        return await reason(running, "odd") == said

    await wait_for(named, what="the reason")
    assert (await running.http.get("/readyz")).status_code == 200


def broken() -> Kind:
    raise BrokenExtension("odd in terrace.sinks is from the package odd 1, which cannot be used: TypeError: no open")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Kind(options=Fails), {"path": "a"}, "RuntimeError: the validator is broken"),
        (Kind(options=Exits), {"path": "a"}, "SystemExit: 3"),
        (Kind(options=Hidden), {"token": "s3cret"}, "the option token is a secret"),
        (Kind(options=OneWay), {"from": "a"}, "cannot be read again once they are stored: options: from is missing"),
        (Kind(options=Unstorable), {"value": "a", "path": "b"}, "are different ones after they have been stored"),
        (broken, {}, "the package odd 1, which cannot be used"),
    ],
    ids=["validator", "exit", "secret", "one way", "not stable", "package"],
)
async def test_kinds_with_options_that_cannot_be_used_are_refused(
    running: Any, kinds: dict[str, Any], kind: Any, options: dict[str, Any], said: str
) -> None:
    kinds["odd"] = kind
    answer = await add(running, "odd", "odd", **options)
    assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
    assert "s3cret" not in answer.text


async def test_options_are_stored_by_their_aliases(running: Any, kinds: dict[str, Any]) -> None:
    kinds["odd"] = Kind(options=Aliased)
    answer = await add(running, "odd", "odd", **{"from": "a"})
    assert (answer.status_code, answer.json()["options"]) == (201, {"from": "a"})
    assert (await test(running, "odd")).status_code == 200


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".example"])
async def test_a_name_that_cannot_be_one_is_named(running: Any, host: str) -> None:
    answer = await add(running, "hook", url=f"http://{host}/")
    if answer.status_code == 201:
        answer = await test(running, "hook")
    assert answer.status_code in (400, 502)
    assert answer.json()["error"]


async def test_odd_requests_are_refused_with_a_reason(running: Any, tmp_path: Path) -> None:
    url, sink = "http://example.org/", {"name": "hook", "kind": "webhook"}
    for wanted, said in (
        ({"options": {"url": url, "secret_file": "/a\0b"}}, "control characters"),
        ({"options": {"url": url + "\r\nHost: x"}}, "control characters"),
        ({"options": {"url": url + "\0"}}, "control characters"),
        ({"options": {"url": url}, "filter": {"labels": ["\n"]}}, "printable"),
        ({"options": {"url": url}, "filter": {"confidence": True}}, "confidence"),
    ):
        answer = await running.http.post("/v1/sinks", json=sink | wanted)
        assert (answer.status_code in (400, 422), said in answer.json()["error"]) == (True, True), answer.text
    half = '{"name": "hook", "kind": "webhook", "options": {"url": "http://a/"}, "filter": {"labels": ["\\ud800"]}}'
    answer = await running.http.post("/v1/sinks", content=half, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    await add(running, "hook", url=url)
    for number in (2**63, 10**30, 0, -1):
        answer = await running.http.post("/v1/sinks/hook/replay", content=f'{{"numbers": [{number}]}}')
        assert answer.status_code in (400, 422), answer.text


async def test_a_secret_that_others_may_read_is_refused(running: Any, receiver: Receiver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_MDEyMzQ1Njc4OWFiY2RlZjAx")
    secret.chmod(0o644)
    await add(running, "hook", url=receiver.url, secret_file=str(secret))
    answer = await test(running, "hook")
    assert (answer.status_code, "others may use the secret file" in answer.json()["error"]) == (400, True), answer.text
    secret.chmod(0o600)
    assert (await test(running, "hook")).status_code == 200
