"""Fair shares of a node for the schedulers that it serves. Pure decisions: no I/O and no clock.

Computing time is divided by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each share has a start, in
seconds of computing. The share with the lowest start is next, and what it computes raises its start. A share that
begins to wait starts no earlier than the share that was served last, so it cannot save time up.

A node with one scheduler has one share, and its requests are served in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

__all__ = ["OTHERS", "FairQueue", "ShareTurns", "has_room", "wait_s"]

OTHERS = ""
"""The share of all requests that show no scheduler's key."""


class _Waiting(Protocol):
    images: int
    arrived: float
    urgent: bool
    share: str


J = TypeVar("J", bound=_Waiting)


class ShareTurns:
    """The order in which the shares of one node are served.

    Args:
        schedulers: names of those that share the node; none if there is only one.
    """

    def __init__(self, schedulers: Sequence[str] = ()) -> None:
        self.shares = (*schedulers, OTHERS)
        self._starts = dict.fromkeys(self.shares, 0.0)
        self._waiting = dict.fromkeys(self.shares, 0)
        self._now = 0.0
        """Start of the share that was served last."""

    def start(self, share: str) -> float:
        """The share with the lowest start is next."""
        return self._starts[share]

    def waits(self, share: str) -> None:
        """One more request of this share waits."""
        if not self._waiting[share] and self._starts[share] < self._now:
            self._starts[share] = self._now
        self._waiting[share] += 1

    def takes(self, share: str, seconds: float) -> None:
        """A request of this share is computed now."""
        start = self._starts[share]
        self._now = max(self._now, start)
        self._starts[share] = start + seconds
        self._waiting[share] -= 1

    def leaves(self, share: str) -> None:
        """A request of this share no longer waits, and is not computed."""
        self._waiting[share] -= 1


class FairQueue(Generic[J]):
    """Requests that wait for one model. Not thread-safe.

    Args:
        turns: of the node, whose models share its time.
        overtaken_s: a request that has waited this long is not overtaken by urgent ones any more.
    """

    def __init__(self, turns: ShareTurns, *, overtaken_s: float) -> None:
        self.images = 0
        """Images that wait."""
        self._turns = turns
        self._several = len(turns.shares) > 1
        self._overtaken_s = overtaken_s
        self._lines: dict[str, deque[J]] = {}
        """Requests by share; none is empty."""
        self._images = dict.fromkeys(turns.shares, 0)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[J]:
        for line in self._lines.values():
            yield from line

    def images_of(self, share: str) -> int:
        """Images of one share that wait."""
        return self._images[share]

    def add(self, job: J) -> None:
        """Put a request at the end of its share; an urgent one before those that are not."""
        line = self._lines.get(job.share)
        if line is None:
            line = self._lines[job.share] = deque()
        if job.urgent:
            line.insert(self._place(line, job.arrived), job)
        else:
            line.append(job)
        if self._several:
            self._turns.waits(job.share)
        self._images[job.share] += job.images
        self.images += job.images

    def overtaken(self, share: str, now: float) -> int:
        """Images that an urgent request of this share would overtake."""
        line = self._lines.get(share, ())
        return sum(job.images for job in list(line)[self._place(line, now) :])

    def first(self) -> J:
        """The request that `take` would return. The queue must not be empty."""
        return self._next_line()[0]

    @property
    def start(self) -> float:
        """Start of the next request's share. The queue must not be empty."""
        return self._turns.start(self.first().share)

    def take(self, s_per_image: float) -> J:
        """Remove the next request. The queue must not be empty.

        Args:
            s_per_image: computing time that its share is charged for.
        """
        line = self._next_line()
        job = line.popleft()
        if self._several:
            self._turns.takes(job.share, job.images * s_per_image)
        self._gone(job, line)
        return job

    def remove(self, job: J) -> None:
        """Remove a request, if it still waits."""
        line = self._lines.get(job.share)
        if line is not None and job in line:
            line.remove(job)
            if self._several:
                self._turns.leaves(job.share)
            self._gone(job, line)

    def clear(self) -> list[J]:
        """Remove all requests, and return them."""
        left = list(self)
        for job in left:
            self.remove(job)
        return left

    def _next_line(self) -> deque[J]:
        lines = self._lines
        if len(lines) == 1:
            return next(iter(lines.values()))
        return lines[min(lines, key=self._turns.start)]

    def _place(self, line: Sequence[J], now: float) -> int:
        """Position for an urgent request."""
        limit_s = self._overtaken_s
        found = (at for at, job in enumerate(line) if not job.urgent and now - job.arrived < limit_s)
        return next(found, len(line))

    def _gone(self, job: J, line: deque[J]) -> None:
        if not line:
            del self._lines[job.share]
        self._images[job.share] -= job.images
        self.images -= job.images


def has_room(images: int, *, own: int, total: int, most: int, shares: int) -> bool:
    """True if a request may wait: the queue has room, or its share has not used its equal part of the queue.

    A share may fill the whole queue while the others need none of it. The others' parts then come on top, so that it
    cannot make the node refuse them.

    Args:
        images: of the request.
        own: images of its share that wait.
        total: images of all shares that wait.
        most: images that fit into the queue.
        shares: number of shares that the queue is divided into.
    """
    return total + images <= most or own + images <= most // shares


def wait_s(share: str, queued_s: Mapping[str, float], *, running_s: float, own_s: float, more_s: float) -> float:
    """Expected time until a new request is computed; all in seconds of computing.

    Each other share gets as much time as this one meanwhile, if it has enough waiting.

    Args:
        share: of the request.
        queued_s: waiting work of each share.
        running_s: work that is computed now.
        own_s: waiting work of its share that comes before it.
        more_s: the request itself.
    """
    others_s = sum(min(queued, own_s + more_s) for other, queued in queued_s.items() if other != share)
    return running_s + own_s + others_s
