"""Ranks that fit together, and steps from which all can continue."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tierkit.errors import Conflict
from training.parallel.allreduce import scaled_rate
from training.parallel.elastic import _Member
from training.parallel.meeting import common_step, differences
from training.strategies.config import ExchangeConfig

pytestmark = pytest.mark.train

SAME = {"network": "a1", "world size": 3}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([SAME, SAME, SAME], ""),
        ([SAME, {**SAME, "network": "b2"}, SAME], "rank 1 has the network b2, others a1"),
        ([{**SAME, "network": "b2"}, SAME, SAME], "rank 0 has the network b2, others a1"),
        ([SAME, {**SAME, "world size": 2}], "rank 1 has the world size 2, others 3"),
        ([SAME, {"network": "a1"}], "rank 1 has the world size None, others 3"),
    ],
)
def test_ranks_that_differ_are_named(facts: list[dict[str, Any]], said: str) -> None:
    assert differences(facts) == said


@pytest.mark.parametrize(
    ("kept", "step"),
    [([[], []], 0), ([[10, 20], [20, 30]], 20), ([[10, 20], [10, 20]], 20), ([[5], [5], [5]], 5)],
)
def test_ranks_continue_from_the_newest_step_that_all_have(kept: list[list[int]], step: int) -> None:
    assert common_step(kept) == step


@pytest.mark.parametrize("kept", [[[10, 20], [30, 40]], [[10, 20], []]])
def test_ranks_without_a_common_step_are_told(kept: list[list[int]]) -> None:
    with pytest.raises(Conflict, match=r"rank 0 20, rank 1 (40|nothing)"):
        common_step(kept)


def test_a_member_that_trains_something_else_takes_no_weights() -> None:
    member = _Member(SimpleNamespace(facts=SAME))  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="this member has the network a1, others b2"):
        member._load({"facts": {**SAME, "network": "b2"}})


def test_the_rate_rises_by_the_same_amount_at_each_step() -> None:
    """Section 2.2 of arXiv:1706.02677: from the rate of one worker to k times it, gradually."""
    config = ExchangeConfig(rule="allreduce", warmup=0.25)
    rates = [scaled_rate(config, 0.1, ranks=8, step=step, steps=40) for step in range(12)]
    assert rates[0] == pytest.approx(0.1 * (1 + 7 / 11))
    rises = [after - before for before, after in itertools.pairwise(rates)]
    assert rises == pytest.approx([0.7 / 11] * 10 + [0.0])
    assert rates[10:] == pytest.approx([0.8, 0.8])
    unscaled = config.model_copy(update={"scaling": "none"})
    assert scaled_rate(unscaled, 0.1, ranks=8, step=20, steps=40) == 0.1
