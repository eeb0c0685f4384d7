"""The secret that schedulers share, kept in their database."""

from __future__ import annotations

import secrets

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.commit import GroupCommit
from scheduler.store.tables import properties
from tierkit.errors import SetupError

__all__ = ["kept_secret"]

_NAME = "secret"
_BYTES = 32


async def kept_secret(engine: AsyncEngine, commit: GroupCommit) -> bytes:
    """32 random bytes, drawn when a database is first used and the same ever after.

    Raises:
        SetupError: what the database holds is damaged.
        Unavailable: it does not accept a new one.
    """
    async with engine.connect() as connection:
        found = await connection.scalar(select(properties.c.value).where(properties.c.name == _NAME))
    if found is None:
        found = secrets.token_hex(_BYTES)

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(insert(properties).values(name=_NAME, value=found))

        await commit.execute(write)
    try:
        secret = bytes.fromhex(found)
    except ValueError:
        secret = b""
    if len(secret) != _BYTES:
        raise SetupError(
            "the row 'secret' in the table terrace_properties is damaged: delete it, and a new one is made"
        )
    return secret
