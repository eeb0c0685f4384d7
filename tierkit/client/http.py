"""Requests to the scheduler: bounded retries where a repetition is safe, and answers turned into Terrace's errors."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio
import httpx

from tierkit.access import checked_token, client_context, tls_trouble
from tierkit.client.uploads import UploadBody
from tierkit.errors import (
    CertificateError,
    InvalidInput,
    Standby,
    TerraceError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.errors import error_of
from tierkit.http.failover import Ring, Round, leads_elsewhere
from tierkit.pacing import backoff_s
from tierkit.wire.messages import checked_url

__all__ = ["DEFAULT_URL", "Backoff", "OnWait", "Patience", "SchedulerConnection"]

DEFAULT_URL = "http://127.0.0.1:8070"

_MAX_RETRY_AFTER_S = 30.0
"""A server may ask for a longer wait, but no caller wants to sit through it in silence."""

_DECODING_S = 600.0
"""The scheduler reads a submission as fast as it can store it, and answers when it has decoded all its pictures, which
may take minutes."""

_HUNG_S = 12.0
"""With several schedulers, the client leaves one that does not answer `/livez` for this long. With the usual lease,
another one leads by then."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Number of tries of a failing call, and the waits between them: random, below a doubling bound."""

    attempts: int = 5
    """Tries of one request at most."""
    first_s: float = 0.2
    cap_s: float = 2.0
    outage_s: float = 60.0
    """Seconds for which a job is followed without a sign of its scheduler, if the call has no budget."""
    failover_s: float = 15.0
    """Seconds for which any other call waits for a standby to lead, however many tries that takes."""

    def wait_s(self, failures: int, *, at_least_s: float = 0.0) -> float:
        """Seconds to wait after the given number of failures in a row (1 or more)."""
        return max(at_least_s, backoff_s(failures, first_s=self.first_s, cap_s=self.cap_s, chance=random.random()))


OnWait = Callable[[str, float], None]
"""Called when a scheduler has asked for a wait, with the reason and the seconds."""

_TOLD_S = 1.0
"""A shorter wait is not worth a word."""


class Patience:
    """Time for which one call continues while its scheduler is away: until its budget ends, or without a budget until
    `outage_s` after the last sign of life."""

    def __init__(self, backoff: Backoff, budget_s: float | None) -> None:
        self._backoff = backoff
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._failures = 0
        self._away_since = 0.0
        self.trouble: TerraceError | None = None
        """Reason why the latest try failed; None while all is well."""

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


class _Tries:
    """The tries of one call: at one scheduler after the other until one leads, and later again where that is safe."""

    def __init__(
        self,
        ring: Ring,
        backoff: Backoff,
        on_wait: OnWait | None,
        *,
        attempts: int,
        repeatable: bool,
        failover_s: float,
        patience_s: float | None = None,
    ) -> None:
        self._round = Round(ring)
        self._backoff = backoff
        self._on_wait = on_wait
        self._attempts = attempts
        self._repeatable = repeatable
        self._failover_s = failover_s
        self._patient_until = None if patience_s is None else time.monotonic() + patience_s
        self._failures = 0
        self._standby_since: float | None = None

    async def failed(self, url: str, error: TerraceError) -> None:
        """Wait until the next try is due; raises the error where there is none any more."""
        trouble = self._round.failed(url, error)
        if not (self._repeatable or _not_acted_on(error)):
            raise error
        if trouble is None:
            return
        if not isinstance(trouble, Unavailable):
            raise trouble
        self._failures += 1
        told = False
        left_s = math.inf
        if self._patient_until is not None:
            left_s = self._patient_until - time.monotonic()
            if left_s <= 0:
                raise trouble
        elif isinstance(trouble, Standby):
            now = time.monotonic()
            told = self._standby_since is not None
            self._standby_since = self._standby_since or now
            if now - self._standby_since >= self._failover_s:
                raise trouble
        elif self._failures >= self._attempts:
            raise trouble
        asked_s = 0.0 if isinstance(trouble, UpstreamUnavailable) else min(trouble.retry_after_s, _MAX_RETRY_AFTER_S)
        wait_s = min(left_s, self._backoff.wait_s(self._failures, at_least_s=asked_s))
        if self._on_wait is not None and asked_s >= _TOLD_S and not told:
            self._on_wait(str(trouble), wait_s)
        await anyio.sleep(wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One request, to whichever scheduler leads."""

    method: str
    path: str
    params: Mapping[str, str | float] | None
    headers: Mapping[str, str] | None
    upload: UploadBody | None
    read_timeout_s: float | None = None


class SchedulerConnection:
    """One connection pool to one scheduler, or to several of which one leads.

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
        """Open nothing yet: the first request connects.

        Args:
            url: URL of the scheduler. With standbys, the URLs of all schedulers, comma-separated: each call finds the
                leader.
            timeout_s: total bound of each call at each scheduler that it asks; for an upload, it bounds only
                connecting. With several schedulers, the client leaves a hanging one after at most 12 s.
            backoff: number of tries of a failed call that is safe to repeat, and seconds for which a job is followed
                while its scheduler is away.
            token: token for a scheduler that asks for one, or a function that returns it. `TokenFile(path)` of
                `tierkit.access` reads it from a file, and again when that changes.
            tls_ca: file with the certificates (PEM) to trust at an https URL instead of the public authorities.
            on_wait: called with the reason and the seconds before a call waits: until a standby leads, or because the
                scheduler asked for it. It asks if a limit of the token is reached, or if it takes no jobs now.
        """
        self._ring = Ring([_checked(part.strip()) for part in url.split(",")])
        if isinstance(token, str):
            token = checked_token(token, "the argument token")
        self._token = token
        self._backoff = backoff or Backoff()
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        https = any(each.startswith("https://") for each in self.urls)
        self._tls_ca = None if tls_ca is None or not https else Path(tls_ca)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
            trust_env=False,
            # Loading the certificate store costs tens of milliseconds, and plain HTTP never needs it.
            verify=client_context(self._tls_ca) if https else False,
        )

    @property
    def url(self) -> str:
        """URL of this client's scheduler; of several, the first that it asks now."""
        return self._ring.current

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all schedulers that it knows."""
        return self._ring.addresses

    @property
    def tls_ca(self) -> Path | None:
        """File with the certificates to trust instead of the public authorities'."""
        return self._tls_ca

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
        params: Mapping[str, str | float] | None = None,
        headers: Mapping[str, str] | None = None,
        upload: UploadBody | None = None,
        patience_s: float | None = None,
    ) -> httpx.Response:
        """Send until answered, with at most `Backoff.attempts` tries.

        Args:
            repeatable: True if the request may be sent again although the scheduler may have acted on it. Otherwise it
                is repeated only if it certainly never reached the scheduler (a refused connection).
            patience_s: seconds to keep trying, however many tries that takes.
        """
        question = _Question(method=method, path=path, params=params, headers=headers, upload=upload)
        tries = self._tries(attempts=self._backoff.attempts, repeatable=repeatable, patience_s=patience_s)
        while True:
            url = self._ring.current
            error: TerraceError
            try:
                # httpx bounds each phase; an upload has no other sensible bound, everything else has one in total.
                with anyio.fail_after(None if upload else self._timeout_s):
                    return await self._while_alive(url, self._read(url, question))
            except TimeoutError as exc:
                error = UpstreamTimeout(f"the scheduler at {url} took more than {self._timeout_s:g} s")
                error.__cause__ = exc
            except TerraceError as exc:
                error = exc
            await tries.failed(url, error)

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | float] | None = None,
        headers: Mapping[str, str] | None = None,
        upload: UploadBody | None = None,
        read_timeout_s: float | None = None,
        patient: bool = True,
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The answer of the scheduler that leads, as it comes. Errors of the block's own reading are turned too.

        Args:
            patient: True to wait for a standby to lead.
        """
        question = _Question(
            method=method, path=path, params=params, headers=headers, upload=upload, read_timeout_s=read_timeout_s
        )
        # Whatever is answered by a stream changes nothing.
        tries = self._tries(attempts=1, repeatable=True, patient=patient)
        async with AsyncExitStack() as stack:
            while True:
                url = self._ring.current
                try:
                    response = await self._while_alive(url, stack.enter_async_context(self._asked(url, question)))
                    break
                except TerraceError as exc:
                    error = exc
                await tries.failed(url, error)
            yield self._chunks(url, response)

    def _tries(
        self, *, attempts: int, repeatable: bool, patient: bool = True, patience_s: float | None = None
    ) -> _Tries:
        return _Tries(
            self._ring,
            self._backoff,
            self._on_wait,
            attempts=attempts,
            repeatable=repeatable,
            failover_s=self._backoff.failover_s if patient else 0.0,
            patience_s=patience_s,
        )

    async def _read(self, url: str, question: _Question) -> httpx.Response:
        """One try at one scheduler, with the whole answer."""
        async with self._asked(url, question) as response:
            await response.aread()
            return response

    async def _chunks(self, url: str, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        chunks = response.aiter_bytes()
        while (chunk := await self._while_alive(url, anext(chunks, None))) is not None:
            yield chunk

    async def _while_alive(self, url: str, answer: Awaitable[T]) -> T:
        """Await the answer of a scheduler, however long it takes. With several schedulers, the client leaves one that
        hangs: another one may lead by now.

        Raises:
            UpstreamTimeout: it gives no sign of life.
        """
        if len(self.urls) == 1:
            return await answer
        outcome: tuple[T] | Exception = UpstreamTimeout(f"the scheduler at {url} gives no sign of life")
        hung_s = min(_HUNG_S, self._timeout_s)

        async def watch() -> None:
            with suppress(httpx.HTTPError, TimeoutError):
                while True:
                    await anyio.sleep(hung_s / 6)
                    with anyio.fail_after(hung_s * 5 / 6):
                        await self._http.get(f"{url}/livez")
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                outcome = (await answer,)
            except Exception as exc:
                outcome = exc
            tasks.cancel_scope.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]

    @asynccontextmanager
    async def _asked(self, url: str, question: _Question) -> AsyncIterator[httpx.Response]:
        """One try at one scheduler."""
        token = self._token() if callable(self._token) else self._token
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        upload = question.upload
        request = self._http.build_request(
            question.method,
            url + question.path,
            params={**(upload.params if upload else {}), **(question.params or {})},
            headers={**shown, **(upload.headers if upload else {}), **(question.headers or {})},
            content=upload.chunks() if upload else None,
        )
        timeouts = request.extensions["timeout"]
        if upload is not None:
            patience_s = max(_DECODING_S, self._timeout_s)
            request.extensions["timeout"] = {**timeouts, "read": patience_s, "write": patience_s}
        elif question.read_timeout_s is not None:
            request.extensions["timeout"] = {**timeouts, "read": question.read_timeout_s}
        try:
            with _translated(url):
                response = await self._http.send(request, stream=True)
                try:
                    if not response.is_success:
                        await response.aread()
                        retry_after = response.headers.get("Retry-After")
                        raise error_of(url, response.status_code, response.content, retry_after)
                    yield response
                finally:
                    await response.aclose()
        except TerraceError as exc:
            if leads_elsewhere(exc):
                self._ring.leave(url)  # also in the middle of an answer
            raise


def _checked(url: str) -> str:
    """One URL of a scheduler, without the slash at its end. Raises InvalidInput."""
    try:
        checked = checked_url(url)
        httpx.URL(checked)
    except ValueError as exc:
        raise InvalidInput(f"the scheduler's URL {exc}, and this is {url!r}") from None
    except httpx.InvalidURL as exc:
        raise InvalidInput(f"not a URL: {url!r}") from exc
    return checked


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
    """True if it ended as it does when plain HTTP meets a TLS server: closed without a word."""
    return url.startswith("http://") and isinstance(error, httpx.RemoteProtocolError)


def _not_acted_on(error: TerraceError) -> bool:
    """True if the scheduler certainly did nothing: it said so (503), or the request never reached it."""
    if isinstance(error, UpstreamUnavailable):
        return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
    return isinstance(error, Unavailable | CertificateError)
