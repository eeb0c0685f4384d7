"""What the scheduler counts for /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

__all__ = [
    "ATTEMPTS",
    "COMMITS",
    "DATABASE",
    "DEVICES",
    "JOBS",
    "LEADS",
    "OUTSTANDING",
    "TASKS",
    "UNFINISHED",
    "WAITING",
    "set_standby",
]

ATTEMPTS = Counter(
    "terrace_scheduler_attempts_total",
    "Attempts of tasks on end devices, by outcome: ok, refused (503), unreachable, error, lost, fallback, "
    "rerouted, deadline, cancelled, late.",
    ["outcome"],
)
TASKS = Counter(
    "terrace_scheduler_tasks_total",
    "Tasks with a final answer: fine, coarse (scheme end), fallback, failed.",
    ["outcome"],
)
JOBS = Counter("terrace_scheduler_jobs_total", "Jobs that ended: completed, failed, cancelled.", ["state"])
UNFINISHED = Gauge("terrace_scheduler_unfinished_jobs", "Jobs that wait or run.")
WAITING = Gauge("terrace_scheduler_waiting_tasks", "Tasks of unfinished jobs that wait to be sent to an end device.")
OUTSTANDING = Gauge("terrace_scheduler_outstanding_tasks", "Tasks that an end device has now.", ["node"])
DEVICES = Gauge("terrace_scheduler_devices", "Nodes on the device list.", ["tier", "health"])
COMMITS = Counter("terrace_scheduler_commits_total", "Group commits of results to the database.")
LEADS = Gauge("terrace_scheduler_leads", "1 while this scheduler leads, 0 while it is a standby.")
DATABASE = Gauge(
    "terrace_scheduler_database_accepts_results",
    "1, or 0 while the database refuses results, which then wait.",
)


def set_standby() -> None:
    """What a scheduler shows that has no jobs and no nodes, since another one leads."""
    LEADS.set(0)
    for gauge in (UNFINISHED, WAITING):
        gauge.set(0)
    for labelled in (OUTSTANDING, DEVICES):
        labelled.clear()
    DATABASE.set(1)


# Prometheus sees an increase only from a value that it has read before, so each counter begins at 0.
for _metric, _values in (
    (ATTEMPTS, "ok refused unreachable error lost fallback rerouted deadline cancelled late"),
    (TASKS, "fine coarse fallback failed"),
    (JOBS, "completed failed cancelled"),
):
    for _value in _values.split():
        _metric.labels(_value)
