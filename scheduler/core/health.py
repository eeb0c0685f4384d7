"""The failure detector: which nodes are alive, suspect or dead, judged from evidence. Pure; all times are monotonic.

Silence is judged by an accrual detector (Hayashibara, Defago, Yared, Katayama: The phi accrual failure detector, SRDS
2004). With t the seconds since the last sign of life, and mean m and standard deviation s of the last intervals between
heartbeats, taken as normally distributed,

    phi(t) = -log10(P(the next heartbeat comes later than t)) = -log10(erfc((t - m) / (s * sqrt(2))) / 2)

so phi 8 means: wrong once in 10^8 heartbeats. `docs/explanation/fault-tolerance.md` has the rules of `judge`, and the
reasons for the floors of s and m. The threshold on phi is one on silence, `suspect_after_s`, and `suspect_s` bounds
that, so detection has a bound with any history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum
from statistics import NormalDist

from msgspec import Struct

from tierkit.types import Health

__all__ = [
    "Arrivals",
    "DetectorTimes",
    "Evidence",
    "Probe",
    "Verdict",
    "hears_nobody",
    "judge",
    "phi",
    "stalled_after_s",
    "suspect_after_s",
]

PHI_THRESHOLD = 8.0
MIN_DEVIATION_S = 0.04
"""Delays of a scheduler's time slices and of a garbage collection, not of the network: no share of the interval."""
_WINDOW = 100
"""Intervals remembered: 20 s of heartbeats by default, so that a node that got busy is known as such soon."""
_MOST_DEVIATIONS = -NormalDist().inv_cdf(10**-PHI_THRESHOLD)
_LARGEST_PHI = 300.0
_DOUBT_NODES = 3
"""Fewer nodes than this may well fall silent together by chance."""
_STALL_FACTOR = 10.0
"""Factor by which a busy node may be slower than measured at its start, because that many processes may share its
core."""


_BEATS = 3
"""Heartbeats in a lease that a node asked for."""


class DetectorTimes(Struct, frozen=True, kw_only=True):
    """Seconds of the failure detector."""

    heartbeat_s: float
    """Seconds between two heartbeats of a node."""
    suspect_s: float
    """Silence after which a node is suspect at the latest, however irregular its heartbeats were."""
    probe_s: float
    """Time for the answer to the scheduler's own question whether a suspect lives."""
    lease_s: float
    """Silence after which a node is dead, even one that answers."""
    stall_s: float
    """Time without progress that is never held against a node."""
    set_aside_s: float
    """Seconds for which a node gets no tasks after a wrong answer; see `breaker`."""

    def stretched(self, lease_s: float) -> DetectorTimes:
        """The times for a node that asked for a long lease: it is late only when the lease has run out."""
        lease_s = max(self.lease_s, lease_s)
        return DetectorTimes(
            heartbeat_s=max(self.heartbeat_s, lease_s / _BEATS),
            suspect_s=lease_s,
            probe_s=self.probe_s,
            lease_s=lease_s,
            stall_s=max(self.stall_s, lease_s),
            set_aside_s=self.set_aside_s,
        )

    @property
    def doubt_s(self) -> float:
        """Longest time for which the scheduler doubts itself while it hears no node. If all nodes have really ended,
        that delays only the report: no node is left to take their work."""
        return 10 * self.lease_s


class Probe(Enum):
    """Outcome of a probe of the scheduler."""

    ANSWERED = "answers the scheduler's probe"
    REFUSED = "refuses connections"
    SILENT = "does not answer the scheduler's probe"


class Arrivals:
    """The last intervals between heartbeats of one node, seconds."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        # As in Pekko: before the first beats, a mean as asked for with a quarter of it as deviation.
        self._intervals = deque((0.75 * heartbeat_s, 1.25 * heartbeat_s), maxlen=_WINDOW)

    def add(self, interval_s: float) -> None:
        self._intervals.append(interval_s)

    def fit(self) -> tuple[float, float]:
        """Mean and standard deviation, with their floors."""
        known = len(self._intervals)
        mean_s = sum(self._intervals) / known
        deviation_s = math.dist(self._intervals, [mean_s] * known) / math.sqrt(known)
        return max(self._heartbeat_s, mean_s), max(MIN_DEVIATION_S, deviation_s)


def phi(silent_s: float, mean_s: float, deviation_s: float) -> float:
    """Suspicion by silence: minus the decimal logarithm of the chance that a heartbeat still comes. At most 300."""
    chance = math.erfc((silent_s - mean_s) / (deviation_s * math.sqrt(2))) / 2
    return _LARGEST_PHI if chance < 10**-_LARGEST_PHI else max(0.0, -math.log10(chance))


def suspect_after_s(mean_s: float, deviation_s: float, times: DetectorTimes) -> float:
    """Silence at which phi reaches its threshold, or `suspect_s` if that is less."""
    return min(times.suspect_s, mean_s + _MOST_DEVIATIONS * deviation_s)


def stalled_after_s(images: int, ms_per_image: float, times: DetectorTimes) -> float:
    """Time without progress after which a node that owes `images` does not work.

    Ten times what it takes for them by its own measurement, since others may use its processor, and at least `stall_s`.
    """
    return max(times.stall_s, _STALL_FACTOR * images * ms_per_image / 1000)


def hears_nobody(nodes: Iterable[tuple[float, float]]) -> bool:
    """True if the scheduler itself, its processor or its network, is the likely fault: every node is late, and there
    are at least three. One node that is heard shows that it can hear.

    Args:
        nodes: of each that is not dead, its silence and what its heartbeats allow (`suspect_after_s`), seconds. Read up
            to the first that is heard.
    """
    late = 0
    for silent_s, allowed_s in nodes:
        if silent_s <= allowed_s:
            return False
        late += 1
    return late >= _DOUBT_NODES


class Evidence(Struct, frozen=True, kw_only=True):
    """All that is known for and against a node at one moment."""

    silent_s: float
    """Seconds since its last sign of life: a heartbeat, or an answer to a task."""
    suspect_after_s: float
    probe: Probe | None = None
    """Outcome of a probe that began after that sign of life."""
    reached: bool = False
    """True once this incarnation has answered a probe."""
    accusation: str | None = None
    """Reason why an attempt on the node failed after that sign of life."""
    wrong: str | None = None
    """Reason why its answers are not wanted now, though it is there."""
    draining: bool = False
    """About to leave: it said so, or an operator did."""
    owed: int = 0
    """Images handed to it, or by its own word in its batch or before it."""
    ms_per_image: float = 0.0
    """Milliseconds per image by its own measurement."""
    idle_s: float = 0.0
    """Seconds since its last progress, or since it got the images that it owes."""
    death: str | None = None
    """Reason why it was given up before."""
    removed: bool = False
    """Given up by an operator; final."""


class Verdict(Struct, frozen=True, kw_only=True):
    """Opinion on a node, the reason for it, and whether the tasks that it has may stay with it."""

    health: Health
    reason: str
    keeps_tasks: bool
    set_aside: bool = False
    """Suspect for nothing but its wrong answers."""


def judge(evidence: Evidence, times: DetectorTimes) -> Verdict:
    """Opinion on a node. For equal evidence, longer silence never makes it healthier."""
    silent_s, late = evidence.silent_s, evidence.silent_s > evidence.suspect_after_s
    if evidence.death is not None:
        health = Health.REMOVED if evidence.removed else Health.DEAD
        return Verdict(health=health, reason=evidence.death, keeps_tasks=False)
    if silent_s > times.lease_s:
        return _dead(f"silent for {silent_s:.1f} s, its lease of {times.lease_s:g} s has run out")
    # While it drains it closes its socket before it ends, and takes its leave by itself.
    if evidence.reached and evidence.probe is Probe.REFUSED and (late or not evidence.draining):
        return _dead(f"{Probe.REFUSED.value}: its process has ended")
    if evidence.reached and evidence.probe is Probe.SILENT and late:
        return _dead(f"silent for {silent_s:.2f} s, and {Probe.SILENT.value}")
    allowed_s = stalled_after_s(evidence.owed, evidence.ms_per_image, times)
    if evidence.owed and evidence.idle_s > allowed_s:
        owed = f"{evidence.owed} images for {evidence.idle_s:.1f} s"
        reason = f"no progress: {owed}, at most {allowed_s:.1f} s expected"
        return Verdict(health=Health.SUSPECT, reason=reason, keeps_tasks=False)
    if late:
        second = f", {evidence.probe.value}" if evidence.probe is not None else ""
        expected = f"expected within {evidence.suspect_after_s:.2f} s"
        return _stays(Health.SUSPECT, f"no heartbeat for {silent_s:.2f} s, {expected}{second}")
    if evidence.draining:
        return _stays(Health.DRAINING, "finishes what it has, takes nothing new")
    if evidence.accusation is not None:
        return _stays(Health.SUSPECT, evidence.accusation)
    if evidence.wrong is not None:
        return Verdict(health=Health.SUSPECT, reason=evidence.wrong, keeps_tasks=True, set_aside=True)
    return _stays(Health.ALIVE, "heartbeats on time")


def _dead(reason: str) -> Verdict:
    return Verdict(health=Health.DEAD, reason=reason, keeps_tasks=False)


def _stays(health: Health, reason: str) -> Verdict:
    return Verdict(health=health, reason=reason, keeps_tasks=True)
