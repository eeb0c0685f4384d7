"""The arithmetic of the main job's measurement, on results written by hand."""

import numpy as np
import pytest

from benchmarks.main_job import compare, routes_of
from tierkit.client import CoarseAnswer, FineAnswer, ImageResult
from tierkit.types import Tier


def _result(index: int, coarse: int, fine: int | None, tier: Tier = Tier.EDGE) -> ImageResult:
    answer = None
    if fine is not None:
        answer = FineAnswer(
            index=fine, label="", confidence=1.0, coarse_index=0, coarse_label="", node="n", tier=tier, ms=1.0
        )
    return ImageResult(
        index=index, coarse=CoarseAnswer(index=coarse, label="", confidence=1.0, node="n", ms=1.0), fine=answer
    )


def test_routes_follow_the_tasks() -> None:
    results = [_result(0, 0, 1), _result(1, 0, 1), _result(2, 0, 1, Tier.CLOUD), _result(3, 0, 1, Tier.CLOUD)]
    results.append(_result(4, 0, None))
    routes = routes_of(results, batch=2)
    assert [(route.start, route.stop, route.upper) for route in routes] == [
        (0, 2, Tier.EDGE),
        (2, 4, Tier.CLOUD),
        (4, 5, None),
    ]


def test_a_task_answered_by_two_tiers_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="several tiers"):
        routes_of([_result(0, 0, 1), _result(1, 0, 1, Tier.CLOUD)], batch=2)


def test_agreement_counts_each_stage() -> None:
    results = [_result(0, 3, 7), _result(1, 4, 8), _result(2, 5, None)]
    agreement = compare(results, np.array([3, 4, 0]), np.array([7, 9, -1]))
    assert (agreement["images"], agreement["coarse_equal"]) == (3, 2)
    assert (agreement["fine_answered"], agreement["fine_equal"]) == (2, 1)
