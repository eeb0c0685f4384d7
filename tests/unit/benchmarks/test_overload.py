"""Verdicts on an overload, how a case is written, and the table."""

from typing import Any

import pytest

from benchmarks.overload import OVERLOAD, missed, read_case
from tierkit.errors import InvalidInput

GOOD: dict[str, Any] = {
    "model": "net",
    "factor": 2.0,
    "saturation_images_per_s": 1000.0,
    "offered_images_per_s": 2000.0,
    "goodput_images_per_s": 950.0,
    "goodput_ratio": 0.95,
    "goodput_per_cpu_ratio": 0.96,
    "requests": 200,
    "refused": 100,
    "unanswered": {},
    "refusal_p50_ms": 1.0,
    "refusal_p99_ms": 5.0,
    "health_max_ms": 4.0,
    "memory_growth_bytes": 10,
    "memory_bound_bytes": 20,
}


def test_an_overload_that_is_well_met() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"goodput_ratio": 0.894}, "goodput is 0.89"),
        ({"unanswered": {"timeout": 3}}, "without an answer"),
        ({"refused": 0, "refusal_p99_ms": None}, "nothing was refused"),
        ({"refusal_p99_ms": 51.0}, "p99 of refusals is 51 ms"),
        ({"health_max_ms": 60.0}, "a health check took 60 ms"),
        ({"memory_growth_bytes": 30 * 2**20, "memory_bound_bytes": 20 * 2**20}, "memory grew by 30.0 MiB"),
    ],
)
def test_what_is_missed_is_said(change: dict[str, Any], words: str) -> None:
    (sentence,) = missed(GOOD | change)
    assert words in sentence


def test_a_case_is_a_model_and_a_factor() -> None:
    assert read_case("mobilenet-v1-0.5=2") == ("mobilenet-v1-0.5", 2.0)


@pytest.mark.parametrize("text", ["mobilenet", "=2", "mobilenet=", "mobilenet=0", "mobilenet=inf", "mobilenet=nan"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="write MODEL=FACTOR"):
        read_case(text)


def test_the_table_has_a_column_for_each_case() -> None:
    other = GOOD | {"model": "other", "refused": 0, "refusal_p50_ms": None, "refusal_p99_ms": None}
    record = {"config": {}, "points": [GOOD | {"samples": {}}, other]}
    table = OVERLOAD.table(record)
    cells = {row[0]: row[1:] for row in table.rows}
    assert table.columns == ["", "net at 2 times its capacity", "other at 2 times its capacity"]
    assert cells["goodput / saturation"] == ["0.95", "0.95"]
    assert cells["p99 of a 503, ms"] == ["5.0", "none"]
    assert cells["targets"] == ["all reached", "nothing was refused: this was no overload"]
    assert [bool(row["missed"]) for row in OVERLOAD.rows(record)] == [False, True]
