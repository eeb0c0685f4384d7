"""Rows of the known nodes, which outlast the scheduler."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.core.device import NO_INTENT, Intent, KnownNode
from scheduler.store.commit import GroupCommit
from scheduler.store.tables import nodes, sites
from tierkit.errors import SetupError
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
        """All of them. What this version does not know in a row is passed over; a row that cannot be read is left out.

        Raises:
            SetupError: it is one of which an operator has said something, which must not be forgotten.
        """
        async with self._engine.connect() as connection:
            rows = (await connection.execute(select(nodes))).all()
        found = []
        for row in rows:
            intent = Intent(drained=row.drained, removed=row.removed, trusted=row.trusted, by=row.said_by)
            try:
                registration = _registration(row.registration)
            except ValueError as exc:
                if replace(intent, by="") != NO_INTENT:
                    raise SetupError(
                        f"the row of the node {row.id!r} in the table terrace_nodes is damaged, and an operator has "
                        "drained, removed or trusted this node: mend or delete the row"
                    ) from exc
                _log.warning("the node %s is forgotten: its row cannot be read: %s", row.id, exc)
                continue
            found.append(KnownNode(registration=registration, intent=intent))
        return found

    async def load_sites(self) -> dict[str, Intent]:
        """All known sites."""
        async with self._engine.connect() as connection:
            rows = (await connection.execute(select(sites).order_by(sites.c.name))).all()
        return {row.name: Intent(drained=row.drained, removed=row.removed, by=row.said_by) for row in rows}

    async def save_sites(self, changed: Mapping[str, Intent | None]) -> None:
        """Write sites by name, in one transaction; None removes a row. Raises Unavailable."""
        rows = [
            {"name": name, "drained": intent.drained, "removed": intent.removed, "said_by": intent.by}
            for name, intent in changed.items()
            if intent is not None
        ]

        async def write(connection: AsyncConnection) -> None:
            for names in _in_parts(list(changed)):
                await connection.execute(delete(sites).where(sites.c.name.in_(names)))
            for part in _in_parts(rows):
                await connection.execute(insert(sites), part)

        if changed:
            await self._commit.execute(write)

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


def _registration(text: str) -> Registration:
    """Raises ValueError."""
    content = json.loads(text)
    try:
        return Registration.model_validate(content)
    except ValidationError as exc:
        for error in exc.errors():
            if error["type"] == "extra_forbidden":  # of another version
                *place, name = error["loc"]
                del reduce(lambda inner, step: inner[step], place, content)[name]
        return Registration.model_validate(content)


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
