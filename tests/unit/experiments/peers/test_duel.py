"""What a duel says of its windows."""

import pytest

from experiments.peers.duel import _summary
from experiments.peers.rows import Row

ROW = Row(batch=50, concurrency=4)


def test_each_window_is_compared_with_its_neighbour_alone() -> None:
    # The machine becomes twice as slow in the middle; the medians of all windows would say 1.0.
    samples = {
        f"{ROW.key}.terrace.images_per_s": [110.0, 110.0, 49.0],
        f"{ROW.key}.fastapi.images_per_s": [100.0, 100.0, 50.0],
        f"{ROW.key}.bare_images_per_s": [110.0, 220.0, 49.0],
        f"{ROW.key}.terrace.cpu_us_per_image": [1.0, 2.0, 4.0],
        f"{ROW.key}.fastapi.cpu_us_per_image": [2.0, 2.0, 4.0],
    }
    found = _summary(samples, ROW, "fastapi")
    won = pytest.approx(2 / 3)
    assert found == {"of_bare": 1.0, "ratio": pytest.approx(1.1), "won": won, "cpu_ratio": 1.0, "rounds": 3}


def test_a_row_that_was_not_measured_has_no_figures() -> None:
    assert _summary({}, ROW, "fastapi") == {}
