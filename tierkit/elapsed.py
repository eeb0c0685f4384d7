"""Elapsed time across restarts, independent of changes to the wall clock.

It counts the time for which this machine has run, suspension included, as the kernel counts it. Setting a wrong clock
right does not change it. A service notes it from time to time, and continues from the note when it starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Elapsed", "Kept", "boot_id", "continued", "since_boot"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A note of elapsed time, and of the start of the machine on which it was written."""

    elapsed: float
    boot: str
    """Id of that start; "" if the system has none."""
    since_boot: float
    """Seconds between that start and the note."""


def continued(kept: Kept | None, *, boot: str, since_boot: float, wall: float, same_machine: bool = False) -> float:
    """Return the elapsed time at which a service continues.

    Args:
        kept: the last note; None if there is none.
        boot, since_boot: of this machine.
        wall: seconds since 1970, where elapsed time begins.
        same_machine: True if the note was certainly written on this machine. Then the time since its start has passed
            since the note. Otherwise a new start adds nothing, so that nothing expires too early.
    """
    if kept is None:
        return wall
    if boot and boot == kept.boot:
        return kept.elapsed + max(0.0, since_boot - kept.since_boot)
    return kept.elapsed + (since_boot if boot and kept.boot and same_machine else 0.0)


def boot_id() -> str:
    """Return the id of the present start of this machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def since_boot() -> float:
    """Return the seconds since this machine started, suspension included if the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Elapsed:
    """Elapsed time in seconds. Only differences have a meaning.

    Args:
        start: where it continues.
        boot: of this machine.
        clock: Returns the seconds since the machine started.
    """

    def __init__(self, start: float, *, boot: str, clock: Callable[[], float]) -> None:
        self._boot, self._clock = boot, clock
        self._base = start - clock()

    def now(self) -> float:
        return self._base + self._clock()

    def kept(self) -> Kept:
        """Return the note to keep."""
        at = self._clock()
        return Kept(elapsed=self._base + at, boot=self._boot, since_boot=at)
