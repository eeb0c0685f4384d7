"""The hot path: one inference request from its bytes to the bytes of its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from tierkit.asgi import cancelled_on_disconnect, read_body
from tierkit.metrics import ModelMetrics
from tierkit.oip import (
    Chunks,
    InferResponse,
    Limits,
    RequestedOutput,
    Tensor,
    encode_response,
)
from tierkit.oip_server.classification import best_classes
from tierkit.oip_server.lookup import Models
from tierkit.oip_server.request import announced_images, budget_s, read_request
from tierkit.runner import ModelRunner, RunResult

__all__ = ["InferEndpoint"]


class InferEndpoint:
    """ASGI application for POST .../infer.

    Plain ASGI, and not a function of a framework's `Request`: at several thousand requests a second on one core each
    layer costs more than decoding, queueing and encoding together.

    Args:
        models: runners by model name.
        metrics: by model name, for each of `models`.
        limits: what a request may cost to read.
    """

    def __init__(self, models: Mapping[str, ModelRunner], metrics: Mapping[str, ModelMetrics], limits: Limits) -> None:
        self._models = Models(models)
        self._metrics = metrics
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        runner = self._models.runner(scope)
        metrics = self._metrics[runner.model.name]
        body = b""
        try:
            request_headers = dict(scope["headers"])
            runner.check_room(announced_images(request_headers, runner.model.inputs[0]))
            body = await read_body(receive)
            result, chunks, headers = await self._answer(runner, body, request_headers, scope)
        except BaseException as exc:
            metrics.observe_request(time.perf_counter() - started, len(body), exc)
            raise
        headers["Server-Timing"] = (
            f'queue;dur={result.queue_s * 1e3:.3f}, infer;dur={result.compute_s * 1e3:.3f};desc="{result.batch_images}"'
        )
        raw_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        # Answers are small (400 bytes an image at most): one piece is cheaper than several.
        await send({"type": "http.response.body", "body": b"".join(chunks)})
        metrics.observe_request(time.perf_counter() - started, len(body), None)

    async def _answer(
        self, runner: ModelRunner, body: bytes, headers: Mapping[bytes, bytes], scope: Scope
    ) -> tuple[RunResult, Chunks, dict[str, str]]:
        inputs = runner.model.inputs
        request = read_request(headers, body, limits=self._limits, raw_input=inputs[0] if len(inputs) == 1 else None)
        wanted = request.outputs or tuple(RequestedOutput(spec.name) for spec in runner.model.outputs)
        with cancelled_on_disconnect(scope):
            result = await runner.infer(
                {tensor.name: tensor.data for tensor in request.inputs},
                [output.name for output in wanted],
                budget_s=budget_s(headers, request),
            )
        model = runner.model
        tensors = []
        for output in wanted:
            data = result.outputs[output.name]
            if output.classification:
                data = best_classes(output.name, data, output.classification, model.labels.get(output.name, ()))
            tensors.append(Tensor(output.name, data))
        binary = [o.name for o in wanted if (request.binary_output if o.binary is None else o.binary)]
        return (
            result,
            *encode_response(InferResponse(model.name, model.version, tuple(tensors), request.id), binary=binary),
        )
