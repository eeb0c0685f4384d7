"""The job API for programs without an event loop: `AsyncClient`, run on an event loop in a background thread.

There is no second implementation here. Each method is made from the asynchronous one and keeps its signature.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from tierkit.client.aio import AsyncClient
from tierkit.client.http import DEFAULT_URL, Backoff, OnWait

__all__ = ["Client"]

_CANCEL_S = 5.0
"""A call that is cancelled gets this long to end."""

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """The same call, waited for."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(lambda: method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """The same items, waited for one by one."""

    @functools.wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        items = method(self._client, *args, **kwargs)
        reading: asyncio.Task[Any] | None = None

        async def following() -> tuple[T] | None:
            nonlocal reading
            reading = asyncio.current_task()
            try:
                async for item in items:
                    return (item,)
                return None
            finally:
                reading = None

        async def close() -> None:
            # Ctrl-C may arrive between the start of a call and the moment at which the call can be cancelled.
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading}, timeout=_CANCEL_S)
            await items.aclose()

        try:
            while held := self._run(following):
                yield held[0]
        finally:
            # An iterator that outlives its client was closed together with the client's event loop.
            if self._portal is not None:
                self._run(close)

    return iterate


class Client:
    """A connection for programs without an event loop: to one scheduler, or to several of which one leads.

        with Client("http://127.0.0.1:8070") as terrace:
            job = terrace.submit("photos/", scheme="mapping")
            for result in terrace.stream_results(job):
                print(result.name, result.label)

    It has the methods, arguments and errors of `AsyncClient`. Several threads may use one at a time. Without `with` it
    connects at its first call and is closed by `close()`, or at the end of the program.
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
        self._client = AsyncClient(
            url, timeout_s=timeout_s, backoff=backoff, token=token, tls_ca=tls_ca, on_wait=on_wait
        )
        self._portal: BlockingPortal | None = None
        self._opening = threading.Lock()
        self._closed = False

    @property
    def url(self) -> str:
        """URL of this client's scheduler; of several, the first that it asks now."""
        return self._client.url

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all schedulers that it knows."""
        return self._client.urls

    @property
    def tls_ca(self) -> Path | None:
        """File with the certificates to trust instead of the public authorities'."""
        return self._client.tls_ca

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="terrace-client"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        self._at_end = weakref.finalize(self, self._stack.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._portal is not None:
            self._at_end.detach()
            self._stack.__exit__(kind, error, trace)
            self._portal = None

    def close(self) -> None:
        """Close its connections; it cannot be used after that."""
        self.__exit__(None, None, None)

    submit = _blocking(AsyncClient.submit)
    classify = _iterating(AsyncClient.classify)
    job = _blocking(AsyncClient.job)
    jobs = _blocking(AsyncClient.jobs)
    results = _iterating(AsyncClient.results)
    raw_results = _iterating(AsyncClient.raw_results)
    save_results = _blocking(AsyncClient.save_results)
    events = _iterating(AsyncClient.events)
    stream_results = _iterating(AsyncClient.stream_results)
    wait = _blocking(AsyncClient.wait)
    attempts = _blocking(AsyncClient.attempts)
    explain = _blocking(AsyncClient.explain)
    cancel = _blocking(AsyncClient.cancel)
    runs = _blocking(AsyncClient.runs)
    run = _blocking(AsyncClient.run)
    run_events = _iterating(AsyncClient.run_events)
    stop_run = _blocking(AsyncClient.stop_run)
    order_worker = _blocking(AsyncClient.order_worker)
    order_at_host = _blocking(AsyncClient.order_at_host)
    match = _blocking(AsyncClient.match)
    invite = _blocking(AsyncClient.invite)
    uninvite = _blocking(AsyncClient.uninvite)
    begin_run = _blocking(AsyncClient.begin_run)
    report_run = _blocking(AsyncClient.report_run)
    offer_runs = _blocking(AsyncClient.offer_runs)
    devices = _blocking(AsyncClient.devices)
    drain = _blocking(AsyncClient.drain)
    resume = _blocking(AsyncClient.resume)
    remove = _blocking(AsyncClient.remove)
    forget = _blocking(AsyncClient.forget)
    trust = _blocking(AsyncClient.trust)
    sites = _blocking(AsyncClient.sites)
    site = _blocking(AsyncClient.site)
    drain_site = _blocking(AsyncClient.drain_site)
    resume_site = _blocking(AsyncClient.resume_site)
    remove_site = _blocking(AsyncClient.remove_site)
    sources = _blocking(AsyncClient.sources)
    set_rights = _blocking(AsyncClient.set_rights)
    node_sources = _blocking(AsyncClient.node_sources)
    add_source = _blocking(AsyncClient.add_source)
    remove_source = _blocking(AsyncClient.remove_source)
    pause_source = _blocking(AsyncClient.pause_source)
    resume_source = _blocking(AsyncClient.resume_source)
    observations = _iterating(AsyncClient.observations)
    observation_page = _blocking(AsyncClient.observation_page)
    follow_observations = _iterating(AsyncClient.follow_observations)
    save_observations = _blocking(AsyncClient.save_observations)
    picture = _blocking(AsyncClient.picture)
    label = _blocking(AsyncClient.label)
    take_label_back = _blocking(AsyncClient.take_label_back)
    picture_page = _blocking(AsyncClient.picture_page)
    learning = _blocking(AsyncClient.learning)
    improvements = _blocking(AsyncClient.improvements)
    put_improvement = _blocking(AsyncClient.put_improvement)
    sinks = _blocking(AsyncClient.sinks)
    sink = _blocking(AsyncClient.sink)
    add_sink = _blocking(AsyncClient.add_sink)
    remove_sink = _blocking(AsyncClient.remove_sink)
    pause_sink = _blocking(AsyncClient.pause_sink)
    resume_sink = _blocking(AsyncClient.resume_sink)
    test_sink = _blocking(AsyncClient.test_sink)
    dead_letters = _blocking(AsyncClient.dead_letters)
    replay = _blocking(AsyncClient.replay)
    mapping = _blocking(AsyncClient.mapping)
    fleet = _blocking(AsyncClient.fleet)
    whoami = _blocking(AsyncClient.whoami)
    info = _blocking(AsyncClient.info)
    models = _blocking(AsyncClient.models)
    releases = _blocking(AsyncClient.releases)
    release = _blocking(AsyncClient.release)
    release_manifest = _blocking(AsyncClient.release_manifest)
    save_network = _blocking(AsyncClient.save_network)
    create_release = _blocking(AsyncClient.create_release)
    download_network = _blocking(AsyncClient.download_network)
    start_release = _blocking(AsyncClient.start_release)
    promote_release = _blocking(AsyncClient.promote_release)
    stop_release = _blocking(AsyncClient.stop_release)
    roll_back = _blocking(AsyncClient.roll_back)
    prune_releases = _blocking(AsyncClient.prune_releases)

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        with self._opening:
            if self._closed:
                raise RuntimeError("this Client is closed: make another one")
            if self._portal is None:
                self.__enter__()
        portal = self._portal
        assert portal is not None
        finished = threading.Event()

        async def watched() -> T:
            try:
                return await call()
            finally:
                finished.set()

        future = portal.start_task_soon(watched)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C arrives here, in the caller's thread: stop the call in the other one before going on, since a
            # generator that still runs cannot be closed.
            if future.cancel():
                finished.wait(timeout=_CANCEL_S)
            raise
