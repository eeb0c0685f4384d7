"""The state machine of dispatch is pure: the events of a scheduler under faults give the same effects again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import random
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from experiments.chaos.faults import Direction, Kind
from experiments.chaos.relay import Relay
from scheduler.core import events
from scheduler.core.step import State, step
from tierkit.errors import TerraceError
from tierkit.testing import serve_app, wait_for
from tierkit.types import Health
from tierkit.wire.messages import Upstream

ROOT = Path(__file__).parents[3]
FAULTS = 50
"""In each of the two runs of the scheduler."""
TASK_BYTES = 4096
"""A request to an end device of fewer bytes is a probe."""
JOBS: tuple[dict[str, Any], ...] = (
    {"scheme": "end-edge"},
    {"scheme": "adaptive"},
    {"scheme": "end"},
    {"scheme": "mapping", "on_upstream_loss": "wait"},
    {"scheme": "end-edge", "recovery": "reassign", "deadline_s": 3},
    {"scheme": "end-edge", "recovery": "none"},
)


def differences(path: Path) -> list[str]:
    """Take the recorded events again; returns the events that lead to something else now."""
    found = []
    for first, entries in pickle.loads(path.read_bytes()):
        state = pickle.loads(first)
        for number, (came, gave) in enumerate(entries):
            event, before = pickle.loads(came), pickle.loads(gave)
            now: list[events.Effect] | str
            try:
                now = step(state, event)
            except TerraceError as exc:
                now = repr(exc)
            if now != before:
                found.append(f"event {number}, {event}:\n  before {before}\n  now    {now}")
    return found


class Recorder:
    """Stands in for `step`, and keeps all that goes in and comes out."""

    def __init__(self) -> None:
        self.runs: list[tuple[bytes, list[tuple[bytes, bytes]]]] = []
        """Of each scheduler: its state before the first event, and each event with its effects."""
        self.health: dict[str, Health | None] = {}
        self.seen: Counter[str] = Counter()
        """Events by name."""
        self._state: State | None = None

    def step(self, state: State, event: events.Event) -> list[events.Effect]:
        if state is not self._state:
            self._state = state
            self.runs.append((pickle.dumps(state), []))
        self.seen[type(event.what).__name__] += 1
        came = pickle.dumps(event)
        try:
            effects = step(state, event)
        except TerraceError as exc:
            self.runs[-1][1].append((came, pickle.dumps(repr(exc))))
            raise
        self.runs[-1][1].append((came, pickle.dumps(effects)))
        for effect in effects:
            if isinstance(effect, events.NodeChanged):
                self.health[effect.change.node_id] = effect.change.health
        return effects


class Node:
    """A node behind a relay, which does the faults of its network. While its gates are closed, its process stands."""

    def __init__(self, kit: Any, recorder: Recorder, name: str, url: str, gates: list[asyncio.Event]) -> None:
        self.name, self.tier = name, name.split("-")[0]
        self.scheduler: Any = None
        self._kit, self._recorder, self._gates = kit, recorder, gates
        host, _, port = url.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self._relay = self._new_relay()
        self._beats: asyncio.Task[None] | None = None
        self._incarnation = ""

    def _new_relay(self) -> Relay:
        return Relay(self._target, work_bytes=TASK_BYTES if self.tier == "end" else 0)

    async def start(self) -> None:
        """Begin as a new process."""
        await self._relay.open()
        self._incarnation = secrets.token_hex(8)
        await self._go_on()

    async def _go_on(self) -> None:
        for gate in self._gates:
            gate.set()
        await self._register()
        self._beats = asyncio.create_task(self._beat())

    async def _register(self) -> None:
        place = self._kit.registration(self.name, self.tier, url=self._relay.url) | {"incarnation": self._incarnation}
        await self.scheduler.http.post("/v1/devices", json=place)

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await self.scheduler.beat(self.name, self._incarnation)).is_error:
                    await self._register()
            await asyncio.sleep(self.scheduler.settings.heartbeat_s)

    async def silence(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)

    async def close(self) -> None:
        await self._relay.close()

    async def _until(self, *healths: Health) -> None:
        await wait_for(lambda: self._recorder.health.get(self.name) in healths, what=f"{self.name} to be {healths}")

    # --- faults; each returns True if it struck -----------------------------------------------------------------------

    async def kill(self) -> bool:
        await self.silence()
        self._relay.refuse()
        await self._until(Health.DEAD)
        await self.start()
        return True

    async def restart(self) -> bool:
        """End and begin again before anybody has noticed the end."""
        await self.silence()
        self._relay.refuse()
        await self.start()
        return True

    async def stop(self) -> bool:
        await self.silence()
        for gate in self._gates:
            gate.clear()
        await self._until(Health.SUSPECT, Health.DEAD)
        await self._go_on()
        return True

    async def move(self) -> bool:
        await self.silence()
        before, self._relay = self._relay, self._new_relay()
        await self._relay.open()
        await self._go_on()
        await before.close()
        return True

    async def drain(self) -> bool:
        await self.scheduler.http.post(f"/v1/devices/{self.name}/drain")
        await self.scheduler.http.delete(f"/v1/devices/{self.name}/drain")
        return True

    async def reset(self) -> bool:
        return await self._relay.strike(Kind.RESET, Direction.REQUEST, 0.0, budget_s=1.0)

    async def cut(self) -> bool:
        return await self._relay.strike(Kind.CUT, Direction.ANSWER, 0.0, budget_s=1.0)

    @property
    def faults(self) -> list[Callable[[], Awaitable[bool]]]:
        return [self.kill, self.restart, self.stop, self.move, self.drain, self.reset, self.cut]


class Fleet:
    """Five end devices and two edge nodes, which the devices ask."""

    def __init__(self, kit: Any, recorder: Recorder) -> None:
        self._kit, self._recorder = kit, recorder
        self._chance = random.Random(7)
        self._http = httpx.AsyncClient(trust_env=False, timeout=5)
        self._nodes: list[Node] = []
        self._left = 0
        """Faults that are still to be done."""

    async def open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._http)
        for number in range(5):
            end = self._kit.fake_end(f"end-{number}", script=self._answer)
            tasks = Route("/v1/tasks/{task_id}", end.answer, methods=["POST"])
            await self._add(stack, end.node_id, [end.gate, end.fine_gate], tasks)
        for number in range(2):
            await self._add(stack, f"edge-{number}", [])

    async def _add(self, stack: AsyncExitStack, name: str, gates: list[asyncio.Event], *routes: Route) -> None:
        gate = asyncio.Event()

        async def live(_: Request) -> Response:
            await gate.wait()
            return Response()

        app = Starlette(routes=[Route("/livez", live), *routes])
        url = (await stack.enter_async_context(serve_app(app))).url
        node = Node(self._kit, self._recorder, name, url, [*gates, gate])
        stack.push_async_callback(node.close)
        self._nodes.append(node)

    async def _answer(
        self, end: Any, task_id: str, upstreams: tuple[Upstream, ...], lines: list[dict[str, Any]]
    ) -> Response:
        """Answer a task, rightly most of the time."""
        fault = self._chance.random()
        if fault < 0.03:
            return Response(status_code=503, headers={"Retry-After": "1"})
        if fault < 0.05:
            return Response(status_code=500)
        if fault < 0.06:
            return Response(b"nonsense\n", media_type="application/x-ndjson")
        asked = len(end.tasks) - 1 - end.tasks[::-1].index(task_id)
        coarse = [] if end.stages[asked] == "fine" else lines[:1]

        async def stream() -> AsyncIterator[bytes]:
            for line in coarse:
                yield self._kit.json_response(line).body + b"\n"
            if upstreams:
                await end.fine_gate.wait()
                yield self._kit.json_response(await self._ask(task_id, upstreams, lines[1])).body + b"\n"

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    async def _ask(self, task_id: str, upstreams: tuple[Upstream, ...], fine: dict[str, Any]) -> dict[str, Any]:
        """The fine answer in the name of the first upstream node that answers anything."""
        for upstream in upstreams:
            with contextlib.suppress(httpx.HTTPError):
                await self._http.get(f"{upstream.url}/livez")
                return fine | {"node_id": upstream.node_id}
        tried = [upstream.node_id for upstream in upstreams]
        lost = {"event": "fallback", "reason": "upstream_unavailable", "detail": "no answer", "tried": tried}
        return lost | {"task_id": task_id}

    async def suffer(self, scheduler: Any) -> None:
        """Do faults to all nodes while jobs are under way; some jobs are still unfinished then."""
        self._left = FAULTS
        for node in self._nodes:
            node.scheduler = scheduler
            await node.start()
        working = [asyncio.create_task(self._work(scheduler, number)) for number in range(3)]
        await asyncio.gather(*map(self._strike, self._nodes))
        for work in working:
            work.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    async def silence(self) -> None:
        for node in self._nodes:
            await node.silence()

    async def _strike(self, node: Node) -> None:
        while self._left > 0:
            struck = await self._chance.choice(node.faults)()
            self._left -= struck

    async def _work(self, scheduler: Any, number: int) -> None:
        """Submit one job after the other; every fifth is cancelled."""
        while True:
            job = await scheduler.submit(self._kit.images(400), batch_size=20, **JOBS[number % len(JOBS)])
            if number % 5 == 4:
                await scheduler.http.delete(f"/v1/jobs/{job['id']}")
            await scheduler.finished(job["id"])
            number += 1


async def replayed(file: Path) -> str:
    """Take the events again in a new process, whose sets have another order; returns what is different there."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = (sys.executable, "-m", "tests.integration.scheduler.test_replay", str(file))
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    return said.decode() if process.returncode else ""


async def test_the_events_of_a_scheduler_under_faults_give_the_same_effects_again(kit, settings, tmp_path, monkeypatch):
    recorder, file = Recorder(), tmp_path / "events"
    monkeypatch.setattr("scheduler.dispatch.loop.step", recorder.step)
    settings = settings.model_copy(update={"hedge": True, "acknowledge_s": 0.1})
    async with AsyncExitStack() as stack:
        fleet = Fleet(kit, recorder)
        await fleet.open(stack)
        async with kit.scheduler(settings) as scheduler:
            await fleet.suffer(scheduler)
            await fleet.silence()
        async with kit.scheduler(settings) as scheduler:  # it takes up what the first one has left
            await fleet.suffer(scheduler)
            jobs = (await scheduler.http.get("/v1/jobs", params={"limit": 100})).json()["jobs"]
            ended = [await scheduler.finished(job["id"]) for job in jobs]
            await fleet.silence()
    completed = [job for job in ended if job["state"] == "completed"]
    assert completed
    assert all(job["answered_coarse"] + job["failed_images"] == job["images"] for job in completed)
    expected = {
        "Restored",
        "Registered",
        "Beat",
        "Probed",
        "Swept",
        "Intended",
        "JobAdded",
        "AttemptBegun",
        "LineCame",
        "Ended",
    }
    assert expected <= set(recorder.seen)
    file.write_bytes(pickle.dumps(recorder.runs))
    assert await replayed(file) == ""


if __name__ == "__main__":
    logging.disable()
    sys.exit("\n".join(differences(Path(sys.argv[1]))[:5]) or None)
