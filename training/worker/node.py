"""Life of a worker: find the run, load its images, join, and compute the granted units until the run has ended.

The worker opens all connections, so it may be behind a router. It waits for a host that is away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request

from models.dataset import Dataset
from models.training.data import TrainingData
from models.training.run import RunOptions
from tierkit.copies.serving import knows, piece_route
from tierkit.copies.store import Store
from tierkit.errors import Conflict, Forbidden, InvalidAnswer, InvalidInput, NotFound, TerraceError
from tierkit.http.address import reachable_url
from tierkit.http.answering import install
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import running
from tierkit.settings import ServiceSettings
from training.data.manifest import SEGMENT, SegmentManifest, pieces_in
from training.data.segments import of_segments, whole_data
from training.improve.base import worker_learner
from training.improve.kept import Gathering, KeptImages, images_of, read_kept
from training.learner import FlatLearner, foreign, learner_of, read_teacher
from training.masking import masked
from training.messages import MOST_LOSS, GrantedLease, Keeps, RunSpec, Times
from training.payloads import unpack
from training.units import Computed
from training.worker.connection import HostConnection
from training.worker.copier import Copier
from training.worker.finding import FindHost
from training.worker.idle import stand_back
from training.worker.kept_device import KeptDevice, fetch_kept
from training.worker.patience import HostRetry

__all__ = ["SHOWN_SHARE", "Work", "Worker", "WorkerOptions", "work"]

log = logging.getLogger(__name__)

DrawFrom = Callable[[tuple[int, ...]], Awaitable[None]]

SHOWN_SHARE = 1 / 3
"""Fraction of a lease's time after which a worker that still computes reports its progress."""
_MISMATCH = {
    False: "the run of {name!r} trains on pictures that devices have kept: give the folder with --kept",
    True: "the run of {name!r} trains on a data set, and not on kept pictures: leave out --kept",
}
"""Errors for workers with other images than the run's. The key is True if the run trains on a data set."""
_FAREWELL_S = 2.0
_AGAIN_S = 0.2
_PAUSE_S = 0.05
"""Seconds between two checks for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of a worker."""

    find_host: FindHost
    """Called again when the host is away, because it may come back elsewhere."""
    name: str
    """Name in the run; another worker of this name takes its place."""
    data: Path | None = None
    dataset: str | None = None
    """Data set to use instead of the network's configured one; its images must be the run's."""
    answers: Path | None = None
    """File with the teacher's answers to the images that are here; they must be the run's."""
    device: str = "cpu"
    threads: int | None = None
    token: Callable[[], str] | None = None
    """Token for a host that no scheduler has named."""
    tls_ca: Path | None = None
    patience_s: float = 120.0
    """Seconds that a host may be away."""
    may_work: Callable[[], bool] = lambda: True
    """Called before each unit and between two steps; while it returns False, the worker does nothing."""
    fetch: Keeps | None = None
    """Training images to fetch from the run: this worker's own segments, or all; None to use the images that are
    here.
    """
    cache: Path = Path("~/.cache/terrace")
    """Keeps what was fetched, in a folder for each run and worker."""
    serve_data: tuple[str, int] | None = None
    """Address and port at which other workers get the fetched segments; None if they cannot reach this worker."""
    data_url: str | None = None
    """URL under which they reach it. Default: that address, or the address of the interface that leads to the host."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate and key of that service."""
    kept: Path | KeptDevice | None = None
    """Folder of the pictures that the device of this worker has kept, or another device, if it trains on them."""


@dataclass(slots=True, kw_only=True)
class Work:
    """Counts of a worker's work."""

    updates: int = 0
    faults: int = 0
    """Updates that were not taken."""
    copied: int = 0
    """Segments of the training images that were fetched."""


class _LeaseLost(Exception):
    """The steps belong to another worker by now."""


async def work(options: WorkerOptions, watch: Callable[[RunSpec, int], None] = lambda spec, step: None) -> Work:
    """Work for a run to its end.

    Args:
        watch: called with the run and a step that has been computed, from a thread.

    Raises:
        InvalidInput: the run trains on kept pictures and `kept` is missing, or the other way round.
        DataError: the images are missing here, or there are too few kept pictures.
        Conflict: they differ from the run's images, or another worker has taken this one's name.
        Unauthenticated, Forbidden: the token does not allow this.
        SetupError: the images that are fetched do not fit on the disk.
        DeadlineExceeded: the host is away for longer than `patience_s`.
        UpstreamError: the host answers nonsense, or does not prove who it is.
        ProviderUnavailable: torch cannot use the device.
    """
    incarnation = secrets.token_hex(8)
    async with open_client(tls_ca=options.tls_ca) as http:
        connection = HostConnection(options.name, incarnation, http, options.token)
        patience = HostRetry(options.patience_s, connection, options.find_host)
        spec = await patience.have(connection.spec)
        log.info("the run is %s with %s", spec.network.name, spec.choice)
        worker = Worker(spec, connection, patience.have, lambda step: watch(spec, step), options.may_work)
        try:
            if (spec.own is None) != (options.kept is None):
                raise InvalidInput(_MISMATCH[spec.own is None].format(name=spec.network.name))
            if spec.own is not None:
                content = await patience.have(partial(connection.base, spec.own))
                found = await _kept_images(options, spec, http)
                return await worker.run(await asyncio.to_thread(_learner_of_kept, options, spec, content, found))
            if options.fetch is None:
                return await worker.run(await asyncio.to_thread(_learner, options, spec))
            return await _work_on_copies(options, worker)
        finally:
            with suppress(TerraceError):
                await connection.leave(budget_s=_FAREWELL_S)


def _learner(options: WorkerOptions, spec: RunSpec) -> FlatLearner:
    RunOptions(device=options.device, threads=options.threads).prepare()
    dataset = Dataset.open(options.dataset or spec.network.dataset, options.data)
    if spec.answers_sha256 is not None and options.answers is None:
        raise InvalidInput(
            f"the network {spec.network.name!r} has a teacher: give --answers the file that the host was given, or get "
            "images and answers from the run with --fetch"
        )
    answers = read_teacher(options.answers, spec.network, dataset)
    if answers is not None and answers.digest != spec.answers_sha256:
        raise Conflict("the teacher's answers differ from the run's: give --answers the file of the host")
    with foreign(spec.network.name):
        teacher = None if answers is None else torch.from_numpy(answers.log_probabilities)
        images = dataset.read("train")
        data = TrainingData(spec.network, images, dataset.hierarchy, teacher=teacher, device=options.device)
        return learner_of(spec, data)


async def _kept_images(options: WorkerOptions, spec: RunSpec, http: aiohttp.ClientSession) -> KeptImages:
    assert spec.own is not None
    assert options.kept is not None
    if isinstance(options.kept, KeptDevice):
        gathering = Gathering(spec.own, spec.network.target)
        return await fetch_kept(options.kept, gathering, http, options.patience_s)
    return await asyncio.to_thread(images_of, read_kept(options.kept), spec.own, spec.network.target)


def _learner_of_kept(options: WorkerOptions, spec: RunSpec, content: bytes, found: KeptImages) -> FlatLearner:
    RunOptions(device=options.device, threads=options.threads).prepare()
    log.info(
        "%d kept pictures to train on, %d of them labelled by people%s",
        len(found.images),
        found.by_people,
        "".join(f"; left out: {count} ({reason})" for reason, count in found.left_out.items()),
    )
    with foreign(spec.network.name):
        return worker_learner(spec, content, found.images, device=options.device)


async def _work_on_copies(options: WorkerOptions, worker: Worker) -> Work:
    """Fetch training images and pass them on, and compute meanwhile, from the first segment on."""
    spec, connection = worker.spec, worker.host
    manifest = await worker.have(connection.manifest)
    if (manifest.data_sha256, manifest.answers_sha256) != (spec.data_sha256, spec.answers_sha256):
        raise InvalidAnswer("the segments of the host do not belong to its run: nothing was fetched")
    assert options.fetch is not None
    folder = options.cache.expanduser() / "segments" / spec.id / options.name
    store = await asyncio.to_thread(partial(Store, folder, manifest.files, what=SEGMENT))
    await worker.have(lambda: connection.join(spec.data_sha256, fetches=True))
    copier = Copier(connection, store, worker.have, keeps=options.fetch)
    async with _passing_on(options, connection.url, copier):
        computing = asyncio.create_task(_compute_on_copies(options, worker, copier, manifest), name="computing")
        copying = asyncio.create_task(copier.run(), name="copies of the data")
        try:
            await asyncio.wait({computing, copying}, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                await copying  # which has failed
            done = await computing
        finally:
            for task in (computing, copying):
                task.cancel()
            await asyncio.gather(computing, copying, return_exceptions=True)
    done.copied = copier.copied
    return done


async def _compute_on_copies(options: WorkerOptions, worker: Worker, copier: Copier, manifest: SegmentManifest) -> Work:
    await copier.ready()
    spec, store = worker.spec, copier.store

    def built() -> FlatLearner:
        RunOptions(device=options.device, threads=options.threads).prepare()
        pieces = pieces_in(store, store.holds, manifest)
        with foreign(spec.network.name):
            if options.fetch == "own":
                data = of_segments(spec.network, pieces, manifest, device=options.device)
            else:
                data = whole_data(spec.network, pieces, manifest, device=options.device)
            return learner_of(spec, data)

    learner = await asyncio.to_thread(built)
    drawn: tuple[int, ...] | None = None

    async def draw_from(segments: tuple[int, ...]) -> None:
        nonlocal drawn
        if segments == drawn or not segments:
            return

        def prepare() -> TrainingData:
            return of_segments(spec.network, pieces_in(store, segments, manifest), manifest, device=options.device)

        copier.in_use |= frozenset(segments)
        learner.draw_from(await asyncio.to_thread(prepare))
        drawn, copier.in_use = segments, frozenset(segments)

    return await worker.run(learner, draw_from)


@asynccontextmanager
async def _passing_on(options: WorkerOptions, host_url: str, copier: Copier) -> AsyncIterator[None]:
    """Other workers of the run get what this one has, if it was given an address to listen on."""
    if options.serve_data is None:
        yield
        return
    host, port = options.serve_data
    settings = ServiceSettings(
        host=host,
        port=port,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        drain_s=_FAREWELL_S,
    )
    lifecycle = Lifecycle()

    async def may_fetch(request: Request) -> None:
        if not knows(request, copier.key):
            raise Forbidden("only workers of the run get its training images here")

    def build(lifecycle: Lifecycle) -> Starlette:
        copier.url = options.data_url or reachable_url(lifecycle.url, peer=host_url)
        app = Starlette(routes=[piece_route("/v1/segments", copier.store.read, may_fetch)])
        install(app)
        return app

    async with running(build, settings, lifecycle=lifecycle, asks=True):  # for the run's key
        yield


@dataclass(slots=True)
class Worker:
    """Computes units until the run has ended."""

    spec: RunSpec
    host: HostConnection
    have: Callable[..., Awaitable[Any]]
    """Repeats a request to the host while the host is away."""
    watch: Callable[[int], None] = lambda step: None
    """Called with the step that follows, from a thread."""
    may_work: Callable[[], bool] = lambda: True
    """See `WorkerOptions`."""
    _learner: FlatLearner = field(init=False)
    _draw_from: DrawFrom | None = None
    _shown: int = 0
    _lost: bool = False
    _times: Times = field(default_factory=dict)
    _noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(secrets.randbits(128)))
    _done: Work = field(default_factory=Work)

    async def run(self, learner: FlatLearner, draw_from: DrawFrom | None = None) -> Work:
        """Compute to the end of the run.

        Args:
            draw_from: called before a unit with the segments that its batches come from, if the images come from the
                run; a worker that fetches them has joined to do so.
        """
        self._learner, self._draw_from = learner, draw_from
        if draw_from is None:
            await self._join()
        while True:
            if not self.may_work():
                await asyncio.sleep(_PAUSE_S)
                continue
            began = time.perf_counter()
            try:
                granted = await self.have(self.host.lease)
            except NotFound:  # a host that has forgotten us: it had no word of us for long
                await asyncio.sleep(_PAUSE_S)
                await self._join()
                continue
            self._spend("wait", began)
            if granted is None:
                return self._done
            if granted == "none yet":
                await asyncio.sleep(_PAUSE_S)
                continue
            granted[0].check(self.spec, self._learner.steps)
            with foreign(self.spec.network.name):
                await self._fulfil(*granted)

    async def _join(self) -> None:
        fetches = self._draw_from is not None
        await self.have(lambda: self.host.join(self._learner.data.sha256, fetches=fetches))

    def _spend(self, name: str, began: float) -> None:
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - began

    async def _fulfil(self, lease: GrantedLease, body: bytes) -> None:
        """Compute the unit of a lease, and bring its update."""
        weights, buffers = unpack(body, values=self.spec.values, buffers=self.spec.buffers)
        if self._draw_from is not None:
            try:
                await self._draw_from(lease.segments)
            except NotFound as error:  # of segments that were dropped meanwhile; the next lease gives this one back
                log.warning("a unit is given back: %s", error)
                await asyncio.sleep(_AGAIN_S)
                return
        self._learner.load(weights, buffers)
        try:
            found = await self._computed(lease)
        except _LeaseLost:
            self._done.faults += 1
            return
        loss = found.loss if abs(found.loss) <= MOST_LOSS else None  # nor where it is no number
        head = self.host.head(lease, loss, self._learner.take_times() | self._times)
        sent = masked(found, self.spec.strategy.masking, self._noise)
        message = self.host.packed(sent.values, sent.buffers, self.spec)
        self._times, began = {}, time.perf_counter()
        answer = await self.have(lambda: self.host.update(head, message))
        self._spend("send", began)
        if answer.verdict in ("taken", "duplicate"):
            self._done.updates += 1
        else:
            log.info("an update was %s", answer.verdict)
            self._done.faults += 1

    async def _computed(self, lease: GrantedLease) -> Computed:
        """Compute the steps of a lease, and meanwhile report to the host that they are being computed."""
        unit = lease.unit
        self._shown, self._lost = unit.first, False
        computing = asyncio.ensure_future(
            asyncio.to_thread(self._learner.compute, unit.span, self.spec.strategy.sends, unit.rate, self._step)
        )
        try:
            while not computing.done():
                await asyncio.wait({computing}, timeout=max(_PAUSE_S, self.spec.lease_s * SHOWN_SHARE))
                if not computing.done():
                    self._lost |= not await self.host.show(lease, self._shown)
            return await computing
        except asyncio.CancelledError:
            self._lost = True  # the thread is to end as well, and nobody wants to hear how
            computing.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def _step(self, following: int) -> None:
        stand_back(lambda: self._lost or self.may_work())
        if self._lost:
            raise _LeaseLost
        self._shown = following
        self.watch(following)
