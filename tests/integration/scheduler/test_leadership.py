"""Two schedulers with one database, as processes: the leader dies, is stopped, leaves, loses its database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.postgres import PostgresServer
from tests.receivers import receiving
from tierkit.http.address import free_port
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.wire.messages import Heartbeat, Registration

IMAGES = 1000


class Pair:
    """Two schedulers, each on its port with a state folder of its own, and nodes that find the one that leads."""

    def __init__(self, kit: Any, settings: Any, database: str, folder: Path) -> None:
        self.ports = [free_port(), free_port()]
        self.processes: dict[int, ServiceProcess] = {}
        self.http = httpx.AsyncClient(timeout=60, trust_env=False)
        self.stack = AsyncExitStack()
        self.ends: list[Any] = []
        self._kit, self._settings, self._database, self._folder = kit, settings, database, folder

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def start(self, port: int) -> ServiceProcess:
        """Returns once it leads or stands by."""
        command = [
            *("-m", "terrace", "scheduler", f"--port={port}", f"--state={self._folder / str(port)}"),
            *(f"--database={self._database}", "--leader-lease-s=1.0"),
            *(f"--models={self._settings.models}", "--n-map=1", "--trusted=end,edge,cloud"),
            *("--heartbeat-s=0.1", "--suspect-s=0.5", "--lease-s=1.0", "--sink-allow-private"),
        ]
        ready = self._folder / f"{port}.ready"
        ready.unlink(missing_ok=True)
        process = await self.stack.enter_async_context(service_process(command, ready_file=ready))
        self.processes[port] = process
        return process

    async def status(self, port: int) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return str((await self.http.get(f"{self.url(port)}/readyz", timeout=1.0)).json()["status"])
        return "gone"

    async def leader(self) -> int:
        """The port of the one that leads, when one does."""
        found: list[int] = []

        async def leads() -> bool:
            found[:] = [port for port in self.ports if await self.status(port) == "ready"]
            return bool(found)

        await wait_for(leads, what="a leader")
        return found[0]

    def other(self, port: int) -> int:
        return self.ports[1 - self.ports.index(port)]

    async def running(self) -> Any:
        """A client of the leader."""
        url = self.url(await self.leader())
        self.http.base_url = httpx.URL(url)
        return self._kit.running(url, self.http, self._settings)

    async def results(self, job_id: str) -> list[dict[str, Any]]:
        """The results of a job from whichever scheduler leads; another one may lead in the next moment."""
        found: list[dict[str, Any]] = []

        async def there() -> bool:
            answer = await (await self.running()).http.get(f"/v1/jobs/{job_id}/results")
            found[:] = [json.loads(line) for line in answer.text.splitlines()] if answer.status_code == 200 else []
            return bool(answer.status_code == 200)

        await wait_for(there, what="the results")
        return found

    async def add_nodes(self) -> None:
        running = await self.running()
        for number in range(2):
            self.ends.append(
                await self.stack.enter_async_context(self._kit.end(running, f"end-{number}", beating=False))
            )
        places = [(end.node_id, "end", end.url) for end in self.ends]
        uppers = [(f"{tier}-0", tier, "http://127.0.0.1:9") for tier in ("edge", "cloud")]
        http = await self.stack.enter_async_context(open_client())
        for place in places + uppers:
            await self.stack.enter_async_context(self._beating(http, *place))

    def _beating(self, http: aiohttp.ClientSession, node_id: str, tier: str, url: str) -> HeartbeatSender:
        """A node's place with whichever scheduler leads."""
        lifecycle = Lifecycle()
        lifecycle.set_ready()
        registration = Registration.model_validate(self._kit.registration(node_id, tier, url=url))
        beat = Heartbeat(incarnation=registration.incarnation, in_flight=0, queued_images=0, images_done=0)
        return HeartbeatSender(
            [self.url(port) for port in self.ports], lambda _: registration, lambda: beat, http, lifecycle=lifecycle
        )

    async def follow(self, job_id: str, at_event: Callable[[int], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The events of a job to its end, from whichever scheduler leads; `at_event` is awaited with their number."""
        seen: list[Any] = []
        last, view = 0, {}

        async def ends() -> bool:
            nonlocal last, view
            with contextlib.suppress(httpx.HTTPError):
                running = await self.running()
                headers = {"Last-Event-ID": str(last)}
                async with running.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
                    if response.status_code == 200:
                        async for kind, number, data in self._kit.read_events(response):
                            last = max(last, number)
                            if kind != "state":
                                seen.append((kind, data))
                                await at_event(len(seen))
                            elif data["state"] in ("completed", "failed", "cancelled"):
                                view = data
                                return True
            return False

        await wait_for(ends, timeout_s=100.0, what="the end of the job")
        return seen, view


@asynccontextmanager
async def two(kit: Any, settings: Any, database: str, folder: Path) -> AsyncIterator[Pair]:
    pair = Pair(kit, settings, database, folder)
    async with pair.http, pair.stack:
        for port in pair.ports:
            await pair.start(port)
        await pair.add_nodes()
        yield pair


def check(seen: list[Any], view: dict[str, Any], results: list[Any]) -> None:
    """Every image is answered once, and every event came once."""
    assert (view["state"], view["answered_coarse"], view["answered_fine"]) == ("completed", IMAGES, IMAGES)
    assert (view["fallback"], view["failed_images"], view["fine_accuracy"]) == (0, 0, 1.0)
    assert [result["index"] for result in results] == list(range(IMAGES))
    for stage in ("coarse", "fine"):
        indices = [result["index"] for kind, data in seen if kind == stage for result in data["results"]]
        assert sorted(indices) == list(range(IMAGES))


async def submit(pair: Pair, kit: Any) -> dict[str, Any]:
    running = await pair.running()
    return dict(await running.submit(kit.images(IMAGES), labels=[k % 100 for k in range(IMAGES)]))


async def test_a_standby_leads_when_the_leader_is_killed_in_mid_job(
    kit: Any, settings: Any, database_url: str, tmp_path: Path
) -> None:
    async with two(kit, settings, database_url, tmp_path) as pair:
        leader = await pair.leader()
        await wait_for(partial(_is, pair, pair.other(leader), "standby"), what="the other one to stand by")
        standby = pair.url(pair.other(leader))
        for query, code in (("", 503), ("?standby=ok", 200)):
            assert (await pair.http.get(f"{standby}/readyz{query}")).status_code == code
        refused = await pair.http.get(f"{standby}/v1/jobs")
        assert (refused.status_code, refused.headers["retry-after"]) == (421, "1")
        assert pair.url(leader) in refused.json()["error"]
        page = await pair.http.get(f"{standby}/ui", headers={"Accept": "text/html"})
        assert (page.status_code, page.headers["content-type"]) == (421, "text/html; charset=utf-8")
        assert pair.url(leader) in page.text
        metrics = (await pair.http.get(f"{pair.url(pair.other(leader))}/metrics")).text
        assert "terrace_scheduler_leads 0.0" in metrics
        pair.ends[1].fine_gate.clear()  # so that there is work under way
        job = await submit(pair, kit)

        async def kill(events: int) -> None:
            if events == 10:
                pair.processes[leader].kill()
                await pair.processes[leader].exit_code()
                pair.ends[1].fine_gate.set()

        seen, view = await pair.follow(job["id"], kill)
        check(seen, view, await pair.results(job["id"]))
        assert await pair.leader() == pair.other(leader)
        # The dead one comes back as a standby.
        await pair.start(leader)
        await wait_for(partial(_is, pair, leader, "standby"), what="it to stand by")
        assert list((tmp_path / str(leader) / "inputs").iterdir()) == []


async def test_a_leader_that_is_stopped_past_its_lease_is_a_standby_afterwards(
    kit: Any, settings: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with two(kit, settings, postgres.database(), tmp_path) as pair:
        leader = await pair.leader()
        job = await submit(pair, kit)

        async def stop(events: int) -> None:
            if events == 5:
                os.kill(pair.processes[leader].process.pid, signal.SIGSTOP)
                raise httpx.ReadError("it says no more")

        with contextlib.suppress(httpx.HTTPError):
            await pair.follow(job["id"], stop)
        events: list[int] = []

        async def count(number: int) -> None:
            events.append(number)

        _, view = await pair.follow(job["id"], count)
        assert view["state"] == "completed"
        before = await (await pair.running()).job(job["id"])
        os.kill(pair.processes[leader].process.pid, signal.SIGCONT)
        await wait_for(lambda: _is(pair, leader, "standby"), what="the stopped one to stand by")
        await wait_for(lambda: "leads no longer" in pair.processes[leader].log, what="it to know")
        after = await (await pair.running()).job(job["id"])
        assert after == before
        results = await pair.results(job["id"])
        assert [result["index"] for result in results] == list(range(IMAGES))
        # It can lead again.
        pair.processes[pair.other(leader)].kill()
        assert await pair.leader() == leader
        assert (await (await pair.running()).job(job["id"]))["state"] == "completed"


async def _is(pair: Pair, port: int, status: str) -> bool:
    return await pair.status(port) == status


async def test_a_database_that_is_killed_and_started_again_in_mid_job_loses_nothing(
    kit: Any, settings: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with two(kit, settings, postgres.database(), tmp_path) as pair:
        job = await submit(pair, kit)

        async def disturb(events: int) -> None:
            if events in (3, 20):
                await asyncio.to_thread(postgres.cut)
            elif events == 10:
                await asyncio.to_thread(postgres.kill)
                # For longer than the lease: nobody leads, and nobody takes nodes for dead meanwhile.
                for port in pair.ports:
                    await wait_for(partial(_is, pair, port, "failing"), what="both to know")
                await asyncio.to_thread(postgres.start)

        seen, view = await pair.follow(job["id"], disturb)
        check(seen, view, await pair.results(job["id"]))


async def test_a_database_that_is_not_there_yet_or_not_at_all(
    settings: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    for url, code in (
        (f"postgresql+asyncpg://terrace@127.0.0.1:{free_port()}/x", 75),
        (f"postgresql+asyncpg://terrace@127.0.0.1:{postgres.port}/none", 2),
    ):
        command = ["-m", "terrace", "scheduler", "--port=0", f"--state={tmp_path / 'state'}", f"--database={url}"]
        async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as process:
            assert await process.exit_code() == code, process.log
        assert "cannot be opened for writing" in process.log
        assert process.log.count("\n") == 1


async def test_what_operators_said_outlasts_a_leader_and_one_that_leaves_gives_its_lease_back(
    kit: Any, settings: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with two(kit, settings, postgres.database(), tmp_path) as pair:
        leader = await pair.leader()

        async def drains() -> bool:  # once it has registered
            return bool((await pair.http.post(f"{pair.url(leader)}/v1/devices/edge-0/drain")).is_success)

        await wait_for(drains, what="the node to be drained")
        pair.processes[leader].kill()
        running = await pair.running()

        async def drained() -> bool:
            devices = json.loads((await running.http.get("/v1/devices")).text)["devices"]
            return any(device["node_id"] == "edge-0" and device["health"] == "draining" for device in devices)

        await wait_for(drained, what="the node to be drained still")
        second = pair.processes[pair.other(leader)]
        await pair.start(leader)
        second.terminate()
        assert await second.exit_code() == 0
        assert await pair.leader() == leader
        assert "cannot be given back" not in second.log


async def test_a_leader_that_is_killed_amid_batches_of_observations_loses_and_repeats_none(
    kit: Any, settings: Any, database_url: str, tmp_path: Path
) -> None:
    """A sink of theirs loses none either, whichever of them delivers."""
    pair = Pair(kit, settings, database_url, tmp_path)
    async with receiving() as receiver, pair.http, pair.stack:
        for port in pair.ports:
            await pair.start(port)
        sink = {"name": "hook", "kind": "webhook", "options": {"url": receiver.url}}
        sink["filter"] = {"events": ["observation.added"]}
        reply = await pair.http.post(f"{pair.url(await pair.leader())}/v1/sinks", json=sink)
        assert reply.status_code == 201, reply.text
        place = {**kit.registration("end-0"), "spool": "5" * 16, "lease_s": 60.0}
        seen = [{"source": "gate", "sequence": number, "age_s": 1.0} for number in range(1, 2001)]
        parts = [seen[first : first + 20] for first in range(0, len(seen), 20)]
        confirmed: list[int] = []

        async def send(part: list[dict[str, Any]]) -> None:
            """Until it is confirmed, as a device does."""
            batch = {"node_id": "end-0", "incarnation": place["incarnation"], "spool": "a" * 16, "observations": part}

            async def sent() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    url = pair.url(await pair.leader())
                    reply = await pair.http.post(f"{url}/v1/observations", json=batch, timeout=5.0)
                    if reply.status_code == 404:
                        await pair.http.post(f"{url}/v1/devices", json=place, timeout=5.0)
                    return reply.status_code == 200
                return False

            await wait_for(sent, timeout_s=60.0, what="a batch to be confirmed")
            confirmed.extend(each["sequence"] for each in part)
            if len(confirmed) in (200, 900):
                leader = await pair.leader()
                pair.processes[leader].kill()
                await pair.processes[leader].exit_code()
                await pair.start(leader)

        # Several at a time, so that some are under way when the leader ends.
        for first in range(0, len(parts), 5):
            await asyncio.gather(*[send(part) for part in parts[first : first + 5]])
        reply = await pair.http.get(f"{pair.url(await pair.leader())}/v1/observations/export")
        assert [json.loads(line)["sequence"] for line in reply.text.splitlines()] == list(range(1, 2001))
        assert sorted(confirmed) == list(range(1, 2001))

        def got() -> set[int]:
            return {event["data"]["sequence"] for event in receiver.events}

        await wait_for(lambda: len(got()) == 2000, what="all events", timeout_s=90.0)
        view = (await pair.http.get(f"{pair.url(await pair.leader())}/v1/sinks/hook")).json()
        assert (view["dead"], view["dropped"]) == (0, 0)


async def test_a_batch_whose_receipt_was_lost_with_the_leader_is_known_to_the_next_one(
    kit: Any, settings: Any, database_url: str, tmp_path: Path
) -> None:
    pair = Pair(kit, settings, database_url, tmp_path)
    async with pair.http, pair.stack:
        for port in pair.ports:
            await pair.start(port)
        place = {**kit.registration("end-0"), "spool": "5" * 16, "lease_s": 60.0}
        own = {"node_id": "end-0", "incarnation": place["incarnation"], "spool": "a" * 16}
        seen = [{"source": "gate", "sequence": number, "age_s": 1.0} for number in range(1, 101)]
        leader = await pair.leader()
        assert (await pair.http.post(f"{pair.url(leader)}/v1/devices", json=place)).status_code == 200
        body = json.dumps({**own, "observations": seen[:60]}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", leader)
        head = f"POST /v1/observations HTTP/1.1\r\nHost: 127.0.0.1:{leader}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

        async def numbers(port: int) -> list[int]:
            reply = await pair.http.get(f"{pair.url(port)}/v1/observations/export")
            return [json.loads(line)["sequence"] for line in reply.text.splitlines()]

        async def stored() -> bool:
            return len(await numbers(leader)) == 60

        # The device never reads the receipt: the leader is killed after the batch is durable.
        await wait_for(stored, what="the batch in the database")
        pair.processes[leader].kill()
        await pair.processes[leader].exit_code()
        writer.close()
        await wait_for(lambda: _is(pair, pair.other(leader), "ready"), what="the other one to lead")
        url = pair.url(pair.other(leader))
        assert (await pair.http.post(f"{url}/v1/devices", json=place)).status_code == 200
        reply = await pair.http.post(f"{url}/v1/observations", json={**own, "observations": seen})
        assert reply.json() == {"stored": 40, "known": 60}
        assert await numbers(pair.other(leader)) == list(range(1, 101))
