"""The time at which a node finishes its tasks, as a queue served first come, first served. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["forecast"]

_JOINS_WITHIN_S = 0.1
"""Arrivals are estimates: a task that seems to come so much after a batch has begun may be in it. Taking a batch of two
for one of one would make the node look twice as slow."""

Queue = Sequence[tuple[float, float]]
"""Arrival at the node and expected seconds of each task, in order of arrival."""


def forecast(queue: Queue, *, idle_since: float, known: float, joins: int = 1) -> tuple[float, list[float]]:
    """How many times slower than thought a node is at least, and when each task of its queue will be done.

    Slower: by the answer that it owes, 1 while none is overdue. With each moment that it does not come the node looks
    slower, long before it can be measured. All its tasks will take that many times as long; the oldest is taken to
    stay overdue for as long as it has been until now, for a node that hangs is not about to answer at every moment.

    Args:
        idle_since: when the node finished its last task before these.
        known: up to which moment the node's answers would have been heard of by now.
        joins: most tasks that the node computes in one batch; they are all done at its end.
    """
    factor, late, free = 1.0, 0.0, idle_since
    done: list[float] = []
    while len(done) < len(queue):
        first = len(done)
        begin = max(queue[first][0], free)
        batch = [seconds for arrival, seconds in queue[first : first + joins] if arrival <= begin + _JOINS_WITHIN_S]
        needs_s = sum(batch)
        if not first and needs_s > 0:
            if known - begin > needs_s:
                # It may be in a batch with one that has been given up since, or that this scheduler does not know of.
                needs_s = max(needs_s, joins * batch[0])
            factor = max(1.0, (known - begin) / needs_s)
            late = factor - 1.0
        free = begin + needs_s * (factor + late)
        late = 0.0
        done += [free] * len(batch)
    return factor, done
