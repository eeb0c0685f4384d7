"""Verdicts on an overload, and how a case is written."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.overload import Case, Outcome, Targets, as_markdown, judge, newest_records, read_case
from tierkit.errors import InvalidInput

GOOD = Outcome(
    saturation_images_per_s=1000.0,
    offered_images_per_s=2000.0,
    goodput_images_per_s=950.0,
    goodput_ratio=0.95,
    goodput_per_cpu_ratio=0.96,
    requests=200,
    refused=100,
    unanswered={},
    refusal_p50_ms=1.0,
    refusal_p99_ms=5.0,
    health_max_ms=4.0,
    memory_growth_bytes=10,
    memory_bound_bytes=20,
)


def test_an_overload_that_is_well_met() -> None:
    assert judge(GOOD, Targets()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"goodput_ratio": 0.894}, "goodput is 0.89 of saturation, below 0.9"),
        ({"unanswered": {"timeout": 3}}, "requests without an answer: {'timeout': 3}"),
        ({"refused": 0, "refusal_p99_ms": None}, "nothing was refused: this was no overload"),
        ({"refusal_p99_ms": 51.0}, "p99 of refusals is 51 ms, above 50 ms"),
        ({"health_max_ms": 60.0}, "a health check took 60 ms, above 50 ms"),
        (
            {"memory_growth_bytes": 30 * 2**20, "memory_bound_bytes": 20 * 2**20},
            "memory grew by 30 MiB, beyond the bound of 20 MiB",
        ),
    ],
)
def test_what_is_missed_is_said(change: dict[str, object], sentence: str) -> None:
    assert judge(replace(GOOD, **change), Targets()) == [sentence]  # type: ignore[arg-type]  # fields of all types


def test_a_case_is_a_model_and_a_factor() -> None:
    assert read_case("mobilenet-v1-0.5=2") == Case(model="mobilenet-v1-0.5", factor=2.0)


@pytest.mark.parametrize("text", ["mobilenet", "=2", "mobilenet=", "mobilenet=0", "mobilenet=inf", "mobilenet=nan"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="write MODEL=FACTOR"):
        read_case(text)


def record(model: str, measured_at: str, **results: Any) -> dict[str, Any]:
    return {
        "config": {"model": model, "factor": 2.0, "seconds": 60.0},
        "results": {**asdict(GOOD), "missed": [], **results},
        "measured_at": measured_at,
    }


def test_the_table_is_made_of_the_newest_record_of_each_network(tmp_path: Path) -> None:
    records = [
        record("net", "2030-01-01T11:00:00+00:00", goodput_ratio=0.95),
        record("net", "2030-01-01T10:00:00+00:00", goodput_ratio=0.5),
        record("other", "2030-01-01T10:00:00+00:00", refusal_p99_ms=None, missed=["nothing was refused"]),
    ]
    for number, content in enumerate(records):
        (tmp_path / f"overload-{number}.json").write_text(json.dumps(content))
    table = as_markdown(newest_records(tmp_path))
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| goodput / saturation | 0.95 | 0.95 |" in table
    assert "| p99 of a 503, ms | 5.0 | none |" in table
    assert "| targets | all reached | nothing was refused |" in table
