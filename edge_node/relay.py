"""The route on which an edge node encodes for others: pixels in, features on to an upper node, its answer back."""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from edge_node.node import EdgeNode
from encryption.sending import Call, TakesFeatures, destination
from tierkit.errors import InvalidInput
from tierkit.http.asgi import cancelled_on_disconnect
from tierkit.inference.endpoints.repetition import server_timing
from tierkit.inference.endpoints.request import RequestReader, budget_s, is_urgent
from tierkit.inference.upstreams import read_upstreams
from tierkit.logs import current_request_id
from tierkit.wire.events import written
from tierkit.wire.messages import ENCODED_HEADER, UPSTREAM_HEADER
from tierkit.wire.oip import Limits, encode_response

__all__ = ["RelayEndpoint"]

_UPSTREAM = UPSTREAM_HEADER.lower().encode()

_BUDGET_S = 30.0
"""For a request whose sender names no budget: an upper node that hangs is not waited for without end."""


class RelayEndpoint:
    """ASGI application of the route."""

    def __init__(self, node: EdgeNode) -> None:
        self._node = node
        self._reader = RequestReader(Limits(max_body_bytes=node.settings.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        headers = dict(scope["headers"])
        to = self._target(headers.get(_UPSTREAM), scope["path_params"]["model"])
        request = await self._reader.read(headers, await self._reader.body(headers, receive))
        if [tensor.name for tensor in request.inputs] != ["images"]:
            raise InvalidInput(f"a relay takes one tensor, 'images', not {[tensor.name for tensor in request.inputs]}")
        budget = budget_s(headers, request)
        until = arrived + (_BUDGET_S if budget is None else budget)
        with cancelled_on_disconnect(scope):
            reply = await self._node.pass_on(
                to,
                request.inputs[0].data,
                Call(
                    outputs=tuple(output.name for output in request.outputs),
                    request_id=current_request_id(),
                    urgent=is_urgent(headers),
                    budget_s=until - time.monotonic(),
                ),
            )
        response = replace(reply.response, id=request.id)
        chunks, answer = encode_response(response)
        answer[ENCODED_HEADER] = written(reply.sent).decode()
        if response.timing is not None:
            answer["Server-Timing"] = server_timing(response.timing).decode()
        raw = [(name.lower().encode(), value.encode()) for name, value in answer.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": b"".join(chunks)})

    def _target(self, header: bytes | None, model: str) -> TakesFeatures:
        text = None if header is None else header.decode("latin-1")
        upstreams = read_upstreams(text, self._node.settings.allowed_upstreams)
        to = destination(upstreams[0]) if len(upstreams) == 1 else None
        if not isinstance(to, TakesFeatures) or to.upstream.model != model:
            raise InvalidInput(
                f"{UPSTREAM_HEADER} must name one node that serves {model[:100]!r}, and the encoding to send it"
            )
        return to
