"""The dispatcher: performs what the state machine decides, and tells it what happens.

`run` is one loop: it looks at the jobs, asks `choice` for the next task whenever something has changed, and starts an
attempt, which is an asyncio task that does nothing but I/O. All that happens becomes an event for `core.step`, which
decides what follows; `_perform` does it. Execution is at least once: an attempt that fails, or whose device leaves the
list, is made again elsewhere. Answers are exactly once: a stage that has its answer takes no second one, here and in
the database. `docs/explanation/fault-tolerance.md` says how tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from scheduler.core import events
from scheduler.core.device import Device, Node
from scheduler.core.escalation import stages_of, upstreams_of, without
from scheduler.core.events import Failure, FailureKind
from scheduler.core.fleet import Change, Ledger
from scheduler.core.hedging import hedge_at
from scheduler.core.job import FAILED_OUTCOMES, AttemptReport
from scheduler.core.limits import attempt_deadline
from scheduler.core.policy import JobPolicy, JobRules
from scheduler.core.site import NO_SITE
from scheduler.core.step import State, may_move, step
from scheduler.core.work import Attempt, AttemptFacts, JobFacts, OpenJob, OpenTask
from scheduler.dispatch.active_job import ActiveJob
from scheduler.dispatch.choice import Choice, Chooser
from scheduler.dispatch.transport import TaskRequest, Transport, may_have_held
from scheduler.history.record import Record
from scheduler.metrics import ATTEMPTS, OUTSTANDING, SITES, TASKS
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask
from scheduler.placement.routes import Placement, in_words
from scheduler.placement.shares import CloudShares
from scheduler.settings import SchedulerSettings
from tierkit.errors import (
    DeadlineExceeded,
    InvalidAnswer,
    Overloaded,
    TerraceError,
    UpstreamError,
    UpstreamUnavailable,
)
from tierkit.spans import Span
from tierkit.types import Health, Recovery, Scheme, Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, TaskEvent, UpstreamAnswer
from tierkit.wire.messages import Registration, Upstream
from tierkit.wire.oip import Timing

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_MOVE_S = 0.25
"""Seconds between two checks for tasks that wait for a slow upstream node."""
_MOVE_TASKS = 200
"""Most tasks under way for the full rate of checks; with more, the checks are proportionally rarer."""
_TELL_AGAIN_S = 0.2
_LINKS_S = 1.0
_IDLE_S = 1.0
"""The loop looks at all jobs at least this often, in case it missed a change."""
_TICK_S = 0.005
"""An event loop counts in milliseconds: what happens at a time is looked at a little later."""


class Dispatcher:
    """Owns the state: jobs that are under way, attempts, and the fleet. Every change goes through `handle`.

    Args:
        settings: deadlines and attempts.
        ledger: the fleet; only `handle` changes it.
        placement: routes over the fleet.
        pilot: state of the scheme `adaptive`.
        transport: connections to the end devices.
        record: receives all events.
        classes: numbers of coarse and fine classes.
        congested: returns True if so many answers wait to be written that no new tasks may be sent.
        clock: `time.monotonic`, which both kinds of event loop use as well (uvloop in whole milliseconds).
        chance: random numbers for the jitter in waits.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        ledger: Ledger,
        placement: Placement,
        pilot: Pilot,
        transport: Transport,
        record: Record,
        classes: tuple[int, int],
        congested: Callable[[], bool],
        clock: Callable[[], float],
        chance: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._state = State(limits=settings.task_limits, ledger=ledger)
        self._placement = placement
        self.pilot = pilot
        self._transport = transport
        self.record = record
        self._coarse_classes, self._fine_classes = classes
        self._congested = congested
        self._clock = clock
        self._chance = chance or random.Random()
        sequential = settings.order == "sequential"
        self._choice = Chooser(ledger=ledger, placement=placement, pilot=pilot, sequential=sequential)
        self._links_at: dict[Tier, float] = {}
        """By tier: time at which the placement gets the measured link times again, after an answer of the tier."""
        self.cloud_shares = CloudShares()
        """Images that the cloud answered in the scheme `mapping`, and all."""
        self._active: dict[str, ActiveJob] = {}
        self._ids = itertools.count(1)
        self._io: dict[int, asyncio.Task[None]] = {}
        self._limits: dict[int, asyncio.Timeout] = {}
        self._spans: dict[int, Span] = {}
        """Spans by attempt, until it is reported."""
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._followers: list[Callable[[Change], None]] = [record.node_changed]
        self.learns: Callable[[AttemptFacts, TaskEvent, CoarseEvent | None], None] = lambda *_: None
        """Called with each line of an answer, and the coarse answer that the task had."""
        self.moved: Callable[[JobFacts], None] = lambda _: None
        """Called with the facts of a job that belongs to another release now."""
        self.reported: Callable[[AttemptFacts, AttemptReport], None] = lambda *_: None
        """Called with each attempt that has ended."""
        self._move_at = 0.0
        self._look_at = 0.0
        """Latest time to look at all jobs."""
        self._news = True
        """True if to look at all jobs, and not just for room for what is ready."""
        self._gathering_until = 0.0
        self._gathers: dict[tuple[Scheme, JobRules, str | None], bool] = {}
        """By scheme, rules and site, in this step of the loop: True if its jobs wait for the first upstream node."""
        self._ends_told: dict[str | None, tuple[float, str]] = {}
        """By site: time and result of the last search for the reason why no end device takes work; many jobs may wait
        for it."""
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def follow(self, follower: Callable[[Change], None]) -> None:
        """Call `follower` with each change of a node: the feed of changes. It must not call back."""
        self._followers.append(follower)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run, interactive requests included."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Tasks of these jobs that wait to be sent to an end device."""
        return sum(job.waiting for job in self._state.jobs.values() if not job.ending)

    async def end_interactive(self, reason: str) -> None:
        """Tell those who wait for an answer that none comes."""
        for job in list(self._active.values()):
            if job.facts.interactive:
                await job.recipient.ended("failed", reason)

    def policies(self) -> list[tuple[str, JobPolicy]]:
        """Id and policy of each job that is not final, interactive requests included."""
        return [(job_id, job.facts.policy) for job_id, job in self._active.items()]

    def job(self, job_id: str) -> ActiveJob | None:
        """A job that is not final."""
        return self._active.get(job_id)

    def held_back(self, job_id: str) -> str:
        """Return why the scheme `adaptive` sends nothing of a job at the moment; "" if it does."""
        return self._choice.held_back(job_id)

    def attempts(self, job_id: str) -> list[AttemptReport]:
        """The attempts of a job that are under way."""
        running = self._ledger.assigned.attempts.values()
        return [each.facts.report() for each in running if each.facts.job_id == job_id and not each.reported]

    def add(self, job: ActiveJob) -> None:
        """Take a job; its recipient is called at its end. A job without open tasks ends at once."""
        self._active[job.facts.job_id] = job
        self.handle(events.JobAdded(job.facts, job.tasks, job.answered))
        self.wake()

    def cancel(self, job_id: str, reason: str) -> bool:
        """End a job as cancelled; False when it is not under way or already ending."""
        job = self._state.jobs.get(job_id)
        if job is None or job.ending:
            return False
        self.handle(events.JobStopped(job_id, "cancelled", reason))
        return True

    def wake(self) -> None:
        """Look around now: something has changed that the dispatcher does not see by itself."""
        self._news = True
        self._wake.set()

    async def run(self) -> None:
        """Dispatch until cancelled. An error in here is a bug, and ends the service loudly."""
        # After a restart the nodes register again one by one. A task sent before the first upstream node is back would
        # end as a fallback for no good reason.
        self._gathering_until = self._clock() + self._settings.lease_s
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                self._wake.clear()
                self._step()
                try:
                    async with asyncio.timeout(max(0.0, self._look_at - self._clock())):
                        await self._wake.wait()
                except TimeoutError:
                    self._news = True  # also where the timer was a little early

    # --- deciding -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Do all that can be done now. Most of what happens is an answer that frees a place; with many jobs under way
        only news of another kind is worth a look at each of them."""
        now = self._clock()
        self._gathers.clear()
        looks = self._news or now >= self._look_at
        if looks:
            self._news = False
            self._look_at = now + _IDLE_S
            for job in list(self._state.jobs.values()):
                if not job.ending and (job.delayed or job.held or not job.open or now >= job.facts.deadline):
                    self.handle(events.JobDue(job.facts.job_id, self._has_upstream(job, now)))
        if now >= self._move_at:
            # After a pause of this process answers wait to be read: their nodes only look overdue.
            stood_still = now > self._move_at + _MOVE_S
            self._move_at = now + _MOVE_S * max(1.0, len(self._ledger.assigned.attempts) / _MOVE_TASKS)
            if not stood_still:
                self._move(now)
            self._ledger.assigned.look_again()
        self._choice.look_at = self._look_at
        while not self._congested() and self._send_next(now):
            pass
        self._look_at = min(self._look_at, self._choice.look_at)
        if self._settings.hedge:
            self._look_at = min(self._look_at, now + self._hedge(now))
        if looks:
            self._look_ahead(now)

    def _look_ahead(self, now: float) -> None:
        """Note when to look at all jobs again, and why those wait that do."""
        times = [self._look_at]
        if now < self._gathering_until:
            times.append(self._gathering_until)
        for job in [job for job in self._state.jobs.values() if not job.ending]:
            times += [job.facts.deadline, *(task.not_before for task in job.delayed[:1] if now < task.not_before)]
            if job.facts.policy.scheme is Scheme.ADAPTIVE:
                times.append(self._move_at)
            if job.waits:
                self._explain_waiting(job, now)
        self._look_at = min(times)

    def _send_next(self, now: float) -> bool:
        jobs = (job for job in self._state.jobs.values() if not self._gathers_for(job, now))
        choice = self._choice.next(jobs, now)
        if choice is None:
            return False
        self._choice.sent(choice)
        self._send(choice, now)
        return True

    def _send(self, choice: Choice, now: float) -> None:
        job, task, device = choice.job, choice.task, choice.device
        facts = job.facts
        nodes, why = choice.upper, choice.reason
        if nodes is None:
            route = self._placement.route(facts.policy.scheme, device.node_id, now, facts.rules)
            nodes, why = route.for_task(job.sent), f"{why}; {route.reason}"
        upper = self._allowed(job, task, device, nodes, now)
        self._active[facts.job_id].reason = ""
        if task.coarse and not upper:
            self.handle(events.NotSent(facts.job_id, task.facts.index, choice.too_late))
            self._news = True
            return
        attempt = self._attempt(job, task, device, upper, now, why=why, too_late=choice.too_late)
        self.handle(events.AttemptBegun(attempt))

    def _allowed(
        self, job: OpenJob, task: OpenTask, device: Device, nodes: tuple[Node, ...], now: float
    ) -> list[tuple[Upstream, str]]:
        """The upstream nodes that an attempt asks: those to which the device may send the job's images, tier
        after tier where images go up one by one. Each with the reason for the place of encoding, "" if there is one
        place."""
        if task.tries.refused and not task.coarse:
            return []
        policy = job.facts.policy
        if policy.gates and nodes:
            # The nodes of scheme adaptive stand in the order of their finish already.
            nodes = upstreams_of(policy.gates, nodes, 0 if policy.scheme is Scheme.ADAPTIVE else job.sent)
        ways = self._placement.ways(device, nodes, job.facts.rules, now, content=job.facts.content)
        images, stepwise = task.facts.images, bool(policy.gates)
        choose = self.pilot.encoding.choose
        return [choose(device.node_id, images, entries, stepwise=stepwise) for entries in ways]

    def _has_upstream(self, job: OpenJob, now: float) -> bool:
        policy = job.facts.policy
        return self._placement.has_upstream(policy.scheme, now, job.facts.rules, policy.site)

    def _look_up(self, facts: AttemptFacts, report: FallbackEvent | RoutedEvent, now: float) -> bool:
        """True if there is a node now that could give what no node gave."""
        job = self._state.jobs.get(facts.job_id)
        if job is None:
            return False
        if isinstance(report, FallbackEvent):
            return self._has_upstream(job, now)
        tiers, site = {loss.tier for loss in without(report).values()}, job.facts.policy.site
        return any(self._placement.upper(tier, now, job.facts.rules, site) for tier in tiers)

    def _gathers_for(self, job: OpenJob, now: float) -> bool:
        key = job.facts.policy.scheme, job.facts.rules, job.facts.policy.site
        if now >= self._gathering_until or key[0] is Scheme.END:
            return False
        if key not in self._gathers:
            self._gathers[key] = not self._has_upstream(job, now)
        return self._gathers[key]

    def _move(self, now: float) -> None:
        """Take tasks of the scheme `adaptive` away from upstream nodes that have become slow."""
        for job in list(self._state.jobs.values()):
            policy = job.facts.policy
            wanted = policy.scheme is Scheme.ADAPTIVE and policy.recovery is Recovery.MONITOR
            if job.ending or not wanted:
                continue
            waiting: defaultdict[str, list[Attempt]] = defaultdict(list)
            for each in self._ledger.assigned.attempts.values():
                device = self._ledger.find(each.facts.node_id)
                if each.job is job and may_move(each) and device is not None:
                    waiting[device.site].append(each)
            for site, attempts in waiting.items():
                self._move_in(site, job, attempts, now)

    def _move_in(self, site: str, job: OpenJob, waiting: list[Attempt], now: float) -> None:
        """Take a task of a job away from the slow upstream node for which it waits in a site."""
        ask = Ask(remaining=len(job.ready) + 1, interactive=job.facts.interactive)
        ends = self._placement.alive_ends(now, site, job.facts.rules.release)
        uppers = self._placement.uppers(now, job.facts.rules, site)
        found = self.pilot.misplaced(ask, waiting, job.facts.policy.batch_size, ends, uppers, now)
        if found is not None:
            slow, why = found
            self.pilot.taken_away(slow, now)
            self.handle(events.Move(slow.facts.id, why))

    def _hedge(self, now: float) -> float:
        """Give stragglers a second attempt on devices that have nothing to do; returns the seconds until the next one
        may be due."""
        if any(job.next_task() is not None for job in self._state.jobs.values()):
            return _IDLE_S  # there is work for those devices; what comes of it wakes the loop
        next_in_s = _IDLE_S
        for attempt in list(self._ledger.assigned.attempts.values()):
            job, task = attempt.job, attempt.task
            at = hedge_at(attempt)
            if at is None:
                continue
            if at > now:
                next_in_s = min(next_in_s, at - now)
                continue
            busy = set(attempt.facts.nodes)
            device = self._choice.for_hedge(attempt, now)
            if device is None or job.retries.wait_s(now) > 0:
                continue
            route = self._placement.route(job.facts.policy.scheme, device.node_id, now, job.facts.rules)
            allowed = self._allowed(job, task, device, route.for_task(job.sent), now)
            upper = sorted(allowed, key=lambda each: each[0].node_id in busy)
            if task.coarse and not upper:
                continue
            why = f"hedge: the attempt on {' and '.join(sorted(busy))} takes longer than 95 % of them"
            self.handle(events.AttemptBegun(self._attempt(job, task, device, upper, now, why=why, hedge=True)))
        return next_in_s

    def _on_node_change(self, change: Change) -> None:
        if change.health is not None:
            level = logging.INFO if change.health is Health.ALIVE else logging.WARNING
            _log.log(level, "%s is %s: %s", change.node_id, change.health, change.reason)
        for follower in self._followers:
            follower(change)
        self._forget_if_gone(change.node_id)
        self.wake()

    def _forget_if_gone(self, node_id: str) -> None:
        """Drop what is known of a node that has left the device list and has no attempts any more."""
        if self._ledger.find(node_id) is None and not self._ledger.assigned.at(node_id):
            self.pilot.forget(node_id)
            with contextlib.suppress(KeyError):  # it had no tasks
                OUTSTANDING.remove(node_id)

    def _explain_waiting(self, job: OpenJob, now: float) -> None:
        reason = None
        if self._gathers_for(job, now):
            reason = "waiting for an upstream node to register: the scheduler has just started"
        elif not self._ledger.alive(Tier.END, now, site := job.facts.policy.site):
            told_at, told = self._ends_told.get(site, (-math.inf, ""))
            if now - told_at > _TELL_AGAIN_S:
                told = self._ledger.why_none(Tier.END, now, site) or "none has registered"
                self._ends_told = {
                    each: said for each, said in self._ends_told.items() if now - said[0] < _TELL_AGAIN_S
                }
                self._ends_told[site] = now, told
            where = "" if site is None else f" of the site {site}"
            reason = f"waiting for an end device{where} ({told})"
        elif not self._placement.alive_ends(now, site, job.facts.rules.release):
            where = "" if site is None else f" of the site {site}"
            reason = f"waiting for an end device{where} that holds the networks of {job.facts.policy.release}"
        elif not job.ready and job.waits_for_upstream:
            reason = "waiting for an upstream node (all coarse answers are there; on_upstream_loss=wait)"
        if reason is not None:
            self._active[job.facts.job_id].reason = reason

    # --- one attempt ----------------------------------------------------------------------------------------------

    def _attempt(
        self,
        job: OpenJob,
        task: OpenTask,
        device: Device,
        upper: Sequence[tuple[Upstream, str]],
        now: float,
        *,
        why: str,
        too_late: bool = False,
        hedge: bool = False,
    ) -> AttemptFacts:
        """Return an attempt on a device. If the coarse answer is known, only the upstream nodes are asked."""
        policy, release = job.facts.policy, job.facts.rules.release
        node = self._placement.node(device, release)
        stages = stages_of(policy.gates, policy.escalate, node.sha256)
        if stages and task.coarse and task.coarse.unsure is not None:
            # The coarse answer is there, and which of its images go up.
            stages = (stages[0].model_copy(update={"below": None, "only": task.coarse.unsure}), *stages[1:])
        if task.blame.tried:
            upper = sorted(upper, key=lambda each: each[0].node_id in task.blame.tried)
        upstreams = tuple(node for node, _ in upper)
        above = {node.node_id: self._ledger.get(node.node_id) for node in upstreams}
        first = above[upstreams[0].node_id] if upper else None
        said = [words for node, where in upper[:1] for words in (where, in_words(node)) if words]
        return AttemptFacts(
            id=next(self._ids),
            job_id=job.facts.job_id,
            task=task.facts.index,
            images=task.facts.images,
            number=task.tries.made + 1,
            node_id=device.node_id,
            incarnation=device.incarnation,
            model=node.model,
            sha256=node.sha256,
            reading=node.reading,
            release=release,
            site=device.site,
            upstreams=upstreams,
            incarnations={node_id: node.incarnation for node_id, node in above.items()},
            stages=stages if upper else (),
            why="; ".join([why, *said]),
            planned=policy.scheme is Scheme.ADAPTIVE,
            hedge=hedge,
            too_late=too_late,
            # A threshold for the coarse answer needs its probabilities, which the device alone has.
            fine_only=bool(task.coarse) and not (stages and stages[0].below is not None),
            trial=device.wrong.count > 0 and device.node_id not in task.blame.tried,
            theta_cloud=self._placement.theta_cloud(now, device.site) if policy.scheme is Scheme.MAPPING else None,
            started=now,
            started_at=time.time(),
            deadline=attempt_deadline(self._state.limits, job.facts, task.started, now),
            due_at=self.pilot.due_at(
                node,
                None if first is None else self._placement.node(first, release),
                task.facts.images,
                now,
            ),
        )

    async def _live(self, dispatch: events.Dispatch, registration: Registration, task: OpenTask) -> None:
        """The I/O of an attempt."""
        facts = dispatch.attempt
        failure: Failure | None = None
        limit = self._limits[facts.id] = asyncio.timeout_at(dispatch.until)
        try:
            async with limit:
                if dispatch.acknowledge:
                    # Eq. 9 of the paper: a device that does not acknowledge costs `acknowledge_s`.
                    budget_s = self._settings.acknowledge_s
                    await self._transport.acknowledged(facts.node_id, registration.url, budget_s=budget_s)
                    self.handle(events.Acknowledged(facts.id))
                    self.wake()
                request = self._request(facts, registration, task)
                sending = self._transport.send(request, budget_s=facts.deadline - facts.started)
                async with contextlib.aclosing(sending) as lines:
                    async for event, line in lines:
                        self.handle(events.LineCame(facts.id, event, line))
                        if facts.id not in self._ledger.assigned.attempts:
                            return
        except TimeoutError:
            self.handle(events.TimeUp(facts.id))
            return
        except Exception as exc:
            # One task must not take down all jobs: the error is logged, and the task has attempts left.
            if not isinstance(exc, TerraceError):
                _log.exception("unexpected error in an attempt", extra={"attempt": facts.id, "job": facts.job_id})
            failure = _failure(exc)
        finally:
            self._limits.pop(facts.id, None)
            self._io.pop(facts.id, None)
        self.handle(events.Ended(facts.id, failure))

    def _request(self, facts: AttemptFacts, registration: Registration, task: OpenTask) -> TaskRequest:
        active, first = self._active[facts.job_id], task.facts.first_image
        return TaskRequest(
            task_id=active.facts.task_id(facts.task),
            request_id=active.facts.request_id_of(facts.task),
            trace=self._spans[facts.id].trace,
            node_id=facts.node_id,
            url=registration.url,
            model=facts.model,
            sha256=facts.sha256,
            reading=facts.reading,
            images=active.images[first : first + facts.images],
            upstreams=facts.upstreams,
            coarse_classes=self._coarse_classes,
            fine_classes=self._fine_classes,
            stages=facts.stages,
            coarse_known=facts.fine_only,
            damaged=frozenset() if task.coarse is None else task.coarse.damaged,
            interactive=active.facts.interactive,
            key=registration.key,
        )

    # --- events and effects ---------------------------------------------------------------------------------------

    def handle(self, what: events.What) -> None:
        """Let the state machine decide what follows from an event, and do it.

        Raises:
            TerraceError: a node, or an operator, asks for what cannot be; nothing has changed.
        """
        event = events.Event(what, self._clock(), self._chance.random())
        if self._handling:
            self._events.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._handling = False

    def _handle(self, event: events.Event) -> None:
        version = self._ledger.version
        effects = step(self._state, event)
        for effect in effects:
            self._perform(effect, event.now)
        by_itself = isinstance(event.what, events.AttemptBegun)  # `_step` goes on anyway
        if version != self._ledger.version or (effects and not by_itself):
            self._wake.set()

    def _perform(self, effect: events.Effect, now: float) -> None:  # one case for each effect
        match effect:
            case events.Learn(facts, event, coarse):
                self._learn(facts, event, now)
                self.learns(facts, event, coarse)
            case events.WaitUntil(attempt, at):
                # One that has just expired cannot be moved any more: `TimeUp` follows.
                if (limit := self._limits.get(attempt)) is not None and not limit.expired():
                    limit.reschedule(at)
            case events.Deliver(answer):
                self._active[answer.job_id].recipient.answer(answer)
                self.record.answered(answer)
                SITES.answered(answer.site, answer.images)  # coarse answers have a site
            case events.TaskClosed():
                self._on_closed(effect)
            case events.Report(facts, report):
                self._on_report(facts, report)
            case events.Finished(facts):
                # Removed here: an asyncio task that is cancelled before its first step removes nothing.
                task_io = self._io.pop(facts.id, None)
                if task_io is not None and task_io is not asyncio.current_task():
                    task_io.cancel()
                self._show_outstanding(facts.node_id)
                for node_id in facts.nodes:
                    self._forget_if_gone(node_id)
                self._note_news(facts.job_id)
            case events.Dispatch():
                self._on_dispatch(effect)
            case events.NodeChanged(change):
                self._on_node_change(change)
            case events.LookUp(facts, report, line):
                self.handle(events.LookedUp(facts, report, line, self._look_up(facts, report, now)))
            case events.LookAgain(at):
                asyncio.get_running_loop().call_later(at - now + _TICK_S, self.wake)
            case events.TakeBack(answer):
                self._active[answer.job_id].recipient.withdrawn(answer)
            case events.JobBelongs(moved):
                self._active[moved.job_id].facts = moved
                self.moved(moved)
            case events.JobStarted(job_id):
                self._active[job_id].recipient.started()
            case events.JobEnds(job_id, state, reason):
                assert self._group is not None, "the dispatcher is not running"
                self._group.create_task(self._conclude(job_id, state, reason), name=f"end of {job_id}")

    def _on_dispatch(self, dispatch: events.Dispatch) -> None:
        facts = dispatch.attempt
        self.pilot.encoding.sent(facts)
        active, registration = self._active[facts.job_id], self._ledger.get(facts.node_id).registration
        task = self._state.jobs[facts.job_id].open[facts.task]
        self._spans[facts.id] = Span("attempt", active.span.trace)
        self._show_outstanding(facts.node_id)
        assert self._group is not None, "the dispatcher is not running"
        living = self._live(dispatch, registration, task)
        self._io[facts.id] = self._group.create_task(living, name=f"attempt {active.facts.task_id(facts.task)}")

    def _show_outstanding(self, node_id: str) -> None:
        OUTSTANDING.labels(node_id).set(self._ledger.assigned.outstanding(node_id))

    def _note_news(self, job_id: str) -> None:
        """A job of which no task is on its way, or one that lets tasks wait for each other, is looked at."""
        job = self._state.jobs.get(job_id)
        self._news = self._news or (job is not None and (job.waits or bool(job.held)))

    def _on_closed(self, closed: events.TaskClosed) -> None:
        TASKS.labels(closed.outcome).inc()
        self._note_news(closed.job_id)
        if _log.isEnabledFor(logging.DEBUG):
            active = self._active[closed.job_id]
            what = {"job": closed.job_id, "task": closed.task, "outcome": closed.outcome, "ms": round(closed.ms, 3)}
            ids = {"request_id": active.facts.request_id_of(closed.task), "trace_id": active.trace_id}
            _log.debug("task done", extra={**what, **ids})

    def _on_report(self, facts: AttemptFacts, report: AttemptReport) -> None:
        outcome, active = report.outcome, self._active[facts.job_id]
        task_id = active.facts.task_id(facts.task)
        ATTEMPTS.labels(outcome).inc()
        if outcome == "fallback":
            SITES.fell_back(self._ledger.site_of(facts.node_id))
        self.record.attempted(outcome, facts.node_id, facts.job_id, report.reason)
        active.recipient.attempted(report)
        self.reported(facts, report)
        span = self._spans.pop(facts.id)
        span.says(task=task_id, node=facts.node_id, outcome=outcome)
        span.end(report.reason if outcome in FAILED_OUTCOMES else "")
        if outcome in ("unreachable", "lost", "error"):
            what = {"task": task_id, "attempt": facts.number, "why": report.reason}
            _log.warning("an attempt failed", extra=what)

    def _learn(self, facts: AttemptFacts, event: object, now: float) -> None:
        """Tell the pilot the speeds that an answer shows, and count the images that each node passed on."""
        # Whatever a node says, nothing of it took longer than the scheduler has waited.
        most_s = now - facts.started
        match event:
            case CoarseEvent():
                self.record.worked(facts.node_id, facts.images)
                images = event.batch_images or facts.images
                self.pilot.coarse(facts, _timing(event.queue_ms, event.compute_ms, images, most_s), now)
            case FineEvent():
                self.record.passed(facts.node_id, event.node_id, facts.images)
                self._learn_upstream(facts, event, most_s, now)
                self.pilot.encoding.answered(facts, event, most_s)
                self._count_share(facts, event, now)
            case RoutedEvent():
                active = self._active.get(facts.job_id)
                if event.answers and active is not None and not active.facts.interactive:
                    self.record.escalates(facts.job_id, now)
                for answer in event.answers:
                    self.record.passed(facts.node_id, answer.node_id, len(answer.indices))
                for answer in event.answers[:1]:
                    self._learn_upstream(facts, answer, most_s, now)
                for answer in event.answers:
                    self.pilot.encoding.answered(facts, answer, most_s)
            case FallbackEvent():
                self.pilot.encoding.failed(facts)

    def _count_share(self, facts: AttemptFacts, answer: FineEvent, now: float) -> None:
        if facts.theta_cloud is None:
            return
        site = self._ledger.site_of(facts.node_id) or NO_SITE
        if (planned := self._placement.theta_cloud(now, site)) is not None:
            self.cloud_shares.add(site, planned, answer.tier, facts.images)

    def _learn_upstream(self, facts: AttemptFacts, answer: UpstreamAnswer, most_s: float, now: float) -> None:
        round_trip_s, said = min(answer.round_trip_ms / 1000, most_s), answer.timing
        timing = None if said is None else _timing(said.queue_ms, said.compute_ms, said.batch_images, round_trip_s)
        self.pilot.fine(facts, answer.node_id, timing, round_trip_s, now)
        if now >= self._links_at.get(answer.tier, now):
            self._links_at[answer.tier] = now + _LINKS_S
            self._placement.measured(self.pilot.links(now))

    # --- endings --------------------------------------------------------------------------------------------------

    async def _conclude(self, job_id: str, state: str | None, reason: str) -> None:
        job = self._active[job_id]
        await job.recipient.ended(state, reason)
        job.span.says(job=job_id, images=len(job.images), scheme=job.facts.policy.scheme)
        job.span.end(reason)
        del self._active[job_id]
        self._choice.forget_job(job_id)
        self.handle(events.JobGone(job_id))
        self.wake()


def _failure(error: Exception) -> Failure:
    """The failure that the state machine takes for an error."""
    reason = str(error) if isinstance(error, TerraceError) else f"internal error: {error!r}"
    match error:
        case Overloaded():
            return Failure(FailureKind.BUSY, reason, retry_after_s=error.retry_after_s)
        case UpstreamUnavailable():
            return Failure(FailureKind.UNREACHABLE, reason, may_have_held=may_have_held(error))
        case InvalidAnswer():
            kind = FailureKind.INVALID
        case DeadlineExceeded():
            kind = FailureKind.LATE
        case UpstreamError(status_code=int()):
            kind = FailureKind.REFUSED
        case TerraceError():
            kind = FailureKind.WRONG
        case _:
            kind = FailureKind.OURS
    return Failure(kind, reason)


def _timing(queue_ms: float, compute_ms: float, images: int, most_s: float) -> Timing:
    return Timing(queue_s=min(queue_ms / 1000, most_s), compute_s=min(compute_ms / 1000, most_s), batch_images=images)
