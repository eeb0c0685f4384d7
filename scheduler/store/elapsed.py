"""Elapsed time in the database: deadlines and retention count it.

After a restart of the machine, the database may be on another machine, so the time since that restart says nothing. The
scheduler then continues from its last note, so that nothing expires too early. See `tierkit.elapsed`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import asdict

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.commit import GroupCommit
from scheduler.store.tables import properties
from tierkit.elapsed import Elapsed, Kept, boot_id, continued, since_boot
from tierkit.errors import Unavailable

__all__ = ["kept_elapsed", "note_elapsed"]

_log = logging.getLogger(__name__)

_NAME = "elapsed"
_KEEP_S = 60.0
"""Seconds between two notes in the database: the most elapsed time that a power failure may lose."""


async def kept_elapsed(engine: AsyncEngine, commit: GroupCommit) -> Elapsed:
    """Return elapsed time, continued from the note in the database, and note it.

    Raises:
        Unavailable: the database does not accept it.
    """
    async with engine.connect() as connection:
        found = await connection.scalar(select(properties.c.value).where(properties.c.name == _NAME))
    boot, at = boot_id(), since_boot()
    elapsed = Elapsed(continued(_read(found), boot=boot, since_boot=at, wall=time.time()), boot=boot, clock=since_boot)
    await _keep(elapsed, commit)
    return elapsed


async def note_elapsed(elapsed: Elapsed, commit: GroupCommit) -> None:
    """Note elapsed time in the database from time to time, until cancelled."""
    while True:
        await asyncio.sleep(_KEEP_S)
        try:
            await _keep(elapsed, commit)
        except Unavailable as exc:
            _log.warning("elapsed time cannot be noted now: %s", exc)


def _read(found: str | None) -> Kept | None:
    if found is None:
        return None
    try:
        kept = Kept(**json.loads(found))
        usable = math.isfinite(kept.elapsed) and math.isfinite(kept.since_boot)
    except (ValueError, TypeError):
        usable = False
    if not usable:
        _log.error("the row 'elapsed' in the table terrace_properties is damaged; elapsed time begins again")
        return None
    return kept


async def _keep(elapsed: Elapsed, commit: GroupCommit) -> None:
    value = json.dumps(asdict(elapsed.kept()))

    async def write(connection: AsyncConnection) -> None:
        await connection.execute(delete(properties).where(properties.c.name == _NAME))
        await connection.execute(insert(properties).values(name=_NAME, value=value))

    await commit.execute(write)
