"""The attempts that are under way, and what follows each when it ends.

Each attempt is an asyncio task: it sends the task to one end device, takes the lines of the answer, and when that is
over decides what follows, in one step (`_follow`). A crash in that ends the job; one that the job cannot be told of
ends the service. What follows:

    all that was asked for               -> ok
    the task has been answered meanwhile -> cancelled (its connection is closed, which the device and the upper node
                                            that it asks notice)
    "not now" (503)                      -> refused: again elsewhere, and no attempt counts as failed
    connection refused or broken         -> unreachable
    its device died, left or is stuck    -> lost
    nonsense, or no coarse answer in time-> error; see `breaker`. With nonsense after it a coarse answer is withdrawn
    no final answer in time              -> deadline
    the upper nodes failed               -> fallback: the fine stage alone is tried again, or the coarse answer stands
    the upper node left                  -> rerouted: the fine stage alone goes to another at once

A failed attempt is made again on another device, after a random wait and when the job's retry budget has a token for
it. With recovery `none` it ends the job; with `reassign` the task goes to the end of the line.

Poison: a task that was on `retry.POISON_NODES` different nodes when they died is given up, unless as many nodes died
without it. A node whose process ends
breaks the connection before anybody knows that it is dead, so tasks whose connection broke are remembered until the
device list has made up its mind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from scheduler.devices.list import Device, DeviceList
from scheduler.dispatch.attempt import Order, Wire, may_have_held
from scheduler.dispatch.retry import DeathLog, backoff_s, hedge_after_s, is_poison
from scheduler.dispatch.work import ActiveJob, ActiveTask, AttemptReport
from scheduler.measures import count_attempt, count_outstanding, forget_nodes
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.escalation import asks, stages_of, without
from scheduler.placement.mapping import Node
from scheduler.placement.routes import Fleet, in_words
from scheduler.settings import SchedulerSettings
from tierkit.errors import (
    DeadlineExceeded,
    InvalidAnswer,
    NotFound,
    Overloaded,
    TerraceError,
    UpstreamError,
    UpstreamUnavailable,
)
from tierkit.types import Health, Recovery, Scheme, Tier, UpstreamLoss
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, StageLoss, TaskEvent, UpperAnswer
from tierkit.wire.messages import Stage, Upstream
from tierkit.wire.oip import Timing

__all__ = ["Attempts"]

_log = logging.getLogger(__name__)

_UPSTREAM_WAIT_BASE_S, _UPSTREAM_WAIT_CAP_S = 0.2, 5.0
_AFTER_FINAL_S = 1.0
"""How long an answer stream may go on after its final line before the connection is given up."""
_TICK_S = 0.005
"""An event loop counts in milliseconds: what happens at a time is looked at a little later."""
_MOST_MOVES = 3
"""So often a task is taken from an upper node that is alive."""
_MOST_SAID = 300
"""Characters of an upper node's wrong answer that the device list shows."""
_DURATIONS = 100
"""Attempts per job and device whose duration is remembered, for hedging."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    job: ActiveJob
    task: ActiveTask
    device: Device
    upstreams: tuple[Node, ...]
    entries: tuple[Upstream, ...]
    """`upstreams` as they go over the wire, with the form in which each gets the images."""
    stages: tuple[Stage, ...]
    number: int
    hedge: bool
    why: str
    too_late: bool
    started: float
    started_at: float
    fine_only: bool
    trial: bool
    """Whether the last answer of its device was wrong, to another task."""
    lost: str | None = None
    """Why the scheduler itself has given it up: its device has left the list, or is stuck."""
    owed: bool = True
    """Whether the device itself owes its answer; what it waits for from an upper node is not its own work."""
    reroute: str | None = None
    """An upper node that it was to ask and that has left the list."""
    sending: bool = False
    """Whether its device has not acknowledged it yet, with recovery `reassign`."""
    moved: str = ""
    """Why its upper node is given up though it is alive."""
    dropped: str | None = None
    """Why nobody waits for it any more."""
    lacks_fine: bool = False
    """The coarse answer is there; the fine one shall come from an upper node that failed or is not there."""
    fallback: tuple[FallbackEvent | RoutedEvent, str] | None = None
    """What the device said of that, and how it came."""
    overdue: str = ""
    """Why it was given up when its time was over."""
    gave_coarse: bool = False
    """Whether the coarse answer that its task has is from it."""
    void: bool = False
    """Whether it relies on a coarse answer that was withdrawn."""
    told: bool = False
    """Whether its row has been handed over."""
    begun: bool = False
    given_up: bool = False
    """Whether it is to end, or has ended, without its result; the other fields say why."""
    node_id: str = field(init=False)
    first_asked: tuple[Node, ...] = field(init=False)
    """The upper node that is asked first; of each tier, where images go up tier after tier."""
    nodes: tuple[str, ...] = field(init=False)
    """The end device, and the upper nodes that are asked first."""

    def __post_init__(self) -> None:
        self.node_id = self.device.node_id
        self.first_asked = self.upstreams[:1]
        if self.stages:
            first = {node.tier: node for node in reversed(self.upstreams)}
            self.first_asked = tuple(first[stage.tier] for stage in self.stages if stage.tier in first)
        self.nodes = self.node_id, *(node.node_id for node in self.first_asked)

    @property
    def answered(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.task.closed or self.lacks_fine


@dataclass(slots=True)
class _Durations:
    """Seconds from the dispatch to the end of attempts, by job and device."""

    by_job: dict[str, dict[str, deque[float]]] = field(default_factory=dict)

    def add(self, attempt: _Attempt, seconds: float) -> None:
        devices = self.by_job.setdefault(attempt.job.job_id, {})
        devices.setdefault(attempt.node_id, deque(maxlen=_DURATIONS)).append(seconds)

    def straggles_after_s(self, attempt: _Attempt) -> float | None:
        return hedge_after_s(self.by_job.get(attempt.job.job_id, {}).get(attempt.node_id, ()))


class Attempts:
    """All attempts that are under way.

    Args:
        settings: deadlines, attempts, budgets.
        devices: the device list; its changes are to be told to `on_device_change`.
        fleet: routes over it.
        wire: to the end devices.
        classes: how many coarse and fine classes there are.
        clock: monotonic.
        chance: of the jitter in waits.
        pilot: of the scheme `adaptive`; told of all attempts, whatever their scheme.
        wake: called when something may be sent that could not be before, or a job has a task less or one that waits.
        freed: called with the job of an attempt that is over, or that may have freed a place by its answer.
        counted: called with an end device whose number of tasks has changed.
        fail_job: ends a job as failed, with a reason.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        devices: DeviceList,
        fleet: Fleet,
        wire: Wire,
        classes: tuple[int, int],
        clock: Callable[[], float],
        chance: random.Random,
        pilot: Pilot,
        wake: Callable[[], None],
        freed: Callable[[ActiveJob], None],
        counted: Callable[[str], None],
        fail_job: Callable[[ActiveJob, str], None],
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._fleet = fleet
        self._wire = wire
        self._coarse_classes, self._fine_classes = classes
        self._clock = clock
        self._chance = chance
        self._pilot = pilot
        self._wake = wake
        self._freed = freed
        self._counted = counted
        self._fail_job = fail_job
        self._running: dict[_Attempt, asyncio.Task[None]] = {}
        self._with: defaultdict[str, set[_Attempt]] = defaultdict(set)
        """The same by node: the end device, and the upper nodes that are asked first."""
        self._outstanding: Counter[str] = Counter()
        self._owed: Counter[str] = Counter()
        self._planned: Counter[str] = Counter()
        """Tasks of the scheme `adaptive`, by end device."""
        self._broken: dict[tuple[str, str], dict[ActiveTask, ActiveJob]] = {}
        """By node and incarnation: unanswered tasks that it may have had when a connection to it broke."""
        self._deaths = DeathLog()
        self._down: set[str] = set()
        """Nodes whose present death is in the log."""
        self._durations = _Durations()

    @property
    def under_way(self) -> int:
        """How many there are."""
        return len(self._running)

    def outstanding(self, node_id: str) -> int:
        """Tasks that an end device has now."""
        return self._outstanding[node_id]

    def owed(self, node_id: str) -> int:
        """Tasks whose coarse answer an end device owes."""
        return self._owed[node_id]

    def planned(self, node_id: str) -> int:
        """Those of its tasks that the scheme `adaptive` has sent: their number follows from estimates, not from the
        window."""
        return self._planned[node_id]

    def forget_all_but(self, present: set[str]) -> None:
        """Forget the nodes that are not among these and have no tasks."""
        present = present.union(self._with)
        for counts in (self._outstanding, self._owed, self._planned):
            for node_id in counts.keys() - present:
                del counts[node_id]
        forget_nodes(present)

    def of(self, job_id: str) -> list[AttemptReport]:
        """The attempts of a job that are under way."""
        return [
            _report(attempt, outcome="running", reason="", ended_at=None)
            for attempt in self._running
            if attempt.job.job_id == job_id and not attempt.told
        ]

    def start(
        self,
        group: asyncio.TaskGroup,
        job: ActiveJob,
        task: ActiveTask,
        device: Device,
        ways_up: Sequence[tuple[Node, Upstream]],
        *,
        why: str,
        too_late: bool = False,
        hedge: bool = False,
    ) -> None:
        """Send a task to a device. Where the coarse answer is known, the upper nodes alone are asked.

        Args:
            ways_up: upper nodes with what `Fleet.upstreams` says of them for this device and job right now; no others
                are asked.
            why: the reason of the choice.
            too_late: no upper node is asked because none would answer before the deadline: the coarse answer stands.
        """
        now = self._clock()
        task.attempts += 1
        task.under_way += 1
        trial = device.wrong.count > 0 and device.node_id not in task.tried
        self._devices.sent(device.node_id, device.incarnation, now)
        stages = stages_of(job.policy.gates, job.policy.escalate, device.registration.models[0].sha256)
        if stages and task.unsure is not None:
            # The coarse answer is there, and which of its images go up.
            stages = (stages[0].model_copy(update={"below": None, "only": task.unsure}), *stages[1:])
        # A threshold for the coarse answer needs its probabilities, which the device alone has.
        fine_only = task.has_coarse and not (stages and stages[0].below is not None)
        if task.tried:
            ways_up = sorted(ways_up, key=lambda way: way[0].node_id in task.tried)
        upstreams, entries = tuple(node for node, _ in ways_up), tuple(entry for _, entry in ways_up)
        attempt = _Attempt(
            job=job,
            task=task,
            device=device,
            upstreams=upstreams,
            entries=entries,
            stages=stages if upstreams else (),
            number=task.attempts,
            hedge=hedge,
            why="; ".join([why, *map(in_words, entries[:1])]),
            too_late=too_late,
            started=now,
            started_at=time.time(),
            fine_only=fine_only,
            trial=trial,
            owed=not fine_only,
        )
        if attempt.owed:
            self._devices.given(device.node_id, device.incarnation, task.images, now)
            self._owed[device.node_id] += 1
        self._planned[device.node_id] += job.policy.scheme is Scheme.ADAPTIVE
        self._pilot.sent(
            attempt,
            end=self._fleet.node(device),
            upper=next(iter(attempt.first_asked), None),
            images=task.images,
            now=now,
            fine_only=attempt.fine_only,
            planned=job.policy.scheme is Scheme.ADAPTIVE,
        )
        for node_id in (device.node_id, *(node.node_id for node in attempt.first_asked[:1])):
            self._charge(node_id, task.images, now)
        for node in attempt.first_asked:
            self._devices.sent(node.node_id, self._incarnation(node.node_id), now)
        self._outstanding[device.node_id] += 1
        self._counted(device.node_id)
        count_outstanding(device.node_id, 1)
        if job.policy.recovery is Recovery.REASSIGN:
            job.sending = attempt.sending = True
        self._running[attempt] = group.create_task(self._live(attempt), name=f"attempt {job.task_id(task)}")
        for node_id in attempt.nodes:
            self._with[node_id].add(attempt)

    def _charge(self, node_id: str, images: int, now: float) -> None:
        if rest_s := self._devices.charge(node_id, images, now):
            asyncio.get_running_loop().call_later(rest_s, self._wake)

    def stop(self, job: ActiveJob) -> None:
        """Cancel all attempts of a job that is ending."""
        self._durations.by_job.pop(job.job_id, None)
        self._clear_of_suspicion(lambda other, _: other is job)
        for attempt in self._running:
            if attempt.job is job and not attempt.task.closed:
                self._give_up(attempt)

    def _give_up(self, attempt: _Attempt) -> None:
        attempt.given_up = True
        if attempt.begun:  # else it ends by itself: a task that is cancelled before its first step takes none
            self._running[attempt].cancel()

    def on_device_change(self, node_id: str) -> None:
        """Give up the attempts that wait for a node that is no longer to be counted on."""
        now = self._clock()
        self._note_death(node_id, now)
        for attempt in list(self._with.get(node_id, ())):
            if attempt.lost is not None or attempt.task.closed:
                continue
            if attempt.node_id == node_id:
                incarnation = attempt.device.incarnation
                if not self._devices.keeps_tasks(node_id, now, incarnation=incarnation):
                    view = self._devices.view_of(node_id, incarnation, now)
                    attempt.lost = f"{node_id} left the device list" if view is None else f"{node_id}: {view.reason}"
                    self._give_up(attempt)
            elif attempt.reroute is None and not self._devices.keeps_tasks(node_id, now):
                # Whoever waits for a node that fell silent would wait until the budget is spent. The coarse answer, if
                # it is still to come, comes first.
                attempt.reroute = node_id
                if not attempt.owed:
                    self._give_up(attempt)
        self._judge_broken(node_id, now)

    def waiting_above(self, job: ActiveJob) -> list[Hashable]:
        """Attempts of a job that only wait for an upper node, and may be given up for another one: `move`."""
        return [
            attempt
            for attempt in self._running
            if attempt.job is job
            and not (attempt.owed or attempt.answered or attempt.reroute or attempt.hedge)
            and attempt.lost is None
            and attempt.dropped is None
            and attempt.task.under_way == 1
            and attempt.task.moves < _MOST_MOVES
        ]

    def move(self, key: Hashable, why: str) -> None:
        """Give up an attempt of `waiting_above`: the fine stage of its task goes to another upper node at once."""
        if isinstance(key, _Attempt) and key in self._running:
            key.moved = why
            key.reroute = key.upstreams[0].node_id
            key.task.moves += 1
            self._pilot.taken_away(key, self._clock())
            self._give_up(key)

    def stragglers(self, now: float) -> Iterator[tuple[ActiveJob, ActiveTask, frozenset[str], float]]:
        """Attempts that may be hedged: job, task, the nodes that it is with, and when it is (or was) due for that."""
        for attempt in self._running:
            job, task = attempt.job, attempt.task
            alone = task.under_way == 1 and not attempt.answered and not job.ending
            if not alone or job.policy.recovery is not Recovery.MONITOR:
                continue
            after_s = self._durations.straggles_after_s(attempt)
            if after_s is not None:
                nodes = (attempt.node_id, *(node.node_id for node in attempt.first_asked))
                yield job, task, frozenset(nodes), attempt.started + after_s

    # --- one attempt ----------------------------------------------------------------------------------------------

    async def _live(self, attempt: _Attempt) -> None:
        """An attempt and what follows it."""
        attempt.begun = True
        error: Exception | None = None
        crash: Exception | None = None
        try:
            if not attempt.given_up:
                error = await self._attempt(attempt)
        except asyncio.CancelledError:
            if not attempt.given_up:
                # The service stops: the task is as if it had never been sent.
                self._count_off(attempt)
                raise
        except Exception as exc:
            crash = exc
        self._count_off(attempt)
        try:
            if crash is not None:
                raise crash
            self._follow(attempt, error, self._clock())
        except Exception as exc:
            _log.exception("unexpected error after an attempt", extra={"task": attempt.job.task_id(attempt.task)})
            if not attempt.job.ending:
                self._fail_job(attempt.job, f"internal error at task {attempt.task.index}: {exc!r}")
        self._freed(attempt.job)

    async def _attempt(self, attempt: _Attempt) -> Exception | None:
        """Send the task and take the answers; returns what went wrong."""
        job, task = attempt.job, attempt.task
        now = self._clock()
        deadline = self._deadline_of(attempt, now)
        first_s = self._settings.coarse_timeout_s
        order = Order(
            task_id=job.task_id(task),
            request_id=job.request_id(task),
            node_id=attempt.node_id,
            url=attempt.device.registration.url,
            model=attempt.device.registration.models[0].name,
            pixels=job.pixels[task.first_image : task.first_image + task.images],
            upstreams=attempt.entries,
            coarse_classes=self._coarse_classes,
            fine_classes=self._fine_classes,
            stages=attempt.stages,
            coarse_known=attempt.fine_only,
            interactive=job.interactive,
            key=attempt.device.registration.key,
        )
        limit = asyncio.timeout_at(deadline if attempt.fine_only else min(deadline, now + first_s))
        try:
            async with limit:
                if job.policy.recovery is Recovery.REASSIGN:
                    await self._acknowledged(attempt)
                async with aclosing(self._wire.send(order, budget_s=deadline - now)) as lines:
                    async for event, line in lines:
                        now = self._clock()
                        self._devices.heard(attempt.node_id, attempt.device.incarnation, now)
                        self._take_off(attempt, now, answered=True)
                        self._learn(attempt, event, now)
                        self._judge_uppers(attempt, event, now)
                        asked_upper, was_open = bool(attempt.upstreams), not task.closed
                        had_coarse = task.has_coarse
                        if not job.take(task, event, line, now, asked_upper=asked_upper, too_late=attempt.too_late):
                            attempt.lacks_fine = True
                            if isinstance(event, FallbackEvent | RoutedEvent):
                                attempt.fallback = (event, line)
                        attempt.gave_coarse |= task.has_coarse and not had_coarse
                        if task.closed:
                            if was_open:
                                self._tell(attempt, *_what_came(event))
                            self._drop_others(attempt)
                        limit.reschedule(now + _AFTER_FINAL_S if attempt.answered else deadline)
                        if job.waits or job.held or not job.keeps_window or self.planned(attempt.node_id):
                            self._freed(job)  # else its place is free when it is over
                        if attempt.reroute and not attempt.answered:
                            return UpstreamUnavailable(f"{attempt.reroute} left the device list")
        except TimeoutError:
            if attempt.answered:
                return None
            if limit.when() != deadline:
                return UpstreamError(f"{attempt.node_id} gave no coarse answer within {first_s:g} s")
            if deadline < job.deadline_of(task, now):
                attempt.overdue = (
                    f"no final answer within {self._settings.task_deadline_s:g} s; the task goes on waiting"
                )
            else:
                attempt.overdue = f"no final answer within {job.policy.task_deadline_s:g} s"
                self._end_in_time(attempt)
        except TerraceError as exc:
            return exc
        except Exception as exc:
            # One task must not take down all jobs; whatever it is, it is logged and the task has attempts left.
            _log.exception("unexpected error in an attempt", extra={"task": job.task_id(task)})
            return exc
        return None

    def _deadline_of(self, attempt: _Attempt, now: float) -> float:
        job, task = attempt.job, attempt.task
        deadline = job.deadline_of(task, now)
        if job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            # The task may wait for as long as the job; one silent upper node may not hold it for so long.
            deadline = min(deadline, now + self._settings.task_deadline_s)
        return deadline

    def _learn(self, attempt: _Attempt, event: TaskEvent, now: float) -> None:
        """Tell the pilot what an answer says of the nodes' speed, and count what went on from node to node."""
        match event:
            case CoarseEvent():
                # Whatever a node says, nothing of it took longer than the scheduler has waited.
                most_s = now - attempt.started
                timing = Timing(
                    queue_s=min(event.queue_ms / 1000, most_s),
                    compute_s=min(event.compute_ms / 1000, most_s),
                    batch_images=event.batch_images or attempt.task.images,
                )
                self._pilot.coarse(attempt, timing, now)
            case FineEvent():
                self._learn_upper(attempt, event, now)
            case RoutedEvent():
                # The images that went on from the first tier: nobody knew before how many they would be.
                sent = asks(event)
                for node in attempt.first_asked[1:]:
                    self._charge(node.node_id, sent.get(node.tier, 0), now)
                for answer in event.answers[:1]:
                    self._learn_upper(attempt, answer, now)

    def _learn_upper(self, attempt: _Attempt, answer: UpperAnswer, now: float) -> None:
        said = answer.timing
        upper = None
        round_trip_s = min(answer.round_trip_ms / 1000, now - attempt.started)
        if said is not None:
            upper = Timing(
                queue_s=min(said.queue_ms / 1000, round_trip_s),
                compute_s=min(said.compute_ms / 1000, round_trip_s),
                batch_images=said.batch_images,
            )
        self._pilot.fine(attempt, answer.node_id, upper, round_trip_s, now)

    async def _acknowledged(self, attempt: _Attempt) -> None:
        """The sending of a task with recovery `reassign`: nothing else of its job is sent meanwhile, and a device that
        does not acknowledge costs `acknowledge_s` (Eq. 9 of the paper)."""
        try:
            url = attempt.device.registration.url
            await self._wire.acknowledged(attempt.node_id, url, budget_s=self._settings.acknowledge_s)
        finally:
            attempt.job.sending = attempt.sending = False
            self._wake()

    def _drop_others(self, winner: _Attempt) -> None:
        """The task is answered: whoever else is at it need not go on."""
        if winner.task.under_way < 2:
            return
        for attempt in self._running:
            if attempt.task is winner.task and attempt is not winner:
                attempt.dropped = "answered by another attempt"
                self._give_up(attempt)

    def _end_in_time(self, attempt: _Attempt) -> None:
        attempt.job.give_up(attempt.task, "deadline", attempt.overdue, self._clock())
        self._tell(attempt, "deadline", attempt.overdue)
        self._drop_others(attempt)

    def _take_off(self, attempt: _Attempt, now: float, *, answered: bool) -> None:
        if attempt.owed:
            attempt.owed = False
            device = attempt.device
            self._owed[device.node_id] -= 1
            self._counted(device.node_id)
            self._devices.settled(device.node_id, device.incarnation, attempt.task.images, now, answered=answered)

    # --- what follows ---------------------------------------------------------------------------------------------

    def _count_off(self, attempt: _Attempt) -> None:
        """The attempt is over, whatever follows."""
        job, task = attempt.job, attempt.task
        del self._running[attempt]
        for node_id in attempt.nodes:
            self._with[node_id].discard(attempt)
            if not self._with[node_id]:
                del self._with[node_id]
        self._take_off(attempt, self._clock(), answered=False)
        task.under_way -= 1
        if attempt.sending:
            job.sending = attempt.sending = False  # given up before it began
        self._outstanding[attempt.node_id] -= 1
        self._counted(attempt.node_id)
        self._planned[attempt.node_id] -= job.policy.scheme is Scheme.ADAPTIVE
        self._pilot.ended(attempt)
        count_outstanding(attempt.node_id, -1)

    def _follow(self, attempt: _Attempt, error: Exception | None, now: float) -> None:
        """What follows the end of an attempt."""
        if attempt.given_up:
            if attempt.void:
                error = UpstreamUnavailable("the coarse answer was withdrawn")
            elif attempt.lost is not None or attempt.reroute:
                error = UpstreamUnavailable(attempt.lost or attempt.moved or f"{attempt.reroute} left the device list")
            else:
                self._tell(attempt, "cancelled", attempt.dropped or "the job has ended")
                return
        outcome, reason = self._settle(attempt, error, now)
        self._tell(attempt, outcome, reason)
        if attempt.task.closed and attempt.task.tried:
            self._clear_of_suspicion(lambda _, other: other is attempt.task)

    def _tell(self, attempt: _Attempt, outcome: str, reason: str) -> None:
        """Hand over the attempt's row; in the same step as the task's final answer, so that both or none are kept."""
        if attempt.told:
            return
        attempt.told = True
        count_attempt(outcome)
        ended_at = attempt.started_at + self._clock() - attempt.started
        attempt.job.sink.attempted(_report(attempt, outcome=outcome, reason=reason, ended_at=ended_at))

    def _settle(self, attempt: _Attempt, error: Exception | None, now: float) -> tuple[str, str]:
        """Decide what follows an attempt; returns its outcome in one word, and why."""
        job, task = attempt.job, attempt.task
        reason = (
            "" if error is None else str(error) if isinstance(error, TerraceError) else f"internal error: {error!r}"
        )
        if error is None and attempt.overdue:
            self._after_time(attempt, now)
            return "deadline", attempt.overdue
        if error is None:
            self._right(attempt, task.wrong, attempt.node_id, attempt.device.incarnation, now)
        if task.closed or job.ending:
            if error is None and self._settings.hedge and not job.ending:
                self._durations.add(attempt, now - attempt.started)
            return ("ok" if error is None else "late"), reason
        if attempt.void:
            self._again(attempt, now)
            return "cancelled", reason
        if attempt.reroute and task.has_coarse and attempt.lost is None:
            if not attempt.moved:
                self._blame(job, task, attempt.reroute, now)
            self._again(attempt, now)
            return "rerouted", reason
        if isinstance(error, Overloaded):
            # A refusal at the door is no attempt: the device does not know what is in the task.
            wait_s = error.retry_after_s * self._chance.uniform(1.0, 1.5)
            # It may be for want of the task's time alone, and then it holds for no other task.
            wait_s = min(wait_s, self._deadline_of(attempt, attempt.started) - attempt.started)
            self._devices.set_aside(attempt.node_id, attempt.device.incarnation, now + wait_s)
            asyncio.get_running_loop().call_later(wait_s, self._wake)
            self._again(attempt, now)
            return "refused", reason
        if attempt.lacks_fine:
            return self._without_fine(attempt, now)
        task.tried.add(attempt.node_id)
        outcome = "error"
        if attempt.lost is not None:
            outcome = "lost"
            if not task.has_coarse:  # with the coarse answer there, it only passes the images on
                self._blame(job, task, attempt.node_id, now)
        elif isinstance(error, UpstreamUnavailable):
            outcome = "unreachable"
            if may_have_held(error) and not task.has_coarse:
                self._suspect(attempt.node_id, attempt.device.incarnation, job, task)
            self._devices.accuse(attempt.node_id, attempt.device.incarnation, reason, now)
        else:
            if isinstance(error, InvalidAnswer) and attempt.gave_coarse:
                self._withdraw(attempt)
            task.errors += 1
            time_s = self._deadline_of(attempt, attempt.started) - attempt.started
            hurried = isinstance(error, DeadlineExceeded) and time_s < self._settings.coarse_timeout_s
            # What the task had no time for, or is the scheduler's own fault, says nothing of the device.
            if isinstance(error, TerraceError) and not hurried:
                self._wrong(task.wrong, attempt.node_id, attempt.device.incarnation, reason, now)
        self._failed(attempt, reason, now)
        return outcome, reason

    def _withdraw(self, attempt: _Attempt) -> None:
        """Take back the coarse part of an invalid answer: it is computed again; attempts that rely on it restart."""
        attempt.job.withdraw(attempt.task)
        for other in self._running:
            if other.task is attempt.task and not other.owed:
                other.void = True
                self._give_up(other)

    def _judge_uppers(self, attempt: _Attempt, event: TaskEvent, now: float) -> None:
        """Hold what an end device says of the upper nodes' answers for or against those that it was told to ask."""
        parts: Sequence[UpperAnswer | FallbackEvent | StageLoss] = ()
        match event:
            case FineEvent() | FallbackEvent():
                parts = (event,)
            case RoutedEvent():
                parts = (*event.answers, *event.losses)
        blamed = attempt.task.wrong_above
        for part in parts:
            for answer in part.wrong:
                if any(node.node_id == answer.node_id for node in attempt.upstreams):
                    incarnation = self._incarnation(answer.node_id)
                    self._wrong(blamed, answer.node_id, incarnation, answer.detail[:_MOST_SAID], now)
            if isinstance(part, UpperAnswer):
                self._right(attempt, blamed, part.node_id, self._incarnation(part.node_id), now)

    def _wrong(self, blamed: dict[str, str], node_id: str, incarnation: str, reason: str, now: float) -> None:
        """A node has answered a task wrongly, or not in time. The first one to do so is blamed; when a second one does,
        it is the task's fault as much, until another node can do it: `_right`.

        Args:
            blamed: those of the same kind that could not do this task so far, with their incarnations.
        """
        first = not blamed
        if len(blamed) == 1 and node_id not in blamed:
            for other, its_incarnation in blamed.items():
                self._devices.pardon(other, its_incarnation, now)
        blamed[node_id] = incarnation
        self._devices.answered_wrongly(node_id, incarnation, reason, now, counts=first)
        asyncio.get_running_loop().call_later(self._settings.set_aside_s + _TICK_S, self._wake)

    def _right(self, attempt: _Attempt, blamed: dict[str, str], node_id: str, incarnation: str, now: float) -> None:
        """A node has answered as it should, so those that could not were at fault themselves."""
        self._devices.answered_rightly(node_id, incarnation, now)
        if len(blamed) > 1:  # a single one has been blamed already
            reason = f"task {attempt.job.task_id(attempt.task)}, which {node_id} could do"
            for other, its_incarnation in blamed.items():
                if other != node_id:
                    self._devices.answered_wrongly(other, its_incarnation, reason, now)
        blamed.clear()

    def _after_time(self, attempt: _Attempt, now: float) -> None:
        """The task's time was up when its final answer had not come. One that may go on waiting asks again."""
        if not attempt.task.closed and not attempt.job.ending:
            self._wait_for_upper(attempt, now)

    def _wait_for_upper(self, attempt: _Attempt, now: float) -> None:
        wait_s = min(_UPSTREAM_WAIT_CAP_S, _UPSTREAM_WAIT_BASE_S * 2**attempt.task.upstream_waits)
        attempt.task.upstream_waits += 1
        self._again(attempt, now + wait_s * self._chance.uniform(0.5, 1.0))

    def _without_fine(self, attempt: _Attempt, now: float) -> tuple[str, str]:
        """The coarse answer is there, and no upper node has given the fine one."""
        job, task = attempt.job, attempt.task
        event, line = attempt.fallback or (None, "")
        tried = {node_id for loss in _losses(event) for node_id in loss.tried}
        task.tried.update(tried)
        if event is not None:
            task.tried.add(attempt.node_id)  # it may be its own way to them that is broken
        for node_id in tried:
            self._suspect_upper(node_id, job, task, now)
        if task.closed:
            pass  # quarantined by that
        elif job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            self._wait_for_upper(attempt, now)
        elif event is not None:
            task.failed_attempts += 1
            left = task.failed_attempts < self._settings.max_attempts
            if left and self._may_get_more(job, event, now):
                self._retry(attempt, now)
            elif not task.under_way:
                job.stand(task, event, line, now)
        return _what_came(event)

    def _may_get_more(self, job: ActiveJob, event: FallbackEvent | RoutedEvent, now: float) -> bool:
        """Whether there is a node now that could give what no node gave."""
        if isinstance(event, FallbackEvent):
            return self._fleet.has_upstream(job.policy.scheme, now, job.ways)
        return any(self._fleet.upper(tier, now, job.ways) for tier in {loss.tier for loss in without(event).values()})

    def _failed(self, attempt: _Attempt, error: str, now: float) -> None:
        """Try again elsewhere, give the task up, or end the job."""
        job, task = attempt.job, attempt.task
        if attempt.trial and task.trials < self._settings.max_attempts:
            task.trials += 1  # it tried the device, not the task
        else:
            task.failed_attempts += 1
        what = {"task": job.task_id(task), "failed_attempts": task.failed_attempts, "why": error}
        _log.warning("an attempt failed", extra=what)
        recovery = job.policy.recovery
        # Going round over the devices of the beginning, dead ones included, may come past them any number of times.
        counted = task.errors if recovery is Recovery.REASSIGN else task.failed_attempts
        if task.closed:
            return  # quarantined
        if recovery is Recovery.NONE:
            self._fail_job(job, f"task {task.index} failed on {attempt.node_id} (recovery=none): {error}")
        elif counted < self._settings.max_attempts or (
            task.has_coarse and job.policy.on_upstream_loss is UpstreamLoss.WAIT
        ):
            self._retry(attempt, now)
        elif not task.under_way:
            detail = f"given up after {task.failed_attempts + task.trials} attempts; the last: {error}"
            job.give_up(task, "upstream_unavailable", detail, now)

    def _retry(self, attempt: _Attempt, now: float) -> None:
        job, task = attempt.job, attempt.task
        if task.under_way:
            return  # the other attempt goes on
        wait_s = backoff_s(task.failed_attempts + task.trials) * self._chance.uniform(0.5, 1.0)
        paid_in_s = 0.0
        if job.policy.recovery is Recovery.MONITOR and job.retries is not None:
            paid_in_s = job.retries.take(now)
        elif now - attempt.started >= self._settings.acknowledge_s:
            wait_s = 0.0  # the paper knows no pause: what a silent device costs is the time to notice it
        job.delay(task, now + max(paid_in_s, wait_s))
        self._wake()

    def _again(self, attempt: _Attempt, at: float) -> None:
        if not attempt.task.under_way and not attempt.task.closed:
            attempt.job.delay(attempt.task, at)
            self._wake()

    # --- poison ---------------------------------------------------------------------------------------------------

    def _note_death(self, node_id: str, now: float) -> None:
        if not self._known(node_id) or self._devices.keeps_tasks(node_id, now):
            self._down.discard(node_id)
        elif node_id not in self._down:
            self._down = {node_id, *filter(self._known, self._down)}
            held = [
                attempt.task
                for attempt in self._with.get(node_id, ())
                if node_id in (attempt.node_id, *(node.node_id for node in attempt.upstreams[:1]))
            ]
            held += [task for key, tasks in self._broken.items() if key[0] == node_id for task in tasks]
            self._deaths.add(now, [task.deaths for task in held])

    def _suspect(self, node_id: str, incarnation: str, job: ActiveJob, task: ActiveTask) -> None:
        """Remember that a connection broke while the node may have had the task."""
        if not (task.closed or job.ending):
            self._broken.setdefault((node_id, incarnation), {})[task] = job

    def _clear_of_suspicion(self, over: Callable[[ActiveJob, ActiveTask], bool]) -> None:
        """Forget the tasks that are over: no death can be put down to them, and they hold their job's pixels."""
        for key, tasks in list(self._broken.items()):
            left = {task: job for task, job in tasks.items() if not over(job, task)}
            if left:
                self._broken[key] = left
            else:
                del self._broken[key]

    def _suspect_upper(self, node_id: str, job: ActiveJob, task: ActiveTask, now: float) -> None:
        try:
            incarnation = self._devices.get(node_id).incarnation
        except NotFound:
            return
        if self._devices.keeps_tasks(node_id, now):
            self._suspect(node_id, incarnation, job, task)
        else:
            self._blame(job, task, node_id, now)

    def _judge_broken(self, node_id: str, now: float) -> None:
        """The device list has news of a node: was the broken connection its end?"""
        for key in [key for key in self._broken if key[0] == node_id]:
            view = self._devices.view_of(*key, now)
            if view is not None and view.health is not Health.ALIVE and view.keeps_tasks and not view.set_aside:
                continue  # not decided yet
            tasks = self._broken.pop(key)
            if view is None or not view.keeps_tasks:
                for task, job in tasks.items():
                    self._blame(job, task, node_id, now)

    def _blame(self, job: ActiveJob, task: ActiveTask, node_id: str, now: float) -> None:
        """The node died with the task on it. Off the list by an operator's command is no death."""
        if job.policy.recovery is not Recovery.MONITOR or task.closed or job.ending or not self._known(node_id):
            return
        task.deaths.add(node_id)
        if not is_poison(task.deaths, self._deaths.unexplained(now)):
            return
        nodes = ", ".join(sorted(task.deaths))
        detail = f"{len(task.deaths)} nodes died or got stuck with it ({nodes}); no other gets it"
        _log.error("a task is quarantined", extra={"task": job.task_id(task), "why": detail})
        job.give_up(task, "quarantined", detail, now)
        self._wake()
        for attempt in self._running:
            if attempt.task is task:
                attempt.dropped = "the task is quarantined"
                self._give_up(attempt)

    def _incarnation(self, node_id: str) -> str:
        """The present one; "" for a node that has left the list, of which nothing is noted any more."""
        return self._devices.get(node_id).incarnation if self._known(node_id) else ""

    def _known(self, node_id: str) -> bool:
        try:
            self._devices.get(node_id)
        except NotFound:
            return False
        return True


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


def _report(attempt: _Attempt, *, outcome: str, reason: str, ended_at: float | None) -> AttemptReport:
    return AttemptReport(
        task=attempt.task.index,
        number=attempt.number,
        node_id=attempt.node_id,
        incarnation=attempt.device.incarnation,
        tier=Tier.END,
        upstream=attempt.upstreams[0].node_id if attempt.upstreams else None,
        stage="fine" if attempt.fine_only else "all",
        hedge=attempt.hedge,
        outcome=outcome,
        reason=reason,
        why=attempt.why,
        started_at=attempt.started_at,
        ended_at=ended_at,
    )
