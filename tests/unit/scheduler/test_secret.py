"""The schedulers' secret: kept, and refused when it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import delete, update

from scheduler.store.secret import kept_secret
from scheduler.store.tables import properties
from tests.unit.scheduler.test_store import opened
from tierkit.errors import SetupError


async def test_the_secret_of_a_database_stays_the_same(tmp_path: Path):
    async with opened(tmp_path / "a.db") as store:
        secret = await kept_secret(store.engine, store.commit)
    assert len(secret) == 32
    async with opened(tmp_path / "a.db") as store:
        assert await kept_secret(store.engine, store.commit) == secret
        async with store.engine.begin() as connection:
            await connection.execute(delete(properties))
        assert await kept_secret(store.engine, store.commit) != secret


@pytest.mark.parametrize("content", ["", "ab", "no digits"])
async def test_a_damaged_one_is_refused(tmp_path: Path, content: str):
    async with opened(tmp_path / "a.db") as store:
        await kept_secret(store.engine, store.commit)
        async with store.engine.begin() as connection:
            await connection.execute(update(properties).values(value=content))
        with pytest.raises(SetupError, match="is damaged: delete it, and a new one is made"):
            await kept_secret(store.engine, store.commit)
