"""Group commit: one task that writes all results that have queued in one transaction, so that durability does not
limit throughput.

While a commit is on its way to the disk, the next results queue; they share the next commit. A result is announced
(`on_commit`) only when it is durable. Results stay in the queue while the database does not accept them (locked, disk
full): they are tried again until it does, the queue fills up and holds back the dispatcher, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.database import plain_reason
from scheduler.store.tables import results
from tierkit.errors import Unavailable
from tierkit.protocol import TaskEvent

__all__ = ["GroupCommit", "Result"]

_log = logging.getLogger(__name__)

_MAX_GROUP = 500
_MAX_QUEUED = 2000
_LINGER_S = 0.01
"""Least time between two commits: each costs about a millisecond of the processor whatever it holds."""
_RETRY_S = (0.05, 2.0)
"""First and longest wait before the next try when the database refuses a commit."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one stage of one task, on its way into the database."""

    job_id: str
    task: int
    stage: str
    """coarse | final"""
    kind: str
    """coarse | fine | fallback | failed"""
    ms: float
    """From the task's first dispatch to the arrival of this answer."""
    request_id: str
    event: TaskEvent
    payload: str
    """`event` as it came over the wire."""


class GroupCommit:
    """The only writer of the database. `run()` must be running for anything to be written.

    Args:
        engine: the database.
        next_seq: the first number for `results.seq`: one more than the database holds.
        on_commit: called with each group of results once it is durable, in order of their numbers.
    """

    def __init__(
        self, engine: AsyncEngine, *, next_seq: int, on_commit: Callable[[Sequence[tuple[int, Result]]], None]
    ) -> None:
        self._engine = engine
        self._next_seq = next_seq
        self._on_commit = on_commit
        self._queue: asyncio.Queue[Result | asyncio.Future[None]] = asyncio.Queue(_MAX_QUEUED)
        self._write_lock = asyncio.Lock()
        self.refused: str | None = None
        """Why the database does not accept results at the moment."""

    async def put(self, result: Result) -> None:
        """Queue a result; waits while the queue is full."""
        await self._queue.put(result)

    async def flush(self) -> None:
        """Wait until all that was queued before is durable and announced."""
        marker = asyncio.get_running_loop().create_future()
        await self._queue.put(marker)
        await marker

    async def execute(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run `work` in a transaction of its own, between two group commits.

        Raises:
            Unavailable: the database refuses it; nothing was written.
        """
        try:
            async with self._write_lock, self._engine.begin() as connection:
                return await work(connection)
        except IntegrityError:
            raise
        except SQLAlchemyError as exc:
            raise Unavailable(f"the database does not accept writes now: {plain_reason(exc)}") from exc

    async def run(self) -> None:
        """Commit groups until cancelled."""
        loop = asyncio.get_running_loop()
        last = 0.0
        while True:
            first = await self._queue.get()
            await asyncio.sleep(max(0.0, last + _LINGER_S - loop.time()))
            items = [first]
            while len(items) < _MAX_GROUP and not self._queue.empty():
                items.append(self._queue.get_nowait())
            group = [item for item in items if isinstance(item, Result)]
            if group:
                await self._commit(group)
            last = loop.time()
            for item in items:
                if isinstance(item, asyncio.Future) and not item.done():
                    item.set_result(None)

    async def _commit(self, group: Sequence[Result]) -> None:
        numbered = list(enumerate(group, start=self._next_seq))
        rows = [
            {
                "job_id": result.job_id,
                "task": result.task,
                "stage": result.stage,
                "seq": seq,
                "kind": result.kind,
                "ms": result.ms,
                "request_id": result.request_id,
                "payload": result.payload,
            }
            for seq, result in numbered
        ]
        wait_s, longest_s = _RETRY_S
        while True:
            try:
                async with self._write_lock, self._engine.begin() as connection:
                    await connection.execute(insert(results), rows)
                break
            except IntegrityError:
                raise  # a second answer to the same question: a bug, and no reason to go on
            except SQLAlchemyError as exc:
                if self.refused is None:
                    _log.error("the database does not accept results, they wait: %s", plain_reason(exc))
                self.refused = plain_reason(exc)
                await asyncio.sleep(wait_s)
                wait_s = min(longest_s, 2 * wait_s)
        if self.refused is not None:
            _log.info("the database accepts results again")
            self.refused = None
        self._next_seq += len(group)
        self._on_commit(numbered)
