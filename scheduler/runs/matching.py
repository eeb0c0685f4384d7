"""Which run a worker is sent to: the oldest that still wants workers, or the one that it chooses. Pure: time is passed
in.

A worker that was sent somewhere counts there for a while although its host has not told of it yet, so that many who ask
at once do not all go to the same run. A scheduler that takes over knows nothing of these promises; then a run may get
some workers more than it wants, which harms nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tierkit.errors import Conflict, LimitReached, Unavailable
from tierkit.pacing import TokenBucket
from tierkit.wire.runs import RunWants, WorkerOffer

__all__ = ["THERE_S", "Matchmaker", "Wanting", "chosen", "unfit"]

THERE_S = 60.0
"""A worker that its host has not heard for so long has gone, and so has one that was sent and did not come."""

_PER_S, _BURST = 20.0, 100.0
"""Questions of one caller. Workers without work ask every 3 s: 60 of them behind one address, or with one token, are
within this for ever."""
_MOST_CALLERS = 10_000
_MOST_PROMISES = 10_000
_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """A run that is under way."""

    id: str
    since: float
    """When it was begun; on any clock."""
    wants: RunWants
    there: Collection[str]
    """Names of the workers that its host has heard lately."""


def unfit(wants: RunWants, offer: WorkerOffer) -> str:
    """Why a worker is none for a run; "" where it is one."""
    for what, least, has, unit in (
        ("speed", wants.min_gflops, offer.gflops, "GFLOP/s"),
        ("memory", _mb(wants.min_memory_bytes), _mb(offer.memory_bytes), "MB"),
    ):
        if least is not None and (has is None or has < least):
            told = "has not told its own" if has is None else f"has {has:,.4g}"
            return f"wants a {what} of at least {least:,.4g} {unit}, and this worker {told}"
    return ""


def _mb(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def chosen(runs: Iterable[Wanting], offer: WorkerOffer) -> str:
    """The id of the run that the worker is sent to.

    Args:
        runs: that take workers; of a worker that chooses, its choice alone.

    Raises:
        Conflict: it has chosen a run that it is too slow or too small for.
        Unavailable: no run wants it at present.
    """
    runs = sorted(runs, key=lambda run: (run.since, run.id))
    if offer.run is not None:
        for run in runs:
            if reason := unfit(run.wants, offer):
                raise Conflict(f"run {run.id} {reason}")
            return run.id
    fit = [run for run in runs if not unfit(run.wants, offer)]
    for run in fit:
        if run.wants.workers is None or len({*run.there} - {offer.name}) < run.wants.workers:
            return run.id
    if fit:
        raise Unavailable("all training runs have the workers that they want", retry_after_s=_AGAIN_S)
    if runs:
        raise Unavailable(
            f"no training run wants this worker: the oldest {unfit(runs[0].wants, offer)}", retry_after_s=_AGAIN_S
        )
    raise Unavailable("no training run is under way", retry_after_s=_AGAIN_S)


class Matchmaker:
    """What is remembered between two matches: who has asked how often, and who was sent where. All of it is bounded."""

    def __init__(self) -> None:
        self._callers: dict[str, TokenBucket] = {}
        self._promises: dict[str, tuple[str, float]] = {}
        """Of each worker: the run that it was sent to last, and when."""

    def admit(self, caller: str, now: float) -> None:
        """Count a question of this caller.

        Raises:
            LimitReached: it asks too often. Others are not concerned.
        """
        bucket = self._callers.pop(caller, None) or TokenBucket(per_s=_PER_S, burst=_BURST, at=now)
        self._callers[caller] = bucket
        if len(self._callers) > _MOST_CALLERS:
            del self._callers[next(iter(self._callers))]
        if wait_s := bucket.wait_s(now):
            raise LimitReached(f"at most {_PER_S:g} matches a second are asked for by one caller", retry_after_s=wait_s)
        bucket.take(now)

    def sent(self, worker: str, run: str, now: float) -> None:
        """This worker was sent to this run."""
        self._promises.pop(worker, None)
        self._promises[worker] = run, now
        if len(self._promises) > _MOST_PROMISES:
            del self._promises[next(iter(self._promises))]

    def coming(self, now: float) -> dict[str, set[str]]:
        """By run: the workers that were sent there lately."""
        coming: dict[str, set[str]] = {}
        for worker, (run, at) in self._promises.items():
            if now - at <= THERE_S:
                coming.setdefault(run, set()).add(worker)
        return coming
