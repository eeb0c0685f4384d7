"""Supervision of a source: it runs until the node stops, and starts again after each fault."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Literal

from msgspec import Struct

from end_node.settings import SourceSettings
from end_node.sources.choosing import Opened, open_source_of
from end_node.sources.picture import Intake, TakenPicture
from tierkit.errors import InvalidInput, SetupError, TerraceError
from tierkit.pacing import backoff_s

__all__ = ["SourceKeeper", "SourceState", "SourceStatus"]

log = logging.getLogger(__name__)

SourceState = Literal["starting", "running", "waiting", "paused", "finished"]

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 1.0
"""A stream that was cut has to be back within 5 s."""
_LONGEST_POLITE_S = 5.0
"""Longest wait for a snapshot, whose server has other clients, and for a fault that a person has to mend."""
_STEADY_S = 5.0
"""A source that ran for this long begins again with the shortest pause."""


class SourceStatus(Struct, frozen=True, kw_only=True):
    """State of a source."""

    name: str
    kind: str
    """"" as long as it is unknown."""
    state: SourceState
    reason: str = ""
    """Reason why it waits."""
    taken: int = 0
    """Pictures taken since the node started."""
    skipped: int = 0
    """Pictures seen but not taken, because of `rate` or `changed`, or because they are refused."""
    restarts: int = 0
    """Starts after a fault."""
    last_picture_s: float | None = None
    """Seconds since the last picture was taken; None: none was."""


class SourceKeeper:
    """Keeps one source running: `run` is a background loop for the node to own.

    Each change of state is logged once. No fault of a source leaves `run`.

    Args:
        settings: of the source.
        intake: takes its pictures.
        tls_ca: file with the certificates to trust for https:// and rtsps://, instead of the usual public authorities.
        clock: monotonic time in seconds.
        opened: makes the source from its settings.
    """

    def __init__(
        self,
        settings: SourceSettings,
        intake: Intake,
        *,
        tls_ca: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        opened: Callable[[SourceSettings, Path | None], Awaitable[Opened]] = open_source_of,
    ) -> None:
        self.settings = settings
        self._intake = intake
        self._tls_ca = tls_ca
        self._clock = clock
        self._opened = opened
        self.changed: Callable[[], None] = lambda: None
        """Called after each change of the state or of its reason."""
        self._kind: str = settings.kind or ""
        self._state: SourceState = "starting"
        self._reason = ""
        self._said: tuple[SourceState, str] | None = None
        self._taken = self._skipped = self._restarts = 0
        self._last_picture: float | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def status(self) -> SourceStatus:
        """State of the source now."""
        return SourceStatus(
            name=self.settings.name,
            kind=self._kind,
            state=self._state if self._resumed.is_set() else "paused",
            reason=self._reason,
            taken=self._taken,
            skipped=self._skipped,
            restarts=self._restarts,
            last_picture_s=None if self._last_picture is None else self._clock() - self._last_picture,
        )

    def pause(self) -> None:
        """Take no pictures until `resume`. A picture that is being answered is given up."""
        self._resumed.clear()
        if self._reading is not None:
            self._reading.cancel()
        self.changed()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._resumed.set()
        self.changed()

    async def run(self) -> None:
        """Read the source until cancelled, or until the end of a file. A `push` source has nothing to read."""
        if self.settings.kind == "push":
            self._enter("running")
            return
        while True:
            if not self._resumed.is_set():
                self._enter("paused")
                await self._resumed.wait()
            reading = self._reading = asyncio.create_task(self._read(), name=f"source {self.settings.name}: reading")
            try:
                await asyncio.wait([reading])
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            if not reading.cancelled():
                reading.result()
                self._enter("finished")
                return

    async def _read(self) -> None:
        """Read, and start again after each fault; return at the end of a file."""
        failures = 0
        settings = self.settings
        while True:
            self._heard = False
            began = self._clock()
            if not failures:
                self._enter("starting")
            try:
                kind, source = await self._opened(settings, self._tls_ca)
                self._kind = kind
                settings = settings.model_copy(update={"kind": kind})  # known from now on
                await source.run(_Counted(self._intake, self.count), self._alive)
                return
            except TerraceError as exc:
                error: Exception = exc
            except Exception as exc:
                # A defect in the code of one source must not take the node's other work with it.
                log.exception("source '%s' crashed", self.settings.name)
                error = exc
            if self._heard and self._clock() - began >= _STEADY_S:
                failures = 0
            failures += 1
            self._restarts += 1
            self._enter("waiting", str(error) or type(error).__name__)
            polite = self._kind == "snapshot" or isinstance(error, SetupError | InvalidInput)
            cap_s = _LONGEST_POLITE_S if polite else _LONGEST_BACKOFF_S
            await asyncio.sleep(backoff_s(failures, first_s=_FIRST_BACKOFF_S, cap_s=cap_s, chance=random.random()))

    def count(self) -> None:
        """Count a picture that has been taken."""
        self._taken += 1
        self._last_picture = self._clock()
        self._alive(0)

    def _alive(self, skipped: int) -> None:
        self._heard = True
        self._skipped += skipped
        self._enter("running")

    def _enter(self, state: SourceState, reason: str = "") -> None:
        before, self._state, self._reason = (self._state, self._reason), state, reason
        if before != (state, reason):
            self.changed()
        if state == "starting" or self._said == (state, reason):
            return
        self._said = (state, reason)
        text = f"source '{self.settings.name}': {state}" + (f", {reason}" if reason else "")
        log.log(logging.WARNING if state == "waiting" else logging.INFO, "%s", text)


class _Counted:
    """Intake that counts what it hands on."""

    def __init__(self, intake: Intake, count: Callable[[], None]) -> None:
        self._intake = intake
        self._count = count

    async def take(self, picture: TakenPicture) -> None:
        await self._intake.take(picture)
        self._count()

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return await self._intake.known(marks)
