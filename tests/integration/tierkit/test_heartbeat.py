"""A node's place in the device list, against a scheduler on a real socket that forgets, refuses, hangs and dies."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierkit.errors import Unavailable
from tierkit.http.address import free_port
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, wait_for
from tierkit.types import Tier
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration

REGISTRATION = Registration(
    node_id="edge-1",
    incarnation="0123456789abcdef",
    tier=Tier.EDGE,
    url="http://127.0.0.1:9",
    models=(ModelOffer(name="m", sha256="0" * 64, ms_per_image=1.5),),
    version="0.1.0",
)
HEARTBEAT = Heartbeat(
    incarnation=REGISTRATION.incarnation, in_flight=1, queued_images=50, running_images=2, images_done=7
)


@dataclass
class FakeScheduler:
    """Answers as told and keeps what it heard."""

    heartbeat_s: float = 0.02
    knows: set[str] = field(default_factory=set)
    refuse: int | None = None
    away: bool = False
    """Answers no heartbeat as it should."""
    hangs: bool = False
    """Takes requests, and answers none."""
    standby: bool = False
    asked: int = 0
    registrations: list[Registration] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/devices", self.leading(self.register), methods=["POST"]),
                Route("/v1/devices/{node_id}/heartbeat", self.leading(self.beat), methods=["POST"]),
                Route("/v1/devices/{node_id}", self.leading(self.leave), methods=["DELETE"]),
            ]
        )

    def leading(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self.asked += 1
            if self.standby:
                return JSONResponse({"error": "this scheduler is a standby"}, 421)
            if not self.hangs:
                return await handler(request)
            if request.method == "DELETE":
                await handler(request)
            await asyncio.Event().wait()
            raise AssertionError

        return handle

    async def register(self, request: Request) -> Response:
        if self.refuse is not None:
            return JSONResponse({"error": "another live node has this name"}, self.refuse)
        registration = Registration.model_validate_json(await request.body())
        self.registrations.append(registration)
        self.knows.add(registration.node_id)
        return JSONResponse({"lease_s": 5 * self.heartbeat_s, "heartbeat_s": self.heartbeat_s})

    async def beat(self, request: Request) -> Response:
        beat = Heartbeat.model_validate_json(await request.body())
        if self.away:
            return Response(status_code=503)
        if request.path_params["node_id"] not in self.knows:
            return JSONResponse({"error": "no such device"}, 404)
        self.beats.append(beat)
        return JSONResponse({})

    async def leave(self, request: Request) -> Response:
        self.left.append(request.query_params["incarnation"])
        return Response(status_code=204)


@pytest.fixture
async def lifecycle() -> AsyncIterator[Lifecycle]:
    lifecycle = Lifecycle()
    lifecycle.set_ready()
    yield lifecycle
    await lifecycle.cancel_owned()


@contextlib.asynccontextmanager
async def sending(urls: str | Sequence[str], lifecycle: Lifecycle) -> AsyncIterator[HeartbeatSender]:
    urls = [urls] if isinstance(urls, str) else urls

    def heartbeat() -> Heartbeat:
        return HEARTBEAT.model_copy(update={"draining": lifecycle.draining})

    async with (
        open_client() as http,
        HeartbeatSender(urls, lambda _: REGISTRATION, heartbeat, http, lifecycle=lifecycle) as sender,
    ):
        yield sender


async def test_registers_beats_and_leaves(lifecycle: Lifecycle) -> None:
    scheduler = FakeScheduler()
    async with serve_app(scheduler.app()) as service:
        async with sending(service.url, lifecycle) as sender:
            await wait_for(lambda: len(scheduler.beats) >= 3, what="three beats")
            assert sender.registered
        assert scheduler.registrations == [REGISTRATION]
        assert scheduler.beats[0] == HEARTBEAT
        assert scheduler.left == [REGISTRATION.incarnation]


@pytest.mark.parametrize("status", [200, 404, 403])
async def test_another_program_in_the_place_of_a_scheduler_is_passed_by(status: int, lifecycle: Lifecycle) -> None:
    sign_in = Route("/{path:path}", lambda _: Response("sign in", status), methods=["POST", "DELETE"])
    scheduler = FakeScheduler()
    async with (
        serve_app(Starlette(routes=[sign_in])) as portal,
        serve_app(scheduler.app()) as service,
        sending([portal.url, service.url], lifecycle) as sender,
    ):
        await wait_for(lambda: bool(scheduler.beats), what="a beat at the scheduler")
        assert sender.registered


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_heartbeats_leave_no_work_for_the_garbage_collector(lifecycle: Lifecycle) -> None:
    def requests() -> int:
        return sum(isinstance(one, aiohttp.ClientRequest | aiohttp.ClientResponse) for one in gc.get_objects())

    scheduler = FakeScheduler()
    async with serve_app(scheduler.app()) as service, sending(service.url, lifecycle):
        gc.collect()
        before = requests()
        await wait_for(lambda: len(scheduler.beats) >= 20, what="twenty beats")
        assert requests() < before + 5


async def test_waits_until_the_node_is_ready() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve_app(scheduler.app()) as service, sending(service.url, lifecycle):
        for _ in range(100):
            await asyncio.sleep(0)
        assert scheduler.registrations == []
        lifecycle.set_ready()
        await wait_for(lambda: len(scheduler.registrations) == 1)


async def test_a_scheduler_that_comes_late_is_found_and_the_wait_is_told_once(
    lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tierkit.inference.heartbeat")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    scheduler = FakeScheduler()
    async with sending(url, lifecycle) as sender:
        await wait_for(lambda: "no contact with the scheduler" in caplog.text)
        assert not sender.registered
        async with serve_app(scheduler.app(), ServiceSettings(port=port)):
            await wait_for(lambda: len(scheduler.beats) >= 2)
            assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
            assert "registered with the scheduler" in caplog.text


async def test_a_scheduler_that_forgot_the_node_gets_its_registration_again(
    lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = FakeScheduler()
    async with serve_app(scheduler.app()) as service, sending(service.url, lifecycle):
        await wait_for(lambda: len(scheduler.beats) >= 1)
        scheduler.knows.clear()
        await wait_for(lambda: len(scheduler.registrations) == 2)
        seen = len(scheduler.beats)
        await wait_for(lambda: len(scheduler.beats) > seen, what="beats to go on")
    assert "does not know this node any more" in caplog.text


async def test_a_refusal_is_told_and_tried_again(lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(refuse=409)
    async with serve_app(scheduler.app()) as service, sending(service.url, lifecycle) as sender:
        await wait_for(lambda: "another live node has this name" in caplog.text)
        scheduler.refuse = None
        await wait_for(lambda: sender.registered)


async def test_an_answer_that_is_no_lease_is_no_registration(
    lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: Request) -> Response:
        return JSONResponse({"hello": "you"})

    app = Starlette(routes=[Route("/v1/devices", answer, methods=["POST"])])
    async with serve_app(app) as service, sending(service.url, lifecycle) as sender:
        await wait_for(lambda: "something that is not a lease" in caplog.text)
        assert not sender.registered


async def test_an_error_while_it_describes_itself_is_an_attempt_that_failed(lifecycle: Lifecycle) -> None:
    scheduler = FakeScheduler()
    answers: list[Registration | Unavailable] = [Unavailable("no route to the scheduler yet"), REGISTRATION]

    def registration(_scheduler: str) -> Registration:
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    async with (
        serve_app(scheduler.app()) as service,
        open_client() as http,
        HeartbeatSender([service.url], registration, lambda: HEARTBEAT, http, lifecycle=lifecycle) as sender,
    ):
        await wait_for(lambda: sender.registered)


async def test_a_node_whose_address_has_changed_registers_with_the_new_one(lifecycle: Lifecycle) -> None:
    scheduler, address = FakeScheduler(), REGISTRATION.url

    def registration(_scheduler: str) -> Registration:
        return REGISTRATION.model_copy(update={"url": address})

    async with (
        serve_app(scheduler.app()) as service,
        open_client() as http,
        HeartbeatSender([service.url], registration, lambda: HEARTBEAT, http, lifecycle=lifecycle),
    ):
        await wait_for(lambda: len(scheduler.beats) >= 1)
        scheduler.away = True
        address = "http://127.0.0.1:10"
        await wait_for(lambda: len(scheduler.registrations) == 2)
        assert scheduler.registrations[1].url == address
        scheduler.away = False
        seen = len(scheduler.beats)
        await wait_for(lambda: len(scheduler.beats) > seen, what="beats to go on")
    assert len(scheduler.registrations) == 2


async def test_draining_is_told_at_once_and_in_every_later_beat(lifecycle: Lifecycle) -> None:
    scheduler = FakeScheduler()
    async with serve_app(scheduler.app()) as service, sending(service.url, lifecycle):
        await wait_for(lambda: len(scheduler.beats) >= 1)
        scheduler.heartbeat_s = 3600.0  # longer than the test may take: only the drain can bring the next beat
        scheduler.knows.clear()
        await wait_for(lambda: len(scheduler.registrations) == 2)
        seen = len(scheduler.beats)
        lifecycle.drain()
        await wait_for(lambda: len(scheduler.beats) == seen + 1, what="the farewell beat")
        assert scheduler.beats[-1].draining


async def test_a_scheduler_that_hangs_does_not_hold_up_the_end(lifecycle: Lifecycle) -> None:
    scheduler = FakeScheduler()
    loop = asyncio.get_running_loop()
    async with serve_app(scheduler.app(), ServiceSettings(drain_s=0)) as service:
        async with sending(service.url, lifecycle) as sender:
            await wait_for(lambda: sender.registered)
            scheduler.hangs = True
            begin = loop.time()
        assert scheduler.left == [REGISTRATION.incarnation]
        assert loop.time() - begin < 3


@dataclass
class Pair:
    """Two schedulers, as nodes know them."""

    first: FakeScheduler
    second: FakeScheduler
    urls: list[str]
    stop_first: Callable[[], Awaitable[None]]
    """As if it had been killed: its socket is gone."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """The first one leads."""
    first, second = FakeScheduler(), FakeScheduler(standby=True)
    async with contextlib.AsyncExitStack() as stack:
        own = await stack.enter_async_context(contextlib.AsyncExitStack())
        one = await own.enter_async_context(serve_app(first.app(), ServiceSettings(drain_s=0)))
        two = await stack.enter_async_context(serve_app(second.app(), ServiceSettings(drain_s=0)))
        yield Pair(first, second, [one.url, two.url], own.aclose)


async def test_a_standby_that_stands_first_in_the_list_is_passed_over(pair: Pair, lifecycle: Lifecycle) -> None:
    async with sending(pair.urls[::-1], lifecycle):
        await wait_for(lambda: len(pair.first.beats) >= 5, what="five beats")
    assert (len(pair.first.registrations), pair.first.left) == (1, [REGISTRATION.incarnation])
    assert pair.second.asked == 1, "the node stays with the one that leads"


@pytest.mark.parametrize("end", ["killed", "deposed", "hanging"])
async def test_a_node_goes_over_to_the_standby_that_leads_now(
    pair: Pair, lifecycle: Lifecycle, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tierkit.inference.heartbeat")
    async with sending(pair.urls, lifecycle) as sender:
        await wait_for(lambda: len(pair.first.beats) >= 2, what="two beats")
        if end == "killed":
            await pair.stop_first()
        pair.first.standby, pair.first.hangs = end == "deposed", end == "hanging"
        await wait_for(lambda: pair.second.asked >= 2, what="the node to look at the other one, again and again")
        assert "no scheduler leads at the moment" in caplog.text
        pair.second.standby = False
        await wait_for(lambda: len(pair.second.beats) >= 2, what="beats to the new one")
        assert sender.registered
    assert pair.second.registrations == [REGISTRATION]
    assert pair.second.left == [REGISTRATION.incarnation], "the farewell is for the one that leads"
    assert pair.first.left == []
    assert f"registered with the scheduler at {pair.urls[1]}" in caplog.text


async def test_between_two_addresses_there_is_no_pause(
    pair: Pair, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may take.
    monkeypatch.setattr("tierkit.inference.heartbeat._FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr("tierkit.inference.heartbeat._LONGEST_BACKOFF_S", 3600.0)
    pair.first.standby, pair.second.standby = True, False
    async with sending(pair.urls, lifecycle) as sender:
        await wait_for(lambda: sender.registered)
    assert pair.first.asked == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 429, 503])
async def test_a_refusal_by_the_one_that_leads_makes_no_node_wander(
    pair: Pair, lifecycle: Lifecycle, status: int
) -> None:
    pair.first.refuse = status
    async with sending(pair.urls, lifecycle):
        await wait_for(lambda: pair.first.asked >= 2, what="two tries")
        pair.first.refuse = None
        await wait_for(lambda: len(pair.first.beats) >= 1)
    assert pair.second.asked == 0


async def test_where_all_are_standbys_the_node_says_so_once_and_waits(
    pair: Pair, lifecycle: Lifecycle, caplog: pytest.LogCaptureFixture
) -> None:
    pair.first.standby = True
    async with sending(pair.urls, lifecycle) as sender:
        await wait_for(lambda: pair.second.asked >= 3, what="three rounds")
        assert not sender.registered
        assert abs(pair.first.asked - pair.second.asked) <= 1, "each is asked as often as the other"
    (told,) = [record.getMessage() for record in caplog.records]
    assert all(url in told for url in pair.urls)


async def test_the_farewell_finds_the_one_that_leads(pair: Pair, lifecycle: Lifecycle) -> None:
    pair.first.heartbeat_s = 3600.0
    async with sending(pair.urls, lifecycle) as sender:
        await wait_for(lambda: sender.registered)
        await pair.stop_first()
        pair.second.standby = False
    assert pair.second.left == [REGISTRATION.incarnation]


async def test_a_bug_in_the_figures_stops_the_service(lifecycle: Lifecycle) -> None:
    def heartbeat() -> Heartbeat:
        raise ZeroDivisionError

    scheduler = FakeScheduler()
    async with serve_app(scheduler.app()) as service, open_client() as http:
        async with HeartbeatSender([service.url], lambda _: REGISTRATION, heartbeat, http, lifecycle=lifecycle):
            await wait_for(lambda: isinstance(lifecycle.crash, ZeroDivisionError))
        assert lifecycle.draining
