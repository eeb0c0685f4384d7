"""The words that all services share, as types. `docs/glossary.md` explains them."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "EncoderKind",
    "Escalate",
    "FeatureForm",
    "Health",
    "JobState",
    "Privacy",
    "Recovery",
    "Scheme",
    "Tier",
    "UpstreamLoss",
]


class _Word(StrEnum):
    """A string of a fixed set. Hashed as one: `Enum` does that in Python, and a decision looks up dozens."""

    __hash__ = str.__hash__


class Tier(_Word):
    """Where a node stands."""

    END = "end"
    EDGE = "edge"
    CLOUD = "cloud"


class Health(_Word):
    """The failure detector's opinion of a node. Only ALIVE nodes receive new tasks."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


class JobState(_Word):
    """Where a job stands; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class Scheme(_Word):
    """Who serves a task after the end device: the four of section 3.4 of the paper, and `adaptive`."""

    END = "end"
    END_CLOUD = "end-cloud"
    END_EDGE = "end-edge"
    MAPPING = "mapping"
    ADAPTIVE = "adaptive"


class Escalate(_Word):
    """Which images go up a tier: all of them, or those whose answer is less sure than a threshold that was chosen for
    an accuracy or for a budget of images."""

    ALWAYS = "always"
    THRESHOLD = "threshold"
    BUDGET = "budget"


class Privacy(_Word):
    """In which form a job's images may leave the end device: `auto` sends pixels to trusted nodes and features to the
    others; `none` pixels alone, and is refused where that breaks trust; `conv1` and `bottleneck` the features of that
    encoder, to every upstream node."""

    AUTO = "auto"
    NONE = "none"
    CONV1 = "conv1"
    BOTTLENECK = "bottleneck"


class EncoderKind(_Word):
    """Whose output a device sends in place of pixels: the upper network's own first convolution (section 3.5 of the
    paper), or a narrow encoder that was trained to be hard to invert."""

    CONV1 = "conv1"
    BOTTLENECK = "bottleneck"


class FeatureForm(_Word):
    """How the features of an encoder are written."""

    UINT8 = "uint8"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Recovery(_Word):
    """What happens to a task whose attempt failed (section 3.6 of the paper)."""

    NONE = "none"
    REASSIGN = "reassign"
    MONITOR = "monitor"


class UpstreamLoss(_Word):
    """What happens to the fine stage when no upstream node answers."""

    FALLBACK = "fallback"
    WAIT = "wait"
