"""A circuit breaker for nodes that answer wrongly (Nygard, Release It!, 2007). Pure.

Heartbeats show that a node is there, not that its answers are right. After a wrong answer a node is set aside for
`base_s`, and twice as long after each further one in a row, but at most `LONGEST_S`. Then it gets one task as a trial.
It stays set aside for as long again until that task is answered. A right answer clears it.

    rest_s(n) = min(LONGEST_S, base_s * 2^(n - 1))
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from tierkit.pacing import backoff_s

__all__ = ["LONGEST_S", "WrongAnswers", "rest_s"]

LONGEST_S = 30.0


def rest_s(count: int, base_s: float) -> float:
    """Seconds for which a node is set aside after `count` wrong answers in a row (at least 1)."""
    return backoff_s(count, first_s=base_s, cap_s=LONGEST_S)


class WrongAnswers(Struct, frozen=True, kw_only=True):
    """Wrong answers of a node since its last right one. Times are monotonic."""

    count: int = 0
    at: float = 0.0
    """Time of the last one, or of the trial after it."""
    reason: str = ""
    """Reason of the last one."""

    def one_more(self, reason: str, now: float) -> WrongAnswers:
        return WrongAnswers(count=self.count + 1, at=now, reason=reason)

    def one_less(self) -> WrongAnswers:
        """Return the count after one of the wrong answers has turned out to be no fault of the node."""
        return replace(self, count=self.count - 1) if self.count > 1 else WrongAnswers()

    def again(self, now: float) -> WrongAnswers:
        """Restart the rest: its trial is in flight, or has failed through no fault of the node."""
        return replace(self, at=now) if self.count else self

    def sets_aside(self, now: float, base_s: float) -> bool:
        """True if the node is to be given nothing now."""
        return self.count > 0 and now < self.at + rest_s(self.count, base_s)

    def may_be_asked(self, now: float, base_s: float) -> bool:
        """True if the node may be given a task where all others are set aside as well."""
        return self.count > 0 and now >= self.at + min(base_s, LONGEST_S)

    @property
    def why(self) -> str:
        """Reason in words; "" for none."""
        if not self.count:
            return ""
        which = "its last answer was wrong" if self.count == 1 else f"its last {self.count} answers were wrong"
        return f"{which}: {self.reason}"
