"""An httpx client without what services do not use of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

__all__ = ["Pieces", "ServiceClient"]


class Pieces(httpx.AsyncByteStream):
    """A body that lies in memory in several places. Its length goes in a header of the request."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece  # type: ignore[misc]  # httpx says bytes; all that is done with them works on views


class ServiceClient(httpx.AsyncClient):
    """Sends each request once, as it is: no cookies, no redirects, no authentication but the headers given, no hooks,
    no line in the log.

    Looking for cookies alone costs httpx a fifth of its time for a request, and what it ties to an answer to measure
    how long it took keeps all objects of the exchange in a circle, for the garbage collector to find.

    Args:
        transport: closed with the client.
        timeout: of the phases, where a request names none.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, *, timeout: httpx.Timeout) -> None:
        super().__init__(transport=transport, timeout=timeout, follow_redirects=False, trust_env=False)
        self._way = transport
        self._phases = timeout.as_dict()

    def build_request(self, method: str, url: httpx.URL | str, **parts: Any) -> httpx.Request:
        """See `httpx.AsyncClient.build_request`, but for the headers: those given, and those of the body, are all.

        To add the usual ones, which no service looks at, takes httpx as long as to write and to read a request.
        """
        content, headers = parts.pop("content", None), parts.pop("headers", None)
        if any(part is not None and part is not httpx.USE_CLIENT_DEFAULT for part in parts.values()):
            return super().build_request(method, url, content=content, headers=headers, **parts)
        return httpx.Request(method, url, content=content, headers=headers, extensions={"timeout": self._phases})

    async def send(
        self, request: httpx.Request, *, stream: bool = False, auth: Any = None, follow_redirects: Any = False
    ) -> httpx.Response:
        """See `httpx.AsyncClient.send`; `auth` and `follow_redirects` are for its callers, and mean nothing here."""
        if self.is_closed:
            raise RuntimeError("the client has been closed")
        response = await self._way.handle_async_request(request)
        response.request = request
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response
