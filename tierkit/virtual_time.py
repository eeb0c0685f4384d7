"""An event loop on virtual time: when nothing is ready, the clock jumps to the next moment at which something happens.

Coroutines, tasks, events and timeouts of asyncio run on it as they are; there is no I/O. What happens at one moment
happens in the order in which it was asked for, so a run is the same whenever it is repeated.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

__all__ = ["VirtualLoop"]

T = TypeVar("T")

_MOST_CANCELLED = 10_000
"""Cancelled timers are dropped when there are more than this, and than half of all."""

_Timer = tuple[float, int, asyncio.TimerHandle | None, Callable[..., Any], tuple[Any, ...]]
"""Time, number, handle that can cancel it, callback and its arguments."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Use `run`, then `time` and `at` from within."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._due: list[_Timer] = []
        """A heap."""
        self._number = itertools.count()
        self._cancelled, self._most_cancelled = 0, _MOST_CANCELLED
        self._failure: BaseException | None = None

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def at(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule a call that is never cancelled. It is cheaper than `call_at`, because a simulation makes millions of
        these."""
        heapq.heappush(self._due, (when, next(self._number), None, callback, args))

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
        """Advance to the next moment, and call all that is due then."""
        if not self._due:
            raise RuntimeError("every task waits, and no timer is left")
        now = self._now = max(self._now, self._due[0][0])
        while self._due and self._due[0][0] <= now:
            _, _, timer, callback, args = heapq.heappop(self._due)
            if timer is None:
                callback(*args)
            elif timer.cancelled():
                self._cancelled -= 1
            else:
                timer._scheduled = False  # type: ignore[attr-defined]
                timer._run()

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
        heapq.heappush(self._due, (when, next(self._number), timer, _nothing, ()))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > self._most_cancelled:
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        self._due = [entry for entry in self._due if entry[2] is None or not entry[2].cancelled()]
        heapq.heapify(self._due)
        self._cancelled, self._most_cancelled = 0, max(_MOST_CANCELLED, len(self._due))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task that nothing awaits has failed: the simulation ends with its error."""
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


def _nothing() -> None:
    """Placeholder for the callback of a timer, which holds its own."""
