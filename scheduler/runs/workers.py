"""Operators' orders for the workers of a run, until the host reports that they are carried out. Pure.

An order is stored with its worker in the list that the host reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierkit.types import STANDING_AFTER, WorkerOrder

__all__ = ["may_work", "wishes_of", "with_wishes"]

Workers = Sequence[Mapping[str, Any]]
"""Workers with the fields of `tierkit.wire.runs.RunWorker`; in older databases, later fields are missing."""


def wishes_of(workers: Workers) -> dict[str, WorkerOrder]:
    """Return the operators' orders by worker."""
    return {each["name"]: each["wish"] for each in workers if each.get("wish") is not None}


def with_wishes(workers: Workers, wishes: Mapping[str, WorkerOrder]) -> list[dict[str, Any]]:
    """Return these workers with the orders that are not carried out yet; other workers keep their orders. Orders for
    departed workers are dropped."""

    def of(worker: Mapping[str, Any]) -> WorkerOrder | None:
        wish: WorkerOrder | None = wishes.get(worker["name"], worker.get("wish"))
        return None if wish is None or worker.get("standing", "active") == STANDING_AFTER[wish] else wish

    return [{**worker, "wish": of(worker)} for worker in workers]


def may_work(worker: Mapping[str, Any]) -> bool:
    """True if it is there, and its updates count."""
    return not worker.get("left") and worker.get("standing", "active") in ("active", "trusted")
