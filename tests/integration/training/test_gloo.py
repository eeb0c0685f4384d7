"""Programs of ranks with real processes and gloo: the same as on virtual time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.ranked import build, run_one
from training.parallel.lockstep import Ranks, run_ranks
from training.parallel.programs import make_program
from training.strategies.config import ExchangeConfig, RanksConfig, TournamentConfig

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

BUDGET_S = 60.0


def run_with_gloo(choices: list[RanksConfig], ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What came of each rank, for each strategy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.training.ranked"])
    answers = context.Queue()
    processes = [
        context.Process(target=run_one, args=(rank, ranks, str(folder / "meet"), choices, answers))
        for rank in range(ranks)
    ]
    try:
        for each in processes:
            each.start()
        found = dict(answers.get(timeout=BUDGET_S) for _ in processes)
    finally:
        for each in processes:
            each.join(10)
            each.kill()
    return [[found[rank][number] for rank in range(ranks)] for number in range(len(choices))]


@pytest.mark.parametrize("ranks", [4, 8])
def test_real_processes_do_what_virtual_time_foretells(ranks: int, tmp_path: Path) -> None:
    choices: list[RanksConfig] = [
        ExchangeConfig(rule="gossip"),
        TournamentConfig(period=2),
        ExchangeConfig(rule="ensemble"),
        ExchangeConfig(rule="factors"),
    ]
    for choice, found in zip(choices, run_with_gloo(choices, ranks, tmp_path), strict=True):
        learners, seats = zip(*(build(choice, rank, ranks) for rank in range(ranks)), strict=True)
        programs = [make_program(choice, learner, seat) for learner, seat in zip(learners, seats, strict=True)]
        foretold = run_ranks(programs, Ranks(step_s=[1.0] * ranks))
        assert sum(each["bytes_sent"] for each in found) == foretold.bytes_sent
        for each, learner in zip(found, learners, strict=True):
            assert each["steps"] == foretold.steps
            assert each["figures"] == pytest.approx(foretold.figures, abs=1e-4)
            assert each["joined"] == pytest.approx(learner.joined(), abs=1e-5)
        if choice.rule == "gossip":
            # An exchange of all weights at each step, whatever the number of ranks.
            size = learners[0].joined().nbytes
            assert {each["step_bytes"] for each in found} == {size} == {foretold.step_bytes}
