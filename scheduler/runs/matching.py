"""The match of workers and runs: a worker is sent to the oldest run that still wants workers, or to the run that it
chooses. Pure: time is passed in.

A worker that was sent to a run counts there for a while although its host has not reported it yet. So many workers that
ask at once do not all go to the same run. Names cost nothing. So the workers of one token that have sent no updates
yet, whether they have come or not, hold at most half of the places of a run. Those that have not come hold no place
once one of them has failed to come. A scheduler that takes over does not know these promises, and knows a worker's
token again only once the worker renews its ticket. So a run may get a few more workers than it wants, which does no
harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tierkit.errors import Conflict, LimitReached, Unavailable
from tierkit.pacing import TokenBucket
from tierkit.wire.runs import RunWants, WorkerOffer

__all__ = ["THERE_S", "Matchmaker", "Wanting", "chosen", "unfit"]

THERE_S = 60.0
"""Seconds after which a worker counts as gone if its host has not heard it, or if it was sent to a host and did not
come."""

_PER_S, _BURST = 20.0, 100.0
"""Questions of one caller. Workers without work ask every 3 s: 60 of them behind one address, or with one token, never
exceed this."""
_MOST_CALLERS = 10_000
_MOST_PROMISES = 10_000
_AGAIN_S = 3.0
_DISTRUST_S = 600.0
"""Seconds for which a token holds no places after a worker of it was sent to a run and did not come."""
_MOST_DISTRUSTED = 10_000
_MOST_CAME = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """A run that is under way."""

    id: str
    since: float
    """Time at which it was begun, on any clock."""
    wants: RunWants
    there: Collection[str]
    """Names of the workers that its host has heard lately."""
    coming: Mapping[str, str | None] = field(default_factory=dict)
    """Workers that were sent there lately, by name, with their tokens; None if no token was asked for."""
    idle: Mapping[str, str | None] = field(default_factory=dict)
    """Workers of `there` that have sent no update yet, and their tokens; None for an unknown token."""

    def taken(self, but: str) -> int:
        """Number of places that are taken, without the place of one worker."""
        proven = {*self.there} - {*self.idle, but}
        others = {**self.coming, **self.idle}
        held = Counter(token for name, token in others.items() if name not in proven and name != but)
        most = max(1, (self.wants.workers or 0) // 2)
        return len(proven) + sum(count if token is None else min(count, most) for token, count in held.items())


def unfit(wants: RunWants, offer: WorkerOffer) -> str:
    """Return why a worker does not fit a run; "" if it does."""
    if wants.workers == 0:
        return "takes no workers: its ranks are all there"
    if wants.kept != offer.kept:
        return (
            "is for workers with kept pictures (--kept)"
            if wants.kept
            else "trains on a data set, and this worker offers kept pictures (--kept)"
        )
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
    """Return the id of the run that the worker is sent to.

    Args:
        runs: runs that take workers; for a worker that chooses, only its choice.

    Raises:
        Conflict: the worker does not fit the run that it has chosen.
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
        if run.wants.workers is None or run.taken(offer.name) < run.wants.workers:
            return run.id
    if fit:
        raise Unavailable("all training runs have the workers that they want", retry_after_s=_AGAIN_S)
    if runs:
        raise Unavailable(
            f"no training run wants this worker: the oldest {unfit(runs[0].wants, offer)}", retry_after_s=_AGAIN_S
        )
    raise Unavailable("no training run is under way", retry_after_s=_AGAIN_S)


class Matchmaker:
    """State between two matches: the requests of each caller, and the runs that workers were sent to. All of it is
    bounded."""

    def __init__(self) -> None:
        self._callers: dict[str, TokenBucket] = {}
        self._promises: dict[str, tuple[str, float, str | None]] = {}
        """By worker: the run that it was sent to last, since when it is awaited, and its token."""
        self._distrusted: dict[str, float] = {}
        """Tokens whose workers were sent somewhere and did not come, and when that was clear."""
        self._came: dict[tuple[str, str], str] = {}
        """The tokens of workers that have come, by run and name."""

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

    def sent(self, worker: str, run: str, now: float, token: str | None = None) -> None:
        """This worker was sent to this run.

        Args:
            token: token of the worker; None if none is asked for.
        """
        self._expire(now)
        _, since, _ = self._promises.get(worker, ("", now, None))
        self._promises[worker] = run, since, token  # in its place: to ask again holds no place for longer
        if len(self._promises) > _MOST_PROMISES:
            del self._promises[next(iter(self._promises))]

    def came(self, workers: Iterable[str], run: str) -> None:
        """The host of a run has heard these workers."""
        for worker in workers:
            if worker in self._promises and self._promises[worker][0] == run:
                self.is_there(worker, run, self._promises.pop(worker)[2])

    def is_there(self, worker: str, run: str, token: str | None) -> None:
        """This worker of this token is at the host of this run."""
        self._came.pop((run, worker), None)
        if token is not None:
            self._came[run, worker] = token
        if len(self._came) > _MOST_CAME:
            del self._came[next(iter(self._came))]

    def tokens_of(self, workers: Iterable[str], run: str) -> dict[str, str | None]:
        """These workers of a run and their tokens, as far as they are known."""
        return {worker: self._came.get((run, worker)) for worker in workers}

    def coming(self, now: float) -> dict[str, dict[str, str | None]]:
        """Return, by run, the workers that were sent there lately, have not come yet and are expected, with their
        tokens."""
        self._expire(now)
        coming: dict[str, dict[str, str | None]] = {}
        for worker, (run, _, token) in self._promises.items():
            if token not in self._distrusted:
                coming.setdefault(run, {})[worker] = token
        return coming

    def _expire(self, now: float) -> None:
        # Both dicts are in the order of time.
        while self._promises and now - next(iter(self._promises.values()))[1] > THERE_S:
            _, since, token = self._promises.pop(next(iter(self._promises)))
            if token is not None:
                self._distrusted.pop(token, None)
                self._distrusted[token] = since + THERE_S
                if len(self._distrusted) > _MOST_DISTRUSTED:
                    del self._distrusted[next(iter(self._distrusted))]
        while self._distrusted and now - next(iter(self._distrusted.values())) > _DISTRUST_S:
            del self._distrusted[next(iter(self._distrusted))]
