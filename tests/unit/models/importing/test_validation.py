"""When another preprocessing is clearly better, and what is assumed of one."""

from typing import Any

import numpy as np
import pytest

from models.importing.preprocess import Preprocess, PreprocessFacts, assumed, joined
from models.importing.validation import clearly_more, evenly, evenly_by_class
from tierkit.errors import InvalidInput


@pytest.mark.parametrize(
    ("gained", "lost", "same", "expected"),
    [
        (1, 0, 5, False),  # one of six pictures
        (5, 0, 1, False),
        (9, 0, 0, False),
        (10, 0, 0, True),
        (60, 20, 120, True),
        (60, 40, 100, False),
        (0, 60, 100, False),
        (12, 0, 500, False),  # more than chance, and too little to matter
    ],
)
def test_what_is_clearly_more(gained: int, lost: int, same: int, expected: bool) -> None:
    now = np.array([False] * gained + [True] * lost + [True] * same)
    then = np.array([True] * gained + [False] * lost + [True] * same)
    assert clearly_more(then, now) is expected


def test_pictures_are_tried_evenly_by_class() -> None:
    labels = np.array([0] * 150 + [1] * 150 + [2] * 20)
    chosen = evenly_by_class(labels, 200)
    assert len(set(chosen)) == 200
    assert np.bincount(labels[chosen]).tolist() == [90, 90, 20]
    assert evenly_by_class(labels[:5], 200) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 3, 199, 200, 201, 399, 400, 5000])
def test_pictures_are_calibrated_with_evenly(count: int) -> None:
    chosen = evenly(count, 200)
    assert (len(chosen), chosen[0], chosen[-1]) == (min(count, 200), 0, count - 1)
    assert max(np.diff(chosen), default=1) <= -(-count // 199)


def test_what_no_source_says_is_told() -> None:
    sources = {"a": PreprocessFacts(size=(8, 8)), "b": PreprocessFacts(colour="bgr", mean=(0.5, 0.5, 0.5))}
    said = assumed(sources, joined(sources))
    assert [line.split(" = ")[0] for line in said] == ["resize", "resample", "scale", "std"]
    assert 'resize = "shortest-side"' in said or "resize = shortest-side" in said


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"scale": 1, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, False),
        ({"scale": 255, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, True),
        ({"scale": 1, "mean": (123.0, 116.0, 103.0), "std": (1.0, 1.0, 1.0)}, True),
        ({"scale": 1}, True),
        ({"scale": 255, "mean": (123.0, 116.0, 103.0)}, False),
    ],
)
def test_mean_and_spread_fit_the_scale(values: dict[str, Any], right: bool) -> None:
    facts = PreprocessFacts(size=(8, 8), **values)
    if right:
        assert isinstance(joined({"x": facts}), Preprocess)
    else:
        with pytest.raises(InvalidInput, match="0 to 1"):
            joined({"x": facts})
