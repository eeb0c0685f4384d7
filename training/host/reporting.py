"""Reports that a host sends to the scheduler every second, so that people can watch its run and workers can find it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from tierkit.access import Tickets
from tierkit.client import AsyncClient, Backoff
from tierkit.documents import faults
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded, TerraceError, Unauthenticated
from tierkit.http.address import reachable_url
from tierkit.types import WorkerOrder
from tierkit.wire.runs import RunReport, RunStart, RunWants, WorkerCopies, WorkerReport
from training.host.host import Host
from training.host.settings import HostSettings
from training.messages import WorkerData

__all__ = [
    "MOST_ERROR",
    "PERIOD_S",
    "HostReports",
    "Reported",
    "copies_of",
    "report_to_scheduler",
    "scheduler_client",
    "spans",
]

log = logging.getLogger(__name__)

PERIOD_S = 1.0
_BUDGET_S = 5.0
_MOST_WORKERS = 1_000
MOST_ERROR = 2_000
"""Characters of why a run has failed."""
_MOST_SPANS = 8
"""Most spans that list the segments of a worker."""


class Reported(Protocol):
    """A run that a scheduler hears of."""

    over: asyncio.Event
    """Set when there is nothing left to wait for."""

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> Literal["running", "finished", "stopped", "failed"]: ...

    def start(self, incarnation: str) -> RunStart:
        """First report of the run."""

    async def report(self, incarnation: str) -> RunReport:
        """Report of the present state."""

    async def order(self, name: str, order: WorkerOrder) -> object:
        """Do what an operator wants with a worker. Raises NotFound or Overloaded where it cannot."""

    def stop(self) -> None:
        """End the run in its present state."""


def scheduler_client(
    urls: Sequence[str], token: Callable[[], str] | None, tls_ca: Path | None
) -> AbstractAsyncContextManager[AsyncClient]:
    """Asks once each time, because the next report comes in a second."""
    return AsyncClient(
        ",".join(urls),
        timeout_s=_BUDGET_S,
        backoff=Backoff(attempts=1, failover_s=0.0),
        token=token,
        tls_ca=tls_ca,
    )


async def report_to_scheduler(
    run: Reported,
    urls: Sequence[str],
    *,
    token: Callable[[], str] | None = None,
    tls_ca: Path | None = None,
    tickets: Tickets,
) -> None:
    """Report until the run has ended and the scheduler knows of it. A scheduler that is away is tried again.

    Args:
        urls: URLs of the scheduler and its standbys.
        tickets: tickets by which the host authenticates workers.
    """
    async with scheduler_client(urls, token, tls_ca) as client:
        reporter = _Reporter(run, client, tickets)
        while not await reporter.said_all():
            if run.over.is_set():
                await asyncio.sleep(PERIOD_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await run.over.wait()


@dataclass(slots=True)
class _Reporter:
    _run: Reported
    _client: AsyncClient
    _tickets: Tickets
    _incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    _known: bool = False
    """True if the scheduler knows this run and this incarnation."""
    _told_to_stop: bool = False
    _news: str = ""
    _coming: set[str] = field(default_factory=set)
    """Workers that the scheduler has sent, and that are not here yet."""

    async def said_all(self) -> bool:
        """Report once; whether there is nothing more to say."""
        run, ended = self._run, self._run.over.is_set()
        if run.state == "stopped" and not self._told_to_stop:
            return True  # the run can go on; to the scheduler it is interrupted
        try:
            if not self._known:
                self._tickets.secret = (await self._client.begin_run(run.start(self._incarnation))).secret
                self._known = True
            orders = await self._client.report_run(run.id, await run.report(self._incarnation))
        except NotFound:
            self._known = False
            return False
        except (Conflict, Unauthenticated, Forbidden) as error:
            self._tell(f"the scheduler takes no reports of this run: {error}")
            return ended or isinstance(error, Conflict)
        except TerraceError as error:
            self._tell(f"the scheduler is away: {error}")
            return False
        except ValidationError as error:
            self._tell(f"the scheduler is told nothing of this run: {faults(error, RunStart)[:MOST_ERROR]}")
            return ended
        self._tell("")
        self._tickets.revoked = frozenset(orders.revoked)
        for name in set(orders.coming) - self._coming:
            log.info("%s is on its way, from the scheduler", name)
        self._coming = set(orders.coming)
        for name, order in orders.workers.items():
            with contextlib.suppress(NotFound, Overloaded):  # it has left; or it is asked for again
                await run.order(name, order)
        if orders.stop and not ended:
            log.info("stopped from the scheduler")
            self._told_to_stop = True
            run.stop()
            return False
        return ended

    def _tell(self, news: str) -> None:
        """Log what has changed since the last time."""
        if news != self._news:
            self._news = news
            log.warning("%s", news) if news else log.info("the scheduler hears of this run again")


class HostReports:
    """A host's run, as a scheduler hears of it.

    Args:
        listens_at: the host's own address.
        tickets: tickets by which the host authenticates workers.
    """

    def __init__(self, host: Host, settings: HostSettings, listens_at: str, tickets: Tickets) -> None:
        self._host, self._settings, self._listens_at, self._tickets = host, settings, listens_at, tickets
        self.over = host.over
        self.id, self.order, self.stop = host.spec.id, host.order, host.stop

    @property
    def state(self) -> Literal["running", "finished", "stopped", "failed"]:
        return self._host.state

    def start(self, incarnation: str) -> RunStart:
        """First report of the run."""
        spec, settings = self._host.spec, self._settings
        assert settings.scheduler is not None
        url, *more = settings.advertise_url or [reachable_url(self._listens_at, peer=settings.scheduler[0])]
        if settings.scheduler[0].startswith("https://") and not any(
            each.startswith("https://") for each in (url, *more)
        ):
            log.warning("the scheduler sends only workers without https here: give --tls-cert and --tls-key")
        return RunStart(
            id=spec.id,
            network=spec.network.name,
            strategy=spec.choice,
            config={
                "network": spec.network.model_dump(mode="json"),
                "strategy": spec.strategy.model_dump(mode="json"),
                "workers": spec.workers,
                "wire": spec.wire,
                "share_data": settings.share_data,
                **({} if spec.own is None else {"improves": spec.own.release}),
                "until": settings.until,
            },
            url=url,
            more_urls=tuple(more),
            wants=RunWants(
                workers=spec.workers,
                min_gflops=settings.min_gflops,
                min_memory_bytes=None if settings.min_memory_mb is None else round(1e6 * settings.min_memory_mb),
                kept=spec.own is not None,
                start_at=settings.start_at,
            ),
            steps=self._host.steps,
            incarnation=incarnation,
        )

    async def report(self, incarnation: str) -> RunReport:
        """Report of the present state."""
        status = await self._host.status()
        copies = {each.name: copies_of(each) for each in self._host.copies()}
        least = RunReport(
            incarnation=incarnation,
            state="finished" if status.state == "stopped" else status.state,
            done=status.done,
            version=status.version,
            tickets=self._tickets.seen,
            missing=status.missing,
        )
        try:
            known = set(WorkerReport.model_fields)
            workers = tuple(
                WorkerReport(**each.model_dump(include=known), copies=copies.get(each.name))
                for each in status.workers[:_MOST_WORKERS]
            )
            more = {"loss": status.loss, "accuracy": status.accuracy, "workers": workers, "result": status.result}
            return RunReport(**{**dict(least), **more, "error": status.error and status.error[:MOST_ERROR]})
        except ValidationError as error:
            log.warning("the scheduler is told only how far the run is: %s", faults(error, RunReport)[:MOST_ERROR])
            return least


def copies_of(data: WorkerData) -> WorkerCopies:
    """Return the part of the report about a worker's training images."""
    return WorkerCopies(
        holds=spans(data.holds),
        has=len(data.holds),
        wants=len(data.wanted),
        serves=data.serves and data.trusted,
        segment=data.segment,
        source=data.source,
        share=data.share,
    )


def spans(numbers: Iterable[int]) -> str:
    """Rising numbers, those that follow each other as a span: "0-3, 7". Cut short where there are many."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    words = ["-".join(map(str, each)) for each in found[:_MOST_SPANS]]
    return ", ".join(words + ["..."] * (len(found) > _MOST_SPANS))
