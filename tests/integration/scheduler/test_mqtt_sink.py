"""A scheduler process with an MQTT sink: the broker is down for a while, and the scheduler is killed meanwhile."""

from __future__ import annotations

import io
import json
import secrets
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest
from scheduler.sinks.discovery import Topics
from tests.mosquitto import Subscriber, broker, subscriber
from tierkit.testing import ServiceProcess, service_process, wait_for

SOURCES = ("door", "gate")
TOPICS = Topics("terrace")


class Node:
    """An end node with two sources, played with a plain client."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=30)
        self._incarnation, self._spool = secrets.token_hex(8), secrets.token_hex(8)
        self._sent = 0

    async def register(self) -> None:
        network = next(each for each in load_manifest().models if each.tier == "end")
        self._answer = {"model": network.name, "sha256": network.sha256, "confidence": 0.75}
        place = {
            "node_id": "pi",
            "incarnation": self._incarnation,
            "tier": "end",
            "url": "http://127.0.0.1:9",
            "models": [{"name": network.name, "sha256": network.sha256, "ms_per_image": 1.0}],
            "version": "0",
            "spool": self._spool,
            "lease_s": 600.0,
        }
        (await self.http.post("/v1/devices", json=place)).raise_for_status()

    async def say(self, *sources: str) -> None:
        """Name the sources, all of them running."""
        device = {"sources": [{"name": source, "state": "running"} for source in sources]}
        batch = {"node_id": "pi", "incarnation": self._incarnation, "spool": self._spool, "device": device}
        (await self.http.post("/v1/observations", json={**batch, "observations": []})).raise_for_status()

    async def show(self, source: str, sequence: int, content: bytes) -> None:
        """Send a picture."""
        path = f"/v1/observations/pi/{source}/{sequence}/picture"
        (await self.http.put(path, content=content, headers={"content-type": "image/jpeg"})).raise_for_status()

    async def see(self, number: int) -> None:
        """Send pictures of both sources, one after the other."""
        for _ in range(number):
            self._sent += 1
            seen = [
                {
                    "source": source,
                    "sequence": self._sent,
                    "age_s": 0.1,
                    "local": {**self._answer, "label": self._sent % 20},
                }
                for source in SOURCES
            ]
            device = {"sources": [{"name": source, "state": "running"} for source in SOURCES]}
            batch = {"node_id": "pi", "incarnation": self._incarnation, "spool": self._spool}
            answer = await self.http.post("/v1/observations", json={**batch, "observations": seen, "device": device})
            answer.raise_for_status()


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 24), "navy").save(file, "JPEG")
    return file.getvalue()


def scheduler(folder: Path, start: int, port: str = "0") -> AbstractAsyncContextManager[ServiceProcess]:
    options = [f"--state={folder / 'state'}", f"--port={port}", "--sink-allow-private"]
    return service_process(["-m", "terrace", "scheduler", *options], ready_file=folder / f"ready-{start}")


def numbers(seen: Subscriber, source: str) -> list[int]:
    """Sequence numbers of a source in the order in which its events came; of a repeated event the first."""
    topic, found = TOPICS.event(f"source/pi/{source}"), dict[str, int]()
    for each, payload, properties, _ in seen.messages:
        if each == topic and properties["type"] == "observation.added":
            found.setdefault(properties["id"], json.loads(payload)["data"]["sequence"])
    return list(found.values())


def shown(seen: Subscriber, source: str) -> dict[str, Any]:
    """The retained state of a source."""
    return dict(json.loads(seen.retained.get(TOPICS.state("pi", source), b"{}")))


def has_all(seen: Subscriber, upto: int) -> bool:
    return all(len(set(numbers(seen, source))) == upto for source in SOURCES)


def is_newest(seen: Subscriber, upto: int) -> bool:
    return all(shown(seen, source).get("sequence") == upto for source in SOURCES)


async def test_home_assistant_gets_sources_with_pictures_and_loses_those_that_go(tmp_path: Path) -> None:
    with broker(tmp_path / "broker") as running:
        await running.start()
        async with scheduler(tmp_path, 1) as process, subscriber(running.port) as seen:
            node = Node(process.url)
            await node.register()
            options = {"host": "127.0.0.1", "port": str(running.port), "pictures": "true"}  # as the command sends them
            wanted = {"name": "hall", "kind": "mqtt", "options": options, "filter": {"labels": ["fish"]}}
            assert (await node.http.post("/v1/sinks", json=wanted)).status_code == 201
            assert (await node.http.post("/v1/sinks/hall/test")).status_code == 200
            await node.say(*SOURCES, "yard")
            gate, yard = (TOPICS.state("pi", source) for source in ("gate", "yard"))
            await wait_for(lambda: {gate, yard, TOPICS.discovery("homeassistant", yard)} <= seen.retained.keys())
            await node.see(1)
            await node.show("gate", 1, jpeg())
            await wait_for(lambda: seen.retained.get(TOPICS.picture(gate)) == jpeg())
            await wait_for(lambda: shown(seen, "gate").get("sequence") == 1)
            assert shown(seen, "gate")["label"] == bundled_hierarchy().coarse[1] == "fish"
            await node.see(1)
            await wait_for(lambda: shown(seen, "gate").get("sequence") == 2)
            assert shown(seen, "gate")["label"] is None
            await node.say(*SOURCES)
            await wait_for(lambda: {yard, TOPICS.discovery("homeassistant", yard)}.isdisjoint(seen.retained))
            assert {"sink.test"} <= {properties.get("type") for *_, properties, _ in seen.messages}
            process.terminate()
            assert await process.exit_code() == 0
            await wait_for(lambda: seen.retained[TOPICS.status] == b"offline")
            await node.http.aclose()


async def test_nothing_is_lost_or_out_of_order_while_the_broker_is_down_and_the_scheduler_is_killed(
    tmp_path: Path,
) -> None:
    with broker(tmp_path / "broker") as running:
        await running.start()
        async with subscriber(running.port, "terrace/#") as seen:
            async with scheduler(tmp_path, 1) as first:
                node = Node(first.url)
                await node.register()
                options = {"host": "127.0.0.1", "port": running.port}
                answer = await node.http.post("/v1/sinks", json={"name": "hall", "kind": "mqtt", "options": options})
                assert answer.status_code == 201, answer.text
                await node.see(20)
                await wait_for(lambda: has_all(seen, 20) and is_newest(seen, 20), what="the first events")
                assert seen.retained[TOPICS.status] == b"online"
                running.stop()
                await node.see(20)
                first.kill()
                await first.exit_code()
            async with scheduler(tmp_path, 2, first.url.rpartition(":")[2]) as second:
                await node.register()
                await node.see(20)
                await running.start()
                await wait_for(lambda: has_all(seen, 60) and is_newest(seen, 60), timeout_s=100, what="all events")
                await wait_for(lambda: shown(seen, "gate")["state"] == "online")
                second.kill()
                await second.exit_code()
            await wait_for(lambda: seen.retained[TOPICS.status] == b"offline")
    for source in SOURCES:
        assert numbers(seen, source) == list(range(1, 61))
        assert shown(seen, source)["sequence"] == 60
    states = [
        json.loads(payload)["sequence"] for topic, payload, *_ in seen.messages if topic == TOPICS.state("pi", "gate")
    ]
    assert states == sorted(states)
    await node.http.aclose()
