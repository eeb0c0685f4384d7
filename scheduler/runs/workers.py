"""What operators want with the workers of a run, until its host says that it is so. Pure.

A wish stands with its worker in the list that the host reports, and is kept with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierkit.types import STANDING_AFTER, WorkerOrder

__all__ = ["may_work", "wishes_of", "with_wishes"]

Workers = Sequence[Mapping[str, Any]]
"""Each as `tierkit.wire.runs.RunWorker`; in databases from before without what came later."""


def wishes_of(workers: Workers) -> dict[str, WorkerOrder]:
    """What is wanted, by name."""
    return {each["name"]: each["wish"] for each in workers if each.get("wish") is not None}


def with_wishes(workers: Workers, wishes: Mapping[str, WorkerOrder]) -> list[dict[str, Any]]:
    """These workers with the wishes that are not fulfilled yet; others keep theirs. Those of workers that are gone are
    gone, too."""

    def of(worker: Mapping[str, Any]) -> WorkerOrder | None:
        wish: WorkerOrder | None = wishes.get(worker["name"], worker.get("wish"))
        return None if wish is None or worker.get("standing", "active") == STANDING_AFTER[wish] else wish

    return [{**worker, "wish": of(worker)} for worker in workers]


def may_work(worker: Mapping[str, Any]) -> bool:
    """True if it is there, and its updates count."""
    return not worker.get("left") and worker.get("standing", "active") in ("active", "trusted")
