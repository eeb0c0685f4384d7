"""An aiohttp client middleware that makes requests pass emulated links.

The question is held back until its last byte would have arrived, then really sent; each piece of the answer is held
back from the moment at which it really came. Both are waits without occupancy: while an exchange is on the wire it
holds no connection, and others pass at the same time. Setting up a connection is not emulated: services keep theirs
open. A failure of the real connection is an answer too, and needs its time to travel back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from random import Random
from typing import Protocol

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from experiments.emulation.links import Links, LinkTo
from experiments.emulation.schedule import Fate, Fault, draw_fate, transmitted_at
from experiments.emulation.waiting import wait_until

__all__ = ["Clock", "LinkMiddleware", "WallClock"]

_MAX_PIECES = 256
"""Most pieces of an answer in transit, about 64 kB each. The flow control of a real connection has a similar bound."""


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


class LinkMiddleware:
    """Sends requests over the links that lead to their hosts, and other requests unchanged.

    Args:
        links: all links of the service.
        clock: replaces the clock in tests.
    """

    def __init__(self, links: Links, *, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._links = [_Link(link, Random(f"{links.seed}/{link.name}")) for link in links.link]

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        host = request.url.host or ""
        link = next((link for link in self._links if link.spec.leads_to(host)), None)
        if link is None:
            return await handler(request)
        fate = draw_fate(link.spec, link.random)
        size = _head_bytes(request.headers) + int(request.headers.get("Content-Length", "0"))
        await self._clock.wait_until(link.there.send(size, self._clock.now()) + fate.there_s)
        if fate.fault is not None and not fate.in_answer:
            await _lose(fate.fault)
        try:
            answer = await handler(request)
        except aiohttp.ClientError:
            await self._clock.wait_until(self._clock.now() + fate.back_s)
            raise
        arrives = link.back.send(_head_bytes(answer.headers), self._clock.now()) + fate.back_s
        # From now on, not from when the head has arrived: what the other side sends meanwhile is on its way as well.
        answer.content = _LateBody(answer.content, link, fate, self._clock)
        try:
            await self._clock.wait_until(arrives)
        except BaseException:
            answer.close()
            raise
        return answer


class _Queue:
    """One direction of a link."""

    def __init__(self, spec: LinkTo) -> None:
        self._spec = spec
        self._free_at = -math.inf

    def send(self, n_bytes: int, now: float) -> float:
        """Give `n_bytes` to the link; returns when the last of them is on the wire."""
        self._free_at = transmitted_at(self._spec, n_bytes, now=now, free_at=self._free_at)
        return self._free_at


class _Link:
    """A link and what is under way on it."""

    def __init__(self, spec: LinkTo, random: Random) -> None:
        self.spec = spec
        self.random = random
        self.there = _Queue(spec)
        self.back = _Queue(spec)


class _LateBody(aiohttp.StreamReader):
    """The body of an answer, each piece at its time: a task takes the pieces as they really come and notes when they
    are due; the reader waits for that."""

    def __init__(self, body: aiohttp.StreamReader, link: _Link, fate: Fate, clock: Clock) -> None:
        super().__init__(BaseProtocol(asyncio.get_running_loop()), 0)  # keeps nothing, so there is no flow to control
        self._body = body
        self._link = link
        self._fate = fate
        self._clock = clock
        self._broken = False
        """True if the half of a piece has been read, after which the rest of a lost answer does not come."""
        self._due: asyncio.Queue[tuple[float, bytes | Exception]] = asyncio.Queue(_MAX_PIECES)
        self._taking = asyncio.create_task(self._take(), name="emulated link")

    def set_exception(self, exc: type[BaseException] | BaseException, exc_cause: BaseException | None = None) -> None:
        """Called by aiohttp when the answer is closed."""
        self._taking.cancel()

    async def readany(self) -> bytes:
        """See `aiohttp.StreamReader.readany`, on which reading all and `iter_any` rest."""
        if self.is_eof():
            return b""
        due, piece = await self._due.get()
        if due > self._clock.now():
            await self._clock.wait_until(due)
        if isinstance(piece, Exception):
            raise piece
        if self._fate.fault is not None and self._fate.in_answer:
            half = piece[: len(piece) // 2]
            if self._broken or not half:
                await _lose(self._fate.fault)
            self._broken = True
            return half
        if not piece:
            self.feed_eof()
        return piece

    async def _take(self) -> None:
        last: bytes | Exception = b""
        try:
            async for piece in self._body.iter_any():
                due = self._link.back.send(len(piece), self._clock.now()) + self._fate.back_s
                await self._due.put((due, piece))
        except Exception as exc:
            last = exc  # any error: the reader waits for it
        await self._due.put((self._clock.now() + self._fate.back_s, last))


async def _lose(fault: Fault) -> None:
    """End an exchange as a broken connection, or as one that says nothing any more, does for its caller."""
    if fault is Fault.RESET:
        raise aiohttp.ClientConnectionError("connection reset (emulated link)")
    await asyncio.Event().wait()


def _head_bytes(headers: Mapping[str, str]) -> int:
    """About the size of a head: its fields, and their separators."""
    return sum(len(name) + len(value) + 4 for name, value in headers.items())
