"""The same images for every server, in the form that each of them reads, and a check that their answers are right."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.contenders import Protocol
from experiments.bench.http import Origin, Reply, encode_http
from experiments.bench.targets import Target, judge_status
from tierkit.errors import TerraceError, UpstreamError
from tierkit.tensors import Array
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    RequestedOutput,
    Tensor,
    decode_response,
    encode_request,
    parse_header_length,
)

__all__ = ["check_answer", "infer_target", "make_target", "random_images"]

_PAYLOADS = 16
_AGREE = 0.98
"""Share of images on which a server must choose the class that the bare session chooses: the same network in another
batch may round differently, and no more."""


def random_images(batch: int, shape: Sequence[int]) -> list[Array]:
    """Batches of a row, the same as for the bare loop."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (batch, *shape), np.uint8) for _ in range(_PAYLOADS)]


def make_target(origin: Origin, protocol: Protocol, model: str, batches: Sequence[Array]) -> Target:
    """The requests for one row of the comparison."""
    encode = {"raw": _raw, "oip": _oip, "base64": _base64}[protocol]
    return Target(
        origin=origin,
        name=f"{protocol} at {origin}",
        requests=[encode(origin, model, images) for images in batches],
        images=len(batches[0]),
        judge=judge_status,
    )


def infer_target(url: str, model: str, batch: int, shape: Sequence[int]) -> Target:
    """Inference requests of random images to a node."""
    return make_target(Origin.parse(url), "oip", model, random_images(batch, shape))


def check_answer(protocol: Protocol, reply: Reply, expected: Array) -> None:
    """See that an answer holds the logits of the batch that was sent.

    Args:
        expected: logits `[n, classes]` of the bare session.

    Raises:
        UpstreamError: it holds something else.
    """
    decode: Callable[[Reply, int], Array] = {"raw": _raw_logits, "oip": _oip_logits, "base64": _base64_logits}[protocol]
    try:
        logits = decode(reply, expected.shape[1])
    except (ValueError, KeyError, IndexError, TypeError, TerraceError) as exc:
        raise UpstreamError(f"the answer cannot be read: {exc}") from exc
    if logits.shape != expected.shape:
        raise UpstreamError(f"the answer holds {list(logits.shape)} numbers instead of {list(expected.shape)}")
    agree = float(np.mean(logits.argmax(axis=1) == expected.argmax(axis=1)))
    if agree < _AGREE:
        raise UpstreamError(f"only {100 * agree:.0f} % of the answers agree with the bare session")


def _raw(origin: Origin, _model: str, images: Array) -> bytes:
    return encode_http(
        "POST", origin, "/predict", {"Content-Type": "application/octet-stream"}, np.ascontiguousarray(images).tobytes()
    )


def _raw_logits(reply: Reply, classes: int) -> Array:
    return np.frombuffer(reply.body, np.float32).reshape(-1, classes)


def _oip(origin: Origin, model: str, images: Array) -> bytes:
    request = InferRequest(inputs=(Tensor("images", images),), outputs=(RequestedOutput("logits", binary=True),))
    chunks, headers = encode_request(request)
    return encode_http("POST", origin, f"/v2/models/{model}/infer", headers, b"".join(chunks))


def _oip_logits(reply: Reply, _classes: int) -> Array:
    header_length = parse_header_length(reply.header(BINARY_HEADER.lower().encode()))
    logits = decode_response(reply.body, header_length).output("logits")
    if logits is None:
        raise ValueError("no output 'logits'")
    return logits


def _base64(origin: Origin, model: str, images: Array) -> bytes:
    entry: dict[str, Any] = {
        "name": "images",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"content_type": "base64"},
        "data": [base64.b64encode(np.ascontiguousarray(images).tobytes()).decode()],
    }
    body = json.dumps({"inputs": [entry]}).encode()
    return encode_http("POST", origin, f"/v2/models/{model}/infer", {"Content-Type": "application/json"}, body)


def _base64_logits(reply: Reply, classes: int) -> Array:
    [text] = json.loads(reply.body)["outputs"][0]["data"]
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(-1, classes)
