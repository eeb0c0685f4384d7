"""The leader's lease with its fencing token (`epoch`): one row of the database that schedulers share.

The leader holds the lease and renews it. Each of its transactions names its epoch (`Lease.fence`), and the database
refuses transactions with an epoch that has passed. So a leader that was stopped or cut off changes nothing any more
once another one has taken over. Only the clock of the database decides on expiry, so the clocks of the machines need
not agree.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Float, Row, bindparam, cast, extract, func, select, text, true, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.database import REFUSALS, plain_reason, transact
from scheduler.store.tables import SCHEMA, VERSION_TABLE, lease
from tierkit.errors import SetupError, Standby

__all__ = ["Lease"]

_log = logging.getLogger(__name__)

_TRIES = 3
"""Renewals within the time of a lease, so that one that fails costs nothing; and looks of a standby."""

_RELEASE_S = 1.0

_COUNT = update(lease).where(lease.c.epoch == bindparam("ours")).values(commits=bindparam("number"))
"""Made once: it goes with each transaction."""


class Lease:
    """The lease as one scheduler sees it. It may be held, lost, and held again, each time with a new epoch.

    Args:
        engine: the database.
        url: URL of this scheduler, given to clients that ask a standby for the leader.
        lease_s: seconds that it lasts after each renewal.
        alone: True if no other process can use this database, so that the earlier holder of the lease has ended.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        url: str,
        lease_s: float,
        alone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost = asyncio.Event()
        """Set when another scheduler has taken over, or may have."""
        self.epoch = 0
        self.leader = ""
        """URL of the leader, as far as a standby knows it."""
        self.trouble = ""
        """Reason why a standby cannot reach the database; "" if it can."""
        self._engine = engine
        self._url = url
        self._lease_s = lease_s
        self.alone = alone
        self._clock = clock
        self._number = 0
        self._renewed_at = -math.inf
        self._awaited = False
        """True if a standby waited for the lease at the latest renewal, or may have."""
        if engine.dialect.name == "sqlite":
            self._now = (func.julianday("now") - 2440587.5) * 86400.0
        else:
            self._now = cast(extract("epoch", func.clock_timestamp()), Float(53))

    @property
    def held(self) -> bool:
        """True if this scheduler may act as the leader. One that could not renew in time must not, if others wait: they
        lead by now, or soon."""
        return not self.lost.is_set() and (not self._awaited or self._clock() < self._renewed_at + self._lease_s)

    async def acquire(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until this scheduler holds the lease.

        Args:
            on_wait: called when another one has it.

        Raises:
            SetupError: a newer Terrace has changed the tables meanwhile.
        """
        said = ""
        while True:
            try:
                async with asyncio.timeout(max(1.0, self._lease_s)):
                    left_s = await self._try()
            except REFUSALS as exc:
                left_s, self.trouble = self._lease_s, plain_reason(exc)
                news = f"standby: the database cannot be reached: {self.trouble}"
            else:
                self.trouble = ""
                if left_s <= 0.0:
                    return
                news = f"standby: {self.leader} leads"
            on_wait()
            if news != said:
                said = news
                _log.info("%s", news)
            await asyncio.sleep(min(left_s, self._lease_s / _TRIES))

    async def _try(self) -> float:
        """Take the lease if it is free. Returns the seconds for which another one has it still; 0 for success."""
        began = self._clock()

        async def take(connection: AsyncConnection) -> tuple[int, float, str]:
            free = true() if self.alone else lease.c.expires_at <= self._now
            taken = {
                "epoch": lease.c.epoch + 1,
                "url": self._url,
                "expires_at": self._now + self._lease_s,
                "awaited_until": 0.0,
                "commits": 0,
            }
            row = (await connection.execute(update(lease).where(free).values(taken).returning(lease.c.epoch))).first()
            if row is None:
                waits = update(lease).values(awaited_until=self._now + self._lease_s)
                other = (await connection.execute(waits.returning(lease.c.expires_at - self._now, lease.c.url))).one()
                return 0, max(0.001, float(other[0])), other[1]
            found = await connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
            if found != SCHEMA:
                raise SetupError(f"a newer Terrace has changed the database (schema {found}): update this one")
            return row.epoch, 0.0, self._url

        epoch, left_s, leader = await transact(self._engine, take)
        if left_s:
            self.leader = leader
            return left_s
        self.lost.clear()
        self.epoch, self._number, self._renewed_at, self._awaited = epoch, 0, began, not self.alone
        return 0.0

    async def keep(self) -> None:
        """Renew the lease until it is lost, or this is cancelled.

        It counts as lost where it has run out unrenewed while another scheduler waited: what this one would decide from
        then on, such as which nodes are dead, does not count.
        """
        trouble = ""
        while not self.lost.is_set():
            await asyncio.sleep(self._lease_s / _TRIES)
            began = self._clock()
            try:
                async with asyncio.timeout(self._lease_s / _TRIES):
                    row = await transact(self._engine, self._renew)
            except REFUSALS as exc:
                if not trouble:
                    trouble = plain_reason(exc)
                    _log.error("the lease cannot be renewed: %s", trouble)
                if not self.held:
                    self.lost.set()
                continue
            trouble = ""
            if row is None:
                self.lost.set()
            else:
                self._renewed_at, self._awaited = began, bool(row[0])

    async def _renew(self, connection: AsyncConnection) -> Row[Any] | None:
        """Renew the lease. Returns a row with True if another scheduler waits; None if another one leads."""
        own = update(lease).where(lease.c.epoch == self.epoch)
        renewed = own.values(expires_at=self._now + self._lease_s)
        return (await connection.execute(renewed.returning(lease.c.awaited_until > self._now))).first()

    async def fence(self, connection: AsyncConnection) -> int:
        """Make a transaction one of this epoch: it counts if no other scheduler has taken over, and none can until it
        has ended. Returns its number.

        Raises:
            Standby: another one has.
        """
        self._number += 1
        if not (await connection.execute(_COUNT, {"ours": self.epoch, "number": self._number})).rowcount:
            self.lost.set()
            raise Standby("another scheduler leads now")
        return self._number

    async def latest(self) -> int:
        """Number of the latest transaction of this epoch in the database.

        Raises:
            Standby: another scheduler leads now.
        """
        async with self._engine.connect() as connection:
            row = (await connection.execute(select(lease.c.epoch, lease.c.commits))).one()
        if row.epoch != self.epoch:
            self.lost.set()
            raise Standby("another scheduler leads now")
        return int(row.commits)

    async def release(self) -> None:
        """Let another scheduler lead at once; without success it does when the lease runs out."""
        given_back = update(lease).where(lease.c.epoch == self.epoch).values(expires_at=0.0)
        try:
            async with asyncio.timeout(_RELEASE_S):
                await transact(self._engine, lambda connection: connection.execute(given_back))
        except REFUSALS as exc:
            _log.warning("the lease cannot be given back: %s", plain_reason(exc))
