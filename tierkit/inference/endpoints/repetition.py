"""Inference requests that differ from an earlier one in the numbers of their tensor alone.

A client sends one request after the other, all with the same headers and the same JSON. What the earlier one was found
to be need not be found again: the new numbers go to the model, and its answer is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tierkit.errors import TerraceError
from tierkit.http.answering import answer_to
from tierkit.http.exchange import Reply, header_lines
from tierkit.inference.metrics import ModelMetrics
from tierkit.inference.runner import ModelRunner, RunResult
from tierkit.logs import current_request_id, current_trace, request_context
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    Tensor,
    Timing,
    encode_response,
    tensor_from_bytes,
)
from tierkit.wire.oip.datatypes import datatype_of
from tierkit.wire.trace import Trace

__all__ = ["RAW_NAMES", "Repetition", "server_timing"]

RAW_NAMES = {name: name.lower().encode() for name in ("Content-Type", "Content-Length", BINARY_HEADER)}
"""Names of the headers of an answer, as they are sent."""


class Repetition:
    """Answers such requests, at once if they can be computed on the event loop; an `Again` (`tierkit.http`).

    Args:
        runner: has answered the earlier one.
        metrics: of its model.
        request: the earlier one: a single input, sent as binary, for which all outputs were sent as binary.
        outputs: names of these outputs.
        body_bytes: of its body.
        urgent: whether it overtook those that waited.
    """

    def __init__(
        self,
        runner: ModelRunner,
        metrics: ModelMetrics,
        request: InferRequest,
        outputs: tuple[str, ...],
        body_bytes: int,
        *,
        urgent: bool,
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
        self._urgent = urgent

    def __call__(self, rest: memoryview, reply: Reply, *, alone: bool) -> Callable[[], None] | None:
        """Have it answered; see `Again`.

        Args:
            rest: the bytes of the input.
        """
        started = time.perf_counter()
        try:
            inputs = {self._name: tensor_from_bytes(rest, self._shape, self._datatype, self._name)}
        except TerraceError:
            return None
        settle = partial(self._settle, started, (current_request_id(), current_trace()), reply)
        try:
            return self._runner.submit(inputs, self._outputs, self._shape[0], settle, alone=alone, urgent=self._urgent)
        except TerraceError as exc:
            settle(exc)
            return _too_late

    def _settle(
        self, started: float, about: tuple[str, Trace | None], reply: Reply, outcome: RunResult | Exception
    ) -> None:
        """Answer with the outcome. Never raises: this is called for the requests of a batch one after the other.

        Nor is a failure raised here once more: it would refer to this call and this call to it, and the request's body
        would stay until the garbage collector comes.
        """
        failure = outcome if isinstance(outcome, Exception) else None
        if not isinstance(outcome, Exception):
            try:
                lines, body = self._encode(outcome)
            except Exception as exc:
                failure = exc
            else:
                reply(200, lines, body)
        self._metrics.observe_request(time.perf_counter() - started, self._body_bytes, failure)
        if failure is not None:
            with request_context(*about):
                answer = answer_to(failure)
            reply(answer.status_code, header_lines(answer.raw_headers), bytes(answer.body))

    def _encode(self, result: RunResult) -> tuple[bytes, bytes]:
        """Header lines and body of the answer."""
        model = self._runner.model
        tensors = tuple(Tensor(name, result.outputs[name]) for name in self._outputs)
        chunks, headers = encode_response(InferResponse(model.name, model.sha256, tensors, self._id))
        lines = [b"%b: %b\r\n" % (RAW_NAMES[name], value.encode()) for name, value in headers.items()]
        lines.append(b"server-timing: %b\r\n" % server_timing(result))
        return b"".join(lines), b"".join(chunks)


def _too_late() -> None:
    """What takes a request back that has been answered."""


def server_timing(result: RunResult | Timing) -> bytes:
    """The value of the header `Server-Timing`: milliseconds, and the images of the batch."""
    return b'queue;dur=%.3f, infer;dur=%.3f;desc="%d"' % (
        result.queue_s * 1e3,
        result.compute_s * 1e3,
        result.batch_images,
    )
