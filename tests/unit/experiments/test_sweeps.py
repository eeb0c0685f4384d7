"""Which runs the sweeps of the volunteers' platform need, and what rows are made of them."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.training.sweeps import SWEEPS, judge, trainings


def point(workers: int, seed: int, own: float, rate: float = 0.2, batch: int = 100, epochs: int = 10) -> dict[str, Any]:
    measured = {str(epochs): {"own": own, "equal": own - 0.01}}
    return {"rate": rate, "batch": batch, "workers": workers, "seed": seed, "measured": measured}


def rows(points: list[dict[str, Any]], *, only: list[str], quick: bool = False) -> list[dict[str, Any]]:
    return SWEEPS.rows({"points": points, "config": {"only": only, "quick": quick}})


def test_the_rows_where_the_sweeps_meet_are_one_run() -> None:
    lines = trainings(["rate", "epochs", "batch"])
    assert len(lines) == 3 * (6 + 5)
    (shared,) = [line for line in lines if (line.rate, line.batch, line.workers) == (0.2, 100, 2)]
    assert shared.epochs == (1, 2, 3, 4, 5, 8, 10, 15, 20)


def test_rows_pair_the_seeds_whatever_the_order_in_which_runs_end() -> None:
    found = [(0.90, 0.92, 0.93), (0.80, 0.82, 0.83), (0.70, 0.71, 0.72), (0.91, 0.93, 0.94), (0.5, 0.6, 0.7)]
    points = [point(workers, seed, line[workers]) for workers in (2, 0, 1) for seed, line in enumerate(found)]
    (row,) = rows(points[::-1], only=["batch"])
    assert (row["value"], row["source"], row["runs"]) == (100, [0.86, 0.88, 0.91], 5)
    assert row["accuracy"]["2"] == [line[2] for line in found]
    assert row["equal_work"]["1"] == pytest.approx([line[1] - 0.01 for line in found])
    assert row["missed"] == []


@pytest.mark.parametrize(("last", "reached"), [(0.94, True), (0.92, False)])
def test_each_worker_must_raise_the_accuracy_with_every_seed_of_five(last: float, reached: bool) -> None:
    accuracies = {"0": [0.9] * 5, "1": [0.93] * 5, "2": [0.94] * 4 + [last]}
    assert judge(accuracies).reached is reached


def test_a_row_of_which_a_run_is_missing_is_left_out() -> None:
    assert rows([point(0, 0, 0.9), point(1, 0, 0.9)], only=["batch"]) == []
