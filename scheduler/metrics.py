"""Prometheus metrics of the scheduler."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from models.hierarchy import Hierarchy
from scheduler.core.device import Device, Node
from scheduler.core.learning import Agreement
from scheduler.core.site import NO_SITE
from tierkit.types import Health, Tier
from tierkit.wire.learning import KeptState
from tierkit.wire.observations import DeviceStatus
from tierkit.wire.releases import GuardNow, ReleaseState, RolloutState

__all__ = [
    "ATTEMPTS",
    "COMMITS",
    "DATABASE",
    "DEVICES",
    "GUARDS",
    "GUARD_LIMITS",
    "JOBS",
    "LEADS",
    "LEARNING",
    "NETWORK_BYTES",
    "OBSERVATION_BYTES",
    "OUTSTANDING",
    "REFUSED",
    "SINK_DEAD",
    "SINK_DELIVERED",
    "SINK_FAILED",
    "SINK_LAG",
    "SINK_WAITING",
    "SITES",
    "SOURCES",
    "STORED_OBSERVATIONS",
    "TASKS",
    "UNFINISHED",
    "WAITING",
    "ClassCounts",
    "KnownSites",
    "KnownSources",
    "SiteCollector",
    "SourceCollector",
    "count_batch",
    "count_rollout",
    "forget_sink",
    "set_standby",
    "show_guards",
    "show_networks",
    "show_releases",
    "show_sink",
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
SINK_DELIVERED = Counter("terrace_scheduler_sink_delivered_total", "Events that the receiver of a sink took.", ["sink"])
SINK_FAILED = Counter("terrace_scheduler_sink_failed_total", "Tries to deliver an event that failed.", ["sink"])
SINK_WAITING = Gauge(
    "terrace_scheduler_sink_waiting_events", "The most events that the receiver of a sink may lack.", ["sink"]
)
SINK_LAG = Gauge(
    "terrace_scheduler_sink_lag_seconds", "Age of the oldest event on its way to the receiver of a sink.", ["sink"]
)
SINK_DEAD = Gauge("terrace_scheduler_sink_dead_letters", "Events that were given up, by sink.", ["sink"])
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
RELEASES = Gauge(
    "terrace_scheduler_release_info",
    "1 for each release that answers: in force, canary, rolling out, or another state for one that only unfinished "
    "jobs need.",
    ["release", "state"],
)
RELEASE_NODES = Gauge(
    "terrace_scheduler_release_nodes", "Live nodes that hold a release, for each release that answers.", ["release"]
)
LAGGING = Gauge(
    "terrace_scheduler_release_lagging_nodes", "Live nodes that hold nothing of the release in force, and get no work."
)
NETWORK_BYTES = Counter(
    "terrace_scheduler_network_bytes_total",
    "Bytes of networks that nodes have fetched, from the scheduler, or from other nodes as the receivers say; sender: "
    "scheduler or nodes.",
    ["sender"],
)
for _sender in ("scheduler", "nodes"):
    NETWORK_BYTES.labels(_sender)
ROLLOUTS = Counter(
    "terrace_scheduler_rollouts_total",
    "Changes of the release in force that ended: done, rolled_back (a guard failed, or it could not be used), stopped.",
    ["outcome"],
)
GUARDS = Gauge(
    "terrace_scheduler_guard",
    "Figure of a guard of the trial under way, which its limit is compared with; none without a trial.",
    ["guard"],
)
GUARD_LIMITS = Gauge("terrace_scheduler_guard_limit", "Limit of a guard of the trial under way.", ["guard"])
ANSWERS = Counter("terrace_scheduler_answers_total", "Answers for images, by tier and class.", ["tier", "label"])
COMMITS = Counter("terrace_scheduler_commits_total", "Group commits of results to the database.")
LEADS = Gauge("terrace_scheduler_leads", "1 while this scheduler leads, 0 while it is a standby.")
DATABASE = Gauge(
    "terrace_scheduler_database_accepts_results",
    "1, or 0 while the database refuses results, which then wait.",
)
OBSERVATIONS = Counter(
    "terrace_observations_total",
    "Observations that nodes have sent: new, amended (a higher revision of a stored one) or known (stored before).",
    ["kind"],
)
OBSERVATION_BATCHES = Counter("terrace_observation_batches_total", "Batches of observations that were stored.")
OBSERVATION_BYTES = Counter(
    "terrace_observation_bytes_total", "Bytes of the bodies of these batches as they came, compressed or not."
)
OBSERVATION_AGE = Histogram(
    "terrace_observation_age_seconds",
    "Age of the pictures of new observations when their batch was written.",
    buckets=(
        0.1,
        0.3,
        1.0,
        3.0,
        10.0,
        30.0,
        60.0,
        300.0,
        900.0,
        3600.0,
        6 * 3600.0,
        86400.0,
        7 * 86400.0,
        30 * 86400.0,
    ),
)
STORED_OBSERVATIONS = Gauge(
    "terrace_observations_stored", "Observations in the database, as the last deletion of old ones has counted them."
)


def set_standby() -> None:
    """Set the metrics of a standby scheduler, which has no jobs and no nodes."""
    LEADS.set(0)
    for gauge in (UNFINISHED, WAITING):
        gauge.set(0)
    for labelled in (OUTSTANDING, DEVICES, NETWORKS, RELEASES, RELEASE_NODES, GUARDS, GUARD_LIMITS):
        labelled.clear()
    LAGGING.set(0)
    DATABASE.set(1)
    STORED_OBSERVATIONS.set(0)
    SOURCES.show(None)
    LEARNING.show(None)
    SITES.show(None)


def show_networks(alive: Iterable[Node]) -> None:
    """Show which networks the live nodes serve."""
    counts = Tally((node.tier, node.model, node.sha256) for node in alive)
    NETWORKS.clear()
    for labels, count in counts.items():
        NETWORKS.labels(*labels).set(count)


def show_releases(holding: Mapping[tuple[str, ReleaseState], int], lagging: int) -> None:
    """Show the releases that answer.

    Args:
        holding: live nodes by the release that they hold (NAME@NUMBER) and its state.
        lagging: live nodes that hold nothing of the release in force.
    """
    RELEASES.clear()
    RELEASE_NODES.clear()
    for (release, state), count in holding.items():
        RELEASES.labels(release, state).set(1)
        RELEASE_NODES.labels(release).set(count)
    LAGGING.set(lagging)


def show_guards(guards: Iterable[GuardNow]) -> None:
    """Show the guards of the trial under way; none without a trial."""
    GUARDS.clear()
    GUARD_LIMITS.clear()
    for guard in guards:
        GUARD_LIMITS.labels(guard.name).set(guard.limit)
        if guard.value is not None:
            GUARDS.labels(guard.name).set(guard.value)


def count_rollout(state: RolloutState) -> None:
    """Count a change of the release in force that has ended."""
    ROLLOUTS.labels(_OUTCOMES[state]).inc()


def count_batch(ages_s: Sequence[float], *, amended: int, known: int) -> None:
    """Count a batch of observations that is stored.

    Args:
        ages_s: ages of the observations that were not stored before.
        amended: number of higher revisions.
        known: number of observations that were stored before.
    """
    OBSERVATION_BATCHES.inc()
    for age_s in ages_s:
        OBSERVATION_AGE.observe(age_s)
    for kind, value in (("new", len(ages_s)), ("amended", amended), ("known", known)):
        OBSERVATIONS.labels(kind).inc(value)


class _Heard(Protocol):
    @property
    def heard_elapsed(self) -> float | None: ...


class KnownLearning(Protocol):
    """The figures behind the metrics of learning."""

    labels: int

    def agreement(self) -> Agreement: ...

    def kept(self) -> Mapping[str, KeptState]: ...


class LearningCollector(Collector):
    """Metrics of learning, made when they are read."""

    def __init__(self) -> None:
        self._known: KnownLearning | None = None

    def show(self, known: KnownLearning | None) -> None:
        """Show these figures from now on; None for a scheduler that does not lead."""
        self._known = known

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = self._families()
        if (known := self._known) is not None:
            agreement = known.agreement()
            families["audited"].add_metric((), agreement.audited)
            if agreement.share is not None:
                families["agreement"].add_metric((), agreement.share)
            families["labels"].add_metric((), known.labels)
            for node_id, kept in islice(sorted(known.kept().items()), _MOST_LISTED):
                families["kept"].add_metric((node_id,), kept.pictures)
        return families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"terrace_{name}", text, labels=labels)

        return {
            "audited": gauge(
                "audited_pictures", "Sure pictures with an answer from above, of the latest 1,000 of each source."
            ),
            "agreement": gauge("tier_agreement", "Share of them with the same superclass in both answers."),
            "labels": gauge("labelled_pictures", "Pictures at the scheduler that people have labelled."),
            "kept": gauge("device_kept_pictures", "Pictures that a device keeps, by its last word.", "node_id"),
        }


LEARNING = LearningCollector()
REGISTRY.register(LEARNING)


class KnownSources(Protocol):
    """The sources of the fleet."""

    @property
    def entries(self) -> Mapping[tuple[str, str], _Heard]:
        """Entries by node id and name."""

    @property
    def devices(self) -> Mapping[str, DeviceStatus]:
        """The last word of each node."""

    @property
    def elapsed(self) -> Callable[[], float]:
        """Returns seconds of elapsed time."""


_MOST_LISTED = 2000
"""Sources that have series, and devices that have series."""


class SourceCollector(Collector):
    """Metrics of each source and each device, made when they are read."""

    def __init__(self) -> None:
        self._known: KnownSources | None = None

    def show(self, known: KnownSources | None) -> None:
        """Show these sources from now on; None for a scheduler that does not lead."""
        self._known = known

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = self._families()
        if self._known is not None:
            self._fill(self._known, families)
        return families.values()

    def _fill(self, known: KnownSources, families: Mapping[str, GaugeMetricFamily]) -> None:
        keys = sorted(known.entries)
        families["unlisted"].add_metric((), max(0, len(keys) - _MOST_LISTED))
        began = time.time() - known.elapsed()
        states = {
            (node_id, each.name): each.state for node_id, status in known.devices.items() for each in status.sources
        }
        for key in keys[:_MOST_LISTED]:
            if (heard := known.entries[key].heard_elapsed) is not None:
                families["heard"].add_metric(key, began + heard)
            if (state := states.get(key, "")) not in ("paused", "finished"):
                families["running"].add_metric(key, state == "running")
        for node_id, status in islice(sorted(known.devices.items()), _MOST_LISTED):
            families["bytes"].add_metric((node_id,), status.spool_bytes)
            families["size"].add_metric((node_id,), status.spool_size_bytes)
            families["lost"].add_metric((node_id,), status.lost_answers)

    def _families(self) -> dict[str, GaugeMetricFamily]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"terrace_{name}", text, labels=labels)

        source = "node_id", "source"
        return {
            "heard": gauge("source_heard_timestamp_seconds", "When something of a source was stored last.", *source),
            "running": gauge(
                "source_running",
                "1 if a source runs, by the last word of its device, otherwise 0; none while it is paused or finished.",
                *source,
            ),
            "unlisted": gauge("sources_unlisted", f"Sources beyond the first {_MOST_LISTED}, which have no series."),
            "bytes": gauge(
                "device_spool_bytes",
                "Room that waiting answers and pictures take in a device's spool, by its last word.",
                "node_id",
            ),
            "size": gauge("device_spool_size_bytes", "Limit on that room.", "node_id"),
            "lost": gauge(
                "device_lost_answers", "Answers that a device dropped because its spool was full.", "node_id"
            ),
        }


SOURCES = SourceCollector()
REGISTRY.register(SOURCES)

_MOST_SITES = 1000
"""Sites that have series."""


class KnownSites(Protocol):
    """The sites of the fleet."""

    @property
    def sites(self) -> Sequence[str]:
        """Sites in order; "" stands for no site."""

    def members(self, site: str) -> Iterable[Device]:
        """The nodes of a site."""


class SiteCollector(Collector):
    """Metrics of each site, made when they are read. A fleet without sites has none."""

    def __init__(self) -> None:
        self._known: KnownSites | None = None
        self._has_upstream: Callable[[str], bool] = bool
        self._images: Tally[str] = Tally()
        self._fallbacks: Tally[str] = Tally()

    def show(self, known: KnownSites | None, has_upstream: Callable[[str], bool] = bool) -> None:
        """Show these sites from now on; None for a scheduler that does not lead.

        Args:
            has_upstream: returns True if an upstream node is alive that may get the pictures of a site.
        """
        self._known, self._has_upstream = known, has_upstream
        self._images.clear()
        self._fallbacks.clear()

    def answered(self, site: str | None, images: int) -> None:
        """An end device of a site has answered images."""
        if site:
            self._images[site] += images

    def fell_back(self, site: str | None) -> None:
        """The upstream nodes failed for a task on an end device of a site."""
        if site:
            self._fallbacks[site] += 1

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        devices, upstream, unlisted, images, fallbacks = families = self._families()
        sites = [] if self._known is None else [site for site in self._known.sites if site != NO_SITE]
        for counts in (self._images, self._fallbacks):
            for gone in counts.keys() - set(sites):
                del counts[gone]
        if self._known is None or not sites:
            return families
        unlisted.add_metric((), max(0, len(sites) - _MOST_SITES))
        for site in sites[:_MOST_SITES]:
            members = list(self._known.members(site))
            healths = Tally((device.tier, device.told[0]) for device in members)
            healths.update({(device.tier, Health.ALIVE): 0 for device in members})  # the alerts need the zero
            for (tier, health), count in healths.items():
                devices.add_metric((site, tier, health), count)
            upstream.add_metric((site,), self._has_upstream(site))
            images.add_metric((site,), self._images[site])
            fallbacks.add_metric((site,), self._fallbacks[site])
        return families

    def _families(
        self,
    ) -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily, CounterMetricFamily, CounterMetricFamily]:
        prefix, site = "terrace_scheduler_site", ["site"]
        return (
            GaugeMetricFamily(
                f"{prefix}_devices", "Nodes on the device list, by site.", labels=["site", "tier", "health"]
            ),
            GaugeMetricFamily(
                f"{prefix}_has_upstream",
                "1 if an upstream node is alive that may get the pictures of the site, otherwise 0.",
                labels=site,
            ),
            GaugeMetricFamily(
                "terrace_scheduler_sites_unlisted",
                f"Sites beyond the first {_MOST_SITES}, which have no series.",
                labels=[],
            ),
            CounterMetricFamily(f"{prefix}_images", "Images that the end devices of a site answered.", labels=site),
            CounterMetricFamily(
                f"{prefix}_fallbacks", "Attempts at a site that got no answer from upstream nodes.", labels=site
            ),
        )


SITES = SiteCollector()
REGISTRY.register(SITES)

_MOST_CLASSES = 1000
"""With more classes than this, only superclasses are counted, and with more superclasses than this, nothing: each is a
series."""


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


_OUTCOMES = {
    RolloutState.DONE: "done",
    RolloutState.ROLLED_BACK: "rolled_back",
    RolloutState.STOPPED: "stopped",
}

# Prometheus sees an increase only from a value that it has read before, so each counter begins at 0.
for _metric, _values in (
    (ATTEMPTS, "ok refused unreachable error lost fallback rerouted deadline cancelled late"),
    (TASKS, "fine coarse fallback failed"),
    (JOBS, "completed failed cancelled"),
    (OBSERVATIONS, "new amended known"),
    (ROLLOUTS, "done rolled_back stopped"),
):
    for _value in _values.split():
        _metric.labels(_value)
for _tier in Tier:
    for _value in ("networks", "claim", "forbidden"):
        REFUSED.labels(_tier, _value)


def show_sink(name: str, *, waiting: int, lag_s: float, dead: int) -> None:
    """Set the gauges of a sink."""
    SINK_WAITING.labels(sink=name).set(waiting)
    SINK_LAG.labels(sink=name).set(lag_s)
    SINK_DEAD.labels(sink=name).set(dead)


def forget_sink(name: str) -> None:
    """Show nothing of a sink any more."""
    for metric in (SINK_DELIVERED, SINK_FAILED, SINK_WAITING, SINK_LAG, SINK_DEAD):
        with suppress(KeyError):
            metric.remove(name)
