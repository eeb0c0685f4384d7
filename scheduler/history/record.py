"""A record of what the dispatcher does and what becomes of nodes: a row of figures each second, and events.

All of it is in memory and bounded; it ends with the scheduler. Who looks at it costs nothing here: `version` changes
when there is something new.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import ConfigDict

from scheduler.core.device import Device
from scheduler.core.fleet import Change, Ledger
from scheduler.core.job import Answer
from scheduler.core.site import SitesSeen
from scheduler.history.series import Latencies, RingBuffer
from tierkit.types import Health

__all__ = ["COLUMNS", "FleetEvent", "Record"]

COLUMNS = (
    "first",
    "finer",
    "fallback",
    "failed",
    "sent_up",
    "failed_attempts",
    "first_p50_ms",
    "first_p99_ms",
    "final_p50_ms",
    "final_p99_ms",
    "alive",
    "suspect",
    "dead",
    "draining",
    "jobs",
)
"""Columns of a row. Images per second: with a first answer, with a finer one, with none above the first, without any
answer, and sent up. Then failed attempts per second, latencies, and, at the end of the step, nodes by health and
unfinished jobs."""
_RATES = 6

_SECONDS, _MINUTES = 3600, 1440
_EVENTS = 4000
_KINDS_A_SECOND = 50
"""Different things that may happen to tasks in a second, each with its node and job; the rest is one event."""
_SMOOTH_S = 5
"""Seconds over which what a node or link does is averaged."""
_MOST_SAID = 300
_AGAIN_S = 0.2
"""Least seconds between two notices to a reader, however much happens."""

_OF_ATTEMPTS = {
    "unreachable": "reassigned",
    "lost": "reassigned",
    "error": "reassigned",
    "rerouted": "rerouted",
    "fallback": "fallback",
    "refused": "limited",
}
"""Kinds of events by the outcome of attempts."""
_OF_HEALTH = {Health.SUSPECT: "suspect", Health.DEAD: "dead", Health.DRAINING: "drained", Health.REMOVED: "removed"}


_What = tuple[str, str | None, str | None]
"""Kind of event, node and job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """Something that happened to a node or to tasks."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    id: int
    """Rises; also over restarts of the scheduler, as long as the clock does."""
    at: float
    """Seconds since 1970."""
    kind: str
    """Kind of event. About a node: joined, suspect, recovered, dead, drained, resumed or removed. About a job: began,
    ended, or escalated (its unsure images go up one by one). About tasks: reassigned (they went to another device),
    rerouted (to another upstream node), fallback (their first answers are final), or limited (a node refused them)."""
    node: str | None = None
    """Node that it happened to; null without one."""
    job: str | None = None
    """Job that it happened to; null without one."""
    owner: str | None = None
    """Owner of the job."""
    site: str | None = None
    """The site of the node, or else of the job; None: no site."""
    count: int = 1
    """Tasks within a second to which it happened."""
    text: str = ""
    """Reason for the event."""

    def concerns(self, owner: str | None, seen: SitesSeen) -> bool:
        """True for a caller that sees the jobs of `owner` (None: all jobs) and the sites `seen`."""
        return (owner is None or self.job is None or self.owner == owner) and seen.site(self.site)


class Record:
    """Recent events and figures of the fleet.

    Args:
        devices: nodes whose changes are recorded.
        wall: Returns seconds since 1970 for a time of the scheduler's clock.
    """

    def __init__(self, devices: Ledger, *, wall: Callable[[float], float]) -> None:
        self._devices = devices
        self.wall = wall
        self.events: deque[FleetEvent] = deque(maxlen=_EVENTS)
        self.seconds = RingBuffer(len(COLUMNS), 1, _SECONDS)
        self.minutes = RingBuffer(len(COLUMNS), 60, _MINUTES)
        self.version = 0
        """Another number when there is a new event or a new row."""
        self.jobs: Callable[[], int] = lambda: 0
        """Unfinished jobs."""
        self._news = asyncio.Event()
        self._changed: set[str] = set()
        self._known: dict[str, tuple[str, Health, str]] = {}
        """Incarnation, health and site of each node, as they were noted."""
        self._last_id = self._told = 0
        self._told_at = -math.inf
        self._to_tasks: Counter[_What] = Counter()
        self._why: dict[_What, str] = {}
        self._escalated: set[str] = set()
        self._owners: dict[str, tuple[str | None, str | None]] = {}
        """Owner and site of jobs that have not ended, or not before this second."""
        self._ended: list[str] = []
        self._second: int | None = None
        self._now = Counter[str]()
        self._first, self._final = Latencies(), Latencies()
        self._minute: tuple[int, list[list[float]], Latencies, Latencies] | None = None
        self._work: Counter[str] = Counter()
        self._traffic: Counter[tuple[str, str]] = Counter()
        self._lately: deque[tuple[Counter[str], Counter[tuple[str, str]]]] = deque(maxlen=_SMOOTH_S)

    # --- told by the dispatcher -------------------------------------------------------------------------------------

    def node_changed(self, change: Change) -> None:
        """Something has become of a node."""
        self._changed.add(change.node_id)

    def worked(self, node_id: str, images: int) -> None:
        """A node has computed answers to this number of images."""
        self._work[node_id] += images

    def passed(self, end: str, upper: str, images: int) -> None:
        """Count images that went from an end device to an upstream node and were answered there."""
        self._work[upper] += images
        self._traffic[end, upper] += images
        self._now["sent_up"] += images

    def answered(self, answer: Answer) -> None:
        """An answer has come."""
        if answer.stage == "coarse":
            self._now["first"] += answer.images
            self._first.add(answer.ms, answer.images)
            return
        self._now["finer" if answer.kind == "fine" else answer.kind] += answer.images
        if answer.kind != "failed":
            self._final.add(answer.ms, answer.images)

    def attempted(self, outcome: str, node_id: str, job_id: str, reason: str) -> None:
        """An attempt has ended."""
        if (kind := _OF_ATTEMPTS.get(outcome)) is None:
            return
        self._now["failed_attempts"] += 1
        what: _What = (kind, node_id, job_id)
        if what not in self._to_tasks and len(self._to_tasks) >= _KINDS_A_SECOND:
            what = (kind, None, None)
        self._to_tasks[what] += 1
        self._why.setdefault(what, reason)

    def escalates(self, job_id: str, now: float) -> None:
        """Images of a job go up one by one; noted once."""
        if job_id not in self._escalated:
            self._escalated.add(job_id)
            self._note("escalated", now, job=job_id, text="the images that the first answer is unsure of go up")

    def began(self, job_id: str, text: str, now: float, owner: str | None = None, site: str | None = None) -> None:
        """A job has been taken."""
        self._owners[job_id] = owner, site
        self._note("began", now, job=job_id, text=text)

    def ended(self, job_id: str, text: str, now: float) -> None:
        """A job is over."""
        self._escalated.discard(job_id)
        self._ended.append(job_id)
        self._note("ended", now, job=job_id, text=text)

    # --- for those who look -----------------------------------------------------------------------------------------

    def after(self, event_id: int) -> list[FleetEvent]:
        """The events after one, oldest first."""
        newer = sum(1 for _ in islice((event for event in reversed(self.events) if event.id > event_id), _EVENTS))
        return list(islice(self.events, len(self.events) - newer, None)) if newer else []

    @property
    def last_id(self) -> int:
        """Id of the newest event."""
        return self._last_id

    def images_per_s(self, node_id: str) -> float:
        """Return the images per second that a node answered in the last seconds."""
        return sum(work[node_id] for work, _ in self._lately) / max(1, len(self._lately))

    def traffic(self) -> dict[tuple[str, str], float]:
        """Images per second from end devices to upstream nodes, in the last seconds."""
        total: Counter[tuple[str, str]] = Counter()
        for _, traffic in self._lately:
            total.update(traffic)
        return {link: round(images / len(self._lately), 1) for link, images in total.items()}

    async def changed(self, version: int) -> None:
        """Wait for something newer than a version."""
        if self.version == version:
            await self._news.wait()

    def tell(self) -> None:
        """Wake all that wait for something new."""
        self.version += 1
        self._told = self._last_id
        self._news.set()
        self._news = asyncio.Event()

    # --- the loop's -------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Note what has changed, and close the second if it is over. Called several times a second."""
        for node_id in sorted(self._changed):
            self._look_at(node_id, now)
        self._changed.clear()
        second = int(self.wall(now))
        if self._second is None:
            self._second = second
        elif second != self._second:
            self._close(now)
            self._second = second
            self._told_at = now
            self.tell()
        elif self._last_id != self._told and now - self._told_at >= _AGAIN_S:
            self._told_at = now
            self.tell()

    def _look_at(self, node_id: str, now: float) -> None:
        device = self._devices.find(node_id)
        known = self._known.get(node_id)
        if device is None:
            if known is not None:
                self._note("removed", now, node=node_id, text="off the device list")
                del self._known[node_id]
            return
        view = self._devices.view_of(node_id, device.incarnation, now)
        health = device.told[0] if view is None else view.health
        self._known[node_id] = device.incarnation, health, device.site
        if known is None or known[0] != device.incarnation:
            self._note("joined", now, node=node_id, text=_arrival(device, again=known is not None))
            known = device.incarnation, Health.ALIVE, device.site
        if known[1] is not health:
            back = "resumed" if known[1] is Health.DRAINING else "recovered"
            reason = "" if view is None else view.reason
            self._note(_OF_HEALTH.get(health, back), now, node=node_id, text=reason)

    def _note(
        self, kind: str, now: float, *, node: str | None = None, job: str | None = None, count: int = 1, text: str = ""
    ) -> None:
        at = self.wall(now)
        self._last_id = max(self._last_id + 1, int(at * 1000))
        owner, site = (None, None) if job is None else self._owners.get(job, (None, None))
        if node in self._known:
            site = self._known[node][2] or None
        event = FleetEvent(
            id=self._last_id,
            at=round(at, 3),
            kind=kind,
            node=node,
            job=job,
            owner=owner,
            site=site,
            count=count,
            text=text[:_MOST_SAID],
        )
        self.events.append(event)

    def _close(self, now: float) -> None:
        assert self._second is not None
        for (kind, node, job), count in self._to_tasks.items():
            self._note(kind, now, node=node, job=job, count=count, text=self._why[kind, node, job])
        self._to_tasks.clear()
        self._why.clear()
        for job_id in self._ended:
            self._owners.pop(job_id, None)
        self._ended.clear()
        healths: Counter[Health] = Counter()
        for (_, health), number in self._devices.healths().items():
            healths[health] += number
        states = [healths[health] for health in (Health.ALIVE, Health.SUSPECT, Health.DEAD, Health.DRAINING)]
        rates = [self._now[name] for name in COLUMNS[:_RATES]]
        row = [*rates, *_percentiles(self._first, self._final), *states, self.jobs()]
        self.seconds.put(self._second, list(map(float, row)))
        self._add_to_minute(list(map(float, row)))
        self._lately.append((self._work, self._traffic))
        self._now, self._work, self._traffic = Counter(), Counter(), Counter()
        self._first, self._final = Latencies(), Latencies()

    def _add_to_minute(self, row: list[float]) -> None:
        assert self._second is not None
        number = self._second // 60
        if self._minute is None or self._minute[0] != number:
            self._minute = number, [], Latencies(), Latencies()
        _, rows, first, final = self._minute
        rows.append(row)
        first.join(self._first)
        final.join(self._final)
        rates = [math.fsum(each[column] for each in rows) / len(rows) for column in range(_RATES)]
        self.minutes.put(self._second, [*rates, *_percentiles(first, final), *row[_RATES + 4 :]])


def _percentiles(first: Latencies, final: Latencies) -> Sequence[float]:
    return [kind.percentile(percent) for kind in (first, final) for percent in (50, 99)]


def _arrival(device: Device, *, again: bool) -> str:
    models = ", ".join(offer.name for offer in device.registration.models[:3])
    return f"{device.tier} node at {device.registration.url} with {models}{' (started again)' if again else ''}"
