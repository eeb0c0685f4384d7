"""The plan for the next task, with its reason. A pure function of a snapshot.

The rule, in the order in which it decides; `docs/explanation/scheduling.md` gives the reasons:

1. The outlook is the earliest time at which all unsent tasks of the job can be done, given the work that all nodes
   already have. No task goes to a node where it would be done later.
2. With a deadline, an upstream node is asked only if the answer still arrives in time; if none can, only the coarse
   answer is requested.
3. If the upstream nodes are the bottleneck, the upstream node that will run out of work first is taken. If the end
   devices are, the device with the most accurate network is taken, unless its answer is expected so late that a small
   error would delay the job. Among equals, the pair of end device and upstream node with the earliest expected finish
   is taken.
4. A task that would wait at the upstream node for longer than its `slack_s` is held back. It is sent if a user waits
  for it right now, or if the end devices need all the time that is left until the deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec import Struct

from scheduler.core.device import Node
from tierkit.inference.upstreams import is_allowed

__all__ = ["Ask", "EndState", "Hold", "Outlook", "Send", "UpstreamState", "outlook", "plan"]

_CONSIDERED = 8
"""End devices that are looked at for one task, those that would be done with the coarse answer first."""

_MOST_ASKED = 8
"""Upstream nodes that a task is sent with, best first."""

_TOLERANCE_S = 1e-6

_MARGIN_S = 0.15
"""Prefer a more accurate node only if its answer is expected at least this long before the job ends."""


class Ask(Struct, frozen=True, kw_only=True):
    """A task that is ready, and the job that it is of."""

    remaining: int
    """Tasks of the job that are still to be sent, this one included."""
    interactive: bool = False
    deadline: float = math.inf
    """Time at which the final answer of this task must be there."""
    job_deadline: float = math.inf


class EndState(Struct, frozen=True, kw_only=True):
    """An end device, with its times for this task on the scheduler's clock."""

    node_id: str
    has_room: bool
    free_at: float
    """Time at which it will be done with what it has."""
    seconds: float
    """Seconds to compute the task."""
    hop_s: float
    """Seconds between scheduler and device, there and back."""
    allowed_upstreams: tuple[str, ...] = ()
    """URLs below which an upstream node must lie for the device to ask it; empty for anywhere."""

    def coarse_at(self, now: float) -> float:
        """Return the time at which the device would have computed the coarse answer."""
        return max(self.free_at, now + self.hop_s / 2) + self.seconds


class UpstreamState(Struct, frozen=True, kw_only=True):
    """An edge node or a cloud."""

    node: Node
    free_at: float
    seconds: float
    slack_s: float
    """Seconds that a task may wait there for its turn."""
    has_room: bool = True
    sharers: int = 1
    """Sites whose tasks it has now: the tasks that are still to be sent get so small a part of its time."""
    accuracy: float = 0.0
    """Accuracy of its fine answers, 0 to 1; 0 if unknown."""


class Send(Struct, frozen=True, kw_only=True):
    """Send the task to `end`, which asks `upper` in this order."""

    end: str
    upper: tuple[Node, ...]
    finish: float
    """Time at which the final answer is expected at the scheduler."""
    reason: str
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline."""


class Hold(Struct, frozen=True, kw_only=True):
    """Send nothing of this job now."""

    reason: str
    until: float = math.inf
    """Time at which to look again, if nothing happens before."""


Link = Callable[[str, str], float]
"""Seconds between an end device and an upstream node, there and back."""


class Outlook(Struct, frozen=True, kw_only=True):
    """Time at which the tasks of a job that are still to be sent can be done, by what all nodes have to do already."""

    last: float
    """The earliest time at which all of them can have their final answers."""
    ends_done: float
    """Time at which the end devices can have given all coarse answers."""
    upstreams_narrow: bool
    """True if the job waits for the upstream nodes rather than for the end devices."""
    in_parts: bool = False
    """Only some nodes of the fleet are looked at for each task."""


class _Pair(Struct, frozen=True):
    end: EndState
    upper: UpstreamState
    ahead_s: float
    """Seconds for which the upstream node still has work when the task arrives; below 0 if it is idle by then."""
    finish: float

    @property
    def wait_s(self) -> float:
        return max(0.0, self.ahead_s)

    def why(self, now: float) -> str:
        waits = f" after {self.wait_s:.2f} s in its queue" if self.wait_s >= 0.005 else ""
        return f"{self.end.node_id} and {self.upper.node.node_id}{waits}: answer in {self.finish - now:.2f} s"


def plan(
    ask: Ask,
    ends: Sequence[EndState],
    uppers: Sequence[UpstreamState],
    *,
    link: Link,
    now: float,
    known: Outlook | None = None,
) -> Send | Hold | None:
    """The next task's way, a reason to hold it back, or None when no end device that it may go to has room.

    Args:
        ends: end devices that the task may go to.
        uppers: upstream nodes on the device list that may see its pixels.
        known: of the whole fleet, where `ends` and `uppers` are but a part of it.
    """
    able = _able(ends, uppers)
    open_ends = _first([end for end in able or ends if end.has_room], now)
    if not open_ends:
        return None
    if not able:
        why = "no end device with room may ask an upstream node" if uppers else "no upstream node may be asked"
        return _coarse_only(open_ends[0], now, why)
    if known is None:
        known = outlook(ask.remaining, able, uppers, link=link, now=now)
    # For each upstream node the end device by which the answer comes first; of equal ones the one that is done first.
    pairs = _best_pairs(open_ends, [upper for upper in uppers if upper.has_room], link, now)
    in_time = [pair for pair in pairs if pair.finish <= ask.deadline]
    last = known.last
    hurry = ask.interactive or known.ends_done + open_ends[0].seconds >= ask.job_deadline
    if hurry and in_time:
        best = min(in_time, key=lambda pair: pair.finish)
        why = "earliest finish" if ask.interactive else "no time to wait: earliest finish"
        return _send(best, in_time, f"{why}, {best.why(now)}")
    if not in_time:
        if hurry or _soonest(able, uppers, link, now) > ask.deadline:
            left = f"{max(0.0, ask.deadline - now):.2f} s are left"
            return _coarse_only(open_ends[0], now, f"no upstream node would answer in time: {left}", too_late=True)
        return Hold(reason="all upstream nodes that answer in time have as many tasks as they may")
    useful = [pair for pair in in_time if pair.finish <= last + _TOLERANCE_S]
    if not useful:
        best = min(in_time, key=lambda pair: pair.finish)
        return Hold(
            reason=f"a node that is busy now will be the quicker one: {best.why(now)}, "
            f"all {ask.remaining} tasks can be done in {last - now:.2f} s"
        )
    quick = [pair for pair in useful if pair.wait_s <= pair.upper.slack_s + _TOLERANCE_S]
    if not quick:
        first = min(useful, key=lambda pair: pair.wait_s - pair.upper.slack_s)
        return Hold(
            reason=f"the upstream nodes have enough to do: {first.why(now)}",
            until=now + first.wait_s - first.upper.slack_s,
        )
    soonest = min(pair.finish for pair in quick)
    if known.upstreams_narrow:
        best = min(quick, key=lambda pair: (pair.ahead_s, -pair.upper.accuracy, pair.finish))
        why = "it runs out of work first"
    else:
        limit = max(soonest, last - _MARGIN_S) + _TOLERANCE_S
        sure = [pair for pair in quick if pair.finish <= limit]
        best = min(sure, key=lambda pair: (-pair.upper.accuracy, pair.finish))
        why = f"more accurate, and no later than the job's other {ask.remaining - 1} tasks"
    if best.finish <= soonest + _TOLERANCE_S:
        why = "earliest finish"
    return _send(best, in_time, f"{why}, {best.why(now)}")


def outlook(
    tasks: int,
    ends: Sequence[EndState],
    uppers: Sequence[UpstreamState],
    *,
    link: Link,
    now: float,
    in_parts: bool = False,
) -> Outlook:
    """The forecast for `tasks` more tasks; it needs at least one node of each kind, and never ends where no end device
    may ask an upstream node.

    Both stages at their best: the end devices compute all coarse answers and the last of them goes the shortest way
    on; the upstream nodes begin when the first coarse answers arrive and never wait.

    Args:
        in_parts: only some nodes of the fleet are looked at for each task, so the last tasks go to good nodes, not
            always to the best: they may take as long again as an end device takes for one.
    """
    way_on_s, soonest, ways = math.inf, math.inf, []
    ends = _able(ends, uppers) or ends
    for pair in _best_pairs(_first(ends, now), uppers, link, now):
        soonest = min(soonest, pair.finish)
        way_on_s = min(way_on_s, pair.finish - pair.wait_s - pair.end.coarse_at(now))
        ways.append((pair.finish - pair.upper.seconds, pair.upper.seconds * pair.upper.sharers))
    upstreams_done = _all_done(tasks, ways) if ways else math.inf
    ends_done = _all_done(tasks, [(end.coarse_at(now) - end.seconds, end.seconds) for end in ends])
    spare_s = fmean(end.seconds for end in ends) if in_parts else 0.0
    return Outlook(
        last=max(soonest, upstreams_done, ends_done + way_on_s) + spare_s,
        ends_done=ends_done,
        upstreams_narrow=upstreams_done > ends_done + way_on_s,
        in_parts=in_parts,
    )


def _first(ends: Sequence[EndState], now: float) -> list[EndState]:
    return heapq.nsmallest(_CONSIDERED, ends, key=lambda end: end.coarse_at(now))


def _all_done(tasks: int, servers: Sequence[tuple[float, float]]) -> float:
    """Return the time at which servers are done with `tasks` tasks; each is free at its first number and takes its
    second per task.

    Exact: the `tasks`-th of all their finishing times in order. Many tasks are taken at a time where no server can be
    done with them later than the answer.
    """
    if at_once := [start for start, seconds in servers if seconds < _TOLERANCE_S]:
        return min(at_once)
    # What flows in fluid form is a lower bound: no plan finishes before, so all whole tasks until then may be skipped.
    fluid = _fluid(tasks, servers)
    done = [max(0, math.floor((fluid - start) / seconds)) for start, seconds in servers]
    left = tasks - sum(done)
    if left <= 0:
        return max(start + n * seconds for (start, seconds), n in zip(servers, done, strict=True) if n)
    heap = [(start + (n + 1) * seconds, seconds) for (start, seconds), n in zip(servers, done, strict=True)]
    heapq.heapify(heap)
    for _ in range(left - 1):
        finish, seconds = heap[0]
        heapq.heapreplace(heap, (finish + seconds, seconds))
    return heap[0][0]


def _fluid(tasks: int, servers: Sequence[tuple[float, float]]) -> float:
    """Return the time at which work that can be cut as finely as one likes would be done: servers join as they become
    free."""
    rate = work = 0.0
    ordered = sorted(servers)
    for position, (start, seconds) in enumerate(ordered):
        rate += 1 / seconds
        work += start / seconds
        until = (tasks + work) / rate
        if position + 1 == len(ordered) or until <= ordered[position + 1][0]:
            return until
    raise ValueError("there is no server")


def _pair(end: EndState, upper: UpstreamState, link: Link, now: float) -> _Pair:
    half_s = link(end.node_id, upper.node.node_id) / 2
    arrival = end.coarse_at(now) + half_s
    finish = max(arrival, upper.free_at) + upper.seconds + half_s + end.hop_s / 2
    return _Pair(end, upper, upper.free_at - arrival, finish)


def _best_pairs(ends: Sequence[EndState], uppers: Sequence[UpstreamState], link: Link, now: float) -> Sequence[_Pair]:
    """Each upstream node with the end device by which its answer comes first; without those that no device may ask."""
    pairs = []
    for upper in uppers:
        able = [_pair(end, upper, link, now) for end in ends if _may_ask(end, upper)]
        if able:
            pairs.append(min(able, key=lambda pair: (pair.finish, pair.end.coarse_at(now))))
    return pairs


def _able(ends: Sequence[EndState], uppers: Sequence[UpstreamState]) -> list[EndState]:
    """The end devices that may ask one of these nodes."""
    return [end for end in ends if any(_may_ask(end, upper) for upper in uppers)]


def _may_ask(end: EndState, upper: UpstreamState) -> bool:
    return is_allowed(upper.node.url, end.allowed_upstreams)


def _soonest(ends: Sequence[EndState], uppers: Sequence[UpstreamState], link: Link, now: float) -> float:
    return min((pair.finish for pair in _best_pairs(_first(ends, now), uppers, link, now)), default=math.inf)


def _send(best: _Pair, pairs: Sequence[_Pair], reason: str) -> Send:
    others = sorted((pair for pair in pairs if pair.upper is not best.upper), key=lambda pair: pair.finish)
    nodes = (best.upper.node, *(pair.upper.node for pair in others[: _MOST_ASKED - 1]))
    return Send(end=best.end.node_id, upper=nodes, finish=best.finish, reason=reason)


def _coarse_only(end: EndState, now: float, why: str, *, too_late: bool = False) -> Send:
    finish = end.coarse_at(now) + end.hop_s / 2
    return Send(end=end.node_id, upper=(), finish=finish, reason=f"{why}; {end.node_id} answers", too_late=too_late)
