"""Stages and schedules of torch.distributed.pipelining."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from training.learner import FlatLearner

__all__ = ["SCHEDULES", "TimedStage"]

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class TimedStage(PipelineStage):
    """A stage that measures its computing time."""

    learner: FlatLearner
    busy_s = 0.0

    def forward_one_chunk(self, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = super().forward_one_chunk(*args, **named)
        self._spend("forward", began)
        return found

    def backward_one_chunk(self, *args: Any, **named: Any) -> None:
        began = time.perf_counter()
        super().backward_one_chunk(*args, **named)
        self._spend("backward", began)

    def _spend(self, name: str, began: float) -> None:
        took = time.perf_counter() - began
        self.busy_s += took
        self.learner.spend(name, took)
