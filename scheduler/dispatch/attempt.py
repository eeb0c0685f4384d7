"""One attempt: a try of a task on one end device, and the phase that it is in.

    acknowledging -> coarse -> fine -> answered -> ended

`attempt_state` moves it from phase to phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.devices.list import Device
from scheduler.dispatch.work import ActiveJob, ActiveTask, AttemptReport
from tierkit.types import Tier
from tierkit.wire.events import FallbackEvent, RoutedEvent
from tierkit.wire.messages import Stage, Upstream

__all__ = ["Attempt", "Phase"]


class Phase(StrEnum):
    """Where an attempt stands; see the module."""

    ACKNOWLEDGING = "acknowledging"
    COARSE = "coarse"
    FINE = "fine"
    ANSWERED = "answered"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One try of a task on one end device."""

    job: ActiveJob
    task: ActiveTask
    device: Device
    upstreams: tuple[Upstream, ...] = ()
    """In the order in which the device asks them, with the form in which each gets the images."""
    incarnations: dict[str, str] = field(default_factory=dict)
    """Of the upstream nodes."""
    stages: tuple[Stage, ...] = ()
    hedge: bool = False
    why: str = ""
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline: the coarse answer stands."""
    fine_only: bool = False
    trial: bool = False
    """The last answer of its device was wrong, to another task."""
    started: float
    started_at: float
    """Wall clock, seconds since 1970."""
    deadline: float
    """When it is given up."""
    until: float = 0.0
    """When it is given up in its present phase."""
    phase: Phase = Phase.COARSE
    leaving: str = ""
    """An upstream node that has left the list while the coarse answer was still to come."""
    fallback: tuple[FallbackEvent | RoutedEvent, str] | None = None
    """What the device said of upstream nodes that failed, and how it came."""
    gave_coarse: bool = False
    """The coarse answer that its task has is from it."""
    reported: bool = False
    number: int = 0
    """From 1, of the task's attempts."""
    node_id: str = field(init=False)
    first_asked: tuple[Upstream, ...] = field(init=False)
    """The upstream node that is asked first; of each tier, where images go up tier after tier."""

    def __post_init__(self) -> None:
        self.node_id = self.device.node_id
        self.first_asked = self.upstreams[:1]
        if self.stages:
            first = {node.tier: node for node in reversed(self.upstreams)}
            self.first_asked = tuple(first[stage.tier] for stage in self.stages if stage.tier in first)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The end device, and the upstream nodes that are asked first."""
        return self.node_id, *(node.node_id for node in self.first_asked)

    @property
    def owed(self) -> bool:
        """Whether the device itself owes its answer; what it waits for from an upstream node is not its own work."""
        return self.phase is Phase.COARSE or (self.phase is Phase.ACKNOWLEDGING and not self.fine_only)

    @property
    def lacks_fine(self) -> bool:
        """Whether it has said all that it will, and the task waits for a fine answer."""
        return self.phase is Phase.ANSWERED and not self.task.closed

    def report(self, outcome: str = "running", reason: str = "", ended_at: float | None = None) -> AttemptReport:
        """The attempt as users see it."""
        return AttemptReport(
            job_id=self.job.job_id,
            task=self.task.index,
            number=self.number,
            node_id=self.node_id,
            incarnation=self.device.incarnation,
            tier=Tier.END,
            upstream=self.upstreams[0].node_id if self.upstreams else None,
            stage="fine" if self.fine_only else "all",
            hedge=self.hedge,
            outcome=outcome,
            reason=reason,
            why=self.why,
            started_at=self.started_at,
            ended_at=ended_at,
        )
