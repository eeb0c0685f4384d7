"""Waits that double, and token buckets."""

import pytest

from tierkit.pacing import TokenBucket, backoff_s


@pytest.mark.parametrize(
    ("failures", "least_s", "most_s"),
    [(1, 0.1, 0.2), (2, 0.2, 0.4), (3, 0.4, 0.8), (5, 1.6, 3.2), (6, 2.5, 5.0), (10, 2.5, 5.0), (100_000, 2.5, 5.0)],
)
def test_a_wait_doubles_up_to_a_bound_and_spreads(failures: int, least_s: float, most_s: float) -> None:
    assert backoff_s(failures, first_s=0.2, cap_s=5.0, chance=0.0) == pytest.approx(least_s)
    assert backoff_s(failures, first_s=0.2, cap_s=5.0) == pytest.approx(most_s)


@pytest.mark.parametrize(
    ("taken", "after_s", "wait_s"),
    [(0, 0, 0), (59, 0, 0), (60, 0, 1), (60, 1, 0), (600, 0, 541), (600, 541, 0), (600, 600, 0), (60, 10_000, 0)],
)
def test_a_bucket_may_be_overdrawn_and_fills_evenly(taken: int, after_s: float, wait_s: float) -> None:
    bucket = TokenBucket(per_s=1.0, burst=60.0)
    bucket.take(0.0, taken)
    assert bucket.wait_s(after_s) == pytest.approx(wait_s)


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(per_s=10, burst=3)
    assert [bucket.take(5.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert bucket.wait_s(5.2) > 0
    assert bucket.take(5.2) == pytest.approx(0.1)
    assert bucket.wait_s(5.5) == 0
    assert [bucket.take(99.0) for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])


def test_in_any_time_no_more_is_taken_than_the_burst_and_the_rate_allow() -> None:
    bucket = TokenBucket(per_s=20, burst=5)
    begins = sorted(now + bucket.take(now) for now in (0.001 * k for k in range(1000)))
    for first in range(0, 1000, 37):
        window = [begin for begin in begins if begins[first] <= begin <= begins[first] + 2.0]
        assert len(window) <= 5 + 20 * 2.0 + 1
