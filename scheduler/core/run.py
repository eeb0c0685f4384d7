"""A training run as it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.curve import Point
from tierkit.types import RunState

__all__ = ["RunDetails", "RunRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run without its long fields."""

    id: str
    owner: str | None
    """Name of its host's token; None without tokens."""
    network: str
    strategy: str
    steps: int
    url: str
    incarnation: str
    state: RunState = RunState.RUNNING
    """Never `interrupted`, which is derived from silence."""
    reason: str = ""
    created_at: float
    """Seconds since 1970, in whole microseconds; the other times are seconds since 1970 as well."""
    heard_at: float
    heard_elapsed: float
    """The same moment in elapsed time."""
    finished_at: float | None = None
    done: int = 0
    version: int = 0
    loss: float | None = None
    accuracy: float | None = None
    worker_count: int = 0
    missing: int | None = None
    """Workers that it waits for before it hands out the first work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """The long fields of a run."""

    config: Mapping[str, Any]
    workers: Sequence[Mapping[str, Any]] = ()
    """See `tierkit.wire.runs.WorkerReport`."""
    curve: tuple[Point, ...] = ()
    result: Mapping[str, Any] | None = None
    more_urls: Sequence[str] = ()
    wants: Mapping[str, Any] = field(default_factory=dict)
    """See `tierkit.wire.runs.RunWants`."""
