"""A release that spreads on virtual time, by the scheduler's own service."""

from __future__ import annotations

import pytest

from benchmarks.spreading import ReleaseCase, missed, spread
from scheduler.releases import spreading


@pytest.mark.parametrize(
    ("case", "most_copies"),
    [
        (ReleaseCase(name="all alike", devices=100), 4),
        (ReleaseCase(name="one machine", devices=1), 1),
        (ReleaseCase(name="large file", devices=30, size_bytes=300_000_000), 4),
        (ReleaseCase(name="slow links", devices=30, bits_per_s=5e6), 12),
        (ReleaseCase(name="one is slow", devices=100, slow=1), 8),
        (ReleaseCase(name="some are slow", devices=60, slow=4), 12),
        (ReleaseCase(name="some lie", devices=60, liars=3), 4),
        (ReleaseCase(name="a tenth cannot be reached", devices=100, unreachable=0.1), 12),
    ],
    ids=lambda value: value.name if isinstance(value, ReleaseCase) else "",
)
def test_a_release_reaches_all_in_at_most_twice_the_time_of_the_formula(case: ReleaseCase, most_copies: int) -> None:
    point = spread(case)
    assert missed(point) == [], point
    assert point["scheduler_copies"] <= most_copies, point


def test_each_site_gets_a_copy_from_the_scheduler() -> None:
    point = spread(ReleaseCase(name="sites", devices=60, sites=6))
    assert 6 <= point["scheduler_copies"] <= 18, point


def test_sources_for_a_large_fleet_are_sought_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "_MOST_AT_ONCE", 50)
    point = spread(ReleaseCase(name="large", devices=200))
    assert missed(point) == [], point
    assert point["scheduler_copies"] <= 5, point


def test_machines_that_cannot_reach_each_other_get_all_from_the_scheduler_at_its_full_speed() -> None:
    for case in (
        ReleaseCase(name="sites", devices=20, sites=20),
        ReleaseCase(name="none can be reached", devices=20, unreachable=1.0),
    ):
        point = spread(case)
        assert point["seconds"] <= 1.5 * point["scheduler_only_s"] + 20, point
