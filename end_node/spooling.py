"""The spool in a thread: SQLite waits for the disk, and the event loop must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from end_node.spool import Spool

__all__ = ["SpoolThread"]

T = TypeVar("T")


class SpoolThread:
    """Calls of the spool, one after the other."""

    def __init__(self, spool: Spool) -> None:
        self.id = spool.id
        """Id of the spool when it was opened."""
        self._spool = spool
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spool")

    async def do(self, call: Callable[[Spool], T]) -> T:
        """The result of a call. A call that has begun is finished even if the caller is cancelled.

        Raises:
            SpoolUnavailable: the disk is full or broken.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, self._spool)

    async def close(self) -> None:
        """Close the spool when all calls are done."""
        await self.do(Spool.close)
        self._pool.shutdown()
