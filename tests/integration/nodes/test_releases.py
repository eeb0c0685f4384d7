"""Nodes follow the releases of their scheduler: they load, offer and unload networks while they answer."""

import asyncio
import io
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import pytest
from PIL import Image

from edge_node.__main__ import building as building_edge
from edge_node.settings import EdgeSettings
from end_node.__main__ import building as building_end
from end_node.settings import EndSettings
from tests.integration.nodes.scripted import ScriptedScheduler, released, wild
from tests.model_sets import coloured, encoded_set
from tierkit.atomic import write_atomically
from tierkit.errors import SetupError
from tierkit.http.address import free_port
from tierkit.http.lifecycle import Lifecycle
from tierkit.tensors import Array
from tierkit.testing import connected, serve_app, wait_for
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, read_event
from tierkit.wire.messages import NETWORK_HEADER, UPSTREAM_HEADER, UPSTREAMS, EncoderOffer, Encoding, Upstream
from tierkit.wire.oip import InferRequest, Tensor, encode_request

RED = np.stack([coloured("red")])


@pytest.fixture
def scheduler(tmp_path: Path) -> ScriptedScheduler:
    """With two releases, of which the first is in force."""
    return ScriptedScheduler({number: released(tmp_path / "sets", number) for number in (1, 2)}, told=(1,))


@dataclass
class Running:
    lifecycle: Lifecycle
    http: httpx.AsyncClient

    async def task(self, sha256: str | None = None) -> httpx.Response:
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED),)))
        if sha256 is not None:
            headers[NETWORK_HEADER] = sha256
        return await self.http.post("/v1/tasks/t-1", content=b"".join(chunks), headers=headers)

    async def network_of_task(self, sha256: str | None = None) -> str:
        """sha256 of the network that answered."""
        answer = await self.task(sha256)
        assert answer.status_code == 200, answer.text
        event = read_event(answer.text.splitlines()[0])
        assert isinstance(event, CoarseEvent)
        return event.sha256

    async def fine_network(self, *upstreams: Upstream) -> str | None:
        """sha256 of the network that gave the fine answer; None if the upstream node was not there."""
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED),)))
        headers[UPSTREAM_HEADER] = UPSTREAMS.dump_json(upstreams).decode()
        answer = await self.http.post("/v1/tasks/t-1", content=b"".join(chunks), headers=headers)
        event = read_event(answer.text.splitlines()[1])
        if isinstance(event, FineEvent):
            return event.sha256
        assert isinstance(event, FallbackEvent)
        assert event.reason == "upstream_unavailable", event
        return None

    async def infer(self, sha256: str | None = None, name: str = "of-end") -> httpx.Response:
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED),)))
        version = "" if sha256 is None else f"/versions/{sha256}"
        return await self.http.post(f"/v2/models/{name}{version}/infer", content=b"".join(chunks), headers=headers)


def has_more_than(values: Sized, count: int) -> bool:
    return len(values) > count


def picture(pixels: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def upstream(url: str, model: str, sha256: str, encoding: Encoding | None = None) -> Upstream:
    return Upstream(node_id="edge-1", url=url, tier=Tier.EDGE, model=model, sha256=sha256, encoding=encoding)


@asynccontextmanager
async def edge_node(url: str, place: Path, **values: object) -> AsyncIterator[Running]:
    settings = EdgeSettings.model_validate(
        {"node_id": "edge-1", "port": 0, "scheduler": url, "cache": place / "cache", "drain_s": 2.0, **values}
    )
    async with (
        serve_app(building_edge(settings), settings) as lifecycle,
        httpx.AsyncClient(base_url=lifecycle.url, timeout=20, trust_env=False) as http,
    ):
        yield Running(lifecycle, http)


@asynccontextmanager
async def end_node(url: str, place: Path, **values: object) -> AsyncIterator[Running]:
    settings = EndSettings.model_validate(
        {"node_id": "end-1", "port": 0, "scheduler": url, "cache": place / "cache", "drain_s": 2.0, **values}
    )
    async with (
        serve_app(building_end(settings), settings) as lifecycle,
        httpx.AsyncClient(base_url=lifecycle.url, timeout=20, trust_env=False) as http,
    ):
        yield Running(lifecycle, http)


async def test_a_node_loads_a_release_next_to_the_old_one_and_unloads_it_again(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    first, second = scheduler.network(1), scheduler.network(2)
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        assert scheduler.registrations[0].follows
        assert await node.network_of_task() == first
        assert (await node.task(second)).status_code == 503
        scheduler.told = (2, 1)
        await scheduler.offered(2, 1)
        assert {each.incarnation for each in scheduler.registrations} == {scheduler.registrations[0].incarnation}
        assert await node.network_of_task() == second
        for sha256 in (first, second):
            assert await node.network_of_task(sha256) == sha256
            assert (await node.infer(sha256)).headers["content-type"] == "application/octet-stream"
        assert (await node.http.get("/v2/models/of-end")).json()["versions"] == [second, first]
        index = (await node.http.post("/v2/repository/index")).json()
        assert [each["version"] for each in index] == [second, first]
        scheduler.told = (2,)
        await scheduler.offered(2)

        async def gone() -> bool:
            return (await node.infer(first)).status_code == 503

        await wait_for(gone, what="the end of the old network")
        assert (await node.task(first)).status_code == 503
        assert await node.network_of_task() == second
        assert (await node.http.get("/readyz")).status_code == 200
        figures = (await node.http.get("/metrics")).text
        assert f'sha256="{second}"' in figures
        assert f'sha256="{first}"' not in figures
        scheduler.told = (1,)
        await scheduler.offered(1)
        assert await node.network_of_task() == first
    assert scheduler.files.count(first) == 1, "the cache still had it"


async def test_a_swap_under_load_fails_no_request_and_mixes_no_versions(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    first, second = scheduler.network(1), scheduler.network(2)
    answered: list[tuple[str | None, str]] = []
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        stop = asyncio.Event()

        async def ask(wanted: str | None) -> None:
            while not stop.is_set():
                answered.append((wanted, await node.network_of_task(wanted)))

        asking = [asyncio.create_task(ask(None)) for _ in range(4)]
        for told in ((2, 1), (2,), (2, 1), (1,)) * 2:
            scheduler.told = told
            await scheduler.offered(*told)
            if len(told) > 1:  # each version answers by name while both are held
                enough = len(answered) + 20
                named = [asyncio.create_task(ask(sha256)) for sha256 in (first, second)]
                await wait_for(partial(has_more_than, answered, enough), what="answers")
                for task in named:
                    task.cancel()
                for outcome in await asyncio.gather(*named, return_exceptions=True):
                    assert isinstance(outcome, asyncio.CancelledError), outcome
        stop.set()
        await asyncio.gather(*asking)
    assert {got for wanted, got in answered if wanted is None} == {first, second}
    assert all(wanted in (None, got) for wanted, got in answered)


async def test_networks_that_two_releases_share_are_loaded_once(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    scheduler.sets[3] = scheduler.sets[1]
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (3, 1)
        await wait_for(lambda: "/v1/releases/3/manifest" in scheduler.asked and len(scheduler.registrations) > 1)
        assert [offer.sha256 for offer in scheduler.offers()] == [scheduler.network(1)]
        scheduler.told = (3,)
        registrations = len(scheduler.registrations)
        await wait_for(lambda: len(scheduler.registrations) > registrations, what="a registration")
        assert await node.network_of_task() == scheduler.network(1)
    assert scheduler.files == [scheduler.network(1)]


async def test_a_full_disk_keeps_the_old_release_until_there_is_room(
    scheduler: ScriptedScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scheduler.network(1)
    full = True

    def write(path: Path, content: bytes | IO[bytes]) -> None:
        if full and path.suffix == ".onnx":
            raise SetupError(f"cannot write {path}: No space left on device")
        write_atomically(path, content)

    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        monkeypatch.setattr("models.store.write_atomically", write)
        scheduler.told = (2, 1)
        assert "No space left" in await scheduler.troubled(2, "room")
        assert await node.network_of_task() == first
        assert (await node.http.get("/readyz")).status_code == 200
        scheduler.told = (2,)
        await wait_for(lambda: len(scheduler.beats[-1].troubles) == 1, what="the trouble")
        assert await node.network_of_task() == first, "it keeps what it has"
        full = False
        await scheduler.offered(2)
        await wait_for(lambda: not scheduler.beats[-1].troubles, what="the end of the trouble")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "cache"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_without_room_is_reported_as_room(
    scheduler: ScriptedScheduler, small_disk: Path, tmp_path: Path
) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
        other = small_disk / "other"
        with pytest.raises(OSError, match="No space"):
            other.write_bytes(b"x" * 2**20)
        scheduler.told = (2, 1)
        assert "make room" in await scheduler.troubled(2, "room")
        other.unlink()
        await scheduler.offered(2, 1)


async def test_a_damaged_file_is_unusable_and_leaves_nothing_behind(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    second = scheduler.network(2)
    scheduler.damaged.add(second)
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (2, 1)
        assert "differ from the manifest" in await scheduler.troubled(2, "unusable")
        assert await node.network_of_task() == scheduler.network(1)
        assert not (tmp_path / "cache" / second).exists()
        scheduler.damaged.clear()
        await scheduler.offered(2, 1)


async def test_a_network_that_gives_nan_is_never_offered(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    scheduler.sets[3] = wild(released(tmp_path / "sets", 3), above=-100.0)
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (3, 1)
        assert "NaN" in await scheduler.troubled(3, "unusable")
        assert [offer.sha256 for each in scheduler.registrations for offer in each.models] == [scheduler.network(1)]
        assert await node.network_of_task() == scheduler.network(1)
        scheduler.told = (1,)
        await wait_for(lambda: not scheduler.beats[-1].troubles, what="the end of the trouble")


async def test_a_scheduler_that_does_not_give_a_release_now_is_asked_again(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
        scheduler.away, scheduler.told = True, (2, 1)
        await scheduler.troubled(2, "unreachable")
        scheduler.away = False
        await scheduler.offered(2, 1)


async def test_a_release_that_is_taken_back_while_it_is_fetched_is_given_up(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    second = scheduler.network(2)

    def take_back(sha256: str) -> None:
        if sha256 == second:
            scheduler.told = (1,)

    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.before_file, scheduler.told = take_back, (2, 1)
        await wait_for(lambda: scheduler.told == (1,), what="the request for the file")
        beats = len(scheduler.beats)
        await wait_for(lambda: len(scheduler.beats) > beats + 5, what="heartbeats")
        assert (await node.task(second)).status_code == 503
        assert not scheduler.beats[-1].troubles
        assert await node.network_of_task() == scheduler.network(1)


async def test_other_classes_need_a_restart_and_only_when_nothing_else_is_named(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    folder = released(tmp_path / "sets", 3)
    content = json.loads((folder / "manifest.json").read_text())
    content["hierarchy"]["fine"][0] = "crimson"
    content["hierarchy"]["superclasses"]["red"] = ["crimson"]
    (folder / "manifest.json").write_text(json.dumps(content))
    scheduler.sets[3] = folder
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (3, 1)
        await wait_for(lambda: "/v1/releases/3/manifest" in scheduler.asked, what="a look at it")
        assert await node.network_of_task() == scheduler.network(1)
        assert not node.lifecycle.restarting
        assert not scheduler.beats[-1].troubles
        scheduler.told = (3,)
        await wait_for(lambda: node.lifecycle.restarting, what="the restart")
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(3)


async def test_a_device_that_was_away_for_long_catches_up(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    port = free_port()
    async with scheduler.served(port) as url, end_node(url, tmp_path):
        await scheduler.offered(1)
    scheduler.told = (2,)
    del scheduler.sets[1]  # pruned meanwhile
    async with end_node(url, tmp_path) as node:  # it starts before it has a connection again
        old = await node.network_of_task()
        assert old != scheduler.network(2)
        async with scheduler.served(port):
            await scheduler.offered(2)
            assert await node.network_of_task() == scheduler.network(2)


async def test_a_node_that_cannot_load_the_release_in_force_starts_with_an_earlier_one(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
        scheduler.told = (1, 2)
        await scheduler.offered(1, 2)
    scheduler.sets[3] = released(tmp_path / "sets", 3)
    scheduler.damaged.add(scheduler.network(3))
    scheduler.told = (3,)
    async with scheduler.served(int(url.rpartition(":")[2])), end_node(url, tmp_path) as node:
        await scheduler.troubled(3, "unusable")
        assert await node.network_of_task() == scheduler.network(1)
        scheduler.damaged.clear()
        await scheduler.offered(3)


async def test_a_node_does_not_start_with_a_network_that_gives_nan(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
    scheduler.sets[3] = wild(released(tmp_path / "sets", 3), above=-100.0)
    scheduler.told = (3,)
    async with scheduler.served(int(url.rpartition(":")[2])), end_node(url, tmp_path) as node:
        await scheduler.troubled(3, "unusable")
        assert await node.network_of_task() == scheduler.network(1)
    with pytest.raises(SetupError, match="NaN"):
        async with scheduler.served() as url, end_node(url, tmp_path / "fresh"):
            pass


async def test_only_so_many_copies_of_releases_stay_in_the_cache(
    scheduler: ScriptedScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.releases._MOST_KEPT", 1)
    scheduler.sets[3] = released(tmp_path / "sets", 3)
    async with scheduler.served() as url, end_node(url, tmp_path):
        for number in (1, 2, 3):
            scheduler.told = (number,)
            await scheduler.offered(number)
        cached = {number: tmp_path / "cache" / scheduler.network(number) for number in (1, 2, 3)}
        await wait_for(lambda: not cached[1].exists(), what="the end of the oldest")
        assert cached[2].is_dir()
        assert cached[3].is_dir()


async def test_a_node_starts_without_its_scheduler_from_the_release_that_it_served_last(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
        scheduler.told = (2, 1)
        await scheduler.offered(2, 1)
        mark = next((tmp_path / "cache" / "sets").glob("*.json"))
        await wait_for(lambda: scheduler.network(2) in mark.read_text(), what="the copy")
    async with end_node(url, tmp_path) as node:
        assert await node.network_of_task() == scheduler.network(2)


async def test_a_request_that_came_before_an_unload_is_answered_by_the_old_network(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    first = scheduler.network(1)
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED),)))
    body = b"".join(chunks)
    fields = {"Host": "node", "Connection": "close", "Content-Length": str(len(body)), NETWORK_HEADER: first, **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (2, 1)
        await scheduler.offered(2, 1)
        async with connected(node.lifecycle.url) as (reader, writer):
            writer.write(f"POST /v1/tasks/t-1 HTTP/1.1\r\n{lines}\r\n".encode() + body[:100])
            await writer.drain()
            await wait_for(lambda: node.lifecycle.in_flight == 1, what="the request")
            scheduler.told = (2,)
            await scheduler.offered(2)

            async def refused() -> bool:
                return (await node.infer(first)).status_code == 503

            await wait_for(refused, what="the refusal of new requests")
            writer.write(body[100:])
            answer = await reader.read()
        assert b" 200 " in answer.splitlines()[0]
        assert first.encode() in answer


async def test_an_edge_node_holds_tails_and_heads_of_two_releases(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(told=(1,))
    for number, factor in ((1, 10.0), (2, 12.0)):
        place = tmp_path / str(number)
        place.mkdir()
        scheduler.sets[number] = encoded_set(place, {"end": 32, "edge": 32}, factor=factor)
    async with scheduler.served() as url, end_node(url, tmp_path) as end, edge_node(url, tmp_path) as edge:
        for told in ((1,), (2, 1), (1, 2), (2,)):
            scheduler.told = told
            await scheduler.offered(*told, tier="edge", node_id="edge-1")
            await scheduler.offered(*told)
            encoders = [scheduler.manifest(number).encoders[0] for number in told]
            offered = {node: list(scheduler.last(node).encoders) for node in ("end-1", "edge-1")}
            wanted = [EncoderOffer(name=each.name, head=each.head.sha256, tail=each.tail.sha256) for each in encoders]
            assert offered == {"end-1": wanted, "edge-1": wanted}
            tails = [offer.sha256 for offer in scheduler.offers("edge-1") if offer.name == encoders[0].name]
            assert tails == [offer.tail for offer in wanted]
            for offer in wanted:
                encoding = Encoding(name=offer.name, head=offer.head, tail=offer.tail)
                route = upstream(edge.lifecycle.url, offer.name, offer.tail, encoding)
                assert await end.fine_network(route) == offer.tail
        for number in (1, 2):
            network = scheduler.network(number, "edge")
            answer = await edge.infer(network, name="of-edge")
            assert answer.status_code == (503 if number == 1 else 200), answer.text


async def test_an_upstream_node_that_has_unloaded_a_network_does_not_answer_with_another(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    for number in (1, 2):
        scheduler.sets[number] = released(tmp_path / "both", number, tiers=("end", "edge"))
    old = scheduler.network(1, "edge")
    async with scheduler.served() as url, end_node(url, tmp_path) as end, edge_node(url, tmp_path) as edge:
        await scheduler.offered(1, tier="edge", node_id="edge-1")
        route = upstream(edge.lifecycle.url, "of-edge", old)
        assert await end.fine_network(route) == old
        scheduler.told = (2, 1)
        await scheduler.offered(2, 1, tier="edge", node_id="edge-1")
        assert await end.fine_network(route) == old
        scheduler.told = (2,)
        await scheduler.offered(2, tier="edge", node_id="edge-1")

        async def refused() -> bool:
            return await end.fine_network(route) is None

        await wait_for(refused, what="the refusal")


async def test_a_network_that_gives_nan_for_a_real_picture_is_given_up(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    scheduler.sets[3] = wild(released(tmp_path / "sets", 3), above=4.0)
    source = {"name": "door", "kind": "push"}
    red, blue = (picture(coloured(colour)) for colour in ("red", "blue"))
    spool = {"folder": str(tmp_path / "spool")}
    async with scheduler.served() as url, end_node(url, tmp_path, source=[source], spool=spool) as node:

        async def push(content: bytes) -> dict[str, Any]:
            answer = await node.http.post("/v1/sources/door/pictures", content=content)
            assert answer.status_code == 201, answer.text
            return dict(answer.json())

        await scheduler.offered(1)
        scheduler.told = (3, 1)
        await scheduler.offered(3, 1)
        assert (await push(blue))["coarse"]["sha256"] == scheduler.network(3)
        assert (await push(red))["coarse"]["sha256"] == scheduler.network(1), "the next release answers"
        assert "not finite numbers" in await scheduler.troubled(3, "unusable")
        await scheduler.offered(1)
        assert (await push(blue))["coarse"]["sha256"] == scheduler.network(1)
        await wait_for(lambda: len(scheduler.observations) == 3, what="the observations")
        assert [each.release for each in scheduler.observations] == [3, 1, 1]
        assert all(each.local is not None and each.local.ms > 0 for each in scheduler.observations)


async def test_a_prune_removes_what_no_release_and_no_other_fleet_needs(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    networks = {number: scheduler.network(number) for number in (1, 2)}
    other = tmp_path / "cache" / "sets" / "0123456789abcdef"
    cached = [tmp_path / "cache" / sha256 for sha256 in networks.values()]
    async with scheduler.served() as url, end_node(url, tmp_path):
        await scheduler.offered(1)
        scheduler.told = (2,)
        await scheduler.offered(2)
        assert all(path.is_dir() for path in cached)
        other.mkdir()
        (other / "7.json").write_bytes(scheduler.manifest(1).as_json())
        removed = scheduler.sets.pop(1)
        scheduler.prunes = 1
        kept = tmp_path / "cache" / "sets"
        await wait_for(lambda: not any(kept.glob("*/1.json")), what="the end of the copy")
        assert all(path.is_dir() for path in cached), "another fleet has it as well"
        scheduler.sets[1] = removed
        scheduler.told = (1, 2)
        await scheduler.offered(1, 2)
        scheduler.told = (2,)
        await scheduler.offered(2)
        (other / "7.json").unlink()
        del scheduler.sets[1]
        scheduler.prunes = 2
        await wait_for(lambda: not cached[0].exists(), what="the end of the file")
        assert cached[1].is_dir()


async def test_a_scheduler_that_begins_again_may_give_a_number_to_another_release(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    port = free_port()
    async with scheduler.served(port) as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.sets[1] = scheduler.sets[2]
        scheduler.registrations.clear()  # it has forgotten the node
        await scheduler.offered(1)
        assert await node.network_of_task() == scheduler.network(1)


async def test_a_node_with_its_own_folder_follows_no_release(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    async with scheduler.served() as url, end_node(url, tmp_path, models=scheduler.sets[1]) as node:
        await scheduler.offered(1)
        assert not scheduler.registrations[0].follows
        scheduler.told = (2,)
        beats = len(scheduler.beats)
        await wait_for(lambda: len(scheduler.beats) > beats + 5, what="heartbeats")
        assert await node.network_of_task() == scheduler.network(1)
        assert not scheduler.beats[-1].troubles


async def test_a_scheduler_without_releases_is_followed_by_a_restart(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    scheduler.with_releases = False
    async with scheduler.served() as url, end_node(url, tmp_path) as node:
        await scheduler.offered(1)
        scheduler.told = (2,)
        scheduler.registrations.clear()
        await wait_for(lambda: node.lifecycle.restarting, what="the restart")
