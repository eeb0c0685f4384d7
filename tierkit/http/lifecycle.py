"""Lifecycle of a service: starting, ready, draining (graceful shutdown); and the background loops that it owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

from tierkit.access import Authenticator
from tierkit.errors import SetupError, TerraceError

__all__ = ["Check", "Lifecycle"]

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[None]]
"""Proves that a part works by using it; raises when it does not."""

_CHECK_TIMEOUT_S = 2.0


class Lifecycle:
    """One per service process; `serve` drives it, routes and heartbeats read it.

    A service starts in neither state, becomes `ready` once its lifespan has begun, and `draining` with the first
    SIGTERM or Ctrl-C or when a loop that it owns crashes. It never goes back.
    """

    def __init__(self) -> None:
        self.url = ""
        """Address at which the service listens, such as http://127.0.0.1:7401; known before anything is loaded."""
        self.keys: Mapping[str, str] = {}
        """Secrets that this process accepts as tokens (`tierkit.access`), fresh at each start: one for each scheduler,
        by its name."""
        self.authenticator: Authenticator | None = None
        """Asks callers for their tokens; None if none is asked for."""
        self.keyed_path = ""
        """Requests below this path need no token: their route asks for a key."""
        self.on_refusal: Callable[[Scope, TerraceError], None] = lambda scope, error: None
        """Called for each request that the authenticator refuses."""
        self.standby: Callable[[], str | None] = lambda: None
        """Reason why the service does nothing now, while another one of its kind does; None otherwise."""
        self.is_current: Callable[[], Awaitable[bool]] = _always
        """Returns False once what the service has loaded has been replaced."""
        self.restarting = False
        """True if the process is to start again once it has drained."""
        self.in_flight = 0
        """Requests being answered that ask for work (any method but GET, HEAD and OPTIONS)."""
        self.crash: BaseException | None = None
        """Exception that ended a background loop; None if none has crashed."""
        self._ready = asyncio.Event()
        self._drain = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._checks: dict[str, Check] = {}
        self._notes: dict[str, Check] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def key(self) -> str:
        """The key for the first scheduler; "" without keys."""
        return next(iter(self.keys.values()), "")

    @property
    def ready(self) -> bool:
        """True if everything is loaded. Stays true while the service drains."""
        return self._ready.is_set()

    def set_ready(self) -> None:
        """Everything is loaded: take work from now on."""
        self._ready.set()

    async def wait_ready(self) -> None:
        """Return when everything is loaded."""
        await self._ready.wait()

    @property
    def draining(self) -> bool:
        return self._drain.is_set()

    def drain(self) -> None:
        """Take no new work from now on. May be called more than once."""
        self._drain.set()

    def restart(self, why: str) -> None:
        """Drain, then start the process again with the same command."""
        log.warning("starting again: %s", why)
        self.restarting = True
        self.drain()

    async def wait_draining(self) -> None:
        """Return when the service begins to drain: endless answer streams end themselves then."""
        await self._drain.wait()

    async def wait_idle(self) -> None:
        """Return when no work is in flight."""
        await self._idle.wait()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one request as in flight."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    def own(self, loop: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run `loop` in the background under this name, supervised.

        An exception that leaves it is logged and stops the whole service with exit code 1: a node whose heartbeats have
        silently died is worse than one that is restarted. The caller cancels its loops; `serve` cancels those that are
        left.
        """
        task = asyncio.create_task(loop, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (exc := task.exception()) is None:
            return
        if isinstance(exc, SetupError):
            log.critical("the service stops: %s", exc)  # for people, who can mend it
        else:
            log.critical("the background loop '%s' crashed; stopping the service", task.get_name(), exc_info=exc)
        self.crash = self.crash or exc
        self.drain()

    async def cancel_owned(self) -> None:
        """Cancel the loops that still run, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add_check(self, name: str, check: Check) -> None:
        """Let readiness depend on `check`, which must come back within 2 s."""
        self._checks[name] = check

    def remove_check(self, name: str) -> None:
        """Let readiness no longer depend on a part that is gone."""
        self._checks.pop(name, None)

    def add_note(self, name: str, check: Check) -> None:
        """Show the result of `check` with the checks of readiness, which does not depend on it."""
        self._notes[name] = check

    async def run_checks(self) -> Mapping[str, str]:
        """Result of each check by name: "ok", or a sentence."""
        return await _outcomes(self._checks)

    async def run_notes(self) -> Mapping[str, str]:
        """Result of each note by name: "ok", or a sentence."""
        return await _outcomes(self._notes)


async def _outcomes(checks: Mapping[str, Check]) -> Mapping[str, str]:
    return dict(zip(checks, await asyncio.gather(*map(_outcome, checks.values())), strict=True))


async def _always() -> bool:
    return True


async def _outcome(check: Check) -> str:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            await check()
    except TimeoutError:
        return f"no result within {_CHECK_TIMEOUT_S:g} s"
    except Exception as exc:
        # Whatever is wrong with the part is an answer here, not a failure of the health route.
        return str(exc) or type(exc).__name__
    return "ok"
