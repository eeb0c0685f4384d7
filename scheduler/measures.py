"""What the scheduler counts for /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

__all__ = ["ATTEMPTS", "COMMITS", "DEVICES", "JOBS", "OUTSTANDING", "TASKS"]

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
OUTSTANDING = Gauge("terrace_scheduler_outstanding_tasks", "Tasks that an end device has now.", ["node"])
DEVICES = Gauge("terrace_scheduler_devices", "Nodes on the device list.", ["tier", "health"])
COMMITS = Counter("terrace_scheduler_commits_total", "Group commits of results to the database.")
