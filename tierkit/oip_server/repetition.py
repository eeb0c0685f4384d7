"""Inference requests that differ from an earlier one in the numbers of their tensor alone.

A client sends one request after the other, all with the same headers and the same JSON. What the earlier one was found
to be need not be found again: the new numbers go to the model, and its answer is written.
"""

from __future__ import annotations

import time

from tierkit.errors import TerraceError
from tierkit.metrics import ModelMetrics
from tierkit.oip import BINARY_HEADER, InferRequest, InferResponse, Tensor, encode_response, tensor_from_bytes
from tierkit.oip.datatypes import datatype_of
from tierkit.runner import ModelRunner, RunResult

__all__ = ["RAW_NAMES", "Repetition", "server_timing"]

RAW_NAMES = {name: name.lower().encode() for name in ("Content-Type", "Content-Length", BINARY_HEADER)}
"""Names of the headers of an answer, as they are sent."""


class Repetition:
    """Answers such requests at once, if they can be computed on the event loop; an `AtOnce` (`tierkit.service`).

    Args:
        runner: has answered the earlier one.
        metrics: of its model.
        request: the earlier one: a single input, sent as binary, for which all outputs were sent as binary.
        outputs: names of these outputs.
        body_bytes: of its body.
    """

    def __init__(
        self,
        runner: ModelRunner,
        metrics: ModelMetrics,
        request: InferRequest,
        outputs: tuple[str, ...],
        body_bytes: int,
    ) -> None:
        tensor = request.inputs[0]
        self._runner = runner
        self._metrics = metrics
        self._name = tensor.name
        self._shape = tensor.data.shape
        self._datatype = datatype_of(tensor.data)
        self._outputs = outputs
        self._id = request.id
        self._body_bytes = body_bytes

    def __call__(self, content: memoryview) -> tuple[bytes, bytes] | None:
        """The header lines and the body of the answer; None where the usual way has to be taken.

        Args:
            content: the bytes of the input.
        """
        started = time.perf_counter()
        runner = self._runner
        try:
            inputs = {self._name: tensor_from_bytes(content, self._shape, self._datatype, self._name)}
        except TerraceError:
            return None
        result = runner.infer_at_once(inputs, self._outputs, self._shape[0])
        if result is None:
            return None
        model = runner.model
        tensors = tuple(Tensor(name, result.outputs[name]) for name in self._outputs)
        chunks, headers = encode_response(InferResponse(model.name, model.version, tensors, self._id))
        lines = [b"%b: %b\r\n" % (RAW_NAMES[name], value.encode()) for name, value in headers.items()]
        lines.append(b"server-timing: %b\r\n" % server_timing(result))
        self._metrics.observe_request(time.perf_counter() - started, self._body_bytes, None)
        return b"".join(lines), b"".join(chunks)


def server_timing(result: RunResult) -> bytes:
    """The value of the header `Server-Timing`: milliseconds, and the images of the batch."""
    return b'queue;dur=%.3f, infer;dur=%.3f;desc="%d"' % (
        result.queue_s * 1e3,
        result.compute_s * 1e3,
        result.batch_images,
    )
