"""The ledger of the fleet: the evidence on each node, and the attempts under way. Time is passed in; no I/O.

A node registers with an incarnation that is fresh at each of its starts, receives a lease and renews it by heartbeats.
What else speaks for or against it is gathered here as well: answers to tasks and failed attempts, probes, work that it
owes. `health` judges all of it. Nodes that hold a live lease are the device list: they may receive tasks.

Who is alive is not stored: after a restart of the scheduler all nodes count as dead until their next heartbeats, which
are answered "register again". What outlasts it is which nodes are known, and what operators want with them (`restore`).
"""

from __future__ import annotations

import heapq
import logging
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Concatenate, NamedTuple, ParamSpec

from scheduler.core.assignments import Assignments
from scheduler.core.device import (
    MOST_SAID,
    NO_INTENT,
    REFUSED_S,
    Device,
    DeviceView,
    Intent,
    KnownNode,
    SortKey,
    natural_order,
)
from scheduler.core.health import DetectorTimes, Probe, hears_nobody
from scheduler.core.site import NO_SITE
from scheduler.core.work import Attempt
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded
from tierkit.types import Health, Tier
from tierkit.wire.messages import Heartbeat, Registration

__all__ = ["Change", "Ledger"]

_log = logging.getLogger(__name__)

_MOST_TOLD = 5
"""Nodes of a tier, in a sentence."""

MOST_NODES = 250_000
"""Nodes on the list, including dead ones that are still shown."""

MOST_SITES = 50_000
"""Known sites. When there are more, the list forgets those that have no nodes, unless an operator has said something
about them."""

MOST_DEAD = 10_000
"""Dead nodes that stay on the list, so that people see who is missing. When there are more, the list forgets those that
died first. It keeps nodes that an operator has drained, removed or trusted."""

_LIST_FULL_S = 60.0

_MOST_STRANGERS = 64
"""Refused nodes that are remembered although they are not on the list."""

_MOST_RETIRED = 64
"""Older incarnations that are remembered of each node."""


NO_SITES: Mapping[str, Intent] = MappingProxyType({})

Taken = ParamSpec("Taken")


class Change(NamedTuple):
    """A change of a node: one entry of the feed of changes."""

    node_id: str
    health: Health | None
    """Its health, which was another before; None for a node that has registered, or is off the list."""
    reason: str = ""
    to_save: bool = False
    """The stored row of the node is out of date."""
    struck: Registration | None = None
    """Registration of a node that is not on the list any more."""
    died: bool = False
    """It was dead before; else it has left."""


class Ledger:
    """Registrations, leases, health and attempts of all nodes. `scheduler.core.step` changes it.

    A node's health changes by evidence, which arrives at a method of this class, or by time. A heap holds the times
    at which nodes must be judged again.

    Args:
        times: of the failure detector.
        sweep_s: seconds between calls of `sweep`. After a gap of twice as long, the scheduler itself stood still and
            could hear no node: that time counts against no node.
        window: tasks that an end device may have outstanding.
    """

    def __init__(self, times: DetectorTimes, *, sweep_s: float = math.inf, window: int = 1) -> None:
        self.times = times
        self._sweep_s = sweep_s
        self._swept_at: float | None = None
        self._unheard_since: float | None = None
        """The first sweep since which no node is heard."""
        self.doubting = False
        """True while the scheduler suspects itself, because it hears no node. No node dies of silence then,
        but one that refuses connections does."""
        self._sure_since = -math.inf
        """Time at which it last stopped doubting itself."""
        self._devices: dict[str, Device] = {}
        self._in_order: list[Device] = []
        self._present: dict[str, Device] = {}
        """Devices that have not been given up; they are judged again and again."""
        self._alive: dict[tuple[Tier, str | None], list[Device]] = {(tier, None): [] for tier in Tier}
        """Alive devices by tier, of all sites and of each."""
        self._in_site: dict[str, dict[str, Device]] = {}
        """All nodes on the list, by site."""
        self._site_intents: dict[str, Intent] = {}
        """Known sites: nodes have named them. They stay known until they are forgotten, oldest first."""
        self._sites: list[str] | None = None
        """The sites in order; None if that has to be worked out again."""
        self._site_versions: dict[str, int] = {}
        self.version = 0
        """Another number whenever another set of nodes may receive tasks, by the last `alive`, a node's speed is
        another one, or a node that takes no tasks has registered."""
        self._reviews: list[tuple[float, str]] = []
        """A heap of (time, node id) at which nodes are judged again."""
        self._unannounced: set[str] = set()
        """Nodes whose health has changed since it was announced."""
        self._dead: dict[str, None] = {}
        """Dead nodes that the list may forget, in the order of their deaths."""
        self._strangers: dict[str, Device] = {}
        """Nodes that were refused and are not on the list, the latest last."""
        self._turned_away: dict[Tier, tuple[float, str]] = {}
        """By tier: time and reason of the last refusal of a node whose token is for others."""
        self._feed: list[Change] = []
        """Changes since `take_changes`."""
        self.assigned = Assignments(window)
        """The attempts under way, by node."""

    def take_changes(self) -> list[Change]:
        """The feed: changes of nodes since the last call, in order."""
        changes, self._feed = self._feed, []
        return changes

    def register(self, registration: Registration, now: float) -> None:
        """Give a node a place in the list.

        A known node id with a new incarnation is the node after a restart: it takes the place of the old one, whose
        tasks are void. As long as the old one shows itself alive at another address it is not a restart but a second
        node with the same name, unless it has the spool of the old one. One that was just killed and started again is
        refused at most until its death is noticed, and tries again by itself. The same incarnation at another address
        has moved: what it was sent at the old one is lost.

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
            self.move_out(registration, now)
            older = (*old.retired, old.incarnation)
            retired = tuple(each for each in older if each != registration.incarnation)[-_MOST_RETIRED:]
        if self._swept_at is None:
            self._swept_at = now  # no node is silent before the first has come
        intent = NO_INTENT if old is None else old.intent
        if registration.site is not None:
            self._check_site(registration.site)
            self._learn_site(registration.site)
        of_site = self._site_intents.get(registration.site or NO_SITE, NO_INTENT)
        if of_site.drained and (old is None or old.registration.site != registration.site):
            intent = replace(intent, drained=True, by=of_site.by)
        device = self._devices[node_id] = self._present[node_id] = Device.new(registration, intent, self.times, now)
        if old is not None:
            self._unlist(old)
            self._part(old)
        self._join(device)
        device.retired = retired
        if old is not None and old.incarnation == device.incarnation:
            device.given = old.given
        self._dead.pop(node_id, None)
        to_save = old is None or old.registration != registration.model_copy(update={"key": old.registration.key})
        if old is not None:
            self._in_order[_place(self._in_order, old)] = device
        else:
            insort(self._in_order, device, key=_order)
        if not device.takes_tasks:
            self._changed(device.site)  # its own route depends on its networks
        self._refresh(device, now)
        self._feed.append(Change(node_id, None, to_save=to_save))

    def _check_site(self, site: str | None) -> None:
        """Raises Forbidden for a site that an operator has removed."""
        if site is not None and self._site_intents.get(site, NO_INTENT).removed:
            raise Forbidden(
                f"an operator has removed the site {site!r}: 'terrace sites resume {site}' lets its nodes register"
            )

    def _learn_site(self, site: str) -> None:
        """A node names this site. Raises Overloaded if it is one too many."""
        if site in self._site_intents:
            return
        if len(self._site_intents) >= MOST_SITES:
            empty = (each for each, said in self._site_intents.items() if said == NO_INTENT)
            oldest = next((each for each in empty if each not in self._in_site), None)
            if oldest is None:
                raise Overloaded(f"{MOST_SITES:,} sites are known, and no more fit", retry_after_s=_LIST_FULL_S)
            self.forget_site(oldest)
        self._know_site(site, NO_INTENT)

    def _know_site(self, site: str, intent: Intent) -> None:
        self._site_intents[site] = intent
        self._sites = None

    def intend_site(self, site: str, intent: Intent) -> None:
        """Take over what an operator wants with a site. It counts for nodes that register from now on; those on the
        list keep theirs. Raises NotFound."""
        self.site_intent(site)
        self._know_site(site, intent)

    def site_intent(self, site: str) -> Intent:
        """Return the operator's intent for a site. Raises NotFound."""
        if site not in self._site_intents:
            raise NotFound(f"no site {site!r} is known")
        return self._site_intents[site]

    def forget_site(self, site: str) -> None:
        """Know nothing of a site any more.

        Raises:
            NotFound: no such site.
            Conflict: nodes on the list belong to it.
        """
        self.site_intent(site)
        if site in self._in_site:
            raise Conflict(f"nodes on the list belong to the site {site!r}")
        del self._site_intents[site]
        self._sites = None

    def move_out(self, registration: Registration, now: float) -> None:
        """A process that registers from another address is gone from its old one. Raises what `register` raises."""
        self._check_site(registration.site)
        old = self._devices.get(registration.node_id)
        if old is None:
            return
        self._check_claim(registration, old, now)
        moved = old.incarnation == registration.incarnation and old.registration.url != registration.url
        if moved and old.death is None:
            old.left, old.death = True, f"has moved to {registration.url}"
            self._announce(old, now)

    def restore(self, nodes: Iterable[KnownNode], now: float, sites: Mapping[str, Intent] = NO_SITES) -> None:
        """Put nodes and sites on the list that the scheduler before this one knew. The nodes are dead until they
        register again. Called once, on an empty list."""
        self._site_intents.update(sites)
        for known in nodes:
            device = Device.new(known.registration, known.intent, self.times, now)
            removed = known.intent.removed
            device.death = _removal(known.intent) if removed else "has not come back since the scheduler started"
            device.told = (Health.REMOVED if removed else Health.DEAD, False)
            self._devices[device.node_id] = device
            self._join(device)
            if device.site != NO_SITE and device.site not in self._site_intents:
                self._know_site(device.site, NO_INTENT)
        self._in_order = sorted(self._devices.values(), key=_order)
        for device in list(self._devices.values()):
            self._buried(device)

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
        # A second process cannot listen where the first one does, nor use its spool: the first has ended.
        same_place = claim.url == old.registration.url or (claim.sources and claim.spool == old.registration.spool)
        same_place &= claim.incarnation not in old.retired
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
        device = self._present_process(node_id, beat.incarnation, now)
        if device.beats(beat, now):
            # What was worked out with its speed is void.
            device.nodes.clear()
            self._changed(device.site)
        self._announce(device, now)

    def hear(self, node_id: str, incarnation: str, now: float) -> None:
        """A node has sent something other than a heartbeat: its lease is renewed. Raises NotFound, Conflict."""
        device = self._present_process(node_id, incarnation, now)
        device.seen(now)
        self._announce(device, now)

    def networks_changed(self) -> None:
        """Other releases answer: what was worked out with the networks of nodes is void."""
        for device in self._devices.values():
            device.nodes.clear()
        for site in {*self._in_site, NO_SITE}:
            self._changed(site)

    def bar(self, node_id: str, incarnation: str, networks: Mapping[str, str]) -> None:
        """Give these networks of a node no work; see `Device.bars`."""
        device = self._current(node_id, incarnation)
        if device is not None and device.bars(networks):
            self._changed(device.site)

    def _present_process(self, node_id: str, incarnation: str, now: float) -> Device:
        device = self.get(node_id)
        if device.incarnation != incarnation:
            raise Conflict(f"node {node_id!r} is on the list with another incarnation: this one is void")
        # Without one of these, `judge` gives no node up.
        doubtful = device.death is not None or device.probe is not None or now - device.last_seen > device.times.lease_s
        if doubtful and (view := self._view(device, now)).health.gone:
            raise NotFound(f"node {node_id!r} was given up ({view.reason}): register again")
        return device

    def note(
        self,
        node_id: str,
        incarnation: str,
        now: float,
        take: Callable[Concatenate[Device, Taken], bool],
        *what: Taken.args,
        **named: Taken.kwargs,
    ) -> None:
        """Let the record of a node take evidence, and judge the node again. Evidence on another incarnation is dropped.

        Args:
            take: a method of `Device`; it returns False if nothing has changed.
        """
        device = self._current(node_id, incarnation)
        if device is not None and take(device, *what, **named):
            self._announce(device, now)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, now: float) -> None:
        """An attempt is on its way to its device: the trial of each node whose last answers were wrong. It counts
        against the power budgets of the device and of the upstream node that is asked first."""
        facts = attempt.facts
        self.assigned.add(attempt)
        device = self._current(facts.node_id, facts.incarnation)
        if device is not None and attempt.owed:
            device.gets(facts.images, now)
        for node_id in facts.nodes[:2]:
            self.charge(node_id, facts.images, now)
        for node_id in facts.nodes:
            incarnation = facts.incarnation if node_id == facts.node_id else facts.incarnations[node_id]
            self.note(node_id, incarnation, now, Device.is_tried, now)

    def release(self, attempt: Attempt, now: float, *, answered: bool) -> None:
        """A device owes nothing more for an attempt: it has answered, which is progress, or the attempt is over."""
        facts = attempt.facts
        self.assigned.touch(facts.node_id)
        device = self._current(facts.node_id, facts.incarnation)
        if device is not None:
            device.given -= facts.images
            if answered:
                device.progresses(now)
                if not device.listed:
                    self._refresh(device, now)

    # --- evidence -----------------------------------------------------------------------------------------------------

    def charge(self, node_id: str, images: int, now: float) -> None:
        """Count images against the node's power budget: it gets no more until it has rested for them."""
        device = self._devices.get(node_id)
        if device is not None and device.budget is not None:
            self.note(node_id, device.incarnation, now, Device.rests, now + device.budget.take(now, images))

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
            device.refuse(why, now)
        elif claim is not None:
            self._strangers.pop(node_id, None)
            while len(self._strangers) >= _MOST_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            stranger = self._strangers[node_id] = Device.new(claim, NO_INTENT, self.times, now)
            stranger.refuse(why, now)
            stranger.death = "has no place on the list"
        elif tier is not None:
            self._turned_away[tier] = now, f"{node_id} was refused: {why[:MOST_SAID]}"

    def strangers(self, now: float) -> list[DeviceView]:
        """The nodes that were refused a place within the last minute and never had one, in order."""
        recent = [one for one in self._strangers.values() if one.refused_lately(now)]
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
        self._part(device)
        del self._in_order[_place(self._in_order, device)], self._devices[node_id]
        self._present.pop(node_id, None)
        self._unannounced.discard(node_id)
        self._dead.pop(node_id, None)
        self._feed.append(
            Change(node_id, None, to_save=True, struck=device.registration, died=device.death is not None)
        )

    def get(self, node_id: str) -> Device:
        """The node's record. Raises NotFound."""
        device = self._devices.get(node_id)
        if device is None:
            raise NotFound(f"no node {node_id!r} on the device list")
        return device

    def find(self, node_id: str) -> Device | None:
        """The node's record, if it is on the list."""
        return self._devices.get(node_id)

    def health_of(self, node_id: str, now: float) -> Health | None:
        """The health of a node; None for one that has left the list."""
        device = self._devices.get(node_id)
        return None if device is None else self._view(device, now).health

    def site_of(self, node_id: str) -> str | None:
        """The site of a node; None for one that has none, or has left the list."""
        device = self._devices.get(node_id)
        return None if device is None else device.site or None

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

    @property
    def sites(self) -> list[str]:
        """The known sites in order, and before them "" if there are nodes of no site. Not to be changed."""
        if self._sites is None:
            none = [NO_SITE] if NO_SITE in self._in_site else []
            self._sites = [*none, *sorted(self._site_intents, key=natural_order)]
        return self._sites

    def of_site(self, site: str, now: float) -> list[DeviceView]:
        """The nodes of a site, in order."""
        return [self._view(device, now) for device in sorted(self._in_site.get(site, {}).values(), key=_order)]

    def members(self, site: str) -> Iterable[Device]:
        """The nodes of a site, in no order."""
        return self._in_site.get(site, {}).values()

    def site_version(self, site: str) -> int:
        """Another number whenever `version` changes because of a node of this site."""
        return self._site_versions.get(site, 0)

    def alive(self, tier: Tier, now: float, site: str | None = None) -> list[Device]:
        """Nodes of a tier that may receive new tasks, in the order of the list. Not to be changed, nor to be kept: it
        is the list itself, which changes with the next call.

        Args:
            site: only nodes of this one; None: of all.
        """
        if self._reviews and self._reviews[0][0] <= self._silence_until(now):
            self._review(now)
        return self._alive.get((tier, site), [])

    def place(self, tier: Tier, device: Device) -> int:
        """The number of nodes of a tier and of the device's site that stand before it in the list and may receive new
        tasks, by the last `alive`."""
        return bisect_left(self._alive.get((tier, device.site), []), device.order, key=_order)

    def last_resort(self, tier: Tier, now: float, site: str | None = None) -> list[Device]:
        """Nodes to try where all nodes of a tier that could work are set aside for wrong answers: it may be the tasks'
        fault, and a fleet that does nothing finds out nothing. Each gets a task every `set_aside_s` then. `site` as for
        `alive`."""
        views = [
            view for view in self._views(tier, now, site) if view.keeps_tasks and view.health is not Health.DRAINING
        ]
        if not all(view.set_aside for view in views):
            return []
        base_s = self.times.set_aside_s
        devices = (view.device for view in views)
        return [device for device in devices if device.wrong.may_be_asked(now, base_s) and device.not_before <= now]

    def suspect(self, tier: Tier, now: float, site: str | None = None) -> list[Device]:
        """Nodes of a tier that are late or accused, but neither given up nor stuck nor about to leave. `site` as for
        `alive`."""
        return [
            view.device
            for view in self._views(tier, now, site)
            if view.health is Health.SUSPECT and view.keeps_tasks and not view.device.draining
        ]

    def _views(self, tier: Tier, now: float, site: str | None) -> Iterator[DeviceView]:
        """Yield the nodes that take tasks."""
        known = self._present if site is None else self._in_site.get(site, {})
        there = (device for device in known.values() if device.tier is tier and device.takes_tasks)
        here = sorted((device for device in there if device.node_id in self._present), key=_order)
        return (self._view(device, now) for device in here)

    def present(self, now: float) -> list[DeviceView]:
        """The nodes that have not been given up, in order."""
        return [self._view(device, now) for device in sorted(self._present.values(), key=_order)]

    def why_none(self, tier: Tier, now: float, site: str | None = None) -> str:
        """A sentence about a few nodes of a tier, including recently refused ones; "" without nodes. `site` as for
        `alive`."""
        here = [device for device in self._in_order if device.tier is tier and site in (None, device.site)]
        strangers = (view for view in self.strangers(now) if site in (None, view.device.site))
        refused = [view for view in strangers if view.device.tier is tier]
        told = sorted(here, key=lambda device: device.death is not None)[:_MOST_TOLD]
        views = [*(self._view(device, now) for device in told), *refused[: _MOST_TOLD - len(told)]]
        more = [f"and {len(here) - len(told):,} more"] if len(here) > len(told) else []
        at, why = self._turned_away.get(tier, (-math.inf, ""))
        if now - at < REFUSED_S:
            more.append(why)
        return "; ".join([*(f"{view.device.node_id}: {view.health}: {view.reason}" for view in views), *more])

    def keeps_tasks(self, node_id: str, now: float) -> bool:
        """True if work given to this node still counts: it is on the list, neither dead nor stuck."""
        device = self._devices.get(node_id)
        return device is not None and self._view(device, now).keeps_tasks

    def sweep(self, now: float) -> None:
        """Judge all nodes again, and announce what has changed."""
        self._forgive_own_pauses(now)
        self._review(now)
        for device in sorted((self._devices[node_id] for node_id in self._unannounced), key=_order):
            self._announce(device, now)

    def _forgive_own_pauses(self, now: float) -> None:
        """Take the time off every node's silence in which the scheduler stood still, or doubts that it hears."""
        since_s = 0.0 if self._swept_at is None else now - self._swept_at
        doubted, late = self.doubting, since_s > 2 * self._sweep_s
        if doubted or late:
            for device in self._present.values():
                device.forgive(since_s if doubted else since_s - self._sweep_s, now)
        self._swept_at = now
        # Silence within a long lease says nothing about what the scheduler hears.
        living = (device for device in self._present.values() if device.takes_tasks)
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
                if doubted or self.doubting or device.may_recover(now):
                    device.review_at = math.inf
                    self._refresh(device, now)

    def healths(self) -> Counter[tuple[Tier, Health]]:
        """The number of nodes by tier and health, by the last `sweep`."""
        return Counter((device.tier, device.told[0]) for device in self._devices.values())

    def _current(self, node_id: str, incarnation: str) -> Device | None:
        device = self._devices.get(node_id)
        return device if device is not None and device.incarnation == incarnation else None

    def _view(self, device: Device, now: float) -> DeviceView:
        try:
            return self._opinion(device, now)
        except Exception as exc:
            # One node that cannot be judged must not affect the others.
            _log.error("%s cannot be judged and is given up", device.node_id, exc_info=exc)
            device.give_up(f"{type(exc).__name__}: {exc}")
            self._unannounced.add(device.node_id)
            return self._opinion(device, now)

    def _opinion(self, device: Device, now: float) -> DeviceView:
        return device.view(now, until=self._silence_until(now), doubting=self.doubting)

    def _silence_until(self, now: float) -> float:
        """The time until which silence counts. Later silence may be a pause of the scheduler itself, which the next
        sweep takes off."""
        if self._swept_at is None:
            return now
        return min(now, self._swept_at + (0.0 if self.doubting else 2 * self._sweep_s))

    def _announce(self, device: Device, now: float) -> None:
        """Judge a node whose evidence has changed, and announce it if its health has."""
        view = self._refresh(device, now)
        if view.death is not None:
            device.death = view.death
            self._buried(device)
        elif not view.keeps_tasks:
            # Its tasks go to others now, but that alone does not make it work again.
            device.stalled = device.owed
        self._unannounced.discard(device.node_id)
        if device.told != (view.health, view.keeps_tasks):
            device.told = (view.health, view.keeps_tasks)
            self._feed.append(Change(device.node_id, view.health, view.reason))

    # --- who may receive tasks, kept up to date ---------------------------------------------------------------------

    def _review(self, now: float) -> None:
        """Judge the nodes whose time has come."""
        until = self._silence_until(now)
        while self._reviews and self._reviews[0][0] <= until:
            at, node_id = heapq.heappop(self._reviews)
            device = self._devices.get(node_id)
            if device is None or at != device.review_at:
                continue  # another entry has taken its place
            device.review_at = math.inf
            # A sign of life may have come since the entry was made. The evidence decides whether the node is judged
            # now, not the time of the last query.
            if (at := device.next_review(device.judged_at)) > until:
                device.review_at = at
                heapq.heappush(self._reviews, (at, device.node_id))
            else:
                self._refresh(device, now)

    def _refresh(self, device: Device, now: float) -> DeviceView:
        """Judge a node, and put it into the list of those that may receive tasks, or take it out."""
        view = self._view(device, now)
        if (view.health, view.keeps_tasks) != device.told:
            self._unannounced.add(device.node_id)
        able = view.health is Health.ALIVE and device.takes_tasks and device.not_before <= now
        if able and not device.listed:
            device.listed = True
            for site in (None, device.site):
                insort(self._alive.setdefault((device.tier, site), []), device, key=_order)
            self._moved(device)
        elif device.listed and not able:
            self._unlist(device)
        device.judged_at = self._silence_until(now)
        at = device.next_review(device.judged_at)
        if at < device.review_at:
            device.review_at = at
            heapq.heappush(self._reviews, (at, device.node_id))
        return view

    def _unlist(self, device: Device) -> None:
        if device.listed:
            device.listed = False
            for site in (None, device.site):
                alive = self._alive[device.tier, site]
                del alive[_place(alive, device)]
                if not alive and site is not None:
                    del self._alive[device.tier, site]
            self._moved(device)

    def _part(self, device: Device) -> None:
        """A node is off the list, or may come back in another site."""
        there = self._in_site[device.site]
        del there[device.node_id]
        if not there:
            del self._in_site[device.site]
            self._site_versions.pop(device.site, None)
            self._sites = None

    def _join(self, device: Device) -> None:
        if device.site not in self._in_site:
            self._in_site[device.site] = {}
            self._sites = None
        self._in_site[device.site][device.node_id] = device

    def _changed(self, site: str) -> None:
        self.version += 1
        self._site_versions[site] = self.version

    def _moved(self, device: Device) -> None:
        self._changed(device.site)
        if device.tier is Tier.END:
            self.assigned.listed(device, member=device.listed)

    def _buried(self, device: Device) -> None:
        """A node is dead: one too many, and the first of them is forgotten."""
        if self._devices.get(device.node_id) is not device:
            return
        self._present.pop(device.node_id, None)
        if device.intent == NO_INTENT:
            self._dead[device.node_id] = None
            while len(self._dead) > MOST_DEAD:
                self.forget(next(iter(self._dead)))


def _removal(intent: Intent) -> str:
    return f"may not register until it is resumed; removed{intent.of_whom}"


def _order(device: Device) -> SortKey:
    return device.order


def _place(devices: list[Device], device: Device) -> int:
    """Index of a device in a list in the order of the device list."""
    return bisect_left(devices, device.order, key=_order)
