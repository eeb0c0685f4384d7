"""Which segments a worker holds: as many as it has room for and as its speed asks for, and other ones after each pass.

The rule is that of the volunteers' platform of 2018 (worker J holds the segments J and J + 1) with two ideas of BAIPAS
(Lee et al. 2017): data goes where there is space and speed, and data that a worker has been through moves on to the
next one while training goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierkit.errors import TooLarge

__all__ = ["Placed", "Placement", "share"]

_OWN = 2
"""Segments of a worker of usual speed."""
_MOST = 4
"""Of a fast one."""


@dataclass(slots=True)
class Placed:
    """Where a worker's segments begin, and how many there are."""

    start: int
    count: int
    steps: int = 0
    """Of it by the time it got them."""


def share(*, room: int, speed: float, speeds: Sequence[float]) -> int:
    """How many segments a worker is to hold: 2; more if it is faster than the median, in proportion, up to 4; and never
    more than it has room for.

    Args:
        room: segments that fit on its disk.
        speed: steps a second, 0 where it is not known yet; `speeds` those of all workers of which it is known.
    """
    count = _OWN
    if speed and speeds:
        count = min(_MOST, max(_OWN, round(_OWN * speed / statistics.median(speeds))))
    return min(count, room)


class Placement:
    """The segments of all workers.

    Args:
        parts: segments of the data set.
        images: of a segment, on average.
        batch: images of a step.
    """

    def __init__(self, *, parts: int, images: float, batch: int) -> None:
        self._parts, self._images, self._batch = parts, images, batch
        self._placed: dict[str, Placed] = {}

    def place(self, worker: str, *, room: int, steps: int, speeds: Mapping[str, float]) -> tuple[int, ...]:
        """The segments of a worker, which may be others than before; the first ones are those that it holds longest.

        Args:
            room: segments that fit on its disk, those that it holds among them.
            steps: that it has computed so far.
            speeds: steps a second of the workers of which they are known.

        Raises:
            TooLarge: not even one fits.
        """
        if room < 1:
            raise TooLarge(
                "no segment of the training images fits on the disk of this worker: give it a larger --cache"
            )
        count = min(self._parts, share(room=room, speed=speeds.get(worker, 0.0), speeds=list(speeds.values())))
        placed = self._placed.get(worker)
        if placed is None:
            placed = self._placed[worker] = Placed(self._free(self._placed.values()), count, steps)
        elif (steps - placed.steps) * self._batch >= placed.count * self._images and placed.count < self._parts:
            # It has been through what it holds: the first one goes, the next one comes.
            placed.start, placed.count, placed.steps = (placed.start + 1) % self._parts, count, steps
        elif count < placed.count:
            placed.count = count
        return tuple((placed.start + each) % self._parts for each in range(placed.count))

    def leave(self, worker: str) -> None:
        """Its place is free."""
        self._placed.pop(worker, None)

    def _free(self, placed: Collection[Placed]) -> int:
        """Where the fewest workers begin; the first such one after segment 0, which the host begins with."""
        starts = [each.start for each in placed]
        numbers: list[int] = [*range(1, self._parts), 0]
        return min(numbers, key=lambda number: starts.count(number))
