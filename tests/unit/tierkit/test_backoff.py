"""How long a node waits before it tries the scheduler again."""

import pytest

from tierkit.inference.heartbeat import backoff_s


@pytest.mark.parametrize(
    ("failures", "least_s", "most_s"),
    [(1, 0.1, 0.2), (2, 0.2, 0.4), (3, 0.4, 0.8), (5, 1.6, 3.2), (6, 2.5, 5.0), (10, 2.5, 5.0), (100_000, 2.5, 5.0)],
)
def test_doubles_up_to_a_bound_and_spreads(failures: int, least_s: float, most_s: float) -> None:
    assert backoff_s(failures, 0.0) == pytest.approx(least_s)
    assert backoff_s(failures, 1.0) == pytest.approx(most_s)
