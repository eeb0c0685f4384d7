"""When a node will be done with the tasks that it has: a queue that serves one after the other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["finishes", "slowness"]

Queue = Sequence[tuple[float, float]]
"""Arrival at the node and expected seconds of each task, in order of arrival."""


def slowness(queue: Queue, *, idle_since: float, known: float) -> float:
    """How many times slower than thought a node is at least, by the answer that it owes; 1 while none is overdue.

    With each moment that the answer does not come the node looks slower, long before it can be measured.

    Args:
        idle_since: when the node finished its last task before these.
        known: up to which moment the node's answers would have been heard of by now.
    """
    if not queue or queue[0][1] <= 0:
        return 1.0
    arrival, seconds = queue[0]
    return max(1.0, (known - max(arrival, idle_since)) / seconds)


def finishes(queue: Queue, *, idle_since: float, factor: float = 1.0) -> Iterator[float]:
    """When each task of a queue will be done, oldest first, by a node that takes `factor` times as long as expected.

    The oldest is overdue where the factor is above 1, and is taken to stay so for as long as it has been until now: a
    node that hangs is not about to answer at every moment.
    """
    free = idle_since
    late = factor - 1.0
    for arrival, seconds in queue:
        free = max(arrival, free) + seconds * (factor + late)
        late = 0.0
        yield free
