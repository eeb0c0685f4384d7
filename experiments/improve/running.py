"""The runs of `terrace experiment improve`, in order. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.improve.digits import digits_judge, digits_world
from experiments.improve.leak import CASES, Attacker, LeakCase, leak_line
from experiments.improve.tables import KINDS, Lie, Recipe, drift_line, personal_line, poison_line, teacher_line
from experiments.improve.world import DeviceGroup, LearningWorld, drift_world, upper_judge
from tierkit.tensors import Array

__all__ = ["lines"]

_DRIFT_RATE = 0.01
_DIGITS_RATE, _DIGITS_STEPS = 0.03, 800
_POISONED = DeviceGroup(devices=10, skew=1.0)
_PERSONAL = DeviceGroup(devices=8, skew=0.2)
_PERSONAL_SEEDS = 2
"""More than the other tables have."""
_SINGLE_PICTURES = 8
"""Runs of `leak` whose update is made of one picture."""


class Extent(Protocol):
    """Number of runs, pictures and steps."""

    seeds: int
    images: int
    steps: int
    runs: int
    search: int
    data: Path | None


Line = tuple[str, Callable[[], dict[str, Any]]]


def lines(wanted: Sequence[str], extent: Extent, seed: int, folder: Path) -> list[Line]:
    """The runs of these tables: a label and what makes its point.

    Args:
        seed: of the first run.
        folder: for the network of digits.
    """
    torch.set_num_threads(1)
    seeds = range(seed, seed + extent.seeds)
    slow = Recipe(steps=extent.steps, rate=_DRIFT_RATE)
    quick = Recipe(steps=min(_DIGITS_STEPS, 2 * extent.steps), rate=_DIGITS_RATE, mirror=False)

    @cache
    def pictures() -> LearningWorld:
        return drift_world(extent.data, extent.images)

    @cache
    def digits() -> LearningWorld:
        return digits_world(extent.data, folder / "digits")

    def drift(true_labels: bool, number: int) -> dict[str, Any]:
        return drift_line(pictures(), slow, DeviceGroup(true_labels=true_labels), number)

    def poison(lie: Lie, number: int) -> dict[str, Any]:
        return poison_line(digits(), quick, _POISONED, lie, number)

    def teacher(validation: bool, number: int) -> dict[str, Any]:
        return teacher_line(digits(), quick, _POISONED, number, validation=validation)

    def personal(number: int) -> dict[str, Any]:
        return personal_line(pictures(), _PERSONAL, number)

    @cache
    def judge() -> Callable[[Array], Array]:
        return upper_judge()

    @cache
    def judge_of_digits() -> Callable[[Array], Array]:
        return digits_judge(extent.data, folder / "judge")

    def leak(case: LeakCase, number: int) -> dict[str, Any]:
        world = digits() if case.digits else pictures()
        attacker = Attacker(steps=extent.search, judge=judge_of_digits() if case.digits else judge())
        return leak_line(world, slow.config(world, number), case, attacker, number)

    more = seeds if extent.seeds == 1 else range(seed, seed + extent.seeds + _PERSONAL_SEEDS)
    todo: list[tuple[str, str, int, Callable[[], dict[str, Any]]]] = []
    for words, true in (("answers from above", False), ("true labels", True)):
        todo += [("drift", words, number, partial(drift, true, number)) for number in seeds]
    for number in range(seed, seed + extent.runs):
        lie = KINDS[number % len(KINDS)]
        todo.append(("poison", lie, number, partial(poison, lie, number)))
    for words, known in (("with labelled pictures", True), ("without labelled pictures", False)):
        todo += [("teacher", words, number, partial(teacher, known, number)) for number in seeds]
    todo += [("personal", "own last layer", number, partial(personal, number)) for number in more]

    for case in CASES:
        few = case.pictures > 1 or extent.seeds == 1
        numbers = seeds if few else range(seed, seed + _SINGLE_PICTURES)
        todo += [("leak", case.words, number, partial(leak, case, number)) for number in numbers]

    def line(table: str, words: str, number: int, measure: Callable[[], dict[str, Any]]) -> Line:
        return f"{table}: {words}, seed {number}", lambda: {"table": table, "line": words, "seed": number, **measure()}

    return [line(*each) for each in todo if each[0] in wanted]
