"""The line of `terrace train watch` about a run that has not ended."""

import pytest

from terrace.commands.train_runs import how_far
from tierkit.client import RunProgress, RunState


@pytest.mark.parametrize(
    ("missing", "start_at", "said"),
    [
        (2, 3, "waits for workers: 1 of 3 ready"),
        (0, 3, "waits for workers: 3 of 3 ready"),
        (None, 3, "loss 0.5, 1 worker"),
        (None, None, "loss 0.5, 1 worker"),
    ],
)
def test_a_run_that_waits_for_its_group_says_so(missing: int | None, start_at: int | None, said: str) -> None:
    at = "2026-01-01T00:00:00Z"
    figures = {"steps": 9, "loss": 0.5, "worker_count": 1, "created_at": at, "heard_at": at, "missing": missing}
    run = RunProgress.model_validate(
        {"id": "0" * 32, "network": "n", "strategy": "s", "state": RunState.RUNNING, **figures}
    )
    assert how_far(run, start_at) == said
