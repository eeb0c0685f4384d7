"""One inference request from its bytes to the bytes of its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from tierkit.errors import InvalidInput, TooLarge
from tierkit.http.asgi import BodyRoom, cancelled_on_disconnect, fields_of, is_alone
from tierkit.inference.endpoints.classification import best_classes
from tierkit.inference.endpoints.lookup import Models
from tierkit.inference.endpoints.request import (
    LARGE_JSON_BYTES,
    RequestReader,
    announced_images,
    budget_s,
    is_small,
    is_urgent,
)
from tierkit.inference.files import Decoded, FileDecoder, are_files
from tierkit.inference.model import Model
from tierkit.inference.runner import ModelRunner, RunResult
from tierkit.inference.sharing import OTHERS
from tierkit.inference.versions import Version, Versions
from tierkit.logs import current_trace
from tierkit.spans import Span
from tierkit.tensors import Array
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    Limits,
    RequestedOutput,
    Tensor,
    Timing,
    encode_response,
    tensor_bytes,
)
from tierkit.wire.oip.compression import accepted_coding, compress

__all__ = ["InferEndpoint", "server_timing"]

_BINARY = BINARY_HEADER.lower().encode()

_RAW_NAMES = {name: name.lower().encode() for name in ("Content-Type", "Content-Length", BINARY_HEADER)}
"""Names of the headers of an answer, as they are sent."""

_MAX_TEXTS = 2**15
"""Numbers as JSON, or classes by name, in one answer: writing them holds up the event loop as reading them does."""


class InferEndpoint:
    """ASGI application for POST .../infer.

    Plain ASGI, and not a function of a framework's `Request`, which would take longer than decoding and encoding.

    Args:
        versions: the models of the node.
        limits: what a request may cost to read.
        files: decodes pictures that come as files.
        span: what its spans are called.
        shares: of a node with several schedulers: the share of a request by its header `Authorization`.
    """

    def __init__(
        self,
        versions: Versions,
        limits: Limits,
        files: FileDecoder,
        *,
        span: str = "infer",
        shares: Mapping[bytes, str] | None = None,
    ) -> None:
        self._shares = shares
        self._models = Models(versions)
        self._files = files
        self._span = span
        self._reader = RequestReader(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        version = self._models.version(scope)
        runner, metrics = version.runner, version.metrics
        headers = fields_of(scope)
        body = b""
        with version.uses, BodyRoom() as room, Span(self._span, current_trace()) as span:
            try:
                if runner.queued_images or not is_small(headers):  # else there is room
                    announced = announced_images(headers, runner.model.inputs[0])
                    runner.check_room(announced, share=self._share(headers))
                body = await self._reader.body(headers, receive, room)
                with cancelled_on_disconnect(scope):
                    answer, fields = await self._answer(version, body, headers, scope, room, span)
            except BaseException as exc:
                metrics.observe_request(time.perf_counter() - started, len(body), exc)
                raise
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            await send({"type": "http.response.body", "body": answer})
        metrics.observe_request(time.perf_counter() - started, len(body), None)

    async def _answer(
        self,
        version: Version,
        body: bytes,
        headers: Mapping[bytes, bytes],
        scope: Scope,
        room: BodyRoom,
        span: Span,
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Body and headers of the answer."""
        arrived = time.perf_counter()
        runner = version.runner
        model, share = runner.model, self._share(headers)
        request = await self._reader.read(
            headers,
            body,
            room,
            raw_input=model.inputs[0] if len(model.inputs) == 1 else None,
            check_room=partial(runner.check_room, share=share),
        )
        budget = budget_s(headers, request)
        arrays = {tensor.name: tensor.data for tensor in request.inputs}
        decoded = await self._decode_files(runner, arrays, share)
        plan: _Plan | None = None if decoded else request.notes.get(model)
        if plan is None:
            plan = _Plan(request, runner, arrays)
            if decoded is None:
                request.notes[model] = plan
        if version.guard is not None:
            await version.guard(request)
        left_s = None if budget is None else budget - (time.perf_counter() - arrived)
        # Reading much JSON has held the event loop up already.
        alone = (_BINARY in headers or len(body) <= LARGE_JSON_BYTES) and is_alone(scope)
        result = await runner.answer(
            arrays, plan.names, plan.images, budget_s=left_s, alone=alone, urgent=is_urgent(headers), share=share
        )
        span.says(model=model.name, images=plan.images)
        span.took(queue=result.queue_s, compute=result.compute_s)
        if decoded is not None:
            result = decoded.charged(result)
        coding = accepted_coding(headers.get(b"accept-encoding", b"").decode("latin-1"))
        answer, fields = plan.written(result)
        raw = [(b"server-timing", server_timing(result))]
        if coding is not None:
            answer = await compress(answer, coding)
            fields = [field for field in fields if field[0] != b"content-length"]
            raw += [(b"content-encoding", coding.encode()), (b"content-length", b"%d" % len(answer))]
        return answer, [*raw, *fields]

    def _share(self, headers: Mapping[bytes, bytes]) -> str:
        """The share that a request belongs to."""
        return self._shares.get(headers.get(b"authorization", b""), OTHERS) if self._shares else OTHERS

    async def _decode_files(self, runner: ModelRunner, arrays: dict[str, Array], share: str) -> Decoded | None:
        """Put rows in the place of files, where these have come."""
        spec = runner.model.inputs[0]
        array = arrays.get(spec.name)
        if array is None or not are_files(spec, array):
            return None
        runner.check_room(len(array), share=share)
        decoded = await self._files.decode(spec, array)
        if decoded.damaged:
            position, reason = next(iter(decoded.damaged.items()))
            raise InvalidInput(f"input '{spec.name}', picture {position}: {reason}")
        arrays[spec.name] = decoded.rows
        return decoded


class _Plan:
    """Plan for answering requests with the same JSON part.

    Args:
        request: one of these requests.
        runner: runner of the requested model.
        arrays: its inputs, with pixels instead of files.

    Raises:
        InvalidInput: the request does not fit the model.
        TooLarge: the answer would be too much text.
    """

    def __init__(self, request: InferRequest, runner: ModelRunner, arrays: Mapping[str, Array]) -> None:
        self._model = model = runner.model
        self._id = request.id
        self._wanted = request.outputs or tuple(RequestedOutput(spec.name) for spec in model.outputs)
        self.names = tuple(output.name for output in self._wanted)
        self.images = runner.check_request(arrays, self.names)
        self._binary = [o.name for o in self._wanted if (request.binary_output if o.binary is None else o.binary)]
        texts = [output for output in self._wanted if output.classification or output.name not in self._binary]
        if texts:
            _check_texts(model, self.images, texts)
        self._all_binary = not texts
        self._shapes: list[Any] | None = None
        """Shapes and types of the outputs that were written last."""
        self._text = b""
        """The JSON part that goes with these, and below the headers."""
        self._fields: list[tuple[bytes, bytes]] = []

    def written(self, result: RunResult) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Body and headers of the answer."""
        tensors = []
        for output in self._wanted:
            data = result.outputs[output.name]
            if output.classification:
                data = best_classes(output.name, data, output.classification, self._model.labels.get(output.name, ()))
            tensors.append(Tensor(output.name, data))
        shapes = [fact for tensor in tensors for fact in (tensor.data.shape, tensor.data.dtype)]
        if shapes == self._shapes:
            return b"".join([self._text, *map(tensor_bytes, tensors)]), self._fields
        response = InferResponse(self._model.name, self._model.sha256, tuple(tensors), self._id)
        chunks, headers = encode_response(response, binary=self._all_binary or self._binary)
        fields = [(_RAW_NAMES[name], value.encode()) for name, value in headers.items()]
        if self._all_binary:
            self._shapes, self._text, self._fields = shapes, bytes(chunks[0]), fields
        return b"".join(chunks), fields


def server_timing(result: RunResult | Timing) -> bytes:
    """The value of the header `Server-Timing`: milliseconds, and the images of the batch."""
    return b'queue;dur=%.3f, infer;dur=%.3f;desc="%d"' % (
        result.queue_s * 1e3,
        result.compute_s * 1e3,
        result.batch_images,
    )


def _check_texts(model: Model, images: int, texts: Sequence[RequestedOutput]) -> None:
    """Refuse to write more text than the event loop has time for."""
    # A size that the model leaves open counts as 1.
    sizes = {spec.name: abs(math.prod(spec.shape[1:])) for spec in model.outputs}
    count = images * sum(min(output.classification or math.inf, sizes[output.name]) for output in texts)
    if count > _MAX_TEXTS:
        raise TooLarge(
            f"the answer would hold {count:,} numbers or names as text; at most {_MAX_TEXTS:,} are written: "
            "ask for binary outputs, fewer classes or fewer images"
        )
