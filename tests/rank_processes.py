"""Ranks as processes that have imported torch before they start, so that a test does not wait for that."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tierkit.http.address import free_port
from training.parallel.rank import RankOptions
from training.parallel.reporting import RankProgress
from training.parallel.running import run_rank

__all__ = ["RankProcess", "place_of", "rank_processes"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["training.parallel.running", "training.parallel.schedules", "torch._dynamo", "tests.rank_processes"]
)
_BUDGET_S = 60.0


@dataclass
class RankProcess:
    """A rank, and what came from it."""

    process: BaseProcess
    says: Connection
    progress: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, step, and ranks that took part."""

    def ended(self) -> dict[str, Any] | BaseException | None:
        """Wait for the result or the error; None of a rank without a result."""
        while (said := self.next()) is not None:
            kind, value = said
            if kind == "ended":
                self.process.join(_BUDGET_S)
                return value  # type: ignore[no-any-return]
        return None

    def next(self) -> tuple[str, Any] | None:
        """The next thing that it says; None once it is dead."""
        try:
            if not self.says.poll(_BUDGET_S):
                raise TimeoutError("the rank says nothing")
            kind, value = self.says.recv()
        except EOFError:
            return None
        if kind == "progress":
            self.progress.append(value)
        return kind, value

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join(_BUDGET_S)


def place_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment of a rank on this machine."""
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def rank_processes(
    options: Mapping[int, RankOptions] | RankOptions, ranks: int, environment: Mapping[str, str] | None = None
) -> Iterator[list[RankProcess]]:
    """Start ranks.

    Args:
        options: of all; or of each that is started, by its number.
    """
    port = free_port()
    chosen = options if isinstance(options, Mapping) else dict.fromkeys(range(ranks), options)
    started = []
    try:
        for rank, own in chosen.items():
            started.append(start_rank(own, {**place_of(rank, ranks, port), **(environment or {})}))
        yield started
    finally:
        for each in started:
            if each.process.is_alive():
                each.kill()


def start_rank(options: RankOptions, environment: Mapping[str, str]) -> RankProcess:
    """Start one rank, which whoever calls ends."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_live, args=(options, dict(environment), sender), daemon=True)
    process.start()
    sender.close()
    return RankProcess(process, receiver)


def _live(options: RankOptions, environment: dict[str, str], says: Connection) -> None:
    os.environ.update(environment)

    def tell(now: RankProgress) -> None:
        says.send(("progress", (time.monotonic(), now.step, now.ranks)))

    try:
        found: Any = run_rank(options, tell)
    except Exception as error:
        found = error
    says.send(("ended", found))
