"""Worker 0 of a run: the host itself computes, in one thread, and asks itself as a worker asks it over HTTP."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from models.training.data import TrainingData
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded
from training.host.host import Host
from training.learner import FlatLearner
from training.messages import GrantedLease, Join, Progress, UpdateAnswer, UpdateHead
from training.worker.connection import HostConnection
from training.worker.node import Worker

__all__ = ["CHIEF", "compute_as_chief"]

log = logging.getLogger(__name__)

CHIEF = "worker-0"
_AGAIN_S = 0.5


async def compute_as_chief(host: Host, data: TrainingData) -> None:
    """Compute until the run has ended, except while an operator or the run itself has barred worker 0.

    Args:
        data: the training images; the host measures with a separate network.
    """
    learner = await asyncio.to_thread(FlatLearner, host.spec.network, data, strategy=host.spec.strategy)
    barred = False
    while not host.finished:
        try:
            await Worker(host.spec, _Inside(host), _have).run(learner)
            return
        except Conflict as error:
            log.error("the host computes no longer: %s", error)
            return
        except Forbidden as error:
            if not barred:
                log.warning("the host computes no more until an operator lets it: %s", error)
            barred = True
            await asyncio.sleep(_AGAIN_S)


async def _have(ask: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            return await ask()
        except Overloaded:
            await asyncio.sleep(_AGAIN_S)


class _Inside(HostConnection):
    """The requests of other workers, made in this process."""

    def __init__(self, host: Host) -> None:
        self.name, self.incarnation, self._host = CHIEF, secrets.token_hex(8), host

    async def join(self, data_sha256: str, *, fetches: bool = False) -> None:
        await self._host.join(Join(name=self.name, incarnation=self.incarnation, data_sha256=data_sha256))

    async def lease(self) -> tuple[GrantedLease, bytes] | Literal["none yet"] | None:
        granted = await self._host.lease(self.name, self.incarnation)
        if granted is None:
            if not self._host.finished:
                return "none yet"
            await self._host.leave(self.name, self.incarnation)
        return granted

    async def renew(self, lease: int, progress: Progress) -> None:
        if not await self._host.renew(lease, progress):
            raise NotFound("this lease has expired")

    async def update(self, head: UpdateHead, message: tuple[bytes, Mapping[str, str]]) -> UpdateAnswer:
        body, _ = message
        return await self._host.take(head, body, len(body))
