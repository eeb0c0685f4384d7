"""An httpx client without what services do not use of it."""

from __future__ import annotations

from typing import Any

import httpx

__all__ = ["ServiceClient"]


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
