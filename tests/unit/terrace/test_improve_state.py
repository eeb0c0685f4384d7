"""The state of an improvement, in its file and for the scheduler."""

from __future__ import annotations

from datetime import UTC, datetime

from terrace.improve_state import ImproveState, ImproveWish
from tierkit.wire.learning import Improvement
from training.improve.gate import Comparison


def test_the_scheduler_is_told_what_it_takes() -> None:
    figures = Comparison(pictures=0, old_right=0, new_right=0, gained=0, lost=0).figures("validation")
    state = ImproveState(
        id="a" * 32,
        wish=ImproveWish(release="flowers@7", devices=5, rounds=9),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        state="refused",
        devices=4,
        figures=figures,
        reason="why " * 500,
    )
    told = Improvement.model_validate_json(state.told().model_dump_json())
    assert (told.release, told.state, told.devices, told.rounds) == ("flowers@7", "refused", 4, 9)
    assert told.figures == figures
    assert len(told.reason) == 500


def test_the_state_is_read_as_it_was_written() -> None:
    state = ImproveState(id="b" * 32, wish=ImproveWish(release="flowers@7"), created_at=datetime.now(UTC))
    assert ImproveState.model_validate_json(state.model_dump_json()) == state
