"""A node as the scheduler knows it: its registration, its signs of life, and what operators want with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from scheduler.core.breaker import WrongAnswers, rest_s
from scheduler.core.health import (
    Arrivals,
    DetectorTimes,
    Evidence,
    Probe,
    Verdict,
    judge,
    phi,
    stalled_after_s,
    suspect_after_s,
)
from scheduler.core.site import NO_SITE, may_reach
from tierkit.inference.upstreams import is_allowed
from tierkit.pacing import TokenBucket
from tierkit.types import Health, Share, Tier
from tierkit.wire.messages import Heartbeat, Registration

__all__ = [
    "MOST_LEASE_S",
    "MOST_SAID",
    "NO_INTENT",
    "REFUSED_S",
    "Device",
    "DeviceView",
    "Intent",
    "KnownNode",
    "Node",
    "SortKey",
    "natural_order",
]

SortKey = tuple[tuple[int, str | int], ...]
"""Sort key of a node in the device list. See `natural_order`."""

_BATCH = 64
"""Default number of images that a node computes at a time, if it does not report it."""
REFUSED_S = 60.0
"""Seconds for which the list shows a refusal. A refused node asks again every few seconds."""
MOST_SAID = 500
"""Characters of a reason."""
MOST_LEASE_S = 3600.0
"""The longest lease that a node gets if it asks for one."""
_AGAIN_S = 1e-6
"""A node whose time is up by a hair is looked at again so much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The wishes of operators about a node. They hold until taken back, over restarts of the node and of the
    scheduler."""

    drained: bool = False
    """It gets no new tasks."""
    removed: bool = False
    """It may not register."""
    trusted: bool | None = None
    """True if it may see pixels; None: the setting `trusted` decides."""
    by: str = ""
    """Name of the operator's token; "" without tokens."""

    @property
    def of_whom(self) -> str:
        """ "by NAME": the end of a sentence."""
        return f" by {self.by or 'an operator'}"


NO_INTENT = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node as it is stored."""

    registration: Registration
    """Its last registration, without the key, which ends with its process."""
    intent: Intent = NO_INTENT


class Node(Struct, frozen=True, kw_only=True):
    """A node as the mapping sees it: alive, trusted, with the model it would be asked for."""

    node_id: str
    tier: Tier
    url: str
    model: str
    ms_per_image: float
    """Measured by the node at its start."""
    site: str = NO_SITE
    share: Share = Share.CLOUD
    """Rule of its site."""
    sha256: str = ""
    """Digest of the model's weights."""
    reading: str = ""
    """`ModelOffer.reading`, if the node holds two versions of the model that differ in nothing else."""
    allowed_upstreams: tuple[str, ...] = ()
    """URLs below which a node must lie for this one to send images there; empty for anywhere."""

    def may_ask(self, upper: Node) -> bool:
        """True if the rule of its site and this node's own list allow sending images to `upper`."""
        there = may_reach(self.site, self.share, upper.site, upper.tier)
        return there and is_allowed(upper.url, self.allowed_upstreams)


@dataclass(slots=True, kw_only=True)
class Device:
    """The record of one node: what speaks for and against it. Its methods take evidence; `Ledger.note` calls them, and
    judges the node again after each."""

    registration: Registration
    times: DetectorTimes
    """Seconds by which it is judged: longer than for other nodes if it asked for a long lease."""
    node_id: str = field(init=False)
    tier: Tier = field(init=False)
    site: str = field(init=False)
    incarnation: str = field(init=False)
    joined_at: float
    last_seen: float
    """Last sign of life: a heartbeat, or an answer to a task."""
    last_beat: float
    arrivals: Arrivals
    budget: TokenBucket | None
    """Its power budget, in images. With a burst of 0 the node rests after each task, which spreads heat and battery
    load evenly."""
    suspect_after_s: float
    """Silence that its heartbeats so far allow."""
    progress_at: float
    """Time at which it last finished images or, if it owed none, was given some."""
    leaving: bool = False
    """It has reported that it takes no tasks: it shuts down, or an operator has unloaded one of its models."""
    left: bool = False
    """It has deregistered, or an operator has removed it; neither counts as a death."""
    intent: Intent = NO_INTENT
    accusation: str | None = None
    wrong: WrongAnswers = field(default_factory=WrongAnswers)
    probe: Probe | None = None
    """Outcome of a probe since the last sign of life."""
    reached: bool = False
    """True once it has answered a probe."""
    not_before: float = 0.0
    """The node gets no task until then: it asked for that ("503, Retry-After"), or rests for its power budget."""
    load: Heartbeat | None = None
    """The load that the node reported last."""
    given: int = 0
    """Images of the attempts that it owes an answer."""
    stalled: int = 0
    """Images on which it got stuck. Progress clears this; new work does not."""
    refusal: tuple[float, str] = (-math.inf, "")
    """Time and reason of its last refused registration."""
    death: str | None = None
    """Reason why it is dead. Death is final: its tasks went to others, so only a new registration brings it back."""
    retired: tuple[str, ...] = ()
    """The previous incarnations of this node id. They cannot come back."""
    order: SortKey
    """Sort key in the list."""
    judged_at: float = -math.inf
    """The time at which it was judged last."""
    review_at: float = math.inf
    """The time at which its health may change without new evidence, or earlier."""
    listed: bool = False
    """True while it may receive tasks."""
    nodes: dict[int, Node | None] = field(default_factory=dict)
    """The node as the mapping sees it, by release; None if it holds none of it. `placement.routes` sets it."""
    barred: dict[str, str] = field(default_factory=dict)
    """Networks that get no work, by sha256, and why: they have not answered the probe pictures yet, or wrongly."""
    told: tuple[Health, bool] = (Health.ALIVE, True)
    """The health that was announced last, and whether it keeps its tasks."""

    def __post_init__(self) -> None:
        # Each decision asks for them many times.
        self.node_id, self.tier = self.registration.node_id, self.registration.tier
        self.incarnation = self.registration.incarnation
        self.site = self.registration.site or NO_SITE

    @property
    def takes_tasks(self) -> bool:
        """False for a node that asked for a long lease, to save bytes: tasks would cost it more."""
        return self.registration.lease_s is None

    @property
    def draining(self) -> bool:
        """True if it is about to leave, or an operator wants no new tasks for it."""
        return self.leaving or self.intent.drained

    @property
    def ms_per_image(self) -> float:
        """Milliseconds per image of its slowest model by its own measurement, divided by the copies that compute
        now."""
        return max(offer.ms_per_image for offer in self.registration.models) / self.replicas

    @property
    def replicas(self) -> int:
        return 1 if self.load is None else self.load.replicas

    @property
    def owed(self) -> int:
        """Images that it should be working on."""
        told = 0 if self.load is None else self.load.running_images or min(self.load.queued_images, _BATCH)
        return max(self.given, self.stalled, told)

    @classmethod
    def new(cls, registration: Registration, intent: Intent, times: DetectorTimes, now: float) -> Device:
        """The record of a node that has just registered.

        Args:
            times: of the scheduler.
        """
        if registration.lease_s is not None:
            times = times.stretched(min(registration.lease_s, MOST_LEASE_S))
        arrivals, per_minute = Arrivals(times.heartbeat_s), registration.images_per_minute
        return cls(
            registration=registration,
            times=times,
            joined_at=now,
            last_seen=now,
            last_beat=now,
            arrivals=arrivals,
            budget=TokenBucket(per_minute / 60, burst=0) if per_minute is not None else None,
            suspect_after_s=_allowed_s(arrivals, times, registration),
            progress_at=now,
            intent=intent,
            order=natural_order(registration.node_id),
        )

    # --- evidence -----------------------------------------------------------------------------------------------------

    def beats(self, beat: Heartbeat, now: float) -> bool:
        """A heartbeat has come. Returns True if it computes at another speed now."""
        self.arrivals.add(now - self.last_beat)
        self.last_beat = now
        self.suspect_after_s = _allowed_s(self.arrivals, self.times, self.registration)
        self.leaving = beat.draining
        owed_before, done_before = self.owed, 0 if self.load is None else self.load.images_done
        replicas_before, self.load = self.replicas, beat
        if beat.images_done != done_before:
            self.progresses(now)
        elif not owed_before:
            self.progress_at = now
        self.seen(now)
        return beat.replicas != replicas_before

    def seen(self, now: float) -> bool:
        """It has given a sign of life."""
        self.last_seen = now
        self.accusation = self.probe = None
        return True

    def progresses(self, now: float) -> None:
        """It has finished images."""
        self.progress_at = now
        self.stalled = 0

    def gets(self, images: int, now: float) -> None:
        """It receives a task of this number of images."""
        if not self.owed:
            self.progress_at = now
        self.given += images

    def forgive(self, pause_s: float, now: float) -> None:
        """Take the time off its silence in which the scheduler heard no node."""
        self.last_seen = min(now, self.last_seen + pause_s)
        self.last_beat = min(now, self.last_beat + pause_s)
        self.progress_at = min(now, self.progress_at + pause_s)

    def bars(self, networks: Mapping[str, str]) -> bool:
        """Give these networks of it no work. The reasons stand next to their sha256."""
        before, self.barred = self.barred, dict(networks)
        self.nodes.clear()
        return before != self.barred

    def is_accused(self, reason: str) -> bool:
        """An attempt could not reach it: it is suspect until its next sign of life."""
        self.accusation = reason
        return True

    def answers_rightly(self) -> bool:
        """An attempt on it ended as it should: its wrong answers are forgotten."""
        return self._change_wrong(WrongAnswers())

    def answers_wrongly(self, reason: str, now: float, *, counts: bool = True) -> bool:
        """An attempt on it ended with a wrong answer, or with none in time. Heartbeats do not clear it of that.

        Args:
            counts: False if the task may be to blame as well: it rests no longer than it did.
        """
        return self._change_wrong(self.wrong.one_more(reason, now) if counts else self.wrong.again(now))

    def is_pardoned(self) -> bool:
        """One of its wrong answers was its task's fault as much."""
        return self._change_wrong(self.wrong.one_less())

    def is_tried(self, now: float) -> bool:
        """A task is on its way to it: its trial, if its last answers were wrong."""
        return self._change_wrong(self.wrong.again(now))

    def _change_wrong(self, wrong: WrongAnswers) -> bool:
        before, self.wrong = self.wrong, wrong
        return wrong != before

    def rests(self, until: float) -> bool:
        """It gets no new tasks before then: it said "not now", or rests for its power budget."""
        self.not_before = max(self.not_before, until)
        return True

    def give_up(self, error: str) -> bool:
        """An error of ours makes it dead; it may register again."""
        self.death = f"cannot be judged ({error})"[:MOST_SAID]
        return True

    def refuse(self, why: str, now: float) -> None:
        """It was refused a place, or a heartbeat."""
        self.refusal = now, why[:MOST_SAID]

    def refused_lately(self, now: float) -> bool:
        """True if it was refused within the last minute."""
        return now - self.refusal[0] < REFUSED_S

    # --- opinion ------------------------------------------------------------------------------------------------------

    def view(self, now: float, *, until: float, doubting: bool) -> DeviceView:
        """The failure detector's verdict.

        Args:
            until: its silence counts until then.
            doubting: the scheduler doubts that it hears any node.
        """
        times = self.times
        silent_s, wrong = max(0.0, until - self.last_seen), self.wrong
        evidence = Evidence(
            silent_s=silent_s,
            suspect_after_s=self.suspect_after_s,
            probe=self.probe,
            reached=self.reached,
            accusation=self.accusation,
            wrong=wrong.why if wrong.sets_aside(now, times.set_aside_s) else None,
            draining=self.draining,
            owed=self.owed,
            ms_per_image=self.ms_per_image,
            idle_s=max(0.0, until - self.progress_at),
            death=self.death,
            removed=self.intent.removed,
        )
        verdict = judge(evidence, times)
        reason = verdict.reason
        if doubting and verdict.health is Health.SUSPECT:
            reason = f"{reason}; no other node is heard either, so the scheduler doubts itself first"
        if not self.takes_tasks and not verdict.health.gone:
            reason = f"{reason}; takes no tasks, since it asked for a lease of {times.lease_s:g} s"
        if self.intent.drained and not self.intent.removed:
            reason = f"{reason}; drained{self.intent.of_whom}"
        if verdict.health is Health.ALIVE and self.budget and (pause_s := self.budget.wait_s(now, 0)):
            per_minute = self.registration.images_per_minute
            reason = f"{reason}; rests for {pause_s:.1f} s to keep to {per_minute} images a minute"
        if verdict.health is Health.ALIVE and wrong.count:
            reason = f"{reason}; gets one task as a trial: {wrong.why}"
        if verdict.health is Health.ALIVE and self.barred:
            why = next(iter(self.barred.values()))
            reason = f"{reason}; gets no work of {len(self.barred)} of its networks: {why}"
        if verdict.health is Health.DEAD and self.refused_lately(now):
            reason = f"{reason}; it is refused: {self.refusal[1]}"
        return DeviceView(
            death=verdict.reason if verdict.health.gone else None,
            device=self,
            health=verdict.health,
            reason=reason,
            silent_s=silent_s,
            keeps_tasks=verdict.keeps_tasks,
            set_aside=verdict.set_aside,
        )

    def next_review(self, now: float) -> float:
        """The time after `now` at which the verdict may change without evidence, or the node may get tasks again."""
        if self.death is not None:
            return math.inf
        times = self.times
        moments = [self.last_seen + self.suspect_after_s, self.last_seen + times.lease_s]
        if owed := self.owed:
            moments.append(self.progress_at + stalled_after_s(owed, self.ms_per_image, times))
        if self.wrong.count:
            moments.append(self.wrong.at + rest_s(self.wrong.count, times.set_aside_s))
        # Looked at just before a moment and just after it, it is judged as any query at that moment judges it, however
        # sums of times are rounded.
        moment = min((moment for moment in moments if moment > now - _AGAIN_S), default=now)
        at = max(moment - _AGAIN_S, now + _AGAIN_S)
        return min(at, self.not_before) if self.not_before > now else at

    def may_recover(self, now: float) -> bool:
        """True if less silence may change its health. Judging thousands for which it cannot would cause
        the next pause."""
        health, keeps_tasks = self.told
        silent_s = now - self.last_seen
        return not keeps_tasks or (health is not Health.ALIVE and silent_s < self.suspect_after_s)


class DeviceView(Verdict, frozen=True, kw_only=True):
    """One node with the failure detector's verdict, at one moment."""

    device: Device
    silent_s: float
    death: str | None = None
    """Reason why it is gone."""

    @property
    def phi(self) -> float:
        """The accrual detector's suspicion by silence."""
        return phi(self.silent_s, *self.device.arrivals.fit())


def _allowed_s(arrivals: Arrivals, times: DetectorTimes, registration: Registration) -> float:
    """Silence that a node's heartbeats allow: the whole lease if it asked for a long one."""
    return times.lease_s if registration.lease_s is not None else suspect_after_s(*arrivals.fit(), times)


def natural_order(node_id: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key of the device list: end-2 stands before end-10, whichever of them registered first."""
    parts = re.split(r"(\d+)", node_id)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts if part)
