"""The same images for every server, and the check of what comes back."""

import base64
import json

import numpy as np
import pytest

from benchmarks.peers.contenders import Protocol
from benchmarks.peers.requests import check_answer, make_target, random_images
from experiments.bench.http import Origin, Reply
from tierkit.errors import UpstreamError
from tierkit.tensors import Array
from tierkit.wire.oip import BINARY_HEADER, InferResponse, Tensor, decode_request, encode_response

ORIGIN = Origin("127.0.0.1", 80)
IMAGES = random_images(4, (2, 2, 3))


def body_of(message: bytes) -> tuple[bytes, bytes]:
    head, _, body = message.partition(b"\r\n\r\n")
    return head, body


def answer(protocol: Protocol, logits: Array) -> Reply:
    if protocol == "raw":
        return Reply(status=200, chunks=[logits.tobytes()])
    if protocol == "base64":
        entry = {"name": "logits", "data": [base64.b64encode(logits.tobytes()).decode()]}
        return Reply(status=200, chunks=[json.dumps({"outputs": [entry]}).encode()])
    chunks, headers = encode_response(InferResponse("m", "1", (Tensor("logits", logits),)))
    return Reply(
        status=200,
        headers=[(BINARY_HEADER.lower().encode(), headers[BINARY_HEADER].encode())],
        chunks=[bytes(chunk) for chunk in chunks],
    )


def test_all_servers_get_the_same_pixels() -> None:
    pixels = IMAGES[0].tobytes()
    assert body_of(make_target(ORIGIN, "raw", "m", IMAGES).requests[0])[1] == pixels

    head, body = body_of(make_target(ORIGIN, "oip", "m", IMAGES).requests[0])
    length = next(line for line in head.split(b"\r\n") if line.startswith(BINARY_HEADER.encode())).split(b": ")[1]
    request = decode_request(body, int(length))
    assert request.inputs[0].data.tobytes() == pixels
    assert [output.name for output in request.outputs] == ["logits"]

    _, body = body_of(make_target(ORIGIN, "base64", "m", IMAGES).requests[0])
    assert base64.b64decode(json.loads(body)["inputs"][0]["data"][0]) == pixels


def test_a_target_counts_its_images() -> None:
    target = make_target(ORIGIN, "raw", "m", IMAGES)
    assert (target.images, len(target.requests)) == (4, 16)


@pytest.mark.parametrize("protocol", ["raw", "oip", "base64"])
def test_right_answers_pass_and_wrong_ones_do_not(protocol: Protocol) -> None:
    logits = np.random.default_rng(1).standard_normal((50, 20)).astype(np.float32)
    check_answer(protocol, answer(protocol, logits), logits)
    check_answer(protocol, answer(protocol, logits + np.float32(1e-4)), logits)
    with pytest.raises(UpstreamError, match="of the answers"):
        check_answer(protocol, answer(protocol, np.roll(logits, 1, axis=0)), logits)
    with pytest.raises(UpstreamError, match="instead of"):
        check_answer(protocol, answer(protocol, logits[:49]), logits)
    with pytest.raises(UpstreamError, match="cannot be read"):
        check_answer(protocol, Reply(status=200, chunks=[b"nonsense"]), logits)
