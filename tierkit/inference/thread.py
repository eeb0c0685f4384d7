"""The threads on which models run, but for short batches (`ModelRunner.infer`)."""

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

from tierkit.inference.sharing import OTHERS, ShareTurns, wait_s

__all__ = ["InferenceThread", "Runner"]


class Runner(Protocol):
    """A producer of batches; the thread's `lock` guards its queue."""

    @property
    def divisible(self) -> bool:
        """True if its model can compute on some of the cores while others compute something else."""
        ...

    @property
    def backlog_s(self) -> float:
        """Estimated time to compute all that waits and runs."""
        ...

    @property
    def running_s(self) -> float:
        """Estimated time to compute the batch that is being computed."""
        ...

    def queued_s(self, share: str) -> float:
        """Estimated time to compute the requests of one share that wait."""
        ...

    def due(self) -> float:
        """Time at which the next batch starts (`time.perf_counter`); infinity if there is none."""
        ...

    def start(self) -> float:
        """Start of the share whose request is next; see `ShareTurns`. Only with a batch that is due. Under the lock."""
        ...

    def has_several(self) -> bool:
        """True if more than one request waits. Under the lock."""
        ...

    def run_batch(self, cores: int) -> None:
        """Take the next batch from the queue, compute it on this number of cores and hand the answers to the event
        loop. Never raises."""
        ...


class InferenceThread:
    """The thread that runs the batches of one or more runners: in turns between shares, and within a share the oldest
    request first.

    Runners that share a thread share its cores: their models never compete for them. It starts with its first runner
    and ends with its last.

    With several cores there is a thread for each. A single request has all cores. If several wait, each free core takes
    its share of them as a batch, because cores that compute one batch together wait for each other at its end.

    Args:
        cores: number of cores for the models.
        turns: of the shares of the node.
    """

    def __init__(self, cores: int = 1, turns: ShareTurns | None = None) -> None:
        self.turns = turns or ShareTurns()
        self.cores = cores
        self.free = cores
        """Cores that compute nothing."""
        self.shares_core = _usable_cores() == 1
        """True if it and the event loop have one core between them."""
        self.lock = threading.Lock()
        """Guards the queues of all its runners."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Holds something when there is reason to look at the runners again. Not a condition: that one is written in
        Python, and takes twice as long to wake the thread."""
        self._runners: list[Runner] = []
        self._threads: list[threading.Thread] = []
        self._running = 0
        """Number of these threads that have not ended."""
        self._ended: asyncio.Future[None] | None = None

    @property
    def at_work(self) -> bool:
        """True if it computes a batch now."""
        return self.free < self.cores

    @property
    def work_s(self) -> float:
        """Time that all queued and running work will take, by the runners' measured rates."""
        return sum(runner.backlog_s for runner in self._runners)

    def backlog_s(self, share: str = OTHERS, *, more_s: float = 0.0, overtaken_s: float = 0.0) -> float:
        """Time until a new request can be computed, by the runners' measured rates.

        Args:
            share: of the request.
            more_s: time that the request itself takes.
            overtaken_s: work of its share that comes after it.
        """
        if len(self.turns.shares) == 1:
            return max(0.0, self.work_s - overtaken_s)
        queued_s = {each: sum(runner.queued_s(each) for runner in self._runners) for each in self.turns.shares}
        own_s = max(0.0, queued_s[share] - overtaken_s)
        running_s = sum(runner.running_s for runner in self._runners)
        return wait_s(share, queued_s, running_s=running_s, own_s=own_s, more_s=more_s)

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
            self._running = self.cores
            self._threads = [
                threading.Thread(target=self._run, args=(loop, self._ended), name="inference", daemon=True)
                for _ in range(self.cores)
            ]
            for thread in self._threads:
                thread.start()

    async def detach(self, runner: Runner) -> None:
        """Serve this runner no longer. With the last runner, returns when the thread has ended."""
        with self.lock:
            self._runners.remove(runner)
            self.wake()
            last = not self._runners
        if last and self._ended is not None:
            await self._ended
            for thread in self._threads:
                thread.join()  # it has nothing left to do
            self._ended, self._threads = None, []

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        cores = 0
        while (work := self._next(cores)) is not None:
            runner, cores = work
            runner.run_batch(cores)
        self.wake()  # the next of these threads
        with self.lock:
            self._running -= 1
            last = not self._running
        if last:
            loop.call_soon_threadsafe(ended.set_result, None)

    def _next(self, cores: int) -> tuple[Runner, int] | None:
        """Wait for a runner whose batch is due; returns it with the cores for the batch, or None when there are no
        runners left.

        Args:
            cores: to give back first.
        """
        while True:
            with self.lock:
                self.free += cores
                cores = 0
                if not self._runners:
                    return None
                due, runner = self._first()
                fits = self.free == self.cores or (self.free > 0 and runner.divisible)
                wait_s = due - time.perf_counter() if fits else math.inf
                if wait_s <= 0:
                    cores = 1 if runner.divisible and self._several_wait(runner) else self.free
                    self.free -= cores
                    if self.free:
                        self.wake()
                    return runner, cores
            if math.isinf(wait_s):
                self._news.get()
            else:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=wait_s)

    def _first(self) -> tuple[float, Runner]:
        """The runner whose batch is next, and when it is due."""
        found = [(runner.due(), runner) for runner in self._runners]
        if len(found) > 1 and len(self.turns.shares) > 1:
            now = time.perf_counter()
            if ready := [(runner.start(), due, runner) for due, runner in found if due <= now]:
                return min(ready, key=itemgetter(0, 1))[1:]
        return min(found, key=itemgetter(0))

    def _several_wait(self, first: Runner) -> bool:
        now = time.perf_counter()
        return first.has_several() or any(runner is not first and runner.due() <= now for runner in self._runners)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
