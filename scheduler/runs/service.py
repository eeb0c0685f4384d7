"""Training runs behind the HTTP API: hosts begin them and report, people follow and stop them, workers find hosts.

The runs under way are in memory, with a copy in the database that is at most some seconds old; beginnings, ends and
wishes to stop are in the database before they are answered. A scheduler that takes over continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from scheduler.core.curve import extended
from scheduler.core.run import RunDetails, RunRow
from scheduler.keyed_events import KeyedEvents
from scheduler.runs.matching import THERE_S, Matchmaker, Wanting, chosen
from scheduler.runs.offers import Offers
from scheduler.runs.state import SILENT_S, point_of, state_after, state_now
from scheduler.runs.views import brief, summary, whole
from scheduler.runs.workers import may_work, wishes_of, with_wishes
from tierkit.access import TokenEntry, issued, secret_of_run
from tierkit.errors import Conflict, InvalidInput, LimitReached, NotFound, Overloaded, Unavailable
from tierkit.types import TOLD_TO_GO, RunState, WorkerOrder
from tierkit.wire.runs import (
    BegunRun,
    Run,
    RunMatch,
    RunOrders,
    RunPage,
    RunProgress,
    RunReport,
    RunStart,
    RunWants,
    WorkerOffer,
)

__all__ = ["EVERYTHING", "RunEvents", "Runs", "Sight"]

_log = logging.getLogger(__name__)

_MOST_UNDER_WAY = 200
"""Most runs whose hosts report. One may have a thousand workers, which take about 300 kB here."""
_FULL_AGAIN_S = 5.0
_LOOK_S = 1.0
"""Seconds between two looks for hosts that have fallen silent."""
_SAVE_S = 5.0
"""Seconds between two writes of what a run has reported."""
_KEEP_ALIVE_S = 15.0
_HTTPS = "https://"
_CURSOR = re.compile("([0-9]{1,17})-([0-9a-f]{32})", re.ASCII)

RunEvents = AsyncGenerator[tuple[str, RunProgress, int] | None, None]
"""Kind, data and number of each event; None if nothing has happened for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Limits of the runs that a caller may see."""

    owner: str | None = None
    """Only theirs; None for all."""
    unended: bool = False
    """Only those without an end."""
    run: str | None = None
    """Only this one; None for all."""

    def check(self, row: RunRow, state: RunState) -> None:
        """Raises NotFound for other runs: they are not there for this caller."""
        if self.owner not in (None, row.owner) or self.run not in (None, row.id) or (self.unended and state.final):
            raise _no_run(row.id)


EVERYTHING = Sight()


@dataclass(slots=True)
class _Known:
    """A run as it is now."""

    row: RunRow
    details: RunDetails
    heard: float
    """Monotonic seconds; a scheduler that takes over gives each host a new beginning."""
    saved: float = 0.0
    dirty: bool = False
    """True if the database has something older."""
    reports: int = 0
    shown: RunState | None = None
    """State that followers received last."""

    def state(self, now: float) -> RunState:
        return state_now(self.row.state, now - self.heard)


class RunRecords(Protocol):
    """Durable rows of runs; each method raises Unavailable when the database does not answer."""

    async def add(self, row: RunRow, details: RunDetails) -> None: ...

    async def save(self, changed: Sequence[tuple[RunRow, RunDetails]]) -> None: ...

    async def get(self, run_id: str) -> tuple[RunRow, RunDetails] | None: ...

    async def unended(self, most: int) -> Sequence[tuple[RunRow, RunDetails]]: ...

    async def unended_of(self, run_ids: Collection[str]) -> frozenset[str]: ...

    async def page(
        self, *, limit: int, before: tuple[float, str] | None, owner: str | None, unended: bool
    ) -> list[RunRow]: ...

    async def purge(self, before: float) -> Collection[str]: ...


class Runs:
    """Everything that the API does to training runs.

    Args:
        secret: secret of the schedulers that share the database; the runs' secrets are made from it.
        clock: Returns monotonic seconds.
        wall: Returns seconds since 1970, used in answers and in tickets.
        elapsed: Returns seconds of elapsed time, used for retention and for the silence of hosts after a restart.
    """

    def __init__(
        self,
        store: RunRecords,
        *,
        secret: bytes,
        clock: Callable[[], float],
        wall: Callable[[], float],
        elapsed: Callable[[], float],
    ) -> None:
        self._store = store
        self._secret = secret
        self._clock = clock
        self._wall = wall
        self._elapsed = elapsed
        self._under_way: dict[str, _Known] = {}
        self._turn = asyncio.Lock()
        """Held while writing, so that a later write holds newer content."""
        self._news = KeyedEvents()
        self._stopping = False
        self._matchmaker = Matchmaker()
        self.offers = Offers(clock)

    def is_under_way(self, run_id: str) -> bool:
        return run_id in self._under_way

    def under_way_of(self, owner: str | None) -> int:
        """Runs of one owner whose hosts report."""
        now = self._clock()
        return sum(known.row.owner == owner and now - known.heard <= SILENT_S for known in self._under_way.values())

    async def recover(self) -> None:
        """Take up the runs that the scheduler before this one has left. Raises Unavailable."""
        now = self._clock()
        for row, details in await self._store.unended(_MOST_UNDER_WAY):
            self._under_way[row.id] = _Known(row, details, heard=now, saved=now)

    # --- hosts ----------------------------------------------------------------------------------------------------

    async def begin(self, wanted: RunStart, owner: str | None) -> tuple[BegunRun, bool]:
        """Store a run, or let a restarted host continue it.

        Returns:
            The run with its secret, meant only for its host; and True if the run is new.

        Raises:
            Conflict: the id belongs to another owner's run, or this run has ended.
            LimitReached: too many of the owner's are under way.
            Overloaded: too many are under way.
            Unavailable: the database does not accept it.
        """
        async with self._turn:
            known = await self._find(wanted.id)
            now, at = self._clock(), round(self._wall(), 6)
            given = wanted.model_dump(exclude={"config", "more_urls", "wants"})
            others: dict[str, Any] = {
                "config": wanted.config,
                "more_urls": wanted.more_urls,
                "wants": wanted.wants.model_dump(),
            }
            if known is None:
                self._make_room(now, owner)
                row = RunRow(**given, owner=owner, created_at=at, heard_at=at, heard_elapsed=self._elapsed())
                details = RunDetails(**others)
                await self._store.add(row, details)
                _log.info("training run begun", extra={"run": row.id, "network": row.network})
            else:
                row, details = known.row, known.details
                if owner not in (None, row.owner):
                    raise Conflict(f"the id {row.id} is another run's: choose a fresh one")
                _check_unended(row, known.state(now))
                self._make_room(now, row.owner, but=row.id)
                row = replace(row, **given, heard_at=at, heard_elapsed=self._elapsed())
                details = replace(details, **others)
                await self._store.save([(row, details)])
                _log.info("the host of a training run is back", extra={"run": row.id})
            self._under_way[row.id] = _Known(row, details, heard=now, saved=now)
            self._news.wake(row.id)
            told = whole(row, details, self._under_way[row.id].state(now)).model_dump()
            return BegunRun.model_validate({**told, "secret": self._secret_of(row)}), known is None

    def _secret_of(self, row: RunRow) -> str | None:
        """None if no tokens are asked for."""
        return None if row.owner is None else secret_of_run(self._secret, row.id, row.owner, row.created_at)

    async def report(self, run_id: str, said: RunReport, owner: str | None) -> RunOrders:
        """Take what the host of a run says; returns what it is to do, and which workers are on their way to it.

        Raises:
            NotFound: no such run of this owner.
            Conflict: another host has taken the run over.
            Unavailable: it was the last report, and the database does not accept it.
        """
        stop = await self._reported(run_id, said, owner)
        self._matchmaker.came((worker.name for worker in said.workers), run_id)
        coming = self._matchmaker.coming(self._clock()).get(run_id, {})
        known = self._under_way.get(run_id)
        wishes = {} if known is None else wishes_of(known.details.workers)
        return RunOrders(stop=stop, coming=tuple(sorted(coming)), workers=wishes)

    async def _reported(self, run_id: str, said: RunReport, owner: str | None) -> bool:
        known = self._under_way.get(run_id)
        if known is not None and said.state == "running":
            return self._take(known, said, owner)
        async with self._turn:
            known = await self._find(run_id)
            if known is None:
                raise _no_run(run_id)
            taken = replace(known)
            stop = self._take(taken, said, owner)
            if not taken.row.state.final:
                self._make_room(self._clock(), taken.row.owner, but=run_id)
                self._under_way[run_id] = taken
            elif taken.row is not known.row:  # it has not ended before in the same way
                await self._store.save([(taken.row, taken.details)])
                self._under_way.pop(run_id, None)
                _log.info("training run ended", extra={"run": run_id, "state": taken.row.state})
                self._news.wake(run_id)
            return stop

    def _take(self, known: _Known, said: RunReport, owner: str | None) -> bool:
        now, at, row, details = self._clock(), self._wall(), known.row, known.details
        state = known.state(now)
        Sight(owner=owner).check(row, state)
        if said.incarnation != row.incarnation:
            raise Conflict(f"run {row.id} has another host now, which was started later: end this one")
        late = state is RunState.STOPPED and said.state != "running"
        if state.final and not late:
            return True
        after = state_after(state, said.state, complete=said.done >= row.steps)
        known.row = replace(
            row,
            state=after,
            reason=(said.error or "") if after.final and not late else row.reason,
            heard_at=at,
            heard_elapsed=self._elapsed(),
            finished_at=(row.finished_at or at) if after.final else None,
            done=said.done,
            version=said.version,
            loss=row.loss if said.loss is None else said.loss,
            accuracy=row.accuracy if said.accuracy is None else said.accuracy,
            worker_count=sum(worker.standing not in TOLD_TO_GO and not worker.left for worker in said.workers),
            missing=said.missing,
        )
        curve = details.curve
        if said.loss is not None or said.accuracy is not None:
            curve = extended(curve, point_of(said, at))
        workers = with_wishes([worker.model_dump() for worker in said.workers], wishes_of(details.workers))
        known.details = replace(details, workers=workers, curve=curve, result=said.result)
        known.heard, known.dirty = now, True
        known.reports += 1
        if not after.final:  # an end is told once it is durable
            self._news.wake(row.id)
        return after is not RunState.RUNNING

    # --- everybody ------------------------------------------------------------------------------------------------

    async def view(self, run_id: str, sight: Sight = EVERYTHING) -> Run:
        """A run as it is now. Raises NotFound, Unavailable."""
        known, state = await self._seen(run_id, sight)
        return whole(known.row, known.details, state)

    async def page(self, *, limit: int, cursor: str | None, sight: Sight) -> RunPage:
        """Runs, newest first. Raises InvalidInput for a cursor that no page has given."""
        if sight.run is not None:
            try:
                only, state = await self._seen(sight.run, sight)
            except NotFound:
                return RunPage(runs=())
            return RunPage(runs=(summary(only.row, state),))
        before = None if cursor is None else _read_cursor(cursor)
        rows = await self._store.page(limit=limit + 1, before=before, owner=sight.owner, unended=sight.unended)
        now, elapsed = self._clock(), self._elapsed()
        shown = []
        for row in rows[:limit]:
            known = self._under_way.get(row.id)
            if known is None:
                shown.append(summary(row, state_now(row.state, elapsed - row.heard_elapsed)))
            else:
                shown.append(summary(known.row, known.state(now)))
        more = f"{round(rows[limit - 1].created_at * 1e6)}-{rows[limit - 1].id}" if len(rows) > limit else None
        return RunPage(runs=tuple(shown), next_cursor=more)

    async def match(
        self, offer: WorkerOffer, caller: str, sight: Sight, *, token: TokenEntry | None = None, https: bool = False
    ) -> RunMatch:
        """The run that a worker is sent to, and where it finds its host.

        Args:
            caller: who asks, by whom questions are counted.
            token: of the worker; it gets a ticket by it.
            https: it came by https, and is sent nowhere else.

        Raises:
            LimitReached: this caller asks too often.
            NotFound: there is no such run as it has chosen.
            Conflict: that one has ended, is about to, wants another kind of worker, or has no https.
            Unavailable: its host is not heard now; or no run wants this worker at present.
        """
        now = self._clock()
        self._matchmaker.admit(caller, now)
        if sight.run is not None and offer.run is None:
            offer = offer.model_copy(update={"run": sight.run})
        candidates = self._taking(now, sight) if offer.run is None else [await self._taking_one(offer.run, sight)]
        if https:
            candidates = _by_https(candidates, chooses=offer.run is not None)
        coming = self._matchmaker.coming(now)
        by_id = {known.row.id: known for known in candidates}
        run = chosen((self._wanting(known, coming.get(known.row.id, {})) for known in candidates), offer)
        name = None if token is None else token.name
        if run in self._under_way and offer.name in _there(self._under_way[run]):
            self._matchmaker.is_there(offer.name, run, name)
        else:
            self._matchmaker.sent(offer.name, run, now, name)
        row, details = by_id[run].row, by_id[run].details
        ticket, ticket_s = "", 0.0
        if token is not None and (secret := self._secret_of(row)) is not None:
            ticket, ticket_s = issued(secret, run, token, offer.name, self._wall())
        return RunMatch(
            run=row.id,
            network=row.network,
            strategy=row.strategy,
            urls=tuple(url for url in _urls(by_id[run]) if not https or url.startswith(_HTTPS)),
            config=details.config,
            ticket=ticket,
            ticket_s=ticket_s,
        )

    def _wanting(self, known: _Known, coming: Mapping[str, str | None]) -> Wanting:
        row, there = known.row, _there(known)
        idle = [each["name"] for each in known.details.workers if each["name"] in there and not each["updates"]]
        return Wanting(
            id=row.id,
            since=row.created_at,
            wants=RunWants.model_validate(known.details.wants),
            there=there,
            coming=coming,
            idle=self._matchmaker.tokens_of(idle, row.id),
        )

    def _taking(self, now: float, sight: Sight) -> list[_Known]:
        """All runs that take workers and that the caller may see."""
        return [
            known
            for known in self._under_way.values()
            if known.state(now) is RunState.RUNNING and sight.owner in (None, known.row.owner)
        ]

    async def _taking_one(self, run_id: str, sight: Sight) -> _Known:
        known, state = await self._seen(run_id, sight)
        row = known.row
        _check_unended(row, state)
        if state is RunState.STOPPING:
            raise Conflict(f"run {row.id} is about to stop, and takes no workers any more")
        if state is RunState.INTERRUPTED:
            raise Unavailable(f"the host of run {row.id} has not reported for {SILENT_S:g} s", retry_after_s=5.0)
        return known

    async def ended_of(self, run_ids: Collection[str]) -> frozenset[str]:
        """Return the ids of these runs that have ended or are forgotten. Raises Unavailable."""
        return frozenset(run_ids) - await self._store.unended_of(run_ids)

    async def stop(self, run_id: str, sight: Sight) -> Run:
        """Ask the host of a run to end it; where that is not heard any more, the run ends at once.

        Raises:
            NotFound: no such run.
            Conflict: it has ended already.
            Unavailable: the database does not accept it.
        """
        async with self._turn:
            known, state = await self._seen(run_id, sight)
            _check_unended(known.row, state)
            row = replace(known.row, state=RunState.STOPPING)
            stopping = replace(known, row=row)
            self._end_if_silent(stopping)
            await self._store.save([(stopping.row, stopping.details)])
            # Reports may have come meanwhile: only the wish is new.
            known.row = replace(known.row, state=stopping.row.state, reason=stopping.row.reason)
            known.row = replace(known.row, finished_at=stopping.row.finished_at)
            if known.row.state.final:
                self._under_way.pop(run_id, None)
            self._news.wake(run_id)
            return whole(known.row, known.details, known.row.state)

    async def order(self, run_id: str, name: str, order: WorkerOrder, sight: Sight) -> Run:
        """Ask the host of a run to do this with one of its workers.

        Raises:
            NotFound: no such run, or it has no worker of this name.
            Conflict: it has ended already, or has ranks.
            Unavailable: the database does not accept it.
        """
        async with self._turn:
            known, state = await self._seen(run_id, sight)
            _check_unended(known.row, state)
            if known.details.wants.get("workers") == 0:
                raise Conflict(f"run {run_id} has ranks, which take no orders: stop the whole run")
            if all(each["name"] != name for each in known.details.workers):
                raise NotFound(f"run {run_id} has no worker {name[:64]!r}")
            wish = {name: order}
            details = replace(known.details, workers=with_wishes(known.details.workers, wish))
            await self._store.save([(known.row, details)])
            # Reports may have come meanwhile: only the wish is new.
            known.details = replace(known.details, workers=with_wishes(known.details.workers, wish))
            known.reports += 1
            self._news.wake(run_id)
            return whole(known.row, known.details, known.state(self._clock()))

    async def events(self, run_id: str, sight: Sight) -> RunEvents:
        """The events of a run: `state` with all of it at first and when its state changes, `report` after each report;
        ends with the run. Reports that come faster than they are read are passed over.

        Raises:
            NotFound: at once, before the first event.
        """
        await self._seen(run_id, sight)
        return self._events(run_id, sight)

    async def _events(self, run_id: str, sight: Sight) -> RunEvents:
        shown, reports = None, 0
        # A worker sees how a run ends that it has followed.
        sight = replace(sight, unended=False)
        while not self._stopping:
            news = self._news.of(run_id)
            known, state = await self._seen(run_id, sight)
            if state is not shown:
                shown = state
                yield "state", whole(known.row, known.details, state), 0
            elif known.reports != reports:
                yield "report", brief(known.row, known.details, state), 0
            reports = known.reports
            if state.final:
                return
            try:
                await asyncio.wait_for(news.wait(), _KEEP_ALIVE_S)
            except TimeoutError:
                yield None

    # --- by itself ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Notice hosts that have fallen silent, and write what has been reported, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for known in self._under_way.values():
                self._end_if_silent(known)
                if (state := known.state(self._clock())) is not known.shown:
                    known.shown = state
                    self._news.wake(known.row.id)
            await self.save(_SAVE_S)

    def _end_if_silent(self, known: _Known) -> None:
        if known.row.state is RunState.STOPPING and known.state(self._clock()) is RunState.STOPPED:
            reason = "its host was not heard any more"
            known.row = replace(known.row, state=RunState.STOPPED, reason=reason, finished_at=self._wall())
            known.dirty = True

    async def save(self, older_s: float = 0.0) -> None:
        """Write the runs that have changed, and were written last before so many seconds; those that the database
        refuses are written later."""
        async with self._turn:
            now = self._clock()
            due = [
                known
                for known in self._under_way.values()
                if known.dirty and (known.row.state.final or now - known.saved >= older_s)
            ]
            for known in due:
                known.dirty = False
            try:
                await self._store.save([(known.row, known.details) for known in due])
            except BaseException as exc:
                for known in due:
                    known.dirty = True
                if not isinstance(exc, Unavailable):
                    raise
                return
            for known in due:
                known.saved = now
                if known.row.state.final:
                    self._under_way.pop(known.row.id, None)

    async def purge(self, before: float) -> None:
        """Forget runs that ended, or whose hosts were heard last, before this moment. Raises Unavailable."""
        async with self._turn:
            for run_id in await self._store.purge(before):
                self._under_way.pop(run_id, None)

    def stop_streams(self) -> None:
        """End all event streams."""
        self._stopping = True
        self._news.wake_all()

    # --- where they are -------------------------------------------------------------------------------------------

    async def _find(self, run_id: str) -> _Known | None:
        if (known := self._under_way.get(run_id)) is not None:
            return known
        if (found := await self._store.get(run_id)) is None:
            return None
        row, details = found
        return _Known(row, details, heard=self._clock() - max(0.0, self._elapsed() - row.heard_elapsed))

    async def _seen(self, run_id: str, sight: Sight) -> tuple[_Known, RunState]:
        """Raises NotFound."""
        known = await self._find(run_id)
        if known is None:
            raise _no_run(run_id)
        state = known.state(self._clock())
        sight.check(known.row, state)
        return known, state

    def _make_room(self, now: float, owner: str | None, but: str = "") -> None:
        """Drop interrupted runs from memory if there are too many; the database has them. No owner holds more places
        than are left for others, so one owner cannot take the places of all.

        Raises:
            LimitReached: this owner has too many runs that are not interrupted.
            Overloaded: all owners together have too many.
        """
        while but not in self._under_way:
            there = self._under_way.values()
            theirs = sum(known.row.owner == owner for known in there)
            left = _MOST_UNDER_WAY - len(there)
            if left > 0 and (owner is None or theirs < left):
                return
            silent = [known for known in there if now - known.heard > SILENT_S and not known.dirty]
            if not silent and left > 0:
                raise LimitReached(
                    f"{owner!r} has {theirs} training runs under way, and {left} places are left for others: end one",
                    retry_after_s=_FULL_AGAIN_S,
                )
            if not silent:
                raise Overloaded(f"{len(there)} training runs are under way; try again", retry_after_s=_FULL_AGAIN_S)
            del self._under_way[min(silent, key=lambda known: (known.row.owner != owner, known.heard)).row.id]


def _there(known: _Known) -> set[str]:
    return {each["name"] for each in known.details.workers if each["idle_s"] <= THERE_S and may_work(each)}


def _urls(known: _Known) -> tuple[str, ...]:
    return known.row.url, *known.details.more_urls


def _by_https(runs: list[_Known], *, chooses: bool) -> list[_Known]:
    """Return the runs to whose hosts a worker that came by https may be sent.

    Raises:
        Conflict: there were some, but none of these; Unavailable if the worker has not chosen it.
    """
    safe = [known for known in runs if any(url.startswith(_HTTPS) for url in _urls(known))]
    if runs and not safe:
        why = (
            f"the host of run {runs[0].row.id} has no https, and you came by https: its owner starts it with "
            "--tls-cert and --tls-key, and an https --advertise-url"
        )
        raise Conflict(why) if chooses else Unavailable(why, retry_after_s=5.0)
    return safe


def _check_unended(row: RunRow, state: RunState) -> None:
    if state.final:
        raise Conflict(f"run {row.id} is {state} already")


def _no_run(run_id: str) -> NotFound:
    return NotFound(f"no training run {run_id[:64]!r}")


def _read_cursor(text: str) -> tuple[float, str]:
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {text[:32]!r}")
    return int(found[1]) / 1e6, found[2]
