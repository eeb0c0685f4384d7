"""Hours in which pictures may leave the device."""

from __future__ import annotations

from datetime import datetime, time

__all__ = ["opens_in_s", "time_of_day"]

_LOOK_AGAIN_S = 600.0
"""Longest wait before the time of day is read again: the clock may be set, and summer time may begin."""


def time_of_day(wall: float | None) -> time | None:
    """Return the time of day in the time zone of this machine; None if the wall clock is unknown."""
    return None if wall is None else datetime.fromtimestamp(wall).time()


def opens_in_s(hours: tuple[time, time] | None, now: time | None) -> float:
    """Return 0 if pictures may leave now, otherwise the seconds after which to ask again.

    Args:
        hours: first moment of the daily period, and the first moment after it, which may be on the next day. None: the
            whole day.
        now: time of day. None: unknown, so pictures stay.
    """
    if hours is None:
        return 0.0
    if now is None:
        return _LOOK_AGAIN_S
    first, last = hours
    inside = first <= now < last if first < last else now >= first or now < last
    return 0.0 if inside else min(_LOOK_AGAIN_S, (_seconds(first) - _seconds(now)) % 86400 or _LOOK_AGAIN_S)


def _seconds(at: time) -> float:
    return at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6
