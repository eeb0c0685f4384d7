"""Terrace beside other frameworks: what is read of their output, what is kept of trials, how rounds are judged."""

from collections.abc import Mapping
from typing import Any

import pytest

from experiments.training.rivals import RIVALS, TRAINERS, Choice, fastest, ratios, result_of, turns

TERRACE, HIVEMIND, FLOWER = TRAINERS


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
    orders = [[trainer.name for trainer in turns(TRAINERS, number)] for number in range(4)]
    assert orders[0] == ["terrace", "hivemind", "flower"]
    assert orders[1] == ["hivemind", "flower", "terrace"]
    assert {order[0] for order in orders[:3]} == {"terrace", "hivemind", "flower"}
    assert orders[3] == orders[0]


def trial(rate: float, period: int, seconds: float | None, trainer: str = "flower") -> dict[str, Any]:
    figures: Mapping[str, Any] = {"failure": "too slow"} if seconds is None else {"seconds": seconds}
    return {"kind": "trial", "trainer": trainer, "rate": rate, "period": period, **figures}


@pytest.mark.parametrize(
    ("trials", "choice"),
    [
        ([trial(0.1, 25, 3.0), trial(0.2, 50, 2.0), trial(0.05, 50, 4.0)], Choice(0.2, 50)),
        # One fast trial of several does not make it.
        ([trial(0.1, 25, 1.0), *[trial(0.1, 25, 9.0)] * 2, *[trial(0.2, 25, 3.0)] * 3], Choice(0.2, 25)),
        # A failure took for ever; somebody else's trials say nothing.
        ([trial(0.1, 25, None), trial(0.2, 25, 90.0), trial(0.05, 25, 1.0, "terrace")], Choice(0.2, 25)),
        ([trial(0.2, 25, None)], Choice(0.1, 50)),
        ([], Choice(0.1, 50)),
    ],
)
def test_the_fastest_choice_is_kept(trials: list[dict[str, Any]], choice: Choice) -> None:
    assert fastest(FLOWER, trials) == choice


def visit(number: int, trainer: str, seconds: float | None) -> dict[str, Any]:
    figures: Mapping[str, Any] = (
        {"failure": "it died"} if seconds is None else {"seconds": seconds, "accuracy": 0.961, "updates": 40}
    )
    where = {"kind": "round", "round": number, "trainer": trainer, "title": trainer.title(), "version": "1"}
    return {**where, "rate": 0.1, "period": 50, "seed": number, **figures}


def record(*points: dict[str, Any], rounds: int = 3, quick: bool = False) -> dict[str, Any]:
    return {"config": {"rounds": rounds, "quick": quick, "accuracy": 0.96}, "points": list(points)}


def rounds(own: list[float | None], theirs: list[float | None]) -> list[dict[str, Any]]:
    return [
        visit(number, name, seconds)
        for number, pair in enumerate(zip(own, theirs, strict=True))
        for name, seconds in zip(("terrace", "flower"), pair, strict=True)
    ]


def test_ratios_are_taken_within_rounds_that_both_finished() -> None:
    points = rounds([2.0, 30.0, None, 3.0], [4.0, 40.0, 1.0, None])
    assert ratios(points) == {"flower": [0.5, 0.75]}


@pytest.mark.parametrize(
    ("own", "theirs", "missed"),
    [
        ([2.0, 2.0, 9.0], [2.0, 4.0, 3.0], {}),  # 1.0, 0.5, 3.0
        ([2.1, 2.0, 9.0], [2.0, 4.0, 3.0], {"flower": ["1.050 of Flower's time (at most 1)"]}),
        ([1.0, 1.0, 1.0], [None, None, None], {"flower": ["not compared"]}),
        ([1.0, None, 1.0], [2.0, 2.0, 2.0], {"terrace": ["reached in 2 of 3 rounds"]}),
    ],
)
def test_a_target_that_is_missed_is_named(own: Any, theirs: Any, missed: dict[str, list[str]]) -> None:
    kept = record(*rounds(own, theirs))
    assert {row["trainer"]: row["missed"] for row in RIVALS.rows(kept) if row["missed"]} == missed
    text = RIVALS.table(kept).markdown()
    assert ("missed: " in text) == bool(missed)
    kept["config"]["quick"] = True
    assert not any(row["missed"] or row["target"] for row in RIVALS.rows(kept))


def test_the_table_shows_medians_and_ranges_of_the_rounds_alone() -> None:
    kept = record({**trial(0.1, 50, 0.1), "title": "Flower"}, *rounds([2.0, 4.0, 3.0], [4.0, 5.0, None]))
    text = RIVALS.table(kept).markdown()
    assert "| Terrace 1 | 0.1 | 50 | 3 | 3.00 (2.00 to 4.00) | 40 | - |  |" in text
    assert "| Flower 1 | 0.1 | 50 | 2 | 4.50 (4.00 to 5.00) | 40 | 0.650 (0.500 to 0.800) | at most 1 |" in text


def test_one_that_cannot_be_installed_says_why_in_the_table() -> None:
    kept = record(*rounds([1.0, 1.0, 1.0], [None, None, None]))
    assert "unmeasured: it died" in RIVALS.table(kept).markdown()
