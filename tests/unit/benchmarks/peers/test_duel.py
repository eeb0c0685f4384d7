"""What a duel says of its windows."""

from typing import Any

import pytest

from benchmarks.peers.duel import DUEL

CONFIG = {"network": "net", "peer": "fastapi", "title": "naive FastAPI"}


def windows(number: int, own: float, other: float, bare: float, costs: tuple[float, float]) -> list[dict[str, Any]]:
    where = {"batch": 50, "concurrency": 4, "round": number, "bare_images_per_s": bare}
    turns = [
        {**where, "server": server, "images_per_s": rate, "cpu_us_per_image": cost}
        for server, rate, cost in zip(("terrace", "fastapi"), (own, other), costs, strict=True)
    ]
    return turns[:: 1 if number % 2 == 0 else -1]


def test_each_window_is_compared_with_its_neighbour_alone() -> None:
    # The machine becomes twice as slow in the middle; the medians of all windows would say 1.0.
    points = [
        *windows(0, 110.0, 100.0, 110.0, (1.0, 2.0)),
        *windows(1, 110.0, 100.0, 220.0, (2.0, 2.0)),
        *windows(2, 49.0, 50.0, 49.0, (4.0, 4.0)),
    ]
    record = {"config": CONFIG, "points": [*points, windows(3, 1.0, 9.0, 1.0, (1.0, 1.0))[0]]}  # stopped in a round
    (row,) = DUEL.rows(record)
    assert (row["images_per_request"], row["concurrency"], row["other"], row["rounds"]) == (50, 4, "fastapi", 3)
    assert (row["of_bare"], row["ratio"], row["won"]) == (1.0, pytest.approx(1.1), pytest.approx(2 / 3))
    assert (row["cpu_ratio"], row["images_per_s"], row["other_images_per_s"]) == (1.0, 110.0, 100.0)
    assert "naive FastAPI, images/s" in DUEL.table(record).columns


def test_a_load_without_a_whole_round_has_no_figures() -> None:
    (row,) = DUEL.rows({"config": CONFIG, "points": windows(0, 1.0, 1.0, 1.0, (1.0, 1.0))[:1]})
    assert (row["rounds"], row["ratio"]) == (0, None)
