"""Prometheus metrics of the scheduler."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from models.hierarchy import Hierarchy
from scheduler.core.device import Node
from tierkit.types import Tier

__all__ = [
    "ATTEMPTS",
    "COMMITS",
    "DATABASE",
    "DEVICES",
    "JOBS",
    "LEADS",
    "OUTSTANDING",
    "REFUSED",
    "TASKS",
    "UNFINISHED",
    "WAITING",
    "ClassCounts",
    "set_standby",
    "show_networks",
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
REFUSED = Counter(
    "terrace_scheduler_refused_registrations_total",
    "Registrations of nodes that were refused: networks (not those of the model set), claim (the id is another "
    "node's), forbidden (removed by an operator, or the token is for other nodes).",
    ["tier", "reason"],
)
NETWORKS = Gauge(
    "terrace_scheduler_network_nodes",
    "Live nodes by the network that tasks ask them for.",
    ["tier", "model", "sha256"],
)
ANSWERS = Counter("terrace_scheduler_answers_total", "Answers for images, by tier and class.", ["tier", "label"])
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
    for labelled in (OUTSTANDING, DEVICES, NETWORKS):
        labelled.clear()
    DATABASE.set(1)


def show_networks(alive: Iterable[Node]) -> None:
    """Show which networks the live nodes serve."""
    counts = Tally((node.tier, node.model, node.sha256) for node in alive)
    NETWORKS.clear()
    for labels, count in counts.items():
        NETWORKS.labels(*labels).set(count)


_MOST_CLASSES = 1000
"""Above this many classes only superclasses are counted, and above this many of those nothing: each is a series."""


class ClassCounts:
    """Counts the answers of each tier by class, in arrays; `show` adds them to the metric.

    Args:
        hierarchy: of the answers.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._parents: NDArray[np.int32] | None = None
        names = {"coarse": hierarchy.coarse, "fine": hierarchy.fine}
        if len(hierarchy.fine) > _MOST_CLASSES:
            self._parents, names["fine"] = np.array(hierarchy.parent, np.int32), hierarchy.coarse
        self._names = {kind: own if len(own) <= _MOST_CLASSES else () for kind, own in names.items()}
        self._new: dict[tuple[Tier, str], NDArray[np.int64]] = {}

    def add(self, answers: Iterable[tuple[Tier, NDArray[np.int32], bool]]) -> None:
        """Count answers: the tier, labels int32 `[n]`, and True for classes, False for superclasses."""
        for tier, labels, fine in answers:
            kind = "fine" if fine else "coarse"
            if fine and self._parents is not None:
                labels = self._parents[labels]
            if size := len(self._names[kind]):
                counts = np.bincount(labels, minlength=size)
                known = self._new.get((tier, kind))
                self._new[tier, kind] = counts if known is None else known + counts

    def show(self) -> None:
        """Add what was counted since the last call to the metric."""
        for (tier, kind), counts in self._new.items():
            for label in np.flatnonzero(counts).tolist():
                ANSWERS.labels(tier, self._names[kind][label]).inc(int(counts[label]))
        self._new.clear()


# Prometheus sees an increase only from a value that it has read before, so each counter begins at 0.
for _metric, _values in (
    (ATTEMPTS, "ok refused unreachable error lost fallback rerouted deadline cancelled late"),
    (TASKS, "fine coarse fallback failed"),
    (JOBS, "completed failed cancelled"),
):
    for _value in _values.split():
        _metric.labels(_value)
for _tier in Tier:
    for _value in ("networks", "claim", "forbidden"):
        REFUSED.labels(_tier, _value)
