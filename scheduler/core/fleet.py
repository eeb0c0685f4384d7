"""The device list: the nodes that hold a live lease and may receive tasks. Time is passed in; no I/O.

A node registers with an incarnation that is fresh at each of its starts, receives a lease and renews it by heartbeats.
What else speaks for or against it is gathered here as well: answers to tasks and failed attempts (told by the
dispatcher), probes (told by the watch), work that it owes. `health` judges all of it.

Who is alive is not stored: after a restart of the scheduler all nodes count as dead until their next heartbeats, which
are answered "register again". What outlasts it is which nodes are known, and what operators want with them
(`restore`, `take_unsaved`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from scheduler.core.breaker import WrongAnswers, rest_s
from scheduler.core.device import NO_INTENT, Device, DeviceView, Intent, KnownNode, SortKey, natural_order
from scheduler.core.health import (
    Arrivals,
    DetectorTimes,
    Evidence,
    Probe,
    hears_nobody,
    judge,
    stalled_after_s,
    suspect_after_s,
)
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded
from tierkit.pacing import TokenBucket
from tierkit.types import Health, Tier
from tierkit.wire.messages import Heartbeat, Lease, Registration

__all__ = [
    "DeviceList",
]

_log = logging.getLogger(__name__)

_MOST_TOLD = 5
"""Nodes of a tier, in a sentence."""

_MOST_SAID = 500
"""Characters of a reason."""

MOST_NODES = 250_000
"""Nodes on the list, including dead ones that are still shown."""

MOST_DEAD = 10_000
"""Dead nodes that stay on the list, so that people see who is missing. When there are more, the list forgets those that
died first. It keeps nodes that an operator has drained, removed or trusted."""

_LIST_FULL_S = 60.0

_REFUSED_S = 60.0
"""Seconds for which a refusal is shown. A node that keeps asking does so every few seconds."""

_MOST_STRANGERS = 64
"""Refused nodes that are remembered although they are not on the list."""

_MOST_RETIRED = 64
"""Older incarnations that are remembered of each node."""

_AGAIN_S = 1e-6
"""A node whose time is up by a hair is looked at again so much later."""


class DeviceList:
    """Registrations, leases and health of all nodes. Iterates in the order of the device list: end-2 before end-10.

    A node's health changes by evidence, which arrives at a method of this class, or by time. A heap holds the times
    at which nodes must be judged again.

    Args:
        times: of the failure detector.
        sweep_s: seconds between calls of `sweep`. After a gap of twice as long, the scheduler itself stood still and
            could hear no node: that time counts against no node.
    """

    def __init__(self, times: DetectorTimes, *, sweep_s: float = math.inf) -> None:
        self.times = times
        self._sweep_s = sweep_s
        self._swept_at: float | None = None
        self._unheard_since: float | None = None
        """The first sweep since which no node is heard."""
        self.doubting = False
        """True while the scheduler suspects itself, because it hears no node. No node dies of silence then,
        but one that refuses connections does."""
        self._sure_since = -math.inf
        """When it last stopped doing so."""
        self._listeners: list[Callable[[str], None]] = []
        self._followers: list[Callable[[str], None]] = []
        self._devices: dict[str, Device] = {}
        self._changes: list[DeviceView] = []
        self._in_order: list[Device] = []
        self._present: dict[str, Device] = {}
        """Those that have not been given up: what is judged again and again."""
        self._alive: dict[Tier, list[Device]] = {tier: [] for tier in Tier}
        self.changes = 0
        """Another number whenever another set of nodes may receive tasks, by the last `alive`, or a node's speed is
        another one."""
        self._reviews: list[tuple[float, str]] = []
        """A heap of (time, node id) at which nodes are judged again."""
        self._untold: set[str] = set()
        """Nodes whose health is another than the listeners know."""
        self._dead: dict[str, None] = {}
        """Dead nodes that the list may forget, in the order of their deaths."""
        self._strangers: dict[str, Device] = {}
        self._turned_away: dict[Tier, tuple[float, str]] = {}
        """By tier: when a node was refused whose token is for others, and why."""
        """Nodes that were refused and are not on the list, the latest last."""
        self._unsaved: set[str] = set()
        """Nodes whose row in the database is out of date."""

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a node id after any change that may free, add or remove capacity."""
        self._listeners.append(listener)

    def follow(self, follower: Callable[[str], None]) -> None:
        """Call `follower` with the id of each node that comes to those that may receive tasks, or leaves them. It must
        not call back."""
        self._followers.append(follower)

    def register(self, registration: Registration, now: float) -> Lease:
        """Give a node a place in the list.

        A known node id with a new incarnation is the node after a restart: it takes the place of the old one, whose
        tasks are void. As long as the old one shows itself alive at another address it is not a restart but a second
        node with the same name. One that was just killed and started again is refused at most until its death is
        noticed, and tries again by itself. The same incarnation at another address has moved: what it was sent at the
        old one is lost.

        Raises:
            Conflict: the id belongs to a node that is alive or of another tier, or this incarnation was replaced by one
                that is alive.
            Forbidden: an operator has removed it.
            Overloaded: the list is full.
        """
        node_id = registration.node_id
        old = self._devices.get(node_id)
        if old is None and len(self._devices) >= MOST_NODES:
            if not self._dead:
                raise Overloaded(f"the device list is full: {MOST_NODES:,} nodes", retry_after_s=_LIST_FULL_S)
            self.forget(next(iter(self._dead)))
        retired: tuple[str, ...] = ()
        if old is not None:
            self._check_claim(registration, old, now)
            older = (*old.retired, old.incarnation)
            retired = tuple(each for each in older if each != registration.incarnation)[-_MOST_RETIRED:]
            moved = old.incarnation == registration.incarnation and old.registration.url != registration.url
            if moved and old.death is None:
                old.left, old.death = True, f"has moved to {registration.url}"
                self._announce(old, now)
        if self._swept_at is None:
            self._swept_at = now  # no node is silent before the first has come
        intent = NO_INTENT if old is None else old.intent
        device = self._devices[node_id] = self._present[node_id] = self._new(registration, intent, now)
        device.retired = retired
        self._dead.pop(node_id, None)
        if old is None or old.registration != registration.model_copy(update={"key": old.registration.key}):
            self._unsaved.add(node_id)
        if old is not None:
            self._unlist(old)
            self._in_order[_place(self._in_order, old)] = device
        else:
            insort(self._in_order, device, key=_order)
        self._refresh(device, now)
        self._tell(node_id)
        return Lease(lease_s=self.times.lease_s, heartbeat_s=self.times.heartbeat_s)

    def _new(self, registration: Registration, intent: Intent, now: float) -> Device:
        arrivals, per_minute = Arrivals(self.times.heartbeat_s), registration.images_per_minute
        return Device(
            registration=registration,
            joined_at=now,
            last_seen=now,
            last_beat=now,
            arrivals=arrivals,
            budget=TokenBucket(per_minute / 60, burst=0) if per_minute is not None else None,
            suspect_after_s=suspect_after_s(*arrivals.fit(), self.times),
            progress_at=now,
            intent=intent,
            order=natural_order(registration.node_id),
        )

    def restore(self, nodes: Iterable[KnownNode], now: float) -> None:
        """Put nodes on the list that the scheduler before this one knew: dead, until they register again. Called once,
        on an empty list."""
        for known in nodes:
            device = self._new(known.registration, known.intent, now)
            removed = known.intent.removed
            device.death = _removal(known.intent) if removed else "has not come back since the scheduler started"
            device.told = (Health.REMOVED if removed else Health.DEAD, False)
            self._devices[device.node_id] = device
            self._buried(device)
        self._in_order = sorted(self._devices.values(), key=_order)

    def take_unsaved(self, most: int | None = None) -> dict[str, KnownNode | None]:
        """Changed nodes to be written, by id, at most `most`; None means delete."""
        taken = set(itertools.islice(self._unsaved, most))
        self._unsaved -= taken
        return {node_id: self.known(node_id) for node_id in taken}

    def put_back(self, node_ids: Iterable[str]) -> None:
        """These could not be written."""
        self._unsaved.update(node_ids)

    def known(self, node_id: str) -> KnownNode | None:
        """The part of a node that is stored; None if it is not on the list."""
        device = self._devices.get(node_id)
        return None if device is None else KnownNode(registration=device.registration, intent=device.intent)

    def _check_claim(self, claim: Registration, old: Device, now: float) -> None:
        if old.intent.removed:
            raise Forbidden(
                f"an operator has removed the node {claim.node_id!r}: 'terrace devices resume {claim.node_id}' lets it "
                "register again"
            )
        view = self._view(old, now)
        health = view.health
        if claim.tier is not old.tier:
            # Trust and tokens go by the id, so a node of another tier must not take it over.
            raise Conflict(
                f"the node id {claim.node_id!r} belongs to an {old.tier} node, and this is one of tier {claim.tier}: "
                "give it another --node-id, or let the list forget the old one first"
            )
        if claim.incarnation == old.incarnation or health.gone:
            return
        # A second process cannot listen where the first one does, so the same address means that the first has ended.
        same_place = claim.url == old.registration.url and claim.incarnation not in old.retired
        if not same_place and (health is not Health.SUSPECT or view.set_aside):
            raise Conflict(
                f"the node id {claim.node_id!r} belongs to a node at {old.registration.url} that is {health}; "
                "give this one another --node-id, or stop that one first"
            )

    def heartbeat(self, node_id: str, beat: Heartbeat, now: float) -> None:
        """Renew a lease.

        Raises:
            NotFound: unknown node, or one that was given up as dead: it must register again.
            Conflict: an older incarnation of this node.
        """
        device = self.get(node_id)
        if device.incarnation != beat.incarnation:
            raise Conflict(f"node {node_id!r} is on the list with another incarnation: this one is void")
        view = self._view(device, now)
        if view.health.gone:
            raise NotFound(f"node {node_id!r} was given up ({view.reason}): register again")
        device.arrivals.add(now - device.last_beat)
        device.last_beat = now
        device.suspect_after_s = suspect_after_s(*device.arrivals.fit(), self.times)
        device.leaving = beat.draining
        owed_before, done_before = device.owed, 0 if device.load is None else device.load.images_done
        replicas_before, device.load = device.replicas, beat
        if beat.replicas != replicas_before:
            # What was worked out with its speed is void.
            device.node = None
            self.changes += 1
        if beat.images_done != done_before:
            self._progressed(device, now)
        elif not owed_before:
            device.progress_at = now
        self._seen(device, now)

    def heard(self, node_id: str, incarnation: str, now: float) -> None:
        """Passive evidence for a node: it sent an answer to a task."""
        device = self._current(node_id, incarnation)
        if device is not None:
            self._seen(device, now)

    def given(self, node_id: str, incarnation: str, images: int, now: float) -> None:
        """The scheduler has handed a task of `images` images to the node."""
        device = self._current(node_id, incarnation)
        if device is not None:
            if not device.owed:
                device.progress_at = now
            device.given += images

    def settled(self, node_id: str, incarnation: str, images: int, now: float, *, answered: bool) -> None:
        """A task of `images` images is off the node: by its answer, which is progress, or in another way."""
        device = self._current(node_id, incarnation)
        if device is not None:
            device.given -= images
            if answered:
                self._progressed(device, now)
                if not device.listed:
                    self._refresh(device, now)

    def charge(self, node_id: str, images: int, now: float) -> None:
        """Count images against the node's power budget: it gets no more until it has rested for them."""
        device = self._devices.get(node_id)
        if device is not None and device.budget is not None:
            self.set_aside(node_id, device.incarnation, now + device.budget.take(now, images), now)

    def probed(self, node_id: str, incarnation: str, outcome: Probe, *, began: float, now: float) -> None:
        """Note the outcome of a probe that began at `began`. One that a sign of life has overtaken says nothing."""
        device = self._current(node_id, incarnation)
        if device is None:
            return
        if outcome is Probe.ANSWERED:
            device.reached = True
        elif began < device.last_seen or (outcome is Probe.SILENT and (self.doubting or began < self._sure_since)):
            return
        device.probe = outcome
        self._announce(device, now)

    def accuse(self, node_id: str, incarnation: str, reason: str, now: float) -> None:
        """Passive evidence against a node: an attempt could not reach it. Suspect until its next sign of life."""
        device = self._current(node_id, incarnation)
        if device is not None:
            device.accusation = reason
            self._announce(device, now)

    def answered_wrongly(self, node_id: str, incarnation: str, reason: str, now: float, *, counts: bool = True) -> None:
        """Evidence against a node that heartbeats do not clear: an attempt ended with a wrong answer, or with none in
        time.

        Args:
            counts: False where the task may be to blame as well: the node rests no longer than it did.
        """
        change = (lambda wrong: wrong.one_more(reason, now)) if counts else (lambda wrong: wrong.again(now))
        self._change_wrong(node_id, incarnation, now, change)

    def give_up(self, node_id: str, incarnation: str, exc: Exception, now: float) -> None:
        """Declare a node dead because of an error of ours; it may register again."""
        device = self._current(node_id, incarnation)
        if device is not None:
            self._give_up(device, exc)
            self._announce(device, now)

    def pardon(self, node_id: str, incarnation: str, now: float) -> None:
        """One of the node's wrong answers was its task's fault as much."""
        self._change_wrong(node_id, incarnation, now, WrongAnswers.one_less)

    def answered_rightly(self, node_id: str, incarnation: str, now: float) -> None:
        """An attempt on the node ended as it should: its wrong answers are forgotten."""
        self._change_wrong(node_id, incarnation, now, lambda _: WrongAnswers())

    def sent(self, node_id: str, incarnation: str, now: float) -> None:
        """A task is on its way to the node: its trial, if its last answers were wrong."""
        self._change_wrong(node_id, incarnation, now, lambda wrong: wrong.again(now))

    def _change_wrong(
        self, node_id: str, incarnation: str, now: float, change: Callable[[WrongAnswers], WrongAnswers]
    ) -> None:
        device = self._current(node_id, incarnation)
        if device is not None and (changed := change(device.wrong)) != device.wrong:
            device.wrong = changed
            self._announce(device, now)

    def set_aside(self, node_id: str, incarnation: str, until: float, now: float) -> None:
        """Give the node no new tasks before `until`: it said "not now", or rests for its power budget."""
        device = self._current(node_id, incarnation)
        if device is not None:
            device.not_before = max(device.not_before, until)
            self._refresh(device, now)

    def intend(self, node_id: str, intent: Intent, now: float) -> None:
        """Take over what an operator wants with a node from now on. Raises NotFound."""
        device = self.get(node_id)
        device.intent = intent
        if intent.removed:
            device.left, device.death = True, _removal(intent)
        elif device.told[0] is Health.REMOVED:
            device.death = "was removed, and has not come back since"
        self._dead.pop(node_id, None)
        self._announce(device, now)
        # Whether it may see pixels decides on the routes, which are worked out when this changes.
        self._moved(device)

    def refused(
        self, node_id: str, why: str, now: float, claim: Registration | None = None, *, tier: Tier | None = None
    ) -> None:
        """Note that a node was refused a place, or a heartbeat. A known node that is gone is shown with the reason; of
        any other, the name proves nothing.

        Args:
            claim: what an unknown node has said of itself; it is shown for a minute.
            tier: of a refused node whose token is for other names; `why_none` reports the last one.
        """
        if (device := self._devices.get(node_id)) is not None:
            device.refusal = now, why[:_MOST_SAID]
        elif claim is not None:
            self._strangers.pop(node_id, None)
            while len(self._strangers) >= _MOST_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            stranger = self._strangers[node_id] = self._new(claim, NO_INTENT, now)
            stranger.refusal = now, why[:_MOST_SAID]
            stranger.death = "has no place on the list"
        elif tier is not None:
            self._turned_away[tier] = now, f"{node_id} was refused: {why[:_MOST_SAID]}"

    def strangers(self, now: float) -> list[DeviceView]:
        """The nodes that were refused a place within the last minute and never had one, in order."""
        recent = [one for one in self._strangers.values() if now - one.refusal[0] < _REFUSED_S]
        return [self._opinion(one, now) for one in sorted(recent, key=_order) if one.node_id not in self._devices]

    def leave(self, node_id: str, incarnation: str, now: float) -> None:
        """The process of a node ends, and its tasks go to others. The node stays listed if an operator has drained or
        trusted it.

        Raises:
            NotFound: no such node.
            Conflict: `incarnation` is not the present one.
        """
        device = self.get(node_id)
        if incarnation != device.incarnation:
            raise Conflict(f"node {node_id!r} is on the list with another incarnation: this one is void")
        if device.intent == NO_INTENT:
            self.forget(node_id)
        elif device.death is None:
            device.left, device.death = True, "has left: its process has ended"
            self._announce(device, now)

    def forget(self, node_id: str) -> None:
        """Know nothing of a node any more. Raises NotFound."""
        device = self.get(node_id)
        self._unlist(device)
        del self._in_order[_place(self._in_order, device)], self._devices[node_id]
        self._present.pop(node_id, None)
        self._untold.discard(node_id)
        self._dead.pop(node_id, None)
        self._unsaved.add(node_id)
        self._tell(node_id)

    def get(self, node_id: str) -> Device:
        """The node's record. Raises NotFound."""
        device = self._devices.get(node_id)
        if device is None:
            raise NotFound(f"no node {node_id!r} on the device list")
        return device

    def find(self, node_id: str) -> Device | None:
        """The node's record, if it is on the list."""
        return self._devices.get(node_id)

    def has_left(self, node_id: str) -> bool:
        """True if a node has deregistered, was removed, or is unknown."""
        device = self._devices.get(node_id)
        return device is None or device.left

    def view(self, now: float, most: int | None = None) -> list[DeviceView]:
        """All nodes in order, or `most` of them: those that are not well, by the last `sweep`, before the others."""
        shown = self._in_order
        if most is not None and len(shown) > most:
            chosen = heapq.nsmallest(most, shown, key=lambda device: (device.told[0] is Health.ALIVE, device.order))
            shown = sorted(chosen, key=_order)
        return [self._view(device, now) for device in shown]

    def view_of(self, node_id: str, incarnation: str, now: float) -> DeviceView | None:
        """One node with its health at `now`; None once it has left the list or has come back as another."""
        device = self._current(node_id, incarnation)
        return None if device is None else self._view(device, now)

    def alive(self, tier: Tier, now: float) -> list[Device]:
        """Nodes of a tier that may receive new tasks, in the order of the list. Not to be changed, nor to be kept: it
        is the list itself, which changes with the next call."""
        if self._reviews and self._reviews[0][0] <= now:
            self._review(now)
        return self._alive[tier]

    def place(self, tier: Tier, order: SortKey) -> int:
        """The number of nodes of a tier before this place in the list that may receive new tasks, by the last
        `alive`."""
        return bisect_left(self._alive[tier], order, key=_order)

    def last_resort(self, tier: Tier, now: float) -> list[Device]:
        """Nodes to try where all nodes of a tier that could work are set aside for wrong answers: it may be the tasks'
        fault, and a fleet that does nothing finds out nothing. Each gets a task every `set_aside_s` then."""
        views = [view for view in self._views(tier, now) if view.keeps_tasks and view.health is not Health.DRAINING]
        if not all(view.set_aside for view in views):
            return []
        base_s = self.times.set_aside_s
        devices = (view.device for view in views)
        return [device for device in devices if device.wrong.may_be_asked(now, base_s) and device.not_before <= now]

    def suspect(self, tier: Tier, now: float) -> list[Device]:
        """Nodes of a tier that are late or accused, but neither given up nor stuck nor about to leave."""
        return [
            view.device
            for view in self._views(tier, now)
            if view.health is Health.SUSPECT and view.keeps_tasks and not view.device.draining
        ]

    def _views(self, tier: Tier, now: float) -> Iterator[DeviceView]:
        here = sorted((device for device in self._present.values() if device.tier is tier), key=_order)
        return (self._view(device, now) for device in here)

    def present(self, now: float) -> list[DeviceView]:
        """The nodes that have not been given up, in order."""
        return [self._view(device, now) for device in sorted(self._present.values(), key=_order)]

    def why_none(self, tier: Tier, now: float) -> str:
        """A sentence about a few nodes of a tier, including recently refused ones; "" without nodes."""
        here = [device for device in self._in_order if device.tier is tier]
        refused = [view for view in self.strangers(now) if view.device.tier is tier]
        told = sorted(here, key=lambda device: device.death is not None)[:_MOST_TOLD]
        views = [*(self._view(device, now) for device in told), *refused[: _MOST_TOLD - len(told)]]
        more = [f"and {len(here) - len(told):,} more"] if len(here) > len(told) else []
        at, why = self._turned_away.get(tier, (-math.inf, ""))
        if now - at < _REFUSED_S:
            more.append(why)
        return "; ".join([*(f"{view.device.node_id}: {view.health}: {view.reason}" for view in views), *more])

    def keeps_tasks(self, node_id: str, now: float) -> bool:
        """True if work given to this node still counts: it is on the list, neither dead nor stuck."""
        device = self._devices.get(node_id)
        return device is not None and self._view(device, now).keeps_tasks

    def sweep(self, now: float) -> list[DeviceView]:
        """Judge all nodes again, and notify the listeners of changes.

        Returns:
            All changes since the last call, those included that evidence has brought in between.
        """
        self._forgive_own_pauses(now)
        self._review(now)
        for device in sorted((self._devices[node_id] for node_id in self._untold), key=lambda device: device.order):
            self._announce(device, now)
        changes, self._changes = self._changes, []
        return changes

    def _forgive_own_pauses(self, now: float) -> None:
        """Take the time off every node's silence in which the scheduler stood still, or doubts that it hears."""
        since_s = 0.0 if self._swept_at is None else now - self._swept_at
        doubted, late = self.doubting, since_s > 2 * self._sweep_s
        if doubted or late:
            self._forgive(since_s if doubted else since_s - self._sweep_s, now)
        self._swept_at = now
        living = self._present.values()
        if not hears_nobody((now - device.last_seen, device.suspect_after_s) for device in living):
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = now
        self.doubting = self._unheard_since is not None and now - self._unheard_since <= self.times.doubt_s
        if doubted and not self.doubting:
            self._sure_since = now
        elif self.doubting and not doubted:
            for device in list(self._present.values()):
                device.probe = None if device.probe is Probe.SILENT else device.probe
        if doubted or late or self.doubting:
            # What is thought of them has changed otherwise than by the evidence and the moments that are kept.
            for device in list(self._present.values()):
                if doubted or self.doubting or self._may_recover(device, now):
                    device.review_at = math.inf
                    self._refresh(device, now)

    def _may_recover(self, device: Device, now: float) -> bool:
        """True if less silence may change a node's health. Judging thousands for which it cannot would cause
        the next pause."""
        health, keeps_tasks = device.told
        silent_s = now - device.last_seen
        return not keeps_tasks or (health is not Health.ALIVE and silent_s < device.suspect_after_s)

    def _forgive(self, pause_s: float, now: float) -> None:
        for device in list(self._present.values()):
            device.last_seen = min(now, device.last_seen + pause_s)
            device.last_beat = min(now, device.last_beat + pause_s)
            device.progress_at = min(now, device.progress_at + pause_s)

    def healths(self) -> Counter[tuple[Tier, Health]]:
        """The number of nodes by tier and health, by the last `sweep`."""
        return Counter((device.tier, device.told[0]) for device in self._devices.values())

    def _current(self, node_id: str, incarnation: str) -> Device | None:
        device = self._devices.get(node_id)
        return device if device is not None and device.incarnation == incarnation else None

    def _seen(self, device: Device, now: float) -> None:
        device.last_seen = now
        device.accusation = device.probe = None
        self._announce(device, now)

    def _progressed(self, device: Device, now: float) -> None:
        device.progress_at = now
        device.stalled = 0

    def _view(self, device: Device, now: float) -> DeviceView:
        try:
            return self._opinion(device, now)
        except Exception as exc:
            self._give_up(device, exc)
            return self._opinion(device, now)

    def _opinion(self, device: Device, now: float) -> DeviceView:
        until = now
        if self._swept_at is not None:
            # What comes after that may be a pause of the scheduler's own, which the next sweep takes off.
            until = min(now, self._swept_at + (0.0 if self.doubting else 2 * self._sweep_s))
        silent_s, wrong = max(0.0, until - device.last_seen), device.wrong
        evidence = Evidence(
            silent_s=silent_s,
            suspect_after_s=device.suspect_after_s,
            probe=device.probe,
            reached=device.reached,
            accusation=device.accusation,
            wrong=wrong.why if wrong.sets_aside(now, self.times.set_aside_s) else None,
            draining=device.draining,
            owed=device.owed,
            ms_per_image=device.ms_per_image,
            idle_s=max(0.0, until - device.progress_at),
            death=device.death,
            removed=device.intent.removed,
        )
        verdict = judge(evidence, self.times)
        reason = verdict.reason
        if self.doubting and verdict.health is Health.SUSPECT:
            reason = f"{reason}; no other node is heard either, so the scheduler doubts itself first"
        if device.intent.drained and not device.intent.removed:
            reason = f"{reason}; drained{device.intent.of_whom}"
        if verdict.health is Health.ALIVE and device.budget and (rest_s := device.budget.wait_s(now, 0)):
            per_minute = device.registration.images_per_minute
            reason = f"{reason}; rests for {rest_s:.1f} s to keep to {per_minute} images a minute"
        if verdict.health is Health.ALIVE and wrong.count:
            reason = f"{reason}; gets one task as a trial: {wrong.why}"
        refused_at, why = device.refusal
        if verdict.health is Health.DEAD and now - refused_at < _REFUSED_S:
            reason = f"{reason}; it is refused: {why}"
        return DeviceView(
            death=verdict.reason if verdict.health.gone else None,
            device=device,
            health=verdict.health,
            reason=reason,
            silent_s=silent_s,
            keeps_tasks=verdict.keeps_tasks,
            set_aside=verdict.set_aside,
        )

    def _give_up(self, device: Device, exc: Exception) -> None:
        """Declare a node dead because judging it failed; the other nodes are not affected."""
        _log.error("%s cannot be judged and is given up", device.node_id, exc_info=exc)
        device.death = f"cannot be judged ({type(exc).__name__}: {exc})"[:_MOST_SAID]
        self._untold.add(device.node_id)

    def _announce(self, device: Device, now: float) -> None:
        """Judge a node whose evidence has changed, and tell the listeners if its health has."""
        view = self._refresh(device, now)
        if view.death is not None:
            device.death = view.death
            self._buried(device)
        elif not view.keeps_tasks:
            # Its tasks go to others now, but that alone does not make it work again.
            device.stalled = device.owed
        self._untold.discard(device.node_id)
        if device.told != (view.health, view.keeps_tasks):
            device.told = (view.health, view.keeps_tasks)
            self._changes.append(view)
            self._tell(device.node_id)

    # --- who may receive tasks, kept up to date ---------------------------------------------------------------------

    def _review(self, now: float) -> None:
        """Judge the nodes whose time has come."""
        while self._reviews and self._reviews[0][0] <= now:
            at, node_id = heapq.heappop(self._reviews)
            device = self._devices.get(node_id)
            if device is None or at != device.review_at:
                continue  # another entry has taken its place
            device.review_at = math.inf
            self._refresh(device, now)

    def _refresh(self, device: Device, now: float) -> DeviceView:
        """Judge a node, and put it into the list of those that may receive tasks, or take it out."""
        view = self._view(device, now)
        if (view.health, view.keeps_tasks) != device.told:
            self._untold.add(device.node_id)
        able = view.health is Health.ALIVE and device.not_before <= now
        if able and not device.listed:
            device.listed = True
            insort(self._alive[device.tier], device, key=_order)
            self._moved(device)
        elif device.listed and not able:
            self._unlist(device)
        at = self._next_review(device, now)
        if at < device.review_at:
            device.review_at = at
            heapq.heappush(self._reviews, (at, device.node_id))
        return view

    def _next_review(self, device: Device, now: float) -> float:
        """The time at which the verdict may change without evidence, or the node may get tasks again."""
        if device.death is not None:
            return math.inf
        moments = [device.last_seen + device.suspect_after_s, device.last_seen + self.times.lease_s]
        if owed := device.owed:
            moments.append(device.progress_at + stalled_after_s(owed, device.ms_per_image, self.times))
        if device.wrong.count:
            moments.append(device.wrong.at + rest_s(device.wrong.count, self.times.set_aside_s))
        at = min((moment for moment in moments if moment > now), default=now) + _AGAIN_S
        return min(at, device.not_before) if device.not_before > now else at

    def _unlist(self, device: Device) -> None:
        if device.listed:
            device.listed = False
            alive = self._alive[device.tier]
            del alive[_place(alive, device)]
            self._moved(device)

    def _moved(self, device: Device) -> None:
        self.changes += 1
        for follower in self._followers:
            follower(device.node_id)

    def _buried(self, device: Device) -> None:
        """A node is dead: one too many, and the first of them is forgotten."""
        if self._devices.get(device.node_id) is not device:
            return
        self._present.pop(device.node_id, None)
        if device.intent == NO_INTENT:
            self._dead[device.node_id] = None
            while len(self._dead) > MOST_DEAD:
                self.forget(next(iter(self._dead)))

    def _tell(self, node_id: str) -> None:
        for listener in self._listeners:
            listener(node_id)


def _removal(intent: Intent) -> str:
    return f"may not register until it is resumed; removed{intent.of_whom}"


def _order(device: Device) -> SortKey:
    return device.order


def _place(devices: list[Device], device: Device) -> int:
    """Index of a device in a list in the order of the device list."""
    return bisect_left(devices, device.order, key=_order)
