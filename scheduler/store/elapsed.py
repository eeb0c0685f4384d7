"""Elapsed time across restarts, independent of changes to the wall clock.

Deadlines and retention count elapsed time: the time for which this machine has run, suspension included, as the kernel
counts it. Setting a wrong clock right does not change it. The database notes it, so that it goes on after a restart of
the scheduler. After a restart of the machine, or on another machine, nobody can tell time that has passed from a clock
that was set. Then it goes on from the last note, so that nothing expires too early.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.commit import GroupCommit
from scheduler.store.tables import properties
from tierkit.errors import Unavailable

__all__ = ["Elapsed", "Kept", "boot_id", "continued", "kept_elapsed", "since_boot"]

_log = logging.getLogger(__name__)

_NAME = "elapsed"
_KEEP_S = 60.0
"""Between two notes in the database: what a machine that loses its power may lose of it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How far elapsed time had come, when, and on which start of a machine."""

    elapsed: float
    boot: str
    """Id of that start; "" where the system has none."""
    since_boot: float
    """Seconds since it."""


def continued(kept: Kept | None, *, boot: str, since_boot: float, wall: float) -> float:
    """Where elapsed time goes on.

    Args:
        kept: what the database has; None where it has nothing yet.
        boot, since_boot: of this machine.
        wall: seconds since 1970, where elapsed time begins: so the times of an older Terrace count on.
    """
    if kept is None:
        return wall
    if not boot or boot != kept.boot:
        return kept.elapsed
    return kept.elapsed + max(0.0, since_boot - kept.since_boot)


def boot_id() -> str:
    """Of the present start of this machine; "" where the system tells none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def since_boot() -> float:
    """Seconds since this machine has started, suspension included where the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Elapsed:
    """Elapsed time in seconds; no point in time, only its differences mean something.

    Args:
        start: where it goes on.
        boot: of this machine.
        clock: as `since_boot`.
    """

    def __init__(self, start: float, *, boot: str, clock: Callable[[], float]) -> None:
        self._boot, self._clock = boot, clock
        self._base = start - clock()

    def now(self) -> float:
        return self._base + self._clock()

    def kept(self) -> Kept:
        """What the database is to have of it."""
        at = self._clock()
        return Kept(elapsed=self._base + at, boot=self._boot, since_boot=at)

    async def run(self, commit: GroupCommit) -> None:
        """Note it in the database from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_KEEP_S)
            try:
                await _keep(self, commit)
            except Unavailable as exc:
                _log.warning("elapsed time cannot be noted now: %s", exc)


async def kept_elapsed(engine: AsyncEngine, commit: GroupCommit) -> Elapsed:
    """Elapsed time as it goes on from what the database has, noted there.

    Raises:
        Unavailable: the database does not accept it.
    """
    async with engine.connect() as connection:
        found = await connection.scalar(select(properties.c.value).where(properties.c.name == _NAME))
    boot, at = boot_id(), since_boot()
    elapsed = Elapsed(continued(_read(found), boot=boot, since_boot=at, wall=time.time()), boot=boot, clock=since_boot)
    await _keep(elapsed, commit)
    return elapsed


def _read(found: str | None) -> Kept | None:
    if found is None:
        return None
    try:
        kept = Kept(**json.loads(found))
        usable = math.isfinite(kept.elapsed) and math.isfinite(kept.since_boot)
    except (ValueError, TypeError):
        usable = False
    if not usable:
        _log.error("the row 'elapsed' in the table terrace_properties is damaged; elapsed time begins anew")
        return None
    return kept


async def _keep(elapsed: Elapsed, commit: GroupCommit) -> None:
    value = json.dumps(asdict(elapsed.kept()))

    async def write(connection: AsyncConnection) -> None:
        await connection.execute(delete(properties).where(properties.c.name == _NAME))
        await connection.execute(insert(properties).values(name=_NAME, value=value))

    await commit.execute(write)
