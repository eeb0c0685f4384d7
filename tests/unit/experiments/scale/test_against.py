"""With what record the simulation is compared."""

import json
from typing import Any

import pytest

from benchmarks.tables import RECORDS
from experiments.scale.experiment import _check_comparable, _check_points

FIGURE3: dict[str, Any] = json.loads((RECORDS / "figure3-2026-11-26T151215Z.json").read_text())


def test_a_whole_record_of_figure3_will_do() -> None:
    _check_comparable(FIGURE3)
    _check_points(FIGURE3["points"])


@pytest.mark.parametrize(
    "change", [{"experiment": "table5"}, {"state": "invalid"}, {"state": "interrupted"}], ids=lambda change: str(change)
)
def test_another_record_will_not(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="it is a record of"):
        _check_comparable({**FIGURE3, **change})


def test_neither_will_points_without_their_conditions() -> None:
    with pytest.raises(KeyError):
        _check_points([{"scheme": "end"}])
