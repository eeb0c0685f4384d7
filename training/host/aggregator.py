"""A host that is a worker of another host, its parent: it grants the steps of its units to its own workers, and sends
their joint change of the weights up as one update.

It keeps nothing on disk. If it is lost, so is one unit, which the parent grants to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkit.access import TokenFile
from tierkit.errors import Conflict, InvalidInput, NotFound, SetupError, TerraceError
from tierkit.http.client import open_client
from tierkit.settings import lasting_name
from training.host.host import Host, HostParts
from training.host.journal import Journal
from training.host.opening import dataset_of
from training.host.own import without_pictures
from training.host.run import TrainingRun
from training.host.settings import HostSettings
from training.improve.plan import check_strategy
from training.learner import FlatLearner, foreign, learner_of, read_images, read_teacher
from training.messages import GrantedLease, RunSpec
from training.own_data import OwnData
from training.payloads import unpack
from training.strategies.build import build_strategy
from training.strategies.config import BatchConfig, TournamentConfig
from training.strategies.finding import find_hosted
from training.strategies.protocol import Strategy
from training.units import Flat, WorkUnit
from training.worker.connection import HostConnection
from training.worker.finding import at
from training.worker.node import SHOWN_SHARE
from training.worker.patience import HostRetry

__all__ = ["Aggregator", "open_aggregator"]

log = logging.getLogger(__name__)

_FAREWELL_S = 2.0
_PAUSE_S = 0.05
"""Pause between two requests for work when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The other host, and who this one is there."""

    url: str
    name: str
    token: Callable[[], str] | None
    tls_ca: Path | None
    patience_s: float

    @contextlib.asynccontextmanager
    async def connected(self) -> Any:
        """A connection, and what asks again while the parent is away."""
        async with open_client(tls_ca=self.tls_ca) as http:
            connection = HostConnection(self.name, secrets.token_hex(8), http, self.token)
            yield connection, HostRetry(self.patience_s, connection, at(self.url))


class Aggregator(Host):
    """Host for a part of the parent's run. It knows only the unit that the parent has granted.

    Args:
        above: specification of the parent's run.
    """

    def __init__(self, parts: HostParts, above: RunSpec, parent: Parent) -> None:
        super().__init__(parts)
        self.result = None
        self._above, self._parent = above, parent
        self._over = False

    @property
    def finished(self) -> bool:
        """True if the parent has nothing left to compute, or this host has been stopped."""
        return self._over or self._stopped or bool(self.error)

    async def _train(self) -> None:
        working = asyncio.create_task(self._work_for_parent(), name="work for the parent")
        ended = asyncio.create_task(self._ended.wait(), name="end")
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, ended):
                task.cancel()
            _, pending = await asyncio.wait({working, ended})
            assert not pending
        if not working.cancelled() and (error := working.exception()) is not None:
            if not isinstance(error, TerraceError):
                raise error
            self.error = str(error)
        if self._over:
            self.result = {**await self._call(self._figures), "accuracy": None}
        self._tell()

    async def _work_for_parent(self) -> None:
        """Compute units of the parent's run until it has ended."""
        async with self._parent.connected() as (connection, patience):

            async def join() -> None:
                await patience.have(lambda: connection.join(self._above.data_sha256))

            if await patience.have(connection.spec) != self._above:
                raise Conflict(f"the run at {self._parent.url} is another one than before: start this host again")
            await join()
            try:
                while True:
                    try:
                        granted = await patience.have(connection.lease)
                    except NotFound:  # a parent that has forgotten us
                        await asyncio.sleep(_PAUSE_S)
                        await join()
                        continue
                    if granted is None:
                        self._over = True
                        return
                    if granted == "none yet":
                        await asyncio.sleep(_PAUSE_S)
                        continue
                    granted[0].check(self._above, self.steps)
                    await self._fulfil(connection, patience, *granted)
            finally:
                with contextlib.suppress(TerraceError):
                    await connection.leave(budget_s=_FAREWELL_S)

    async def _fulfil(self, connection: HostConnection, patience: HostRetry, lease: GrantedLease, body: bytes) -> None:
        """Have a unit of the parent computed, and bring its update."""
        weights, buffers = unpack(body, values=self._above.values, buffers=self._above.buffers)
        await self._call(lambda: self._begin(weights, buffers, lease.unit))
        self._tell()
        if not await self._computed(connection, lease):
            log.info("the parent has given the steps from %d on to somebody else", lease.first)
            return
        after, buffers = await self._call(self._run.copies)
        head = connection.head(lease, self._run.loss)
        message = connection.packed(weights - after, buffers, self._above)
        answer = await patience.have(lambda: connection.update(head, message))
        if answer.verdict not in ("taken", "duplicate"):
            log.info("an update was %s by the parent", answer.verdict)

    def _begin(self, weights: Flat, buffers: Flat, unit: WorkUnit) -> None:
        former = self._run.strategy
        strategy = _strategy_of(self.spec, (weights, buffers), self._learner, unit)
        strategy.leases.follow(former.leases, unit.span)
        strategy.version, strategy.scores = former.version + 1, former.scores
        self._run.strategy = strategy

    async def _computed(self, connection: HostConnection, lease: GrantedLease) -> bool:
        """Wait until the workers have computed its steps; False if the parent has given them to another worker."""
        pause_s = max(_PAUSE_S, self._above.lease_s * SHOWN_SHARE)
        show_at = self._now() + pause_s
        while True:
            changed, strategy = self._changed, self._run.strategy
            if strategy.finished:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, show_at - self._now())):
                    await changed.wait()
                    continue
            show_at = self._now() + pause_s
            if not await connection.show(lease, lease.first + strategy.leases.done):
                return False


class _Unwritten(Journal):
    """Journal of a run that is not kept. It still reserves its folder."""

    def add(self, call: Mapping[str, Any], body: bytes | memoryview = b"", *, lasting: bool = True) -> None:
        pass

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        pass


def open_aggregator(settings: HostSettings) -> Aggregator:
    """A host for the run of its parent, which is waited for.

    Raises:
        SetupError: the parent is away for too long, or its run cannot be shared; the folder, the data or the strategy
            cannot be used.
    """
    assert settings.parent is not None
    token = None if settings.parent_token_file is None else TokenFile(settings.parent_token_file)
    parent = Parent(
        url=settings.parent,
        name=settings.parent_name or lasting_name("aggregator", settings.port),
        token=token,
        tls_ca=settings.tls_ca,
        patience_s=settings.patience_s,
    )
    journal = _Unwritten(settings.run_folder)
    try:
        above = asyncio.run(_spec_of(parent))
        if above.strategy.sends != "change":
            raise InvalidInput(
                f"the run at {parent.url} adds up gradients ({above.choice}), and an aggregator sends changes of the "
                "weights: train that run with fedavg, bmuf, diloco or average"
            )
        network, strategy = above.network, find_hosted(settings.strategy)
        if isinstance(strategy, TournamentConfig | BatchConfig):
            raise InvalidInput(
                "an aggregator gives its parent one change: give it a --strategy other than tournament and lbfgs"
            )
        if strategy.inner != above.strategy.inner:
            raise InvalidInput(
                f"the workers of the run at {parent.url} use {above.strategy.inner}, and the workers of this host "
                f"would use {strategy.inner}: give it a --strategy with the same inner"
            )
        base, test, checker = None, None, None
        if above.own is not None:
            check_strategy(strategy)
            base = asyncio.run(_base_of(parent, above.own))
            with foreign(network.name):
                learner = without_pictures(above, base)
        else:
            with foreign(network.name):
                dataset = dataset_of(settings, network)
                answers = read_teacher(settings.answers, network, dataset)
                training, test = read_images(network, dataset, answers=answers, begins=True)
            if training.sha256 != above.data_sha256:
                raise Conflict(f"the training images differ from the run at {parent.url}: give it the same data set")
            if above.answers_sha256 != (None if answers is None else answers.digest):
                raise Conflict(
                    f"the teacher's answers are other than in the run at {parent.url}: give --answers the same file"
                )
            with foreign(network.name):
                learner = learner_of(above, training)
            rechecks = strategy.trust is not None and strategy.trust.recheck > 0
            checker = FlatLearner(network, training) if rechecks else None
    except TerraceError as error:
        journal.close()
        raise error if isinstance(error, SetupError) else SetupError(str(error)) from error
    spec = above.model_copy(
        update={
            "id": secrets.token_hex(16),
            "choice": Path(settings.strategy).stem,
            "strategy": strategy,
            "workers": settings.workers,
            "wire": settings.wire,
            "lease_s": settings.lease_s,
        }
    )

    start = learner.weights(), learner.buffers()
    parts = HostParts(
        spec=spec,
        run=TrainingRun(_strategy_of(spec, start, learner, WorkUnit(version=0, first=0, steps=0))),
        journal=journal,
        learner=learner,
        test=test,
        checker=checker,
        max_lease_wait_s=settings.max_lease_wait_s,
        base=base,
    )
    return Aggregator(parts, above, parent)


def _strategy_of(spec: RunSpec, start: tuple[Flat, Flat], learner: FlatLearner, unit: WorkUnit) -> Strategy:
    """The strategy for the steps of a unit."""
    return build_strategy(spec.strategy, start, learner, workers=spec.workers, lease_s=spec.lease_s, unit=unit)


async def _base_of(parent: Parent, own: OwnData) -> bytes:
    async with parent.connected() as (connection, patience):
        content: bytes = await patience.have(lambda: connection.base(own))
        return content


async def _spec_of(parent: Parent) -> RunSpec:
    async with parent.connected() as (connection, patience):
        spec: RunSpec = await patience.have(connection.spec)
        return spec
