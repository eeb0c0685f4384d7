"""Rows of releases and of the changes from one to another."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from models.escalation import Tuning
from models.manifest import Manifest
from scheduler.core.outbox import SinkEvent
from scheduler.core.release import Release, ReleaseChange
from scheduler.store.commit import GroupCommit
from scheduler.store.reading import Reader
from scheduler.store.tables import releases, rollouts
from tierkit.errors import SetupError
from tierkit.wire.releases import RolloutState

__all__ = ["ReleaseStore"]

Probes = Mapping[str, Any]
"""Answers to the probe pictures by sha256."""


class ReleaseStore:
    """All statements on releases. Reads and writes raise Unavailable when the database does not answer."""

    def __init__(self, reader: Reader, commit: GroupCommit) -> None:
        self._reader = reader
        self._commit = commit

    async def load(self) -> list[tuple[Release, Probes | None]]:
        """All releases by number, each with the answers to the probe pictures, as far as they are known.

        Raises:
            SetupError: a row cannot be read.
        """
        rows = await self._reader.rows(select(releases).order_by(releases.c.number))
        try:
            return [
                (
                    Release(
                        number=row.number,
                        name=row.name,
                        manifest=Manifest.model_validate_json(row.manifest),
                        tuning=None if row.tuning is None else Tuning.model_validate_json(row.tuning),
                        created_at=row.created_at,
                        created_by=row.created_by,
                        origin=row.origin,
                    ),
                    None if row.probes is None else json.loads(row.probes),
                )
                for row in rows
            ]
        except ValidationError as exc:
            raise SetupError(f"the table terrace_releases has a row that cannot be read: {exc}") from exc

    async def changes(self, most: int) -> list[tuple[ReleaseChange, dict[str, Any]]]:
        """The latest changes, the newest first, each with its trial; also the last one that is done, however old."""
        newest = select(rollouts).order_by(rollouts.c.id.desc())
        rows = list(await self._reader.rows(newest.limit(most)))
        if all(row.state != RolloutState.DONE for row in rows):
            rows += await self._reader.rows(newest.where(rollouts.c.state == RolloutState.DONE).limit(1))
        return [
            (msgspec.json.decode(row.content, type=ReleaseChange), {} if row.trial is None else json.loads(row.trial))
            for row in rows
        ]

    async def add(self, release: Release) -> None:
        """Store a new release."""
        row = {
            "number": release.number,
            "name": release.name,
            "digest": release.digest,
            "manifest": release.manifest.as_json().decode(),
            "tuning": None if release.tuning is None else release.tuning.model_dump_json(),
            "origin": release.origin,
            "created_at": release.created_at,
            "created_by": release.created_by,
        }
        statement, undo = insert(releases).values(row), delete(releases).where(releases.c.number == release.number)
        await self._commit.execute(lambda connection: connection.execute(statement), undo=(undo,))

    async def save_probes(self, number: int, probes: Probes) -> None:
        """Store the answers of a release's networks to the probe pictures."""
        statement = update(releases).where(releases.c.number == number).values(probes=json.dumps(probes))
        await self._commit.execute(lambda connection: connection.execute(statement))

    async def save(
        self, change: ReleaseChange, trial: Mapping[str, Any] | None, event: SinkEvent | None = None
    ) -> None:
        """Write a change as it is now.

        Args:
            event: says that its state is another one.
        """
        row = {
            "id": change.id,
            "state": change.state,
            "content": msgspec.json.encode(change).decode(),
            "trial": None if trial is None else json.dumps(trial),
        }

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(delete(rollouts).where(rollouts.c.id == change.id))
            await connection.execute(insert(rollouts).values(row))
            if event is not None:
                await self._commit.outbox.write(connection, [event])

        await self._commit.execute(write)

    async def remove(self, numbers: Collection[int]) -> None:
        """Delete releases. The changes to them stay, as history."""
        statement = delete(releases).where(releases.c.number.in_(numbers))
        await self._commit.execute(lambda connection: connection.execute(statement))
