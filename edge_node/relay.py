"""The route on which an edge node encodes for others: pixels in, features on to an upstream node, its answer back."""

from __future__ import annotations

import time

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.sending import Call, FeatureClient, TakesFeatures, destination
from tierkit.errors import Forbidden, InvalidInput
from tierkit.http.asgi import BodyRoom, cancelled_on_disconnect, fields_of
from tierkit.inference.endpoints.infer import server_timing
from tierkit.inference.endpoints.request import RequestReader, budget_s, is_urgent
from tierkit.inference.node import InferenceNode
from tierkit.inference.oip_client import OipClient
from tierkit.inference.upstreams import forbidden_url, read_upstreams
from tierkit.logs import current_request_id, current_trace
from tierkit.spans import Span
from tierkit.wire.events import written
from tierkit.wire.messages import ENCODED_HEADER, UPSTREAM_HEADER
from tierkit.wire.oip import Limits, encode_response

__all__ = ["RelayEndpoint"]

_UPSTREAMS = UPSTREAM_HEADER.lower().encode()
_BUDGET_S = 30.0
"""Budget of a request whose sender names none, so that a hanging upstream node is not awaited without end."""


class RelayEndpoint:
    """ASGI application of the route."""

    def __init__(self, node: InferenceNode, encoders: Encoders, settings: EdgeSettings) -> None:
        self._node = node
        self._encoders = encoders
        self._settings = settings
        self._reader = RequestReader(Limits(max_body_bytes=settings.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with BodyRoom() as room, Span("relay", current_trace()) as span:
            await self._answer(scope, receive, send, room, span)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, room: BodyRoom, span: Span) -> None:
        arrived = time.monotonic()
        headers = fields_of(scope)
        upstreams = headers.get(_UPSTREAMS, b"[]").decode("latin-1")
        to = self._target(upstreams, scope["path_params"]["model"])
        request = await self._reader.read(headers, await self._reader.body(headers, receive, room), room)
        if [tensor.name for tensor in request.inputs] != ["images"]:
            raise InvalidInput(f"a relay takes one tensor, 'images', not {[tensor.name for tensor in request.inputs]}")
        budget = budget_s(headers, request)
        until = arrived + (_BUDGET_S if budget is None else budget)
        client = FeatureClient(OipClient(self._node.http), self._settings.node_id)
        with cancelled_on_disconnect(scope):
            images = request.inputs[0].data
            encoded = await self._encoders.encode(images, to.encoding, budget_s=until - time.monotonic())
            span.says(images=len(images), to=to.upstream.node_id)
            span.took(encode=encoded.encode_s)
            call = Call(
                outputs=tuple(output.name for output in request.outputs),
                request_id=current_request_id(),
                trace=span.trace,
                urgent=is_urgent(headers),
                budget_s=until - time.monotonic(),
            )
            reply = await client.infer(to, encoded.features, call, encode_s=encoded.encode_s)
        chunks, answer = encode_response(replace(reply.response, id=request.id))
        answer[ENCODED_HEADER] = written(reply.sent).decode()
        if reply.response.timing is not None:
            answer["Server-Timing"] = server_timing(reply.response.timing).decode()
        raw = [(name.lower().encode(), value.encode()) for name, value in answer.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": b"".join(chunks)})

    def _target(self, header: str, model: str) -> TakesFeatures:
        upstreams = read_upstreams(header)
        to = destination(upstreams[0]) if len(upstreams) == 1 else None
        if not isinstance(to, TakesFeatures) or to.upstream.model != model:
            raise InvalidInput(
                f"{UPSTREAM_HEADER} must name one node that serves {model[:100]!r}, and the encoding to send it"
            )
        if (url := forbidden_url(to.upstream, self._settings.allowed_upstreams)) is not None:
            raise Forbidden(f"this node may not send features to {url}; --allowed-upstreams lists where it may")
        return to
