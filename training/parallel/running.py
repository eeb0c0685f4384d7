"""The life of one rank: meet the others, train, and bring the result. torchrun, Ray Train and `terrace train run` start
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from tierkit.errors import SetupError, Unavailable
from training.parallel.allreduce import allreduce_by_torch, computed_by_torch
from training.parallel.elastic import run_member
from training.parallel.exchange import Done, Mean, Seat
from training.parallel.group import Group, run_program
from training.parallel.keeping import Totals
from training.parallel.meeting import Meeting, RankPlace, common_step
from training.parallel.pipeline import pipeline
from training.parallel.programs import make_program
from training.parallel.rank import RankOptions, RankRun
from training.parallel.reporting import RankProgress
from training.strategies.config import ExchangeConfig

__all__ = ["run_rank"]

_LOOK_S = 1.0
"""Seconds between two checks for a request to stop."""


def run_rank(
    options: RankOptions, on_progress: Callable[[RankProgress], None] = lambda now: None
) -> dict[str, Any] | None:
    """Train to the end; the result, at rank 0.

    Args:
        on_progress: called after each step.

    Raises:
        SetupError: the options, the data or the folder cannot be used.
        Conflict: the ranks do not fit together, or the run was stopped.
        Unavailable, DeadlineExceeded: another rank does not come, or is lost.
    """
    run = RankRun(options, RankPlace.of_environment(), on_progress)
    if isinstance(run.strategy, ExchangeConfig) and run.strategy.elastic:
        return run_member(run)
    with run.folder_locked():
        return _run(run)


class _Stopped(Exception):
    """A scheduler has said so."""


def _run(run: RankRun) -> dict[str, Any] | None:
    place, patience_s = run.place, run.options.patience_s
    with Meeting.met(place, run.facts, patience_s) as meeting:
        try:
            steps: list[int] | str = run.kept.steps()
        except SetupError as error:
            steps = str(error)
        meeting.tell("kept", steps)
        start = common_step(meeting.all_told("kept"))
        with meeting.group(run.device) as group:
            if run.strategy.rule == "hybrid":
                from training.parallel.hybrid import split_dense  # its parts of torch take a second to import

                split_dense(run.learner, group)
            figures = run.continue_from(start)
            reports = run.reports(run.totals.run, meeting.stop)
            with reports.sent(run.options.scheduler if place.rank == 0 else None):
                try:
                    reports.result = _train(run, meeting, group, start, figures)
                except (_Stopped, Unavailable) as error:
                    if isinstance(error, _Stopped) or _stopped(meeting):
                        raise run.stopped from error
                    raise
                return reports.result


def _train(
    run: RankRun, meeting: Meeting, group: Group, start: int, kept: Mapping[str, float]
) -> dict[str, Any] | None:
    looked_at = time.monotonic()

    def spend() -> None:
        run.spend(group.bytes_sent, group.bytes_received, group.waited_s)
        group.waited_s = 0.0

    def done(done: Done) -> None:
        nonlocal looked_at
        spend()
        run.stepped(done, lambda: group.answer(Mean(np.zeros(1, np.float32))))
        if time.monotonic() > looked_at + _LOOK_S:
            looked_at = time.monotonic()
            if meeting.stopped():
                raise _Stopped

    group.bytes_sent, group.bytes_received = run.totals.bytes_sent, run.totals.bytes_received
    learner, strategy = run.learner, run.strategy
    with ExitStack() as stack:
        if isinstance(strategy, ExchangeConfig) and strategy.rule == "allreduce":
            stack.enter_context(computed_by_torch(learner, start=start))
            program = allreduce_by_torch(learner, strategy, group, start=start)
        elif isinstance(strategy, ExchangeConfig) and strategy.rule == "hybrid":
            from training.parallel.hybrid import hybrid

            program = hybrid(learner, strategy, group, start=start)
        elif run.stage is not None:
            program = pipeline(run.stage, group, start=start)
        else:
            seat = Seat(rank=group.rank, ranks=group.ranks, test=run.test, start=start, kept=kept)
            program = make_program(strategy, learner, seat)
        run.begin()
        figures = run_program(program, group.answer, done)
    spend()
    meeting.tell("totals", asdict(run.totals))
    totals = [Totals(**each) for each in meeting.all_told("totals")]
    if not run.place.rank:
        return run.result(totals, figures)
    if strategy.rule == "ensemble" and run.options.folder is not None:
        run.keep(run.options.folder / f"rank-{run.place.rank}", run.counted(totals))
    return None


def _stopped(meeting: Meeting) -> bool:
    try:
        return meeting.stopped()
    except Unavailable:
        return False
