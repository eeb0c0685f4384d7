"""Segments that spread on virtual time."""

from __future__ import annotations

import pytest

from experiments.training.data_copies import judge as judge_copies
from experiments.training.data_tree import judge
from experiments.training.spreading import formula_s, spread


@pytest.mark.parametrize(("receivers", "steps"), [(1, 1), (7, 3), (8, 4), (63, 6)])
def test_without_chunks_it_takes_as_many_steps_as_the_source_says(receivers: int, steps: int) -> None:
    found = spread(receivers, chunks=1, segment_s=10.0, deepest=1)
    assert found.seconds == pytest.approx(10 * steps) == formula_s(receivers, deepest=1, chunks=1, segment_s=10.0)
    assert found.got == receivers
    assert found.sent_by_host == pytest.approx(steps)


def test_one_source_sends_to_one_after_the_other() -> None:
    found = spread(20, chunks=1, segment_s=10.0, deepest=1, serve=False)
    assert found.seconds == pytest.approx(200)
    assert found.mean_s == pytest.approx(105)


def test_a_chain_takes_a_segment_and_a_chunk_for_each_machine() -> None:
    found = spread(8, chunks=50, segment_s=10.0, deepest=8)
    assert found.seconds == pytest.approx(10 * (1 + 7 / 50)) == formula_s(8, deepest=8, chunks=50, segment_s=10.0)
    assert found.sent_by_host == pytest.approx(1)


@pytest.mark.parametrize(("chunks", "deepest", "at"), [(1, 1, 35.0), (20, 8, 12.0), (20, 3, 5.0)])
def test_when_half_of_the_senders_die_all_others_get_all(chunks: int, deepest: int, at: float) -> None:
    found = spread(60, chunks=chunks, segment_s=10.0, deepest=deepest, kill_at_s=at, notice_s=3.0)
    assert found.killed > 0
    assert found.got == 60 - found.killed


def test_a_machine_that_is_left_without_is_a_target_missed() -> None:
    point = {"receivers": 10, "killed": 2, "got": 7, "killing": True, "serve": True, "seconds": 1.0, "formula_s": 1.0}
    assert [judged.reached for judged in judge(point)] == [False]
    assert [judged.reached for judged in judge({**point, "got": 8})] == [True]
    slow = {**point, "killing": False, "chunked": False, "seconds": 1.1}
    assert [judged.reached for judged in judge(slow)] == [False]


def copied(**given: object) -> dict[str, object]:
    point = {"name": "x", "killing": False, "rival": False, "seconds": 11.0, "formula_s": 10.0, "alive": 8, "got": 8}
    return {**point, "killed": 0, **given}


def test_real_copies_are_held_against_the_formula_by_their_median() -> None:
    assert [each.reached for each in judge_copies([copied(), copied(seconds=11.9), copied(seconds=99.0)])] == [True]
    assert [each.reached for each in judge_copies([copied(seconds=12.1)])] == [False]
    assert [each.reached for each in judge_copies([copied(), {"killing": False, "failure": "it broke"}])] == [False]
    assert judge_copies([copied(formula_s=None, rival=True)]) == []
    assert [each.reached for each in judge_copies([copied(killing=True)])] == [True]
    assert [each.reached for each in judge_copies([copied(killing=True, got=7)])] == [False]
