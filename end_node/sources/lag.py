"""Backlog of a live stream: the frames that its server has sent, and that are not decoded yet."""

from __future__ import annotations

import math

__all__ = ["Backlog"]

_LONG_S, _SHORT_S = 1.0, 0.2
_JUMP_S = 1.0
"""The timestamps of a stream have jumped if they move this far from the clock between two frames."""
_DRIFT = 0.001
"""Largest difference of speed between the clock of a camera and ours."""


class Backlog:
    """Tells if a decoder is too slow for a stream, from the times of its frames by both clocks."""

    def __init__(self) -> None:
        self.long = False
        """True from the time when the backlog exceeds 1 s until it is below 0.2 s."""
        self._at = self._delay = self._least = math.nan

    def decoded(self, frame_s: float, now: float) -> None:
        """Note a frame.

        Args:
            frame_s: its timestamp.
            now: the present time.
        """
        delay = now - frame_s
        if abs(delay - self._delay) <= _JUMP_S:
            self._least = min(delay, self._least + _DRIFT * (now - self._at))
        else:
            self._least = delay
        self._at, self._delay = now, delay
        self.long = delay - self._least > (_SHORT_S if self.long else _LONG_S)
