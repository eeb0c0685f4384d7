"""The nodes that the scheduler knows for good: rows that outlast it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.devices.intent import Intent, KnownNode
from scheduler.store.commit import GroupCommit
from scheduler.store.tables import nodes
from tierkit.wire.messages import Registration

__all__ = ["NodeStore"]

_log = logging.getLogger(__name__)

_AT_ONCE = 500
"""Rows of a statement."""


class NodeStore:
    """Reads them when the scheduler starts, and writes those that change."""

    def __init__(self, engine: AsyncEngine, commit: GroupCommit) -> None:
        self._engine = engine
        self._commit = commit

    async def load(self) -> list[KnownNode]:
        """All of them. A row that a node of another version has left, and that cannot be read, is left out."""
        async with self._engine.connect() as connection:
            rows = (await connection.execute(select(nodes))).all()
        found = []
        for row in rows:
            try:
                registration = Registration.model_validate_json(row.registration)
            except ValidationError as exc:
                _log.warning("the node %s is forgotten: its row cannot be read: %s", row.id, exc)
                continue
            intent = Intent(drained=row.drained, removed=row.removed, trusted=row.trusted, by=row.said_by)
            found.append(KnownNode(registration=registration, intent=intent))
        return found

    async def save(self, changed: Mapping[str, KnownNode | None]) -> None:
        """Write nodes by id, in one transaction; None removes a row.

        Raises:
            Unavailable: the database refuses it; nothing was written.
        """

        async def write(connection: AsyncConnection) -> None:
            for ids in _in_parts(list(changed)):
                await connection.execute(delete(nodes).where(nodes.c.id.in_(ids)))
            for rows in _in_parts([_row(node_id, known) for node_id, known in changed.items() if known is not None]):
                await connection.execute(insert(nodes), rows)

        if changed:
            await self._commit.execute(write)


def _in_parts(items: list[Any]) -> list[list[Any]]:
    return [items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE)]


def _row(node_id: str, known: KnownNode) -> dict[str, object]:
    return {
        "id": node_id,
        "registration": known.registration.model_dump_json(exclude={"key"}),
        "drained": known.intent.drained,
        "removed": known.intent.removed,
        "trusted": known.intent.trusted,
        "said_by": known.intent.by,
    }
