"""The curves of a host's run: loss, accuracy, bytes and staleness over seconds and updates, in a file of its folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from tierkit.atomic import write_atomically
from tierkit.documents import Strict, read_json
from tierkit.errors import SetupError
from tierkit.thinning import thinned
from training.messages import CURVES, CURVES_PLOT

__all__ = ["MOST_POINTS", "Curves", "RunPoint", "extended"]

log = logging.getLogger(__name__)

MOST_POINTS = 500
_MOST_BYTES = 1 << 20
"""Largest file that is read; a file of 500 points has a tenth of that."""
Share = Annotated[float, Field(ge=0, le=1)]


class RunPoint(Strict):
    """One moment of a run; counts are totals of all workers since it began."""

    seconds: NonNegativeFloat
    """From the first lease to the last update before this moment."""
    updates: NonNegativeInt
    steps: NonNegativeInt
    loss: float | None = None
    """Mean of the last 100 updates."""
    accuracy: Share | None = None
    """Accuracy on the held-out images; None if it was not measured at this moment."""
    bytes_sent: NonNegativeInt
    """Bytes sent by the workers."""
    bytes_received: NonNegativeInt
    staleness: NonNegativeFloat
    """Mean over the updates."""


class _File(Strict):
    points: Annotated[tuple[RunPoint, ...], Field(max_length=MOST_POINTS)]


def extended(points: Sequence[RunPoint], point: RunPoint) -> tuple[RunPoint, ...]:
    """The curve with one more point, at most 500 in all. A point without news is left out."""
    if points and point.accuracy is None and point.updates == points[-1].updates:
        return tuple(points)
    return thinned((*points, point), MOST_POINTS, lambda each: each.seconds, _joined)


def _joined(before: RunPoint, after: RunPoint) -> RunPoint:
    return after if after.accuracy is not None else after.model_copy(update={"accuracy": before.accuracy})


class Curves:
    """The curves of the run in a folder, with the points of earlier processes of its host.

    Args:
        updates: number of updates in the run now. Later points belong to lost updates, and are left out.
    """

    def __init__(self, folder: Path, updates: int) -> None:
        self._path = folder / CURVES
        self._plot = folder / CURVES_PLOT
        self.points = tuple(each for each in self._read() if each.updates <= updates)

    def _read(self) -> tuple[RunPoint, ...]:
        try:
            if self._path.stat().st_size <= _MOST_BYTES:
                return read_json(self._path, _File, what="curves", error=SetupError).points
            log.warning("the curves begin again: %s is too long", self._path)
        except FileNotFoundError:
            pass
        except (OSError, SetupError) as error:
            log.warning("the curves begin again: %s", error)
        return ()

    def add(self, point: RunPoint) -> None:
        """Add a moment that is not before the last one."""
        self.points = extended(self.points, point)

    def write(self) -> None:
        """Write the file.

        Raises:
            SetupError: it could not be written; the one before is whole.
        """
        write_atomically(self._path, _File(points=self.points).model_dump_json(indent=1).encode())

    def draw(self, title: str) -> None:
        """Write a PNG, if matplotlib is installed and there is something to draw.

        Raises:
            SetupError: it could not be written.
        """
        if self.points and find_spec("matplotlib") is not None:
            from models.training.curves import draw_run

            draw_run([each.model_dump() for each in self.points], title, self._plot)
