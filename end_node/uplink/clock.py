"""The wall clock of a device, as far as it can be trusted. Many devices start with a wrong one."""

from __future__ import annotations

import ctypes
from email.utils import parsedate_to_datetime

__all__ = ["DeviceClock", "system_synchronised"]

_TIME_ERROR = 5
"""State of an unsynchronised clock, in the answer of adjtimex."""
_EARLIEST, _LATEST = 1577836800.0, 4102444800.0
"""The years from 2020 to 2099: a date outside them is nonsense."""


class DeviceClock:
    """Offset between the wall clock and elapsed time.

    The last date that the scheduler sent counts, so that a jump of the system clock changes nothing. Before there is
    one, the system clock counts while it is synchronised.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def heard(self, date: str, now: float) -> None:
        """Take over the `Date` header of a scheduler; nonsense is ignored.

        Args:
            now: elapsed time when the header came.
        """
        try:
            wall = parsedate_to_datetime(date).timestamp() + 0.5  # it was cut to a second
        except (ValueError, TypeError, OverflowError):
            return
        if _EARLIEST <= wall < _LATEST:
            self._offset = wall - now

    def wall(self, now: float, system: float | None) -> float | None:
        """Return the wall clock in seconds since 1970; None if nothing tells it.

        Args:
            now: elapsed time.
            system: the system clock; None while it is not synchronised.
        """
        return system if self._offset is None else now + self._offset


def system_synchronised() -> bool:
    """Return True if the kernel knows that a time service has set the system clock."""
    try:
        # A zeroed `struct timex` only asks. It is 208 bytes long on 64-bit Linux.
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return False
    return 0 <= state != _TIME_ERROR
