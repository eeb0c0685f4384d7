"""Escalation beside a network in two parts: the order in which images go up, and what a record shows."""

from typing import Any

import numpy as np
import pytest

from experiments.early_exit import EARLY_EXIT, SHARES, entropy, exit_curve


def test_entropy_is_that_of_a_sure_and_of_a_clueless_answer() -> None:
    assert entropy(np.array([[1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]])) == pytest.approx(
        [0, 1, 0.5], abs=1e-6
    )


def test_the_least_sure_images_go_up_first() -> None:
    unsure = np.array([0.1, 0.9, 0.5, 0.2])
    local, upper = np.array([True, False, True, False]), np.array([True, True, False, True])
    curve = exit_curve(unsure, local, upper)
    assert len(curve) == 101
    # 0.9 gains, 0.5 loses, 0.2 gains, 0.1 stays as it was.
    assert [curve[round(100 * up / 4)] for up in range(5)] == [0.5, 0.75, 0.5, 0.75, 0.75]


@pytest.mark.parametrize("systems", [("terrace", "ddnn"), ("terrace",)])
def test_rows_and_table_of_a_record(systems: tuple[str, ...]) -> None:
    point = {"share": [0, 1], "coarse": [0.5, 0.9], "fine": [0.4, 0.8], "sent_bytes": 1000}
    record: dict[str, Any] = {"points": [{"system": name, **point} for name in systems], "config": {"images": 7}}
    rows = EARLY_EXIT.rows(record)
    assert [row["share"] for row in rows] == list(SHARES)
    half = rows[SHARES.index(0.5)]
    assert (half["terrace_coarse"], half["terrace_bytes_per_image"]) == (0.7, 500)
    assert half.get("ddnn_fine") == (0.6 if "ddnn" in systems else None)
    table = EARLY_EXIT.table(record)
    assert all(len(cells) == len(table.columns) for cells in table.rows)
