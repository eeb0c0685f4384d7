"""Common parts of the small servers: the ONNX Runtime session, and the meaning of the bytes of a request.

It runs in each peer's environment, next to its server and without Terrace, so it imports only numpy and ONNX Runtime.
The environment variables PEER_MODEL (file) and PEER_PORT name the network and the port; PEER_SHAPE is one image's
height, width and colours.

A raw request is the UINT8 pixels of as many images as its length says; its answer is their FP32 logits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in Terrace's own services
import onnxruntime as ort

INPUT = "images"
OUTPUT = "logits"
HOST = "127.0.0.1"
PORT = int(os.environ["PEER_PORT"])
SHAPE = tuple(int(dim) for dim in os.environ["PEER_SHAPE"].split(","))

MAX_BATCH_REQUESTS = 64
MAX_BATCH_IMAGES = 256
"""Bounds for the servers that merge requests; Terrace's node has the same bound on images."""


def open_session() -> Any:
    """The session of the comparison: one thread, CPU, everything else as ONNX Runtime has it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return ort.InferenceSession(os.environ["PEER_MODEL"], options, providers=["CPUExecutionProvider"])


def decode(body: bytes) -> Any:
    """Pixels [n, height, width, colours] of a raw request, without a copy."""
    return np.frombuffer(body, np.uint8).reshape(-1, *SHAPE)


def infer(session: Any, images: Any) -> Any:
    """Logits [n, classes]."""
    return session.run([OUTPUT], {INPUT: images})[0]


def infer_many(session: Any, requests: Sequence[Any]) -> list[Any]:
    """Logits of several requests, computed as one batch."""
    if len(requests) == 1:
        return [infer(session, requests[0])]
    logits = infer(session, np.concatenate(requests))
    ends = np.cumsum([len(images) for images in requests])
    return np.split(logits, ends[:-1])


def free_port() -> int:
    """Return a free port for listeners that a server insists on and that no client uses."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port
