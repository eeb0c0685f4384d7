"""How the rounds of `terrace experiment updates` become rows."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.training.updates import UPDATES


def rows(*rates: float, strategy: str = "sgd", quick: bool = False) -> Any:
    points = [
        {"strategy": strategy, "updates": 100, "seconds": 100 / rate, "cpu_s": 0.4, "system_s": 0.1} for rate in rates
    ]
    return UPDATES.rows({"points": points, "config": {"quick": quick}})


def test_the_median_of_the_rounds_is_held_against_the_target() -> None:
    (row,) = rows(190, 210, 250)
    assert row["per_s"]["median"] == pytest.approx(210)
    assert (row["cpu_ms"]["median"], row["system_ms"]["median"]) == (pytest.approx(4), pytest.approx(1))
    assert row["missed"] == []
    assert rows(190, 195, 250)[0]["missed"]
    assert rows(190, strategy="dc-adaptive")[0]["missed"] == []
    assert rows(190, quick=True)[0]["missed"] == []
