"""Reports of rank 0 to a scheduler, so that people can watch and stop the run: they go out from a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models.training.config import TrainConfig
from tierkit.access import Tickets, TokenFile
from tierkit.errors import Conflict, DeadlineExceeded, NotFound, TerraceError, Unavailable
from tierkit.types import WorkerOrder
from tierkit.wire.runs import RunReport, RunStart, RunWants, WorkerReport
from training.host.reporting import report_to_scheduler

__all__ = ["RankProgress", "RankReports", "ReportsTo"]

_FAREWELL_S = 10.0
_MOST_ERROR = 2_000


@dataclass(slots=True, kw_only=True)
class RankProgress:
    """Present state of a run; changes while it runs."""

    steps: int
    """Steps of each rank."""
    ranks: int
    """Number of ranks that take part now."""
    step: int = 0
    loss: float | None = None
    """Mean of the last steps of rank 0."""
    bytes_sent: int = 0
    """Bytes sent by rank 0; others send about the same."""
    bytes_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsTo:
    """The scheduler that gets the reports."""

    urls: tuple[str, ...]
    token_file: Path | None = None
    tls_ca: Path | None = None


@dataclass(kw_only=True)
class RankReports:
    """The run of some ranks, as a scheduler hears of it. It wants no workers: its ranks are all there."""

    id: str
    network: TrainConfig
    strategy: str
    config: dict[str, Any]
    """The strategy's."""
    url: str
    """Address of rank 0, shown to people."""
    progress: RankProgress
    stop: Callable[[], None]
    """Ask all ranks to end."""
    state: Literal["running", "finished", "stopped", "failed"] = "running"
    result: dict[str, Any] | None = None
    error: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, incarnation: str) -> RunStart:
        """First report of the run."""
        network = self.network.model_dump(mode="json")
        return RunStart(
            id=self.id,
            network=self.network.name,
            strategy=self.strategy,
            config={"network": network, "strategy": self.config, "workers": self.progress.ranks},
            url=self.url,
            wants=RunWants(workers=0),
            steps=self.progress.steps,
            incarnation=incarnation,
        )

    async def report(self, incarnation: str) -> RunReport:
        """Report of the present state."""
        now, result = self.progress, self.result
        return RunReport(
            incarnation=incarnation,
            state="finished" if self.state == "stopped" else self.state,
            done=now.step,
            version=now.step,
            loss=now.loss,
            accuracy=None if result is None else result["accuracy"],
            workers=tuple(
                WorkerReport(
                    name=f"rank-{rank}",
                    updates=now.step,
                    staleness=0.0,
                    bytes_sent=now.bytes_sent,
                    bytes_received=now.bytes_received,
                    idle_s=0.0,
                )
                for rank in range(now.ranks)
            ),
            result=result,
            error=self.error,
        )

    async def order(self, name: str, order: WorkerOrder) -> None:
        """Raises NotFound: ranks take no orders one by one."""
        raise NotFound(f"{name!r} is a rank: it computes as long as the run does")

    @contextlib.contextmanager
    def sent(self, scheduler: ReportsTo | None) -> Iterator[None]:
        """Meanwhile the scheduler hears of the run every second; at the end, how it ended."""
        if scheduler is None:
            yield
            return
        token = None if scheduler.token_file is None else TokenFile(scheduler.token_file)
        loop = asyncio.new_event_loop()
        reports = report_to_scheduler(
            self, scheduler.urls, token=token, tls_ca=scheduler.tls_ca, tickets=Tickets(self.id)
        )

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(reports)

        thread = threading.Thread(target=run, name="reports", daemon=True)
        thread.start()
        try:
            yield
        except (Conflict, DeadlineExceeded, Unavailable):
            self.state = "stopped"  # it can continue
            raise
        except TerraceError as error:
            self.state, self.error = "failed", str(error)[:_MOST_ERROR]
            raise
        finally:
            if self.state == "running":
                self.state = "stopped" if self.result is None else "finished"
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self.over.set)
            thread.join(_FAREWELL_S)
