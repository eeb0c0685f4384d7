"""Choice of the segments that a worker holds. Their number depends on its disk and its speed, and they change after
each pass.

The rule follows the volunteers' platform of 2018, in which worker J holds the segments J and J + 1. Two ideas come from
BAIPAS (Lee et al. 2017): data goes where there is space and speed, and data that a worker has been through moves to the
next worker while training continues.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkit.errors import TooLarge

__all__ = ["SegmentPlacement", "moved", "share", "that_fit"]

_OWN = 2
"""Segments of a worker of usual speed."""
_MOST = 4
"""Most segments of a fast worker."""


def share(*, room: int, speed: float, speeds: Sequence[float]) -> int:
    """Return the number of segments that a worker should hold. It is 2, or more in proportion if the worker is faster
    than the median, up to 4, and never more than fit on its disk.

    Args:
        room: segments that fit on its disk.
        speed: its steps a second; 0 if unknown.
        speeds: steps a second of all workers whose speed is known.
    """
    count = _OWN
    if speed and speeds:
        count = min(_MOST, max(_OWN, round(_OWN * speed / statistics.median(speeds))))
    return min(count, room)


def moved(numbers: tuple[int, ...], *, count: int, holds: frozenset[int], room: int, parts: int) -> tuple[int, ...]:
    """Return the next segments of a worker that has been through its present ones: the first one goes, others come.

    It keeps its segments until the new ones are there, so only new ones that fit next to them come. If none fits,
    nothing changes.

    Args:
        numbers: its present segments, in the order in which they go.
        count: number of segments that it should have.
        holds: segments on its disk; `room` is the number that fit there, including these.
        parts: segments of the data set.
    """
    following = ((numbers[-1] + each) % parts for each in range(1, parts))
    new = [each for each in following if each not in numbers][: max(0, count - len(numbers) + 1)]
    while len(holds.union(new)) > room and new:
        new.pop()
    return (*numbers[1:], *new) if new else numbers


def that_fit(numbers: tuple[int, ...], *, holds: frozenset[int], room: int, parts: int) -> tuple[int, ...]:
    """Return these segments if they fit on the disk together with what is there. Otherwise return the segments that it
    holds, and as many new ones as fit. See `moved` for the arguments.
    """
    if len(holds.union(numbers)) <= room:
        return numbers
    held = sorted(holds, key=lambda each: (each - numbers[0] + 1) % parts)  # from the one that went last
    new = [each for each in numbers if each not in holds][: max(0, room - len(holds))]
    return tuple([*held, *new][: len(numbers)])


@dataclass(slots=True)
class _Placed:
    numbers: tuple[int, ...]
    """Segments of a worker, in the order in which they go."""
    steps: int
    """Steps that the worker had computed when it got them."""


class SegmentPlacement:
    """The segments of all workers.

    Args:
        parts: segments of the data set.
        images: mean number of images of a segment.
        batch: number of images of a step.
    """

    def __init__(self, *, parts: int, images: float, batch: int) -> None:
        self._parts, self._images, self._batch = parts, images, batch
        self._placed: dict[str, _Placed] = {}

    def place(
        self, worker: str, *, room: int, holds: frozenset[int], steps: int, speeds: Mapping[str, float]
    ) -> tuple[int, ...]:
        """The segments of a worker, which may be others than before.

        Args:
            room: segments that fit on its disk, including those that it holds.
            holds: segments that it has.
            steps: number of steps that it has computed so far.
            speeds: steps a second of the workers whose speed is known.

        Raises:
            TooLarge: not even one fits.
        """
        if room < 1:
            raise TooLarge(
                "no segment of the training images fits on the disk of this worker: give it a larger --cache"
            )
        parts = self._parts
        count = min(parts, share(room=room, speed=speeds.get(worker, 0.0), speeds=list(speeds.values())))
        placed = self._placed.get(worker)
        if placed is None:
            start = self._free()
            placed = self._placed[worker] = _Placed(tuple((start + each) % parts for each in range(count)), steps)
        elif (
            holds.issuperset(placed.numbers)
            and (steps - placed.steps) * self._batch >= len(placed.numbers) * self._images
        ):
            numbers = moved(placed.numbers, count=count, holds=holds, room=room, parts=parts)
            if numbers != placed.numbers:
                placed.numbers, placed.steps = numbers, steps
        placed.numbers = that_fit(placed.numbers[:count], holds=holds, room=room, parts=parts)
        return placed.numbers

    def leave(self, worker: str) -> None:
        """Its place is free."""
        self._placed.pop(worker, None)

    def _free(self) -> int:
        """Return the segment with which the fewest workers begin. In a tie the lowest number wins, but segment 0 comes
        last, because the host begins with it.
        """
        starts = [each.numbers[0] for each in self._placed.values()]
        numbers: list[int] = [*range(1, self._parts), 0]
        return min(numbers, key=lambda number: starts.count(number))
