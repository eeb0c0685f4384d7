"""The progress of a training on the fleet, as a line for people."""

from __future__ import annotations

import time
from collections.abc import Callable

from tierkit.client import Run

__all__ = ["ProgressLines", "progress_line"]

_AT_MOST_EVERY_S = 10.0


def progress_line(run: Run, rounds: int) -> str:
    """Return a line with the progress of a run, in rounds, and the number of its devices.

    Args:
        rounds: rounds of the whole run.
    """
    here = sum(not each.left for each in run.workers)
    if not run.workers:
        return "waiting for devices (terrace train work --scheduler URL --kept FOLDER)"
    devices = f"{here:,} {'device' if here == 1 else 'devices'}"
    loss = "" if run.loss is None else f", loss {run.loss:.3g}"
    return f"round {rounds * run.done // run.steps:,} of {rounds:,} done, {devices}{loss}"


class ProgressLines:
    """Says lines that have changed, one in ten seconds at most.

    Args:
        say: called with a line.
        clock: seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._last, self._said_at = "", -_AT_MOST_EVERY_S

    def news(self, line: str) -> None:
        """Say the line if it has changed and enough time has passed."""
        now = self._clock()
        if line != self._last and now - self._said_at >= _AT_MOST_EVERY_S:
            self._last, self._said_at = line, now
            self._say(line)
