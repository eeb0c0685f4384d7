"""The loops that send tasks out and take answers in.

`run` is one loop that asks `dispatch.choose` for the next task whenever something has changed; each attempt is an
asyncio task beside it. Execution is at least once: an attempt that fails, or whose device leaves the list, is made
again elsewhere. Answers are exactly once: a stage that has its answer takes no second one, here and in the database.

How a task ends:

    fine answer                      -> closed
    scheme `end`: coarse answer      -> closed
    no fine answer, but a coarse one -> closed as fallback, with the reason; with on_upstream_loss=wait it waits for an
                                        upper node and is sent again
    its deadline                     -> fallback if the coarse answer is there, else failed
    attempts used up                 -> likewise
    recovery=none, an attempt fails  -> the whole job ends as failed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from scheduler.attempt import Order, send_task
from scheduler.devices import Device, DeviceList
from scheduler.dispatch import Place, Want, choose
from scheduler.fleet import Fleet
from scheduler.mapping import Node
from scheduler.measures import ATTEMPTS, OUTSTANDING
from scheduler.settings import SchedulerSettings
from scheduler.work import ActiveJob, ActiveTask
from tierkit.errors import Overloaded, TerraceError, UpstreamError, UpstreamUnavailable
from tierkit.types import Health, Recovery, Scheme, Tier, UpstreamLoss

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
"""The loop looks around at least this often, should a change have announced itself to nobody."""
_RETRY_BASE_S, _RETRY_CAP_S = 0.05, 2.0
_UPSTREAM_WAIT_BASE_S, _UPSTREAM_WAIT_CAP_S = 0.2, 5.0
_AFTER_FINAL_S = 1.0
"""How long an answer stream may go on after its final line before the connection is given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    job: ActiveJob
    task: ActiveTask
    device: Device
    upstreams: tuple[Node, ...]
    lost: str | None = None
    """Why the dispatcher itself has given it up: its device has left the list, or is stuck."""
    owed: bool = True
    """Whether the device itself owes its answer; what it waits for from an upper node is not its own work."""
    reroute: bool = False
    """The dispatcher has given it up because the upper node that it was to ask has left the list."""
    wait_for_upper: bool = False
    """The coarse answer is there, the fine one shall come from an upper node that is not there."""

    @property
    def node_id(self) -> str:
        return self.device.node_id


class Dispatcher:
    """Owns all jobs that are under way.

    Args:
        settings: window, deadlines, attempts.
        devices: the device list; the dispatcher listens to its changes.
        fleet: routes over it.
        http: for the end devices.
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
        http: httpx.AsyncClient,
        classes: tuple[int, int],
        congested: Callable[[], bool],
        clock: Callable[[], float],
        chance: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._fleet = fleet
        self._http = http
        self._coarse_classes, self._fine_classes = classes
        self._congested = congested
        self._clock = clock
        self._chance = chance or random.Random()
        self._jobs: dict[str, ActiveJob] = {}
        self._attempts: dict[asyncio.Task[Exception | None], _Attempt] = {}
        self._outstanding: dict[str, int] = {}
        self._last_used: str | None = None
        self._turn = 0
        self._gathering_until = 0.0
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        devices.listen(self._on_device_change)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run, interactive requests included."""
        return len(self._jobs)

    def job(self, job_id: str) -> ActiveJob | None:
        """A job that is not final."""
        return self._jobs.get(job_id)

    def outstanding(self, node_id: str) -> int:
        """Tasks that an end device has now."""
        return self._outstanding.get(node_id, 0)

    def add(self, job: ActiveJob) -> None:
        """Take a job; its end is told to its sink. A job without open tasks ends at once."""
        self._jobs[job.job_id] = job
        self._wake.set()

    def cancel(self, job_id: str, reason: str) -> bool:
        """End a job as cancelled; False when it is not under way or already ending."""
        job = self._jobs.get(job_id)
        if job is None or job.ending:
            return False
        self._end(job, "cancelled", reason)
        return True

    def wake(self) -> None:
        """Look around now: something has changed that the dispatcher does not see by itself."""
        self._wake.set()

    async def run(self) -> None:
        """Dispatch until cancelled. An error in here is a bug, and ends the service loudly."""
        # After a restart the nodes register again one by one. A task sent before the first upper node is back would
        # end as a fallback for no good reason.
        self._gathering_until = self._clock() + self._settings.lease_s
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                self._wake.clear()
                idle_s = self._step()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(idle_s):
                        await self._wake.wait()

    # --- deciding -------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """Do all that can be done now; returns after how many seconds to look again at the latest."""
        now = self._clock()
        for job in list(self._jobs.values()):
            if not job.ending:
                self._advance(job, now)
        while not self._congested() and self._send_next(now):
            pass
        self._explain_waiting(now)
        due = [_IDLE_S, self._gathering_until - now if now < self._gathering_until else _IDLE_S]
        for job in self._jobs.values():
            if not job.ending:
                due.append(job.deadline - now)
                due.extend(task.not_before - now for task in job.delayed[:1] if task.not_before > now)
        return max(0.0, min(due))

    def _advance(self, job: ActiveJob, now: float) -> None:
        if not job.open:
            self._end(job, None, "")
        elif now >= job.deadline:
            for task in list(job.open.values()):
                job.give_up(task, "deadline", f"the job's {job.policy.deadline_s:g} s are over", now)
            self._end(job, None, f"its deadline of {job.policy.deadline_s:g} s is over")
        elif job.delayed:
            job.wake_delayed(now, has_upstream=self._fleet.has_upstream(job.policy.scheme, now))

    def _send_next(self, now: float) -> bool:
        wants = [
            Want(
                job_id=job.job_id,
                interactive=job.interactive,
                last_served=job.last_served,
                tried=frozenset(task.tried),
                regardless=self._regardless(job, now),
            )
            for job in self._jobs.values()
            if (task := job.next_task()) is not None and not self._gathers_for(job, now)
        ]
        if not wants:
            return False
        alive = {device.node_id for device in self._devices.alive(Tier.END, now)}
        places = [
            Place(node_id=device.node_id, outstanding=self.outstanding(device.node_id), alive=device.node_id in alive)
            for device in self._fleet.ends(now)
        ]
        choice = choose(wants, places, window=self._settings.window, last_used=self._last_used)
        if choice is None:
            return False
        self._turn += 1
        self._last_used = choice.node_id
        job = self._jobs[choice.job_id]
        job.last_served = self._turn
        if _log.isEnabledFor(logging.DEBUG):
            what = {"task": job.task_id(job.ready[0]), "request_id": job.request_id(job.ready[0])}
            _log.debug("next task", extra={**what, "node": choice.node_id, "why": choice.reason})
        self._send(job, self._devices.get(choice.node_id), now)
        return True

    def _gathers_for(self, job: ActiveJob, now: float) -> bool:
        scheme = job.policy.scheme
        return now < self._gathering_until and scheme is not Scheme.END and not self._fleet.has_upstream(scheme, now)

    def _regardless(self, job: ActiveJob, now: float) -> frozenset[str] | None:
        if job.policy.recovery is not Recovery.REASSIGN:
            return None
        if not job.regardless:
            job.regardless = frozenset(device.node_id for device in self._devices.alive(Tier.END, now))
        return job.regardless

    def _send(self, job: ActiveJob, device: Device, now: float) -> None:
        route = self._fleet.route(job.policy.scheme, device.node_id, now)
        upstreams = route.for_task(job.sent)
        task = job.begin(now)
        if upstreams:
            job.mapping[device.node_id] = upstreams[0].node_id
        attempt = _Attempt(job=job, task=task, device=device, upstreams=upstreams)
        self._devices.given(device.node_id, device.incarnation, task.images, now)
        for node_id in (device.node_id, *(node.node_id for node in upstreams[:1])):
            if rest_s := self._devices.charge(node_id, task.images, now):
                asyncio.get_running_loop().call_later(rest_s, self.wake)
        self._outstanding[device.node_id] = self.outstanding(device.node_id) + 1
        OUTSTANDING.labels(node=device.node_id).inc()
        assert self._group is not None, "the dispatcher is not running"
        running = self._group.create_task(self._attempt(attempt), name=f"attempt {job.task_id(task)}")
        self._attempts[running] = attempt
        running.add_done_callback(self._on_attempt_done)

    def _on_device_change(self, node_id: str) -> None:
        now = self._clock()
        for running, attempt in self._attempts.items():
            if attempt.lost is not None or attempt.reroute or attempt.task.closed:
                continue
            if attempt.node_id == node_id:
                incarnation = attempt.device.incarnation
                if not self._devices.keeps_tasks(node_id, now, incarnation=incarnation):
                    view = self._devices.view_of(node_id, incarnation, now)
                    attempt.lost = f"{node_id} left the device list" if view is None else f"{node_id}: {view.reason}"
                    running.cancel()
            elif (
                attempt.upstreams
                and attempt.upstreams[0].node_id == node_id
                and not self._devices.keeps_tasks(node_id, now)
            ):
                # Whoever waits for a node that fell silent would wait until the budget is spent.
                attempt.reroute = True
                running.cancel()
        self._wake.set()

    def _explain_waiting(self, now: float) -> None:
        ends = [view for view in self._devices.view(now) if view.device.tier is Tier.END]
        for job in self._jobs.values():
            if job.ending or len(job.open) > len(job.ready) + len(job.delayed):
                continue  # something of it is on its way
            if self._gathers_for(job, now):
                job.reason = "waiting for an upper node to register: the scheduler has just started"
                continue
            if not any(view.health is Health.ALIVE for view in ends):
                known = "; ".join(f"{view.device.node_id}: {view.reason}" for view in ends)
                job.reason = f"waiting for an end device ({known or 'none has registered'})"
            elif not job.ready and any(job.waits_for_upstream(task) for task in job.delayed):
                job.reason = "waiting for an upper node (all coarse answers are there; on_upstream_loss=wait)"

    # --- attempts -------------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: _Attempt) -> Exception | None:
        """Send the task and take the answers; returns what went wrong. Decides nothing: `_on_attempt_done` does."""
        job, task = attempt.job, attempt.task
        now = self._clock()
        deadline = job.deadline_of(task, now)
        if job.policy.on_upstream_loss is UpstreamLoss.WAIT:
            # The task may wait for as long as the job; one silent upper node may not hold it for so long.
            deadline = min(deadline, now + self._settings.task_deadline_s)
        order = Order(
            task_id=job.task_id(task),
            request_id=job.request_id(task),
            node_id=attempt.node_id,
            url=attempt.device.registration.url,
            pixels=job.pixels[task.first_image : task.first_image + task.images],
            upstreams=self._fleet.upstreams(attempt.upstreams),
            coarse_classes=self._coarse_classes,
            fine_classes=self._fine_classes,
        )
        limit = asyncio.timeout_at(min(deadline, now + self._settings.coarse_timeout_s))
        try:
            async with limit, aclosing(send_task(self._http, order, budget_s=deadline - now)) as lines:
                async for event, line in lines:
                    now = self._clock()
                    self._devices.heard(attempt.node_id, attempt.device.incarnation, now)
                    self._take_off(attempt, now, answered=True)
                    asked_upper = bool(attempt.upstreams)
                    attempt.wait_for_upper |= not job.take(task, event, line, now, asked_upper=asked_upper)
                    over = task.closed or attempt.wait_for_upper
                    limit.reschedule(now + _AFTER_FINAL_S if over else deadline)
                    self._wake.set()
        except TimeoutError:
            if task.closed or attempt.wait_for_upper:
                return None
            if limit.when() != deadline:
                waited_s = self._settings.coarse_timeout_s
                return UpstreamError(f"{attempt.node_id} gave no coarse answer within {waited_s:g} s")
            if deadline < job.deadline_of(task, now):
                attempt.wait_for_upper = True
            else:
                said = f"no final answer within {job.policy.task_deadline_s:g} s"
                job.give_up(task, "deadline", said, self._clock())
        except TerraceError as exc:
            return exc
        except Exception as exc:
            # One task must not take down all jobs; whatever it is, it is logged and the task has attempts left.
            _log.exception("unexpected error in an attempt", extra={"task": job.task_id(task)})
            return exc
        return None

    def _on_attempt_done(self, running: asyncio.Task[Exception | None]) -> None:
        attempt = self._attempts.pop(running)
        self._take_off(attempt, self._clock(), answered=False)
        self._outstanding[attempt.node_id] -= 1
        OUTSTANDING.labels(node=attempt.node_id).dec()
        self._wake.set()
        if not running.cancelled():
            error = running.result()
        elif attempt.lost is not None or attempt.reroute:
            error = UpstreamUnavailable(attempt.lost or "rerouted")
        else:
            return  # its job has ended, or the service stops: the task is as if it had never been sent
        ATTEMPTS.labels(outcome=self._settle(attempt, error)).inc()

    def _take_off(self, attempt: _Attempt, now: float, *, answered: bool) -> None:
        if attempt.owed:
            attempt.owed = False
            device = attempt.device
            self._devices.settled(device.node_id, device.incarnation, attempt.task.images, now, answered=answered)

    def _settle(self, attempt: _Attempt, error: Exception | None) -> str:
        """Decide what follows an attempt; returns its outcome in one word."""
        job, task, now = attempt.job, attempt.task, self._clock()
        if task.closed or job.ending:
            return "ok" if error is None else "late"
        if attempt.wait_for_upper:
            wait_s = min(_UPSTREAM_WAIT_CAP_S, _UPSTREAM_WAIT_BASE_S * 2**task.upstream_waits)
            task.upstream_waits += 1
            job.delay(task, now + wait_s * self._chance.uniform(0.5, 1.0))
            return "ok"
        if attempt.reroute:
            job.delay(task, now)
            return "rerouted"
        if isinstance(error, Overloaded):
            # A refusal at the door is no attempt: the device does not know what is in the task.
            wait_s = error.retry_after_s * self._chance.uniform(1.0, 1.5)
            self._devices.set_aside(attempt.node_id, attempt.device.incarnation, now + wait_s)
            asyncio.get_running_loop().call_later(wait_s, self.wake)
            job.delay(task, now)
            return "refused"
        if isinstance(error, UpstreamUnavailable) and attempt.lost is None:
            self._devices.accuse(attempt.node_id, attempt.device.incarnation, str(error), now)
        self._failed(attempt, str(error) if isinstance(error, TerraceError) else f"internal error: {error!r}", now)
        if attempt.lost is not None:
            return "lost"
        return "unreachable" if isinstance(error, UpstreamUnavailable) else "error"

    def _failed(self, attempt: _Attempt, error: str, now: float) -> None:
        """Try again elsewhere, give the task up, or end the job."""
        job, task = attempt.job, attempt.task
        task.failed_attempts += 1
        task.tried.add(attempt.node_id)
        job.sink.attempt_failed(task, error)
        what = {"task": job.task_id(task), "failed_attempts": task.failed_attempts, "why": error}
        _log.warning("an attempt failed", extra=what)
        # Going round over the devices of the beginning, dead ones included, must come past each of them once.
        limit = max(self._settings.max_attempts, len(job.regardless or ()))
        if job.policy.recovery is Recovery.NONE:
            self._end(job, "failed", f"task {task.index} failed on {attempt.node_id} (recovery=none): {error}")
        elif task.failed_attempts >= limit:
            detail = f"given up after {task.failed_attempts} attempts; the last: {error}"
            job.give_up(task, "upstream_unavailable", detail, now)
        else:
            wait_s = min(_RETRY_CAP_S, _RETRY_BASE_S * 2 ** (task.failed_attempts - 1))
            job.delay(task, now + wait_s * self._chance.uniform(0.5, 1.0))

    # --- endings --------------------------------------------------------------------------------------------------

    def _end(self, job: ActiveJob, state: str | None, reason: str) -> None:
        """Stop all work on a job and let its sink conclude."""
        job.ending = True
        for running, attempt in self._attempts.items():
            if attempt.job is job and not attempt.task.closed:
                running.cancel()
        assert self._group is not None, "the dispatcher is not running"
        self._group.create_task(self._conclude(job, state, reason), name=f"end of {job.job_id}")

    async def _conclude(self, job: ActiveJob, state: str | None, reason: str) -> None:
        await job.sink.ended(state, reason)
        del self._jobs[job.job_id]
        self._wake.set()
