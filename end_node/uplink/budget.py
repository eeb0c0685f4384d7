"""The budget of the uplink: the bytes that pictures may use, and the frequency of answers and heartbeats.

All times are elapsed seconds that the caller passes in. The budget holds for any 24 hours of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

__all__ = ["DailyBudget", "lease_s"]

DAY_S = 86400.0
_MINUTE_S = 60.0
_HEARTBEAT_BYTES, _TLS_BYTES = 600, 5000
"""One heartbeat in both directions, and the handshake of a new connection."""
_SHARE = 0.02
"""Share of the budget for heartbeats, and for headers of batches."""
_BEATS_PER_LEASE = 3
_SAVED_S, _SAVED_HOURS_S = 6 * 3600.0, DAY_S
"""Unused budget is saved for pictures for six hours, or for a day if they may leave only at some hours."""
_LINGER_S = 1.0
_FULL_BATCH = 500
_GUESS = 0.1
"""Share of the budget for all but pictures, until it has been measured for an hour."""
_MEASURED_S = 3600.0
_MARGIN = 1.1
_LOOK_AGAIN_S = 60.0


def lease_s(bytes_per_day: int | None, *, tls: bool) -> float | None:
    """Return the lease to ask for, so that heartbeats cost 2 % of the budget; None without a budget.

    Heartbeats come three times per lease, every 10 s to 900 s.
    """
    if bytes_per_day is None:
        return None
    return _BEATS_PER_LEASE * _interval_s(bytes_per_day, tls=tls, shortest=10.0, longest=900.0)


def _interval_s(bytes_per_day: int, *, tls: bool, shortest: float, longest: float) -> float:
    """Return the seconds between messages that cost 2 % of the budget."""
    cost = _HEARTBEAT_BYTES + (_TLS_BYTES if tls else 0)
    return min(longest, max(shortest, cost * DAY_S / (_SHARE * bytes_per_day)))


class DailyBudget:
    """Bytes on the wire per 24 hours of elapsed time.

    Answers and heartbeats always go. Pictures get the rest, evenly over the day: unused budget is saved for some hours.
    A picture goes only if the budget still covers the forecast of answers and heartbeats, at each moment of the next 24
    hours.

    Args:
        bytes_per_day: None for no limit.
        tls: True if each message needs a new encrypted connection.
        hours: True if pictures may leave only at some hours of the day.
        began: now.
    """

    def __init__(self, bytes_per_day: int | None, *, tls: bool, hours: bool, began: float) -> None:
        self._budget = bytes_per_day
        self._batch_s = _LINGER_S
        if bytes_per_day is not None:
            self._batch_s = _interval_s(bytes_per_day, tls=tls, shortest=300.0, longest=900.0)
        self._saved_s = _SAVED_HOURS_S if hours else _SAVED_S
        self._began = self._known_since = began
        self._minutes: deque[tuple[float, int]] = deque()
        """End of a minute, and the bytes spent in it; a minute that begins now ends in the future."""
        self._pictures: deque[tuple[float, int]] = deque()

    def load(self, now: float, spent: Iterable[tuple[float, int]]) -> None:
        """Take over what was spent before a restart.

        Args:
            spent: age of the end of each minute and its bytes, the oldest first.
        """
        self._minutes.extendleft(reversed([(now - age, count) for age, count in spent]))
        if self._minutes:
            self._known_since = min(self._known_since, self._minutes[0][0])

    def spend(self, now: float, count: int, *, pictures: int = 0) -> None:
        """Count bytes on the wire, both directions together.

        Args:
            pictures: share of these bytes for pictures and their answers.
        """
        _count(self._minutes, now, count)
        if pictures:
            _count(self._pictures, now, pictures)

    def spent(self, now: float) -> int:
        """Return the bytes of the last 24 hours."""
        self._forget(now)
        return sum(count for _, count in self._minutes)

    def answers_in_s(self, waiting: int, since_s: float) -> float:
        """Return the seconds until the next batch of answers.

        Args:
            waiting: answers that are not delivered.
            since_s: seconds since the last batch.
        """
        return 0.0 if waiting >= _FULL_BATCH else max(0.0, self._batch_s - since_s)

    def picture_in_s(self, now: float, size: int) -> float:
        """Return 0 if a picture may go now, otherwise the seconds after which to ask again.

        Args:
            size: bytes that it costs in both directions. The answer is infinite if no day's budget covers it.
        """
        if self._budget is None:
            return 0.0
        self._forget(now)
        forecast = self._forecast(now)
        if size + forecast > self._budget:
            return math.inf if size > self._budget else _LOOK_AGAIN_S
        rate = self._budget / DAY_S
        saved, needed = self._saved(now, rate), min(size, self._saved_s * rate)
        if saved < needed:
            return min(_LOOK_AGAIN_S, (needed - saved) / rate)
        return 0.0 if self._peak(now, forecast) + size <= self._budget else _LOOK_AGAIN_S

    def _saved(self, now: float, rate: float) -> float:
        """Return the budget that the last 24 hours accrued and did not spend.

        The first day begins with nothing: otherwise the first pictures would take what later ones need more.
        """
        saved, at, most = 0.0, max(now - DAY_S, self._known_since), self._saved_s * rate
        for end, count in self._minutes:
            saved, at = min(most, saved + max(0.0, end - at) * rate) - count, max(at, end)
        return min(most, saved + (now - at) * rate)

    def _peak(self, now: float, forecast: float) -> float:
        """Return the most bytes in any 24 hours that include this moment, if only answers and heartbeats follow."""
        rest, peak = float(sum(count for _, count in self._minutes)), 0.0
        for end, count in self._minutes:
            # Just before this minute leaves the 24 hours.
            peak = max(peak, rest + forecast * min(1.0, max(0.0, end + DAY_S - now) / DAY_S))
            rest -= count
        return max(peak, rest + forecast)

    def _forecast(self, now: float) -> float:
        """Return the bytes of answers and heartbeats in 24 hours."""
        assert self._budget is not None
        period = min(DAY_S, now - self._began)
        first = now - period
        total = sum(count for end, count in self._minutes if end > first)
        others = max(0, total - sum(count for end, count in self._pictures if end > first))
        if period < _MEASURED_S:
            return max(others * _MARGIN, _GUESS * self._budget)
        return others / period * DAY_S * _MARGIN

    def _forget(self, now: float) -> None:
        for minutes in (self._minutes, self._pictures):
            while minutes and minutes[0][0] <= now - DAY_S:
                minutes.popleft()


def _count(minutes: deque[tuple[float, int]], now: float, count: int) -> None:
    """Add bytes to the minute of `now`."""
    end = (now // _MINUTE_S + 1) * _MINUTE_S
    if minutes and minutes[-1][0] >= end:
        minutes[-1] = (minutes[-1][0], minutes[-1][1] + count)
    else:
        minutes.append((end, count))
