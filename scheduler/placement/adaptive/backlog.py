"""The time at which a node finishes its tasks, as a queue served first come, first served. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["forecast"]

_JOINS_WITHIN_S = 0.1
"""Arrivals are estimates: a task that seems to come up to this time after the start of a batch may be in it. Taking a
batch of two for one of one would make the node look twice as slow."""

Queue = Sequence[tuple[float, float]]
"""Arrival at the node and expected seconds of each task, in order of arrival."""


def forecast(queue: Queue, *, idle_since: float, known: float, joins: int = 1) -> tuple[float, list[float]]:
    """Return the least slowdown of a node against its estimate, and the time at which each task of its queue will be
    done.

    The slowdown comes from the answer that the node owes; it is 1 while no answer is overdue. It grows with each moment
    without that answer, long before the node's speed can be measured. All its tasks take that many times as long. The
    oldest task is assumed to stay overdue for as long as it has been until now, because a hanging node could otherwise
    seem about to answer at every moment.

    Args:
        idle_since: time at which the node finished its last task before these.
        known: time up to which the node's answers would have arrived by now.
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
