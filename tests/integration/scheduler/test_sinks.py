"""Sinks: events reach real receivers, in order for each key and at least once, whatever becomes of both sides."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from tests.receivers import Receiver, receiving
from tierkit.testing import listening, service_process, wait_for

SPOOL = "a" * 16
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def running(kit: Any, settings: Any, database_url: str) -> AsyncIterator[Any]:
    """A scheduler on each database whose sinks may reach this machine."""
    changed = {"database": database_url, "sink_allow_private": True}
    async with kit.scheduler(settings.model_copy(update=changed)) as running:
        yield running


async def add(running: Any, name: str, url: str, **changes: Any) -> dict[str, Any]:
    answer = await try_add(running, name, url, **changes)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def try_add(
    running: Any, name: str, url: str, *, kind: str = "webhook", options: Any = None, **filters: Any
) -> httpx.Response:
    wanted = {"name": name, "kind": kind, "options": {"url": url, **(options or {})}, "filter": filters}
    answer: httpx.Response = await running.http.post("/v1/sinks", json=wanted)
    return answer


async def shown(running: Any, name: str) -> dict[str, Any]:
    return dict((await running.http.get(f"/v1/sinks/{name}")).json())


def observation(source: str, sequence: int, **changes: Any) -> dict[str, Any]:
    answer = {"model": "small", "sha256": "0" * 64, "label": 3, "confidence": 0.5}
    return {"source": source, "sequence": sequence, "age_s": 1.0, "local": answer, **changes}


def finer(label: int, confidence: float = 0.9) -> dict[str, Any]:
    return {
        "node_id": "cloud-0",
        "tier": "cloud",
        "model": "large",
        "sha256": "2" * 64,
        "label": label,
        "confidence": confidence,
        "coarse_label": 4,
        "coarse_confidence": 0.95,
    }


class Camera:
    """A node with sources, as the scheduler sees it."""

    def __init__(self, running: Any, kit: Any, node_id: str = "end-0") -> None:
        self.http = running.http
        self.place = {**kit.registration(node_id), "spool": "5" * 16, "lease_s": 600.0}

    async def register(self) -> None:
        answer = await self.http.post("/v1/devices", json=self.place)
        assert answer.status_code == 200, answer.text

    async def send(self, *observations: dict[str, Any], **changes: Any) -> None:
        own = {"node_id": self.place["node_id"], "incarnation": self.place["incarnation"], "spool": SPOOL}
        answer = await self.http.post("/v1/observations", json={**own, "observations": observations, **changes})
        assert answer.status_code == 200, answer.text


@pytest.fixture
async def camera(running: Any, kit: Any) -> Camera:
    camera = Camera(running, kit)
    await camera.register()
    return camera


async def test_a_job_is_told_from_submission_to_its_end(running: Any, kit: Any, receiver: Receiver) -> None:
    await add(running, "hook", receiver.url, events=["job.*"])
    async with kit.end(running, "end-0"):
        job = await running.submit(kit.images(100), scheme="end", name="photos")
        assert (await running.finished(job["id"]))["state"] == "completed"
        await wait_for(lambda: len(receiver.bodies) == 3, what="the events of the job")
    assert [event["type"] for event in receiver.events] == ["job.submitted", "job.started", "job.completed"]
    last = receiver.events[-1]["data"]
    assert (last["id"], last["name"], last["state"], last["answered_coarse"]) == (job["id"], "photos", "completed", 100)


async def test_observations_come_in_order_and_amended_only_with_another_answer(
    running: Any, camera: Camera, receiver: Receiver
) -> None:
    await add(running, "hook", receiver.url, events=["observation.*"])
    await camera.send(*(observation(source, n) for n in range(1, 31) for source in ("door", "gate")))
    await camera.send(observation("gate", 5, revision=1, finer=finer(7)))
    await camera.send(observation("gate", 5, revision=2, finer=finer(7), reason="late"))
    await camera.send(observation("gate", 5, revision=3, finer=finer(8)))
    await wait_for(lambda: len(receiver.bodies) == 62, what="all events")
    for source in ("door", "gate"):
        added = [each["data"] for each in receiver.of_type("observation.added") if each["data"]["source"] == source]
        assert [each["sequence"] for each in added] == list(range(1, 31))
    amended = receiver.of_type("observation.amended")
    assert [(each["data"]["revision"], each["data"]["fine"]["index"]) for each in amended] == [(1, 7), (3, 8)]
    page = (await running.http.get("/v1/observations", params={"source": "gate", "limit": 500})).json()["observations"]
    newest = next(each for each in page if each["sequence"] == 5)
    assert {name: newest[name] for name in amended[-1]["data"]} == amended[-1]["data"]
    assert len({each["id"] for each in receiver.events}) == 62


async def test_a_sink_gets_what_its_filter_wants(running: Any, camera: Camera, receiver: Receiver) -> None:
    name = (await running.http.get("/v1/info")).json()["hierarchy"]["fine"][7]
    await add(running, "hook", receiver.url, labels=[name], confidence=0.8, sources=["end-0/ga*"])
    sure, unsure = finer(7), finer(7, 0.7)
    await camera.send(observation("gate", 1, finer=sure), observation("gate", 2), observation("door", 1, finer=sure))
    await camera.send(observation("gate", 3, finer=unsure), observation("gate", 4, finer=sure))
    await wait_for(lambda: len(receiver.bodies) == 2, what="two events")
    assert [event["data"]["sequence"] for event in receiver.events] == [1, 4]


async def test_events_are_signed_as_standard_webhooks_says(
    running: Any, camera: Camera, receiver: Receiver, tmp_path: Path
) -> None:
    old = "whsec_" + base64.b64encode(b"an older secret of a sink").decode()
    secrets = tmp_path / "secret"
    secrets.touch(mode=0o600)
    secrets.write_text(f"{SECRET}\n{old}\n")
    await add(running, "hook", receiver.url, options={"secret_file": str(secrets)}, events=["observation.added"])
    await camera.send(observation("gate", 1))
    await wait_for(lambda: len(receiver.bodies) == 1, what="the event")
    for secret in (SECRET, old):
        assert Webhook(secret).verify(receiver.bodies[0], receiver.heads[0])["data"]["sequence"] == 1
    assert receiver.heads[0]["webhook-id"] == receiver.events[0]["id"]
    assert SECRET not in (await running.http.get("/v1/sinks")).text


async def test_nodes_and_sources_are_told_of(running: Any, camera: Camera, receiver: Receiver) -> None:
    await add(running, "hook", receiver.url, events=["node.*", "source.*"])
    await running.register("edge-0", "edge")
    leaves = await running.register("edge-1", "edge")
    goes = await running.http.delete("/v1/devices/edge-1", params={"incarnation": leaves})
    assert goes.status_code == 204
    for state in ("running", "running", "paused"):
        await camera.send(device={"sources": [{"name": "gate", "state": state}]})
    assert (await running.http.delete("/v1/devices/end-0")).status_code == 204
    await wait_for(lambda: "node.left" in str(receiver.events) and "node.dead" in str(receiver.events), what="the end")
    told = [(event["type"], event["data"].get("source") or event["data"]["id"]) for event in receiver.events]
    assert told.count(("source.online", "gate")) == told.count(("source.offline", "gate")) == 1
    assert ("node.joined", "edge-0") in told
    assert ("node.left", "end-0") in told
    assert [kind for kind, node in told if node == "edge-1"] == ["node.joined", "node.left"]
    of_edge = [kind for kind, node in told if node == "edge-0"]
    assert (of_edge[0], of_edge[-1]) == ("node.joined", "node.dead")


async def test_a_refused_event_is_a_dead_letter_until_it_is_replayed(
    running: Any, camera: Camera, receiver: Receiver
) -> None:
    await add(running, "hook", receiver.url, events=["observation.*"])
    receiver.refused["observation.amended"] = 400
    await camera.send(observation("gate", 1))
    await camera.send(observation("gate", 1, revision=1, finer=finer(7)))
    await camera.send(observation("gate", 2))
    await wait_for(lambda: len(receiver.bodies) == 2, what="the others")

    async def dead() -> list[dict[str, Any]]:
        return list((await running.http.get("/v1/sinks/hook/dead")).json()["letters"])

    (letter,) = await dead()
    assert letter["reason"] == "the receiver answered 400: what the receiver says"
    assert (letter["attempts"], letter["event"]["type"]) == (1, "observation.amended")
    receiver.refused.clear()
    assert (await running.http.post("/v1/sinks/hook/replay", json={"numbers": [9999]})).status_code == 404
    assert (await running.http.post("/v1/sinks/hook/replay", json={})).json() == {"count": 1}
    await wait_for(lambda: len(receiver.bodies) == 3, what="the replayed one")
    assert receiver.events[-1] == letter["event"]

    async def gone() -> bool:
        return await dead() == []

    await wait_for(gone, what="the dead letter to go")


async def test_a_receiver_that_is_gone_pauses_its_sink(running: Any, camera: Camera, receiver: Receiver) -> None:
    await add(running, "hook", receiver.url, events=["observation.*"])
    receiver.status = 410
    await camera.send(observation("gate", 1))

    async def paused() -> bool:
        return bool((await shown(running, "hook"))["state"] == "paused")

    await wait_for(paused, what="the pause")
    assert "wants no more events" in (await shown(running, "hook"))["reason"]
    receiver.status = 200
    await camera.send(observation("gate", 2))
    assert receiver.bodies == []
    assert (await running.http.delete("/v1/sinks/hook/pause")).json()["state"] == "ok"
    await wait_for(lambda: len(receiver.bodies) == 2, what="what has waited")
    assert [event["data"]["sequence"] for event in receiver.events] == [1, 2]


async def test_a_receiver_that_never_answers_or_never_stops_holds_up_no_other(
    running: Any, camera: Camera, receiver: Receiver
) -> None:
    streamed = 0

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal streamed
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 no\r\n\r\n")
        while True:
            writer.write(b"x" * 4096)
            streamed += 4096
            await writer.drain()

    async with listening(never) as silent, listening(endless) as talkative:
        await add(running, "silent", silent, events=["observation.*"])
        await add(running, "talkative", talkative, events=["observation.*"])
        await add(running, "good", receiver.url, events=["observation.*"])
        await camera.send(*(observation("gate", n) for n in range(1, 51)))
        await wait_for(lambda: len(receiver.bodies) == 50, what="the events at the good receiver")

        async def refused() -> bool:
            return bool((await shown(running, "talkative"))["failed"])

        await wait_for(refused, what="the first refusal")
        assert streamed < 10_000_000
        states = (await running.http.get("/v1/sinks")).json()["sinks"]
    assert [(each["name"], each["delivered"]) for each in states] == [("good", 50), ("silent", 0), ("talkative", 0)]
    assert next(each for each in states if each["name"] == "silent")["waiting"] >= 50


async def test_metrics_show_a_sink_until_it_is_removed(running: Any, camera: Camera, receiver: Receiver) -> None:
    await add(running, "shown", receiver.url, events=["observation.*"])
    receiver.refused["observation.amended"] = 400
    await camera.send(observation("gate", 1))
    await camera.send(observation("gate", 1, revision=1, finer=finer(7)))

    async def figures() -> dict[str, float]:
        lines = (await running.http.get("/metrics")).text.splitlines()
        its = (line.split(" ") for line in lines if '{sink="shown"}' in line and "_created" not in line)
        return {name.partition("{")[0].removeprefix("terrace_scheduler_sink_"): float(value) for name, value in its}

    async def complete() -> bool:
        found = await figures()
        return found == found | {"delivered_total": 1, "failed_total": 1, "dead_letters": 1, "waiting_events": 0}

    await wait_for(complete, what="the figures")
    assert (await running.http.delete("/v1/sinks/shown")).status_code == 204
    assert await figures() == {}


async def test_a_scheduler_that_stops_in_order_repeats_nothing(
    kit: Any, settings: Any, database_url: str, receiver: Receiver
) -> None:
    changed = {"database": database_url, "sink_allow_private": True}
    for term in range(2):
        async with kit.scheduler(settings.model_copy(update=changed)) as running:
            if term == 0:
                await add(running, "hook", receiver.url, events=["observation.*"])
            camera = Camera(running, kit)
            await camera.register()
            await camera.send(observation("gate", term + 1))

            async def delivered(running: Any = running) -> bool:
                return bool((await shown(running, "hook"))["delivered"])

            await wait_for(delivered, what="the event")
    assert [event["data"]["sequence"] for event in receiver.events] == [1, 2]


async def test_redirects_are_not_followed(running: Any, camera: Camera, receiver: Receiver) -> None:
    async with receiving() as other:
        receiver.status, receiver.headers = 307, {"Location": other.url}
        await add(running, "hook", receiver.url)
        answer = await running.http.post("/v1/sinks/hook/test")
        assert (answer.status_code, other.tries) == (503, 0)
        assert "redirects are not followed" in answer.json()["error"]


async def test_a_test_event_shows_at_once_what_is_wrong(running: Any, receiver: Receiver) -> None:
    await add(running, "hook", receiver.url)
    answer = await running.http.post("/v1/sinks/hook/test")
    assert (answer.status_code, receiver.events[0]["type"]) == (200, "sink.test")
    receiver.status = 422
    answer = await running.http.post("/v1/sinks/hook/test")
    assert (answer.status_code, answer.json()["error"]) == (
        502,
        "the receiver answered 422: what the receiver says",
    )
    assert (await running.http.delete("/v1/sinks/hook")).status_code == 204
    assert (await running.http.post("/v1/sinks/hook/test")).status_code == 404


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"url": "http://me:secret@example.org/"}}, "must not hold a user name or password"),
        ({"options": {"url": "ftp://example.org/"}}, "must be http://HOST"),
        ({"options": {"secret": "whsec_x"}}, "options: secret is unknown; did you mean secret_file?"),
        ({"options": {"secret_file": "secret"}}, "must be an absolute path"),
        ({"kind": "carrier-pigeon"}, "known: mqtt, webhook"),
        ({"events": ["jobs.*"]}, "no event is called 'jobs.*'; there are job.submitted"),
        ({"events": ["job.*"] * 101}, "at most 100"),
        ({"labels": [""]}, "each of 1 to 200 characters"),
    ],
)
async def test_bad_sinks_are_refused(scheduler: Any, changes: dict[str, Any], said: str) -> None:
    answer = await try_add(scheduler, "hook", "http://example.org/", **changes)
    assert answer.status_code == 400
    assert said in answer.json()["error"]
    assert "me:secret" not in answer.text


async def test_names_are_unique_and_sinks_bounded(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    monkeypatch.setattr("scheduler.sinks.service.MOST_SINKS", 3)
    for number in range(3):
        await add(scheduler, f"hook-{number}", "http://example.org/")
    again = await try_add(scheduler, "hook-0", "http://example.org/")
    assert (again.status_code, "there is a sink 'hook-0'" in again.text) == (409, True)
    many = await try_add(scheduler, "hook-3", "http://example.org/")
    assert (many.status_code, many.json()["error"]) == (409, "there are 3 sinks, and no more fit: remove one first")


async def test_private_addresses_need_the_word_of_an_admin(scheduler: Any, receiver: Receiver) -> None:
    await add(scheduler, "hook", receiver.url)
    answer = await scheduler.http.post("/v1/sinks/hook/test")
    assert answer.status_code == 403
    assert "127.0.0.1 is a private address: set sink_allow_private" in answer.json()["error"]
    assert receiver.tries == 0


async def test_the_metadata_service_is_never_a_receiver(running: Any) -> None:
    for number, host in enumerate(("169.254.169.254", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "2852039166")):
        await add(running, f"hook-{number}", f"http://{host}/latest/")
        answer = await running.http.post(f"/v1/sinks/hook-{number}/test")
        assert answer.status_code == 403, host
        assert "metadata service" in answer.json()["error"]


def command(settings: Any, database: str, port: str = "0") -> list[str]:
    return [
        *("-m", "terrace", "scheduler", f"--port={port}", f"--state={settings.state}", f"--database={database}"),
        *(f"--models={settings.models}", "--sink-allow-private", "--leader-lease-s=1"),
    ]


async def test_no_event_is_lost_when_the_scheduler_is_killed_while_the_receiver_fails(
    kit: Any, settings: Any, database_url: str, receiver: Receiver, tmp_path: Path
) -> None:
    """The receiver fails, the scheduler is killed with SIGKILL twice, and more happens in between."""
    receiver.status = 500
    sources = [f"cam-{number}" for number in range(8)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, AsyncExitStack() as stack:
        process = await stack.enter_async_context(
            service_process(command(settings, database_url), ready_file=tmp_path / "ready")
        )
        http.base_url = httpx.URL(process.url)
        running = kit.running(process.url, http, settings)

        async def leads() -> bool:
            return bool((await http.get("/readyz")).json()["status"] == "ready")

        await add(running, "hook", receiver.url, events=["observation.*"])
        for term in range(3):
            await wait_for(leads, what="the scheduler to lead")
            camera = Camera(running, kit)
            await camera.register()
            first = 1 + 20 * term
            await camera.send(*(observation(source, n) for n in range(first, first + 20) for source in sources))
            if term == 2:
                break
            if term == 1:
                receiver.status = 200  # it is killed in the middle of the deliveries
                await wait_for(lambda: len(receiver.bodies) > 0, what="a delivery", timeout_s=90)
            else:
                await wait_for(lambda: receiver.tries > 0, what="a try")
            process.kill()
            await process.exit_code()
            process = await stack.enter_async_context(
                service_process(
                    command(settings, database_url, process.url.rpartition(":")[2]), ready_file=tmp_path / f"{term}"
                )
            )

        def complete() -> bool:
            return len({event["id"] for event in receiver.events}) == 60 * len(sources)

        await wait_for(complete, what="all events", timeout_s=90)
        view = await shown(running, "hook")
    assert (view["dead"], view["dropped"]) == (0, 0)
    for source in sources:
        numbers = [each["data"]["sequence"] for each in receiver.events if each["data"]["source"] == source]
        assert list(dict.fromkeys(numbers)) == list(range(1, 61))
    bodies: dict[str, set[bytes]] = {}
    for body in receiver.bodies:
        bodies.setdefault(json.loads(body)["id"], set()).add(body)
    assert all(len(each) == 1 for each in bodies.values())
