"""Requests to the scheduler: bounded retries where a repetition is safe, and answers turned into Terrace's errors."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import httpx

from tierkit.access import checked_token, client_context, tls_trouble
from tierkit.client.uploads import Upload
from tierkit.errors import (
    CertificateError,
    InvalidInput,
    TerraceError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.errors import error_of
from tierkit.pacing import backoff_s
from tierkit.wire.messages import checked_url

__all__ = ["DEFAULT_URL", "Backoff", "Connection", "OnWait", "Patience"]

DEFAULT_URL = "http://127.0.0.1:8070"

_MAX_RETRY_AFTER_S = 30.0
"""A server may ask for a longer wait, but no caller wants to sit through it in silence."""

_DECODING_S = 600.0
"""The scheduler reads a submission as fast as it can store it, and answers when it has decoded all its pictures, which
may take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often and how long: between the tries a random wait below a doubling bound."""

    attempts: int = 5
    """Tries of one request at most."""
    first_s: float = 0.2
    cap_s: float = 2.0
    outage_s: float = 60.0
    """How long a job is followed without a sign of its scheduler, where the call has no budget of its own."""

    def wait_s(self, failures: int, *, at_least_s: float = 0.0) -> float:
        """Seconds to wait after the given number of failures in a row (1 or more)."""
        return max(at_least_s, backoff_s(failures, first_s=self.first_s, cap_s=self.cap_s, chance=random.random()))


OnWait = Callable[[str, float], None]
"""Told when a scheduler has asked for a wait: its reason, and the seconds."""

_TOLD_S = 1.0
"""A shorter wait is not worth a word."""


class Patience:
    """How long one call goes on while its scheduler is away: until its budget ends; without one, for `outage_s` after
    the last sign of life."""

    def __init__(self, backoff: Backoff, budget_s: float | None) -> None:
        self._backoff = backoff
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._failures = 0
        self._away_since = 0.0
        self.trouble: TerraceError | None = None
        """Why the latest try failed; None while all is well."""

    @property
    def left_s(self) -> float | None:
        """Seconds of the budget; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def sign_of_life(self) -> None:
        """The scheduler has said something: the next failure is the first again."""
        self._failures, self.trouble = 0, None

    async def outlast(self, error: TerraceError) -> None:
        """Wait until the next try is due; raises the error where there is none any more."""
        now, left_s = time.monotonic(), self.left_s
        self.trouble = error
        if self._failures == 0:
            self._away_since = now
        self._failures += 1
        if left_s is None:
            left_s = self._away_since + self._backoff.outage_s - now
        if left_s <= 0:
            raise error
        await anyio.sleep(min(self._backoff.wait_s(self._failures), left_s))


class Connection:
    """One connection pool to one scheduler.

    Environment proxies are not used: a scheduler is named by its own address, mostly a loopback or private one.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 60.0,
        backoff: Backoff | None = None,
        token: str | Callable[[], str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        """Open nothing yet: connections are made by the first request.

        Args:
            url: where the scheduler listens.
            timeout_s: bound of each call in total; of an upload, only of the connecting.
            backoff: how often a failed call is tried again where that is safe, and how long a job is followed while
                its scheduler is away.
            token: for a scheduler that asks for one, or what gives it: `TokenFile(path)` of `tierkit.access` reads it
                from a file, and again when that changes.
            tls_ca: file with the certificates (PEM) to trust at an https URL, in place of the public authorities.
            on_wait: called with the reason and the seconds before a call waits for as long as the scheduler has asked
                for (a limit of the token is reached, or it takes no jobs now).
        """
        try:
            self.url = checked_url(url)
        except ValueError as exc:
            raise InvalidInput(f"the scheduler's URL {exc}, and this is {url!r}") from None
        if isinstance(token, str):
            token = checked_token(token, "the argument token")
        self._token = token
        self._backoff = backoff or Backoff()
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
                trust_env=False,
                # Loading the certificate store costs tens of milliseconds, and plain HTTP never needs it.
                verify=client_context(None if tls_ca is None else Path(tls_ca))
                if self.url.startswith("https://")
                else False,
            )
        except httpx.InvalidURL as exc:
            raise InvalidInput(f"not a URL: {url!r}") from exc

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        upload: Upload | None = None,
    ) -> httpx.Response:
        """Send until answered, with at most `Backoff.attempts` tries.

        Args:
            repeatable: whether the request may be sent again although the scheduler may have acted on it. Where it
                may not, only what certainly never reached it (a refused connection) is tried again.
        """
        failures = 0
        while True:
            try:
                # httpx bounds each phase; an upload has no other sensible bound, everything else has one in total.
                with anyio.fail_after(None if upload else self._timeout_s):
                    async with self._stream(
                        method,
                        path,
                        params=params,
                        headers=headers,
                        upload=upload,
                    ) as response:
                        await response.aread()
                        return response
            except TimeoutError as exc:
                raise UpstreamTimeout(f"the scheduler at {self.url} took more than {self._timeout_s:g} s") from exc
            except Unavailable as exc:
                failures += 1
                if failures >= self._backoff.attempts or not (repeatable or _not_acted_on(exc)):
                    raise
                asked_s = 0.0 if isinstance(exc, UpstreamUnavailable) else min(exc.retry_after_s, _MAX_RETRY_AFTER_S)
                wait_s = self._backoff.wait_s(failures, at_least_s=asked_s)
                if self._on_wait is not None and asked_s >= _TOLD_S:
                    self._on_wait(str(exc), wait_s)
                await anyio.sleep(wait_s)

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        upload: Upload | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """One try; the body of the answer is still to be read. Errors of the block's own reading are turned too."""
        token = self._token() if callable(self._token) else self._token
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = self._http.build_request(
            method,
            path,
            params={**(upload.params if upload else {}), **(params or {})},
            headers={**shown, **(upload.headers if upload else {}), **(headers or {})},
            content=upload.chunks() if upload else None,
        )
        timeouts = request.extensions["timeout"]
        if upload is not None:
            patience_s = max(_DECODING_S, self._timeout_s)
            request.extensions["timeout"] = {**timeouts, "read": patience_s, "write": patience_s}
        elif read_timeout_s is not None:
            request.extensions["timeout"] = {**timeouts, "read": read_timeout_s}
        with _translated(self.url):
            response = await self._http.send(request, stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    retry_after = response.headers.get("Retry-After")
                    raise error_of(self.url, response.status_code, response.content, retry_after)
                yield response
            finally:
                await response.aclose()


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """httpx's errors as Terrace's."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
        if trouble := tls_trouble(exc, f"the scheduler at {url}"):
            raise CertificateError(trouble) from exc
        raise UpstreamUnavailable(f"no scheduler answers at {url}") from exc
    except httpx.TimeoutException as exc:
        raise UpstreamTimeout(f"the scheduler at {url} was silent for too long") from exc
    except httpx.TransportError as exc:
        hint = "; if it serves TLS, its URL begins with https://" if _may_be_tls(url, exc) else ""
        raise UpstreamUnavailable(f"the connection to the scheduler at {url} broke{hint}") from exc
    except httpx.RequestError as exc:
        raise UpstreamError(f"the scheduler at {url} sent an answer that cannot be read: {exc}") from exc


def _may_be_tls(url: str, error: httpx.TransportError) -> bool:
    """Whether it ended as it does when plain HTTP meets a TLS server: closed without a word."""
    return url.startswith("http://") and isinstance(error, httpx.RemoteProtocolError)


def _not_acted_on(error: Unavailable) -> bool:
    """Whether the scheduler certainly did nothing: it said so (503), or the request never reached it."""
    return not isinstance(error, UpstreamUnavailable) or isinstance(
        error.__cause__, httpx.ConnectError | httpx.ConnectTimeout
    )
