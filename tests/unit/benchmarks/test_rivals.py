"""Terrace beside other frameworks: what is read of their output, how rounds are judged."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rivals.experiment import RIVALS, TRAINERS, ratios, result_of, turns


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([], None),
        (["starting", "{'seconds': 1}", '{"seconds": 1.5}'], None),
        (['{"half": ', '{"seconds": 2.5, "accuracy": 0.96, "updates": 8}', "it ends"], 2.5),
        (['["seconds", "accuracy", "updates"]'], None),
    ],
)
def test_the_result_is_the_line_of_json_among_the_log(lines: list[str], seconds: float | None) -> None:
    found = result_of(lines)
    assert (None if found is None else found["seconds"]) == seconds


def test_each_begins_a_round_in_its_turn() -> None:
    orders = [[trainer.name for trainer in turns(TRAINERS, number)] for number in range(len(TRAINERS) + 1)]
    names = [trainer.name for trainer in TRAINERS]
    assert [order[0] for order in orders] == [*names, names[0]]
    assert all(sorted(order) == sorted(names) for order in orders)


def visit(number: int, trainer: str, seconds: float | None) -> dict[str, Any]:
    figures: Mapping[str, Any] = (
        {"failure": "it died"}
        if seconds is None
        else {"seconds": seconds, "ended_s": seconds, "accuracy": 0.361, "updates": 40, "steps": 50}
    )
    where = {"kind": "round", "round": number, "trainer": trainer, "title": trainer.title(), "version": "1"}
    return {**where, "rate": 0.1, "period": 50, "seed": number, **figures}


def record(*points: dict[str, Any], rounds: int = 3, quick: bool = False) -> dict[str, Any]:
    return {"config": {"rounds": rounds, "quick": quick, "accuracy": 0.36}, "points": list(points)}


def rounds(**seconds: list[float | None]) -> list[dict[str, Any]]:
    return [
        visit(number, name.replace("_", "-"), found)
        for name, times in seconds.items()
        for number, found in enumerate(times)
    ]


def test_ratios_are_taken_within_rounds_that_both_finished() -> None:
    points = rounds(terrace=[2.0, 30.0, None, 3.0], flower=[4.0, 40.0, 1.0, None])
    assert ratios(points) == {"flower": [0.5, 0.75]}


OWN = [2.0, 2.0, 9.0]


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        # Only the faster row of torch.distributed is judged, by the median; the others in each round.
        ({"local": [2.0, 2.0, 2.0], "all_reduce": [9.0, 9.0, 9.0], "flower": [2.1, 2.1, 9.1]}, set()),
        ({"local": [9.0, 9.0, 9.0], "all_reduce": [1.7, 1.7, 9.0], "alone": [1.0, 1.0, 1.0]}, {"all-reduce"}),
        ({"local": [1.7, 1.7, 9.0], "hivemind": [3.0, 3.0, 10.0]}, {"local"}),
        ({"flower": [9.0, 9.0, 9.0], "hivemind": [3.0, 3.0, 8.0]}, {"flower", "hivemind"}),
        ({"flower": [3.0, 3.0, None]}, {"flower"}),
        ({"hivemind": [None, None, None]}, {"hivemind"}),
        ({"terrace": [2.0, None, 2.0], "flower": [3.0, 3.0, 3.0]}, {"terrace"}),
    ],
)
def test_a_target_that_is_missed_is_named(times: Any, missed: set[str]) -> None:
    kept = record(*rounds(**{"terrace": OWN, **times}))
    assert {row["trainer"] for row in RIVALS.rows(kept) if row["missed"]} == missed
    assert ("missed: " in RIVALS.table(kept).markdown()) == bool(missed)
    kept["config"]["quick"] = True
    assert not any(row["missed"] or row["target"] for row in RIVALS.rows(kept))


def test_the_table_shows_medians_and_ranges_of_the_rounds_alone() -> None:
    points = rounds(terrace=[2.0, 4.0, 3.0], flower=[4.0, 5.0, 9.0])
    text = RIVALS.table(record(*points)).markdown()
    assert "| Terrace 1 | 0.1 | 50 | 3 | 3.00 (2.00 to 4.00) | 50 | 60.0 | 40 | - |  |" in text
    assert "| 4 | 5.00" not in text
    assert "5.00 (4.00 to 9.00) | 50 | 100.0 | 40 | 0.500 (0.333 to 0.800) | below 1 in each round |" in text


def test_one_that_cannot_be_installed_says_why_in_the_table() -> None:
    kept = record(*rounds(terrace=[1.0, 1.0, 1.0], flower=[None, None, None]))
    assert "unmeasured: it died" in RIVALS.table(kept).markdown()


@pytest.mark.train
def test_the_accuracy_rises_evenly_between_two_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'learn'")
    script = Path(__file__).parents[3] / "benchmarks" / "rivals" / "contenders" / "common.py"
    spec = importlib.util.spec_from_file_location("contenders_common", script)
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    measured = iter([0.1, 0.2, 0.4])
    curve = common.Curve(SimpleNamespace(accuracy=lambda network: next(measured)), 0.3)
    assert [curve.reached(None, seconds, updates=1, steps=2) for seconds in (10.0, 20.0, 30.0)] == [False, False, True]
    told = json.loads(capsys.readouterr().out)
    assert (told["seconds"], told["ended_s"], told["accuracy"]) == (pytest.approx(25.0), 30.0, 0.4)
