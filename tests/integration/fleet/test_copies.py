"""A release that spreads from node to node: who sends what, sources that fail or lie, and nodes that stay apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from models.manifest import ModelEntry, load_manifest
from tests.integration.fleet.test_releases import Fleet, fleet, hold, in_force
from tests.model_sets import colour_network, colour_set
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.client import AsyncClient
from tierkit.copies.files import CHUNK_BYTES
from tierkit.copies.serving import KEY_HEADER, piece_route
from tierkit.errors import NotFound
from tierkit.http.answering import install
from tierkit.http.client import authorization
from tierkit.testing import serve_app
from tierkit.wire.copies import CopyAnswer, CopyReport
from tierkit.wire.messages import ModelOffer, Registration

CHUNKS = 8
INCARNATION = "process-of-a-test"


def make_set(folder: Path, *, factor: float, chunks: int = CHUNKS) -> Path:
    """A model set whose end network has a file of so many chunks."""
    file = colour_network(folder.parent / f"{folder.name}.onnx", factor=factor)
    model = onnx.load(file)
    filling = np.random.default_rng(0).integers(97, 123, (chunks - 1) * CHUNK_BYTES, np.uint8)
    model.doc_string = filling.tobytes().decode()
    onnx.save(model, file)
    return colour_set(folder, {"end": file})


def end_of(models: Path) -> ModelEntry:
    return load_manifest(models).default_for("end")


def partial_files(folder: Path) -> list[Path]:
    return list(folder.glob("cache-*/partial/*/*"))


def give_tokens(running: Fleet) -> str:
    """Have a fleet ask for tokens; returns the token of an operator."""
    operator, node = new_token(), new_token()
    book = [
        TokenEntry(name="alice", role="operator", sha256=digest_of(operator.encode()).hex()),
        TokenEntry(name="nodes", role="node", sha256=digest_of(node.encode()).hex(), nodes=("*",)),
    ]
    files = running.folder / "tokens.toml", running.folder / "node.token"
    for path, content in zip(files, (write_book(book), node + "\n"), strict=True):
        path.touch(mode=0o600)
        path.write_text(content)
    running.own_flags = {"scheduler": ["--tokens", str(files[0])], "node": ["--token-file", str(files[1])]}
    return operator


async def sent(url: str, token: str | None = None) -> dict[str, float]:
    """Bytes of networks that the scheduler has sent, and that nodes have got from other nodes."""
    async with httpx.AsyncClient(headers=authorization(token)) as http:
        page = (await http.get(f"{url}/metrics")).text
    found = re.findall(r'^terrace_scheduler_network_bytes_total\{sender="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {sender: float(value) for sender, value in found}


async def since(url: str, before: dict[str, float], token: str | None = None) -> dict[str, float]:
    return {sender: value - before[sender] for sender, value in (await sent(url, token)).items()}


@pytest.mark.parametrize("closed", [False, True], ids=["open", "with tokens"])
async def test_a_release_spreads_from_node_to_node(tmp_path: Path, closed: bool) -> None:
    first, second = make_set(tmp_path / "flowers", factor=10.0), make_set(tmp_path / "next", factor=11.0)
    names, size = [f"end-{number}" for number in range(4)], end_of(second).size_bytes
    token = None
    async with AsyncExitStack() as stack:
        running, client = await stack.enter_async_context(fleet(tmp_path))
        if closed:
            token = give_tokens(running)
            client = await stack.enter_async_context(AsyncClient(running.url, token=token))
        await running.lead(first)
        await running.join(*names)
        await hold(client, end_of(first).sha256, *names)
        before = await sent(running.url, token)
        assert before["scheduler"] >= 4 * end_of(first).size_bytes, "nodes that start fetch from the scheduler"
        await client.create_release("flowers", second)
        await client.promote_release("flowers@2")
        await in_force(client, "flowers@2")
        await hold(client, end_of(second).sha256, *names)
        found = await since(running.url, before, token)
        assert found["scheduler"] + found["nodes"] >= 4 * size
        assert found["nodes"] >= size, found
        assert found["scheduler"] <= 3.5 * size, found
        # Who was told no key gets nothing.
        for device in await client.devices():
            async with httpx.AsyncClient() as http:
                url = f"{device.url}/v1/copies/{end_of(second).sha256}"
                assert (await http.get(url)).status_code == 403
                assert (await http.get(url, headers={KEY_HEADER: "x" * 43})).status_code == 403
        assert await asyncio.to_thread(partial_files, tmp_path) == []


async def test_nodes_of_different_sites_fetch_from_the_scheduler(tmp_path: Path) -> None:
    first, second = make_set(tmp_path / "flowers", factor=10.0), make_set(tmp_path / "next", factor=11.0)
    size = end_of(second).size_bytes
    async with fleet(tmp_path) as (running, client):
        await running.lead(first)
        await asyncio.gather(*(running.join_with(f"end-{site}", "--site", f"shop-{site}") for site in (1, 2)))
        before = await sent(running.url)
        await client.create_release("flowers", second)
        await client.promote_release("flowers@2")
        await in_force(client, "flowers@2")
        assert await since(running.url, before) == {"scheduler": 2 * size, "nodes": 0.0}


@dataclass
class Source:
    """A node of a test's own, that passes on what it likes."""

    fleet: Fleet
    name: str
    entry: ModelEntry
    url: str = ""
    key: str = ""
    asked: list[range] = field(default_factory=list)

    async def register(self, http: httpx.AsyncClient) -> None:
        """Say that it has the file."""
        offer = ModelOffer(name="own", sha256="cd" * 32, ms_per_image=1.0)
        registration = Registration(
            node_id=self.name,
            incarnation=INCARNATION,
            tier="end",  # type: ignore[arg-type]
            url=self.url,
            models=(offer,),
            follows=True,
            version="0",
        )
        (await http.post("/v1/devices", json=registration.model_dump(mode="json"))).raise_for_status()
        self.key = (await self.report(http, got=True)).key

    async def report(self, http: httpx.AsyncClient, **news: Any) -> CopyAnswer:
        entry = self.entry
        report = CopyReport(incarnation=INCARNATION, name=entry.name, sha256=entry.sha256, **news)
        answer = await http.post(f"/v1/devices/{self.name}/copies", json=report.model_dump())
        return CopyAnswer.model_validate_json(answer.raise_for_status().content)


@asynccontextmanager
async def source(
    running: Fleet, entry: ModelEntry, answer: Callable[[range], Awaitable[bytes]]
) -> AsyncIterator[tuple[Source, Callable[[], Awaitable[None]]]]:
    """A source, and what ends its service."""
    made = Source(running, "end-0", entry)

    async def read(sha256: str, span: range | None) -> tuple[bytes, int]:
        assert sha256 == entry.sha256
        assert span is not None
        made.asked.append(span)
        return await answer(span), entry.size_bytes

    async def allow(request: Request) -> None:
        assert request.headers[KEY_HEADER] == made.key

    app = Starlette(routes=[piece_route("/v1/copies", read, allow)])
    install(app)
    serving = serve_app(app)
    made.url, ended = (await serving.__aenter__()).url, False

    async def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            await serving.__aexit__(None, None, None)

    try:
        async with httpx.AsyncClient(base_url=running.url) as http:
            await made.register(http)
        yield made, end
    finally:
        await end()


@asynccontextmanager
async def one_node(tmp_path: Path) -> AsyncIterator[tuple[Fleet, AsyncClient, ModelEntry, bytes]]:
    """A node that is about to fetch the network of a release; yields that network and its file as well."""
    first, second = make_set(tmp_path / "flowers", factor=10.0), make_set(tmp_path / "next", factor=11.0)
    entry = end_of(second)
    async with fleet(tmp_path) as (running, client):
        await running.lead(first)
        await running.join("end-1")
        await hold(client, end_of(first).sha256, "end-1")
        await client.create_release("flowers", second)
        yield running, client, entry, (second / entry.file).read_bytes()


async def zeros(span: range) -> bytes:
    return bytes(len(span))


async def nothing(span: range) -> bytes:
    raise NotFound("it was a lie")


@pytest.mark.parametrize("answer", [zeros, nothing], ids=["wrong bytes", "nothing"])
async def test_a_source_that_lies_costs_a_retry(tmp_path: Path, answer: Callable[[range], Awaitable[bytes]]) -> None:
    async with one_node(tmp_path) as (running, client, entry, _), source(running, entry, answer) as (liar, _):
        before = await sent(running.url)
        await client.promote_release("flowers@2")
        await hold(client, entry.sha256, "end-1")
        assert 1 <= len(liar.asked) <= 2
        assert await since(running.url, before) == {"scheduler": entry.size_bytes, "nodes": 0.0}


async def test_a_source_that_is_lost_in_mid_copy_is_replaced_and_what_came_is_kept(tmp_path: Path) -> None:
    stuck, network = asyncio.Event(), bytearray()

    async def first_ones(span: range) -> bytes:
        if span.start >= 4 * CHUNK_BYTES:
            stuck.set()
            await asyncio.sleep(3600)
        return bytes(network[span.start : span.stop])

    async with one_node(tmp_path) as (running, client, entry, content), source(running, entry, first_ones) as lost:
        _, end = lost
        network += content
        before = await sent(running.url)
        await client.promote_release("flowers@2")
        await asyncio.wait_for(stuck.wait(), 30)
        await end()
        await hold(client, entry.sha256, "end-1")
        found = await since(running.url, before)
        assert found["nodes"] >= 3 * CHUNK_BYTES
        assert found["scheduler"] <= entry.size_bytes - 3 * CHUNK_BYTES
        assert await asyncio.to_thread((tmp_path / "cache-end-1" / entry.sha256 / entry.file).read_bytes) == content


async def test_what_a_node_may_not_say_is_refused(tmp_path: Path) -> None:
    async with one_node(tmp_path) as (running, _, entry, _), httpx.AsyncClient(base_url=running.url) as http:
        report = CopyReport(incarnation=INCARNATION, name=entry.name, sha256=entry.sha256)
        for node_id, status in (("end-1", 409), ("end-9", 404)):
            answer = await http.post(f"/v1/devices/{node_id}/copies", json=report.model_dump())
            assert answer.status_code == status
        unknown = report.model_dump() | {"sha256": "0" * 64}
        devices = (await http.get("/v1/devices")).json()["devices"]
        unknown["incarnation"] = devices[0]["incarnation"]
        assert (await http.post("/v1/devices/end-1/copies", json=unknown)).status_code == 404
        assert (await http.post("/v1/devices/end-1/copies", json={"sha256": 1})).status_code == 422
