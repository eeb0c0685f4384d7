"""What the scheduler counts for /metrics."""

from __future__ import annotations

from collections.abc import Container
from functools import cache

from prometheus_client import Counter, Gauge

__all__ = [
    "COMMITS",
    "DEVICES",
    "JOBS",
    "count_attempt",
    "count_outstanding",
    "count_task",
    "counted_nodes",
    "forget_nodes",
]

_ATTEMPTS = Counter(
    "terrace_scheduler_attempts_total",
    "Attempts of tasks on end devices, by outcome: ok, refused (503), unreachable, error, lost, fallback, "
    "rerouted, cancelled, late.",
    ["outcome"],
)
_TASKS = Counter(
    "terrace_scheduler_tasks_total",
    "Tasks with a final answer: fine, coarse (scheme end), fallback, failed.",
    ["outcome"],
)
JOBS = Counter("terrace_scheduler_jobs_total", "Jobs that ended: completed, failed, cancelled.", ["state"])
_OUTSTANDING = Gauge("terrace_scheduler_outstanding_tasks", "Tasks that an end device has now.", ["node"])
DEVICES = Gauge("terrace_scheduler_devices", "Nodes on the device list.", ["tier", "health"])
COMMITS = Counter("terrace_scheduler_commits_total", "Group commits of results to the database.")

# Counted for each task: finding the metric of a label takes longer than counting, and one that is found is kept anyway.
_attempts, _tasks = cache(_ATTEMPTS.labels), cache(_TASKS.labels)
_outstanding: dict[str, Gauge] = {}


def count_attempt(outcome: str) -> None:
    """An attempt is over."""
    _attempts(outcome).inc()


def count_task(outcome: str) -> None:
    """A task has its final answer."""
    _tasks(outcome).inc()


def count_outstanding(node_id: str, more: int) -> None:
    """An end device has got a task, or lost one."""
    gauge = _outstanding.get(node_id)
    if gauge is None:
        gauge = _outstanding[node_id] = _OUTSTANDING.labels(node_id)
    gauge.inc(more)


def counted_nodes() -> int:
    """Nodes of which /metrics tells."""
    return len(_outstanding)


def forget_nodes(present: Container[str]) -> None:
    """Tell no more of the other nodes; they must have no tasks."""
    for node_id in [node_id for node_id in _outstanding if node_id not in present]:
        del _outstanding[node_id]
        _OUTSTANDING.remove(node_id)
