"""Those who watch: the fleet as it is, what happens to it, its history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest

from tierkit.testing import wait_for

Event = tuple[str, int, dict[str, Any]]


@pytest.fixture
async def running(kit: Any, settings: Any) -> AsyncIterator[Any]:
    async with kit.scheduler(settings) as running:
        yield running


@asynccontextmanager
async def following(running: Any, kit: Any, *, after: int | None = None) -> AsyncIterator[Callable[..., Any]]:
    """A function that reads on until an event is as wanted."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    async with running.http.stream("GET", "/v1/fleet/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async with aclosing(kit.read_events(response)) as events:

            async def until(wanted: Callable[[Event], bool]) -> Event:
                async with asyncio.timeout(30):
                    event: Event
                    async for event in events:
                        if wanted(event):
                            return event
                raise AssertionError("the stream has ended")

            yield until


def happened(kind: str, **fields: Any) -> Callable[[Event], bool]:
    return lambda event: event[0] == "happened" and event[2] | {"kind": kind, **fields} == event[2]


def shows(health: str, node_id: str) -> Callable[[Event], bool]:
    return lambda event: (
        event[0] == "snapshot"
        and any(node["node_id"] == node_id and node["health"] == health for node in event[2]["nodes"])
    )


async def test_the_fleet_is_shown_at_once_and_with_each_change(running, kit):
    async with kit.uppers(running, "edge-0"), following(running, kit) as until:
        await until(shows("alive", "edge-0"))
        async with kit.end(running, "end-0"):
            await until(happened("joined", node="end-0"))
            await until(shows("alive", "end-0"))
            await running.http.post("/v1/devices/end-0/drain")
            await until(happened("drained", node="end-0"))
            await until(shows("draining", "end-0"))
            await running.http.delete("/v1/devices/end-0/drain")
            await until(happened("resumed", node="end-0"))
        await running.register("end-1", "end")  # does not come back by itself
        await until(happened("joined", node="end-1"))
        await running.http.delete("/v1/devices/end-1")
        await until(happened("removed", node="end-1"))


async def test_work_shows_as_traffic_figures_and_events(running, kit):
    async with kit.uppers(running, "edge-0"), kit.end(running, "end-0"), following(running, kit) as until:
        await until(shows("alive", "end-0"))
        job = await running.submit(kit.images(100), scheme="end-edge")
        await until(happened("began", job=job["id"]))
        await until(happened("ended", job=job["id"]))
        _, _, seen = await until(
            lambda event: event[0] == "snapshot" and any(link["images_per_s"] for link in event[2]["links"])
        )
        (link,) = seen["links"]
        assert (link["end"], link["upper"], link["mapped"]) == ("end-0", "edge-0", True)
        working = {node["node_id"]: node["images_per_s"] for node in seen["nodes"]}
        assert working["end-0"] > 0
        assert working["edge-0"] > 0

        async def counted() -> bool:
            columns = (await running.http.get("/v1/history")).json()["columns"]
            return [sum(filter(None, columns[name])) for name in ("first", "finer", "sent_up")] == [100, 100, 100]

        await wait_for(counted, what="the images in the history")


async def test_an_attempt_that_fails_is_an_event(running, kit):
    async def breaks(end: Any, task_id: str, upstreams: Any, lines: Any) -> Any:
        return ["no line at all"]

    async with kit.end(running, "end-0", script=breaks), kit.end(running, "end-1"), following(running, kit) as until:
        job = await running.submit(kit.images(200), scheme="end")
        _, _, event = await until(happened("reassigned", node="end-0", job=job["id"]))
        assert event["text"]


async def test_who_was_away_gets_what_was_missed(running, kit):
    async with kit.uppers(running, "edge-0"):
        async with following(running, kit) as until:
            await until(shows("alive", "edge-0"))
            await running.http.post("/v1/devices/edge-0/drain")
            _, number, _ = await until(happened("drained", node="edge-0"))
        await running.http.delete("/v1/devices/edge-0/drain")
        async with following(running, kit, after=number) as until:
            await until(happened("resumed", node="edge-0"))
        async with following(running, kit) as until:
            name, last, _ = await until(lambda event: True)
            assert (name, last > number) == ("snapshot", True)


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 19])
async def test_an_event_number_that_is_none_is_refused(running, after):
    answer = await running.http.get("/v1/fleet/events", headers={"Last-Event-ID": after})
    assert answer.status_code == 400


@pytest.mark.parametrize(("minutes", "step_s"), [("1", 1), ("60", 1), ("61", 60), ("1440", 60)])
async def test_a_short_history_comes_by_the_second_and_a_long_one_by_the_minute(running, kit, minutes, step_s):
    async def has_rows() -> bool:
        answer = (await running.http.get("/v1/history", params={"minutes": minutes})).json()
        lengths = {len(column) for column in answer["columns"].values()}
        assert answer["step_s"] == step_s
        assert len(lengths) == 1
        return lengths != {0}

    await wait_for(has_rows, what="the first row")


@pytest.mark.parametrize("minutes", ["0", "1441", "x"])
async def test_a_history_of_another_length_is_refused(running, minutes):
    assert (await running.http.get("/v1/history", params={"minutes": minutes})).status_code == 400


async def test_all_who_look_get_the_same_snapshot(running, kit):
    """It is made once: a second reader does not cost a second one."""
    async with kit.uppers(running, "edge-0"):
        answers = [await running.http.get("/v1/fleet") for _ in range(20)]
        moments = [answer.json()["at"] for answer in answers]
        assert len(set(moments)) < len(moments)


async def test_streams_end_when_the_scheduler_stops(kit, settings):
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        async with kit.scheduler(settings) as running:
            request = http.build_request("GET", f"{running.url}/v1/fleet/events")
            response = await http.send(request, stream=True)
            lines = response.aiter_lines()
            await anext(lines)
        async with asyncio.timeout(30):
            async for _ in lines:  # one that is cut off raises
                pass
        await response.aclose()
