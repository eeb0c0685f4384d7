"""An httpx transport whose requests pass emulated links.

The question is held back until its last byte would have arrived, then really sent; each piece of the answer is held
back from the moment at which it really came. Both are waits without occupancy: while an exchange is on the wire it
holds no connection, and others pass at the same time. Setting up a connection is not emulated: services keep theirs
open. A failure of the real connection is an answer too, and needs its time to travel back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Protocol

import httpx

from tierkit.links.profile import Links, LinkTo
from tierkit.links.schedule import Fate, Fault, draw_fate, transmitted_at
from tierkit.waiting import wait_until

__all__ = ["Clock", "LinkTransport", "WallClock"]

_MAX_PIECES = 256
"""Pieces of an answer under way, some 64 kB each: the flow control of a real connection has such a bound as well."""


class Clock(Protocol):
    """Time as the links know it."""

    def now(self) -> float:
        """Seconds, never backwards."""
        ...

    async def wait_until(self, when: float) -> None:
        """Return at `when`, or at once if it has passed."""
        ...


class WallClock:
    """Real time, and to some ten microseconds: what a link is late would count as a service's slowness."""

    now = staticmethod(time.perf_counter)
    wait_until = staticmethod(wait_until)


class LinkTransport(httpx.AsyncBaseTransport):
    """Sends requests over the links that lead to their hosts, and the others as they are.

    Args:
        links: which there are.
        inner: the transport that really sends; closed with this one.
        clock: for tests.
    """

    def __init__(self, links: Links, inner: httpx.AsyncBaseTransport, *, clock: Clock | None = None) -> None:
        self._inner = inner
        self._clock = clock or WallClock()
        self._links = [_Link(link, Random(f"{links.seed}/{link.name}")) for link in links.link]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        link = next((link for link in self._links if link.spec.leads_to(request.url.host)), None)
        if link is None:
            return await self._inner.handle_async_request(request)
        fate = draw_fate(link.spec, link.random)
        size = len(await request.aread()) + _head_bytes(request.headers)
        await self._clock.wait_until(link.there.send(size, self._clock.now()) + fate.there_s)
        if fate.fault is not None and not fate.in_answer:
            await _lose(fate.fault, request)
        try:
            response = await self._inner.handle_async_request(request)
        except httpx.TransportError:
            await self._clock.wait_until(self._clock.now() + fate.back_s)
            raise
        arrives = link.back.send(_head_bytes(response.headers), self._clock.now()) + fate.back_s
        # From now on, not from when the head has arrived: what the other side sends meanwhile is on its way as well.
        answer = _Answer(request, response, link, fate, self._clock)
        try:
            await self._clock.wait_until(arrives)
        except BaseException:
            await answer.aclose()
            raise
        return httpx.Response(
            response.status_code, headers=response.headers, stream=answer, extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Queue:
    """One direction of a link."""

    def __init__(self, spec: LinkTo) -> None:
        self._spec = spec
        self._free_at = -math.inf

    def send(self, n_bytes: int, now: float) -> float:
        """Give so many bytes to the link; returns when the last of them is on the wire."""
        self._free_at = transmitted_at(self._spec, n_bytes, now=now, free_at=self._free_at)
        return self._free_at


class _Link:
    """A link and what is under way on it."""

    def __init__(self, spec: LinkTo, random: Random) -> None:
        self.spec = spec
        self.random = random
        self.there = _Queue(spec)
        self.back = _Queue(spec)


class _Answer(httpx.AsyncByteStream):
    """The body of an answer, each piece at its time. A task takes the pieces as they really come and notes when they
    are due; who reads waits for that."""

    def __init__(self, request: httpx.Request, response: httpx.Response, link: _Link, fate: Fate, clock: Clock) -> None:
        self._request = request
        self._response = response
        self._link = link
        self._fate = fate
        self._clock = clock
        self._due: asyncio.Queue[tuple[float, bytes | Exception | None]] = asyncio.Queue(_MAX_PIECES)
        self._closing: asyncio.Task[None] | None = None
        self._taking = asyncio.create_task(self._take(), name="emulated link")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            due, piece = await self._due.get()
            await self._clock.wait_until(due)
            if isinstance(piece, Exception):
                raise piece
            if self._fate.fault is not None and self._fate.in_answer:
                if piece:
                    yield piece[: len(piece) // 2]
                await _lose(self._fate.fault, self._request)
            if piece is None:
                return
            yield piece

    async def aclose(self) -> None:
        self._taking.cancel()
        await asyncio.gather(self._taking, return_exceptions=True)
        await self._give_back()

    async def _give_back(self) -> None:
        """Close the real answer, once and to the end, whoever is cancelled meanwhile: a connection that is half given
        back is lost to its pool."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._response.aclose(), name="emulated link, closing")
        await asyncio.shield(self._closing)

    async def _take(self) -> None:
        last: Exception | None = None
        try:
            stream = self._response.stream
            assert isinstance(stream, httpx.AsyncByteStream)
            async for piece in stream:
                due = self._link.back.send(len(piece), self._clock.now()) + self._fate.back_s
                await self._due.put((due, piece))
        except Exception as exc:
            last = exc  # whatever it is, the reader waits for it
        ends = self._clock.now() + self._fate.back_s
        # The real connection is free for others, though the end of the answer has yet to arrive.
        await self._give_back()
        await self._due.put((ends, last))


async def _lose(fault: Fault, request: httpx.Request) -> None:
    """End an exchange as a broken connection, or as one that says nothing any more, does for its caller."""
    if fault is Fault.RESET:
        raise httpx.ReadError("connection reset (emulated link)", request=request)
    try:
        async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
            await asyncio.Event().wait()
    except TimeoutError as exc:
        raise httpx.ReadTimeout("nothing arrives any more (emulated link)", request=request) from exc


def _head_bytes(headers: httpx.Headers) -> int:
    """About the size of a head: its fields, and their separators."""
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)
