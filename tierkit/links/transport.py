"""A way to servers that leads over emulated links.

The question is held back until its last byte would have arrived, then really sent; each piece of the answer is held
back from the moment at which it really came. Both are waits without occupancy: while an exchange is on the wire it
holds no connection, and others pass at the same time. Setting up a connection is not emulated: services keep theirs
open. A failure of the real connection is an answer too, and needs its time to travel back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Protocol

import httpx

from tierkit.http1 import Answer, Question, Way
from tierkit.links.profile import Links, LinkTo
from tierkit.links.schedule import Fate, Fault, draw_fate, transmitted_at
from tierkit.waiting import wait_until

__all__ = ["Clock", "LinkTransport", "WallClock"]

_MAX_PIECES = 256
"""Pieces of an answer under way, some 64 kB each: the flow control of a real connection has such a bound as well."""


_MAX_HOSTS = 1024
"""Names may come from outside."""


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


class LinkTransport:
    """Sends requests over the links that lead to their hosts, and the others as they are.

    Args:
        links: which there are.
        inner: the way that really sends; closed with this one.
        clock: for tests.
    """

    def __init__(self, links: Links, inner: Way, *, clock: Clock | None = None) -> None:
        self._inner = inner
        self._clock = clock or WallClock()
        self._links = [_Link(link, Random(f"{links.seed}/{link.name}")) for link in links.link]
        # Remembered: reading an address takes longer than all else that is done here for a request.
        self._link_to = lru_cache(maxsize=_MAX_HOSTS)(self._find)

    async def ask(self, question: Question) -> Answer:
        """See `tierkit.http1.Way.ask`."""
        link = self._link_to(question.origin[1])
        if link is None:
            return await self._inner.ask(question)
        fate = draw_fate(link.spec, link.random)
        body = question.body
        pieces = body if isinstance(body, Sequence) else [piece async for piece in body]
        size = len(question.head) + sum(map(len, pieces))
        await self._clock.wait_until(link.there.send(size, self._clock.now()) + fate.there_s)
        if fate.fault is not None and not fate.in_answer:
            await _lose(fate.fault, question.timeouts.read)
        try:
            answer = await self._inner.ask(question if pieces is body else replace(question, body=pieces))
        except httpx.TransportError:
            await self._clock.wait_until(self._clock.now() + fate.back_s)
            raise
        arrives = link.back.send(_head_bytes(answer), self._clock.now()) + fate.back_s
        # From now on, not from when the head has arrived: what the other side sends meanwhile is on its way as well.
        late = _Late(answer, link, fate, self._clock, question.timeouts.read)
        try:
            await self._clock.wait_until(arrives)
        except BaseException:
            await late.aclose()
            raise
        return late

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _find(self, host: bytes) -> _Link | None:
        return next((link for link in self._links if link.spec.leads_to(host.decode())), None)


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


class _Late(Answer):
    """An answer, each piece of its body at its time. A task takes the pieces as they really come and notes when they
    are due; who reads waits for that."""

    def __init__(self, answer: Answer, link: _Link, fate: Fate, clock: Clock, read_s: float | None) -> None:
        self.status, self.headers = answer.status, answer.headers
        self.reason, self.version = answer.reason, answer.version
        self._answer = answer
        self._link = link
        self._fate = fate
        self._clock = clock
        self._read_s = read_s
        self._due: asyncio.Queue[tuple[float, bytes | Exception | None]] = asyncio.Queue(_MAX_PIECES)
        self._closing: asyncio.Task[None] | None = None
        self._taking = asyncio.create_task(self._take(), name="emulated link")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            due, piece = await self._due.get()
            if due > self._clock.now():
                await self._clock.wait_until(due)
            if isinstance(piece, Exception):
                raise piece
            if self._fate.fault is not None and self._fate.in_answer:
                if piece:
                    yield piece[: len(piece) // 2]
                await _lose(self._fate.fault, self._read_s)
            if piece is None:
                return
            yield piece

    async def aclose(self) -> None:
        if not self._taking.done():
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        await self._give_back()

    async def _give_back(self) -> None:
        """Close the real answer, once and to the end, whoever is cancelled meanwhile: a connection that is half given
        back is lost to its pool."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._answer.aclose(), name="emulated link, closing")
        if not self._closing.done():
            await asyncio.shield(self._closing)

    async def _take(self) -> None:
        last: Exception | None = None
        try:
            async for piece in self._answer:
                due = self._link.back.send(len(piece), self._clock.now()) + self._fate.back_s
                await self._due.put((due, piece))
        except Exception as exc:
            last = exc  # whatever it is, the reader waits for it
        ends = self._clock.now() + self._fate.back_s
        # The real connection is free for others, though the end of the answer has yet to arrive.
        await self._give_back()
        await self._due.put((ends, last))


async def _lose(fault: Fault, read_s: float | None) -> None:
    """End an exchange as a broken connection, or as one that says nothing any more, does for its caller."""
    if fault is Fault.RESET:
        raise httpx.ReadError("connection reset (emulated link)")
    try:
        async with asyncio.timeout(read_s):
            await asyncio.Event().wait()
    except TimeoutError as exc:
        raise httpx.ReadTimeout("nothing arrives any more (emulated link)") from exc


def _head_bytes(answer: Answer) -> int:
    """About the size of a head: its fields, and their separators."""
    return sum(len(name) + len(value) + 4 for name, value in answer.headers)
