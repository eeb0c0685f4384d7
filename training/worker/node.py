"""A worker's life: find the run, load its images, join, and compute what is granted until the run has ended.

All connections go out from the worker, so it may stand behind a router. A host that is away is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from models.dataset import Dataset
from models.training.data import TrainingData
from models.training.run import RunOptions
from tierkit.errors import DeadlineExceeded, NotFound, TerraceError, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.http.client import open_client
from tierkit.pacing import backoff_s
from training.learner import FlatLearner
from training.messages import GrantedLease, Progress, RunSpec, UpdateHead
from training.units import Computed
from training.wire import unpack
from training.worker.connection import HostConnection

__all__ = ["Work", "WorkerOptions", "work"]

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 3.0
_SHOWN_SHARE = 1 / 3
"""Of the time of a lease, after which a worker that still computes says so."""
_FAREWELL_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker is started with."""

    find_host: Callable[[], Awaitable[str]]
    """Gives the URL of the run's host; asked again when the host is away, for it may come back elsewhere."""
    name: str
    """In the run; another worker of this name takes its place."""
    data: Path | None = None
    dataset: str | None = None
    """In place of the one that the network's configuration names; its images must be the run's."""
    device: str = "cpu"
    threads: int | None = None
    token: Callable[[], str] | None = None
    tls_ca: Path | None = None
    patience_s: float = 120.0
    """How long a host may be away."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What a worker has done."""

    updates: int = 0
    faults: int = 0
    """Updates that were not taken."""


class _LeaseLost(Exception):
    """The steps are somebody else's by now."""


async def work(options: WorkerOptions, watch: Callable[[RunSpec, int], None] = lambda spec, step: None) -> Work:
    """Work for a run to its end.

    Args:
        watch: called with the run and a step that has been computed, from a thread.

    Raises:
        DataError: the images are missing here.
        Conflict: they are not those of the run, or another worker has taken this one's name.
        Unauthenticated, Forbidden: the token is none for this.
        DeadlineExceeded: the host is away for longer than `patience_s`.
        UpstreamError: the host answers nonsense, or does not prove who it is.
        ProviderUnavailable: torch cannot use the device.
    """
    incarnation = secrets.token_hex(8)
    async with open_client(tls_ca=options.tls_ca) as http:
        connection = HostConnection(options.name, incarnation, http, options.token)
        patience = _Patience(options.patience_s, connection, options.find_host)
        spec = await patience.have(connection.spec)
        log.info("the run is %s with %s", spec.network.name, spec.choice)
        learner = await asyncio.to_thread(_learner, options, spec)
        worker = _Worker(spec, learner, connection, patience, lambda step: watch(spec, step))
        try:
            return await worker.run()
        finally:
            with suppress(TerraceError):
                await connection.leave(budget_s=_FAREWELL_S)


def _learner(options: WorkerOptions, spec: RunSpec) -> FlatLearner:
    RunOptions(device=options.device, threads=options.threads).prepare()
    dataset = Dataset.open(options.dataset or spec.network.dataset, options.data)
    data = TrainingData(spec.network, dataset.read("train"), dataset.hierarchy, device=options.device)
    return FlatLearner(spec.network, data)


class _Patience:
    """Repeats what fails while the host is away."""

    def __init__(self, seconds: float, connection: HostConnection, find_host: Callable[[], Awaitable[str]]) -> None:
        self._seconds = seconds
        self._connection, self._find_host = connection, find_host

    async def have(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives at last. All that a worker asks may be asked twice."""
        failures, away_since = 0, time.monotonic()
        while True:
            try:
                if failures or not self._connection.url:
                    self._connection.url = await self._find_host()
                return await ask()
            except (Unavailable, UpstreamTimeout, UpstreamError) as error:
                # An answer of another make, such as a proxy's, has a status; one that proves nothing is the end.
                final = isinstance(error, UpstreamError) and (error.status_code or 0) < 500
                if final:
                    raise
                if time.monotonic() - away_since > self._seconds:
                    raise DeadlineExceeded(f"the host was away for {self._seconds:g} s: {error}") from error
                if failures == 0:
                    log.warning("the host is away: %s", error)
                failures += 1
                wait_s = backoff_s(
                    failures, first_s=_FIRST_BACKOFF_S, cap_s=_LONGEST_BACKOFF_S, chance=secrets.randbelow(1000) / 1000
                )
                await asyncio.sleep(max(wait_s, error.retry_after_s if isinstance(error, Unavailable) else 0.0))


class _Worker:
    def __init__(
        self,
        spec: RunSpec,
        learner: FlatLearner,
        connection: HostConnection,
        patience: _Patience,
        watch: Callable[[int], None],
    ) -> None:
        self._spec, self._learner = spec, learner
        self._host, self._patience = connection, patience
        self._watch = watch
        self._shown = 0
        self._lost = False
        self._done = Work()

    async def run(self) -> Work:
        await self._join()
        while True:
            began = time.perf_counter()
            try:
                granted = await self._patience.have(self._host.lease)
            except NotFound:  # a host that has forgotten us: it had no word of us for long
                await self._join()
                continue
            self._host.spend("wait", began)
            if granted is None:
                return self._done
            if granted != "none yet":
                await self._fulfil(*granted)

    async def _join(self) -> None:
        await self._patience.have(lambda: self._host.join(self._learner.data.sha256))

    async def _fulfil(self, lease: GrantedLease, body: bytes) -> None:
        """Compute the unit of a lease, and bring its updates."""
        weights, buffers = unpack(body, values=self._spec.values, buffers=self._spec.buffers)
        for part in lease.unit.parts():
            self._learner.load(weights, buffers)
            try:
                found = await self._computed(lease, part)
            except _LeaseLost:
                self._done.faults += 1
                return
            weights, buffers = self._learner.weights(), found.buffers
            head = UpdateHead(
                worker=self._host.name,
                incarnation=self._host.incarnation,
                lease=lease.number,
                first=part.start,
                stop=part.stop,
                loss=found.loss if math.isfinite(found.loss) else None,
                times=self._learner.take_times() | self._host.take_times(),
            )
            message = self._host.packed(found.values, found.buffers, self._spec)
            began = time.perf_counter()
            answer = await self._patience.have(lambda head=head, message=message: self._host.update(head, message))  # type: ignore[misc]
            self._host.spend("send", began)
            if answer.verdict not in ("taken", "duplicate"):
                log.info("an update was %s", answer.verdict)
                self._done.faults += 1
                return
            self._done.updates += 1

    async def _computed(self, lease: GrantedLease, part: range) -> Computed:
        """What these steps give; the host hears meanwhile that they are being computed."""
        self._shown, self._lost = part.start, False
        computing = asyncio.ensure_future(
            asyncio.to_thread(self._learner.compute, part, self._spec.strategy.sends, self._step)
        )
        while not computing.done():
            await asyncio.wait({computing}, timeout=self._spec.lease_s * _SHOWN_SHARE)
            if not computing.done():
                progress = Progress(worker=self._host.name, incarnation=self._host.incarnation, shown=self._shown)
                try:
                    await self._host.renew(lease.number, progress)
                except NotFound:
                    self._lost = True
                except (Unavailable, UpstreamTimeout, UpstreamError):
                    pass  # the update that comes will find out
        return await computing

    def _step(self, following: int) -> None:
        if self._lost:
            raise _LeaseLost
        self._shown = following
        self._watch(following)
