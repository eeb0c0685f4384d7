"""Kinds of faults, and a random plan of them. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DATABASE", "LINK", "Direction", "Fault", "Kind", "plan_faults"]


class Kind(StrEnum):
    """Kind of fault."""

    KILL = "kill"
    """SIGKILL; the service is started again after a while."""
    STOP = "stop"
    """SIGSTOP: the service is silent while its sockets stay open; it continues after a while."""
    REFUSE = "refuse"
    """New connections to the service are refused for a while, and those that stand are reset."""
    RESET = "reset"
    """A connection to the service is reset while a message is on its way."""
    CUT = "cut"
    """A connection to the service ends in the middle of a message."""
    DELAY = "delay"
    """A message to or from the service is held up."""
    DUPLICATE = "duplicate"
    """A request reaches the service a second time."""
    LOCK = "database locked"
    """Another program holds the scheduler's database."""
    FULL = "disk full"
    """The disk of the scheduler's state folder has no space left."""


class Direction(StrEnum):
    """Message of an exchange that the fault strikes."""

    REQUEST = "request"
    ANSWER = "answer"


LINK = (Kind.RESET, Kind.CUT, Kind.DELAY, Kind.DUPLICATE)
"""Faults that strike a message on its way."""
DATABASE = (Kind.LOCK, Kind.FULL)
"""Faults under the scheduler."""

_WEIGHTS = {
    Kind.KILL: 24,
    Kind.STOP: 14,
    Kind.REFUSE: 10,
    Kind.RESET: 14,
    Kind.CUT: 14,
    Kind.DELAY: 10,
    Kind.DUPLICATE: 10,
    Kind.LOCK: 4,
}
_LASTS_S = {
    Kind.KILL: (0.0, 0.5),
    Kind.STOP: (0.2, 2.5),
    Kind.REFUSE: (0.1, 1.0),
    Kind.RESET: (0.0, 0.0),
    Kind.CUT: (0.0, 0.0),
    Kind.DELAY: (0.1, 1.5),
    Kind.DUPLICATE: (0.0, 0.0),
    Kind.LOCK: (0.5, 3.0),
    Kind.FULL: (1.0, 2.0),
}
_SCHEDULER_SHARE = 0.12
"""Share of the service faults that strike the scheduler. With more, the fleet would hardly have time for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: Kind
    target: str
    """Name of the service that it strikes; for a fault of the database, the scheduler's name."""
    lasts_s: float
    """Seconds until the service is started again or continues, or the message is released."""
    direction: Direction
    after_s: float
    """Pause before it, so that faults meet the work at any stage."""


def plan_faults(seed: int, count: int, *, scheduler: str, nodes: Sequence[Sequence[str]], disk: bool) -> list[Fault]:
    """Draw `count` faults.

    Args:
        nodes: names of the nodes of each tier; each tier is struck as often as the others, however few nodes it has.
        disk: True if the disk can be filled; then it is full once, in the middle of the plan.
    """
    chance = random.Random(seed)
    plan = list(_draw(chance, count, scheduler, nodes))
    if disk and plan:
        plan[len(plan) // 2] = _fault(chance, Kind.FULL, scheduler)
    return plan


def _draw(chance: random.Random, count: int, scheduler: str, nodes: Sequence[Sequence[str]]) -> Iterator[Fault]:
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    for _ in range(count):
        (kind,) = chance.choices(kinds, weights)
        node = chance.choice(chance.choice(nodes))
        on_scheduler = kind in DATABASE or chance.random() < _SCHEDULER_SHARE
        yield _fault(chance, kind, scheduler if on_scheduler else node)


def _fault(chance: random.Random, kind: Kind, target: str) -> Fault:
    return Fault(
        kind=kind,
        target=target,
        lasts_s=round(chance.uniform(*_LASTS_S[kind]), 3),
        direction=chance.choice(list(Direction)),
        after_s=round(chance.uniform(0.0, 0.2), 3),
    )
