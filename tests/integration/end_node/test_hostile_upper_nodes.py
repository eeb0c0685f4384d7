"""Upstream nodes whose answers lie, drip or hang, byte by byte: the coarse answer stands, and says why."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import numpy as np
import pytest

from tests.integration.end_node.aids import RunningEnd, images, to
from tierkit.tensors import Array
from tierkit.testing import MadeModel, Say, talking, wait_for
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, TaskEvent
from tierkit.wire.messages import Encoding, Relay, Upstream

GOOD = np.full((2, 4), 0.25, "<f4")


def response(
    data: Array | bytes = GOOD, *, model: str = "fine", sha256: str = MadeModel.sha256, **changes: Any
) -> tuple[bytes, bytes]:
    """Head and body of an answer as nodes give it, with these changes in the JSON of its tensor."""
    payload = data if isinstance(data, bytes) else data.tobytes()
    shape = [2, 4] if isinstance(data, bytes) else list(data.shape)
    tensor = {
        "name": "probabilities",
        "datatype": "FP32",
        "shape": shape,
        "parameters": {"binary_data_size": len(payload)},
    }
    text = json.dumps({"model_name": model, "model_version": sha256, "outputs": [tensor | changes]}).encode()
    head = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: %d\r\n" % len(text)
    return head, text + payload


def http(data: Array | bytes = GOOD, *, length: Any = None, extra: bytes = b"", **changes: Any) -> bytes:
    head, body = response(data, **changes)
    return head + extra + f"Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def chunked(*parts: bytes) -> bytes:
    head, _ = response()
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts)


def saying(*pieces: bytes, pause_s: float | None = None) -> Say:
    """Says these pieces, and with a pause the last one again and again."""

    async def say(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            if writer.is_closing():
                return
            writer.write(pieces[-1])
            await writer.drain()

    return say


async def answer(end: RunningEnd, say: Say, *, budget_s: float = 10.0, cut: bool = True) -> TaskEvent:
    """The last line of the answer to a task; with `cut` the upstream node's connection is closed after it."""
    async with talking(say) as node:
        coarse, event = await end.answer(images(0, 1), to(node.url), budget_s=budget_s)
        assert isinstance(coarse, CoarseEvent)
        if cut:
            await wait_for(lambda: node.closed == node.opened == 1, what="the end of the connection")
    return event


def rows(*values: float) -> Array:
    return np.array([values, [0.25] * 4], "<f4")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        (http(rows(NAN, 0.5, 0.5, 0)), "upstream_error", "invalid: they must be positive"),
        (http(rows(INF, -INF, 0.5, 0.5)), "upstream_error", "invalid: they must be positive"),
        (http(rows(3e38, 3e38, -3e38, -3e38)), "upstream_error", "invalid: they must be positive"),
        (
            http(np.array([[1e308, 1e308, 0, 0], [0, 0, 0, 1]]), datatype="FP64"),
            "upstream_error",
            "invalid: they must be positive",
        ),
        (http(rows(1.25, -0.25, 0, 0)), "upstream_error", "invalid: they must be positive"),
        (http(rows(0.2, 0.2, 0.2, 0.2)), "upstream_error", "invalid: they must be positive"),
        (http(GOOD[:1]), "upstream_error", "1 rows"),
        (http(shape=[2, 2, 2]), "upstream_error", r"\[2, 2, 2\] where \[2, 4\]"),
        (http(shape=[8]), "upstream_error", "8 rows"),
        (http(shape=[2, -4]), "upstream_error", "cannot be read"),
        (http(shape=[2**62, 4]), "upstream_error", "cannot be read"),
        (http(shape=[2, 8]), "upstream_error", "cannot be read"),
        (http(datatype="FP16"), "upstream_error", "cannot be read"),
        (http(datatype="INT32"), "upstream_error", "int32"),
        (http(datatype="BYTES"), "upstream_error", "cannot be read"),
        (http(parameters={"binary_data_size": 2**40}), "upstream_error", "cannot be read"),
        (http(parameters={"binary_data_size": -1}), "upstream_error", "cannot be read"),
        (http(name="logits"), "upstream_error", "no such output"),
        (http().replace(b'"fine"', b'"tiny"'), "upstream_error", "asked for the model 'fine' and answered with 'tiny'"),
        (http(sha256="0" * 64), "upstream_error", "of sha256 abab.* and answered with '0000"),
        (
            http().replace(b"Header-Content-Length: ", b"Header-Content-Length: 9", 1),
            "upstream_error",
            "cannot be read",
        ),
    ],
)
async def test_an_answer_that_cannot_be_true(end: RunningEnd, said: bytes, reason: str, words: str) -> None:
    event = await answer(end, saying(said), cut=False)
    assert isinstance(event, FallbackEvent)
    assert event.reason == reason
    assert re.search(words, event.detail)


@pytest.mark.parametrize("status", [b"200 OK", b"500 Sorry"])
@pytest.mark.parametrize(
    "nested", [b'{"a":' * 900 + b"1" + b"}" * 900, b"[" * 900 + b"]" * 900], ids=["objects", "lists"]
)
async def test_an_answer_that_is_nested_deeply_is_the_upper_nodes_fault(
    end: RunningEnd, status: bytes, nested: bytes
) -> None:
    event = await answer(
        end, saying(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(nested), nested)), cut=False
    )
    assert isinstance(event, FallbackEvent)
    assert event.reason == "upstream_error"
    assert [wrong.node_id for wrong in event.wrong] == ["edge-1"]


PACKED = gzip.compress(bytes(1 << 20))
JSON_HEAD = b"HTTP/1.1 500 Sorry\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        (http(length=3), "upstream_unavailable", "no HTTP"),
        (http(length=-1), "upstream_unavailable", "no HTTP"),
        (http(length=2**64), "upstream_unavailable", "no HTTP"),
        (http(length=10**15) + bytes(1 << 20), "upstream_error", "more than 655424 bytes"),
        (chunked(b"100000\r\n" + bytes(1 << 20) + b"\r\n"), "upstream_error", "more than 655424 bytes"),
        (chunked(b"2\r\nxx\r\n" * 400_000), "upstream_error", "more than 655424 bytes"),
        (chunked(b"fffffffffffffffff\r\n"), "upstream_unavailable", "no HTTP"),
        (chunked(b"-1\r\n"), "upstream_unavailable", "no HTTP"),
        (chunked(b"1;" + b"x" * 70_000), "upstream_timeout", "within its budget"),
        (http(extra=b"a: b\r\n" * 300), "upstream_unavailable", "no HTTP"),
        (http(extra=b"a: " + b"b" * 300_000 + b"\r\n"), "upstream_unavailable", "no HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, "upstream_timeout", "within its budget"),
        (
            http(extra=b"Connection: close\r\nContent-Encoding: gzip\r\n", length=len(PACKED))[: -len(response()[1])]
            + PACKED,
            "upstream_error",
            "cannot be read",
        ),
        (
            b"HTTP/1.1 307 Over there\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 10\r\n\r\nredirected",
            "upstream_error",
            "307",
        ),
        (JSON_HEAD % (1 << 30) + b"[{}," * 20_000, "upstream_error", "500: no reason given"),
    ],
)
async def test_an_answer_without_measure_ends_the_connection(
    end: RunningEnd, said: bytes, reason: str, words: str
) -> None:
    event = await answer(
        end, saying(said), budget_s=1.0 if reason == "upstream_timeout" else 10.0, cut=b" 307 " not in said
    )
    assert isinstance(event, FallbackEvent)
    assert event.reason == reason
    assert re.search(words, event.detail)


@pytest.mark.parametrize(
    "say",
    [
        saying(b"HTTP/1.1 200 OK\r\nX: ", b"x", pause_s=0.01),
        saying(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n", pause_s=0.05),
        saying(http(length=1000), b"x", pause_s=0.01),
        saying(chunked(), b"1\r\nx\r\n", pause_s=0.01),
        saying(b"HTTP/1.1 103 Early Hints\r\n\r\n", pause_s=0.01),
        saying(b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n", b"x", pause_s=0.01),
    ],
    ids=["head", "headers", "body", "chunks", "1xx", "refusal"],
)
async def test_one_that_drips_has_as_long_as_one_that_is_silent(end: RunningEnd, say: Say) -> None:
    event = await answer(end, say, budget_s=1.0)
    assert isinstance(event, FallbackEvent)
    assert (event.reason, event.detail.endswith("did not answer within its budget")) == ("upstream_timeout", True)


@pytest.mark.parametrize("more", [b"rubbish", http(np.eye(4, dtype="<f4")[:2]), b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_what_follows_an_answer_belongs_to_no_other(end: RunningEnd, more: bytes) -> None:
    """Where it is no HTTP, the answer itself is not believed either."""
    event = await answer(end, saying(http() + more))
    if more == b"rubbish":
        assert isinstance(event, FallbackEvent)
    else:
        assert isinstance(event, FineEvent)
        assert event.confidences == (0.25, 0.25)


@pytest.mark.parametrize(
    "timing",
    [
        'queue;dur=999999999999.000, infer;dur=0.000;desc="1"',
        'queue;dur=0.000, infer;dur=1.000;desc="0"',
        'queue;dur=-1.000, infer;dur=1.000;desc="1"',
        'queue;dur=nan, infer;dur=1e400;desc="9999999999"',
        "x" * 6_000,
    ],
)
async def test_times_that_cannot_be_are_not_passed_on(end: RunningEnd, timing: str) -> None:
    event = await answer(end, saying(http(extra=f"Server-Timing: {timing}\r\n".encode())), cut=False)
    assert isinstance(event, FineEvent)
    assert event.timing is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"form": "conv1", "encoded_by": "edge-1"}, ""),
        ({"form": "pixels"}, "was to encode 'conv1', and sent on 'pixels', encoded by no node"),
        ({"form": "conv1", "encoded_by": "end-1"}, "was to encode 'conv1', and sent on 'conv1', encoded by end-1"),
        ({"form": "conv1", "encoded_by": "edge-1\n"}, "edge-1 does not report the form that it sent on"),
        (
            {"form": "conv1", "encoded_by": "edge-1", "upload_bytes": 10**30},
            "edge-1 does not report the form that it sent on",
        ),
        (None, "edge-1 does not report the form that it sent on"),
    ],
)
async def test_a_relay_that_did_something_else(end: RunningEnd, said: dict[str, Any] | None, words: str) -> None:
    extra = b"" if said is None else f"Terrace-Encoded: {json.dumps({'upload_bytes': 1, **said})}\r\n".encode()
    encoding = Encoding(name="fine.conv1", head="0" * 64, tail="0" * 64)
    async with talking(saying(http(extra=extra))) as node:
        relay = Relay(node_id="edge-1", url=node.url)
        route = Upstream(
            node_id="cloud-1",
            url="http://127.0.0.1:9",
            tier=Tier.CLOUD,
            model="fine",
            sha256=MadeModel.sha256,
            encoding=encoding,
            relay=relay,
        )
        _, event = await end.answer(images(0, 1), route)
    if words:
        assert isinstance(event, FallbackEvent)
        assert (event.reason, words in event.detail) == ("upstream_error", True), event.detail
    else:
        assert isinstance(event, FineEvent)
        assert event.sent is not None
        assert event.sent.encoded_by == "edge-1"


async def test_a_reason_that_is_no_text_is_passed_on_as_one(end: RunningEnd) -> None:
    body = b'{"error": "half a character: \\ud800"}'
    event = await answer(end, saying(JSON_HEAD % len(body) + body), cut=False)
    assert isinstance(event, FallbackEvent)
    assert "500: half a character: \\ud800" in event.detail
