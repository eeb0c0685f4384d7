"""A node's power budget, kept: images per minute as a leaky bucket that holds one task. Pure.

After n images the next task waits n / rate, so work is spread evenly instead of coming in bursts, which is what heat
and batteries care about. In any T seconds start at most rate * T + one task.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace"]


@dataclass(slots=True)
class Pace:
    """Args: images_per_minute: None for no limit."""

    images_per_minute: float | None
    free_at: float = 0.0
    """When the bucket is empty again: the next task may go then."""

    def wait_s(self, now: float) -> float:
        """Seconds until the next task may go."""
        return max(0.0, self.free_at - now)

    def charge(self, images: int, now: float) -> None:
        """So many images are on their way."""
        if self.images_per_minute is not None:
            self.free_at = max(self.free_at, now) + images * 60.0 / self.images_per_minute
