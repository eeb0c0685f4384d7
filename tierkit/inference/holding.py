"""The releases that a node holds: those that its scheduler names.

A node that lacks one loads it next to the others, one at a time, and offers both. One that is not named any more is
unloaded once its last request has been answered. If a release cannot be loaded, the node keeps what it has, reports the
reason and tries again, less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tierkit.errors import DeadlineExceeded, NeedsRestart, NoRoom, TerraceError, Unavailable, UpstreamError
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded, ReleaseParts
from tierkit.pacing import backoff_s
from tierkit.wire.messages import RELEASES_HEADER, ReleaseTrouble

__all__ = ["UNKNOWN", "Holder", "Holding", "ReleaseSource", "Told", "read_releases", "reason_of"]

log = logging.getLogger(__name__)

TroubleKind = Literal["room", "unusable", "unreachable"]

UNKNOWN = 0
"""Number of a release that a node knows no number of."""

_MOST_RELEASES = 8
"""More are not held at a time: a heartbeat reports the troubles of as many."""
_MOST_DIGITS = 9
_MOST_SAID = 500
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_ANNOUNCE_BUDGET_S = 10.0
"""Seconds for the scheduler to hear that a release is not offered any more, before it is unloaded."""


class Told(NamedTuple):
    """Content of `RELEASES_HEADER`."""

    numbers: tuple[int, ...]
    """Releases to hold; the first one answers the node's own pictures."""
    prunes: int = 0
    """Number of times that releases have been pruned."""


def read_releases(header: str | None) -> Told | None:
    """The value of `RELEASES_HEADER`; None if there is none that can be read."""
    if header is None:
        return None
    numbers, _, prunes = header.partition(";")
    parts = [part.strip() for part in numbers.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS for part in [*parts, prunes or "0"]):
        return None
    found = tuple(dict.fromkeys(int(part) for part in parts if int(part)))
    return Told(found[:_MOST_RELEASES], int(prunes or 0)) if found else None


class ReleaseSource(Protocol):
    """The releases of a scheduler."""

    @property
    def started_with(self) -> int:
        """Number of the release that the node loaded at its start; `UNKNOWN` if it does not know."""
        ...

    def listen(self, registering: Callable[[Told], None]) -> None:
        """Call this with the release in force each time that the node asks for a place in the device list."""
        ...

    async def load(self, number: int, loaded: Loaded) -> ReleaseParts:
        """Load a release.

        Raises:
            NeedsRestart: it cannot be held next to the present ones.
            TerraceError: see `reason_of`.
        """
        ...

    async def is_same(self, number: int) -> bool:
        """False if the scheduler has another release under the number of one that the node holds."""
        ...

    async def keep(self, numbers: Sequence[int]) -> None:
        """Remember these releases for a start without the scheduler, which serves the first one."""
        ...

    async def prune(self, prunes: int) -> None:
        """Delete what releases left in the cache that the scheduler does not have any more."""
        ...

    async def may_restart(self, numbers: Sequence[int]) -> bool:
        """True if the node would load one of these releases after a restart."""
        ...


class Holder(Protocol):
    """The node, as far as releases change it."""

    @property
    def loaded(self) -> Loaded:
        """Models and encoders that it has loaded."""
        ...

    async def hold(self, number: int, parts: ReleaseParts) -> None:
        """Serve a release next to the others, once it has proved that it works. Raises any error of its models."""
        ...

    async def arrange(self, numbers: Sequence[int]) -> None:
        """Serve these releases, the first one by default. The others are taken away, without any request refused."""
        ...

    def rename(self, number: int, new: int) -> None:
        """Give a release another number."""
        ...


class _Failed(NamedTuple):
    trouble: ReleaseTrouble | None
    """None: the scheduler need not hear of it."""
    times: int
    again_s: float
    """Time at which it is tried again (`time.monotonic`)."""
    restart: bool = False
    """True if only a restart helps."""


class Holding:
    """Keeps a node at the releases that its scheduler names.

    Args:
        node: it holds them.
        source: they come from it.
        lifecycle: of the node, which may have to start again.
    """

    def __init__(self, node: Holder, source: ReleaseSource, lifecycle: Lifecycle) -> None:
        self._node = node
        self._source = source
        self._lifecycle = lifecycle
        self._told: Told | None = None
        self._held: list[int] = [source.started_with]
        """Numbers of the loaded releases."""
        self._served: list[int] = list(self._held)
        """Numbers of the releases that requests can find, in their order."""
        self._failed: dict[int, _Failed] = {}
        self._news = asyncio.Event()
        self._doubted: set[int] = set()
        """Releases whose content may be another one by now."""
        self._next_spare = -1
        self._pruned: int | None = None
        self._refused = 0
        """Registrations since the scheduler last sent the node its releases."""
        source.listen(self._registering)
        self.on_trouble: Callable[[], None] = lambda: None
        """Called when there is a new trouble."""

    @property
    def held(self) -> Sequence[int]:
        """Numbers of the releases that the node serves; the first one answers by default."""
        return self._served

    @property
    def usable(self) -> Sequence[int]:
        """The same without those that have turned out broken, unless all have."""
        return [number for number in self._served if number not in self._failed] or self._served

    @property
    def troubles(self) -> tuple[ReleaseTrouble, ...]:
        """Releases that it should hold and cannot."""
        return tuple(failed.trouble for failed in self._failed.values() if failed.trouble is not None)

    def heard(self, headers: Mapping[str, str]) -> None:
        """Take the scheduler's word from the headers of an answer."""
        told = read_releases(headers.get(RELEASES_HEADER))
        if told is None:
            return
        self._refused = 0
        self._take(told)

    def _take(self, told: Told) -> None:
        if told != self._told:
            self._told = told
            self._failed = {number: failed for number, failed in self._failed.items() if number in told.numbers}
            self._news.set()

    def _registering(self, in_force: Told) -> None:
        """The node asks for a place in the device list.

        Args:
            in_force: the release in force. A node that is refused its place has nothing else to go by.
        """
        if self._told is not None:
            # A scheduler that has forgotten the node may have begun again, with other releases under the same numbers.
            self._doubted = {number for number in self._held if number > UNKNOWN}
            self._news.set()
        self._refused += 1
        if self._told is None or self._refused > 1:
            self._take(in_force)

    def broken(self, number: int, why: str) -> None:
        """Report that a release is unusable, although it has been loaded; serve the next one. It is not tried again
        until the scheduler has named other releases without it."""
        if number > UNKNOWN and self._failed.get(number) is None:
            self._fail(_Failed(_trouble(number, "unusable", why), 1, float("inf")))
            self._news.set()

    async def run(self) -> None:
        """Follow the scheduler, until cancelled."""
        while True:
            await self._wait()
            self._news.clear()
            try:
                await self._step()
            except TerraceError as exc:  # a cache that cannot be written, an answer that does not come
                log.warning("the releases of the scheduler cannot be followed now: %s", exc)

    async def _wait(self) -> None:
        """Return when there is news, or something is to be tried again."""
        due_s = min((failed.again_s for failed in self._failed.values()), default=float("inf"))
        wait_s = max(0.0, due_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s == float("inf") else wait_s):
                await self._news.wait()

    async def _step(self) -> None:
        if self._told is None:
            return
        await self._compare()
        told = self._told
        for number in told.numbers:
            failed = self._failed.get(number)
            if number not in self._held and (failed is None or failed.again_s <= time.monotonic()):
                await self._load(number)
            if self._told.numbers != told.numbers:
                self._news.set()
                return
            await self._arrange(told)
        if told.prunes != self._pruned:
            await self._source.prune(told.prunes)
            self._pruned = told.prunes
        await self._restart_if_needed(told)

    async def _compare(self) -> None:
        """Look at the releases in doubt."""
        while self._doubted:
            number = self._doubted.pop()
            if number in self._held and not await self._source.is_same(number):
                log.warning("the scheduler has another release under this number", extra={"release": number})
                spare, self._next_spare = self._next_spare, self._next_spare - 1
                self._node.rename(number, spare)
                self._held = [spare if each == number else each for each in self._held]
                self._served = [spare if each == number else each for each in self._served]

    async def _arrange(self, told: Told) -> None:
        """Serve what is held and named, in that order; what is not named goes once something named is there."""
        wanted = [number for number in told.numbers if number in self._held]
        usable = [number for number in wanted if number not in self._failed]
        # A release that has turned out broken is offered only if there is nothing else.
        wanted = usable or wanted or self._held
        if wanted != self._served:
            self._held, self._served = list(wanted), list(wanted)
            await self._node.arrange(wanted)
            log.info("serving releases", extra={"releases": ",".join(map(str, wanted))})
            await self._source.keep([number for number in wanted if number > UNKNOWN])

    async def _load(self, number: int) -> None:
        """Load a release next to the others, unless the scheduler takes it back meanwhile."""
        loading = asyncio.create_task(self._hold(number))
        interrupted = False
        try:
            while not loading.done():
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait({loading, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                interrupted |= self._news.is_set()
                self._news.clear()
                if self._told is not None and number not in self._told.numbers:
                    return
        finally:
            if interrupted:
                self._news.set()
            if not loading.done():
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
        error = loading.exception()
        if error is None:
            self._failed.pop(number, None)
            self._held.append(number)
        elif isinstance(error, Exception):
            self._failed_to_load(number, error)
        else:
            raise error

    async def _hold(self, number: int) -> None:
        began = time.monotonic()
        parts = await self._source.load(number, self._node.loaded)
        await self._node.hold(number, parts)
        log.info("release loaded", extra={"release": number, "seconds": round(time.monotonic() - began, 2)})

    def _failed_to_load(self, number: int, error: Exception) -> None:
        times = 1 if (before := self._failed.get(number)) is None else before.times + 1
        pause_s = backoff_s(times, first_s=_FIRST_RETRY_S, cap_s=_LONGEST_RETRY_S, chance=random.random())
        again_s = time.monotonic() + pause_s
        restart = isinstance(error, NeedsRestart)
        if isinstance(error, NeedsRestart) and not error.is_trouble:
            self._failed[number] = _Failed(None, times, again_s, restart)
            return
        if not isinstance(error, TerraceError):
            log.error("a release cannot be loaded", exc_info=error, extra={"release": number})
        trouble = _trouble(number, reason_of(error), str(error) or type(error).__name__)
        self._fail(_Failed(trouble, times, again_s, restart))

    def _fail(self, failed: _Failed) -> None:
        assert failed.trouble is not None
        number = failed.trouble.release
        before = self._failed.get(number)
        self._failed[number] = failed
        if before is None or before.trouble != failed.trouble:
            log.warning("release %d cannot be held (%s): %s", number, failed.trouble.kind, failed.trouble.detail)
            self.on_trouble()

    async def _restart_if_needed(self, told: Told) -> None:
        """Start again if that is the only way to hold any release that is named."""
        if any(number in self._held for number in told.numbers):
            return
        waiting = [failed for number in told.numbers if (failed := self._failed.get(number)) is not None]
        needed = len(waiting) == len(told.numbers) and all(failed.restart for failed in waiting)
        if needed and await self._source.may_restart(told.numbers):
            self._lifecycle.restart(f"release {told.numbers[0]} cannot be held next to the present one")


def _trouble(number: int, kind: TroubleKind, why: str) -> ReleaseTrouble:
    return ReleaseTrouble(release=number, kind=kind, detail=why[:_MOST_SAID])


def reason_of(error: Exception) -> TroubleKind:
    """Return the kind of trouble for an error while a release is loaded."""
    if isinstance(error, NoRoom | MemoryError):
        return "room"
    if isinstance(error, Unavailable | DeadlineExceeded | UpstreamError):
        return "unreachable"
    return "unusable"
