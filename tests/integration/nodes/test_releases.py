"""Nodes follow the releases of their scheduler: they load, offer and unload networks while they answer."""

import asyncio
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from end_node.__main__ import building as building_end
from end_node.settings import EndSettings
from tests.integration.nodes.scripted import ScriptedScheduler, released
from tests.model_sets import coloured
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import serve_app, wait_for
from tierkit.wire.events import CoarseEvent, read_event
from tierkit.wire.messages import NETWORK_HEADER
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

    async def infer(self, sha256: str | None = None, name: str = "of-end") -> httpx.Response:
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED),)))
        version = "" if sha256 is None else f"/versions/{sha256}"
        return await self.http.post(f"/v2/models/{name}{version}/infer", content=b"".join(chunks), headers=headers)


def has_more_than(values: Sized, count: int) -> bool:
    return len(values) > count


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
