"""The choice of the next task and its end device; docs/explanation/scheduling.md states the rules.

Jobs share the fleet by start-time fair queueing (Goyal, Vin and Cheng, 1996), see `tags`; interactive requests go
first. In the schemes of the paper tasks go to the end devices in sequential order. A device at its concurrency limit is
skipped, or waited for with the setting `order = sequential`. For the scheme `adaptive`, the planner chooses among the
next few devices that have room. The best of a few is nearly as good as the best of all (Mitzenmacher: The power of two
choices in randomized load balancing, 2001).

A task that has failed on a device waits for another device, even a busy one, while one is alive. A device that fails at
once is always free, and would otherwise get all attempts of a task. See `grade`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from scheduler.core.assignments import RoundRobin
from scheduler.core.device import Device, Node, SortKey
from scheduler.core.fleet import Ledger
from scheduler.core.limits import task_deadline
from scheduler.core.work import Attempt, OpenJob, OpenTask
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask, Hold, Outlook, Send
from scheduler.placement.routes import IN_FORCE, Placement
from tierkit.types import Recovery, Scheme, Share, Tier

__all__ = ["Choice", "Chooser", "grade", "tags", "turn"]

_PART = 8
"""End devices with room, and upstream nodes of each tier, that the scheme `adaptive` looks at for one task."""
_SITES, _MOST_SITES = 3, 64
"""Sites with room among which the scheme `adaptive` chooses for one task, and sites that it asks for room."""
_MOST_LAST = 10_000
"""Sites of which it is known where their round of end devices has come to."""
_OUTLOOK_S, _OUTLOOK = 0.1, 0.05
"""Validity of a forecast for a large fleet: a minimum in seconds, and a fraction of the remaining time."""


class Choice(Struct, frozen=True, kw_only=True):
    """Send this task to this end device."""

    job: OpenJob
    task: OpenTask
    device: Device
    reason: str
    upper: tuple[Node, ...] | None = None
    """The upstream nodes to ask, in this order; None: the nodes of the device's route."""
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline."""


def turn(virtual: float, finish_tag: float, *, interactive: bool) -> tuple[bool, float]:
    """Key of a job: the smallest goes next. Arguments as for `tags`."""
    return not interactive, max(virtual, finish_tag)


def tags(virtual: float, finish_tag: float, images: int, weight: float) -> tuple[float, float]:
    """Start and finish tag of a job's next task.

    Args:
        virtual: virtual time: the start tag of the task sent last, of any job.
        finish_tag: of the job's task before; 0 for none.
    """
    start = max(virtual, finish_tag)
    return start, start + images / weight


def grade(*, tried: bool, on_trial: bool, cut_off: bool = False) -> int:
    """The grade of a device for a task that has failed or just lacks its fine answer; it goes to the lowest grade.

    Args:
        tried: an attempt of it has failed on the device.
        on_trial: the device's last answer was wrong.
        cut_off: the fine answer is all that it lacks, and the device may ask no upstream node for it.
    """
    return 3 if cut_off else 2 if tried else 1 if on_trial else 0


@dataclass(frozen=True, slots=True)
class _Look:
    """Search for the device of one task: in one site, or in a fleet of one site."""

    site: str | None
    job: OpenJob
    task: OpenTask
    fits: Callable[[str], bool] | None
    """A test for the end devices that suit the task best; None if all do."""
    now: float


@dataclass(slots=True)
class _Standing:
    """A job as the chooser knows it."""

    finish_tag: float = 0.0
    """Finish tag of the task sent last. See `tags`."""
    regardless: frozenset[str] = frozenset()
    """End devices at the start of the job, used by recovery `reassign`."""
    held_back: str = ""
    """Reason why the scheme `adaptive` sends nothing of it at the moment."""
    held: dict[str | None, tuple[float, int]] = field(default_factory=dict)
    """Sites that have nothing to do for it: until when, unless the work of their devices has become another one."""
    outlooks: dict[str | None, tuple[Outlook, float]] = field(default_factory=dict)
    """By site: the forecast, and the time until which it is valid."""


class Chooser:
    """Chooses the next task to send and its device.

    Args:
        ledger: the nodes, and the attempts under way.
        placement: routes over it.
        pilot: of the scheme `adaptive`.
        sequential: in the schemes of the paper, wait for the next device in order instead of passing over it when its
            window is full.
    """

    def __init__(self, *, ledger: Ledger, placement: Placement, pilot: Pilot, sequential: bool = False) -> None:
        self._ledger = ledger
        self._sequential = sequential
        self._placement = placement
        self._pilot = pilot
        self.look_at = math.inf
        """Time at which a task that was held back may go."""
        self._virtual = 0.0
        """Virtual time of the fair queue, see `tags`."""
        self._last: dict[str | None, SortKey] = {}
        """The device that got the last task of those that name a site, and of the others."""
        self._last_part: dict[str | None, SortKey] = {}
        self._part = self._site = 0
        self._standings: defaultdict[str, _Standing] = defaultdict(_Standing)
        """Standings by job."""

    def forget_job(self, job_id: str) -> None:
        """A job is over."""
        self._standings.pop(job_id, None)

    def held_back(self, job_id: str) -> str:
        """Return why the scheme `adaptive` sends nothing of a job at the moment; "" if it does."""
        return self._standings[job_id].held_back if job_id in self._standings else ""

    def next(self, jobs: Iterable[OpenJob], now: float) -> Choice | None:
        """The next task to send, or None when nothing can go now. A job that cannot go does not hold up another."""
        alive = self._ledger.alive(Tier.END, now)
        if not self._ledger.assigned.with_room() and alive:
            jobs = (job for job in jobs if not job.facts.keeps_window)
        ready = (job for job in jobs if job.ready)
        for job in sorted(ready, key=self._turn):
            for task in job.next_tasks():
                adaptive = job.facts.policy.scheme is Scheme.ADAPTIVE
                choice = self._plan(job, task, now) if adaptive else self._in_order(job, task, now)
                if choice is not None:
                    return choice
        return None

    def for_hedge(self, attempt: Attempt, now: float) -> Device | None:
        """An idle end device that may get the second attempt of a straggler's task: one of the same site."""
        not_there = {*attempt.facts.nodes, *attempt.task.blame.tried}
        straggler = self._ledger.find(attempt.facts.node_id)
        if straggler is None:
            return None
        for device in self._ledger.alive(Tier.END, now, straggler.site):
            idle = not (device.wrong.count or self._ledger.assigned.outstanding(device.node_id))
            if idle and device.node_id not in not_there and self._holders([device], attempt.job.facts.rules.release):
                return device
        return None

    def sent(self, choice: Choice) -> None:
        """The choice was acted on."""
        facts = choice.job.facts
        site = facts.policy.site
        self._last[site] = choice.device.order
        while len(self._last) > _MOST_LAST:
            del self._last[next(iter(self._last))]
        standing = self._standings[facts.job_id]
        standing.held_back = ""
        if not facts.interactive:
            images, weight = choice.task.facts.images, facts.policy.weight
            self._virtual, standing.finish_tag = tags(self._virtual, standing.finish_tag, images, weight)

    def _turn(self, job: OpenJob) -> tuple[bool, float]:
        finish_tag = self._standings[job.facts.job_id].finish_tag
        return turn(self._virtual, finish_tag, interactive=job.facts.interactive)

    def _pool(self, job: OpenJob, now: float) -> tuple[Sequence[Device], bool]:
        """The end devices that a job's tasks may go to, and whether they are those that are alive. They hold the
        networks of its release."""
        site, release = job.facts.policy.site, job.facts.rules.release
        alive: Sequence[Device] = self._ledger.alive(Tier.END, now, site)
        if not self._all_hold(release, now):
            alive = self._holders(alive, release)
        if job.facts.policy.recovery is Recovery.REASSIGN:
            standing = self._standings[job.facts.job_id]
            if not standing.regardless:
                standing.regardless = frozenset(device.node_id for device in alive)
            known = map(self._ledger.find, standing.regardless)
            there = (device for device in known if device is not None and device.takes_tasks)
            return self._holders([device for device in there if site in (None, device.site)], release), False
        return (
            (alive, True) if alive else (self._holders(self._ledger.last_resort(Tier.END, now, site), release), False)
        )

    def _holders(self, devices: Sequence[Device], release: int) -> Sequence[Device]:
        return devices if release == IN_FORCE else self._placement.holders(devices, release)

    def _all_hold(self, release: int, now: float) -> bool:
        """True if all end devices may get tasks of a release."""
        return release == IN_FORCE or self._placement.all_hold(release, now)

    def _fits(
        self, job: OpenJob, task: OpenTask, pool: Sequence[Device], now: float, *, choosy: bool = False
    ) -> Callable[[str], bool] | None:
        """A test for the devices of the pool that suit the task best; None if all do.

        Args:
            choosy: also of a task that is new, those that may ask an upstream node suit best.
        """
        # Going round over all devices is what `reassign` does, even if tasks have failed there.
        around = job.facts.policy.recovery is Recovery.REASSIGN
        # Rings hold devices of all releases.
        holders = None
        if not self._all_hold(job.facts.rules.release, now):
            holders = frozenset(device.node_id for device in pool)
        if not choosy and (around or not (task.blame.tried or task.coarse)):
            return None if holders is None else holders.__contains__

        def graded(device: Device) -> int:
            tried = not around and device.node_id in task.blame.tried
            on_trial = not around and device.wrong.count > 0
            limited = device.site or device.registration.allowed_upstreams
            cut_off = bool((task.coarse or choosy) and limited) and self._placement.is_cut_off(
                job.facts.policy.scheme, device, now, job.facts.rules
            )
            return grade(tried=tried, on_trial=on_trial, cut_off=cut_off)

        # A clean record is common, so the first few devices tell.
        best = 0 if any(graded(device) == 0 for device in pool) else min(map(graded, pool), default=0)
        return lambda node_id: (holders is None or node_id in holders) and graded(self._ledger.get(node_id)) <= best

    def _in_order(self, job: OpenJob, task: OpenTask, now: float) -> Choice | None:
        pool, alive = self._pool(job, now)
        site, scheme = job.facts.policy.site, job.facts.policy.scheme
        # A job of all sites leaves out those that could give coarse answers alone.
        several = site is None and len(self._ledger.sites) > 1 and scheme is not Scheme.END
        choosy = several and self._placement.has_upstream(scheme, now, job.facts.rules)
        fits = self._fits(job, task, pool, now, choosy=choosy)
        last, assigned = self._last.get(site), self._ledger.assigned
        if self._sequential and alive:
            found = assigned.in_turn(site).after(last, 1, fits)
            if not found or assigned.load(found[0]) >= assigned.window + job.facts.interactive:
                return None
            return Choice(job=job, task=task, device=self._ledger.get(found[0]), reason="next in order")
        found = assigned.with_room(site).after(last, 1, fits) if alive else []
        if not found and (job.facts.interactive or not alive):
            limit = assigned.window + job.facts.interactive
            free = RoundRobin(device for device in pool if assigned.load(device.node_id) < limit)
            found = free.after(last, 1, fits)
        if not found:
            return None
        return Choice(job=job, task=task, device=self._ledger.get(found[0]), reason="next in order with room")

    def _plan(self, job: OpenJob, task: OpenTask, now: float) -> Choice | None:
        """The choice of the scheme `adaptive`: the quickest of a few sites that have room."""
        sends: list[Send] = []
        standing = self._standings[job.facts.job_id]
        for site, part in self._sites_of(job, now):
            found = self._plan_in(site, part, job, task, now)
            if isinstance(found, Send):
                sends.append(found)
                if len(sends) == _SITES:
                    break
                continue
            until = now + _OUTLOOK_S
            if found is not None:
                standing.held_back, until = found.reason, min(until, found.until)
                self.look_at = min(self.look_at, until)
            if site is not None:
                standing.held[site] = until, self._ledger.assigned.not_full(site).stirred
        if not sends:
            return None
        best = min(sends, key=lambda send: send.finish)
        device = self._ledger.get(best.end)
        return Choice(job=job, task=task, device=device, reason=best.reason, upper=best.upper, too_late=best.too_late)

    def _sites_of(self, job: OpenJob, now: float) -> Iterator[tuple[str | None, float]]:
        """The sites whose devices a task may go to, others first each time, with their parts of the job; None for a
        fleet of one site."""
        named, sites = job.facts.policy.site, self._ledger.sites
        if len(sites) < 2:
            yield named, 1.0
            return
        if named is not None:
            if not self._is_held(job, named, now):
                yield named, 1.0
            return
        ends, looked_at = len(self._ledger.alive(Tier.END, now)), 0
        scheme, rules = job.facts.policy.scheme, job.facts.rules
        some_ask = self._placement.has_upstream(scheme, now, rules)
        for _ in range(len(sites)):
            self._site = (self._site + 1) % len(sites)
            site = sites[self._site]
            if self._is_held(job, site, now) or (
                some_ask and not self._placement.has_upstream(scheme, now, rules, site)
            ):
                continue
            if there := len(self._ledger.alive(Tier.END, now, site)):
                yield site, there / ends
                looked_at += 1
                if looked_at == _MOST_SITES:
                    return
        if not ends:
            yield None, 1.0

    def _is_held(self, job: OpenJob, site: str, now: float) -> bool:
        """True if a site had nothing to do for a job a moment ago, and nothing has happened there since."""
        until, stirred = self._standings[job.facts.job_id].held.get(site, (0.0, -1))
        return now < until and stirred == self._ledger.assigned.not_full(site).stirred

    def _plan_in(self, site: str | None, part: float, job: OpenJob, task: OpenTask, now: float) -> Send | Hold | None:
        """The plan for a task in a site, or in a fleet of one site.

        Args:
            part: of the job's tasks that the site is to do.
        """
        pool, alive = self._pool(job, now)
        look = _Look(site, job, task, self._fits(job, task, pool, now), now)
        uppers = self._uppers(look)
        untried = [node for node in uppers if node.node_id not in task.blame.tried] or uppers
        ends = self._some_ends(self._ledger.assigned.not_full(site), look) if alive else []
        if not ends and (job.facts.interactive or not alive):
            ring = RoundRobin(device for device in pool if site in (None, device.site))
            ends = self._some_ends(ring, look)
        ask = Ask(
            remaining=math.ceil(part * len(job.ready)),
            interactive=job.facts.interactive,
            deadline=task_deadline(job.facts, task.started, now),
            job_deadline=job.facts.deadline,
        )
        return self._pilot.plan(
            ask,
            task.facts.images,
            ends,
            self._some_upstreams([node for node in untried if any(end.may_ask(node) for end in ends)]),
            now,
            fine_only=task.coarse is not None,
            known=self._outlook(look, ask.remaining, untried),
        )

    def _uppers(self, look: _Look) -> list[Node]:
        """The upstream nodes of a site, edge first; with edge nodes of other sites if its own are dead or full."""
        site, now, rules = look.site, look.now, look.job.facts.rules
        uppers = self._placement.uppers(now, rules, site)
        if not site or self._placement.share(site) is not Share.SITES:
            return uppers
        own = [node for node in uppers if node.tier is Tier.EDGE]
        if self._pilot.with_time(own, look.task.facts.images, now):
            return uppers
        return [*own, *self._placement.foreign_edges(site, now, rules), *uppers[len(own) :]]

    def _some_ends(self, ring: RoundRobin, look: _Look) -> list[Node]:
        """The next few end devices of a ring that have room."""
        site, task = look.site, look.task
        limit = self._ledger.assigned.window + look.job.facts.interactive
        while some := ring.after(self._last_part.get(site), _PART, look.fits):
            self._last_part[site] = self._ledger.get(some[-1]).order
            while len(self._last_part) > _MOST_LAST:
                del self._last_part[next(iter(self._last_part))]
            nodes = [
                self._placement.node(self._ledger.get(node_id), look.job.facts.rules.release)
                for node_id in some
                if self._ledger.assigned.owed(node_id) < limit
            ]
            ends = self._pilot.with_room(nodes, task.facts.images, look.now, fine_only=task.coarse is not None)
            for node_id in set(some) - {end.node_id for end in ends}:
                ring.set(node_id, (), member=False)
                self._ledger.assigned.fill(node_id)
            if ends:
                return ends
        return []

    def _some_upstreams(self, uppers: Sequence[Node]) -> list[Node]:
        """A few upstream nodes of each tier, other ones each time."""
        self._part += 1
        cut = bisect_left(uppers, True, key=lambda node: node.tier is Tier.CLOUD)
        chosen: list[Node] = []
        for nodes in (uppers[:cut], uppers[cut:]):
            first = self._part * _PART % max(1, len(nodes))
            chosen += [*nodes[first:], *nodes[:first]][:_PART]
        return chosen

    def _outlook(self, look: _Look, remaining: int, uppers: Sequence[Node]) -> Outlook | None:
        """The forecast for all nodes of a site that a task may go to; None without end devices or upstream nodes."""
        site, fits, now = look.site, look.fits, look.now
        standing = self._standings[look.job.facts.job_id]
        known, until = standing.outlooks.get(site, (None, 0.0))
        if known is not None and now < until and fits is None:
            return known
        there = self._placement.alive_ends(now, site, look.job.facts.rules.release)
        ends = [node for node in there if fits is None or fits(node.node_id)]
        if not (ends and uppers):
            return None
        in_parts = len(ends) > _PART or len(uppers) > _PART
        known = self._pilot.outlook(remaining, look.task.facts.images, ends, uppers, now, in_parts=in_parts)
        if in_parts and fits is None:
            standing.outlooks[site] = known, now + max(_OUTLOOK_S, _OUTLOOK * (known.last - now))
        return known
