"""The state machine of dispatch: `step` takes an event, changes the state, and returns effects.

Pure: no I/O, no clock, no random numbers. The same events give the same effects again. The table of phases and events
is in docs/explanation/architecture.md.

    acknowledging -> coarse -> fine -> answered -> ended

    acknowledging: with recovery `reassign`, the device has not confirmed the task yet
    coarse: the device owes its coarse answer
    fine: the device waits for an upstream node
    answered: nothing more is expected; the stream has a moment to end
    ended: over; later events change nothing

An attempt ends in one of these outcomes, and this follows for its task:

    ok: all requested answers have come
    late: it failed when the task was closed already
    cancelled: another attempt was quicker, the job ended, or the coarse answer it relied on was withdrawn
    refused: the device said "not now" (503): again elsewhere, and no attempt counts as failed
    unreachable: the connection was refused or broke: again elsewhere
    lost: the device died, left or is stuck: again elsewhere
    error: a wrong answer, or no coarse one in time: again elsewhere; see `core.breaker`
    fallback: the upstream nodes failed: only the fine stage is tried again, or the coarse answer is final
    rerouted: the upstream node left or has become slow: only the fine stage goes to another one, at once
    deadline: no final answer in the task's time

A failed attempt is made again after a random wait, when the job's retry budget has a token for it. With recovery `none`
it ends the job; with `reassign` the task goes to the end of the line. A task that several nodes died with is
quarantined, see `core.poison`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from scheduler.core import events
from scheduler.core.device import Device
from scheduler.core.escalation import asks, without
from scheduler.core.events import Failure, FailureKind
from scheduler.core.fleet import Ledger
from scheduler.core.limits import TaskLimits, retry_wait_s, task_deadline, upstream_wait_s
from scheduler.core.poison import Suspicion
from scheduler.core.policy import JobPolicy
from scheduler.core.work import Attempt, AttemptFacts, Blame, Coarse, OpenJob, OpenTask, Phase, Tries
from tierkit.errors import TerraceError
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

__all__ = ["State", "may_move", "step"]

_log = logging.getLogger(__name__)

_AFTER_FINAL_S = 1.0
"""Seconds that an answer stream may last after its final line before the connection is given up."""
_EARLY_S = 0.005
"""Seconds by which a timer may fire too early."""
_MOST_MOVES = 3
"""Number of times that a task is taken from an upstream node that is alive."""
_MOST_SAID = 300
"""Characters of an upstream node's wrong answer that the device list shows."""
_GOLDEN = 0.6180339887498949
"""The waits that follow one event are spread by multiples of the golden ratio: as even as chance, from one number."""


@dataclass(slots=True, kw_only=True)
class State:
    """The state of dispatch. Only `step` changes it."""

    limits: TaskLimits
    ledger: Ledger
    jobs: dict[str, OpenJob] = field(default_factory=dict)
    suspicion: Suspicion = field(default_factory=Suspicion)

    def find(self, job_id: str, index: int) -> tuple[OpenJob, OpenTask] | None:
        """A task without a final answer, and its job."""
        job = self.jobs.get(job_id)
        task = None if job is None else job.open.get(index)
        return None if job is None or task is None else (job, task)


def step(state: State, event: events.Event) -> list[events.Effect]:
    """Take an event; returns the effects, in order.

    Raises:
        TerraceError: a node, or an operator, asks for what cannot be. Nothing has changed.
    """
    taken = _Step(state, event)
    try:
        taken.take(event.what)
        taken.follow_nodes()
    except Exception as exc:
        if isinstance(exc, TerraceError) and isinstance(event.what, events.MAY_BE_REFUSED):
            raise
        taken.fail_job_of(event.what, exc)
    return taken.effects


def may_move(attempt: Attempt) -> bool:
    """True if an attempt only waits for an upstream node, and its task may be moved to another one."""
    waits = attempt.phase is Phase.FINE and not attempt.facts.hedge
    return waits and len(attempt.task.running) == 1 and attempt.task.tries.moves < _MOST_MOVES


class _Step:
    """One event on its way through the state."""

    __slots__ = ("_attempt", "_jitter", "_ledger", "_limits", "_now", "_state", "_suspicion", "effects")

    def __init__(self, state: State, event: events.Event) -> None:
        self._state = state
        self._limits, self._ledger, self._suspicion = state.limits, state.ledger, state.suspicion
        self._now, self._jitter = event.now, event.jitter
        self._attempt: Attempt | None = None
        """The attempt that the event is about."""
        self.effects: list[events.Effect] = []

    def take(self, what: events.What) -> None:  # one case for each event
        ledger, now = self._ledger, self._now
        match what:
            # --- nodes
            case events.Beat(node_id, beat):
                ledger.heartbeat(node_id, beat, now)
            case events.Heard(node_id, incarnation):
                ledger.hear(node_id, incarnation, now)
            case events.Swept():
                ledger.sweep(now)
            case events.Probed(node_id, incarnation, outcome, began):
                ledger.probed(node_id, incarnation, outcome, began=began, now=now)
            case events.Registered(registration):
                ledger.move_out(registration, now)
                self.follow_nodes()  # what was sent to the old address is lost
                ledger.register(registration, now)
            case events.Unwatched(node_id, incarnation, error):
                ledger.note(node_id, incarnation, now, Device.give_up, error)
            case events.TurnedAway(node_id, why, claim, tier):
                ledger.refused(node_id, why, now, claim, tier=tier)
            case events.Intended(node_id, intent):
                ledger.intend(node_id, intent, now)
            case events.Barred(node_id, incarnation, networks):
                ledger.bar(node_id, incarnation, networks)
            case events.TookLeave(node_id, incarnation):
                ledger.leave(node_id, incarnation, now)
            case events.Forgotten(node_id):
                ledger.forget(node_id)
            case events.Restored(nodes, sites):
                ledger.restore(nodes, now, sites)
            case events.SiteIntended(site, intent):
                ledger.intend_site(site, intent)
            case events.SiteForgotten(site):
                ledger.forget_site(site)
            # --- jobs
            case events.JobAdded(facts, tasks, answered):
                added = self._state.jobs[facts.job_id] = OpenJob(facts, tasks, self._limits.retry_budget())
                added.answered = answered
            case events.JobDue(job_id, has_upstream):
                if (job := self._state.jobs.get(job_id)) is not None and not job.ending:
                    self._job_due(job, has_upstream=has_upstream)
            case events.JobStopped(job_id, state, reason):
                if (job := self._state.jobs.get(job_id)) is not None:
                    self._end_job(job, state, reason)
            case events.JobMoved(job_id, policy):
                if (job := self._state.jobs.get(job_id)) is not None and not job.ending:
                    self._move_job(job, policy)
            case events.JobGone(job_id):
                self._state.jobs.pop(job_id, None)
            case events.NotSent(job_id, index, too_late):
                if (found := self._state.find(job_id, index)) is not None:
                    self._not_sent(*found, too_late=too_late)
            # --- attempts
            case events.AttemptBegun(facts):
                if (found := self._state.find(facts.job_id, facts.task)) is not None:
                    self._sent(*found, facts)
            case events.LookedUp(facts, report, line, is_there):
                if (found := self._state.find(facts.job_id, facts.task)) is not None and not found[0].ending:
                    self._looked_up(*found, facts, report, line, is_there=is_there)
            case _:
                self._take_of_attempt(what)

    def _take_of_attempt(self, what: events.What) -> None:
        attempt = self._ledger.assigned.attempts.get(getattr(what, "attempt", -1))
        if attempt is None:
            return  # over: later events change nothing
        self._attempt = attempt
        match what:
            case events.LineCame(_, event, line):
                self._line(attempt, event, line)
            case events.Ended(_, failure):
                self._conclude(attempt, failure)
            case events.Acknowledged():
                if attempt.phase is Phase.ACKNOWLEDGING:
                    attempt.phase = Phase.FINE if attempt.facts.fine_only else Phase.COARSE
                    attempt.job.sending = False
            case events.TimeUp():
                self._time_up(attempt)
            case events.Move(_, why):
                attempt.task.tries.moves += 1
                self._stop(attempt, why, rerouted=attempt.facts.first_asked[0], slow=True)

    def follow_nodes(self) -> None:
        """Let the work follow what became of nodes. That may change others."""
        while changes := self._ledger.take_changes():
            for change in changes:
                self.effects.append(events.NodeChanged(change))
                self._node_changed(change.node_id)

    def fail_job_of(self, what: events.What, exc: Exception) -> None:
        """A bug in deciding what follows must not take down the other jobs."""
        facts = getattr(what, "attempt", None)
        job_id = facts.job_id if isinstance(facts, AttemptFacts) else getattr(what, "job_id", "")
        job = self._state.jobs.get(job_id) if self._attempt is None else self._attempt.job
        if job is None or job.ending:
            raise exc
        _log.error("unexpected error after an event", extra={"job": job.facts.job_id}, exc_info=exc)
        why = f"internal error: {exc!r}"
        self._end_job(job, "failed", why)
        if self._attempt is not None and self._attempt.phase is Phase.ENDED:
            self._report(self._attempt, "error", why)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _job_due(self, job: OpenJob, *, has_upstream: bool) -> None:
        deadline_s = job.facts.policy.deadline_s
        if not job.open:
            self._end_job(job, None, "")
        elif self._now >= job.facts.deadline:
            why = f"the job's {deadline_s:g} s are over"
            for task in list(job.open.values()):
                self._give_up(job, task, "deadline", why)
                for attempt in list(task.running):
                    self._report(attempt, "deadline", why)
                    self._finish(attempt)
            self._end_job(job, None, f"its deadline of {deadline_s:g} s is over")
        else:
            for task in job.wake_delayed(self._now, has_upstream=has_upstream):
                self._no_upstream(job, task)

    def _end_job(self, job: OpenJob, state: str | None, reason: str) -> None:
        """Stop all work on a job and let its recipient conclude."""
        if job.ending:
            return
        job.ending = True
        job.durations.clear()
        self._suspicion.forget_job(job.facts.job_id)
        self.effects.append(events.JobEnds(job.facts.job_id, state, reason))
        for attempt in [attempt for task in job.open.values() for attempt in task.running]:
            self._drop(attempt, "the job has ended")

    def _move_job(self, job: OpenJob, policy: JobPolicy) -> None:
        """Let a job belong to another release. What is under way for it is given up and sent again."""
        if job.answered or any(task.coarse for task in job.open.values()):
            return  # two releases never answer one job
        job.facts = dataclasses.replace(job.facts, policy=policy)
        self.effects.append(events.JobBelongs(job.facts))
        for task in job.open.values():
            for attempt in list(task.running):
                self._drop(attempt, "its job belongs to another release now")
                if not task.running:
                    self._again(job, task, self._now)
            # Attempts go on being numbered.
            task.tries, task.blame = Tries(made=task.tries.made), Blame()

    def _take_off(self, job: OpenJob, task: OpenTask, at: float) -> None:
        """It is the turn of a task."""
        job.take(task, at)
        if job.sent == 1:
            self.effects.append(events.JobStarted(job.facts.job_id))

    def _not_sent(self, job: OpenJob, task: OpenTask, *, too_late: bool) -> None:
        self._take_off(job, task, self._now)
        if too_late:
            self._give_up(job, task, "deadline", "no upstream node would have answered in time")
        else:
            self._no_upstream(job, task)
        self._again(job, task, self._now)

    # --- steps of an attempt ------------------------------------------------------------------------------------------

    def _sent(self, job: OpenJob, task: OpenTask, facts: AttemptFacts) -> None:
        """An attempt begins."""
        if facts.hedge:
            job.retries.take(self._now)
        else:
            self._take_off(job, task, facts.started)
        task.tries.made += 1
        phase = Phase.FINE if facts.fine_only else Phase.COARSE
        if acknowledge := job.facts.policy.recovery is Recovery.REASSIGN:
            phase, job.sending = Phase.ACKNOWLEDGING, True
        first = facts.deadline if facts.fine_only else facts.started + self._limits.coarse_timeout_s
        attempt = Attempt(facts, job, task, phase, until=min(facts.deadline, first))
        task.running.append(attempt)
        self._ledger.begin(attempt, self._now)
        self.effects.append(events.Dispatch(facts, acknowledge, attempt.until))

    def _line(self, attempt: Attempt, event: TaskEvent, line: str) -> None:
        facts, task = attempt.facts, attempt.task
        self._ledger.note(facts.node_id, facts.incarnation, self._now, Device.seen, self._now)
        if isinstance(event, CoarseEvent) and attempt.coarse_at is None:
            attempt.coarse_at = self._now
        self._release(attempt, answered=True)
        coarse = None if task.coarse is None or task.coarse.answer is None else task.coarse.answer.event
        self.effects.append(events.Learn(facts, event, coarse if isinstance(coarse, CoarseEvent) else None))
        if isinstance(event, RoutedEvent):
            self._charge_further(facts, event)
        self._judge_upstreams(attempt, event)
        was_open, had_coarse = not task.closed, task.coarse is not None
        self._take(attempt, event, line)
        attempt.gave_coarse |= task.coarse is not None and not had_coarse
        if task.closed:
            attempt.phase = Phase.ANSWERED
            if was_open:
                self._report(attempt, *_what_came(event))
            self._drop_others(attempt)
        elif attempt.leaving and attempt.phase is not Phase.ANSWERED:
            self._stop(attempt, f"{attempt.leaving} left the device list", rerouted=attempt.leaving)
            return
        attempt.until = self._now + _AFTER_FINAL_S if attempt.phase is Phase.ANSWERED else facts.deadline
        self.effects.append(events.WaitUntil(facts.id, attempt.until))

    def _charge_further(self, facts: AttemptFacts, event: RoutedEvent) -> None:
        """Count the images that the first tier sent up; their number was not known before."""
        sent, tiers = asks(event), {node.node_id: node.tier for node in facts.upstreams}
        for node_id in facts.first_asked[1:]:
            self._ledger.charge(node_id, sent.get(tiers[node_id], 0), self._now)

    def _take(self, attempt: Attempt, event: TaskEvent, line: str) -> None:
        """Apply an answer to its task; a late or repeated answer is dropped. The phase becomes `answered` if the task
        lacks a fine answer that is still to be tried for."""
        job, task, policy = attempt.job, attempt.task, attempt.job.facts.policy
        if task.closed or job.ending:
            return
        may_retry = policy.on_upstream_loss is UpstreamLoss.WAIT or policy.recovery is not Recovery.NONE
        match event:
            case CoarseEvent():
                task.blame.deaths.clear()  # a node that answers has not died of it
                if task.coarse is None:
                    answer = job.answer(task, "coarse", "coarse", event, line, self._now)
                    answer = replace(answer, site=attempt.facts.site or None)
                    task.coarse = Coarse.of(event, answer)
                    self.effects.append(events.Deliver(answer))
                if policy.scheme is Scheme.END:
                    self._close(job, task, "coarse")
                elif attempt.facts.too_late:
                    self._give_up(job, task, "deadline", "no upstream node would have answered in time")
                elif not attempt.facts.upstreams:
                    attempt.phase = Phase.ANSWERED
                    self._no_upstream(job, task)
            case FineEvent():
                task.blame.deaths.clear()
                self._close(job, task, "fine")
                answer = job.answer(task, "final", "fine", event, line, self._now)
                self.effects.append(events.Deliver(replace(answer, theta_cloud=attempt.facts.theta_cloud)))
            case FallbackEvent() if may_retry and event.reason not in ("deadline", "damaged"):
                attempt.fallback, attempt.phase = (event, line), Phase.ANSWERED
            case RoutedEvent() if may_retry and any(loss.reason != "deadline" for loss in without(event).values()):
                task.partial = attempt.fallback = event, line
                attempt.phase = Phase.ANSWERED
            case FallbackEvent() | RoutedEvent():
                self._stand(job, task, event, line)

    def _time_up(self, attempt: Attempt) -> None:
        facts, job, task = attempt.facts, attempt.job, attempt.task
        if attempt.phase is Phase.ANSWERED:
            self._conclude(attempt, None)
        elif self._now < facts.deadline - _EARLY_S:
            why = f"{facts.node_id} gave no coarse answer within {self._limits.coarse_timeout_s:g} s"
            self._conclude(attempt, Failure(FailureKind.WRONG, why))
        elif facts.deadline < task_deadline(job.facts, task.started, self._now):
            why = f"no final answer within {self._limits.task_deadline_s:g} s; the task goes on waiting"
            self._finish(attempt)
            self._report(attempt, "deadline", why)
            self._wait_for_upstream(job, task)
        else:
            why = f"no final answer within {job.facts.policy.task_deadline_s:g} s"
            self._give_up(job, task, "deadline", why)
            self._report(attempt, "deadline", why)
            self._drop_others(attempt)
            self._finish(attempt)

    def _node_changed(self, node_id: str) -> None:
        there = list(self._ledger.assigned.at(node_id))
        held = [attempt.task.blame.deaths for attempt in there]
        self._suspicion.note_death(self._ledger, node_id, held, self._now)
        for attempt in there:
            facts = attempt.facts
            if attempt.phase is Phase.ENDED or attempt.task.closed:
                continue
            if facts.node_id == node_id:
                view = self._ledger.view_of(node_id, facts.incarnation, self._now)
                if view is None or not view.keeps_tasks:
                    why = f"{node_id} left the device list" if view is None else f"{node_id}: {view.reason}"
                    self._stop(attempt, why, lost=True)
            elif not (attempt.leaving or self._ledger.keeps_tasks(node_id, self._now)):
                if attempt.owed:
                    attempt.leaving = node_id  # the coarse answer comes first
                else:
                    self._stop(attempt, f"{node_id} left the device list", rerouted=node_id)
        for key in self._suspicion.judge(self._ledger, node_id, self._now):
            if (found := self._state.find(*key)) is not None:
                self._blame(*found, node_id)

    def _stop(self, attempt: Attempt, why: str, *, lost: bool = False, rerouted: str = "", slow: bool = False) -> None:
        """The scheduler gives up an attempt, and its task goes elsewhere."""
        failure = Failure(FailureKind.UNREACHABLE, why, may_have_held=True)
        self._conclude(attempt, failure, lost=lost, rerouted=rerouted, slow=slow)

    def _drop(self, attempt: Attempt, why: str) -> None:
        """The attempt is not needed any more."""
        if attempt.phase is not Phase.ENDED:
            self._finish(attempt)
            self._report(attempt, "cancelled", why)

    def _drop_others(self, winner: Attempt) -> None:
        for attempt in [attempt for attempt in winner.task.running if attempt is not winner]:
            self._drop(attempt, "answered by another attempt")

    def _release(self, attempt: Attempt, *, answered: bool) -> None:
        """The device owes nothing more."""
        if attempt.owed:
            self._ledger.release(attempt, self._now, answered=answered)
        if attempt.phase is Phase.ACKNOWLEDGING:
            attempt.job.sending = False
        if attempt.phase in (Phase.ACKNOWLEDGING, Phase.COARSE):
            attempt.phase = Phase.FINE

    def _finish(self, attempt: Attempt) -> None:
        """The attempt is over."""
        self._release(attempt, answered=False)
        attempt.phase = Phase.ENDED
        attempt.task.running.remove(attempt)
        self._ledger.assigned.remove(attempt)
        self.effects.append(events.Finished(attempt.facts))

    def _report(self, attempt: Attempt, outcome: str, reason: str) -> None:
        if attempt.reported:
            return
        attempt.reported = True
        facts, seconds = attempt.facts, self._now - attempt.facts.started
        if outcome == "ok" and not attempt.job.ending:
            attempt.job.took(facts.node_id, seconds)
        self.effects.append(events.Report(facts, facts.report(outcome, reason, seconds)))

    # --- what follows an attempt --------------------------------------------------------------------------------------

    def _conclude(
        self,
        attempt: Attempt,
        failure: Failure | None,
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
        facts, job, task = attempt.facts, attempt.job, attempt.task
        lacks_fine = attempt.phase is Phase.ANSWERED and not task.closed
        self._finish(attempt)
        reason = "" if failure is None else failure.reason
        if failure is None:
            self._right(task.blame.wrong, facts.node_id, facts.incarnation)
        rerouted = rerouted or attempt.leaving
        if task.closed or job.ending:
            outcome = "ok" if failure is None else "late"
        elif rerouted and task.coarse is not None and not lost:
            outcome = "rerouted"
            if not slow:
                self._blame(job, task, rerouted)
            self._again(job, task, self._now)
        elif failure is not None and failure.kind is FailureKind.BUSY:
            # A refusal at the door is no attempt: the device does not know what is in the task.
            outcome = "refused"
            wait_s = failure.retry_after_s * (1.0 + 0.5 * self._chance())
            # It may be for want of the task's time alone, and then it holds for no other task.
            until = self._now + min(wait_s, facts.deadline - facts.started)
            self._ledger.note(facts.node_id, facts.incarnation, self._now, Device.rests, until)
            self._again(job, task, self._now)
        elif lacks_fine:
            outcome, reason = _what_came(attempt.fallback[0] if attempt.fallback else None)
            self._without_fine(attempt)
        else:
            outcome = self._failed(attempt, failure, lost=lost)
        self._report(attempt, outcome, reason)

    def _failed(self, attempt: Attempt, failure: Failure | None, *, lost: bool) -> str:
        """The end device has failed: try again elsewhere, give the task up, or end the job. Returns the outcome."""
        facts, job, task = attempt.facts, attempt.job, attempt.task
        tries, most = task.tries, self._limits.max_attempts
        task.blame.tried.add(facts.node_id)
        outcome = self._outcome(attempt, failure, lost=lost)
        reason = "" if failure is None else failure.reason
        if facts.trial and tries.trials < most:
            tries.trials += 1  # it tried the device, not the task
        else:
            tries.failed += 1
        recovery = job.facts.policy.recovery
        # Going round over the devices of the beginning, dead ones included, may come past them any number of times.
        counted = tries.errors if recovery is Recovery.REASSIGN else tries.failed
        waits = task.coarse is not None and job.facts.policy.on_upstream_loss is UpstreamLoss.WAIT
        if task.closed:
            pass  # quarantined
        elif recovery is Recovery.NONE:
            why = f"task {facts.task} failed on {facts.node_id} (recovery=none): {reason}"
            self._end_job(job, "failed", why)
        elif counted < most or waits:
            self._retry(job, task, facts)
        elif _is_refusal(failure) and facts.upstreams and not (task.coarse is not None or tries.refused):
            tries.refused = reason
            self._retry(job, task, facts)
        elif not task.running:
            detail = f"given up after {tries.failed + tries.trials} attempts; the last: {reason}"
            self._give_up(job, task, "upstream_unavailable", detail)
        return outcome

    def _outcome(self, attempt: Attempt, failure: Failure | None, *, lost: bool) -> str:
        """Return the outcome of a failed attempt, and hold the failure against the device if it shows a fault of it."""
        facts, job, task = attempt.facts, attempt.job, attempt.task
        reason = "" if failure is None else failure.reason
        if lost:
            if task.coarse is None:  # with the coarse answer there, it only passes the images on
                self._blame(job, task, facts.node_id)
            return "lost"
        if failure is not None and failure.kind is FailureKind.UNREACHABLE:
            if failure.may_have_held and task.coarse is None:
                self._suspicion.suspect(facts.node_id, facts.incarnation, job, task)
            self._ledger.note(facts.node_id, facts.incarnation, self._now, Device.is_accused, reason)
            return "unreachable"
        if failure is not None and failure.kind is FailureKind.INVALID and attempt.gave_coarse:
            self._withdraw(task)
        task.tries.errors += 1
        hurried = facts.deadline - facts.started < self._limits.coarse_timeout_s
        # What the task had no time for, or is the scheduler's own fault, says nothing of the device.
        if not (failure is None or failure.kind is FailureKind.OURS or (failure.kind is FailureKind.LATE and hurried)):
            self._wrong(task.blame.wrong, facts.node_id, facts.incarnation, reason)
        return "error"

    def _without_fine(self, attempt: Attempt) -> None:
        """The coarse answer is there, and no upstream node has given the fine one."""
        facts, job, task = attempt.facts, attempt.job, attempt.task
        event, line = attempt.fallback or (None, "")
        tried = list(dict.fromkeys(node_id for loss in _losses(event) for node_id in loss.tried))
        task.blame.tried.update(tried)
        if event is not None:
            task.blame.tried.add(facts.node_id)  # it may be its own way to them that is broken
        for node_id in tried:
            if self._ledger.keeps_tasks(node_id, self._now):
                self._suspicion.suspect(node_id, facts.incarnations.get(node_id, ""), job, task)
            else:
                self._blame(job, task, node_id)
        if task.closed:
            pass  # quarantined by that
        elif job.facts.policy.on_upstream_loss is UpstreamLoss.WAIT:
            self._wait_for_upstream(job, task)
        elif event is not None:
            task.tries.failed += 1
            if task.tries.failed < self._limits.max_attempts:
                self.effects.append(events.LookUp(facts, event, line))
            elif not task.running:
                self._stand(job, task, event, line)

    def _looked_up(
        self,
        job: OpenJob,
        task: OpenTask,
        facts: AttemptFacts,
        report: FallbackEvent | RoutedEvent,
        line: str,
        *,
        is_there: bool,
    ) -> None:
        if is_there:
            self._retry(job, task, facts)
        elif not task.running:
            self._stand(job, task, report, line)

    def _wait_for_upstream(self, job: OpenJob, task: OpenTask) -> None:
        task.tries.waits += 1
        self._again(job, task, self._now + upstream_wait_s(task.tries.waits, self._chance()))

    def _retry(self, job: OpenJob, task: OpenTask, facts: AttemptFacts) -> None:
        if task.running:
            return  # the other attempt goes on
        wait_s = retry_wait_s(task.tries.failed + task.tries.trials, self._chance())
        paid_in_s = 0.0
        if job.facts.policy.recovery is Recovery.MONITOR:
            paid_in_s = job.retries.take(self._now)
        elif self._now - facts.started >= self._limits.acknowledge_s:
            wait_s = 0.0  # the paper knows no pause: what a silent device costs is the time to notice it
        self._again(job, task, self._now + max(paid_in_s, wait_s))

    def _again(self, job: OpenJob, task: OpenTask, at: float) -> None:
        if not (task.running or task.closed or job.ending):
            job.delay(task, at)

    def _withdraw(self, task: OpenTask) -> None:
        """Take back the coarse part of an invalid answer: it is computed again; attempts that rely on it stop."""
        if task.coarse is not None and task.coarse.answer is not None and not task.closed:
            self.effects.append(events.TakeBack(task.coarse.answer))
            task.coarse = task.partial = None
            for other in [other for other in task.running if not other.owed]:
                self._drop(other, "the coarse answer was withdrawn")

    def _blame(self, job: OpenJob, task: OpenTask, node_id: str) -> None:
        """A node died with the task on it."""
        if detail := self._suspicion.poison(self._ledger, job, task, node_id, self._now):
            task_id = job.facts.task_id(task.facts.index)
            _log.error("a task is quarantined", extra={"task": task_id, "why": detail})
            self._give_up(job, task, "quarantined", detail)
            for attempt in list(task.running):
                self._drop(attempt, "the task is quarantined")

    # --- what answers say of nodes ------------------------------------------------------------------------------------

    def _judge_upstreams(self, attempt: Attempt, event: TaskEvent) -> None:
        """Record the upstream nodes' right and wrong answers that an end device reports. Only nodes that the device was
        told to ask count."""
        parts: Sequence[UpstreamAnswer | FallbackEvent | StageLoss] = ()
        match event:
            case FineEvent() | FallbackEvent():
                parts = (event,)
            case RoutedEvent():
                parts = (*event.answers, *event.losses)
        blamed, incarnations = attempt.task.blame.wrong_above, attempt.facts.incarnations
        for part in parts:
            for answer in part.wrong:
                if incarnation := incarnations.get(answer.node_id):
                    self._wrong(blamed, answer.node_id, incarnation, answer.detail[:_MOST_SAID])
            if isinstance(part, UpstreamAnswer):
                self._right(blamed, part.node_id, incarnations.get(part.node_id, ""))

    def _wrong(self, blamed: dict[str, str], node_id: str, incarnation: str, reason: str) -> None:
        """A node has answered a task wrongly, or not in time. The first one to do so is blamed; when a second one does,
        it is the task's fault as much, until another node can do it: `_right`.

        Args:
            blamed: nodes of the same kind that could not do this task so far, with their incarnations.
        """
        first = not blamed
        if len(blamed) == 1 and node_id not in blamed:
            for other, its in blamed.items():
                self._ledger.note(other, its, self._now, Device.is_pardoned)
        blamed[node_id] = incarnation
        self._set_aside(node_id, incarnation, reason, counts=first)

    def _right(self, blamed: dict[str, str], node_id: str, incarnation: str) -> None:
        """A node has answered as it should, so those that could not were at fault themselves."""
        self._ledger.note(node_id, incarnation, self._now, Device.answers_rightly)
        if len(blamed) > 1:  # a single one has been blamed already
            for other, its in blamed.items():
                if other != node_id:
                    self._set_aside(other, its, f"a task that {node_id} could do", counts=True)
        blamed.clear()

    def _set_aside(self, node_id: str, incarnation: str, reason: str, *, counts: bool) -> None:
        self._ledger.note(node_id, incarnation, self._now, Device.answers_wrongly, reason, self._now, counts=counts)
        self.effects.append(events.LookAgain(self._now + self._limits.set_aside_s))

    # --- answers of a task --------------------------------------------------------------------------------------------

    def _no_upstream(self, job: OpenJob, task: OpenTask) -> None:
        """The task waits for an upstream node, or its coarse answer is final."""
        policy = job.facts.policy
        if task.closed or policy.on_upstream_loss is UpstreamLoss.WAIT:
            return
        if task.tries.refused:
            detail = f"end devices took the task only without upstream nodes: {task.tries.refused}"
            self._fall_back(job, task, "upstream_unavailable", detail)
        else:
            site = policy.site if self._attempt is None else self._attempt.facts.site
            where = f" that the site {site} may ask" if site else ""
            detail = f"no upstream node of scheme {policy.scheme}{where} takes tasks of this end device"
            self._fall_back(job, task, "no_upstream", detail)

    def _give_up(self, job: OpenJob, task: OpenTask, reason: FallbackReason, detail: str) -> None:
        """The coarse answer is final, or the task has failed."""
        if task.closed:
            return
        if task.coarse is not None:
            self._fall_back(job, task, reason, detail)
            return
        named = reason in ("deadline", "quarantined")
        task_id = job.facts.task_id(task.facts.index)
        event = ErrorEvent(task_id=task_id, error=f"{reason}: {detail}" if named else detail)
        self._finish_task(job, task, "failed", event, written(event).decode())

    def _fall_back(self, job: OpenJob, task: OpenTask, reason: FallbackReason, detail: str) -> None:
        if task.partial is not None and reason != "quarantined":
            self._stand(job, task, *task.partial)
        else:
            task_id = job.facts.task_id(task.facts.index)
            event = FallbackEvent(task_id=task_id, reason=reason, detail=detail, tried=())
            self._stand(job, task, event, written(event).decode())

    def _stand(self, job: OpenJob, task: OpenTask, event: FallbackEvent | RoutedEvent, line: str) -> None:
        """The answers so far are the final ones: the coarse answer, or the finer ones of some images."""
        kind = "fine" if isinstance(event, RoutedEvent) and (event.answers or not event.losses) else "fallback"
        self._finish_task(job, task, kind, event, line)

    def _finish_task(self, job: OpenJob, task: OpenTask, kind: str, event: TaskEvent, line: str) -> None:
        self._close(job, task, kind)
        self.effects.append(events.Deliver(job.answer(task, "final", kind, event, line, self._now)))

    def _close(self, job: OpenJob, task: OpenTask, outcome: str) -> None:
        job.close(task)
        self.effects.append(events.TaskClosed(job.facts.job_id, task.facts.index, outcome, task.elapsed_ms(self._now)))

    def _chance(self) -> float:
        """Another number in [0, 1) each time."""
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        return self._jitter


def _is_refusal(failure: Failure | None) -> bool:
    """True if the device answered with an error status: it may be the route that it refuses."""
    return failure is not None and failure.kind is FailureKind.REFUSED


def _losses(event: TaskEvent | None) -> tuple[FallbackEvent | StageLoss, ...]:
    """The finer answers that are missing."""
    if isinstance(event, RoutedEvent):
        return tuple(without(event).values())
    return (event,) if isinstance(event, FallbackEvent) else ()


def _what_came(event: TaskEvent | None) -> tuple[str, str]:
    """Outcome and reason of an attempt whose last line was this."""
    for loss in _losses(event):
        return ("deadline" if loss.reason == "deadline" else "fallback"), f"{loss.reason}: {loss.detail}"
    return "ok", ""
