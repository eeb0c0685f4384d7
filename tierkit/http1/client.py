"""An httpx client without what services do not use of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tierkit.http1.way import Answer, Timeouts, Way, question_of, response_of, to_post

__all__ = ["ServiceClient"]


class ServiceClient(httpx.AsyncClient):
    """Sends each request once, as it is: no cookies, no redirects, no authentication but the headers given, no hooks,
    no line in the log.

    Looking for cookies alone costs httpx a fifth of its time for a request, and what it ties to an answer to measure
    how long it took keeps all objects of the exchange in a circle, for the garbage collector to find.

    Args:
        way: closed with the client.
        timeout: of the phases, where a request names none.
    """

    def __init__(self, way: Way, *, timeout: httpx.Timeout) -> None:
        super().__init__(transport=_Closing(way), timeout=timeout, follow_redirects=False, trust_env=False)
        self._way = way
        self._phases = timeout.as_dict()
        self._timeouts = Timeouts(**self._phases)

    async def ask(self, url: str, pieces: Sequence[bytes | memoryview], headers: Mapping[str, str]) -> Answer:
        """POST a body that lies in memory in several places, with these headers and no others, past all of httpx.

        Returns:
            The answer as soon as its head is there; to be closed (`contextlib.aclosing`).

        Raises:
            httpx.TransportError: there is no answer.
            httpx.InvalidURL: no such address.
        """
        if self.is_closed:
            raise RuntimeError("the client has been closed")
        return await self._way.ask(to_post(url, pieces, headers, self._timeouts))

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
        response = response_of(await self._way.ask(question_of(request)))
        response.request = request
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response


class _Closing(httpx.AsyncBaseTransport):
    """Lets httpx close the way that it is not asked to take."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def aclose(self) -> None:
        await self._way.aclose()
