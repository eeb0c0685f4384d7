"""The uplink of a device: its loops deliver answers to the scheduler and pictures to upstream nodes.

Each loop waits for its own news, sends what the rules allow, and backs off while the other side is away. Nothing is
taken out of the spool before the other side has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import math
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace
from prometheus_client import Counter
from pydantic import ValidationError

from end_node.settings import EndSettings
from end_node.spool import Held, Spool, SpoolStats
from end_node.spooling import SpoolThread
from end_node.uplink.news import SourceNews
from end_node.uplink.pace import Pace
from end_node.uplink.rules import Amendment, is_unsure, stages_left
from tierkit.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    LimitReached,
    NotFound,
    NotTerrace,
    SpoolUnavailable,
    TerraceError,
    TooLarge,
    UnsupportedMedia,
    UpstreamUnavailable,
)
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.pacing import backoff_s
from tierkit.wire.learning import LabelNews, LabelOfPerson
from tierkit.wire.messages import LABELS_HEADER, ROUTE_HEADER, DeviceRoute, Stage
from tierkit.wire.observations import (
    Behind,
    DeviceStatus,
    FinerAnswer,
    Observation,
    ObservationBatch,
    ReportedSource,
    read_receipt,
    write_batch,
)

__all__ = ["Answerer", "Uplink"]

log = logging.getLogger(__name__)

_ROUTE, _LABELS = "route", "labels"
_BUDGET_S = 20.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 5.0
_AT_ONCE = 4
"""Pictures that are under way to upstream nodes at a time; one with a budget, so that each is counted before the
next."""
_FIRST_LOOK_S = 5.0
"""Seconds after which a route that leads nowhere is fetched again; each time twice as many."""
_MOST_ANSWERS = 500
_LONGEST_REFUSAL_S = 300.0
"""Longest wait that a scheduler may ask for when it refuses a batch for the limit of the node's token."""
_HIGHEST = 2**50
"""No source gets to this sequence number."""
_MOST_DIGITS = 16
"""Digits of the number of a label."""
_MOST_ERRORS = 5
"""Times that upstream nodes may answer a picture with an error before its local answer is final."""
_FIRST_REST_S, _LONGEST_REST_S = 5.0, 300.0
"""Pause of a picture after an error, twice as long after each further one."""
_MOST_TRIED = 1000
_OVERHEAD_BYTES = 1500
"""Headers of a request and of its answer, and the answer itself."""

_delivered = Counter(
    "terrace_delivered_observations_total", "Observations that the scheduler took, amendments included."
)
_amended = Counter(
    "terrace_amended_observations_total",
    "Observations whose better answer came (better), or that keep the answer they have (kept).",
    ["answer"],
)


class Answerer(Protocol):
    """The node that the uplink belongs to."""

    async def ask_up(self, content: bytes, route: DeviceRoute, stages: tuple[Stage, ...]) -> Amendment:
        """Ask upstream nodes about a picture."""

    async def labelled(self, labels: Sequence[LabelOfPerson]) -> None:
        """Note labels of people with the kept pictures."""

    async def renumbered(self, source: str, first: int) -> None:
        """Forget kept pictures of a source from this number on: the scheduler has other pictures under these."""

    async def learn_from(self, held: Held, content: bytes, finer: FinerAnswer) -> None:
        """Keep a picture to learn from, if that is allowed."""

    def announce(self, observation: Observation) -> None:
        """Tell local programs that an observation has changed."""

    def states(self) -> tuple[ReportedSource, ...]:
        """The states of the sources."""

    def status(self, stats: SpoolStats, *, in_batch: int) -> DeviceStatus:
        """The state of the device. A batch with this number of the waiting answers carries it."""


class Rests:
    """Pictures that rest after a failure, so that others go first."""

    def __init__(self) -> None:
        self._pictures: dict[int, tuple[int, float]] = {}
        """By key: number of failures, and the time until which it rests."""

    def __len__(self) -> int:
        return len(self._pictures)

    def rests_s(self, key: int) -> float:
        """Seconds for which a picture still rests; 0 or less if it does not."""
        return self._pictures.get(key, (0, 0.0))[1] - time.monotonic()

    def failed(self, key: int) -> int:
        """Let a picture rest, twice as long each time; returns how often it has failed."""
        count = self._pictures.pop(key, (0, 0.0))[0] + 1
        if len(self._pictures) >= _MOST_TRIED:
            self._pictures.clear()
        rest_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(count - 1, 10))
        self._pictures[key] = count, time.monotonic() + rest_s
        return count

    def forget(self, key: int) -> None:
        """A picture is settled."""
        self._pictures.pop(key, None)

    def clear(self) -> None:
        """Let all go again."""
        self._pictures.clear()


class Uplink:
    """The loops of the uplink, and what they know.

    Args:
        settings: of the node.
        spool: holds what waits.
        node: asks upstream nodes, and hears of each better answer.
        scheduler: the way there; None if the node has none.
        pace: decides when pictures and answers may leave.
    """

    def __init__(
        self,
        settings: EndSettings,
        spool: SpoolThread,
        node: Answerer,
        scheduler: HeartbeatSender | None,
        pace: Pace,
    ) -> None:
        self._settings = settings
        self._limits = settings.uplink
        self._spool = spool
        self._node = node
        self._scheduler = scheduler
        self.pace = pace
        self.route: DeviceRoute | None = None
        self._route_wanted = asyncio.Event()
        self._last_label = 0
        """The last number of a label that the scheduler has named."""
        self._labels_wanted = asyncio.Event()
        self._renumberings = 0
        self._new = {name: asyncio.Event() for name in ("answers", "pictures", "copies")}
        self._asked: set[int] = set()
        self._tried, self._unknown = Rests(), Rests()
        """Pictures that upstream nodes could not answer, and those whose observations the scheduler does not know."""
        self._states = SourceNews()
        self._failures = 0
        self._rest_until = 0.0
        self.trouble = ""
        """Reason why the last picture did not reach an upstream node; "" if it did."""
        self.reason = "" if scheduler else "the node has no scheduler"

    @property
    def online(self) -> bool:
        """True if the scheduler took the last thing that was sent to it."""
        return self._scheduler is not None and self._scheduler.registered and not self.reason

    async def load(self) -> None:
        """Read the last route from the spool."""
        stored = await self._spool.do(lambda spool: spool.get(_ROUTE))
        if stored is not None:
            try:
                self.route = DeviceRoute.model_validate(stored)
            except ValidationError as exc:
                log.warning("the stored route of another version of Terrace is not used: %s", exc.errors()[0]["msg"])

    def stored(self) -> None:
        """A new observation is in the spool."""
        for event in self._new.values():
            event.set()

    def source_changed(self) -> None:
        """A source has another state, or another reason for it."""
        self._new["answers"].set()

    def heard(self, headers: Mapping[str, str]) -> None:
        """The scheduler has answered a request."""
        self.pace.tell_date(headers.get("Date", ""))
        if self._scheduler is not None and not self._scheduler.registered:
            self._states.forget()  # it may have restarted, or another one leads
        version = headers.get(ROUTE_HEADER)
        if version is not None and (self.route is None or version != self.route.version):
            self._route_wanted.set()
        label = headers.get(LABELS_HEADER, "")
        if label.isascii() and label.isdigit() and len(label) <= _MOST_DIGITS and int(label) != self._last_label:
            self._last_label = int(label)
            self._labels_wanted.set()
        if not self.online:
            self.stored()  # what waited for the scheduler may go now

    def loops(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """The background loops, which the node owns."""
        loops = {f"uplink: pictures {n}": self._send_pictures() for n in range(self._workers)}
        if self._scheduler is None:
            return loops
        loops |= {"uplink: answers": self._deliver(), "uplink: route": self._follow_route()}
        if self._settings.learn is not None:
            loops["uplink: labels"] = self._follow_labels()
        if self._limits.pictures_to_scheduler != "none":
            loops["uplink: copies"] = self._hand_over()
        return loops

    @property
    def _workers(self) -> int:
        return 1 if self._limits.bytes_per_day is not None else _AT_ONCE

    # --- the route ------------------------------------------------------------------------------------------------

    async def _follow_route(self) -> None:
        assert self._scheduler is not None
        failures, again_s = 0, _FIRST_LOOK_S
        while True:
            nowhere = self.route is not None and not self.route.upstreams and self._limits.escalate != "nothing"
            with contextlib.suppress(TimeoutError):
                # A scheduler that has just started may know the upstream nodes soon, and heartbeats may be rare.
                async with asyncio.timeout(again_s if nowhere else None):
                    await self._route_wanted.wait()
            again_s = _FIRST_LOOK_S if self._route_wanted.is_set() else min(2 * again_s, self.pace.batch_s)
            self._route_wanted.clear()
            target = f"/v1/devices/{self._settings.node_id}/route"
            try:
                answer = await self._scheduler.ask("GET", target, budget_s=_BUDGET_S)
                route = DeviceRoute.model_validate_json(answer)
            except ValidationError:
                error: TerraceError = NotTerrace("the scheduler answers something that is not a route")
            except TerraceError as exc:
                error = exc
            else:
                failures = 0
                if self.route is None or route.version != self.route.version:
                    await self._adopt(route)
                continue
            failures += 1
            log.info("no route from the scheduler: %s", error)
            await _pause(failures)
            self._route_wanted.set()

    async def _adopt(self, route: DeviceRoute) -> None:
        document = route.model_dump(mode="json")
        with contextlib.suppress(SpoolUnavailable):  # it stays in force until the node stops
            await self._spool.do(lambda spool: spool.put(_ROUTE, document))
        self.route = route
        where = ", ".join(upstream.node_id for upstream in route.upstreams) or "nowhere"
        log.info("new route of this node's pictures: %s", where, extra={"version": route.version})
        if not route.stages and self._limits.escalate == "unsure" and route.upstreams:
            log.warning("no picture goes up, since nothing tells which are unsure: %s", route.reason)
        self._failures, self._rest_until = 0, 0.0
        self._tried.clear()
        self._new["pictures"].set()

    # --- labels of people ------------------------------------------------------------------------------------------

    async def _follow_labels(self) -> None:
        assert self._scheduler is not None
        failures = 0
        while True:
            await self._labels_wanted.wait()
            self._labels_wanted.clear()
            try:
                more = await self._fetch_labels(self._scheduler, self._last_label)
            except TerraceError as exc:
                failures += 1
                log.info("labels of people wait: %s", exc)
                await _pause(failures)
                more = True
            else:
                failures = 0
            if more:
                self._labels_wanted.set()

    async def _fetch_labels(self, scheduler: HeartbeatSender, last: int) -> bool:
        """Fetch labels that this device does not have, and return True if there are more."""
        after = await self._spool.do(lambda spool: spool.get(_LABELS)) or 0
        after = after if after <= last else 0  # the scheduler has lost its numbers
        target = f"/v1/devices/{self._settings.node_id}/labels?after={after}"
        answer = await scheduler.ask("GET", target, budget_s=_BUDGET_S)
        try:
            news = LabelNews.model_validate_json(answer)
        except ValidationError as exc:
            raise NotTerrace("the scheduler answers something that is not a list of labels") from exc
        if not news.labels:
            return False
        highest = max(each.number for each in news.labels)
        if highest <= after:
            raise NotTerrace("the scheduler sends labels again that this device has")
        await self._node.labelled(news.labels)
        await self._spool.do(lambda spool: spool.put(_LABELS, highest))
        return news.more

    # --- answers to the scheduler ----------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        assert self._scheduler is not None
        failures = 0
        while True:
            try:
                stats = await self._spool.do(Spool.stats)
                waiting = stats.undelivered + stats.gaps
                if waiting:
                    if (wait_s := self.pace.answers_in_s(waiting)) > 0:
                        await asyncio.sleep(wait_s)
                        continue
                elif (due_in_s := self._states_due_in_s(self._scheduler)) != 0:
                    if due_in_s is None:
                        self.reason = ""
                    await self._news("answers", due_in_s)
                    continue
                again = await self._deliver_batch(self._scheduler)
            except LimitReached as exc:
                self._tell_waiting(exc)
                await asyncio.sleep(min(exc.retry_after_s, _LONGEST_REFUSAL_S))
                continue
            except TerraceError as exc:
                failures += 1
                self._tell_waiting(exc)
                if isinstance(exc, NotFound | Conflict):
                    self._scheduler.hurry()  # it has forgotten this node, or takes it for another process
                # A batch that was refused has cost its bytes.
                costly = failures > 1 and not isinstance(exc, UpstreamUnavailable)
                await _pause(failures, longest_s=self.pace.batch_s if costly else _LONGEST_BACKOFF_S)
                continue
            self.reason = ""
            self.pace.answers_sent()
            failures = failures + 1 if again else 0
            if again:
                await _pause(failures)

    def _states_due_in_s(self, scheduler: HeartbeatSender) -> float | None:
        """Return the seconds until a batch without observations goes; None if the scheduler needs none."""
        due_in_s = self._states.due_in_s(self._node.states(), time.monotonic())
        if due_in_s is None or not scheduler.registered:
            return None
        return max(due_in_s, self.pace.answers_in_s(0))

    def _tell_waiting(self, exc: TerraceError) -> None:
        if str(exc) != self.reason:
            self.reason = str(exc)
            log.info("answers wait on this node: %s", exc)

    async def _deliver_batch(self, scheduler: HeartbeatSender) -> bool:
        """Deliver what there is, up to one batch; returns True if some of it must go again under other numbers."""
        if not scheduler.registered:
            raise UpstreamUnavailable("the scheduler does not know this node yet")
        stats, spool_id, observations, gaps = await self._spool.do(
            lambda spool: (spool.stats(), spool.id, *spool.undelivered(_MOST_ANSWERS))
        )
        status = self._node.status(stats, in_batch=len(observations))
        batch = ObservationBatch(
            node_id=self._settings.node_id,
            incarnation=scheduler.incarnation,
            spool=spool_id,
            observations=tuple(observations),
            gaps=tuple(gaps),
            device=status,
        )
        self._states.sending(status.sources)
        body = gzip.compress(write_batch(batch), compresslevel=6, mtime=0)
        answer = await scheduler.ask(
            "POST", "/v1/observations", budget_s=_BUDGET_S, body=body, headers={"Content-Encoding": "gzip"}
        )
        try:
            receipt = read_receipt(answer)
        except ValueError as exc:
            raise NotTerrace("the scheduler answers observations with something that is not a receipt") from exc
        behind = receipt.behind
        if not behind.keys() <= {each.source for each in observations} | {gap.source for gap in gaps}:
            raise NotTerrace("the scheduler names sources that it was not sent")
        taken = [each for each in observations if each.sequence < _first(behind, each.source)]
        told = [gap for gap in gaps if gap.last < _first(behind, gap.source)]
        if receipt.stored + receipt.known != len(taken):
            raise NotTerrace("the scheduler confirms another number of observations than it was sent")
        await self._spool.do(lambda spool: spool.delivered(taken, told))
        for source, where in behind.items():
            if where.highest > _HIGHEST:
                raise NotTerrace(f"the scheduler says that source '{source}' has come to number {where.highest}")
            log.warning("source '%s' numbers on after %d: the scheduler has that already", source, where.highest)
            self._renumberings += 1
            await self._spool.do(partial(_renumber, source, where.highest))
            await self._node.renumbered(source, where.first)
        self._states.sent(time.monotonic(), alone=not (observations or gaps))
        _delivered.inc(len(taken))
        return bool(behind)

    # --- pictures to upstream nodes --------------------------------------------------------------------------------

    async def _send_pictures(self) -> None:
        failures = 0
        while True:
            try:
                wait_s = await self._send_picture()
            except TerraceError as exc:
                failures += 1
                log.log(logging.WARNING if failures == 1 else logging.DEBUG, "pictures wait on this node: %s", exc)
                await _pause(failures)
                continue
            failures = 0
            if wait_s != 0:
                await self._news("pictures", wait_s)

    async def _send_picture(self) -> float | None:
        """Send one picture; returns the seconds until it makes sense to look again, None until there is news."""
        route = self.route
        if route is None or not route.upstreams or self._limits.escalate == "nothing":
            return None
        if (wait_s := self.pace.opens_in_s()) > 0:
            return wait_s
        if (rest_s := self._rest_until - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)  # whatever comes meanwhile could not be sent either
            return 0
        aside = _AT_ONCE + len(self._asked) + len(self._tried)
        found = await self._spool.do(lambda spool: spool.waiting(aside))
        idle = [each for each in found if each.key not in self._asked]
        waiting = next((each for each in idle if self._tried.rests_s(each.key) <= 0), None)
        if waiting is None:
            return min((self._tried.rests_s(each.key) for each in idle), default=None)
        key, unsure = waiting.key, is_unsure(waiting.margin, route)
        audit = waiting.observation.audit and unsure is False and route.learn
        if self._limits.escalate == "unsure" and not unsure and not audit:  # taken before this node had a route
            reason = "" if unsure is False else "the route has no thresholds"
            await self._settle(key, Amendment(finer=None, waits=False, reason=reason, unreachable=False), unsure)
            return 0
        wait_s = self.pace.picture_in_s(waiting.size + _OVERHEAD_BYTES)
        if math.isinf(wait_s):
            reason = "the picture is larger than the bytes that may leave in a day"
            await self._settle(key, Amendment(finer=None, waits=False, reason=reason, unreachable=False), unsure)
            return 0
        if wait_s > 0:
            return wait_s
        self._asked.add(key)
        before, numbering = self.pace.counted_bytes, self._renumberings
        try:
            content = await self._spool.do(lambda spool: spool.picture(key))
            if content is None:
                return 0
            reached = None if waiting.observation.finer is None else waiting.observation.finer.tier
            outcome = await self._node.ask_up(content, route, stages_left(route, reached, self._limits))
            if outcome.finer is not None and numbering == self._renumberings:
                seen = replace(waiting.observation, unsure=unsure is True)
                await self._node.learn_from(replace(waiting, observation=seen), content, outcome.finer)
            await self._note(waiting, outcome, unsure)
        finally:
            self._asked.discard(key)
            self.pace.count_picture(self.pace.counted_bytes - before)
        return 0

    async def _note(self, held: Held, outcome: Amendment, unsure: bool | None) -> None:
        """Take what asking about a picture came to."""
        key, has_finer = held.key, held.observation.finer is not None
        self.trouble = outcome.reason
        if not outcome.unreachable:
            self._failures = 0
        elif outcome.waits and not has_finer:
            self._failures += 1
            self._rest_until = time.monotonic() + _backoff_s(self._failures)
            if not outcome.at_fault:
                return
        if outcome.waits:
            count = self._tried.failed(key)
            if count >= _MOST_ERRORS and not outcome.unreachable and outcome.finer is None:
                outcome = replace(outcome, waits=False)
        if not outcome.waits:
            self._tried.forget(key)
        if outcome.finer is not None or not outcome.waits:
            await self._settle(key, outcome, unsure)

    async def _settle(self, key: int, outcome: Amendment, unsure: bool | None) -> None:
        observation = await self._spool.do(
            lambda spool: spool.amend(
                key, finer=outcome.finer, reason=outcome.reason, waits=outcome.waits, unsure=unsure is True
            )
        )
        if observation is not None:
            _amended.labels("better" if outcome.finer else "kept").inc()
            self._node.announce(observation)
            self._new["answers"].set()

    # --- copies of pictures to the scheduler -----------------------------------------------------------------------

    async def _hand_over(self) -> None:
        assert self._scheduler is not None
        failures = 0
        while True:
            try:
                wait_s = await self._hand_over_one(self._scheduler)
            except TerraceError as exc:
                failures += 1
                log.debug("copies of pictures wait: %s", exc)
                await _pause(failures)
                continue
            failures = 0
            if wait_s != 0:
                await self._news("copies", wait_s)

    async def _hand_over_one(self, scheduler: HeartbeatSender) -> float | None:
        """Send one copy; returns the seconds until it makes sense to look again, None until there is news."""
        if (wait_s := self.pace.opens_in_s()) > 0:
            return wait_s
        owed = await self._spool.do(lambda spool: spool.owed(1 + len(self._unknown)))
        held = next((each for each in owed if self._unknown.rests_s(each.key) <= 0), None)
        if held is None or not scheduler.registered:
            return min((self._unknown.rests_s(each.key) for each in owed), default=None)
        key, seen = held.key, held.observation
        wait_s = self.pace.picture_in_s(held.size + _OVERHEAD_BYTES)
        if 0 < wait_s < math.inf:
            return wait_s
        content = await self._spool.do(lambda spool: spool.picture(key))
        if math.isinf(wait_s):
            log.warning("a picture is larger than the bytes that may leave in a day: the scheduler gets no copy")
        elif content is not None:
            target = f"/v1/observations/{self._settings.node_id}/{seen.source}/{seen.sequence}/picture"
            headers = {"Content-Type": "application/octet-stream"}
            before = self.pace.counted_bytes
            try:
                await scheduler.ask("PUT", target, budget_s=_BUDGET_S, body=content, headers=headers)
            except NotFound as exc:
                # Its observation has not arrived yet, or is gone there.
                if self._unknown.failed(key) < _MOST_ERRORS:
                    return 0
                log.warning("the scheduler does not know a picture of source '%s': %s", seen.source, exc)
            except (InvalidInput, TooLarge, UnsupportedMedia, Forbidden) as exc:
                log.warning("the scheduler does not take a picture of source '%s': %s", seen.source, exc)
            finally:
                self.pace.count_picture(self.pace.counted_bytes - before)
        self._unknown.forget(key)
        await self._spool.do(lambda spool: spool.handed_over(key))
        return 0

    async def _news(self, what: str, timeout_s: float | None) -> None:
        """Wait for something new, at most this long."""
        event = self._new[what]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
        event.clear()


def _first(behind: Mapping[str, Behind], source: str) -> float:
    """The lowest number of a source that was not stored."""
    return behind[source].first if source in behind else math.inf


def _renumber(source: str, above: int, spool: Spool) -> None:
    spool.renumber(source, above)


async def _pause(failures: int, *, longest_s: float = _LONGEST_BACKOFF_S) -> None:
    await asyncio.sleep(_backoff_s(failures, longest_s))


def _backoff_s(failures: int, longest_s: float = _LONGEST_BACKOFF_S) -> float:
    first_s = _FIRST_BACKOFF_S * longest_s / _LONGEST_BACKOFF_S
    return backoff_s(max(1, failures), first_s=first_s, cap_s=longest_s, chance=random.random())
