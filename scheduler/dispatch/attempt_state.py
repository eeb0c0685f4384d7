"""The state machine of attempts and their tasks. Pure: events in, effects out; `loop` performs the effects.

    acknowledging -> coarse -> fine -> answered -> ended

    acknowledging   with recovery `reassign`: the device has not said yet that it is there
    coarse          the device owes its coarse answer
    fine            the device waits for an upstream node
    answered        nothing more is expected; the stream has a moment to end
    ended           over; later events change nothing

An attempt ends in one of these outcomes, and this follows for its task:

    ok           all that was asked for has come
    late         it failed when the task was closed already
    cancelled    another attempt was quicker, the job ended, or the coarse answer it relied on was withdrawn
    refused      the device said "not now" (503): again elsewhere, and no attempt counts as failed
    unreachable  the connection was refused or broke: again elsewhere
    lost         the device died, left or is stuck: again elsewhere
    error        a wrong answer, or no coarse one in time: again elsewhere; see `core.breaker`
    fallback     the upstream nodes failed: the fine stage alone is tried again, or the coarse answer stands
    rerouted     the upstream node left or has become slow: the fine stage alone goes to another one at once
    deadline     no final answer in the task's time

A failed attempt is made again after a random wait, when the job's retry budget has a token for it. With recovery `none`
it ends the job; with `reassign` the task goes to the end of the line. A task that several nodes died with is
quarantined, see `Suspicion`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, KeysView, Sequence

from scheduler.core.escalation import without
from scheduler.core.fleet import DeviceList
from scheduler.core.work import ActiveJob, ActiveTask, Attempt, Phase
from scheduler.dispatch import events
from scheduler.dispatch.poison import Suspicion
from scheduler.dispatch.transport import may_have_held
from scheduler.settings import SchedulerSettings
from tierkit.errors import (
    DeadlineExceeded,
    InvalidAnswer,
    Overloaded,
    TerraceError,
    UpstreamError,
    UpstreamUnavailable,
)
from tierkit.pacing import backoff_s
from tierkit.types import Recovery, Scheme, UpstreamLoss
from tierkit.wire.events import (
    CoarseEvent,
    ErrorEvent,
    FallbackEvent,
    FallbackReason,
    FineEvent,
    RoutedEvent,
    StageLoss,
    TaskEvent,
    UpstreamAnswer,
    written,
)

__all__ = ["AttemptStates"]

_log = logging.getLogger(__name__)

_RETRY_S, _RETRY_CAP_S = 0.05, 2.0
_UPSTREAM_WAIT_S, _UPSTREAM_WAIT_CAP_S = 0.2, 5.0
"""Longest wait after the first failure, and after many."""
_AFTER_FINAL_S = 1.0
"""How long an answer stream may go on after its final line before the connection is given up."""
_EARLY_S = 0.005
"""How much too early a timer may fire."""
_MOST_MOVES = 3
"""How often a task is taken from an upstream node that is alive."""
_MOST_SAID = 300
"""Characters of an upstream node's wrong answer that the device list shows."""


class AttemptStates:
    """All attempts that are under way.

    Args:
        settings: deadlines and attempts.
        devices: the device list; read only.
        more_above: whether some upstream node could now give a job what this event says is missing.
        chance: of the jitter in waits.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        devices: DeviceList,
        more_above: Callable[[ActiveJob, FallbackEvent | RoutedEvent, float], bool],
        chance: random.Random,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._more_above = more_above
        self._chance = chance
        self._suspicion = Suspicion(devices)
        self.effects: list[events.Effect] = []
        """Of the last event."""
        self.running: dict[Attempt, None] = {}
        """In the order in which they began."""
        self._at: dict[str, set[Attempt]] = {}
        """By node: the end device, and the upstream nodes that are asked first."""

    def at(self, node_id: str) -> Iterator[Attempt]:
        """The attempts on an end device."""
        return (attempt for attempt in self._at.get(node_id, ()) if attempt.node_id == node_id)

    @property
    def busy(self) -> KeysView[str]:
        """Nodes with attempts."""
        return self._at.keys()

    def deadline_of(self, job: ActiveJob, task: ActiveTask, now: float) -> float:
        """When an attempt that begins now is given up."""
        deadline = job.deadline_of(task, now)
        if job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            # The task may wait for as long as the job; one silent upstream node may not hold it that long.
            deadline = min(deadline, now + self._settings.task_deadline_s)
        return deadline

    def start(self, attempt: Attempt) -> None:
        """An attempt begins."""
        job, task = attempt.job, attempt.task
        task.attempts += 1
        attempt.number = task.attempts
        task.running.append(attempt)
        if job.policy.recovery is Recovery.REASSIGN:
            attempt.phase = Phase.ACKNOWLEDGING
            job.sending = True
        elif attempt.fine_only:
            attempt.phase = Phase.FINE
        first_s = attempt.started + self._settings.coarse_timeout_s
        attempt.until = attempt.deadline if attempt.fine_only else min(attempt.deadline, first_s)
        self.running[attempt] = None
        for node_id in attempt.nodes:
            self._at.setdefault(node_id, set()).add(attempt)

    def handle(self, event: events.Event) -> list[events.Effect]:
        """Take an event; returns what shall be done, in order."""
        self.effects = []
        match event:
            case events.LineCame(attempt, said, line, now):
                self._line(attempt, said, line, now)
            case events.Ended(attempt, error, now):
                self._conclude(attempt, error, now)
            case events.Acknowledged(attempt):
                if attempt.phase is Phase.ACKNOWLEDGING:
                    attempt.phase = Phase.FINE if attempt.fine_only else Phase.COARSE
                    attempt.job.sending = False
            case events.TimeUp(attempt, now):
                self._time_up(attempt, now)
            case events.NodeChanged(node_id, now):
                self._node_changed(node_id, now)
            case events.Move(attempt, why, now):
                attempt.task.moves += 1
                self._stop(attempt, now, why, rerouted=attempt.upstreams[0].node_id, slow=True)
            case events.JobEnded(job, now):
                self._suspicion.forget_job(job)
                for attempt in [attempt for task in job.open.values() for attempt in task.running]:
                    self._drop(attempt, "the job has ended")
            case events.GiveUp(job, task, reason, detail, now):
                self._give_up(job, task, reason, detail, now)
            case events.NoUpstream(job, task, now):
                self._no_upstream(job, task, now)
        return self.effects

    def movable(self, job: ActiveJob) -> list[Attempt]:
        """Attempts of a job that only wait for an upstream node, and may be moved to another one."""
        return [
            attempt
            for attempt in self.running
            if attempt.job is job
            and attempt.phase is Phase.FINE
            and not attempt.hedge
            and len(attempt.task.running) == 1
            and attempt.task.moves < _MOST_MOVES
        ]

    # --- steps of an attempt --------------------------------------------------------------------------------------

    def _line(self, attempt: Attempt, event: TaskEvent, line: str, now: float) -> None:
        if attempt.phase is Phase.ENDED:
            return
        task = attempt.task
        self._release(attempt, answered=True)
        self.effects.append(events.Learn(attempt, event))
        self._judge_upstreams(attempt, event)
        was_open, had_coarse = not task.closed, task.has_coarse
        self._take(attempt, event, line, now)
        attempt.gave_coarse |= task.has_coarse and not had_coarse
        if task.closed:
            attempt.phase = Phase.ANSWERED
            if was_open:
                self._report(attempt, *_what_came(event))
            self._drop_others(attempt)
        elif attempt.leaving and attempt.phase is not Phase.ANSWERED:
            self._stop(attempt, now, f"{attempt.leaving} left the device list", rerouted=attempt.leaving)
            return
        attempt.until = now + _AFTER_FINAL_S if attempt.phase is Phase.ANSWERED else attempt.deadline
        self.effects.append(events.WaitUntil(attempt, attempt.until))

    def _take(self, attempt: Attempt, event: TaskEvent, line: str, now: float) -> None:
        """Apply an answer to its task; a late or repeated answer is dropped. The phase becomes `answered` if the task
        lacks a fine answer that is still to be tried for."""
        job, task, policy = attempt.job, attempt.task, attempt.job.policy
        if task.closed or job.ending:
            return
        may_retry = policy.on_upstream_loss is UpstreamLoss.WAIT or policy.recovery is not Recovery.NONE
        match event:
            case CoarseEvent():
                task.deaths.clear()  # a node that answers has not died of it
                if not task.has_coarse:
                    task.knows(event)
                    task.coarse = job.answer(task, "coarse", "coarse", event, line, now)
                    self.effects.append(events.Deliver(job, task.coarse))
                if policy.scheme is Scheme.END:
                    self._close(job, task, "coarse")
                elif attempt.too_late:
                    self._give_up(job, task, "deadline", "no upstream node would have answered in time", now)
                elif not attempt.upstreams:
                    attempt.phase = Phase.ANSWERED
                    self._no_upstream(job, task, now)
            case FineEvent():
                task.deaths.clear()
                self._finish_task(job, task, "fine", event, line, now)
            case FallbackEvent() if may_retry and event.reason not in ("deadline", "damaged"):
                attempt.fallback, attempt.phase = (event, line), Phase.ANSWERED
            case RoutedEvent() if may_retry and any(loss.reason != "deadline" for loss in without(event).values()):
                task.partial = attempt.fallback = event, line
                attempt.phase = Phase.ANSWERED
            case FallbackEvent() | RoutedEvent():
                self._stand(job, task, event, line, now)

    def _time_up(self, attempt: Attempt, now: float) -> None:
        job, task = attempt.job, attempt.task
        if attempt.phase in (Phase.ANSWERED, Phase.ENDED):
            self._conclude(attempt, None, now)
        elif now < attempt.deadline - _EARLY_S:
            first_s = self._settings.coarse_timeout_s
            error = UpstreamError(f"{attempt.node_id} gave no coarse answer within {first_s:g} s")
            self._conclude(attempt, error, now)
        elif attempt.deadline < job.deadline_of(task, now):
            why = f"no final answer within {self._settings.task_deadline_s:g} s; the task goes on waiting"
            self._finish(attempt)
            self._report(attempt, "deadline", why)
            self._wait_for_upstream(job, task, now)
        else:
            why = f"no final answer within {job.policy.task_deadline_s:g} s"
            self._give_up(job, task, "deadline", why, now)
            self._report(attempt, "deadline", why)
            self._drop_others(attempt)
            self._finish(attempt)

    def _node_changed(self, node_id: str, now: float) -> None:
        self._suspicion.note_death(node_id, self._at.get(node_id, ()), now)
        for attempt in list(self._at.get(node_id, ())):
            if attempt.phase is Phase.ENDED or attempt.task.closed:
                continue
            if attempt.node_id == node_id:
                incarnation = attempt.device.incarnation
                view = self._devices.view_of(node_id, incarnation, now)
                if view is None or not view.keeps_tasks:
                    why = f"{node_id} left the device list" if view is None else f"{node_id}: {view.reason}"
                    self._stop(attempt, now, why, lost=True)
            elif not (attempt.leaving or self._devices.keeps_tasks(node_id, now)):
                if attempt.owed:
                    attempt.leaving = node_id  # the coarse answer comes first
                else:
                    self._stop(attempt, now, f"{node_id} left the device list", rerouted=node_id)
        for job, task in self._suspicion.judge(node_id, now):
            self._blame(job, task, node_id, now)

    def _stop(
        self, attempt: Attempt, now: float, why: str, *, lost: bool = False, rerouted: str = "", slow: bool = False
    ) -> None:
        """The scheduler gives up an attempt, and its task goes elsewhere."""
        if attempt.phase is not Phase.ENDED:
            self._conclude(attempt, UpstreamUnavailable(why), now, lost=lost, rerouted=rerouted, slow=slow)

    def _drop(self, attempt: Attempt, why: str) -> None:
        """Nobody waits for the attempt any more."""
        if attempt.phase is not Phase.ENDED:
            self._finish(attempt)
            self._report(attempt, "cancelled", why)

    def _drop_others(self, winner: Attempt) -> None:
        for attempt in [attempt for attempt in winner.task.running if attempt is not winner]:
            self._drop(attempt, "answered by another attempt")

    def _release(self, attempt: Attempt, *, answered: bool) -> None:
        """The device owes nothing more."""
        if attempt.owed:
            self.effects.append(events.Released(attempt, answered))
        if attempt.phase is Phase.ACKNOWLEDGING:
            attempt.job.sending = False
        if attempt.phase in (Phase.ACKNOWLEDGING, Phase.COARSE):
            attempt.phase = Phase.FINE

    def _finish(self, attempt: Attempt) -> None:
        """The attempt is over."""
        self._release(attempt, answered=False)
        attempt.phase = Phase.ENDED
        attempt.task.running.remove(attempt)
        del self.running[attempt]
        for node_id in attempt.nodes:
            there = self._at[node_id]
            there.discard(attempt)
            if not there:
                del self._at[node_id]
        self.effects.append(events.Finished(attempt))

    def _report(self, attempt: Attempt, outcome: str, reason: str) -> None:
        if not attempt.reported:
            attempt.reported = True
            self.effects.append(events.Report(attempt, outcome, reason))

    # --- what follows an attempt ----------------------------------------------------------------------------------

    def _conclude(
        self,
        attempt: Attempt,
        error: Exception | None,
        now: float,
        *,
        lost: bool = False,
        rerouted: str = "",
        slow: bool = False,
    ) -> None:
        """An attempt is over.

        Args:
            lost: its device is gone.
            rerouted: the upstream node that was taken from it.
            slow: that node is alive, but slow.
        """
        if attempt.phase is Phase.ENDED:
            return
        job, task, lacks_fine = attempt.job, attempt.task, attempt.lacks_fine
        self._finish(attempt)
        reason = ""
        if error is None:
            self._right(attempt, task.wrong, attempt.node_id, attempt.device.incarnation)
        else:
            reason = str(error) if isinstance(error, TerraceError) else f"internal error: {error!r}"
        rerouted = rerouted or attempt.leaving
        if task.closed or job.ending:
            outcome = "ok" if error is None else "late"
        elif rerouted and task.has_coarse and not lost:
            outcome = "rerouted"
            if not slow:
                self._blame(job, task, rerouted, now)
            self._again(job, task, now)
        elif isinstance(error, Overloaded):
            # A refusal at the door is no attempt: the device does not know what is in the task.
            outcome = "refused"
            wait_s = error.retry_after_s * self._chance.uniform(1.0, 1.5)
            # It may be for want of the task's time alone, and then it holds for no other task.
            wait_s = min(wait_s, attempt.deadline - attempt.started)
            self.effects.append(events.SetAside(attempt.node_id, attempt.device.incarnation, now + wait_s))
            self._again(job, task, now)
        elif lacks_fine:
            outcome, reason = _what_came(attempt.fallback[0] if attempt.fallback else None)
            self._without_fine(attempt, now)
        else:
            outcome = self._failed(attempt, error, reason, now, lost=lost)
        self._report(attempt, outcome, reason)

    def _failed(self, attempt: Attempt, error: Exception | None, reason: str, now: float, *, lost: bool) -> str:
        """The end device has failed: try again elsewhere, give the task up, or end the job. Returns the outcome."""
        job, task, incarnation = attempt.job, attempt.task, attempt.device.incarnation
        task.tried.add(attempt.node_id)
        outcome = "error"
        if lost:
            outcome = "lost"
            if not task.has_coarse:  # with the coarse answer there, it only passes the images on
                self._blame(job, task, attempt.node_id, now)
        elif isinstance(error, UpstreamUnavailable):
            outcome = "unreachable"
            if may_have_held(error) and not task.has_coarse:
                self._suspicion.suspect(attempt.node_id, incarnation, job, task)
            self.effects.append(events.Accused(attempt.node_id, incarnation, reason))
        else:
            if isinstance(error, InvalidAnswer) and attempt.gave_coarse:
                self._withdraw(attempt)
            task.errors += 1
            time_s = attempt.deadline - attempt.started
            hurried = isinstance(error, DeadlineExceeded) and time_s < self._settings.coarse_timeout_s
            # What the task had no time for, or is the scheduler's own fault, says nothing of the device.
            if isinstance(error, TerraceError) and not hurried:
                self._wrong(task.wrong, attempt.node_id, incarnation, reason)
        if attempt.trial and task.trials < self._settings.max_attempts:
            task.trials += 1  # it tried the device, not the task
        else:
            task.failed_attempts += 1
        recovery = job.policy.recovery
        # Going round over the devices of the beginning, dead ones included, may come past them any number of times.
        counted = task.errors if recovery is Recovery.REASSIGN else task.failed_attempts
        waits = task.has_coarse and job.policy.on_upstream_loss is UpstreamLoss.WAIT
        if task.closed:
            pass  # quarantined
        elif recovery is Recovery.NONE:
            why = f"task {task.index} failed on {attempt.node_id} (recovery=none): {reason}"
            self.effects.append(events.FailJob(job, why))
        elif counted < self._settings.max_attempts or waits:
            self._retry(attempt, now)
        elif _is_refusal(error) and attempt.upstreams and not (task.has_coarse or task.refused):
            task.refused = reason
            self._retry(attempt, now)
        elif not task.running:
            detail = f"given up after {task.failed_attempts + task.trials} attempts; the last: {reason}"
            self._give_up(job, task, "upstream_unavailable", detail, now)
        return outcome

    def _without_fine(self, attempt: Attempt, now: float) -> None:
        """The coarse answer is there, and no upstream node has given the fine one."""
        job, task = attempt.job, attempt.task
        event, line = attempt.fallback or (None, "")
        tried = {node_id for loss in _losses(event) for node_id in loss.tried}
        task.tried |= tried
        if event is not None:
            task.tried.add(attempt.node_id)  # it may be its own way to them that is broken
        for node_id in tried:
            incarnation = attempt.incarnations.get(node_id, "")
            if self._devices.keeps_tasks(node_id, now):
                self._suspicion.suspect(node_id, incarnation, job, task)
            else:
                self._blame(job, task, node_id, now)
        if task.closed:
            pass  # quarantined by that
        elif job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            self._wait_for_upstream(job, task, now)
        elif event is not None:
            task.failed_attempts += 1
            if task.failed_attempts < self._settings.max_attempts and self._more_above(job, event, now):
                self._retry(attempt, now)
            elif not task.running:
                self._stand(job, task, event, line, now)

    def _wait_for_upstream(self, job: ActiveJob, task: ActiveTask, now: float) -> None:
        task.upstream_waits += 1
        chance = self._chance.random()
        wait_s = backoff_s(task.upstream_waits, first_s=_UPSTREAM_WAIT_S, cap_s=_UPSTREAM_WAIT_CAP_S, chance=chance)
        self._again(job, task, now + wait_s)

    def _retry(self, attempt: Attempt, now: float) -> None:
        job, task = attempt.job, attempt.task
        if task.running:
            return  # the other attempt goes on
        failures, chance = task.failed_attempts + task.trials, self._chance.random()
        wait_s = backoff_s(failures, first_s=_RETRY_S, cap_s=_RETRY_CAP_S, chance=chance)
        paid_in_s = 0.0
        if job.policy.recovery is Recovery.MONITOR:
            paid_in_s = job.retries.take(now)
        elif now - attempt.started >= self._settings.acknowledge_s:
            wait_s = 0.0  # the paper knows no pause: what a silent device costs is the time to notice it
        self._again(job, task, now + max(paid_in_s, wait_s))

    def _again(self, job: ActiveJob, task: ActiveTask, at: float) -> None:
        if not (task.running or task.closed or job.ending):
            job.delay(task, at)

    def _withdraw(self, attempt: Attempt) -> None:
        """Take back the coarse part of an invalid answer: it is computed again; attempts that rely on it stop."""
        job, task = attempt.job, attempt.task
        if task.coarse is not None and not task.closed:
            self.effects.append(events.TakeBack(job, task.coarse))
            task.has_coarse, task.coarse, task.unsure, task.partial = False, None, None, None
            for other in [other for other in task.running if not other.owed]:
                self._drop(other, "the coarse answer was withdrawn")

    def _blame(self, job: ActiveJob, task: ActiveTask, node_id: str, now: float) -> None:
        """A node died with the task on it."""
        if detail := self._suspicion.poison(job, task, node_id, now):
            _log.error("a task is quarantined", extra={"task": job.task_id(task), "why": detail})
            self._give_up(job, task, "quarantined", detail, now)
            for attempt in list(task.running):
                self._drop(attempt, "the task is quarantined")

    # --- what answers say of nodes --------------------------------------------------------------------------------

    def _judge_upstreams(self, attempt: Attempt, event: TaskEvent) -> None:
        """Hold what an end device says of the upstream nodes' answers for or against those that it was told to ask."""
        parts: Sequence[UpstreamAnswer | FallbackEvent | StageLoss] = ()
        match event:
            case FineEvent() | FallbackEvent():
                parts = (event,)
            case RoutedEvent():
                parts = (*event.answers, *event.losses)
        blamed = attempt.task.wrong_above
        for part in parts:
            for answer in part.wrong:
                if incarnation := attempt.incarnations.get(answer.node_id):
                    self._wrong(blamed, answer.node_id, incarnation, answer.detail[:_MOST_SAID])
            if isinstance(part, UpstreamAnswer):
                self._right(attempt, blamed, part.node_id, attempt.incarnations.get(part.node_id, ""))

    def _wrong(self, blamed: dict[str, str], node_id: str, incarnation: str, reason: str) -> None:
        """A node has answered a task wrongly, or not in time. The first one to do so is blamed; when a second one does,
        it is the task's fault as much, until another node can do it: `_right`.

        Args:
            blamed: those of the same kind that could not do this task so far, with their incarnations.
        """
        first = not blamed
        if len(blamed) == 1 and node_id not in blamed:
            self.effects += [events.Pardoned(other, its) for other, its in blamed.items()]
        blamed[node_id] = incarnation
        self.effects.append(events.AnsweredWrongly(node_id, incarnation, reason, first))

    def _right(self, attempt: Attempt, blamed: dict[str, str], node_id: str, incarnation: str) -> None:
        """A node has answered as it should, so those that could not were at fault themselves."""
        self.effects.append(events.AnsweredRightly(node_id, incarnation))
        if len(blamed) > 1:  # a single one has been blamed already
            reason = f"a task that {node_id} could do"
            others = {other: its for other, its in blamed.items() if other != node_id}
            self.effects += [events.AnsweredWrongly(other, its, reason, True) for other, its in others.items()]
        blamed.clear()

    # --- answers of a task ----------------------------------------------------------------------------------------

    def _no_upstream(self, job: ActiveJob, task: ActiveTask, now: float) -> None:
        """The task waits for an upstream node, or its coarse answer stands."""
        if task.closed or job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            return
        if task.refused:
            detail = f"end devices took the task only without upstream nodes: {task.refused}"
            self._fall_back(job, task, "upstream_unavailable", detail, now)
        else:
            detail = f"no upstream node of scheme {job.policy.scheme} takes tasks of this end device"
            self._fall_back(job, task, "no_upstream", detail, now)

    def _give_up(self, job: ActiveJob, task: ActiveTask, reason: FallbackReason, detail: str, now: float) -> None:
        """The coarse answer stands, or the task has failed."""
        if task.closed:
            return
        if task.has_coarse:
            self._fall_back(job, task, reason, detail, now)
            return
        named = reason in ("deadline", "quarantined")
        event = ErrorEvent(task_id=job.task_id(task), error=f"{reason}: {detail}" if named else detail)
        self._finish_task(job, task, "failed", event, written(event).decode(), now)

    def _fall_back(self, job: ActiveJob, task: ActiveTask, reason: FallbackReason, detail: str, now: float) -> None:
        if task.partial is not None and reason != "quarantined":
            self._stand(job, task, *task.partial, now)
        else:
            event = FallbackEvent(task_id=job.task_id(task), reason=reason, detail=detail, tried=())
            self._stand(job, task, event, written(event).decode(), now)

    def _stand(
        self, job: ActiveJob, task: ActiveTask, event: FallbackEvent | RoutedEvent, line: str, now: float
    ) -> None:
        """What there is is the answer: the coarse one, or what came of the images one by one."""
        kind = "fine" if isinstance(event, RoutedEvent) and (event.answers or not event.losses) else "fallback"
        self._finish_task(job, task, kind, event, line, now)

    def _finish_task(
        self, job: ActiveJob, task: ActiveTask, kind: str, event: TaskEvent, line: str, now: float
    ) -> None:
        self._close(job, task, kind)
        self.effects.append(events.Deliver(job, job.answer(task, "final", kind, event, line, now)))

    def _close(self, job: ActiveJob, task: ActiveTask, outcome: str) -> None:
        job.close(task)
        self.effects.append(events.Closed(job, task, outcome))


def _is_refusal(error: Exception | None) -> bool:
    """True if the device answered with an error status: it may be the route that it refuses."""
    return isinstance(error, UpstreamError) and error.status_code is not None


def _losses(event: TaskEvent | None) -> tuple[FallbackEvent | StageLoss, ...]:
    """What is missing of the finer answers."""
    if isinstance(event, RoutedEvent):
        return tuple(without(event).values())
    return (event,) if isinstance(event, FallbackEvent) else ()


def _what_came(event: TaskEvent | None) -> tuple[str, str]:
    """Outcome and reason of an attempt whose last line was this."""
    for loss in _losses(event):
        return ("deadline" if loss.reason == "deadline" else "fallback"), f"{loss.reason}: {loss.detail}"
    return "ok", ""
