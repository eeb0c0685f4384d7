"""The pace of the uplink: when answers and pictures may leave, by the hours, the budget and what has been spent."""

from __future__ import annotations

import asyncio
import contextlib
import time

from end_node.settings import UplinkSettings
from end_node.spooling import SpoolThread
from tierkit.errors import SpoolUnavailable

__all__ = ["Pace", "lease_s"]

_NOTE_S = 10.0
"""Between two notes of the bytes in the spool: a crash loses no more than those."""


def lease_s(bytes_per_day: int | None, *, tls: bool) -> float | None:
    return None if bytes_per_day is None else 600.0


class Pace:
    """Decides when something may leave the device.

    Args:
        limits: of the uplink.
    """

    def __init__(self, limits: UplinkSettings) -> None:
        self._limits = limits
        self._sent = self._received = 0
        self.spent_bytes = 0

    @property
    def open(self) -> bool:
        return True

    def count(self, sent: int, received: int) -> None:
        """Count bytes on the wire."""
        self._sent += sent
        self._received += received

    def tell_date(self, date: str) -> None:
        """The scheduler has sent this `Date` header."""

    def wall_of(self, taken_s: float) -> float | None:
        return None

    def answers_in_s(self, waiting: int) -> float:
        return 0.0

    def answers_sent(self) -> None:
        pass

    def pictures_in_s(self) -> float:
        return 0.0

    def picture_in_s(self, size: int) -> float:
        return 0.0

    async def load(self, spool: SpoolThread) -> None:
        pass

    async def run(self, spool: SpoolThread) -> None:
        """Note what has been spent, from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_NOTE_S)
            sent, received = self._sent, self._received
            self._sent -= sent
            self._received -= received
            with contextlib.suppress(SpoolUnavailable):
                await spool.do(lambda spool: spool.spend(sent, received))
