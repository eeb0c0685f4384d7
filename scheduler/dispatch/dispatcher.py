"""The loops that send tasks out and take answers in.

`run` is one loop that asks `dispatch.choose` for the next task whenever something has changed; each attempt is an
asyncio task beside it. Execution is at least once: an attempt that fails, or whose device leaves the list, is made
again elsewhere. Answers are exactly once: a stage that has its answer takes no second one, here and in the database.

How a task ends:

    fine answer                      -> closed
    scheme `end`: coarse answer      -> closed
    no fine answer, but a coarse one -> the fine stage alone is tried again; when no upper node is left the coarse
                                        answer stands as fallback, or (on_upstream_loss=wait) the task waits for one
    its deadline                     -> fallback if the coarse answer is there, else failed
    attempts used up                 -> likewise
    every node that takes it dies    -> quarantined: failed, or fallback if the coarse answer is there
    recovery=none, an attempt fails  -> the whole job ends as failed
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from scheduler.devices.list import Device, DeviceList
from scheduler.dispatch.attempt import Wire
from scheduler.dispatch.attempts import Attempts
from scheduler.dispatch.choice import (
    Choice,
    FreePlaces,
    Order,
    Place,
    Turn,
    Want,
    choose,
    eligible,
    in_order,
    tags,
    turn,
)
from scheduler.dispatch.retry import RetryBudget
from scheduler.dispatch.work import ActiveJob, ActiveTask, AttemptReport
from scheduler.measures import counted_nodes
from scheduler.placement.adaptive.pilot import EndPlace, Pilot
from scheduler.placement.adaptive.planner import Ask, Hold, Outlook
from scheduler.placement.escalation import upstreams_of
from scheduler.placement.mapping import Node
from scheduler.placement.routes import Fleet
from scheduler.settings import SchedulerSettings
from tierkit.types import Recovery, Scheme, Tier
from tierkit.wire.messages import Upstream

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_MOVE_S = 0.25
"""How often it is asked whether a task waits for the wrong upper node."""
_MOVE_TASKS = 200
"""With more tasks under way than this it is asked as much more rarely."""
_MANY = 32
"""A fleet of more end devices, or more upper nodes of a tier, is looked at in parts by the scheme `adaptive`."""
_PART = 6
"""So many end devices that have room, and upper nodes of each tier, are looked at for one task."""
_OUTLOOK_S, _OUTLOOK = 0.1, 0.05
"""How long what a large fleet can do counts: at least so many seconds, and such a share of the time left."""
_FORGET_S, _MOST_GONE = 3600.0, 1000
"""So often it is forgotten what is known of nodes that have left the device list; sooner where they are more."""
_IDLE_S = 1.0
"""The loop looks around at least this often, should a change have announced itself to nobody."""


class Dispatcher:
    """Owns all jobs that are under way.

    Args:
        settings: window, deadlines, attempts.
        devices: the device list; the dispatcher listens to its changes.
        fleet: routes over it.
        pilot: of the scheme `adaptive`.
        wire: to the end devices.
        classes: how many coarse and fine classes there are.
        congested: whether so many answers wait to be written that no new tasks should be sent.
        clock: `time.monotonic`, which both kinds of event loop count by as well (uvloop in whole milliseconds).
        chance: of the jitter in waits.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        devices: DeviceList,
        fleet: Fleet,
        pilot: Pilot,
        wire: Wire,
        classes: tuple[int, int],
        congested: Callable[[], bool],
        clock: Callable[[], float],
        chance: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._fleet = fleet
        self.pilot = pilot
        self._congested = congested
        self._clock = clock
        self._attempts = Attempts(
            settings=settings,
            devices=devices,
            fleet=fleet,
            wire=wire,
            classes=classes,
            clock=clock,
            chance=chance or random.Random(),
            pilot=pilot,
            wake=self.wake,
            freed=self._on_freed,
            counted=self._stir,
            fail_job=lambda job, reason: self._end(job, "failed", reason),
        )
        self._jobs: dict[str, ActiveJob] = {}
        self._last_used: str | None = None
        self._last_order: Order | None = None
        self._free = FreePlaces()
        self._stirred: set[str] = set()
        """End devices that may have come to have room, or no room."""
        self._open = FreePlaces()
        """Those that may have room for a task of the scheme `adaptive`, in a large fleet."""
        self._stirred_open: set[str] = set()
        self._closed: set[str] = set()
        """Those that had none when they were looked at."""
        self._outlooks: dict[str, tuple[float, Outlook]] = {}
        """By job: until when it counts, and what it is."""
        self._search_at = 0.0
        """When the whole of a large fleet may be searched for a device that a task may go to after it has failed."""
        self._part = 0
        self._part_order: Order | None = None
        """Of the upper nodes and the end devices, which part was looked at last."""
        self._virtual = 0.0
        """Virtual time of the fair queue, see `dispatch.tags`."""
        self._move_at = 0.0
        self._forget_at = clock() + _FORGET_S
        self._look_at = 0.0
        """When to look at all jobs at the latest: time alone changes something then."""
        self._news = True
        """Whether to look at all jobs, and not just for room for what is ready."""
        self._gathering_until = 0.0
        self._wake = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._group: asyncio.TaskGroup | None = None
        devices.listen(self._on_device_change)
        devices.follow(self._on_listed)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run, interactive requests included."""
        return len(self._jobs)

    def job(self, job_id: str) -> ActiveJob | None:
        """A job that is not final."""
        return self._jobs.get(job_id)

    def outstanding(self, node_id: str) -> int:
        """Tasks that an end device has now."""
        return self._attempts.outstanding(node_id)

    def attempts(self, job_id: str) -> list[AttemptReport]:
        """The attempts of a job that are under way."""
        return self._attempts.of(job_id)

    def add(self, job: ActiveJob) -> None:
        """Take a job; its end is told to its sink. A job without open tasks ends at once."""
        job.retries = RetryBudget(self._settings.retries_per_s, self._settings.retry_burst)
        self._jobs[job.job_id] = job
        self.wake()

    def cancel(self, job_id: str, reason: str) -> bool:
        """End a job as cancelled; False when it is not under way or already ending."""
        job = self._jobs.get(job_id)
        if job is None or job.ending:
            return False
        self._end(job, "cancelled", reason)
        return True

    def wake(self) -> None:
        """Look around now: something has changed that the dispatcher does not see by itself."""
        self._news = True
        self._wake.set()

    async def run(self) -> None:
        """Dispatch until cancelled. An error in here is a bug, and ends the service loudly."""
        # After a restart the nodes register again one by one. A task sent before the first upper node is back would
        # end as a fallback for no good reason.
        self._gathering_until = self._clock() + self._settings.lease_s
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    self._wake.clear()
                    self._step()
                    if not self._wake.is_set():
                        self._set_alarm()
                        await self._wake.wait()
            finally:
                if self._alarm is not None:
                    self._alarm.cancel()

    def _set_alarm(self) -> None:
        """Be woken when it is time to look at all jobs; one that is set for an earlier time stands."""
        if self._alarm is not None:
            if self._alarm_at <= self._look_at:
                return
            self._alarm.cancel()
        self._alarm_at = self._look_at
        in_s = max(0.0, self._look_at - self._clock())
        self._alarm = asyncio.get_running_loop().call_later(in_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake()

    # --- deciding -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Do all that can be done now. Most of what happens is an answer that frees a place; with many jobs under way
        only news of another kind is worth a look at each of them."""
        now = self._clock()
        looks = self._news or now >= self._look_at
        if looks:
            self._news = False
            self._look_at = now + _IDLE_S
            for job in list(self._jobs.values()):
                if not job.ending and (job.delayed or job.held or not job.open or now >= job.deadline):
                    self._advance(job, now)
        while not self._congested() and self._send_next(now):
            pass
        if now >= self._move_at:
            # After a pause of this process answers wait to be read: their nodes only look overdue.
            stood_still = now > self._move_at + _MOVE_S
            self._move_at = now + _MOVE_S * max(1.0, self._attempts.under_way / _MOVE_TASKS)
            if not stood_still:
                self._move(now)
            self._stirred_open |= self._closed  # time alone may have given them room
            self._closed.clear()
        if self._settings.hedge:
            self._look_at = min(self._look_at, now + self._hedge(now))
        if now >= self._forget_at or counted_nodes() > len(self._devices) + _MOST_GONE:
            self._forget_gone(now)
        if looks:
            self._look_ahead(now)

    def _forget_gone(self, now: float) -> None:
        self._forget_at = now + _FORGET_S
        present = {device.node_id for tier in Tier for device in self._devices.of(tier)}
        self._attempts.forget_all_but(present)
        self.pilot.forget_all_but(present)
        for node_id in (self._stirred_open | self._closed) - present:
            self._open.set(node_id, (), free=False)
        self._stirred_open &= present
        self._closed &= present

    def _look_ahead(self, now: float) -> None:
        """Note when to look at all jobs again, and why those wait that do."""
        look_at = self._look_at
        if now < self._gathering_until:
            look_at = min(look_at, self._gathering_until)
        for job in self._jobs.values():
            if job.ending:
                continue
            if job.policy.scheme is Scheme.ADAPTIVE:
                look_at = min(look_at, self._move_at)
            if job.deadline < look_at:
                look_at = job.deadline
            if job.delayed and now < job.delayed[0].not_before < look_at:
                look_at = job.delayed[0].not_before
            if job.waits:
                self._explain_waiting(job, now)
        self._look_at = look_at

    def _advance(self, job: ActiveJob, now: float) -> None:
        if not job.open:
            self._end(job, None, "")
        elif now >= job.deadline:
            for task in list(job.open.values()):
                job.give_up(task, "deadline", f"the job's {job.policy.deadline_s:g} s are over", now)
            self._end(job, None, f"its deadline of {job.policy.deadline_s:g} s is over")
        else:
            job.wake_delayed(now, has_upstream=self._fleet.has_upstream(job.policy.scheme, now, job.ways))

    def _send_next(self, now: float) -> bool:
        turns = sorted(self._may_send(now), key=self._turn)
        choice = choose(
            (self._want(job, task, now) for job in turns for task in job.next_tasks()),
            in_order=lambda want: self._in_order(want, now),
            plan=lambda want: self._plan(want, now),
        )
        if choice is None:
            return False
        job = self._jobs[choice.job_id]
        task = job.open[choice.task]
        if not job.interactive:
            self._virtual, job.finish_tag = tags(self._virtual, job.finish_tag, task.images, job.policy.weight)
        if _log.isEnabledFor(logging.DEBUG):
            what = {"task": job.task_id(task), "request_id": job.request_id(task)}
            _log.debug("next task", extra={**what, "node": choice.node_id, "why": choice.reason})
        self._send(job, task, choice, now)
        return True

    def _may_send(self, now: float) -> list[ActiveJob]:
        """The jobs of which a task may go now. Where no end device has room in its window, most of them need not be
        looked at."""
        self._note_rooms()
        jobs: Iterable[ActiveJob] = self._jobs.values()
        if not self._free and self._devices.alive(Tier.END, now):
            jobs = (job for job in jobs if not job.keeps_window)
        return [job for job in jobs if job.ready and not self._gathers_for(job, now)]

    def _turn(self, job: ActiveJob) -> Turn:
        return turn(self._virtual, job.finish_tag, interactive=job.interactive)

    def _want(self, job: ActiveJob, task: ActiveTask, now: float) -> Want:
        return Want(
            job_id=job.job_id,
            task=task.index,
            interactive=job.interactive,
            # Going round over all devices is what `reassign` does, whatever it has met there.
            tried=frozenset() if job.policy.recovery is Recovery.REASSIGN else frozenset(task.tried),
            fine_only=task.has_coarse,
            regardless=self._regardless(job, now),
            adaptive=job.policy.scheme is Scheme.ADAPTIVE,
        )

    def _in_order(self, want: Want, now: float) -> Choice | None:
        """Where the schemes of the paper send the next task of a job."""
        alive = self._devices.alive(Tier.END, now)
        fits = None if _anywhere(want) else partial(self._has_clean_record, want)
        few = want.interactive or want.regardless is not None or not alive
        # Where nobody has a clean record, another one has to do.
        if few or not (fits is None or any(fits(device.node_id) for device in alive)):
            return in_order(want, self._places(now), window=self._settings.window, last_used=self._last_used)
        return self._free.choice(want, self._last_order, self._passed_over, fits)

    def _stir(self, node_id: str) -> None:
        self._stirred.add(node_id)
        self._stirred_open.add(node_id)

    def _note_rooms(self) -> None:
        if self._stirred:
            # Not one by one out of the same set: after the thousands of a fleet's beginning it stays as wide as they.
            stirred, self._stirred = self._stirred, set()
            for node_id in stirred:
                self._note_room(node_id)

    def _note_room(self, node_id: str) -> None:
        device = self._devices.find(node_id)
        if device is not None and device.tier is Tier.END:
            held = self.outstanding(node_id) - self._attempts.planned(node_id)
            room = max(held, self._attempts.owed(node_id)) < self._settings.window
            self._free.set(node_id, device.order, free=room and device.listed)
        else:
            self._free.set(node_id, (), free=False)

    def _passed_over(self, node_id: str) -> int:
        """How many end devices that are alive stand between the last one and this one."""
        here = self._devices.place(Tier.END, self._devices.get(node_id).order)
        after = 0
        if self._last_used is not None and self._last_order is not None:
            last = self._devices.find(self._last_used)
            after = self._devices.place(Tier.END, self._last_order) + (last is not None and last.listed)
        return here - after if here >= after else here - after + len(self._devices.alive(Tier.END, self._clock()))

    def _places(self, now: float) -> list[Place]:
        able = self._devices.alive(Tier.END, now) or self._devices.last_resort(Tier.END, now)
        alive = {device.node_id for device in able}
        return [
            Place(
                node_id=device.node_id,
                outstanding=self.outstanding(device.node_id) - self._attempts.planned(device.node_id),
                owed=self._attempts.owed(device.node_id),
                alive=device.node_id in alive,
                on_trial=device.wrong.count > 0,
            )
            for device in self._fleet.ends()
        ]

    def _plan(self, want: Want, now: float) -> Choice | None:
        """Where the scheme `adaptive` sends the next task of a job."""
        job = self._jobs[want.job_id]
        task = job.open[want.task]
        uppers = self._fleet.uppers(now, job.ways)
        ask = Ask(
            remaining=len(job.ready),
            interactive=job.interactive,
            deadline=job.deadline_of(task, now),
            job_deadline=job.deadline,
        )
        untried = [node for node in uppers if node.node_id not in want.tried] if want.tried else uppers
        known = None
        many = len(self._devices.alive(Tier.END, now)) > _MANY or len(uppers) > 2 * _MANY
        if many and not want.interactive and want.regardless is None:
            known = self._outlook(job, task, uppers, now)
            ends, uppers = self._part_of(want, task, untried or uppers, now)
        else:
            ends, uppers = self._all_ends(want, now), untried or uppers
        way = self.pilot.plan(ask, task.images, ends, uppers, now, fine_only=task.has_coarse, known=known)
        if way is None:
            return None
        if isinstance(way, Hold):
            job.held_back = way.reason
            self._look_at = min(self._look_at, way.until, math.inf if known is None else now + _OUTLOOK_S)
            return None
        return Choice(
            job_id=want.job_id,
            task=want.task,
            node_id=way.end,
            reason=way.reason,
            upper=way.upper,
            too_late=way.too_late,
        )

    def _all_ends(self, want: Want, now: float) -> list[EndPlace]:
        limit = self._settings.window + want.interactive
        return [
            EndPlace(node=self._fleet.node(self._devices.get(place.node_id)), has_room=place.owed < limit)
            for place in eligible(want, self._places(now))
        ]

    def _part_of(
        self, want: Want, task: ActiveTask, uppers: Sequence[Node], now: float
    ) -> tuple[list[EndPlace], list[Node]]:
        """A few end devices that have room, the next ones in sequential order, and a few upper nodes of each tier,
        other ones each time: of a few that are looked at the best is nearly as good as the best of all (Mitzenmacher:
        The power of two choices in randomized load balancing, 2001)."""
        for node_id in self._stirred_open:
            device = self._devices.find(node_id)
            end = device is not None and device.tier is Tier.END
            self._open.set(node_id, device.order if device else (), free=end and device is not None and device.listed)
        self._stirred_open.clear()
        anywhere = _anywhere(want)
        ends: list[EndPlace] = []
        while not ends and (names := self._open.some(self._part_order, _PART)):
            self._part_order = self._devices.get(names[-1]).order
            asked = [node_id for node_id in names if anywhere or self._has_clean_record(want, node_id)]
            ends = self._with_room(asked, task, now)
            for node_id in set(asked) - {end.node.node_id for end in ends}:
                self._open.set(node_id, (), free=False)
                self._closed.add(node_id)
            if len(asked) < len(names):
                break  # the others of this part are not for this task; the next part is looked at the next time
        if not ends and not anywhere and now >= self._search_at:
            # Perhaps there is none with a clean record at all.
            self._search_at = now + _OUTLOOK_S
            able = [place.node_id for place in eligible(want, self._places(now)) if place.owed < self._settings.window]
            ends = self._with_room(able[:_PART], task, now)
        self._part += 1
        cut = bisect_left(uppers, True, key=lambda node: node.tier is Tier.CLOUD)
        tiers = uppers[:cut], uppers[cut:]
        return ends, [node for nodes in tiers for node in _in_turn(nodes, self._part * _PART)]

    def _has_clean_record(self, want: Want, node_id: str) -> bool:
        return node_id not in want.tried and not self._devices.get(node_id).wrong.count

    def _with_room(self, node_ids: Sequence[str], task: ActiveTask, now: float) -> list[EndPlace]:
        some = [
            EndPlace(
                node=self._fleet.node(self._devices.get(node_id)),
                has_room=self._attempts.owed(node_id) < self._settings.window,
            )
            for node_id in node_ids
        ]
        return self.pilot.with_room(some, task.images, now, fine_only=task.has_coarse)

    def _outlook(self, job: ActiveJob, task: ActiveTask, uppers: Sequence[Node], now: float) -> Outlook:
        until, known = self._outlooks.get(job.job_id, (0.0, None))
        if known is None or now >= until:
            ends = [EndPlace(node=node, has_room=True) for node in self._fleet.alive_ends(now)]
            known = self.pilot.outlook(len(job.ready), task.images, ends, uppers, now)
            until = now + max(_OUTLOOK_S, _OUTLOOK * (known.last - now))
            self._outlooks[job.job_id] = until, known
        return known

    def _gathers_for(self, job: ActiveJob, now: float) -> bool:
        scheme = job.policy.scheme
        return (
            now < self._gathering_until
            and scheme is not Scheme.END
            and not self._fleet.has_upstream(scheme, now, job.ways)
        )

    def _regardless(self, job: ActiveJob, now: float) -> frozenset[str] | None:
        if job.policy.recovery is not Recovery.REASSIGN:
            return None
        if not job.regardless:
            job.regardless = frozenset(device.node_id for device in self._devices.alive(Tier.END, now))
        return job.regardless

    def _move(self, now: float) -> None:
        """Take tasks of the scheme `adaptive` away from upper nodes that have become slow."""
        for job in self._jobs.values():
            wanted = job.policy.scheme is Scheme.ADAPTIVE and job.policy.recovery is Recovery.MONITOR
            if job.ending or not wanted or not (waiting := self._attempts.waiting_above(job)):
                continue
            ends = [EndPlace(node=node, has_room=True) for node in self._fleet.alive_ends(now)]
            ask = Ask(remaining=len(job.ready) + 1, interactive=job.interactive)
            images = job.policy.batch_size
            found = self.pilot.misplaced(ask, waiting, images, ends, self._fleet.uppers(now, job.ways), now)
            if found is not None:
                self._attempts.move(*found)

    def _send(self, job: ActiveJob, task: ActiveTask, choice: Choice, now: float) -> None:
        device = self._devices.get(choice.node_id)
        upstreams, why = choice.upper, choice.reason
        if upstreams is None:
            route = self._fleet.route(job.policy.scheme, device.node_id, now, job.ways)
            upstreams, why = route.for_task(job.sent), f"{choice.reason}; {route.reason}"
        ways_up = self._allowed(job, device, _gated(job, upstreams), now)
        self._last_used, self._last_order = device.node_id, device.order
        job.begin(now, task)
        if task.has_coarse and not ways_up:
            if choice.too_late:
                job.give_up(task, "deadline", "no upper node would have answered in time", now)
            elif job.no_upper(task, now):
                job.delay(task, now)
            self._news = True
            return
        if ways_up:
            job.mapping[device.node_id] = ways_up[0][0].node_id
        assert self._group is not None, "the dispatcher is not running"
        self._attempts.start(self._group, job, task, device, ways_up, why=why, too_late=choice.too_late)

    def _allowed(
        self, job: ActiveJob, device: Device, nodes: tuple[Node, ...], now: float
    ) -> tuple[tuple[Node, Upstream], ...]:
        """Those of an end device's upper nodes to which it may send the job's images in some form, and how."""
        return self._fleet.upstreams(device, nodes, job.ways, now, content=job.content)

    def _hedge(self, now: float) -> float:
        """Give stragglers a second attempt on devices that have nothing to do; returns after how many seconds the next
        one may be due."""
        if any(job.next_task() is not None for job in self._jobs.values()):
            return _IDLE_S  # there is work for those devices; what comes of it wakes the loop
        next_in_s = _IDLE_S
        for job, task, nodes, due in list(self._attempts.stragglers(now)):
            if due > now:
                next_in_s = min(next_in_s, due - now)
                continue
            others = (
                device
                for device in self._devices.alive(Tier.END, now)
                if not (self.outstanding(device.node_id) or device.wrong.count)
                and device.node_id not in nodes | task.tried
            )
            device = next(others, None)
            if device is None or job.retries is None or not job.retries.has_token(now):
                continue
            route = self._fleet.route(job.policy.scheme, device.node_id, now, job.ways)
            allowed = self._allowed(job, device, _gated(job, route.for_task(job.sent)), now)
            ways_up = sorted(allowed, key=lambda way: way[0].node_id in nodes)
            if task.has_coarse and not ways_up:
                continue
            job.retries.take(now)
            assert self._group is not None, "the dispatcher is not running"
            why = f"hedge: the attempt on {' and '.join(sorted(nodes))} takes longer than 95 % of them"
            self._attempts.start(self._group, job, task, device, ways_up, why=why, hedge=True)
        return next_in_s

    def _on_device_change(self, node_id: str) -> None:
        self._attempts.on_device_change(node_id)
        self.wake()

    def _on_listed(self, node_id: str) -> None:
        """A node has come to those that may receive tasks, or has left them."""
        self._stir(node_id)
        self._wake.set()

    def _on_freed(self, job: ActiveJob) -> None:
        """A task of a job has an answer, or an attempt is over: there may be room for another one. A job of which no
        task is on its way, or one that lets tasks wait for each other, is looked at."""
        self._news = self._news or job.waits or bool(job.held)
        self._wake.set()

    def _explain_waiting(self, job: ActiveJob, now: float) -> None:
        if self._gathers_for(job, now):
            job.reason = "waiting for an upper node to register: the scheduler has just started"
        elif not self._devices.alive(Tier.END, now):
            ends = [view for view in self._devices.view(now) if view.device.tier is Tier.END]
            known = "; ".join(f"{view.device.node_id}: {view.reason}" for view in ends)
            job.reason = f"waiting for an end device ({known or 'none has registered'})"
        elif not job.ready and job.waits_for_upstream:
            job.reason = "waiting for an upper node (all coarse answers are there; on_upstream_loss=wait)"

    # --- endings --------------------------------------------------------------------------------------------------

    def _end(self, job: ActiveJob, state: str | None, reason: str) -> None:
        """Stop all work on a job and let its sink conclude."""
        job.ending = True
        self._attempts.stop(job)
        assert self._group is not None, "the dispatcher is not running"
        self._group.create_task(self._conclude(job, state, reason), name=f"end of {job.job_id}")

    async def _conclude(self, job: ActiveJob, state: str | None, reason: str) -> None:
        await job.sink.ended(state, reason)
        del self._jobs[job.job_id]
        self._outlooks.pop(job.job_id, None)
        self.wake()


def _anywhere(want: Want) -> bool:
    """Whether a task may go to any end device that is alive and has room in its window; see `eligible`."""
    return not (want.interactive or want.tried or want.fine_only) and want.regardless is None


def _in_turn(nodes: Sequence[Node], first: int) -> Sequence[Node]:
    """A few nodes in a circle."""
    if len(nodes) <= _PART:
        return nodes
    at = first % len(nodes)
    return [*nodes[at : at + _PART], *nodes[: max(0, at + _PART - len(nodes))]]


def _gated(job: ActiveJob, route: tuple[Node, ...]) -> tuple[Node, ...]:
    """The upper nodes of a route that a job asks: those for each step up, where its images go up one by one."""
    if not job.policy.gates or not route:
        return route
    # The nodes of scheme adaptive stand in the order of their finish already.
    turn = 0 if job.policy.scheme is Scheme.ADAPTIVE else job.sent
    return upstreams_of(job.policy.gates, route, turn)
