"""When a failed task is tried again, when a straggler is hedged, and what is poison. Pure; time is passed in.

A job's retries come out of a token bucket (`tierkit.pacing`). A retry that finds it empty is not lost, it waits for its
token; so a job whose tasks all fail cannot keep the fleet busy with retries, and one that loses a device with a few
tasks on it does not notice the budget.

A hedge is a second attempt of a task that has been on its device for longer than 95 % of the job's tasks there took
(Dean, Barroso: The tail at scale, CACM 2013).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "POISON_NODES",
    "SUSPECT_NODES",
    "DeathLog",
    "hedge_after_s",
    "is_poison",
    "is_suspect",
]

_HEDGE_QUANTILE = 0.95
_HEDGE_SAMPLES = 10
"""Fewer answers of a device tell nothing of its 95th percentile."""

SUSPECT_NODES = 2
"""A task that this many nodes died with is a suspect. The suspects of a job go one at a time: a task that was merely
beside the one that kills is answered then, and only the one that kills can lose its third node."""
POISON_NODES = 3
"""A task that this many nodes died with is given to no other, unless nodes die without it as well."""
_REMEMBERED_S = 60.0
_REMEMBERED = 64


@dataclass(slots=True)
class DeathLog:
    """The deaths of nodes in the last minute, to tell a task that kills from a fleet that is dying anyway."""

    _deaths: deque[tuple[float, tuple[Collection[str], ...]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, now: float, held: Iterable[Collection[str]]) -> None:
        """A node has died.

        Args:
            held: of each task that was on it, the nodes that died with that task; the collections themselves, since
                what they hold later decides whether they explain this death.
        """
        self._deaths.append((now, tuple(held)))

    def unexplained(self, now: float) -> int:
        """Deaths of the last minute with no suspect on the node."""
        return sum(
            at >= now - _REMEMBERED_S and not any(is_suspect(deaths) for deaths in held) for at, held in self._deaths
        )


def hedge_after_s(durations_s: Sequence[float]) -> float | None:
    """Seconds after which an attempt is a straggler, by how long others on the same device took; None when too few are
    known."""
    if len(durations_s) < _HEDGE_SAMPLES:
        return None
    ranked = sorted(durations_s)
    return ranked[math.ceil(_HEDGE_QUANTILE * len(ranked)) - 1]


def is_suspect(deaths: Collection[str]) -> bool:
    """Whether a task may be what killed these nodes."""
    return len(deaths) >= SUSPECT_NODES


def is_poison(deaths: Collection[str], unexplained: int) -> bool:
    """Whether a task that these nodes died with is given up for good. As many deaths without it prove its innocence:
    where nodes die anyway, one that is unlucky must not be taken for one that kills."""
    return len(deaths) >= max(POISON_NODES, unexplained + 1)
