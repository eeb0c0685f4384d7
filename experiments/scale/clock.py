"""An event loop on virtual time: when nothing is ready, the clock jumps to the next moment at which something happens.

Coroutines, tasks, events and timeouts of asyncio run on it as they are; there is no I/O. What happens at one moment
happens in the order in which it was asked for, so a run is the same whenever it is repeated.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

__all__ = ["VirtualLoop"]

T = TypeVar("T")

_SLOT_S = 0.001
"""Timers are kept by the millisecond in which they are due, and sorted when its turn comes: a heap of the hundred
thousand that a large fleet has would cost as much as all that they call."""
_MOST_CANCELLED = 10_000
"""Timers that were cancelled are dropped when so many, and half of all, are."""

_Timer = tuple[float, int, asyncio.TimerHandle | None, Callable[..., Any], tuple[Any, ...]]
"""When, its number, what can cancel it, and what it calls."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Use `run`, then `time` and `at` from within."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._due: list[_Timer] = []
        """Those of the present slot and before, sorted."""
        self._at = 0
        """How many of them have had their turn."""
        self._slot = 0
        self._slots: dict[int, list[_Timer]] = {}
        """Those of later slots, as they came."""
        self._later: list[int] = []
        """A heap of the later slots."""
        self._number = itertools.count()
        self._cancelled, self._most_cancelled = 0, _MOST_CANCELLED
        self._failure: BaseException | None = None

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def at(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """As `call_at`, for what is never cancelled: a simulation has millions of these."""
        self._keep((when, next(self._number), None, callback, args))

    async def sleep_until(self, when: float) -> None:
        """Wait until then; not at all if it is over."""
        if when > self._now:
            await self.until(when)

    def until(self, when: float) -> asyncio.Future[None]:
        """A future that is done then, unless it is ended before."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.at(when, _finish, future)
        return future

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until `main` ends.

        Raises:
            RuntimeError: nothing can ever happen any more, and `main` has not ended.
        """
        asyncio._set_running_loop(self)
        try:
            task: asyncio.Task[T] = asyncio.Task(main, loop=self)
            while True:
                self._drain()
                if self._failure is not None:
                    raise self._failure
                if task.done():
                    return task.result()
                self._advance()
        finally:
            asyncio._set_running_loop(None)

    def _drain(self) -> None:
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        if self._at == len(self._due):
            self._open()
        now = self._now = max(self._now, self._due[self._at][0])
        while self._at < len(self._due) and self._due[self._at][0] <= now:
            _, _, timer, callback, args = self._due[self._at]
            self._at += 1
            if timer is None:
                callback(*args)
            elif timer.cancelled():
                self._cancelled -= 1
            else:
                timer._scheduled = False  # type: ignore[attr-defined]
                timer._run()

    def _open(self) -> None:
        """Go on to the next slot."""
        if not self._later:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self._slot = heapq.heappop(self._later)
        self._due, self._at = self._slots.pop(self._slot), 0
        self._due.sort()

    def _keep(self, timer: _Timer) -> None:
        slot = int(timer[0] / _SLOT_S)
        if slot <= self._slot:
            insort(self._due, timer, lo=self._at)
        elif (others := self._slots.get(slot)) is not None:
            others.append(timer)
        else:
            self._slots[slot] = [timer]
            heapq.heappush(self._later, slot)

    # --- what asyncio asks of a loop ------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # any callback with any arguments
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        self._keep((when, next(self._number), timer, _nothing, ()))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > self._most_cancelled:
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        self._slots = {slot: wanted for slot, timers in self._slots.items() if (wanted := _not_cancelled(timers))}
        self._later = sorted(self._slots)
        self._due, self._at = _not_cancelled(self._due[self._at :]), 0
        self._cancelled = 0
        self._most_cancelled = max(_MOST_CANCELLED, len(self._due) + sum(map(len, self._slots.values())))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody awaited has failed: a simulation must not go on as if nothing had happened."""
        self._failure = context.get("exception") or RuntimeError(context["message"])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _not_cancelled(timers: list[_Timer]) -> list[_Timer]:
    return [entry for entry in timers if entry[2] is None or not entry[2].cancelled()]


def _nothing() -> None:
    """Stands in a timer's place."""
