"""Assembly of the scheduler and its background loops, from leadership to graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy.ext.asyncio import AsyncEngine

from models.escalation import Tuning, load_tuning
from models.manifest import Manifest, weights_folder
from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.core.outbox import SinkEvent
from scheduler.devices.news import FleetNews
from scheduler.devices.operators import Operators
from scheduler.devices.sources import RemoteSources
from scheduler.devices.watch import Watch
from scheduler.dispatch.loop import Dispatcher
from scheduler.dispatch.transport import HttpTransport
from scheduler.history.record import Record
from scheduler.ingest.inputs import InputFiles
from scheduler.jobs.recover import recover
from scheduler.jobs.service import Scheduler
from scheduler.metrics import (
    DATABASE,
    DEVICES,
    LEARNING,
    SITES,
    SOURCES,
    UNFINISHED,
    WAITING,
    show_guards,
    show_networks,
    show_releases,
)
from scheduler.observations.book import SourceBook, fields_of
from scheduler.observations.learning import Learning
from scheduler.observations.service import Observations
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.routes import Placement
from scheduler.releases.files import NetworkFiles
from scheduler.releases.probes import Prober
from scheduler.releases.service import Releases, Uses
from scheduler.releases.spreading import Spreading
from scheduler.runs.service import Runs
from scheduler.settings import SchedulerSettings
from scheduler.sinks.protocol import SinkContext
from scheduler.sinks.service import SinkLimits, Sinks
from scheduler.store.commit import GroupCommit
from scheduler.store.copies import FileCopies
from scheduler.store.database import last_seq
from scheduler.store.elapsed import kept_elapsed, note_elapsed
from scheduler.store.jobs import JobStore
from scheduler.store.learning import LearningStore
from scheduler.store.lease import Lease
from scheduler.store.nodes import NodeStore
from scheduler.store.observations import ObservationStore
from scheduler.store.outbox import Outbox
from scheduler.store.reading import Reader
from scheduler.store.releases import ReleaseStore
from scheduler.store.runs import RunStore
from scheduler.store.secret import kept_secret
from scheduler.store.sinks import SinkStore
from scheduler.store.tables import inputs, networks
from tierkit.access import Sessions, client_context
from tierkit.elapsed import Elapsed
from tierkit.errors import NotFound, Standby, TerraceError, Unavailable, WeightsError
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.types import Health, Scheme, Tier
from tierkit.wire.observations import Observation
from tierkit.wire.releases import RolloutState

__all__ = ["open_scheduler"]

_log = logging.getLogger(__name__)

_SWEEP_S = 0.05
"""Part of the time in which a silent node is noticed."""
_SHOW_S = 1.0
"""Seconds between two updates of the figures that take longer to work out."""
_PURGE_S = 3600.0
_PURGE_OBSERVATIONS_S = 60.0
"""A fleet may send sixty thousand in that time."""
_FLUSH_S = 5.0


@asynccontextmanager
async def open_scheduler(
    settings: SchedulerSettings,
    manifest: Manifest,
    lifecycle: Lifecycle,
    engine: AsyncEngine,
    lease: Lease,
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
) -> AsyncIterator[Scheduler]:
    """A scheduler that leads; on the way out its work is stopped and what has been answered is written.

    Args:
        engine: the database.
        lease: is held.

    Raises:
        SetupError: the state folder or the database cannot be used.
    """
    async with open_client(max_connections=1024, tls_ca=settings.tls_ca, middlewares=middlewares) as http:
        commit = GroupCommit(engine, lease, next_seq=await last_seq(engine) + 1)
        secret = await kept_secret(engine, commit)
        elapsed = await kept_elapsed(engine, commit)
        outbox = commit.outbox = Outbox(elapsed=elapsed.now)
        devices = Ledger(settings.detector_times, sweep_s=_SWEEP_S, window=settings.window)
        dispatcher: Dispatcher

        def handle(what: events.What) -> None:
            dispatcher.handle(what)

        if lifecycle.authenticator is not None:
            lifecycle.authenticator.sessions = Sessions(secret)
        placement = Placement(devices, settings, manifest, secret)
        reader = Reader(engine)
        store = JobStore(reader, commit)
        runs = Runs(RunStore(reader, commit), secret=secret, clock=time.monotonic, wall=time.time, elapsed=elapsed.now)
        nodes = NodeStore(engine, commit)
        sinks = await _sinks(settings, SinkStore(reader, commit), outbox, elapsed, lambda: observations)
        commit.on_write = sinks.tell
        copies = FileCopies(engine, commit, networks) if settings.shares_database else None
        prober = Prober(devices, handle, http, time.monotonic)
        releases = Releases(
            ReleaseStore(reader, commit),
            NetworkFiles(settings.state / "networks", [settings.models or weights_folder()], copies),
            devices,
            placement,
            prober,
            elapsed=elapsed.now,
            clock=time.monotonic,
            wall=time.time,
        )
        spreading = Spreading(devices, releases.file, releases.files.find, secret, clock=time.monotonic)
        await releases.load(manifest, _tuning(settings.models, manifest), settings.models, settings.state / "models")
        hierarchy = releases.current.manifest.hierarchy
        pilot = Pilot(
            devices,
            link_s={Tier.EDGE: settings.edge_link_s or 0.0, Tier.CLOUD: settings.cloud_link_s or 0.0},
            hop_s=settings.end_link_s or 0.0,
            accuracy=releases.accuracies,
        )
        begun, begun_at = time.monotonic(), time.time()
        record = Record(devices, wall=lambda now: begun_at + now - begun)
        dispatcher = Dispatcher(
            settings=settings,
            ledger=devices,
            placement=placement,
            pilot=pilot,
            transport=HttpTransport(http),
            record=record,
            classes=(len(hierarchy.coarse), len(hierarchy.fine)),
            congested=lambda: commit.congested,
            clock=time.monotonic,
        )
        dispatcher.handle(events.Restored(await nodes.load(), await nodes.load_sites()))
        operators = Operators(devices, nodes, dispatcher.handle)
        seen = ObservationStore(reader, commit, hierarchy.digest)
        observations = Observations(
            seen,
            SourceBook(
                health_of=lambda node_id: devices.health_of(node_id, time.monotonic()),
                site_of=devices.site_of,
                fleet_version=lambda: devices.version,
                elapsed=elapsed.now,
            ),
            hierarchy,
            handle=handle,
            max_pixels=settings.max_pixels,
        )
        book = observations.book
        seen.fields_of = lambda stored: fields_of(stored, book.hierarchies)
        news = FleetNews(
            devices, lambda node_id: book.devices.get(node_id), used=lambda: outbox.used, put=partial(_announce, commit)
        )
        book.heard = news.heard
        learning = Learning(LearningStore(reader, commit), observations.book, hierarchy.digest)
        watch = Watch(devices, dispatcher.handle, clock=time.monotonic, tls=client_context(settings.tls_ca))
        dispatcher.follow(operators.node_changed)
        dispatcher.follow(watch.node_changed)
        dispatcher.follow(prober.node_changed)
        dispatcher.follow(spreading.node_changed)
        dispatcher.follow(news.node_changed)
        scheduler = Scheduler(
            settings=settings,
            releases=releases,
            spreading=spreading,
            devices=devices,
            operators=operators,
            placement=placement,
            dispatcher=dispatcher,
            store=store,
            runs=runs,
            observations=observations,
            learning=learning,
            sinks=sinks,
            remote_sources=RemoteSources(devices, http),
            inputs=InputFiles(settings.inputs, releases.current.manifest.fit),
            copies=FileCopies(engine, commit, inputs) if settings.shares_database else None,
            elapsed=elapsed.now,
        )
        dispatcher.learns, dispatcher.reported = releases.trial.learns, releases.trial.reported
        dispatcher.moved = scheduler.on_move
        observations.observed = partial(_observed, releases, learning)
        releases.uses = Uses(
            busy=lambda: [policy.release_number for _, policy in dispatcher.policies()],
            move_jobs=scheduler.move_jobs,
            restart=lifecycle.restart,
        )
        record.jobs = lambda: scheduler.unfinished
        commit.on_commit, commit.on_withdrawal = scheduler.on_commit, scheduler.on_withdrawal
        commit.expects_more = lambda: bool(devices.assigned.attempts)
        lifecycle.add_check("database", commit.check)
        try:
            async with _loops(scheduler, commit, elapsed, dispatcher, watch, lifecycle, lease):
                yield scheduler
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await reader.finish()


async def _sinks(
    settings: SchedulerSettings,
    store: SinkStore,
    outbox: Outbox,
    elapsed: Elapsed,
    observations: Callable[[], Observations],
) -> Sinks:
    """The sinks that are stored. From now on the outbox takes what they want.

    Args:
        observations: returns what sinks ask about sources once they run.
    """
    context = SinkContext(
        name="",
        allow_private=settings.sink_allow_private,
        tls_ca=settings.tls_ca,
        sources=lambda: observations().book,
        picture=lambda node_id, source, sequence: observations().picture(node_id, source, sequence),
    )
    limits = SinkLimits(retry_s=settings.sink_retry_s, keep_s=settings.sink_keep_s)
    sinks = Sinks(store, context, limits, elapsed.now)
    sinks.use = outbox.use
    await sinks.load()
    return sinks


def _announce(commit: GroupCommit, happened: Sequence[SinkEvent]) -> None:
    if rows := commit.outbox.rows(happened):
        commit.put(tuple(rows))


def _observed(releases: Releases, learning: Learning, node_id: str, seen: Sequence[tuple[Observation, bool]]) -> None:
    releases.trial.observed(node_id, seen)
    learning.observed(node_id, seen)


@asynccontextmanager
async def _loops(
    scheduler: Scheduler,
    commit: GroupCommit,
    elapsed: Elapsed,
    dispatcher: Dispatcher,
    watch: Watch,
    lifecycle: Lifecycle,
    lease: Lease,
) -> AsyncIterator[None]:
    writing = lifecycle.own(commit.run(), name="group commit")
    others: list[asyncio.Task[None]] = []
    try:
        await _while_held(lease, recover(scheduler))
        await scheduler.runs.recover()
        SOURCES.show(scheduler.observations.book)
        LEARNING.show(scheduler.learning)
        SITES.show(
            scheduler.devices,
            lambda site: scheduler.placement.has_upstream(Scheme.MAPPING, time.monotonic(), site=site),
        )
        others = [
            lifecycle.own(dispatcher.run(), name="dispatcher"),
            lifecycle.own(_sweep(scheduler, dispatcher, commit), name="device list"),
            lifecycle.own(watch.run(), name="watch"),
            lifecycle.own(scheduler.releases.run(), name="releases"),
            lifecycle.own(scheduler.releases.prober.run(), name="probe pictures"),
            lifecycle.own(scheduler.spreading.run(), name="copies of networks"),
            lifecycle.own(_purge(scheduler), name="purge"),
            lifecycle.own(_purge_observations(scheduler), name="purge of observations"),
            lifecycle.own(note_elapsed(elapsed, commit), name="elapsed time"),
            lifecycle.own(scheduler.operators.run(), name="known nodes"),
            lifecycle.own(scheduler.runs.watch(), name="training runs"),
            lifecycle.own(scheduler.sinks.run(), name="sinks"),
            lifecycle.own(_stop_streams(scheduler, lifecycle), name="end of streams"),
        ]
        yield
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # What has been answered need not be computed again by the next scheduler; but it can be.
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if writing.done() or lease.lost.is_set() else _FLUSH_S):
                await scheduler.operators.flush()
                await scheduler.runs.save()
                await scheduler.sinks.save()
                await commit.flush()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _while_held(lease: Lease, work: Coroutine[Any, Any, None]) -> None:
    """Do something that waits for writes, which wait for ever once the lease is lost.

    Raises:
        Standby: it is.
    """
    working, lost = asyncio.create_task(work), asyncio.create_task(lease.lost.wait())
    try:
        await asyncio.wait({working, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Standby("another scheduler leads now")
        working.result()
    finally:
        for task in (working, lost):
            task.cancel()
        await asyncio.gather(working, lost, return_exceptions=True)


async def _sweep(scheduler: Scheduler, dispatcher: Dispatcher, commit: GroupCommit) -> None:
    """Notice silence. Set the gauges."""
    devices = scheduler.devices
    doubting, shown = False, (-math.inf, -1)
    known: Answering | None = None
    while True:
        await asyncio.sleep(_SWEEP_S)
        now = time.monotonic()
        dispatcher.handle(events.Swept())
        if devices.doubting != doubting:
            doubting = devices.doubting
            news = "no node is heard: this machine or its network may be at fault" if doubting else "that doubt is over"
            _log.warning(news)
        counts = devices.healths()
        for tier in Tier:
            for health in Health:
                DEVICES.labels(tier=tier, health=health).set(counts[tier, health])
        UNFINISHED.set(scheduler.unfinished)
        WAITING.set(dispatcher.waiting)
        DATABASE.set(commit.refused is None)
        dispatcher.record.look(now)
        if now - shown[0] >= _SHOW_S:
            scheduler.class_counts.show()
            if devices.version != shown[1]:
                show_networks([*scheduler.placement.alive_ends(now), *scheduler.placement.uppers(now)])
            shown = now, devices.version
            show_guards(scheduler.releases.trial.guards if scheduler.releases.change is not None else ())
            known = _show_releases(scheduler, now, known)


Answering = tuple[int, frozenset[int], int, RolloutState | None]
"""Inputs of the gauges of releases: the device list, the releases that answer, the one in force, and the state of
the change under way."""


def _show_releases(scheduler: Scheduler, now: float, before: Answering | None) -> Answering:
    """Set the gauges of releases, unless all is as it was before; return how it is now."""
    releases, holders = scheduler.releases, scheduler.placement.holders
    state = None if releases.change is None else releases.change.state
    answering = scheduler.devices.version, releases.live, releases.in_force, state
    if answering == before:
        return answering
    alive = [device for tier in Tier for device in scheduler.devices.alive(tier, now)]
    holding = {
        (releases.ref_of(number), releases.state(number)): len(holders(alive, number)) for number in releases.live
    }
    show_releases(holding, len(alive) - len(holders(alive, releases.in_force)))
    return answering


async def _purge(scheduler: Scheduler) -> None:
    while True:
        try:
            purged = await scheduler.purge()
        except Unavailable as exc:
            _log.warning("old jobs cannot be deleted now: %s", exc)
        else:
            if purged:
                _log.info("deleted %d jobs whose retention is over", purged)
        await asyncio.sleep(_PURGE_S)


async def _purge_observations(scheduler: Scheduler) -> None:
    while True:
        try:
            await scheduler.purge_observations()
        except Unavailable as exc:
            _log.warning("old observations cannot be deleted now: %s", exc)
        await asyncio.sleep(_PURGE_OBSERVATIONS_S)


async def _stop_streams(scheduler: Scheduler, lifecycle: Lifecycle) -> None:
    await lifecycle.wait_draining()
    scheduler.stop_streams()


def _tuning(weights: Path | None, manifest: Manifest) -> Tuning | TerraceError:
    """The escalation thresholds for exactly these weights, or the error that explains why there are none."""
    try:
        tuning = load_tuning(weights)
        tuning.check(manifest)
    except (NotFound, WeightsError) as exc:
        if isinstance(exc, WeightsError):
            _log.warning("no thresholds for escalation: %s", exc)
        return exc
    return tuning
