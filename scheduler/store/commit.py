"""Group commit: results become durable, exactly once, in one transaction for all that have queued.

While a commit is on its way to the disk, the next results queue; they share the next commit. A result is announced
(`on_commit`) only when it is durable. Results stay in the queue while the database does not accept them (locked, disk
full): they are tried again until it does, the queue fills up and holds back the dispatcher, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Executable, delete, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.core.job import Answer, AttemptReport
from scheduler.metrics import COMMITS
from scheduler.store.database import REFUSALS, may_be_written, plain_reason, transact
from scheduler.store.lease import Lease
from scheduler.store.outbox import Outbox
from scheduler.store.tables import attempts, results
from tierkit.errors import DataError, Standby, Unavailable
from tierkit.pacing import backoff_s

__all__ = ["GroupCommit", "Withdrawn"]

_log = logging.getLogger(__name__)

_MAX_GROUP = 500
_CONGESTED = 1000
_LINGER_S = 0.05
"""Least time between two commits while more answers are expected: each commit costs some milliseconds of the processor,
even if it holds little. An answer that comes after a pause is not held up."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An answer to remove from the database."""

    answer: Answer


Item = Answer | Withdrawn | AttemptReport | Executable | tuple[Executable, ...]
"""Statements of a tuple are in one transaction."""


@dataclass(slots=True)
class _Write:
    """A transaction that may be tried several times, and is written once."""

    undo: Sequence[Executable] = ()
    """Statements that undo it, if no caller waits for it any more."""
    number: int = 0
    """Number of the latest try."""
    done: bool = False


class GroupCommit:
    """The only writer of the database, while this scheduler leads. `run()` must be running for anything to be written.

    Args:
        engine: the database.
        lease: that this scheduler holds.
        next_seq: the first number for `results.seq`: one more than the database holds.
    """

    def __init__(self, engine: AsyncEngine, lease: Lease, *, next_seq: int) -> None:
        self.on_commit: Callable[[Sequence[tuple[int, Answer]]], None] = lambda group: None
        """Called with each group of answers once it is durable, in order of their numbers."""
        self.on_withdrawal: Callable[[Answer], None] = lambda answer: None
        """Called with each answer that is durably withdrawn, after the group that it may have been in."""
        self.outbox = Outbox()
        """Makes the rows of events. Writers add them to their transactions."""
        self.on_write: Callable[[], None] = lambda: None
        """Called after each transaction."""
        self.expects_more: Callable[[], bool] = lambda: False
        """True while answers are expected that can share the next commit."""
        self._engine = engine
        self._lease = lease
        self._next_seq = next_seq
        self._queue: asyncio.Queue[Item | asyncio.Future[None]] = asyncio.Queue()
        self._hurry = asyncio.Event()
        """Set when the next commit should not wait for more answers."""
        self._write_lock = asyncio.Lock()
        self._doubtful: _Write | None = None
        """The latest transaction, if its connection broke before the database said whether it is written."""
        self._undo: list[Executable] = []
        """Statements to run with the next transaction."""
        self.refused: str | None = None
        """Reason why the database does not accept results at the moment."""
        self._failing = False
        """True if the last `check` of an idle database failed; it is logged when that changes."""
        self._checking: asyncio.Task[None] | None = None

    @property
    def congested(self) -> bool:
        """Backpressure: True if too much waits to be written to begin new work."""
        return self._queue.qsize() > _CONGESTED

    def put(self, item: Item) -> None:
        """Queue a result, an attempt, or statements that change what they belong to."""
        self._queue.put_nowait(item)

    async def flush(self) -> None:
        """Wait until all that was queued before is durable and announced: for ever, once another scheduler leads."""
        marker = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(marker)
        if not self.expects_more():
            self._hurry.set()
        await marker

    async def execute(
        self, work: Callable[[AsyncConnection], Awaitable[object]], *, undo: Sequence[Executable] = ()
    ) -> None:
        """Run `work` in a separate transaction, between two group commits.

        Args:
            undo: statements that undo it. They are written before anything else if the connection breaks or the caller
                is cancelled, and it is unknown whether `work` was written.

        Raises:
            Standby: another scheduler leads now; nothing was written.
            Unavailable: the database refuses it; nothing was written, or it is taken back.
        """
        try:
            await self._transact(work, _Write(undo=undo))
        except IntegrityError:
            raise
        except REFUSALS as exc:
            _log.error("the database does not accept a write: %s", plain_reason(exc))
            raise Unavailable(f"the database does not accept writes now: {plain_reason(exc)}") from exc

    async def _transact(self, work: Callable[[AsyncConnection], Awaitable[object]], write: _Write) -> None:
        """Write `work`, unless an earlier try of the same has.

        Raises:
            Standby: another scheduler leads now.
            One of REFUSALS: not now.
        """

        async def fenced(connection: AsyncConnection) -> None:
            write.number = await self._lease.fence(connection)
            for statement in self._undo:
                await connection.execute(statement)
            await work(connection)

        async with self._write_lock:
            if (doubtful := self._doubtful) is not None:
                doubtful.done = await self._lease.latest() == doubtful.number
                self._doubtful = None
                if doubtful.done and doubtful is not write:
                    self._undo += doubtful.undo
            if write.done:
                self.on_write()
                return
            write.number = 0
            try:
                await transact(self._engine, fenced)
            except asyncio.CancelledError:
                self._doubtful = write
                raise
            except REFUSALS as exc:
                self._doubtful = write if may_be_written(exc) else None
                raise
            self._undo.clear()
            self.on_write()

    async def check(self) -> None:
        """Check that the database accepts writes, even if nothing has been written for a long time.

        Raises:
            DataError: results wait because it refuses them, or it would refuse any commit: its file is gone.
        """
        if self.refused is not None:
            raise DataError(f"the database does not accept results: {self.refused}")
        # One at a time, and shielded: what has begun with a connection is completed, however soon the caller gives up.
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="check of the database")
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        try:
            # A commit, though of nothing: that is when the file is looked at. No lock, so no writer is waited for.
            await transact(self._engine, lambda connection: connection.execute(select(1)))
        except REFUSALS as exc:
            if not self._failing:
                _log.error("the database fails its check: %s", plain_reason(exc))
            self._failing = True
            raise DataError(f"the database would not accept results: {plain_reason(exc)}") from exc
        if self._failing:
            _log.info("the database passes its check again")
        self._failing = False

    async def run(self) -> None:
        """Commit groups until cancelled, or another scheduler leads."""
        loop = asyncio.get_running_loop()
        last = 0.0
        while True:
            first = await self._queue.get()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(last + _LINGER_S):
                    await self._hurry.wait()
            self._hurry.clear()
            items = [first]
            # A final answer is followed by the row of the attempt that brought it: both or none.
            # What was withdrawn goes after all that is in its group, and what replaces it comes with the next one.
            while (
                not self._queue.empty()
                and (len(items) < _MAX_GROUP or isinstance(items[-1], Answer))
                and not isinstance(items[-1], Withdrawn)
            ):
                items.append(self._queue.get_nowait())
            try:
                await self._commit([item for item in items if not isinstance(item, asyncio.Future)])
            except Standby:
                _log.warning("what waits to be written is left to the scheduler that leads now")
                return
            last = loop.time()
            for item in items:
                if isinstance(item, asyncio.Future) and not item.done():
                    item.set_result(None)

    async def _commit(self, items: Sequence[Item]) -> None:
        if not items:
            return
        group = [item for item in items if isinstance(item, Answer)]
        ended = [msgspec.to_builtins(item) for item in items if isinstance(item, AttemptReport)]
        withdrawn = [item.answer for item in items if isinstance(item, Withdrawn)]
        changes: list[Executable] = []
        for item in items:
            if isinstance(item, tuple):
                changes += item
            elif not isinstance(item, Answer | AttemptReport | Withdrawn):
                changes.append(item)
        changes += map(_withdrawal, withdrawn)
        numbered = list(enumerate(group, start=self._next_seq))
        rows = [_row(seq, answer) for seq, answer in numbered]

        async def work(connection: AsyncConnection) -> None:
            if rows:
                await connection.execute(insert(results), rows)
            if ended:
                await connection.execute(insert(attempts), ended)
            for change in changes:
                await connection.execute(change)

        failures, write = 0, _Write()
        while True:
            try:
                await self._transact(work, write)
                break
            except IntegrityError:
                raise  # a second answer to the same question: a bug, and no reason to go on
            except REFUSALS as exc:
                if self.refused is None:
                    _log.error("the database does not accept results, they wait: %s", plain_reason(exc))
                self.refused = plain_reason(exc)
                failures += 1
                await asyncio.sleep(backoff_s(failures, first_s=0.05, cap_s=2.0))
        if self.refused is not None:
            _log.info("the database accepts results again")
            self.refused = None
        COMMITS.inc()
        self._next_seq += len(group)
        self.on_commit(numbered)
        for answer in withdrawn:
            self.on_withdrawal(answer)


def _withdrawal(answer: Answer) -> Executable:
    return delete(results).where(
        results.c.job_id == answer.job_id, results.c.task == answer.task, results.c.stage == answer.stage
    )


def _row(seq: int, answer: Answer) -> dict[str, object]:
    return {
        "job_id": answer.job_id,
        "task": answer.task,
        "stage": answer.stage,
        "seq": seq,
        "kind": answer.kind,
        "ms": answer.ms,
        "request_id": answer.request_id,
        "payload": answer.line,
        "site": answer.site,
    }
