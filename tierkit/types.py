"""The words that all services share, as types. `docs/reference/glossary.md` explains them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

__all__ = [
    "STANDING_AFTER",
    "TOLD_TO_GO",
    "EncoderKind",
    "Escalate",
    "FeatureForm",
    "Health",
    "JobState",
    "OnBadInput",
    "Privacy",
    "Recovery",
    "RunState",
    "Scheme",
    "Share",
    "SiteHealth",
    "Tier",
    "UpstreamLoss",
    "WorkerOrder",
    "WorkerStanding",
]


class Tier(StrEnum):
    """Level of a node: end device, edge or cloud."""

    END = "end"
    EDGE = "edge"
    CLOUD = "cloud"


class Health(StrEnum):
    """The failure detector's opinion of a node. Only ALIVE nodes receive new tasks."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    REMOVED = "removed"

    @property
    def gone(self) -> bool:
        """True if the work of such a node is with others, and only a new registration brings it back."""
        return self in (Health.DEAD, Health.REMOVED)


class Share(StrEnum):
    """A rule on the pictures of a site that leave it."""

    NONE = "none"
    """They stay at the site."""
    CLOUD = "cloud"
    """They may go to the cloud nodes that belong to no site."""
    SITES = "sites"
    """The same, and to edge nodes of other sites while the site's own are dead or full."""


class SiteHealth(StrEnum):
    """Health of a site, by the health of its nodes."""

    OK = "ok"
    DEGRADED = "degraded"
    """Some of its nodes are not alive."""
    COARSE = "coarse"
    """Its end devices may ask no upstream node that is alive: their coarse answers stand."""
    DRAINED = "drained"
    """An operator wants no new tasks for any of its end devices."""
    DOWN = "down"
    """No end device is alive."""


class OnBadInput(StrEnum):
    """Treatment of a job with pictures that are damaged or cannot be read."""

    FAIL = "fail"
    SKIP = "skip"
    ANSWER = "answer"


class JobState(StrEnum):
    """State of a job; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class RunState(StrEnum):
    """State of a training run; the last three are final."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Its host has not reported for some seconds, and may come back."""
    STOPPING = "stopping"
    """Its end was requested, and the host has not reported yet that it stops."""
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED)


WorkerOrder = Literal["pause", "drop", "trust", "resume"]
"""Order of an operator for a worker of a training run. `pause`: it gets no work. `drop`: it never gets work again, nor
does any worker that joins under its name. `trust`: its updates count fully, whatever they are. `resume`: its updates
are judged again."""

WorkerStanding = Literal["active", "paused", "dropped", "trusted", "quarantined"]
"""Standing of a worker of a training run. An active worker's updates count by its score, and a trusted worker's updates
fully; others do not count."""

TOLD_TO_GO: frozenset[WorkerStanding] = frozenset({"dropped", "quarantined"})
"""Standings of workers that take no part any more."""

STANDING_AFTER: Mapping[WorkerOrder, WorkerStanding] = {
    "pause": "paused",
    "drop": "dropped",
    "trust": "trusted",
    "resume": "active",
}


class Scheme(StrEnum):
    """Tiers that serve a task after the end device: the four schemes of section 3.4 of the paper, and `adaptive`."""

    END = "end"
    END_CLOUD = "end-cloud"
    END_EDGE = "end-edge"
    MAPPING = "mapping"
    ADAPTIVE = "adaptive"


class Escalate(StrEnum):
    """Images that go up a tier: all of them, or only those whose answer is less sure than a threshold. The threshold is
    chosen for an accuracy or for a budget of images."""

    ALWAYS = "always"
    THRESHOLD = "threshold"
    BUDGET = "budget"


class Privacy(StrEnum):
    """Form in which a job's images may leave the end device. `auto` sends pixels to trusted nodes and features to the
    others. `none` sends only pixels, and is refused if that breaks trust. `conv1` and `bottleneck` send the features of
    that encoder to every upstream node."""

    AUTO = "auto"
    NONE = "none"
    CONV1 = "conv1"
    BOTTLENECK = "bottleneck"


class EncodeOn(StrEnum):
    """The place where a job's images are encoded: the end device, a trusted edge node, or `auto`, whichever of the two
    is expected to cost a task less time."""

    END = "end"
    EDGE = "edge"
    AUTO = "auto"


class EncoderKind(StrEnum):
    """Kind of encoder whose output a device sends instead of pixels: the upper network's first convolution (section 3.5
    of the paper), or a narrow encoder trained to be hard to invert."""

    CONV1 = "conv1"
    BOTTLENECK = "bottleneck"


class FeatureForm(StrEnum):
    """Number format of an encoder's features."""

    UINT8 = "uint8"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Recovery(StrEnum):
    """Action for a task whose attempt failed (section 3.6 of the paper)."""

    NONE = "none"
    REASSIGN = "reassign"
    MONITOR = "monitor"


class UpstreamLoss(StrEnum):
    """Action of the fine stage if no upstream node answers."""

    FALLBACK = "fallback"
    WAIT = "wait"
