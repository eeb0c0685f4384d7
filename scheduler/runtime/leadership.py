"""Leader election: a scheduler process is a standby until it holds the lease, then the leader."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import aiohttp

from models.manifest import load_manifest
from scheduler.ingest.inputs import remove_inputs
from scheduler.jobs.service import Scheduler
from scheduler.metrics import DATABASE, LEADS, set_standby
from scheduler.runtime.assembly import open_scheduler
from scheduler.settings import SchedulerSettings
from scheduler.store.database import REFUSALS, open_database
from scheduler.store.lease import Lease
from tierkit.errors import SetupError, Unavailable
from tierkit.http.lifecycle import Lifecycle

__all__ = ["leading"]

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""Seconds to wait after a term has ended; another scheduler may do better."""


class _Leadership:
    """The role of the process: standby or leader.

    Args:
        lease: of the database.
        open_term: the life of the scheduler while it leads.
        take: called with each new one, which answers requests from then on.
        lifecycle: of the service.
        forget_inputs: called while another scheduler has the jobs.
    """

    def __init__(
        self,
        lease: Lease,
        open_term: Callable[[], AbstractAsyncContextManager[Scheduler]],
        take: Callable[[Scheduler], None],
        lifecycle: Lifecycle,
        forget_inputs: Callable[[], None],
    ) -> None:
        self.decided = asyncio.Event()
        """Set once it is known whether this scheduler leads."""
        self._lease = lease
        self._open_term = open_term
        self._take = take
        self._lifecycle = lifecycle
        self._forget_inputs = forget_inputs
        self._leads = False

    def standby(self) -> str | None:
        """Return why this scheduler does nothing now; None while it leads."""
        if self._leads and self._lease.held:
            return None
        if self._lease.trouble:
            return f"this scheduler is a standby, and cannot reach the database: {self._lease.trouble}"
        return f"this scheduler is a standby; {_named(self._lease.leader)} leads: ask that one"

    async def check_database(self) -> None:
        """Raises Unavailable while a standby could not lead."""
        if self._lease.trouble:
            raise Unavailable(self._lease.trouble)

    def _wait(self) -> None:
        DATABASE.set(not self._lease.trouble)
        self._forget_inputs()
        self.decided.set()

    async def run(self) -> None:
        """Lead whenever no other scheduler does, until cancelled.

        Raises:
            SetupError: something that a leader needs is wrong.
        """
        while True:
            set_standby()
            self._lifecycle.add_check("database", self.check_database)
            await self._lease.acquire(self._wait)
            keeping = asyncio.create_task(self._lease.keep(), name="lease")
            try:
                async with self._open_term() as scheduler:
                    self._take(scheduler)
                    self._leads = True
                    LEADS.set(1)
                    if not self._lease.alone:
                        _log.info("this scheduler leads", extra={"epoch": self._lease.epoch})
                    self.decided.set()
                    await self._lease.lost.wait()
                    self._leads = False
                    _log.warning("this scheduler leads no longer: another one has taken over, or the lease has run out")
                    await scheduler.step_down()
            except (Unavailable, *REFUSALS) as exc:
                if not self.decided.is_set():
                    raise
                _log.error("this scheduler cannot lead now: %s", exc)
            finally:
                self._leads = False
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                if not self._lease.lost.is_set():
                    await self._lease.release()
            await asyncio.sleep(_AGAIN_S)


@asynccontextmanager
async def leading(
    settings: SchedulerSettings,
    lifecycle: Lifecycle,
    take: Callable[[Scheduler], None],
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
) -> AsyncIterator[None]:
    """Lead or stand by, from the moment on when it is known which.

    Args:
        take: called with each new scheduler, which answers requests from then on.

    Raises:
        SetupError: the state folder, the database or the manifest cannot be used.
    """
    manifest = load_manifest(settings.models)
    with _locked(settings.state):
        engine = await open_database(settings.database_url)
        try:
            lease = Lease(
                engine, url=lifecycle.url, lease_s=settings.leader_lease_s, alone=not settings.shares_database
            )
            leadership = _Leadership(
                lease,
                lambda: open_scheduler(settings, manifest, lifecycle, engine, lease, middlewares),
                take,
                lifecycle,
                partial(remove_inputs, settings.inputs) if settings.shares_database else lambda: None,
            )
            running = asyncio.create_task(leadership.run(), name="leadership")
            decided = asyncio.create_task(leadership.decided.wait())
            try:
                await asyncio.wait({running, decided}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                lifecycle.own(_outlive(running), name="leadership")
                lifecycle.standby = leadership.standby
                yield
            finally:
                for task in (decided, running):
                    task.cancel()
                await asyncio.gather(decided, running, return_exceptions=True)
        finally:
            await engine.dispose()


def _named(url: str) -> str:
    """A scheduler by its URL, where that has an address: one that listens on all of its machine's has none."""
    return "another one" if not url or "//0.0.0.0:" in url or "//[::]:" in url else url


async def _outlive(running: asyncio.Task[None]) -> None:
    await asyncio.shield(running)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the state folder and lock it for this process. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "scheduler.lock").touch(mode=0o600)
        lock = (folder / "scheduler.lock").open("w")
    except OSError as exc:
        raise SetupError(f"cannot write the folder {folder}: {exc.strerror}; choose another with --state") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise SetupError(f"another scheduler uses the state folder {folder}; choose another with --state") from exc
        yield
