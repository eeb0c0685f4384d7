"""Times at which bytes arrive at the other end of a link, and exchanges that are lost. Pure functions.

A link is a queue, then a wire. The queue sends one message after the other at the link's bandwidth (what transfers at
the same time have to share); the wire carries any number of them at once, each for its delay. So a message of b bytes
given to the link at time t arrives at

    max(t, time at which the queue is free) + 8 b / bandwidth + delay

which is the store-and-forward model of a link with a first-in-first-out bottleneck (Kurose and Ross, Computer
Networking, section 1.4: transmission, queueing and propagation delay).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from experiments.emulation.links import LinkSpec

__all__ = ["Fate", "Fault", "draw_fate", "transmitted_at"]


class Fault(StrEnum):
    """Way in which an exchange is lost."""

    RESET = "reset"
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Effect of the link on one exchange, a question and its answer."""

    there_s: float
    """Delay of the question."""
    back_s: float
    """Delay of the answer."""
    fault: Fault | None = None
    in_answer: bool = False
    """True if the fault strikes the answer, when the other side has done its work, or the question."""


def draw_fate(spec: LinkSpec, random: Random) -> Fate:
    """The fate of the next exchange. Draws four numbers for any link, so that a link with another loss
    still has the same jitter."""
    there, back, loss, where = (random.random() for _ in range(4))
    fault = Fault.RESET if loss < spec.reset else Fault.STALL if loss < spec.reset + spec.stall else None
    return Fate(
        there_s=spec.delay_s + spec.jitter_s * (2 * there - 1),
        back_s=spec.delay_s + spec.jitter_s * (2 * back - 1),
        fault=fault,
        in_answer=where >= 0.5,
    )


def transmitted_at(spec: LinkSpec, n_bytes: int, *, now: float, free_at: float) -> float:
    """Time when the last of `n_bytes`, given to the link at `now`, has left its queue. From then on the queue is free
    again.

    Args:
        free_at: time when the queue has sent all earlier bytes.
    """
    if spec.bandwidth_bps is None:
        return now
    return max(now, free_at) + 8 * n_bytes / spec.bandwidth_bps
