"""The machines around a scheduler, simulated: end devices, edge nodes, clouds, their heartbeats, links and deaths.

The scheduler is the real one: its device list and failure detector, its dispatcher with all attempts, its mapping and
the planner of the scheme `adaptive`, on the clock of a `VirtualLoop`. The other machines are simulated. A node serves
tasks in order of arrival, and its speed sets the time of each. An upstream node may join waiting tasks to one batch. A
link delays messages and is never occupied. A killed node refuses connections; a silent one never answers. A task that
is given up while a node computes it is still computed to its end. There are no sockets, JSON, database or images: their
cost is measured elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import resource
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from models.manifest import Manifest, load_manifest
from scheduler.core import events
from scheduler.core.fleet import Change, Ledger
from scheduler.core.health import Probe
from scheduler.core.job import Answer, AttemptReport
from scheduler.core.policy import PolicyRequest, settle
from scheduler.core.site import NO_SITE, may_reach
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.dispatch.active_job import ActiveJob
from scheduler.dispatch.loop import Dispatcher
from scheduler.dispatch.transport import TaskRequest
from scheduler.history.record import Record
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tierkit.errors import NotFound, UpstreamUnavailable
from tierkit.types import Health, Scheme, Share, Tier
from tierkit.virtual_time import VirtualLoop
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, UpperTiming
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration

__all__ = ["BATCH", "Case", "Slow", "World", "simulate"]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

BATCH = 50
_SWEEP_S = 0.05
"""Seconds between two checks of the device list, equal to the scheduler's."""
_REFUSED_S = 0.002
"""Seconds until the scheduler knows that a process has ended whose connection it holds."""
_TOP_UP_S = 0.25
_JOB_TASKS = 10_000
_LEAST_READY = 4
"""A further job is submitted when fewer tasks than this per end device are ready."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Slow:
    """A node that becomes slower."""

    node_id: str
    factor: float
    from_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fleet, its work, and how it is scheduled. Seconds per task of 50 images; links there and back."""

    ends: int
    edges: int
    clouds: int
    tasks: int
    scheme: Scheme
    end_s: float
    edge_s: float
    cloud_s: float
    edge_link_s: float
    cloud_link_s: float
    hop_s: float = 0.004
    """Seconds between scheduler and end device, including the services' own time."""
    joins: int = 1
    """Tasks that an edge node or a cloud computes in one batch, if as many wait."""
    window: int = 3
    n_map: int | None = None
    sites: int = 0
    """Sites among which end devices and edge nodes are divided, one after the other; the clouds belong to none. 0: the
    fleet has no sites."""
    site_jobs: bool = False
    """True if each job names a site, one after the other."""
    share: str = Share.CLOUD
    heartbeat_s: float = 0.2
    beats_at_once: int = 1
    """Nodes whose heartbeats arrive at one moment; 1: each by itself."""
    spread: float = 0.0
    """Spread of the nodes' speeds: standard deviation of the logarithm."""
    churn_per_minute: float = 0.0
    """Share of the end devices and edge nodes that fail in a minute; half are killed, half fall silent. Each comes back
    after `away_s`."""
    most_deaths: int | None = None
    """No more nodes fail then; None: no limit."""
    away_s: float = 5.0
    slow: tuple[Slow, ...] = ()
    noise: float = 0.0
    """Largest delay of a batch, as a share of its time."""
    late_s: float = 0.0
    """The most that an answer comes later than it should, as from a machine that has other work."""
    links_known: bool = True
    """True if the scheduler knows the links; otherwise it assumes that they have no delay."""
    deadline_s: float = _DAY_S
    """Deadline of each job, in seconds."""
    job_tasks: int = _JOB_TASKS
    seed: int = 0

    @property
    def nodes(self) -> int:
        return self.ends + self.edges + self.clouds


_Served = tuple[float, float, int]
"""Start of a batch, its seconds, and its tasks."""


@dataclass(slots=True, eq=False)
class _Node:
    node_id: str
    tier: Tier
    seconds: float
    """Seconds for one task."""
    model: str
    site: str = NO_SITE
    life: int = 0
    """Number of its incarnation."""
    incarnation: str = field(init=False)
    down: str = ""
    """killed | silent; "" while it works."""
    queue: deque[tuple[float, float, asyncio.Future[_Served]]] = field(default_factory=deque)
    """Tasks that it has not begun: when each arrives, how long its answer is under way, and who waits for that."""
    serving: bool = False
    done: int = 0
    """Tasks."""
    waiting: set[asyncio.Future[Any]] = field(default_factory=set)
    """Futures of tasks that it computes or passes on, so that its death can end them."""
    beat: Heartbeat | None = None
    """Its present heartbeat, until its figures change."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a new incarnation."""
        self.life += 1
        self.incarnation = f"{self.node_id}#{self.life:08d}"
        self.beat = None

    def heartbeat(self) -> Heartbeat:
        if self.beat is None or self.beat.images_done != self.done * BATCH:
            self.beat = _made(
                Heartbeat,
                incarnation=self.incarnation,
                in_flight=0,
                queued_images=0,
                running_images=0,
                images_done=self.done * BATCH,
                draining=False,
            )
        return self.beat


class _Sink:
    """Counts the answers of one job."""

    def __init__(self, world: World, tasks: int) -> None:
        self._world = world
        self._left = tasks

    def started(self) -> None: ...

    def answer(self, answer: Answer) -> None:
        world = self._world
        if answer.stage == "coarse" and answer.kind == "coarse":
            world.coarse += 1
            world.coarse_at = world.loop.time()
            if world.case.scheme is not Scheme.END:
                return
        world.kinds[answer.kind] = world.kinds.get(answer.kind, 0) + 1
        if isinstance(answer.event, FineEvent):
            world.by_tier[answer.event.tier] += 1
            world.fine_at = world.loop.time()
        world.finished_at = world.loop.time()
        self._left -= 1
        world.left -= 1
        if not world.left:
            world.finished.set()

    def withdrawn(self, answer: Answer) -> None:
        self._world.coarse -= 1

    def attempted(self, report: AttemptReport) -> None:
        self._world.outcomes[report.outcome] = self._world.outcomes.get(report.outcome, 0) + 1

    async def ended(self, state: str | None, reason: str) -> None: ...


class World:
    """A scheduler and what it knows only by the wire."""

    def __init__(self, case: Case, tell: Callable[[float], None]) -> None:
        self.case = case
        self.tell = tell
        self.loop = VirtualLoop()  # type: ignore[abstract]  # no I/O
        self.finished = asyncio.Event()
        self.left = case.tasks
        self.coarse = 0
        self.kinds: dict[str, int] = {}
        self.by_tier: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.outcomes: dict[str, int] = {}
        self.strays = self.visits = 0
        """Pictures that reached a node which their site, or the job's, does not allow, and those that reached edge
        nodes of other sites."""
        self.coarse_at = self.fine_at = self.finished_at = 0.0
        """Times of the last answers: coarse, fine, and of a task."""
        self.beats = self.messages = self.deaths = self.returns = 0
        self._chance = random.Random(case.seed)
        manifest = load_manifest()
        self.nodes = {node.node_id: node for node in self._make_nodes(manifest)}
        self._links = {Tier.EDGE: case.edge_link_s, Tier.CLOUD: case.cloud_link_s}
        told = self._links if case.links_known else dict.fromkeys(self._links, 0.0)
        self.settings = SchedulerSettings(
            window=case.window,
            n_map=case.n_map,
            trusted=("end", "edge", "cloud"),
            end_link_s=0.0,
            edge_link_s=told[Tier.EDGE],
            cloud_link_s=told[Tier.CLOUD],
            share=(case.share,),
            heartbeat_s=case.heartbeat_s,
            suspect_s=2.5 * case.heartbeat_s,
            lease_s=15 * case.heartbeat_s,
        )
        self.devices = Ledger(self.settings.detector_times, sweep_s=_SWEEP_S, window=case.window)
        self._digests = {entry.name: entry.sha256 for entry in manifest.models}
        fleet = Placement(self.devices, self.settings, manifest, b"")
        self.dispatcher = Dispatcher(
            settings=self.settings,
            ledger=self.devices,
            placement=fleet,
            pilot=Pilot(
                self.devices,
                link_s=told,
                hop_s=case.hop_s if case.links_known else 0.0,
                accuracy={entry.sha256: entry.fine_accuracy or 0.0 for entry in manifest.models},
            ),
            transport=self,
            record=Record(self.devices, wall=lambda now: now),
            classes=(20, 100),
            congested=lambda: False,
            clock=self.loop.time,
            chance=random.Random(case.seed + 1),
        )
        self._jobs = 0
        self._unsubmitted = case.tasks
        self._policies = [
            settle(
                PolicyRequest(scheme=case.scheme, site=_site(number) if case.site_jobs else None),
                scheme=case.scheme,
                deadline_s=case.deadline_s,
                task_deadline_s=_DAY_S,
            )
            for number in range(case.sites if case.site_jobs else 1)
        ]
        self._pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (case.job_tasks * BATCH, 1, 1, 1))

    def _make_nodes(self, manifest: Manifest) -> Iterator[_Node]:
        case = self.case
        for tier, count, seconds in (
            (Tier.END, case.ends, case.end_s),
            (Tier.EDGE, case.edges, case.edge_s),
            (Tier.CLOUD, case.clouds, case.cloud_s),
        ):
            network = manifest.default_for(tier)
            for number in range(1, count + 1):
                # Of mean 1 for any spread.
                factor = self._chance.lognormvariate(-(case.spread**2) / 2, case.spread) if case.spread else 1.0
                site = _site((number - 1) % case.sites) if case.sites and tier is not Tier.CLOUD else NO_SITE
                yield _Node(f"{tier}-{number}", tier, seconds * factor, network.name, site)

    # --- a run --------------------------------------------------------------------------------------------------------

    async def run(self) -> float:
        """Returns the seconds from the first dispatch to the last answer."""
        for node in self.nodes.values():
            self._register(node)
        self.dispatcher.follow(self._on_change)
        self._start_beating()
        self.loop.at(0.0, self._sweep)
        if self.case.churn_per_minute:
            self._plan_failure()
        dispatching = self.loop.create_task(self.dispatcher.run())
        began = self.loop.time()
        self._top_up()
        await self.finished.wait()
        dispatching.cancel()
        await asyncio.gather(dispatching, return_exceptions=True)
        return self.finished_at - began

    def _top_up(self) -> None:
        """Submit a job when little is left to send of those before."""
        ready = self.dispatcher.waiting
        while self._unsubmitted and (ready < _LEAST_READY * self.case.ends or self._jobs < len(self._policies)):
            tasks = min(self.case.job_tasks, self._unsubmitted)
            self._unsubmitted -= tasks
            ready += tasks
            self.dispatcher.add(
                ActiveJob(
                    JobFacts(
                        job_id=f"job-{self._jobs}",
                        policy=self._policies[self._jobs % len(self._policies)],
                        deadline=self.loop.time() + self.case.deadline_s,
                    ),
                    tasks=[TaskFacts(index=k, first_image=k * BATCH, images=BATCH) for k in range(tasks)],
                    images=self._pixels,
                    recipient=_Sink(self, tasks),
                )
            )
            self._jobs += 1
        self.tell(1 - self.left / self.case.tasks)
        if self.left:
            self.loop.at(self.loop.time() + _TOP_UP_S, self._top_up)

    # --- the wire -----------------------------------------------------------------------------------------------------

    async def send(self, order: TaskRequest, *, budget_s: float) -> AsyncGenerator[tuple[Any, str], None]:
        """One task on an end device, and the way up."""
        end, loop, half_s = self.nodes[order.node_id], self.loop, self.case.hop_s / 2
        self.messages += 1
        job_site = self._policies[int(order.task_id.split("-")[1]) % len(self._policies)].site
        self.strays += job_site not in (None, end.site)
        sent_at = loop.time()
        done_at = sent_at + half_s
        if not order.coarse_known:
            begun, seconds, tasks = await self._while_up(end, self._serve(end, done_at, half_s))
            done_at = loop.time() - half_s
            end.done += 1
            self.messages += 1
            yield (
                CoarseEvent(
                    labels=(),
                    confidences=(),
                    task_id=order.task_id,
                    node_id=order.node_id,
                    model=end.model,
                    sha256=order.sha256,
                    queue_ms=(begun - sent_at - half_s) * 1000,
                    compute_ms=seconds * 1000,
                    batch_images=tasks * BATCH,
                ),
                "",
            )
        elif end.down:
            await self._while_up(end, loop.until(loop.time()))
        tried: list[str] = []
        for upstream in order.upstreams:
            upper, link_s = self.nodes[upstream.node_id], self._links[upstream.tier]
            self.strays += not may_reach(end.site, Share(self.case.share), upper.site, upper.tier)
            self.visits += upper.site not in (end.site, NO_SITE)
            asked_at = max(done_at, loop.time() - half_s) if tried else done_at
            tried.append(upstream.node_id)
            try:
                await self._while_up(end, loop.until(asked_at + link_s / 2))
                begun, seconds, tasks = await self._while_up(upper, self._serve(upper, loop.time(), 0.0))
            except UpstreamUnavailable:
                if end.down:
                    raise
                continue
            upper.done += 1
            ready_at = loop.time()
            await self._while_up(end, loop.until(ready_at + link_s / 2 + half_s))
            self.messages += 1
            yield (
                FineEvent(
                    labels=(),
                    confidences=(),
                    coarse_labels=(),
                    coarse_confidences=(),
                    task_id=order.task_id,
                    node_id=upper.node_id,
                    tier=upper.tier,
                    model=upper.model,
                    sha256=upstream.sha256 or "",
                    round_trip_ms=(ready_at + link_s / 2 - asked_at) * 1000,
                    timing=UpperTiming(
                        queue_ms=(begun - asked_at - link_s / 2) * 1000,
                        compute_ms=seconds * 1000,
                        batch_images=tasks * BATCH,
                    ),
                ),
                "",
            )
            return
        if order.upstreams:
            self.messages += 1
            event = FallbackEvent(
                task_id=order.task_id, reason="upstream_unavailable", detail="refused", tried=tuple(tried)
            )
            yield event, ""

    async def acknowledged(self, node_id: str, url: str, *, budget_s: float) -> None:
        await self._while_up(self.nodes[node_id], self.loop.until(self.loop.time() + self.case.hop_s))

    async def _while_up(self, node: _Node, future: asyncio.Future[T]) -> T:
        """Wait for something that needs the node.

        Raises:
            UpstreamUnavailable: it was killed; from one that is silent nothing ever comes again.
        """
        if node.down == "killed":
            raise UpstreamUnavailable(f"{node.node_id} refused the connection")
        if node.down:
            await self.loop.create_future()
        node.waiting.add(future)
        try:
            return await future
        except _Hung:
            await self.loop.create_future()
            raise
        finally:
            node.waiting.discard(future)

    # --- computing ----------------------------------------------------------------------------------------------------

    def _serve(self, node: _Node, arrival: float, back_s: float) -> asyncio.Future[_Served]:
        """Queue a task that arrives at this time, not before the tasks in the queue. The future is done `back_s` after
        the task.
        """
        future: asyncio.Future[_Served] = self.loop.create_future()
        node.queue.append((arrival, back_s, future))
        if not node.serving:
            node.serving = True
            self.loop.at(arrival, self._begin, node, node.life)
        return future

    def _begin(self, node: _Node, life: int) -> None:
        """Compute the tasks that have arrived, as many as may be joined, then continue with the rest."""
        if life != node.life:
            return
        now, queue = self.loop.time(), node.queue
        most = 1 if node.tier is Tier.END else self.case.joins
        batch: list[tuple[float, float, asyncio.Future[_Served]]] = []
        while queue and len(batch) < most and queue[0][0] <= now:
            one = queue.popleft()
            if not one[2].done():
                batch.append(one)
        seconds = len(batch) * node.seconds * self._slowness(node, now)
        if self.case.noise:
            seconds *= 1.0 + self.case.noise * self._chance.random()
        done_at = now + seconds
        for _, back_s, future in batch:
            if self.case.late_s:
                back_s += self.case.late_s * self._chance.random()
            self.loop.at(done_at + back_s, _answer, future, (now, seconds, len(batch)))
        if batch:
            self.loop.at(done_at, self._begin, node, life)
        elif queue:
            self.loop.at(queue[0][0], self._begin, node, life)
        else:
            node.serving = False

    def _slowness(self, node: _Node, now: float) -> float:
        return math.prod(slow.factor for slow in self.case.slow if slow.node_id == node.node_id and now >= slow.from_s)

    # --- signs of life ------------------------------------------------------------------------------------------------

    def _register(self, node: _Node) -> None:
        now = self.loop.time()
        offer = ModelOffer(
            name=node.model,
            sha256=self._digests[node.model],
            ms_per_image=node.seconds * self._slowness(node, now) / BATCH * 1000,
        )
        registration = Registration(
            node_id=node.node_id,
            incarnation=node.incarnation,
            tier=node.tier,
            url=f"http://{node.node_id}",
            models=(offer,),
            version="0",
            site=node.site or None,
        )
        self.dispatcher.handle(events.Registered(registration))
        self.dispatcher.handle(events.Probed(node.node_id, node.incarnation, Probe.ANSWERED, now))
        self.messages += 2

    def _start_beating(self) -> None:
        nodes = list(self.nodes.values())
        for start in range(0, len(nodes), self.case.beats_at_once):
            group = nodes[start : start + self.case.beats_at_once]
            self.loop.at(self._chance.random() * self.case.heartbeat_s, self._beat, group)

    def _beat(self, group: Sequence[_Node]) -> None:
        now = self.loop.time()
        for node in group:
            if node.down:
                continue
            self.beats += 1
            try:
                self.dispatcher.handle(events.Beat(node.node_id, node.heartbeat()))
            except NotFound:
                self._register(node)
        self.loop.at(now + self.case.heartbeat_s, self._beat, group)

    def _sweep(self) -> None:
        self.dispatcher.handle(events.Swept())
        self.loop.at(self.loop.time() + _SWEEP_S, self._sweep)

    def _on_change(self, change: Change) -> None:
        """The scheduler asks a suspect whether it lives."""
        node_id, device = change.node_id, self.devices.find(change.node_id)
        if device is None:
            return
        now = self.loop.time()
        view = self.devices.view_of(node_id, device.incarnation, now)
        if view is not None and view.health is Health.SUSPECT and not view.set_aside:
            self.loop.at(now + self.settings.probe_s, self._probed, node_id, device.incarnation, now)

    def _probed(self, node_id: str, incarnation: str, began: float) -> None:
        node = self.nodes[node_id]
        outcome = {"": Probe.ANSWERED, "killed": Probe.REFUSED, "silent": Probe.SILENT}[node.down]
        self.messages += 1
        self.dispatcher.handle(events.Probed(node_id, incarnation, outcome, began))

    # --- churn --------------------------------------------------------------------------------------------------------

    def _plan_failure(self) -> None:
        per_s = self.case.churn_per_minute / 60 * (self.case.ends + self.case.edges)
        self.loop.at(self.loop.time() + self._chance.expovariate(per_s), self._fail)

    def _fail(self) -> None:
        number = self._chance.randrange(self.case.ends + self.case.edges)
        tier, at = (Tier.END, number) if number < self.case.ends else (Tier.EDGE, number - self.case.ends)
        node = self.nodes[f"{tier}-{at + 1}"]
        most = self.case.most_deaths
        if most is not None and self.deaths >= most:
            return
        if not node.down:
            self.deaths += 1
            node.down = "killed" if self._chance.random() < 0.5 else "silent"
            gone = UpstreamUnavailable(f"{node.node_id} broke the connection")
            for future in node.waiting:
                if node.down == "killed" and not future.done():
                    future.set_exception(gone)
                elif not future.done():
                    future.set_exception(_Hung)  # the timer must not end the wait
            if node.down == "killed":
                self.loop.at(
                    self.loop.time() + _REFUSED_S, self._probed, node.node_id, node.incarnation, self.loop.time()
                )
            self.loop.at(self.loop.time() + self.case.away_s, self._return, node)
        self._plan_failure()

    def _return(self, node: _Node) -> None:
        node.start()
        node.down = ""
        node.queue.clear()
        node.serving = False
        node.done = 0
        self.returns += 1
        self._register(node)


def _site(number: int) -> str:
    return f"site-{number + 1}"


def _answer(future: asyncio.Future[_Served], served: _Served) -> None:
    if not future.done():
        future.set_result(served)


def _made(kind: type[M], **fields: Any) -> M:
    """A message without the checks that its sender and the wire have done; a simulation makes millions of them."""
    message = kind.__new__(kind)
    object.__setattr__(message, "__dict__", {**_defaults(kind), **fields})
    return message


@cache
def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: field.default for name, field in kind.model_fields.items() if not field.is_required()}


class _Hung(Exception):
    """The node that one waits for has fallen silent, and nothing ever comes."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the scheduler's warnings, because a fleet that loses nodes all the time gives many."""
    log = logging.getLogger("scheduler")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def simulate(case: Case, tell: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
    """Simulate one case to its end, and return the figures of the record. Memory is the peak of this process.

    Args:
        tell: called with the share of the work that is done.
    """
    began, wall = time.process_time(), time.monotonic()
    world = World(case, tell)
    with _quiet():
        seconds = world.loop.run(world.run())
    cpu_s, wall_s = time.process_time() - began, time.monotonic() - wall
    decisions = sum(world.outcomes.values())
    return {
        **asdict(case),
        "seconds": seconds,
        "bound_seconds": _bound_s(case, world),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "decisions": decisions,
        "heartbeats": world.beats,
        "messages": world.messages + world.beats,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "deaths": world.deaths,
        "strays": world.strays,
        "visits": world.visits,
        "answers": world.kinds,
        "outcomes": world.outcomes,
        "by_tier": {str(tier): count for tier, count in world.by_tier.items()},
    }


def _bound_s(case: Case, world: World) -> float:
    """The pipelined bound of `scheduler.placement.bound` for nodes of different speeds: a tier is as fast as all its
    nodes together, and the first task goes through the fastest. Churn is left out. If the scheme is free to choose, the
    upper tiers share the tasks so that both are done at the same time.
    """

    def seconds(tier: Tier) -> list[float]:
        return [node.seconds for node in world.nodes.values() if node.tier is tier]

    def rate(tier: Tier) -> float:
        return math.fsum(1 / each for each in seconds(tier))

    links = {Tier.EDGE: case.edge_link_s, Tier.CLOUD: case.cloud_link_s}
    used = {tier: world.by_tier[tier] for tier in links if world.by_tier[tier]}
    way_on_s = min((links[tier] + min(seconds(tier)) for tier in used), default=0.0)
    stages = [case.hop_s + case.tasks / rate(Tier.END) + way_on_s]
    first_s = case.hop_s + min(seconds(Tier.END))
    if case.scheme is Scheme.ADAPTIVE and used:
        rates = {tier: rate(tier) for tier in links if seconds(tier)}
        # Of the two tiers together, or of the one with the shorter link alone.
        both_s = (case.tasks + math.fsum(links[tier] * rates[tier] for tier in rates)) / math.fsum(rates.values())
        stages.append(first_s + min([both_s, *(links[tier] + case.tasks / rates[tier] for tier in rates)]))
    else:
        stages += [first_s + links[tier] + count / rate(tier) for tier, count in used.items()]
    return max(stages)
