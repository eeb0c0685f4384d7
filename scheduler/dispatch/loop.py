"""The dispatcher: sends tasks to end devices and takes their answers, at least once each; the store keeps one.

`run` is one loop: it looks at the jobs, asks `choice` for the next task whenever something has changed, and starts an
attempt, which is an asyncio task that does nothing but I/O. All that happens becomes an event for `attempt_state`,
which decides what follows; `_perform` does it. Execution is at least once: an attempt that fails, or whose device
leaves the list, is made again elsewhere. Answers are exactly once: a stage that has its answer takes no second one,
here and in the database. `docs/fault-tolerance.md` says how tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from scheduler.core.device import Device, Node
from scheduler.core.escalation import asks, stages_of, upstreams_of, without
from scheduler.core.fleet import DeviceList
from scheduler.core.job import FAILED_OUTCOMES, AttemptReport
from scheduler.core.work import ActiveJob, ActiveTask, Attempt, Phase, elapsed_ms
from scheduler.dispatch import events
from scheduler.dispatch.attempt_state import AttemptStates
from scheduler.dispatch.choice import Choice, Chooser
from scheduler.dispatch.hedging import hedge_after_s
from scheduler.dispatch.transport import TaskRequest, Transport
from scheduler.history.record import Record
from scheduler.metrics import ATTEMPTS, OUTSTANDING, TASKS
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask
from scheduler.placement.routes import Placement, in_words
from scheduler.settings import SchedulerSettings
from tierkit.errors import TerraceError
from tierkit.pacing import TokenBucket
from tierkit.types import Recovery, Scheme, Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, UpstreamAnswer
from tierkit.wire.messages import Upstream
from tierkit.wire.oip import Timing

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_MOVE_S = 0.25
"""How often it is asked whether a task waits for the wrong upstream node."""
_MOVE_TASKS = 200
"""With more tasks under way than this it is asked proportionally less often."""
_TELL_AGAIN_S = 0.2
_IDLE_S = 1.0
"""The loop looks at all jobs at least this often, in case it missed a change."""
_TICK_S = 0.005
"""An event loop counts in milliseconds: what happens at a time is looked at a little later."""
_DURATIONS = 100
"""Attempts per job and device whose duration is remembered, for hedging."""


class Dispatcher:
    """Owns all jobs that are under way.

    Args:
        settings: window, deadlines, attempts.
        devices: the device list; the dispatcher listens to its changes.
        placement: routes over it.
        pilot: of the scheme `adaptive`; told of all attempts, of every scheme.
        transport: to the end devices.
        record: told of what happens.
        classes: how many coarse and fine classes there are.
        congested: whether too many answers wait to be written to send new tasks.
        clock: `time.monotonic`, which both kinds of event loop count by as well (uvloop in whole milliseconds).
        chance: of the jitter in waits.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        devices: DeviceList,
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
        self._devices = devices
        self._placement = placement
        self.pilot = pilot
        self._transport = transport
        self.record = record
        self._coarse_classes, self._fine_classes = classes
        self._congested = congested
        self._clock = clock
        self._states = AttemptStates(
            settings=settings, devices=devices, more_above=self._more_above, chance=chance or random.Random()
        )
        self._choice = Chooser(
            window=settings.window, devices=devices, placement=placement, pilot=pilot, states=self._states
        )
        self._jobs: dict[str, ActiveJob] = {}
        self._io: dict[Attempt, asyncio.Task[None]] = {}
        self._limits: dict[Attempt, asyncio.Timeout] = {}
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._durations: dict[str, dict[str, deque[float]]] = {}
        """Seconds from the dispatch to the end of attempts, by job and device."""
        self._move_at = 0.0
        self._look_at = 0.0
        """When to look at all jobs at the latest: time alone changes something then."""
        self._news = True
        """True if to look at all jobs, and not just for room for what is ready."""
        self._gathering_until = 0.0
        self._ends_told = -math.inf, ""
        """When and how it was last worked out why no end device takes work: many jobs may wait for that."""
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        devices.listen(self._on_device_change)
        devices.follow(self._on_listed)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run, interactive requests included."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Tasks of these jobs that wait to be sent to an end device."""
        return sum(job.waiting for job in self._jobs.values() if not job.ending)

    async def end_interactive(self, reason: str) -> None:
        """Tell those who wait for an answer that none comes."""
        for job in list(self._jobs.values()):
            if job.interactive:
                await job.recipient.ended("failed", reason)

    def job(self, job_id: str) -> ActiveJob | None:
        """A job that is not final."""
        return self._jobs.get(job_id)

    def outstanding(self, node_id: str) -> int:
        """Tasks that an end device has now."""
        return sum(1 for _ in self._states.at(node_id))

    def attempts(self, job_id: str) -> list[AttemptReport]:
        """The attempts of a job that are under way."""
        running = self._states.running
        return [attempt.report() for attempt in running if attempt.job.job_id == job_id and not attempt.reported]

    def add(self, job: ActiveJob) -> None:
        """Take a job; its end is told to its recipient. A job without open tasks ends at once."""
        job.retries = TokenBucket(self._settings.retries_per_s, self._settings.retry_burst)
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
        looks = self._news or now >= self._look_at
        if looks:
            self._news = False
            self._look_at = now + _IDLE_S
            for job in list(self._jobs.values()):
                if not job.ending and (job.delayed or job.held or not job.open or now >= job.deadline):
                    self._advance(job, now)
        if now >= self._move_at:
            # After a pause of this process answers wait to be read: their nodes only look overdue.
            stood_still = now > self._move_at + _MOVE_S
            self._move_at = now + _MOVE_S * max(1.0, len(self._states.running) / _MOVE_TASKS)
            if not stood_still:
                self._move(now)
            self._choice.look_again()
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
        for job in [job for job in self._jobs.values() if not job.ending]:
            times += [job.deadline, *(task.not_before for task in job.delayed[:1] if now < task.not_before)]
            if job.policy.scheme is Scheme.ADAPTIVE:
                times.append(self._move_at)
            if job.waits:
                self._explain_waiting(job, now)
        self._look_at = min(times)

    def _advance(self, job: ActiveJob, now: float) -> None:
        if not job.open:
            self._end(job, None, "")
        elif now >= job.deadline:
            for task in list(job.open.values()):
                detail = f"the job's {job.policy.deadline_s:g} s are over"
                self._handle(events.GiveUp(job, task, "deadline", detail, now))
            self._end(job, None, f"its deadline of {job.policy.deadline_s:g} s is over")
        else:
            for task in job.wake_delayed(now, has_upstream=self._has_upstream(job, now)):
                self._handle(events.NoUpstream(job, task, now))

    def _send_next(self, now: float) -> bool:
        jobs = (job for job in self._jobs.values() if not self._gathers_for(job, now))
        choice = self._choice.next(jobs, now)
        if choice is None:
            return False
        self._choice.sent(choice)
        self._send(choice, now)
        return True

    def _send(self, choice: Choice, now: float) -> None:
        job, task, device = choice.job, choice.task, choice.device
        nodes, why = choice.upper, choice.reason
        if nodes is None:
            route = self._placement.route(job.policy.scheme, device.node_id, now, job.privacy)
            nodes, why = route.for_task(job.sent), f"{why}; {route.reason}"
        upper = self._allowed(job, task, device, nodes, now)
        job.begin(now, task)
        if task.has_coarse and not upper:
            late = "no upstream node would have answered in time"
            over = (
                events.GiveUp(job, task, "deadline", late, now)
                if choice.too_late
                else events.NoUpstream(job, task, now)
            )
            self._handle(over)
            if not task.closed:
                job.delay(task, now)
            self._news = True
            return
        if upper:
            job.mapping[device.node_id] = upper[0].node_id
        self._start(job, task, device, upper, now, why=why, too_late=choice.too_late)

    def _allowed(
        self, job: ActiveJob, task: ActiveTask, device: Device, nodes: tuple[Node, ...], now: float
    ) -> Sequence[Upstream]:
        """The upstream nodes that an attempt asks: those to which the device may send the job's images, tier
        after tier where images go up one by one."""
        if task.refused and not task.has_coarse:
            return ()
        if job.policy.gates and nodes:
            # The nodes of scheme adaptive stand in the order of their finish already.
            nodes = upstreams_of(job.policy.gates, nodes, 0 if job.policy.scheme is Scheme.ADAPTIVE else job.sent)
        return self._placement.upstreams(device, nodes, job.privacy, now, content=job.content)

    def _has_upstream(self, job: ActiveJob, now: float) -> bool:
        return self._placement.has_upstream(job.policy.scheme, now, job.privacy)

    def _more_above(self, job: ActiveJob, event: FallbackEvent | RoutedEvent, now: float) -> bool:
        """True if there is a node now that could give what no node gave."""
        if isinstance(event, FallbackEvent):
            return self._has_upstream(job, now)
        return any(
            self._placement.upper(tier, now, job.privacy) for tier in {loss.tier for loss in without(event).values()}
        )

    def _gathers_for(self, job: ActiveJob, now: float) -> bool:
        starting = now < self._gathering_until and job.policy.scheme is not Scheme.END
        return starting and not self._has_upstream(job, now)

    def _move(self, now: float) -> None:
        """Take tasks of the scheme `adaptive` away from upstream nodes that have become slow."""
        for job in list(self._jobs.values()):
            wanted = job.policy.scheme is Scheme.ADAPTIVE and job.policy.recovery is Recovery.MONITOR
            if job.ending or not wanted or not (waiting := self._states.movable(job)):
                continue
            ask = Ask(remaining=len(job.ready) + 1, interactive=job.interactive)
            images = job.policy.batch_size
            ends, uppers = self._placement.alive_ends(now), self._placement.uppers(now, job.privacy)
            found = self.pilot.misplaced(ask, waiting, images, ends, uppers, now)
            if found is not None:
                slow, why = found
                self.pilot.taken_away(slow, now)
                attempt = next(attempt for attempt in waiting if attempt is slow)
                self._handle(events.Move(attempt, why, now))

    def _hedge(self, now: float) -> float:
        """Give stragglers a second attempt on devices that have nothing to do; returns after how many seconds the next
        one may be due."""
        if any(job.next_task() is not None for job in self._jobs.values()):
            return _IDLE_S  # there is work for those devices; what comes of it wakes the loop
        next_in_s = _IDLE_S
        for attempt in list(self._states.running):
            job, task = attempt.job, attempt.task
            alone = len(task.running) == 1 and attempt.phase is not Phase.ANSWERED and not job.ending
            after_s = hedge_after_s(self._durations.get(job.job_id, {}).get(attempt.node_id, ()))
            if not alone or job.policy.recovery is not Recovery.MONITOR or after_s is None:
                continue
            if (in_s := attempt.started + after_s - now) > 0:
                next_in_s = min(next_in_s, in_s)
                continue
            busy = set(attempt.nodes)
            others = (
                device
                for device in self._devices.alive(Tier.END, now)
                if device.node_id not in busy | task.tried
                and not (device.wrong.count or self.outstanding(device.node_id))
            )
            device = next(others, None)
            if device is None or job.retries.wait_s(now) > 0:
                continue
            route = self._placement.route(job.policy.scheme, device.node_id, now, job.privacy)
            allowed = self._allowed(job, task, device, route.for_task(job.sent), now)
            upper = sorted(allowed, key=lambda node: node.node_id in busy)
            if task.has_coarse and not upper:
                continue
            job.retries.take(now)
            why = f"hedge: the attempt on {' and '.join(sorted(busy))} takes longer than 95 % of them"
            self._start(job, task, device, upper, now, why=why, hedge=True)
        return next_in_s

    def _on_device_change(self, node_id: str) -> None:
        self._handle(events.NodeChanged(node_id, self._clock()))
        self._forget_if_gone(node_id)
        self.wake()

    def _forget_if_gone(self, node_id: str) -> None:
        """Drop what is known of a node that has left the device list and has no attempts any more."""
        if self._devices.find(node_id) is None and node_id not in self._states.busy:
            self.pilot.forget(node_id)
            with contextlib.suppress(KeyError):  # it had no tasks
                OUTSTANDING.remove(node_id)

    def _on_listed(self, node_id: str) -> None:
        """A node has come to those that may receive tasks, or has left them."""
        self._choice.changed(node_id)
        self._wake.set()

    def _explain_waiting(self, job: ActiveJob, now: float) -> None:
        if self._gathers_for(job, now):
            job.reason = "waiting for an upstream node to register: the scheduler has just started"
        elif not self._devices.alive(Tier.END, now):
            if now - self._ends_told[0] > _TELL_AGAIN_S:
                self._ends_told = now, self._devices.why_none(Tier.END, now) or "none has registered"
            job.reason = f"waiting for an end device ({self._ends_told[1]})"
        elif not job.ready and job.waits_for_upstream:
            job.reason = "waiting for an upstream node (all coarse answers are there; on_upstream_loss=wait)"

    # --- one attempt ----------------------------------------------------------------------------------------------

    def _start(
        self,
        job: ActiveJob,
        task: ActiveTask,
        device: Device,
        upper: Sequence[Upstream],
        now: float,
        *,
        why: str,
        too_late: bool = False,
        hedge: bool = False,
    ) -> None:
        """Send a task to a device. Where the coarse answer is known, the upstream nodes alone are asked."""
        stages = stages_of(job.policy.gates, job.policy.escalate, device.registration.models[0].sha256)
        if stages and task.unsure is not None:
            # The coarse answer is there, and which of its images go up.
            stages = (stages[0].model_copy(update={"below": None, "only": task.unsure}), *stages[1:])
        if task.tried:
            upper = sorted(upper, key=lambda node: node.node_id in task.tried)
        above = {node.node_id: self._devices.get(node.node_id) for node in upper}
        attempt = Attempt(
            job=job,
            task=task,
            device=device,
            upstreams=tuple(upper),
            incarnations={node_id: node.incarnation for node_id, node in above.items()},
            stages=stages if upper else (),
            hedge=hedge,
            why="; ".join([why, *map(in_words, upper[:1])]),
            too_late=too_late,
            # A threshold for the coarse answer needs its probabilities, which the device alone has.
            fine_only=task.has_coarse and not (stages and stages[0].below is not None),
            trial=device.wrong.count > 0 and device.node_id not in task.tried,
            started=now,
            started_at=time.time(),
            deadline=self._states.deadline_of(job, task, now),
        )
        self._states.start(attempt)
        self._devices.sent(device.node_id, device.incarnation, now)
        if attempt.owed:
            self._devices.given(device.node_id, device.incarnation, task.images, now)
        first = next(iter(attempt.first_asked), None)
        self.pilot.sent(
            attempt,
            end=self._placement.node(device),
            upper=None if first is None else self._placement.node(above[first.node_id]),
            images=task.images,
            now=now,
            fine_only=attempt.fine_only,
            planned=job.policy.scheme is Scheme.ADAPTIVE,
        )
        for node_id in (device.node_id, *(node.node_id for node in attempt.first_asked[:1])):
            self._devices.charge(node_id, task.images, now)
        for node in attempt.first_asked:
            self._devices.sent(node.node_id, attempt.incarnations[node.node_id], now)
        self._choice.changed(device.node_id)
        OUTSTANDING.labels(device.node_id).set(self.outstanding(device.node_id))
        assert self._group is not None, "the dispatcher is not running"
        self._io[attempt] = self._group.create_task(self._live(attempt), name=f"attempt {job.task_id(task)}")

    async def _live(self, attempt: Attempt) -> None:
        """The I/O of an attempt."""
        job, task = attempt.job, attempt.task
        error: Exception | None = None
        limit = self._limits[attempt] = asyncio.timeout_at(attempt.until)
        try:
            async with limit:
                if attempt.phase is Phase.ACKNOWLEDGING:
                    # Eq. 9 of the paper: a device that does not acknowledge costs `acknowledge_s`.
                    url, budget_s = attempt.device.registration.url, self._settings.acknowledge_s
                    await self._transport.acknowledged(attempt.node_id, url, budget_s=budget_s)
                    self._handle(events.Acknowledged(attempt, self._clock()))
                    self.wake()
                request, budget_s = self._request(attempt), attempt.deadline - attempt.started
                async with contextlib.aclosing(self._transport.send(request, budget_s=budget_s)) as lines:
                    async for event, line in lines:
                        now = self._clock()
                        self._devices.heard(attempt.node_id, attempt.device.incarnation, now)
                        self._handle(events.LineCame(attempt, event, line, now))
                        if attempt.phase is Phase.ENDED:
                            return
        except TimeoutError:
            self._handle(events.TimeUp(attempt, self._clock()))
            return
        except TerraceError as exc:
            error = exc
        except Exception as exc:
            # One task must not take down all jobs: the error is logged, and the task has attempts left.
            _log.exception("unexpected error in an attempt", extra={"task": job.task_id(task)})
            error = exc
        finally:
            self._limits.pop(attempt, None)
            self._io.pop(attempt, None)
        self._handle(events.Ended(attempt, error, self._clock()))

    def _request(self, attempt: Attempt) -> TaskRequest:
        job, task, registration = attempt.job, attempt.task, attempt.device.registration
        return TaskRequest(
            task_id=job.task_id(task),
            request_id=job.request_id(task),
            trace=attempt.span.trace,
            node_id=attempt.node_id,
            url=registration.url,
            model=registration.models[0].name,
            sha256=registration.models[0].sha256,
            images=job.images[task.first_image : task.first_image + task.images],
            upstreams=attempt.upstreams,
            coarse_classes=self._coarse_classes,
            fine_classes=self._fine_classes,
            stages=attempt.stages,
            coarse_known=attempt.fine_only,
            damaged=task.damaged,
            interactive=job.interactive,
            key=registration.key,
        )

    # --- events and effects ---------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        """Let `attempt_state` decide what follows, and do it. What an effect brings about is handled after it."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    self._states.handle(event)
                except Exception as exc:
                    self._fail_job_of(event, exc)
                for effect in self._states.effects:
                    self._perform(effect, event.now)
                self._states.effects.clear()  # they hold jobs
        finally:
            self._handling = False
        self._wake.set()

    def _fail_job_of(self, event: events.Event, exc: Exception) -> None:
        """A bug in deciding what follows must not take down the other jobs."""
        attempt: Attempt | None = getattr(event, "attempt", None)
        job: ActiveJob | None = attempt.job if attempt is not None else getattr(event, "job", None)
        if job is None or job.ending:
            raise exc
        _log.exception("unexpected error after an attempt", extra={"job": job.job_id})
        self._end(job, "failed", f"internal error: {exc!r}")

    def _perform(self, effect: events.Effect, now: float) -> None:  # one case for each effect
        match effect:
            case events.Learn(attempt, event):
                self._learn(attempt, event, now)
            case events.Released(attempt, answered):
                device = attempt.device
                self._devices.settled(device.node_id, device.incarnation, attempt.task.images, now, answered=answered)
                self._choice.changed(device.node_id)
            case events.Deliver(job, answer):
                job.recipient.answer(answer)
                self.record.answered(answer)
            case events.Closed(job, task, outcome):
                self._on_closed(job, task, outcome, now)
            case events.Report(attempt, outcome, reason):
                self._on_report(attempt, outcome, reason, now)
            case events.WaitUntil(attempt, at):
                # One that has just expired cannot be moved any more: `TimeUp` follows.
                if (limit := self._limits.get(attempt)) is not None and not limit.expired():
                    limit.reschedule(at)
            case events.Finished(attempt):
                # Removed here: an asyncio task that is cancelled before its first step removes nothing.
                task_io = self._io.pop(attempt, None)
                if task_io is not None and task_io is not asyncio.current_task():
                    task_io.cancel()
                self.pilot.ended(attempt)
                OUTSTANDING.labels(attempt.node_id).set(self.outstanding(attempt.node_id))
                for node_id in attempt.nodes:
                    self._forget_if_gone(node_id)
                self._choice.changed(attempt.node_id)
                self._note_news(attempt.job)
            case events.TakeBack(job, answer):
                job.recipient.withdrawn(answer)
            case events.FailJob(job, reason):
                if not job.ending:
                    self._end(job, "failed", reason)
            case events.AnsweredRightly(node_id, incarnation):
                self._devices.answered_rightly(node_id, incarnation, now)
            case events.AnsweredWrongly(node_id, incarnation, reason, counts):
                self._devices.answered_wrongly(node_id, incarnation, reason, now, counts=counts)
                asyncio.get_running_loop().call_later(self._settings.set_aside_s + _TICK_S, self.wake)
            case events.Pardoned(node_id, incarnation):
                self._devices.pardon(node_id, incarnation, now)
            case events.Accused(node_id, incarnation, reason):
                self._devices.accuse(node_id, incarnation, reason, now)
            case events.SetAside(node_id, incarnation, until):
                self._devices.set_aside(node_id, incarnation, until, now)

    def _note_news(self, job: ActiveJob) -> None:
        """A job of which no task is on its way, or one that lets tasks wait for each other, is looked at."""
        self._news = self._news or job.waits or bool(job.held)

    def _on_closed(self, job: ActiveJob, task: ActiveTask, outcome: str, now: float) -> None:
        TASKS.labels(outcome).inc()
        self._note_news(job)
        if _log.isEnabledFor(logging.INFO):
            what = {"job": job.job_id, "task": task.index, "outcome": outcome, "ms": round(elapsed_ms(task, now), 3)}
            ids = {"request_id": job.request_id(task), "trace_id": job.trace_id}
            _log.info("task done", extra={**what, **ids})

    def _on_report(self, attempt: Attempt, outcome: str, reason: str, now: float) -> None:
        ATTEMPTS.labels(outcome).inc()
        job, seconds = attempt.job, now - attempt.started
        self.record.attempted(outcome, attempt.node_id, job.job_id, reason)
        job.recipient.attempted(attempt.report(outcome, reason, attempt.started_at + seconds))
        attempt.span.says(task=job.task_id(attempt.task), node=attempt.node_id, outcome=outcome)
        attempt.span.end(reason if outcome in FAILED_OUTCOMES else "")
        if outcome in ("unreachable", "lost", "error"):
            what = {"task": job.task_id(attempt.task), "failed_attempts": attempt.task.failed_attempts, "why": reason}
            _log.warning("an attempt failed", extra=what)
        if outcome == "ok" and self._settings.hedge and not job.ending:
            devices = self._durations.setdefault(job.job_id, {})
            devices.setdefault(attempt.node_id, deque(maxlen=_DURATIONS)).append(seconds)

    def _learn(self, attempt: Attempt, event: object, now: float) -> None:
        """Tell the pilot what an answer says of the nodes' speed, and count what went on from node to node."""
        # Whatever a node says, nothing of it took longer than the scheduler has waited.
        most_s = now - attempt.started
        match event:
            case CoarseEvent():
                self.record.worked(attempt.node_id, attempt.task.images)
                images = event.batch_images or attempt.task.images
                self.pilot.coarse(attempt, _timing(event.queue_ms, event.compute_ms, images, most_s), now)
            case FineEvent():
                self.record.passed(attempt.node_id, event.node_id, attempt.task.images)
                self._learn_upstream(attempt, event, most_s, now)
            case RoutedEvent():
                # The images that went on from the first tier: their number was not known before.
                if event.answers and not attempt.job.interactive:  # of requests no end is told
                    self.record.escalates(attempt.job.job_id, now)
                for answer in event.answers:
                    self.record.passed(attempt.node_id, answer.node_id, len(answer.indices))
                sent = asks(event)
                for node in attempt.first_asked[1:]:
                    self._devices.charge(node.node_id, sent.get(node.tier, 0), now)
                for answer in event.answers[:1]:
                    self._learn_upstream(attempt, answer, most_s, now)

    def _learn_upstream(self, attempt: Attempt, answer: UpstreamAnswer, most_s: float, now: float) -> None:
        round_trip_s, said = min(answer.round_trip_ms / 1000, most_s), answer.timing
        timing = None if said is None else _timing(said.queue_ms, said.compute_ms, said.batch_images, round_trip_s)
        self.pilot.fine(attempt, answer.node_id, timing, round_trip_s, now)

    # --- endings --------------------------------------------------------------------------------------------------

    def _end(self, job: ActiveJob, ending: str | None, reason: str) -> None:
        """Stop all work on a job and let its recipient conclude."""
        job.ending = True
        self._durations.pop(job.job_id, None)
        self._handle(events.JobEnded(job, self._clock()))
        assert self._group is not None, "the dispatcher is not running"
        self._group.create_task(self._conclude(job, ending, reason), name=f"end of {job.job_id}")

    async def _conclude(self, job: ActiveJob, ending: str | None, reason: str) -> None:
        await job.recipient.ended(ending, reason)
        job.span.says(job=job.job_id, images=len(job.images), scheme=job.policy.scheme)
        job.span.end(reason)
        del self._jobs[job.job_id]
        self._choice.forget_job(job.job_id)
        self.wake()


def _timing(queue_ms: float, compute_ms: float, images: int, most_s: float) -> Timing:
    return Timing(queue_s=min(queue_ms / 1000, most_s), compute_s=min(compute_ms / 1000, most_s), batch_images=images)
