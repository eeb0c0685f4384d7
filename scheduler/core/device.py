"""A node as the scheduler knows it: its registration, its signs of life, and what operators want with it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from scheduler.core.breaker import WrongAnswers
from scheduler.core.health import Arrivals, Probe, Verdict, phi
from tierkit.inference.upstreams import is_allowed
from tierkit.pacing import TokenBucket
from tierkit.types import Health, Tier
from tierkit.wire.messages import Heartbeat, Registration

__all__ = ["NO_INTENT", "Device", "DeviceView", "Intent", "KnownNode", "Node", "SortKey", "natural_order"]

SortKey = tuple[tuple[int, str | int], ...]
"""Of a node in the device list, see `natural_order`."""

_BATCH = 64
"""Images of a queue that a node takes up at a time, unless it says how many it is computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What operators want with a node. It holds until they take it back, over restarts of the node and of the
    scheduler."""

    drained: bool = False
    """It gets no new tasks."""
    removed: bool = False
    """It may not register."""
    trusted: bool | None = None
    """Whether it may see pixels; None: as the setting `trusted` says."""
    by: str = ""
    """Who said so last; "" where no tokens are asked for."""

    @property
    def of_whom(self) -> str:
        """For the end of a sentence."""
        return f" by {self.by or 'an operator'}"


NO_INTENT = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node as the database remembers it."""

    registration: Registration
    """Its last one, without the key, which ends with its process."""
    intent: Intent = NO_INTENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as the mapping sees it: alive, trusted, with the model it would be asked for."""

    node_id: str
    tier: Tier
    url: str
    model: str
    ms_per_image: float
    """Measured by the node at its start."""
    sha256: str = ""
    """Of the model's weights."""
    allowed_upstreams: tuple[str, ...] = ()
    """URLs below which a node must lie for this one to send images there; empty for anywhere."""

    def may_ask(self, upper: Node) -> bool:
        """Whether this node may send images to that one, by its own list."""
        return is_allowed(upper.url, self.allowed_upstreams)


@dataclass(slots=True, kw_only=True)
class Device:
    """What the scheduler knows of one node."""

    registration: Registration
    node_id: str = field(init=False)
    tier: Tier = field(init=False)
    incarnation: str = field(init=False)
    joined_at: float
    last_seen: float
    """Last sign of life: a heartbeat, or an answer to a task."""
    last_beat: float
    arrivals: Arrivals
    budget: TokenBucket | None
    """Its power budget, in images. With a burst of 0 each task is paid for by a rest after it: work is spread evenly,
    which is what heat and batteries care about."""
    suspect_after_s: float
    """Silence that its heartbeats so far allow."""
    progress_at: float
    """When it last finished images or, having owed nothing, was given some."""
    leaving: bool = False
    """It has said that it takes no tasks: it shuts down, or an operator has unloaded one of its models."""
    left: bool = False
    """It has taken its leave, or an operator has removed it: that is no death."""
    intent: Intent = NO_INTENT
    accusation: str | None = None
    wrong: WrongAnswers = field(default_factory=WrongAnswers)
    probe: Probe | None = None
    """Outcome of a probe since the last sign of life."""
    reached: bool = False
    """Whether it has ever answered a probe."""
    not_before: float = 0.0
    """The node is left alone until then: it asked for that ("503, Retry-After"), or rests for its power budget."""
    load: Heartbeat | None = None
    """What the node said of itself last."""
    given: int = 0
    """Images of tasks that the scheduler has handed to it and that have no answer of its own yet."""
    stalled: int = 0
    """Images on which it got stuck; no new work clears that, only progress does."""
    refusal: tuple[float, str] = (-math.inf, "")
    """When and why it was last refused a place."""
    death: str | None = None
    """Why it was given up. Death is final: its tasks went to others, so only a new registration brings it back."""
    retired: tuple[str, ...] = ()
    """The last incarnations before it of this node id: they cannot come back."""
    order: SortKey
    """Place in the list."""
    review_at: float = math.inf
    """When time alone may change what is thought of it, or before."""
    listed: bool = False
    """Whether it is among those that may receive tasks."""
    node: Node | None = None
    """The node as the mapping sees it; `placement.routes` sets it."""
    told: tuple[Health, bool] = (Health.ALIVE, True)
    """Its health, and whether it keeps its tasks, as the listeners know it."""

    def __post_init__(self) -> None:
        # Each decision asks for them many times.
        self.node_id, self.tier = self.registration.node_id, self.registration.tier
        self.incarnation = self.registration.incarnation

    @property
    def draining(self) -> bool:
        """Whether it is about to leave, or an operator wants no new tasks for it."""
        return self.leaving or self.intent.drained

    @property
    def ms_per_image(self) -> float:
        """By its own measurement, of the slowest of its models, of which as many copies as it says compute now."""
        return max(offer.ms_per_image for offer in self.registration.models) / self.replicas

    @property
    def replicas(self) -> int:
        return 1 if self.load is None else self.load.replicas

    @property
    def owed(self) -> int:
        """Images that it should be working on."""
        told = 0 if self.load is None else self.load.running_images or min(self.load.queued_images, _BATCH)
        return max(self.given, self.stalled, told)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView(Verdict):
    """One node with the failure detector's opinion of it, at one moment."""

    device: Device
    silent_s: float
    death: str | None = None
    """Why it is gone."""

    @property
    def phi(self) -> float:
        """The accrual detector's suspicion by silence."""
        return phi(self.silent_s, *self.device.arrivals.fit())


def natural_order(node_id: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key of the device list: end-2 stands before end-10, whichever of them registered first."""
    parts = re.split(r"(\d+)", node_id)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts if part)
