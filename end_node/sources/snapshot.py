"""A URL that answers with the present picture, polled at the rate of the source."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
from yarl import URL

from end_node.settings import SourceSettings
from end_node.sources.change import ChangeFilter, grey_of_file
from end_node.sources.picture import Intake, TakenPicture
from tierkit.errors import InvalidInput, SourceUnavailable, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.client import calling, open_client, read_at_most
from tierkit.picture_files import START_BYTES, kind_of
from tierkit.plaintext import one_line

__all__ = ["SnapshotSource", "kind_by_answer"]

_MAX_BYTES = 64 * 2**20
_BUDGET_S = 10.0
_DEFAULT_RATE = 1.0
_MOST_SAID = 80
_STREAMS = ("multipart/x-mixed-replace", "video/", "application/vnd.apple.mpegurl", "application/x-mpegurl")


class SnapshotSource:
    """Polls a URL. A picture that the server reports as unchanged is not taken again.

    Args:
        settings: their `url` may hold a user and a password. Basic and digest authentication use them.
        tls_ca: file with the certificates to trust.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, settings: SourceSettings, tls_ca: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = _Address(settings.url)
        self._tls_ca = tls_ca
        self._interval_s = 1.0 / (settings.rate or _DEFAULT_RATE)
        self._change = ChangeFilter(settings.changed)
        self._clock = clock
        self._seen: dict[str, str] = {}

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        """Poll until cancelled.

        Raises:
            SourceUnavailable: the server does not answer, or not with a picture.
            TerraceError: a picture was not taken.
        """
        async with open_client(tls_ca=self._tls_ca) as http:
            while True:
                due = self._clock() + self._interval_s
                content = await self._fetch(http)
                if content is None or not await self._differs(content):
                    alive(1)
                else:
                    await intake.take(TakenPicture(content=content, taken_s=self._clock()))
                await asyncio.sleep(due - self._clock())

    async def _differs(self, content: bytes) -> bool:
        if not self._change.active:
            return True
        return self._change.differs(await asyncio.to_thread(grey_of_file, content))

    async def _fetch(self, http: aiohttp.ClientSession) -> bytes | None:
        """The picture; None if the server says that it is the last one."""
        asked = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
        headers = {asked[name]: value for name, value in self._seen.items()}
        async with self._address.get(http, headers) as answer:
            if answer.status == 304:
                return None
            _check_status(answer)
            seen = {name: answer.headers[name] for name in asked if name in answer.headers}
            if "ETag" in seen and seen.get("ETag") == self._seen.get("ETag"):
                return None
            if (answer.content_length or 0) <= _MAX_BYTES:
                content = await read_at_most(answer, _MAX_BYTES + 1)
            if (answer.content_length or len(content)) > _MAX_BYTES:
                raise SourceUnavailable(f"{self._address} answers with more than {_MAX_BYTES:,} bytes")
            if kind_of(content[:START_BYTES]) is None:
                what = "nothing" if not content else one_line(answer.content_type[:_MOST_SAID])
                raise SourceUnavailable(f"{self._address} answers with {what}, which is not a picture")
            self._seen = seen
            return content


async def kind_by_answer(url: str, tls_ca: Path | None) -> Literal["snapshot", "stream"]:
    """Ask an HTTP address once, and tell from the type of its answer what it is.

    Raises:
        SourceUnavailable: it does not answer, or neither with a picture nor with a stream.
    """
    address = _Address(url)
    async with open_client(tls_ca=tls_ca) as http, address.get(http, {}) as answer:
        _check_status(answer)
        kind = answer.content_type.lower()
        if kind.startswith("image/"):
            return "snapshot"
        if kind.startswith(_STREAMS):
            return "stream"
    said = one_line(kind[:_MOST_SAID])
    raise SourceUnavailable(f"{address} answers with {said}, which is neither a picture nor a stream; name its kind")


class _Address:
    """A URL of a camera. As text it has neither its password nor its query, which may hold one."""

    def __init__(self, url: str) -> None:
        try:
            self._url = URL(url)
            if not self._url.host:
                raise ValueError
        except ValueError as exc:
            raise InvalidInput("the url of the source is not a URL") from exc
        self._user, self._password = self._url.user or "", self._url.password or ""
        self._url = self._url.with_user(None)
        self._digest: aiohttp.DigestAuthMiddleware | None = None
        self._basic = ""

    def __str__(self) -> str:
        return one_line(str(self._url.with_query(None).with_fragment(None)))

    @asynccontextmanager
    async def get(self, http: aiohttp.ClientSession, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for the URL, with credentials once the server has asked for them.

        Raises:
            SourceUnavailable: no answer, or no complete one within the budget.
        """
        try:
            async with calling(str(self), budget_s=_BUDGET_S):
                answer = await self._ask(http, headers)
                if answer.status == 401 and self._user and not (self._digest or self._basic):
                    offers = " ".join(answer.headers.getall("WWW-Authenticate", [])).lower()
                    answer.close()
                    if "digest" in offers:
                        self._digest = aiohttp.DigestAuthMiddleware(self._user, self._password)
                    else:
                        self._basic = b64encode(f"{self._user}:{self._password}".encode()).decode()
                    answer = await self._ask(http, headers)
                async with answer:
                    yield answer
        except (UpstreamError, UpstreamTimeout, UpstreamUnavailable) as exc:
            raise SourceUnavailable(str(exc).replace(str(self._url), str(self))) from exc

    async def _ask(self, http: aiohttp.ClientSession, headers: dict[str, str]) -> aiohttp.ClientResponse:
        middlewares = () if self._digest is None else (self._digest,)
        if self._basic:
            headers = {**headers, "Authorization": f"Basic {self._basic}"}
        return await http.get(self._url, headers=headers, allow_redirects=False, middlewares=middlewares)


def _check_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    if 300 <= answer.status < 400:
        raise SourceUnavailable("the server redirects to another address: give the source that one")
    if answer.status in (401, 403):
        raise SourceUnavailable(
            f"the server refuses access (status {answer.status}): the url may need a user and a password, or others"
        )
    raise SourceUnavailable(f"the server answers with status {answer.status}")
