"""Pictures that begin at the device: answered at once, delivered once and in order, amended by better answers."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from end_node.uplink import sending
from tests.integration.end_node.aids import PixelModel, RunningUpper, images, serve_upper, to
from tests.integration.end_node.observing import SaidScheduler, first, observing, png, receipt, said_scheduler
from tierkit.errors import SpoolUnavailable
from tierkit.http.address import free_port
from tierkit.testing import wait_for
from tierkit.wire.messages import Encoding
from tierkit.wire.observations import Behind, Receipt
from tierkit.wire.oip import InferRequest, Tensor, encode_request


@pytest.fixture
async def hub() -> AsyncIterator[tuple[SaidScheduler, str]]:
    async with said_scheduler() as running:
        yield running


@pytest.fixture
async def upper() -> AsyncIterator[RunningUpper]:
    async with serve_upper(PixelModel("fine", 4)) as running:
        running.model.ran.clear()  # its own warm-up
        yield running


def has(scheduler: SaidScheduler, count: int, *, settled: bool = True) -> Any:
    """Waits until the scheduler has so many observations, and none of them waits for a better answer."""

    def complete() -> bool:
        found = scheduler.observations.values()
        return len(found) >= count and not (settled and any(each.waits for each in found))

    return wait_for(complete, what=f"{count} observations")


def in_order(scheduler: SaidScheduler, count: int) -> None:
    """Each observation has arrived first in the order of its number, and no revision twice."""
    firsts = [sequence for _, sequence, _ in dict.fromkeys((s, n, 0) for s, n, _ in scheduler.arrived)]
    assert firsts == list(range(1, count + 1))
    assert len(set(scheduler.arrived)) == len(scheduler.arrived)


async def test_a_node_alone_answers_at_once(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        answer = await node.push(png(1))
    assert answer.status_code == 201
    seen = answer.json()
    assert (seen["sequence"], seen["label"], seen["answered_by"]) == (1, "y", "end")
    assert seen["confidence"] == pytest.approx(0.7)
    assert not seen["waits"], "nobody is there who could answer better"


async def test_what_cannot_be_read_is_an_observation_with_the_reason(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        seen = (await node.push(b"not a picture")).json()
        after = (await node.push(png(0))).json()
    assert seen["label"] is None
    assert "not a" in seen["damaged"]
    assert not seen["waits"]
    assert (after["sequence"], after["label"]) == (2, "x")


async def test_unsure_pictures_get_a_better_answer(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.routed(to(upper.url))
    async with observing(tmp_path, http, url) as node, node.events() as events:
        await node.push(png(3))
        told = await first(events, 2)
        await has(scheduler, 1)
    assert [(kind, seen["revision"]) for kind, _, seen in told] == [("observation", 0), ("amended", 1)]
    assert told[0][2]["label"] == "y"
    assert told[1][2]["label"] == "d"
    seen = scheduler.observations["gate", 1]
    assert seen.unsure
    assert not seen.waits
    assert seen.finer is not None
    assert seen.local is not None
    assert (seen.local.label, seen.finer.label, seen.finer.node_id) == (1, 3, "edge-1")
    assert seen.finer.sent is not None
    assert seen.finer.sent.form == "pixels"


async def test_sure_pictures_stay(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.routed(to(upper.url), below=0.3)
    async with observing(tmp_path, http, url) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        seen = (await node.push(png(3))).json()
        await has(scheduler, 1)
    assert not seen["unsure"]
    assert not seen["waits"]
    assert upper.model.ran == []
    assert scheduler.observations["gate", 1].revision == 0


async def test_pictures_from_before_the_first_route_are_judged_by_it(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    port = free_port()
    async with observing(tmp_path, http, f"http://127.0.0.1:{port}") as node:
        assert (await node.push(png(3))).json()["waits"]
    scheduler.routed(to(upper.url), below=0.3)
    async with observing(tmp_path, http, url):
        await has(scheduler, 1)
    assert upper.model.ran == []


@pytest.mark.parametrize(("escalate", "ran"), [("nothing", []), ("all", [1, 2])])
async def test_escalate_nothing_or_all(
    escalate: str, ran: list[int], tmp_path: Path, http: httpx.AsyncClient, hub: Any, upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.routed(to(upper.url), below=0.3)
    async with observing(tmp_path, http, url, uplink={"escalate": escalate}) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        for label in (1, 2):
            await node.push(png(label))
        await has(scheduler, 2)
    assert sorted(upper.model.ran) == ran


async def test_answers_wait_for_the_scheduler_and_pictures_for_the_upstream_node(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    """Nobody is there; then the scheduler; then the upstream node."""
    edge_port = free_port()
    async with said_scheduler() as (scheduler, url):
        scheduler.routed(to(f"http://127.0.0.1:{edge_port}"))
        async with observing(tmp_path, http, url) as node:
            await wait_for(lambda: node.node.uplink.route is not None)
        scheduler.known = False
    async with observing(tmp_path, http, url) as node:
        assert node.node.uplink.route == scheduler.route, "the last route stays in force"
        for label in (2, 3, 2):
            answer = (await node.push(png(label))).json()
            assert answer["waits"]
            assert answer["label"] == "xy"[label % 2]
        report = await node.sources()
        assert report["spool"]["waiting_answers"] == 3
        assert not report["uplink"]["online"]
    async with said_scheduler() as (scheduler, url):
        scheduler.routed(to(f"http://127.0.0.1:{edge_port}"))
        async with observing(tmp_path, http, url) as node:
            await has(scheduler, 3, settled=False)
            assert all(each.waits and each.finer is None for each in scheduler.observations.values())
            async with serve_upper(PixelModel("fine", 4)) as back:
                scheduler.routed(to(back.url), version=2)
                await has(scheduler, 3)
    in_order(scheduler, 3)
    assert [each.finer and each.finer.label for each in scheduler.observations.values()] == [2, 3, 2]


async def test_a_scheduler_that_has_forgotten_the_node_is_told_again(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    async with observing(tmp_path, http, url) as node:
        await node.push(png(0))
        await has(scheduler, 1, settled=False)
        scheduler.known = False
        await node.push(png(0))
        await has(scheduler, 2, settled=False)
    assert len(scheduler.registrations) == 2
    in_order(scheduler, 2)


async def test_each_batch_carries_the_state_of_the_device(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    async with observing(tmp_path, http, url, spool={"folder": tmp_path, "size": "8MB"}) as node:
        await node.push(png(0))
        await has(scheduler, 1, settled=False)
        report = await node.sources()
    told = scheduler.devices[-1]
    assert [(each.name, each.state) for each in told.sources] == [("gate", "running")]
    assert 5_000_000 < told.spool_size_bytes == report["spool"]["room_bytes"] < 8_000_000
    assert 0 < told.spool_bytes < 2000, "one picture waits"
    assert told.spent_bytes > 0
    assert (told.waiting_answers, told.lost_answers, told.bytes_per_day) == (0, 0, None)


async def test_a_source_that_is_paused_is_reported_without_a_picture(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub

    def told(state: str) -> Any:
        return wait_for(lambda: any(device.sources[0].state == state for device in scheduler.devices[-1:]))

    async with observing(tmp_path, http, url, remote_sources=True) as node:
        await told("running")
        assert (await http.post(f"{node.url}/v1/sources/gate/pause")).status_code == 204
        await told("paused")
        scheduler.devices.clear()
        scheduler.known = False  # it was restarted
        await told("paused")
    assert scheduler.arrived == []


async def test_with_a_budget_the_state_of_a_source_waits_for_the_next_batch(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    uplink = {"bytes_per_day": "5MB"}
    async with observing(tmp_path, http, url, remote_sources=True, uplink=uplink) as node:
        await wait_for(lambda: node.node.uplink.online)
        assert (await http.post(f"{node.url}/v1/sources/gate/pause")).status_code == 204
        clock = node.node.pace._clock
        node.node.pace._clock = lambda: clock() + 1000.0
        node.node.uplink.source_changed()
        await wait_for(lambda: bool(scheduler.devices))
    assert [device.sources[0].state for device in scheduler.devices] == ["paused"]


@pytest.mark.parametrize("asked_s", ["1", "1000000"])
async def test_a_device_that_sends_too_much_keeps_its_answers_and_waits(
    asked_s: str,
    tmp_path: Path,
    http: httpx.AsyncClient,
    hub: tuple[SaidScheduler, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_LONGEST_REFUSAL_S", 1.5)
    scheduler, url = hub
    times: list[float] = []

    def refuse(batch: Any) -> Response | None:
        times.append(time.monotonic())
        return JSONResponse({"error": "too many"}, 429, {"Retry-After": asked_s}) if len(times) == 1 else None

    scheduler.receipt = refuse
    async with observing(tmp_path, http, url) as node:
        await node.push(png(0))
        await wait_for(lambda: node.node.uplink.reason == "too many")
        await node.push(png(1))
        await has(scheduler, 2, settled=False)
    assert times[1] - times[0] >= 1.0
    in_order(scheduler, 2)


@pytest.mark.parametrize(
    "nonsense",
    [
        Response(b"thanks"),
        Response(b""),
        JSONResponse({"stored": 7, "known": 0}),
        JSONResponse({"stored": -1, "known": 2}),
        JSONResponse({"stored": 1, "known": 0, "behind": {"other": {"first": 1, "highest": 5}}}),
        JSONResponse({"stored": 0, "known": 0, "behind": {"gate": {"first": 1, "highest": 2**52}}}),
        JSONResponse({"stored": 0, "known": 0, "behind": {"gate": {"first": -1, "highest": 5}}}),
        JSONResponse({"stored": 0, "known": 0, "behind": {"gate": 5}}),
        JSONResponse({"error": "out of order"}, 500),
        Response(b"<html>", 502),
        Response(b"", 301, {"Location": "http://127.0.0.1:9/"}),
        Response(bytes(200_000)),
    ],
)
async def test_nothing_is_lost_to_a_scheduler_that_answers_nonsense(
    nonsense: Response, tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    answers = itertools.chain([nonsense, nonsense], itertools.repeat(None))
    scheduler.receipt = lambda batch: next(answers)
    async with observing(tmp_path, http, url) as node:
        await node.push(png(0))
        await has(scheduler, 1, settled=False)
        await node.push(png(1))
        await has(scheduler, 2, settled=False)
    in_order(scheduler, 2)


async def test_numbers_go_on_where_the_scheduler_says(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    """The spool of a device was lost, and the scheduler has observations of it up to 40."""
    scheduler, url = hub

    def behind(batch: Any) -> Response | None:
        if batch.observations[0].sequence > 40:
            return None
        return receipt(Receipt(stored=0, known=0, behind={"gate": Behind(first=1, highest=40)}))

    scheduler.receipt = behind
    async with observing(tmp_path, http, url) as node:
        for label in (0, 1):
            await node.push(png(label))
        await has(scheduler, 2, settled=False)
        assert (await node.push(png(0))).json()["sequence"] == 43
        await has(scheduler, 3, settled=False)
    assert [(n, each.local and each.local.label) for (_, n), each in scheduler.observations.items()] == [
        (41, 0),
        (42, 1),
        (43, 0),
    ]


async def test_an_old_copy_of_a_spool_repeats_nothing(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    """The scheduler has number 1 of this node, other pictures under 2 and 3, and all numbers up to 40."""
    scheduler, url = hub

    def behind(batch: Any) -> Response | None:
        if batch.observations[-1].sequence > 40:
            return None
        return receipt(Receipt(stored=0, known=1, behind={"gate": Behind(first=2, highest=40)}))

    async with observing(tmp_path, http) as node:
        for label in (0, 1, 0):
            await node.push(png(label))
    scheduler.receipt = behind
    async with observing(tmp_path, http, url):
        await has(scheduler, 2, settled=False)
    assert [number for _, number in scheduler.observations] == [41, 42]


async def test_a_copy_that_the_scheduler_does_not_know_holds_up_no_other(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    answers = itertools.chain([JSONResponse({"error": "unknown"}, 404)], itertools.repeat(Response(status_code=204)))
    scheduler.put = lambda: next(answers)
    async with observing(tmp_path, http, url, uplink={"pictures_to_scheduler": "all", "escalate": "nothing"}) as node:
        await node.push(png(0))
        await has(scheduler, 1)
        await node.push(png(1))
        await wait_for(lambda: bool(scheduler.pictures))
    assert list(scheduler.pictures.values()) == [png(1)]


async def test_a_picture_that_an_upstream_node_cannot_answer_does_not_hold_up_the_others(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    """The node has another network than the route names for the first picture."""
    scheduler, url = hub
    scheduler.routed(to(upper.url, sha256="cd" * 32))
    async with observing(tmp_path, http, url) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await wait_for(lambda: bool(node.node.uplink.trouble))
        scheduler.routed(to(upper.url), version=2)
        await node.push(png(2))
        await has(scheduler, 2)
    assert [each.finer and each.finer.label for _, each in sorted(scheduler.observations.items())] == [3, 2]


async def test_a_disk_that_is_full_for_a_while_loses_nothing_that_was_taken(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.receipt = lambda batch: JSONResponse({"error": "later"}, 503)
    async with observing(tmp_path, http, url) as node:
        await node.push(png(3))
        spool = node.node.spool.do

        async def refuse(call: Any) -> Any:
            raise SpoolUnavailable("the disk is full")

        node.node.spool.do = refuse  # type: ignore[method-assign]
        scheduler.routed(to(upper.url))
        await wait_for(lambda: node.node.uplink.route == scheduler.route)
        refused = await node.push(png(2))
        assert (refused.status_code, refused.json()["error"]) == (503, "the disk is full")
        node.node.spool.do = spool  # type: ignore[method-assign]
        scheduler.receipt = lambda batch: None
        await node.push(png(1))

        def labels() -> list[int | None]:
            return [each.finer.label if each.finer else None for _, each in sorted(scheduler.observations.items())]

        await wait_for(lambda: labels() == [3, 1])
        assert node.node.lifecycle.crash is None


async def test_pictures_overtake_jobs(tmp_path: Path, http: httpx.AsyncClient) -> None:
    model = PixelModel("coarse", 2)
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", images(4)),)))
    async with observing(tmp_path, http, model=model, max_batch_size=1) as node:
        model.gate.clear()
        model.entered.clear()
        model.ran.clear()

        def waiting(count: int) -> Any:
            return wait_for(lambda: node.node.default_runner.queued_images == count)

        jobs = []
        for number in range(4):
            url = f"{node.url}/v1/tasks/t-{number}"
            jobs.append(asyncio.create_task(http.post(url, content=b"".join(chunks), headers=headers)))
            if not number:
                await wait_for(model.entered.is_set)
        await waiting(3)
        picture = asyncio.create_task(node.push(png(1)))
        await waiting(4)
        model.gate.set()
        assert (await picture).status_code == 201
        assert [(await job).status_code for job in jobs] == [200] * 4
    assert model.ran == [4, 1, 4, 4, 4]


async def test_pixels_never_go_where_features_are_asked_for(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    encoding = Encoding(name="fine.conv1", head="a" * 64, tail="b" * 64)
    scheduler.routed(to(upper.url).model_copy(update={"encoding": encoding}))
    async with observing(tmp_path, http, url) as node:
        await node.push(png(3))
        await wait_for(lambda: bool(node.node.uplink.trouble))
        assert "could not be encoded" in node.node.uplink.trouble
        await has(scheduler, 1, settled=False)
    assert upper.model.ran == []
    assert scheduler.observations["gate", 1].finer is None


async def test_the_list_of_allowed_upstream_nodes_holds(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.routed(to(upper.url))
    async with observing(tmp_path, http, url, allowed_upstreams=("http://10.9.9.9",)) as node:
        await node.push(png(3))
        await has(scheduler, 1)
    assert upper.model.ran == []
    assert "--allowed-upstreams" in scheduler.observations["gate", 1].reason


@pytest.mark.parametrize(
    ("which", "below", "sent"), [("none", 0.8, 0), ("unsure", 0.8, 1), ("unsure", 0.3, 0), ("all", 0.3, 1)]
)
async def test_the_scheduler_gets_only_the_pictures_that_it_may_have(
    which: str, below: float, sent: int, tmp_path: Path, http: httpx.AsyncClient, hub: Any, upper: RunningUpper
) -> None:
    scheduler, url = hub
    scheduler.routed(to(upper.url), below=below)
    async with observing(tmp_path, http, url, uplink={"pictures_to_scheduler": which}) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await has(scheduler, 1)
        await wait_for(lambda: len(scheduler.pictures) == sent)
        assert (await node.sources())["spool"]["waiting_pictures"] == 0
    assert list(scheduler.pictures.values()) == [png(3)] * sent


async def test_a_picture_that_the_scheduler_refuses_is_not_sent_for_ever(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str]
) -> None:
    scheduler, url = hub
    scheduler.routed()
    scheduler.put = lambda: JSONResponse({"error": "not a picture"}, 415)
    uplink = {"pictures_to_scheduler": "all", "escalate": "nothing"}
    async with observing(tmp_path, http, url, uplink=uplink) as node:
        await node.push(png(3))

        async def given_up() -> bool:
            return bool((await node.sources())["spool"]["waiting_pictures"] == 0)

        await wait_for(given_up)
    assert scheduler.pictures == {}


async def test_a_budget_asks_for_a_long_lease(tmp_path: Path, http: httpx.AsyncClient, hub: Any) -> None:
    scheduler, url = hub
    async with observing(tmp_path, http, url, uplink={"bytes_per_day": "5MB"}):
        await wait_for(lambda: bool(scheduler.registrations))
    (registration,) = scheduler.registrations
    assert registration.sources
    assert registration.lease_s is not None
    assert registration.lease_s >= 600


# --- for local programs ---------------------------------------------------------------------------------------------


async def test_events_go_on_after_the_last_one_that_was_read(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        async with node.events() as events:
            for label in (0, 1):
                await node.push(png(label))
            told = await first(events, 1)
        async with node.events(**{"Last-Event-ID": str(told[0][1])}) as events:
            (later,) = await first(events, 1)
    assert (told[0][2]["sequence"], later[2]["sequence"]) == (1, 2)


async def test_an_event_id_of_a_lost_spool_begins_anew(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        await node.push(png(0))
        async with node.events(**{"Last-Event-ID": "999999999"}) as events:
            (told,) = await first(events, 1)
    assert told[2]["sequence"] == 1


@pytest.mark.parametrize("last", ["-1", "x", "1" * 30, "٣"])
async def test_an_event_id_that_was_not_given_is_refused(last: str, tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        url = f"{node.url}/v1/observations/events"
        answer = await http.get(url, headers=[(b"last-event-id", last.encode())])
    assert answer.status_code == 400


async def test_events_end_when_the_node_drains(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node, node.events() as events:
        await node.push(png(0))
        await first(events, 1)
        node.node.lifecycle.drain()
        with pytest.raises(StopAsyncIteration):
            await first(events, 1)


async def test_pushing_is_refused_with_the_reason(tmp_path: Path, http: httpx.AsyncClient) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    sources = [{"name": "gate", "kind": "push", "rate": 1.0}, {"name": "files", "kind": "folder", "url": str(pictures)}]
    async with observing(tmp_path / "spool", http, source=sources) as node:
        assert (await node.push(b"")).status_code == 400
        assert (await node.push(png(0), "files")).status_code == 409
        assert (await node.push(png(0), "other")).status_code == 404
        statuses = [(await node.push(png(0))).status_code for _ in range(3)]
    assert statuses[-1] == 503
    assert 201 not in statuses[1:]


async def test_a_folder_is_taken_once_even_over_a_restart(tmp_path: Path, http: httpx.AsyncClient) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    source = [{"name": "files", "url": str(pictures)}]

    async def take(count: int) -> list[str]:
        async with observing(tmp_path / "spool", http, source=source) as node:

            async def taken() -> bool:
                return len(await node.node.spool.do(lambda spool: spool.changes(0, 100))) >= count

            await wait_for(taken)
            found = await node.node.spool.do(lambda spool: spool.changes(0, 100))
        return sorted(each.name for _, each in found)

    (pictures / "a.png").write_bytes(png(0))
    (pictures / "b.png").write_bytes(png(1))
    assert await take(2) == ["a.png", "b.png"]
    (pictures / "c.png").write_bytes(png(1))
    assert await take(3) == ["a.png", "b.png", "c.png"]


async def test_sources_change_over_the_network_only_where_the_device_allows_it(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    new = {"name": "door", "kind": "push"}
    async with observing(tmp_path, http) as node:
        answers = [
            await http.post(f"{node.url}/v1/sources", json=new),
            await http.delete(f"{node.url}/v1/sources/gate"),
            await http.post(f"{node.url}/v1/sources/gate/pause"),
        ]
        assert [answer.status_code for answer in answers] == [403] * 3
        assert [each["name"] for each in (await node.sources())["sources"]] == ["gate"]


async def test_sources_are_added_paused_and_removed(tmp_path: Path, http: httpx.AsyncClient) -> None:
    new = {"name": "door", "kind": "push"}
    async with observing(tmp_path, http, remote_sources=True) as node:
        url = f"{node.url}/v1/sources"
        assert (await http.post(url, json=new)).status_code == 201
        assert (await http.post(url, json=new)).status_code == 409
        assert (await http.post(url, json={**new, "name": "gate"})).status_code == 409
        assert (await node.push(png(0), "door")).status_code == 201
        assert (await http.post(f"{url}/door/pause")).status_code == 204
    async with observing(tmp_path, http, remote_sources=True) as node:
        url = f"{node.url}/v1/sources"
        assert [each["name"] for each in (await node.sources())["sources"]] == ["gate", "door"]
        assert (await node.push(png(0), "door")).status_code == 409, "it is paused, over a restart"
        assert (await http.delete(f"{url}/door/pause")).status_code == 204

        async def resumed() -> bool:
            return (await node.push(png(0), "door")).status_code == 201

        await wait_for(resumed)
        assert (await http.delete(f"{url}/gate")).status_code == 409, "it stands in the settings"
        assert (await http.delete(f"{url}/door")).status_code == 204
        assert (await http.delete(f"{url}/door")).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"name": "Door", "kind": "push"}',
        b'{"name": "door"}',
        b'{"name": "door", "kind": "telepathy"}',
        b'{"name": "door", "kind": "push", "password": 1}',
        b'{"name": "door", "kind": "push", "rate": -1}',
        b'{"name": "door", "kind": "push", "rate": 1e999}',
        b"\xff",
    ],
)
async def test_a_source_that_cannot_be_is_refused(body: bytes, tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http, remote_sources=True) as node:
        answer = await http.post(f"{node.url}/v1/sources", content=body)
        assert answer.status_code == 400, answer.text
        assert len((await node.sources())["sources"]) == 1
