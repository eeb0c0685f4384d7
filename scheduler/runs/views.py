"""Training runs as users see them. Pure."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from scheduler.core.curve import Point
from scheduler.core.run import RunDetails, RunRow
from scheduler.runs.state import SILENT_S
from tierkit.types import RunState
from tierkit.wire.runs import CurvePoint, Run, RunProgress, RunSummary

__all__ = ["brief", "summary", "whole"]

_REASONS = {
    RunState.INTERRUPTED: f"no report for more than {SILENT_S:g} s",
    RunState.STOPPING: "its host is told to stop with its next report",
}


def summary(row: RunRow, state: RunState) -> RunSummary:
    """A run in the list."""
    return RunSummary.model_validate(_short(row, state))


def brief(row: RunRow, details: RunDetails, state: RunState) -> RunProgress:
    """Return the fields of a run that a report changes."""
    return RunProgress.model_validate({**_short(row, state), **_live(row, details)})


def whole(row: RunRow, details: RunDetails, state: RunState) -> Run:
    """All that is known of a run."""
    return Run.model_validate(
        {
            **_short(row, state),
            **_live(row, details),
            "url": row.url,
            "more_urls": details.more_urls,
            "wants": details.wants,
            "config": details.config,
            "curve": [_point(point) for point in details.curve],
            "result": details.result,
        }
    )


def _short(row: RunRow, state: RunState) -> dict[str, Any]:
    return {
        **asdict(row),
        "state": state,
        "missing": None if state.final else row.missing,
        "reason": row.reason or _REASONS.get(state, ""),
        "created_at": _time(row.created_at),
        "heard_at": _time(row.heard_at),
        "finished_at": None if row.finished_at is None else _time(row.finished_at),
    }


def _live(row: RunRow, details: RunDetails) -> dict[str, Any]:
    last = details.curve[-1] if details.curve else None
    return {
        "workers": details.workers,
        "point": None if last is None or last.at != row.heard_at else _point(last),
    }


def _point(point: Point) -> CurvePoint:
    return CurvePoint(at=_time(point.at), **{name: value for name, value in point._asdict().items() if name != "at"})


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
