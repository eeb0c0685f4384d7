"""Deadlines of tasks and attempts, and the waits before a retry. Pure: time and chance are passed in."""

from __future__ import annotations

from msgspec import Struct

from scheduler.core.work import JobFacts
from tierkit.pacing import TokenBucket, backoff_s
from tierkit.types import UpstreamLoss

__all__ = ["TaskLimits", "attempt_deadline", "retry_wait_s", "task_deadline", "upstream_wait_s"]

_RETRY_S, _RETRY_CAP_S = 0.05, 2.0
_UPSTREAM_WAIT_S, _UPSTREAM_WAIT_CAP_S = 0.2, 5.0
"""Longest wait after the first failure, and after many."""


class TaskLimits(Struct, frozen=True, kw_only=True):
    """Limits of the work on a task. The settings of the scheduler explain each field."""

    max_attempts: int
    coarse_timeout_s: float
    task_deadline_s: float
    acknowledge_s: float
    set_aside_s: float
    retries_per_s: float
    retry_burst: float

    def retry_budget(self) -> TokenBucket:
        """The retry budget of a new job."""
        return TokenBucket(self.retries_per_s, self.retry_burst)


def task_deadline(job: JobFacts, started: float | None, now: float) -> float:
    """Return the time at which a task must have its final answer, counted from its first dispatch, or from now."""
    return min(job.deadline, (now if started is None else started) + job.policy.task_deadline_s)


def attempt_deadline(limits: TaskLimits, job: JobFacts, started: float | None, now: float) -> float:
    """Return the time at which an attempt that begins now is given up."""
    deadline = task_deadline(job, started, now)
    if job.policy.on_upstream_loss is UpstreamLoss.WAIT:
        # The task may wait for as long as the job; one silent upstream node may not hold it that long.
        deadline = min(deadline, now + limits.task_deadline_s)
    return deadline


def retry_wait_s(failures: int, jitter: float) -> float:
    """Seconds before a task is sent again after this number of failed attempts."""
    return backoff_s(failures, first_s=_RETRY_S, cap_s=_RETRY_CAP_S, chance=jitter)


def upstream_wait_s(waits: int, jitter: float) -> float:
    """Seconds before a task asks for its fine answer again after this number of returns without it."""
    return backoff_s(waits, first_s=_UPSTREAM_WAIT_S, cap_s=_UPSTREAM_WAIT_CAP_S, chance=jitter)
