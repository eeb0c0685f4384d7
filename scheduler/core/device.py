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
"""Sort key of a node in the device list. See `natural_order`."""

_BATCH = 64
"""Default number of images that a node computes at a time, if it does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The wishes of operators about a node. They hold until taken back, over restarts of the node and of the
    scheduler."""

    drained: bool = False
    """It gets no new tasks."""
    removed: bool = False
    """It may not register."""
    trusted: bool | None = None
    """True if it may see pixels; None: the setting `trusted` decides."""
    by: str = ""
    """Name of the operator's token; "" without tokens."""

    @property
    def of_whom(self) -> str:
        """ "by NAME", for the end of a sentence."""
        return f" by {self.by or 'an operator'}"


NO_INTENT = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node as it is stored."""

    registration: Registration
    """Its last registration, without the key, which ends with its process."""
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
    """Digest of the model's weights."""
    allowed_upstreams: tuple[str, ...] = ()
    """URLs below which a node must lie for this one to send images there; empty for anywhere."""

    def may_ask(self, upper: Node) -> bool:
        """True if this node's own list allows sending images to `upper`."""
        return is_allowed(upper.url, self.allowed_upstreams)


@dataclass(slots=True, kw_only=True)
class Device:
    """The record of one node."""

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
    """Its power budget, in images. With a burst of 0 the node rests after each task, which spreads heat and battery
    load evenly."""
    suspect_after_s: float
    """Silence that its heartbeats so far allow."""
    progress_at: float
    """When it last finished images or, having owed nothing, was given some."""
    leaving: bool = False
    """It has reported that it takes no tasks: it shuts down, or an operator has unloaded one of its models."""
    left: bool = False
    """It has deregistered, or an operator has removed it; neither counts as a death."""
    intent: Intent = NO_INTENT
    accusation: str | None = None
    wrong: WrongAnswers = field(default_factory=WrongAnswers)
    probe: Probe | None = None
    """Outcome of a probe since the last sign of life."""
    reached: bool = False
    """True once it has answered a probe."""
    not_before: float = 0.0
    """The node gets no task until then: it asked for that ("503, Retry-After"), or rests for its power budget."""
    load: Heartbeat | None = None
    """The load that the node reported last."""
    given: int = 0
    """Images of tasks that were sent to it and that it has not answered yet."""
    stalled: int = 0
    """Images on which it got stuck. Progress clears this; new work does not."""
    refusal: tuple[float, str] = (-math.inf, "")
    """Time and reason of its last refused registration."""
    death: str | None = None
    """Reason why it is dead. Death is final: its tasks went to others, so only a new registration brings it back."""
    retired: tuple[str, ...] = ()
    """The previous incarnations of this node id. They cannot come back."""
    order: SortKey
    """Sort key in the list."""
    review_at: float = math.inf
    """The time at which its health may change without new evidence, or earlier."""
    listed: bool = False
    """True while it may receive tasks."""
    node: Node | None = None
    """The node as the mapping sees it; `placement.routes` sets it."""
    told: tuple[Health, bool] = (Health.ALIVE, True)
    """The health that the listeners know, and whether it keeps its tasks."""

    def __post_init__(self) -> None:
        # Each decision asks for them many times.
        self.node_id, self.tier = self.registration.node_id, self.registration.tier
        self.incarnation = self.registration.incarnation

    @property
    def draining(self) -> bool:
        """True if it is about to leave, or an operator wants no new tasks for it."""
        return self.leaving or self.intent.drained

    @property
    def ms_per_image(self) -> float:
        """Milliseconds per image of its slowest model by its own measurement, divided by the copies that compute
        now."""
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
    """One node with the failure detector's verdict, at one moment."""

    device: Device
    silent_s: float
    death: str | None = None
    """Reason why it is gone."""

    @property
    def phi(self) -> float:
        """The accrual detector's suspicion by silence."""
        return phi(self.silent_s, *self.device.arrivals.fit())


def natural_order(node_id: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key of the device list: end-2 stands before end-10, whichever of them registered first."""
    parts = re.split(r"(\d+)", node_id)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts if part)
