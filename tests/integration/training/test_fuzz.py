"""Mutated bodies to a host, a worker and an aggregator: each gets a sentence, nothing breaks, and memory stays bounded.

`TERRACE_FUZZ_BODIES` says how many each takes, `TERRACE_FUZZ_SEED` which.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.data import TrainingData
from tests.integration.training.conftest import StartHost
from tests.integration.training.hostile import HIDDEN, LEASE, VALUES, Answer, Played, answer, played, told
from tests.mutations import changed_body
from tierkit.errors import TerraceError
from tierkit.http.client import open_client
from tierkit.testing import serve_app
from training.data.manifest import SegmentManifest, decoded
from training.data.segments import of_segments
from training.host.aggregator import open_aggregator
from training.host.app import create_app
from training.host.settings import HostSettings
from training.learner import FlatLearner, foreign, learner_of
from training.messages import LEASE_HEADER, UPDATE_HEADER, DataReport, RunSpec
from training.payloads import compress, pack
from training.worker.connection import HostConnection
from training.worker.node import Worker

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(7200)]

BODIES = int(os.environ.get("TERRACE_FUZZ_BODIES", "300"))
SEED = int(os.environ.get("TERRACE_FUZZ_SEED", "0"))
A, B = "a" * 16, "b" * 16
NOTHING = np.zeros(0, np.float32)
SLACK_BYTES = 48 << 20
"""What the interpreter and its allocators keep for themselves."""


def bomb(size: int) -> bytes:
    """Compressed zeros; they are never in memory all at once."""
    compressing, piece = zstandard.ZstdCompressor().compressobj(size=size), bytes(1 << 20)
    return b"".join(compressing.compress(piece) for _ in range(size // len(piece))) + compressing.flush()


BOMB = bomb(1 << 30)


def bodies(caplog: pytest.LogCaptureFixture, codes: Counter[Any]) -> Iterator[int]:
    """Counts them. Nothing logs a traceback, and in the second half, when all that is kept for good is there, the peak
    of the memory grows by three times the network at most."""
    caplog.set_level(logging.WARNING)
    began, peaks = time.monotonic(), []
    for half in (range(BODIES // 2), range(BODIES // 2, BODIES)):
        yield from half
        peaks.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    text = "%d bodies in %.0f s: %s; peak %.0f MB, and %.0f MB after the first half"
    log.warning(text, BODIES, time.monotonic() - began, dict(codes), peaks[1] / 1e6, peaks[0] / 1e6)
    assert [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR] == []
    assert peaks[1] - peaks[0] <= 3 * 4 * VALUES + SLACK_BYTES


def update_body(chance: Random) -> tuple[bytes, dict[str, str]]:
    """An update, or what is nearly one."""
    values = np.full(chance.choice((VALUES, VALUES, VALUES, VALUES - 1, 0)), 1e-4, np.float32)
    if chance.random() < 0.1:
        values[: chance.randrange(3)] = chance.choice((np.nan, np.inf, 3e38))
    body = pack(values, NOTHING, chance.choice(("fp32", "bf16", "int8")), sparse=chance.random() < 0.5)
    if chance.random() < 0.5:  # its header is what matters
        body = changed_body(body[:400], chance) + body[400:]
    if chance.random() < 0.3:
        body = chance.choice((compress(body), compress(body), BOMB, b""))
        if chance.random() < 0.5:
            body = changed_body(body[:40], chance) + body[40:]
        return body, {"Content-Encoding": chance.choice(("zstd", "zstd", "gzip"))}
    return body, {}


def changed_json(content: dict[str, Any], chance: Random) -> bytes:
    return changed_body(json.dumps(content).encode(), chance) if chance.random() < 0.8 else json.dumps(content).encode()


def as_header(content: bytes) -> str:
    """What of it a header can hold."""
    return bytes(each if 32 <= each < 127 else 63 for each in content[:6_000]).decode().strip()


async def bodies_for(http: httpx.AsyncClient, data_sha256: str, caplog: pytest.LogCaptureFixture) -> Counter[Any]:
    """Send mutated bodies to a host."""
    codes, chance = Counter[Any](), Random(SEED)
    join = {"name": "w", "incarnation": A, "data_sha256": data_sha256}
    lease = dict(LEASE)
    report = DataReport(worker="w", incarnation=A, keeps="own", room=3, waits=False).model_dump(mode="json")
    for number in bodies(caplog, codes):
        if number % 8 == 0:  # what was refused before shall not hide what comes
            await http.put("/v1/workers/w/order", json={"order": "trust"})
            await http.post("/v1/workers", json=join)
            granted = await http.post("/v1/leases", params={"worker": "w", "incarnation": A})
            lease = json.loads(granted.headers.get(LEASE_HEADER, json.dumps(lease)))
        match chance.randrange(10):
            case 0:
                sent = http.post("/v1/workers", content=changed_json(join, chance))
            case 1:
                path = chance.choice((lease["number"], "9" * 5_000, "x", "-1", 2**64, "%00", "1e3"))
                progress = {"worker": "w", "incarnation": A, "shown": 1}
                sent = http.put(f"/v1/leases/{path}", content=changed_json(progress, chance))
            case 2:
                sent = http.post("/v1/data", content=changed_json(report, chance))
            case 3:
                sent = http.put("/v1/workers/w/order", content=changed_json({"order": "pause"}, chance))
            case 4:
                content = chance.choice((b"", b"x" * 20_000, b"[" * 10_000))
                sent = http.post("/v1/leases?worker=w&incarnation=x", content=content)
            case _:
                stop = lease["first"] + lease["push"]
                head = {"worker": "w", "incarnation": A, "lease": lease["number"], "first": lease["first"]}
                head |= {"stop": stop, "loss": 1.0, "times": {"step": 1.0, "other": 2.0}}
                body, headers = update_body(chance)
                told = changed_json(head, chance) if chance.random() < 0.3 else json.dumps(head).encode()
                sent = http.post("/v1/updates", content=body, headers={**headers, UPDATE_HEADER: as_header(told)})
        found = await sent
        codes[found.status_code] += 1
        assert found.status_code < 500 or found.status_code == 503, (number, found.request.url, found.text)
        assert found.status_code in (204, 206) or found.is_success or found.json()["error"], number
    return codes


async def works_honestly(http: httpx.AsyncClient, data_sha256: str) -> str:
    """What becomes of an honest update."""
    join = {"name": "honest", "incarnation": B, "data_sha256": data_sha256}
    (await http.post("/v1/workers", json=join)).raise_for_status()
    lease = json.loads(
        (await http.post("/v1/leases", params={"worker": "honest", "incarnation": B})).headers[LEASE_HEADER]
    )
    head = {"worker": "honest", "incarnation": B, "lease": lease["number"], "first": lease["first"], "loss": 1.0}
    head["stop"] = lease["first"] + lease["push"]
    body = pack(np.zeros(VALUES, np.float32), NOTHING, "fp32")
    found = await http.post("/v1/updates", content=body, headers={UPDATE_HEADER: json.dumps(head)})
    return str(found.json()["verdict"])


async def test_a_host_takes_mutated_bodies(start_host: StartHost, caplog: pytest.LogCaptureFixture) -> None:
    async with start_host(epochs=200_000, hidden=HIDDEN, share_data=True, strategy="sgd") as running:
        sha256 = running.host.spec.data_sha256
        codes = await bodies_for(running.http, sha256, caplog)
        assert await works_honestly(running.http, sha256) == "taken"
    assert {200, 400} <= codes.keys()


async def test_an_aggregator_takes_mutated_bodies(
    shapes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = told(shapes, strategy="fedavg")
    run.spec["strategy"]["period"] = 100
    async with played(run) as parent:
        parent.leases = 10**9
        settings = HostSettings(parent=parent.url, folder=tmp_path / "agg", dataset=str(shapes), port=0, strategy="sgd")
        aggregator = await asyncio.to_thread(open_aggregator, settings)
        async with (
            serve_app(lambda lifecycle: create_app(aggregator, lifecycle), settings) as lifecycle,
            httpx.AsyncClient(base_url=lifecycle.url, timeout=30) as http,
        ):
            codes = await bodies_for(http, run.spec["data_sha256"], caplog)
            assert await works_honestly(http, run.spec["data_sha256"]) == "taken"
    assert {200, 400} <= codes.keys()


async def test_a_worker_takes_mutated_answers(
    start_host: StartHost, shapes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_host(share_data=True) as running:
        manifest = running.host.shared.manifest
        segment, _ = await running.host.shared.read(manifest.segments[0].sha256, None)
    run, chance, ends, longest = told(shapes), Random(SEED), Counter[Any](), 0
    usual = RunSpec.model_validate(run.spec)
    learner = FlatLearner(usual.network, TrainingData(usual.network, run.images, run.hierarchy))

    async def once(ask: Callable[[], Awaitable[Any]]) -> Any:
        return await ask()

    async def trains(connection: HostConnection) -> None:
        spec, own = await connection.spec(), learner
        if spec != usual:
            with foreign(spec.network.name):
                own = learner_of(spec, TrainingData(spec.network, run.images, run.hierarchy))
        await Worker(spec, connection, once).run(own)

    async def copies(connection: HostConnection) -> None:
        own: SegmentManifest = await connection.manifest()
        report = DataReport(worker="w", incarnation=A, keeps="own", room=3)
        key = (await connection.data(report)).key
        span = range(len(segment))
        content = await connection.chunk(connection.url, own.segments[0].sha256, span, key, budget_s=5.0)
        with foreign("net"):
            of_segments(usual.network, [decoded(content, own)], own)

    def mutated(host: Played) -> Callable[[HostConnection], Awaitable[None]]:
        route = chance.choice(("run", "run", "leases", "leases", "weights", "weights", "updates", "workers", "data"))
        if route == "data":
            answers = {
                "GET /v1/segments": answer(manifest.model_dump(mode="json")),
                "POST /v1/data": answer({"key": "k", "wanted": [0], "segment": 0}),
                f"GET /v1/segments/{manifest.segments[0].sha256}": answer(segment, 206),
            }
            which = chance.choice(list(answers))
            host.instead |= {**answers, which: changed_answer(answers[which], chance)}
            return copies
        name = {"run": "GET /v1/run", "weights": "POST /v1/leases"}.get(route, f"POST /v1/{route}")
        given = host.usual(name)
        if route == "leases":
            lease = as_header(changed_json(LEASE, chance))
            host.instead[name] = answer(given[2], chance.choice((200, 200, 202)), {LEASE_HEADER: lease})
        elif route == "weights":
            body, headers = update_body(chance)
            host.instead[name] = answer(body, 200, {**given[1], **headers})
        else:
            host.instead[name] = changed_answer(given, chance)
        return trains

    async with played(run) as host, open_client() as http:
        # The first one loads what torch needs.
        await trains(HostConnection("w", A, http, url=host.url))
        for _ in bodies(caplog, ends):
            host.seen.clear()
            host.instead.clear()
            session = mutated(host)
            try:
                await asyncio.wait_for(session(HostConnection("w", A, http, url=host.url)), 60)
                ends["done"] += 1
            except TerraceError as error:
                ends[type(error).__name__] += 1
                longest = max(longest, len(str(error)))
    assert {"done", "InvalidAnswer"} <= ends.keys()
    assert longest < 1_500


def changed_answer(given: Answer, chance: Random) -> Answer:
    """Mostly another body; now and then another status."""
    status, headers, body = given
    body = changed_body(body[:2_000], chance) + body[2_000:]
    return chance.choice((status,) * 6 + (202, 404, 409, 503)), headers, body
