"""Real workers with a share of a core: how they are held to it, and how their runs are judged."""

from typing import Any

import pytest

from experiments.training.paced import Pacer, spread_of
from experiments.training.virtual_time import VIRTUAL_TIME, judge

POINT: dict[str, Any] = {
    "strategy": "downpour",
    "workers": 4,
    "seed": 0,
    "epochs": 7,
    "seconds": 20.0,
    "virtual_seconds": 21.0,
    "updates": 3_850,
    "virtual_updates": 3_850,
    "step_s": 0.02,
    "serve_s": 0.001,
    "sync_s": 0.004,
    "cores": [0.25, 0.25, 0.24, 0.24],
    "spread": 0.02,
}


class Bench:
    """A process that uses processor time, waits for a core and for its host, and sleeps a little longer than asked."""

    def __init__(self) -> None:
        self.cpu_s = self.kept_waiting_s = self.now = 0.0
        self.slept: list[float] = []

    def compute(self, cpu_s: float, kept_waiting_s: float = 0.0, host_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.kept_waiting_s += kept_waiting_s
        self.now += cpu_s + kept_waiting_s + host_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 0.001

    def pacer(self) -> Pacer:
        return Pacer(
            0.25,
            cpu_s=lambda: self.cpu_s,
            kept_waiting_s=lambda: self.kept_waiting_s,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.mark.parametrize(
    ("kept_waiting_s", "host_s", "seconds"),
    [(0.0, 0.0, 4.0), (0.01, 0.0, 4.0), (0.0, 0.02, 6.0), (0.5, 0.0, 51.0)],
    ids=["alone", "kept waiting by others", "waits for its host", "kept waiting for longer than it would rest"],
)
def test_a_paced_step_takes_four_times_its_processor_time_and_what_the_host_takes(
    kept_waiting_s: float, host_s: float, seconds: float
) -> None:
    bench = Bench()
    pacer = bench.pacer()
    bench.compute(5.0)  # until its first step, which is not paced
    pacer.step()
    began = bench.now
    for _ in range(100):
        bench.compute(0.01, kept_waiting_s, host_s)
        pacer.step()
    assert bench.now - began == pytest.approx(seconds, abs=0.01)
    found = pacer.figures(period=10)
    assert (found["steps"], found["cpu_s"]) == pytest.approx((100, 1.0))
    assert found["updates"] == pytest.approx([0.1] * 10)


@pytest.mark.parametrize(
    ("updates", "spread"),
    [
        ([[1, 2, 3], [1, 2, 3, 4]], 0.0),  # all are slower together
        ([[0.9, 1.8], [1.1, 2.2]], 0.02**0.5),
        ([[1, 2, 3]], 0.0),
        ([[], [1]], 0.0),
    ],
)
def test_updates_are_as_spread_as_those_of_other_workers_at_the_same_time(
    updates: list[list[float]], spread: float
) -> None:
    assert spread_of(updates) == pytest.approx(spread)


@pytest.mark.parametrize(
    ("ratios", "reached"),
    [([1.0, 1.099, 0.901], True), ([1.0, 1.101], False), ([0.899, 1.0], False), ([1.0] * 4, True)],
)
def test_each_run_is_within_a_tenth(ratios: list[float], reached: bool) -> None:
    line = [{**POINT, "seconds": 1.0, "virtual_seconds": ratio} for ratio in ratios]
    assert judge(line).reached is reached


def test_a_row_tells_what_was_missed_but_for_quick_runs() -> None:
    far = {**POINT, "strategy": "fedavg", "virtual_seconds": 30.0}
    record = {"config": {"quick": False}, "points": [POINT, {**POINT, "seed": 1, "virtual_seconds": 19.0}, far]}
    rows = VIRTUAL_TIME.rows(record)
    assert [len(row["missed"]) for row in rows] == [0, 0, 1]
    assert [row["runs"] for row in rows] == [2, 2, 1]
    assert [row["ratio"] for row in rows] == pytest.approx([1.05, 0.95, 1.5])
    assert not any(row["missed"] for row in VIRTUAL_TIME.rows({**record, "config": {"quick": True}}))
    table = VIRTUAL_TIME.table(record)
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [each["virtual / real"] for each in cells] == ["1.000 ± 0.071", "1.500"]
    assert cells[1]["target"].startswith("missed: farthest from 1: 1.500")
