"""End devices whose answers lie, drip or hang, byte by byte on real sockets: whoever asks has a reason in time."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import numpy as np
import pytest
from starlette.responses import StreamingResponse

from scheduler.dispatch.transport import HttpTransport, TaskRequest
from tests.integration.scheduler.test_dispatching import counts
from tierkit.errors import Overloaded, UpstreamError, UpstreamUnavailable
from tierkit.http.client import open_client
from tierkit.testing import Say, talking, wait_for
from tierkit.types import Tier
from tierkit.wire.events import TaskEvent
from tierkit.wire.messages import Encoding, Relay, Stage, Upstream
from tierkit.wire.trace import new_trace

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
SHA = "0" * 64
ENCODING = Encoding(name="middle.conv1", head=SHA, tail=SHA)

COARSE: dict[str, Any] = {
    "event": "coarse",
    "task_id": "t",
    "node_id": "end-0",
    "model": "small",
    "sha256": "0" * 64,
    "labels": [1, 2],
    "confidences": [0.5, 0.5],
    "queue_ms": 0.0,
    "compute_ms": 1.0,
}
UPPER: dict[str, Any] = {
    "node_id": "edge-0",
    "tier": "edge",
    "model": "middle",
    "sha256": "1" * 64,
    "labels": [1, 2],
    "confidences": [0.5, 0.5],
    "coarse_labels": [1, 2],
    "coarse_confidences": [0.5, 0.5],
    "round_trip_ms": 1.0,
}
FINE = {"event": "fine", "task_id": "t", **UPPER}
FALLBACK = {"event": "fallback", "task_id": "t", "reason": "upstream_timeout", "detail": "late", "tried": ["edge-0"]}
DAMAGE = {"index": 0, "reason": "cut short"}
LOSS = {"tier": "edge", "indices": [0, 1], "reason": "upstream_timeout", "detail": "late", "tried": ["edge-0"]}


def routed(*answers: Any, losses: Sequence[Any] = ()) -> dict[str, Any]:
    return {"event": "routed", "task_id": "t", "answers": answers, "losses": losses}


def to(node_id: str = "edge-0", **parts: Any) -> Upstream:
    tier = Tier(node_id.split("-")[0])
    known = {"model": "middle", "sha256": "1" * 64, "encoding": None}
    return Upstream(node_id=node_id, url="http://127.0.0.1:9", tier=tier, **{**known, **parts})


def order(url: str, *upstreams: Upstream, stages: tuple[Stage, ...] = ()) -> TaskRequest:
    return TaskRequest(
        task_id="t",
        request_id="r",
        trace=new_trace(),
        node_id="end-0",
        url=url,
        model="small",
        sha256="0" * 64,
        images=np.zeros((2, 4, 4, 3), np.uint8),
        upstreams=upstreams or (to(),),
        coarse_classes=20,
        fine_classes=100,
        stages=stages,
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def lines(*messages: Any) -> bytes:
    return b"".join(
        chunk((message if isinstance(message, str) else json.dumps(message)).encode() + b"\n") for message in messages
    )


def saying(answer: bytes) -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return say


async def told(say: Say, *upstreams: Upstream, stages: tuple[Stage, ...] = (), cut: bool = False) -> list[TaskEvent]:
    """The lines of an answer; with `cut` the connection has been closed after it."""
    async with open_client() as http, talking(say) as end:
        asked = order(end.url, *upstreams, stages=stages)
        try:
            async with asyncio.timeout(5), aclosing(HttpTransport(http).send(asked, budget_s=5)) as answer:
                return [event async for event, _ in answer]
        finally:
            if cut:
                await wait_for(lambda: end.closed == end.opened, what="the end of the connection")


@pytest.mark.parametrize(
    ("upstreams", "stages", "said", "reason"),
    [
        ((), (), [COARSE, COARSE], "two coarse answers"),
        ((), (), [FINE, COARSE], "a final answer before the coarse one"),
        ((), (), [{**COARSE, "model": "large"}], "a coarse answer of the model 'large', and has registered 'small'"),
        ((), (), [COARSE, {**FINE, "model": "m"}], "a fine answer of the model 'm', where 'middle' was asked for"),
        ((), (), [{**COARSE, "sha256": "3" * 64}], "a coarse answer of 'small' with sha256 '3"),
        ((), (), [COARSE, {**FINE, "sha256": ""}], "a fine answer of 'middle' with sha256 '', where '1"),
        ((), (), [COARSE, {**FALLBACK, "tried": ["edge-1"]}], "that it had tried 'edge-1', which was not asked"),
        (
            (),
            (),
            [COARSE, {**FINE, "sent": {"form": "pixels", "upload_bytes": 1, "encoded_by": "end-0"}}],
            "images encoded by end-0, where no node was to encode them",
        ),
        (
            (to(encoding=ENCODING),),
            (),
            [COARSE, {**FINE, "sent": {"form": "conv1", "upload_bytes": 1, "encoded_by": "edge-7"}}],
            "images encoded by edge-7, where end-0 was to encode them",
        ),
        (
            (to(encoding=ENCODING, relay=Relay(node_id="edge-7", url="http://127.0.0.1:9")),),
            (),
            [COARSE, {**FINE, "sent": {"form": "conv1", "upload_bytes": 1, "encoded_by": "end-0"}}],
            "images encoded by end-0, where edge-7 was to encode them",
        ),
        ((), (), [{**COARSE, "damaged": [DAMAGE, DAMAGE]}], "positions of damaged images"),
        ((), (), [{**COARSE, "damaged": [{**DAMAGE, "index": 2}]}], "positions of damaged images"),
        ((), (), [{**COARSE, "damaged": [DAMAGE]}, {**FALLBACK, "reason": "damaged"}], "the reason 'damaged'"),
        (
            (),
            (Stage(tier=Tier.EDGE),),
            [{**COARSE, "damaged": [DAMAGE]}, routed({**UPPER, "indices": [0, 1]})],
            "images at the edge that should not be there",
        ),
        (
            (),
            (Stage(tier=Tier.EDGE, below=0.5),),
            [{**COARSE, "unsure": [0]}, routed({**UPPER, "indices": [0, 1]})],
            "images at the edge that should not be there",
        ),
        (
            (),
            (Stage(tier=Tier.EDGE),),
            [COARSE, routed(losses=[{**LOSS, "reason": "quarantined"}])],
            "the reason 'quarantined' for the edge, which cannot be",
        ),
        (
            (),
            (Stage(tier=Tier.EDGE),),
            [COARSE, routed(losses=[{**LOSS, "reason": "no_upstream"}])],
            "the reason 'no_upstream' for the edge, which cannot be",
        ),
        (
            (),
            (Stage(tier=Tier.EDGE),),
            [COARSE, routed(losses=[{**LOSS, "tried": ["edge-1"]}])],
            "that it had tried 'edge-1', which was not asked",
        ),
    ],
)
async def test_what_contradicts_the_order_is_no_answer(upstreams, stages, said, reason):
    with pytest.raises(UpstreamError, match=reason):
        await told(saying(HEAD + lines(*said) + b"0\r\n\r\n"), *upstreams, stages=stages)


async def test_a_tier_of_which_the_route_names_no_node_may_be_missing():
    stages = (Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD))
    loss = {**LOSS, "tier": "cloud", "reason": "no_upstream", "tried": []}
    said = HEAD + lines(COARSE, routed({**UPPER, "indices": [0, 1]}, losses=[loss])) + b"0\r\n\r\n"
    async with open_client() as http, talking(saying(said)) as end:
        answer = HttpTransport(http).send(order(end.url, stages=stages), budget_s=5)
        assert [event.event async for event, _ in answer] == ["coarse", "routed"]
        # The connection of a proper answer is used again.
        assert [event.event async for event, _ in HttpTransport(http).send(order(end.url, stages=stages), budget_s=5)]
        assert (end.opened, end.closed) == (1, 0)


def small(data: bytes) -> bytes:
    """In chunks of one byte each."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in data)


@pytest.mark.parametrize(
    ("said", "error", "reason"),
    [
        (HEAD + chunk(bytes(300_000)), UpstreamError, "more than 262144 bytes without a line"),
        (HEAD + small(b"x" * 262_145), UpstreamError, "more than 262144 bytes without a line"),
        (HEAD + chunk(b"\n" * 300_000), UpstreamError, "more than 262144 bytes without a line"),
        (HEAD + lines(COARSE) + small(b" \n" * 200_000), UpstreamError, "more than 262144 bytes without a line"),
        (HEAD + chunk(b"\xff\n"), UpstreamError, "not UTF-8"),
        (HEAD + b"ffffffffffffffff0\r\n", UpstreamUnavailable, "no HTTP"),
        (HEAD + b"7fffffffffffffff\r\n" + bytes(300_000), UpstreamError, "more than 262144 bytes without a line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", UpstreamUnavailable, "no HTTP"),
        (HEAD + chunk(gzip.compress(bytes(1 << 20)) + b"\n"), UpstreamError, "not UTF-8"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 1\r\n\r\nx" + HEAD, UpstreamError, "answered 302"),
        (b"HTTP/1.1 503 Busy\r\nRetry-After: inf\r\nContent-Length: 100000\r\n\r\n" + bytes(9000), Overloaded, "503"),
    ],
    ids=[
        "line",
        "bytes",
        "blank",
        "blank bytes",
        "utf",
        "chunk size",
        "chunk",
        "length",
        "packed",
        "redirect",
        "refusal",
    ],
)
async def test_an_answer_without_measure_is_an_error_and_ends_the_connection(said, error, reason):
    with pytest.raises(error, match=reason):
        await told(saying(said), cut=True)


async def test_an_answer_in_the_smallest_pieces_is_read():
    """As slow lines come, blank ones between them."""
    said = (
        HEAD
        + small(b"\n \r\n" + json.dumps(COARSE).encode() + b"\r\n\n")
        + chunk(json.dumps(FINE).encode())
        + b"0\r\n\r\n"
    )
    async with open_client() as http, talking(saying(said)) as end:
        answer = HttpTransport(http).send(order(end.url), budget_s=5)
        assert [event.event async for event, _ in answer] == ["coarse", "fine"]


async def test_asking_whether_a_device_is_there_reads_no_more_than_a_head():
    said = 0

    async def pour(writer: asyncio.StreamWriter) -> None:
        nonlocal said
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(bytes(1 << 20))
            said += 1 << 20
            await writer.drain()

    async with open_client() as http, talking(pour) as end:
        await HttpTransport(http).acknowledged("end-0", end.url, budget_s=0.5)
        await wait_for(lambda: end.closed == end.opened)
    assert said < 100 << 20


@pytest.mark.parametrize("when", ["from the start", "after the coarse answer"])
async def test_a_device_that_drips_has_as_long_as_one_that_is_silent(kit, settings, when):
    over = asyncio.Event()

    async def script(end, task_id, upstreams, said):
        async def drip() -> AsyncIterator[bytes]:
            try:
                if late:
                    yield json.dumps(said[0]).encode() + b"\n"
                while True:
                    yield b" "
                    await asyncio.sleep(0.01)
            finally:
                over.set()

        return StreamingResponse(drip(), media_type="application/x-ndjson")

    late = when != "from the start"
    settings = settings.model_copy(update={"coarse_timeout_s": 0.3, "window": 1})
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(kit.scheduler(settings))
        await stack.enter_async_context(kit.uppers(scheduler, "edge-0"))
        await stack.enter_async_context(kit.end(scheduler, "end-0", script=script))
        if not late:
            await stack.enter_async_context(kit.end(scheduler, "end-1"))
        job = await scheduler.submit(kit.images(20), batch_size=10, **({"task_deadline_s": 0.5} if late else {}))
        view = await scheduler.finished(job["id"])
        told = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
        await asyncio.wait_for(over.wait(), 5)
    reasons = {attempt["reason"] for attempt in told if attempt["node"] == "end-0"}
    assert reasons == {"no final answer within 0.5 s" if late else "end-0 gave no coarse answer within 0.3 s"}
    assert counts(view) == (("completed", 20, 0, 20, 0) if late else ("completed", 20, 20, 0, 0))
