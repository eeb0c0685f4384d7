"""Waiting to within some ten microseconds.

asyncio rounds its timers up to whole milliseconds (so does uvloop), as long as a fast server needs for its answer; a
schedule kept with them would add its own error to every latency. Linux has timers that are files; an event loop can
wait for a file. Elsewhere the loop's own timer serves. A thread that sleeps wakes a tenth of a millisecond late, and
more on a machine that saves energy: what is left of a wait is spent awake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

__all__ = ["PreciseTimer", "precise_timer", "sleep_precisely", "wait_until"]

_CLOCK_MONOTONIC = 1  # the clock behind time.perf_counter on Linux
_TFD_TIMER_ABSTIME = 1
_EARLIEST_NS = 1  # zero would disarm it

_LOOP_S = 0.002
"""An event loop's own timers are good to a millisecond or two."""

_AWAKE_S = 0.0003
"""Seconds before its end at which a thread's sleep stops; waking up takes a third of this or less."""

_AWAKE_ON_LOOP_S = 0.00015
"""Seconds before its end at which a wait on an event loop stops; the loop is blocked for this long."""


class PreciseTimer(Protocol):
    """One timer, armed for one moment at a time."""

    def arm(self, at: float) -> None:
        """Call back at this moment (`time.perf_counter` seconds), at once if it has passed."""
        ...


@contextlib.contextmanager
def precise_timer(callback: Callable[[], None]) -> Iterator[PreciseTimer]:
    """A timer of the running event loop that calls `callback`; it is removed on exit."""
    loop = asyncio.get_running_loop()
    timer = _FileTimer(loop, callback) if sys.platform == "linux" else _LoopTimer(loop, callback)
    try:
        yield timer
    finally:
        timer.close()


async def wait_until(when: float) -> None:
    """Return at this moment (`time.perf_counter` seconds), or as soon as others have had their turn if it has passed.

    The event loop stands still for the last 0.15 ms.
    """
    await asyncio.sleep(max(0.0, when - time.perf_counter() - _LOOP_S))
    if when - time.perf_counter() > _AWAKE_ON_LOOP_S:  # less is not worth a timer, which takes about as long to make
        due = asyncio.Event()
        with precise_timer(due.set) as timer:
            timer.arm(when - _AWAKE_ON_LOOP_S)
            await due.wait()
    while time.perf_counter() < when:
        pass


def sleep_precisely(seconds: float) -> None:
    """`time.sleep` for threads whose lateness would be taken for something else."""
    until = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _AWAKE_S))
    while time.perf_counter() < until:
        time.sleep(0)  # other threads may run


class _FileTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._file, self._fire)

    def arm(self, at: float) -> None:
        seconds, nanoseconds = divmod(max(_EARLIEST_NS, round(at * 1e9)), 1_000_000_000)
        value = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)  # struct itimerspec: interval, then expiry
        if self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, value, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):  # armed anew since it expired
            os.read(self._file, 8)
            self._callback()


class _LoopTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0.0, at - time.perf_counter()), self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
