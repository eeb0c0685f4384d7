"""The thread on which models run, but for short batches (`ModelRunner.submit`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
from operator import itemgetter
from typing import Protocol

__all__ = ["InferenceThread", "Runner"]


class Runner(Protocol):
    """What has batches to run; its queue is guarded by the thread's `lock`."""

    @property
    def backlog_s(self) -> float:
        """Estimated time to compute all that waits and runs."""
        ...

    def due(self) -> float:
        """When the next batch shall start (`time.perf_counter`); infinity if there is none."""
        ...

    def run_batch(self) -> None:
        """Take the next batch from the queue, compute it and hand the answers to the event loop. Never raises."""
        ...


class InferenceThread:
    """The thread that runs the batches of one or more runners, oldest request first.

    Runners that share a thread share its core: their models never compete for it. It starts with its first runner
    and ends with its last.
    """

    def __init__(self) -> None:
        self.shares_core = _usable_cores() == 1
        """True if it and the event loop have one core between them."""
        self.lock = threading.Lock()
        """Guards the queues of all its runners."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Holds something when there is reason to look at the runners again. Not a condition: that one is written in
        Python, and takes twice as long to wake the thread."""
        self._runners: list[Runner] = []
        self.at_work = False
        """True if it computes a batch now."""
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None

    def backlog_s(self) -> float:
        """Time that all queued and running work will take, by the runners' measured rates."""
        return sum(runner.backlog_s for runner in self._runners)

    def wake(self) -> None:
        """A runner has something new. Call when it can be seen; a second call for the same costs nothing."""
        if self._news.empty():
            self._news.put(None)

    def attach(self, runner: Runner) -> None:
        """Serve this runner from now on. Call on the event loop."""
        with self.lock:
            self._runners.append(runner)
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            self._thread = threading.Thread(target=self._run, args=(loop, self._ended), name="inference", daemon=True)
            self._thread.start()

    async def detach(self, runner: Runner) -> None:
        """Serve this runner no longer. With the last runner, returns when the thread has ended."""
        with self.lock:
            self._runners.remove(runner)
            self.wake()
            last = not self._runners
        if last and self._ended is not None and self._thread is not None:
            await self._ended
            self._thread.join()  # it has nothing left to do
            self._ended = self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        while (runner := self._next()) is not None:
            runner.run_batch()
        loop.call_soon_threadsafe(ended.set_result, None)

    def _next(self) -> Runner | None:
        """Wait for a runner whose batch is due; None when there are no runners left."""
        while True:
            with self.lock:
                self.at_work = False
                if not self._runners:
                    return None
                due, runner = min(((runner.due(), runner) for runner in self._runners), key=itemgetter(0))
                wait_s = due - time.perf_counter()
                if wait_s <= 0:
                    self.at_work = True
                    return runner
            if math.isinf(wait_s):
                self._news.get()
            else:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=wait_s)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
