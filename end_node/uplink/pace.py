"""The pace of the uplink: when answers and pictures may leave, by the hours, the budget and what has been spent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from end_node.settings import UplinkSettings
from end_node.spool import Spool
from end_node.spooling import SpoolThread
from end_node.uplink.budget import DailyBudget
from end_node.uplink.clock import DeviceClock, system_synchronised
from end_node.uplink.hours import opens_in_s, time_of_day
from tierkit.elapsed import since_boot
from tierkit.errors import SpoolUnavailable
from tierkit.pacing import TokenBucket

__all__ = ["Pace"]

_NOTE_S = 10.0
"""Seconds between two notes in the spool of the bytes spent: a crash forgets no more than these."""
_LINGER_S = 0.2
"""Without a budget, answers that come within this time leave together."""
_BATCHES_PER_S, _BATCHES_AT_ONCE = 0.5, 5
"""Without a budget: batches of a device that always has answers, and of one that rarely has some."""
_FULL_BATCH = 500


class Pace:
    """Decides when something may leave the device, from what has left it.

    Args:
        limits: of the uplink.
        tls: True if the scheduler is reached by https.
        clock: seconds of elapsed time, suspension of the machine included.
    """

    def __init__(self, limits: UplinkSettings, *, tls: bool, clock: Callable[[], float] = since_boot) -> None:
        self._limits = limits
        self._clock = clock
        self._wall = DeviceClock()
        self._budget = DailyBudget(limits.bytes_per_day, tls=tls, hours=limits.hours is not None, began=clock())
        self._sent = self._received = 0
        """Bytes that the spool has not noted yet."""
        self._last_batch = clock()
        self._batches = TokenBucket(per_s=_BATCHES_PER_S, burst=_BATCHES_AT_ONCE)
        self.counted_bytes = 0
        """Bytes since the node started, both directions."""

    @property
    def open(self) -> bool:
        """True if pictures may leave at this time of day."""
        return self.opens_in_s() == 0

    @property
    def spent_bytes(self) -> int:
        """Bytes of the last 24 hours, both directions."""
        return self._budget.spent(self._clock())

    def count(self, sent: int, received: int) -> None:
        """Count bytes on the wire."""
        self._sent += sent
        self._received += received
        self.counted_bytes += sent + received
        self._budget.spend(self._clock(), sent + received)

    def count_picture(self, size: int) -> None:
        """Mark a number of the counted bytes as used for a picture and its answer."""
        self._budget.spend(self._clock(), 0, pictures=size)

    def tell_date(self, date: str) -> None:
        """Take the time from the `Date` header of a scheduler."""
        if date:
            self._wall.heard(date, self._clock())

    @property
    def wall(self) -> float | None:
        """Seconds since 1970; None if this device does not know the time."""
        return self._wall.wall(self._clock(), time.time() if system_synchronised() else None)

    def wall_of(self, age_s: float) -> float | None:
        """Return the time of an event that happened this long ago, in seconds since 1970."""
        return None if (wall := self.wall) is None else wall - age_s

    def answers_in_s(self, waiting: int) -> float:
        """Seconds until the next batch of answers; 0 if it may go now."""
        if self._limits.bytes_per_day is None:
            now = self._clock()
            rest_s = 0.0 if waiting >= _FULL_BATCH else self._batches.wait_s(now)
            return max(0.0, _LINGER_S - (now - self._last_batch), rest_s)
        return self._budget.answers_in_s(waiting, self._clock() - self._last_batch)

    @property
    def batch_s(self) -> float:
        """Longest time between two tries to deliver a batch that is refused."""
        return 5.0 if self._limits.bytes_per_day is None else 300.0

    def answers_sent(self) -> None:
        """A batch of answers has gone."""
        self._last_batch = self._clock()
        self._batches.take(self._last_batch)

    def opens_in_s(self) -> float:
        """Seconds until pictures may leave; 0 if they may now."""
        return 0.0 if self._limits.hours is None else opens_in_s(self._limits.hours, time_of_day(self.wall))

    def picture_in_s(self, size: int) -> float:
        """Seconds until the budget has room for a picture, `size` bytes in both directions; 0 if it has now."""
        return self._budget.picture_in_s(self._clock(), size)

    async def load(self, spool: SpoolThread) -> None:
        """Take over what was spent before a restart."""
        self._budget.load(self._clock(), await spool.do(Spool.spent))

    async def run(self, spool: SpoolThread) -> None:
        """Note what is spent, and label pictures that were taken before the time was known, until cancelled."""
        while True:
            await asyncio.sleep(_NOTE_S)
            with contextlib.suppress(SpoolUnavailable):  # tried again next time
                await self.note(spool)
                if (wall := self.wall) is not None:
                    while await spool.do(lambda spool, wall=wall: spool.label(wall)):  # type: ignore[misc]
                        pass

    async def note(self, spool: SpoolThread) -> None:
        """Note the bytes spent in the spool."""
        sent, received = self._sent, self._received
        if sent or received:
            await spool.do(lambda spool: spool.spend(sent, received))
            self._sent -= sent
            self._received -= received
