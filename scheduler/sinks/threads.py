"""Threads in which sinks import packages, check options and look names up, since that may block for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from scheduler.sinks.addresses import addresses_of

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """A bounded number of threads. Python waits for none of them when the process ends.

    Args:
        most: threads at a time; further work waits.
    """

    def __init__(self, most: int = 32) -> None:
        self._free = asyncio.Semaphore(most)
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}

    async def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Do some work in a thread, and return or raise its outcome.

        Callers with the same key share one thread and its outcome. So work that never returns occupies one thread,
        however often it is asked for. The work continues if its callers are cancelled.
        """
        if (task := self._under_way.get(key)) is None:
            task = self._under_way[key] = asyncio.create_task(self._started(work), name=f"thread for {key}")
            task.add_done_callback(partial(self._end, key))
        found: T = await asyncio.shield(task)
        return found

    def _end(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # all callers may be gone

    async def _started(self, work: Callable[[], T]) -> T:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        outcome: list[tuple[T | None, BaseException | None]] = []

        def body() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as exc:  # whatever it is, the caller gets it
                outcome.append((None, exc))
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

        async with self._free:
            threading.Thread(target=body, name="sinks", daemon=True).start()
            await done.wait()
        ((value, error),) = outcome
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        return value  # type: ignore[return-value]

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a name by the system's resolver. Raises OSError."""
        return await self.run((host, port), partial(addresses_of, host, port))
