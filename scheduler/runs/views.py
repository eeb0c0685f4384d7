"""Training runs as they are told. Pure."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from scheduler.runs.state import SILENT_S
from scheduler.store.runs import RunDetails, RunRow
from tierkit.types import RunState
from tierkit.wire.runs import CurvePoint, Run, RunProgress, RunSummary

__all__ = ["brief", "summary", "whole"]

_REASONS = {
    RunState.INTERRUPTED: f"its host has not reported for more than {SILENT_S:g} s",
    RunState.STOPPING: "its host is told to stop with its next report",
}


def summary(row: RunRow, state: RunState) -> RunSummary:
    """A run in the list."""
    return RunSummary.model_validate(_short(row, state))


def brief(row: RunRow, details: RunDetails, state: RunState) -> RunProgress:
    """What a report has changed."""
    return RunProgress.model_validate({**_short(row, state), "workers": details.workers})


def whole(row: RunRow, details: RunDetails, state: RunState) -> Run:
    """All that is known of a run."""
    curve = [CurvePoint(at=_time(at), done=done, loss=loss, accuracy=share) for at, done, loss, share in details.curve]
    return Run.model_validate(
        {
            **_short(row, state),
            "url": row.url,
            "config": details.config,
            "workers": details.workers,
            "curve": curve,
            "result": details.result,
        }
    )


def _short(row: RunRow, state: RunState) -> dict[str, Any]:
    return {
        **asdict(row),
        "state": state,
        "reason": row.reason or _REASONS.get(state, ""),
        "created_at": _time(row.created_at),
        "heard_at": _time(row.heard_at),
        "finished_at": None if row.finished_at is None else _time(row.finished_at),
    }


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
