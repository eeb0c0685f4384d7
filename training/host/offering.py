"""A host that waits: it offers networks through the scheduler, and starts the runs that people want, one at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from models.training.config import TrainConfig
from tierkit import logs
from tierkit.client import AsyncClient
from tierkit.documents import read_json
from tierkit.errors import InvalidInput, SetupError, TerraceError
from tierkit.wire.offers import HostOffer, OfferedNetwork, OfferedRange, OfferedStart, StartedRun
from training.host.opening import find_network
from training.host.reporting import MOST_ERROR, PERIOD_S, scheduler_client
from training.host.settings import HostSettings
from training.messages import SPEC, RunSpec
from training.processes import TERRACE, Started, flags_of, started_processes
from training.strategies.finding import find_hosted

__all__ = ["Offering", "limits_of", "offer_runs"]

log = logging.getLogger(__name__)

_OWN = ("offer", "offer_strategies", "offer_rate", "offer_epochs", "offer_batch", "ready_file")
"""Settings that a waiting host does not hand on to its runs."""

_NO_OFFER = {"TERRACE_HOST_OFFER": ""}
"""Environment of the runs' hosts. It removes an offer that this host has from its environment."""


def offer_runs(settings: HostSettings) -> int:
    """Offer until a signal stops it; returns the exit code.

    Raises:
        SetupError: a network or strategy does not exist, or cannot be offered.
    """
    logs.configure(settings.log_level, settings.log_format, node_id=settings.service)
    offering = Offering(settings)

    async def until_stopped() -> None:
        task = asyncio.create_task(offering.run(), name="offering")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    asyncio.run(until_stopped())
    return 0


def limits_of(network: TrainConfig, settings: HostSettings) -> OfferedNetwork:
    """The hyperparameters of a network that may be chosen; the default is its own, brought within the limits."""

    def limits(default: float, given: tuple[float, float] | None, usual: tuple[float, float]) -> OfferedRange:
        lowest, highest = given or usual
        return OfferedRange(lowest=lowest, highest=highest, default=min(max(default, lowest), highest))

    rate, epochs, batch = network.peak_rate, network.epochs, network.batch_size
    return OfferedNetwork(
        name=network.name,
        rate=limits(rate, settings.offer_rate, (rate / 10, rate * 10)),
        epochs=limits(epochs, settings.offer_epochs, (1, 2 * epochs)),
        batch=limits(batch, settings.offer_batch, (max(1, batch // 4), 4 * batch)),
    )


class Offering:
    """Networks that a host offers, and its latest run.

    Raises:
        SetupError: see `offer_runs`.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        strategies = settings.offer_strategies or (settings.strategy,)
        try:
            networks = [find_network(each) for each in settings.offer]
            for each in strategies:
                find_hosted(each)
        except InvalidInput as error:
            raise SetupError(str(error)) from error
        if taught := [each.name for each in networks if each.teacher is not None]:
            raise SetupError(f"{taught[0]} learns from a teacher's answers, which --offer does not take: leave it out")
        self._networks: Mapping[str, str] = dict(zip((each.name for each in networks), settings.offer, strict=True))
        self._strategies: Mapping[str, str] = {Path(each).stem: each for each in strategies}
        self.said = HostOffer(
            host=socket.gethostname()[:200] or settings.service,
            networks=tuple(limits_of(each, settings) for each in networks),
            strategies=tuple(self._strategies),
            workers=settings.workers,
        )

    async def run(self) -> None:
        """Offer, and start what is wanted, until cancelled. A run under way is stopped then, and can be continued."""
        offer_id, settings = secrets.token_hex(16), self._settings
        assert settings.scheduler is not None
        child: Started | None = None
        async with (
            scheduler_client(settings.scheduler, settings.own_token(), settings.tls_ca) as client,
            started_processes(_pass_on, lambda _name, _pid: None) as start_process,
        ):
            while True:
                if child is not None:
                    await self._look(child)
                start = await self._told(client, offer_id)
                if start is not None and (flags := self.taken(start)) is not None:
                    log.info("a person has started a run", extra={"start": start.id, "network": start.network})
                    child = await start_process("host", [*TERRACE, "host", *flags], environment=_NO_OFFER)
                await asyncio.sleep(PERIOD_S)

    def taken(self, start: OfferedStart) -> list[str] | None:
        """The flags of the host of a run; None for a start that is known already, or not offered."""
        latest = self.said.latest
        if latest is not None and (start.id == latest.start or not latest.over):
            return None
        fault = self.said.fault_of(start)
        if fault is not None:
            self._now(StartedRun(start=start.id, over=True, error=": ".join(fault)))
            return None
        self._now(StartedRun(start=start.id))
        settings = self._settings
        own = {name: getattr(settings, name) for name in type(settings).model_fields if name not in _OWN}
        chosen = {
            "network": self._networks[start.network],
            "strategy": self._strategies[start.strategy],
            "rate": start.rate,
            "epochs": start.epochs,
            "batch_size": start.batch,
            "start_at": start.start_at,
            "folder": self._folder(start.id),
        }
        return flags_of({**own, **chosen})

    def _folder(self, start: str) -> Path:
        return self._settings.run_folder / start

    def _now(self, latest: StartedRun) -> None:
        self.said = self.said.model_copy(update={"latest": latest})

    async def _look(self, child: Started) -> None:
        """Note how far the present run is."""
        latest = self.said.latest
        assert latest is not None
        kept = self._folder(latest.start) / SPEC
        if latest.run is None and kept.exists():
            run = read_json(kept, RunSpec, what="run", error=SetupError).id
            latest = latest.model_copy(update={"run": run})
        if not latest.over and child.process.returncode is not None:
            code = await child.watcher
            error = None if code == 0 else str(child.failure)[:MOST_ERROR]
            latest = latest.model_copy(update={"over": True, "error": error})
        self._now(latest)

    async def _told(self, client: AsyncClient, offer_id: str) -> OfferedStart | None:
        """Repeat the offer; the run that a person wants."""
        try:
            return (await client.offer_runs(offer_id, self.said)).start
        except TerraceError as error:
            log.warning("the scheduler does not take the offer: %s", error)
            return None


def _pass_on(_name: str, line: str) -> None:
    """Write what a run's host logs."""
    sys.stderr.write(line + "\n")
