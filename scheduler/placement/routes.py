"""Placement over the device list: routes, models of nodes, and the form of images. Untrusted nodes get no pixels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from msgspec.structs import replace

from encryption.noise import job_key
from encryption.policy import Form, Trust, decide_form, preferred
from models.manifest import EncoderEntry, Manifest
from scheduler.core.device import Device, Node
from scheduler.core.fleet import Ledger
from scheduler.core.policy import JobRules
from scheduler.core.release import NetworkSet
from scheduler.core.site import NO_SITE, may_reach
from scheduler.placement.mapping import FleetTimes, Reach, Route, TaskTimes, map_count, route_of, share_to_cloud
from scheduler.settings import SchedulerSettings
from tierkit.errors import Conflict, Forbidden, OtherNetworks
from tierkit.inference.upstreams import is_allowed
from tierkit.types import EncodeOn, EncoderKind, Privacy, Scheme, Share, Tier
from tierkit.wire.messages import Encoding, ModelOffer, Registration, Relay, Upstream

__all__ = ["IN_FORCE", "PAPER_BATCH", "LinkTime", "MapCount", "Placement", "in_words"]

PAPER_BATCH = 50
"""Images of a task in the paper's formulas."""

_TIERS = frozenset(Tier)
_HERE = "in the version of the scheduler's manifest"
_UPPER_TIERS = {
    Scheme.END: (),
    Scheme.END_EDGE: (Tier.EDGE,),
    Scheme.END_CLOUD: (Tier.CLOUD,),
    Scheme.MAPPING: (Tier.EDGE, Tier.CLOUD),
    Scheme.ADAPTIVE: (Tier.EDGE, Tier.CLOUD),
}


_DEFAULT = JobRules()
IN_FORCE = 0
"""Placeholder for the number of the release in force."""
_MOST_FOREIGN = 4
"""Edge nodes of other sites on one route."""
_MOST_SITES = 100_000
"""Sites of which results are kept."""

_LINK_CHANGE, _LINK_CHANGE_S = 1.2, 0.001
"""A measured link time replaces the one in use if it is this many times as long or as short, and differs by this many
seconds: otherwise N_map would change back and forth."""

Known = TypeVar("Known")

_Way = tuple[EncoderEntry | None, Relay | None]
"""A way of images to an upstream node: the encoder (None: pixels), and the node that encodes for the end device."""


@dataclass(frozen=True, slots=True)
class MapCount:
    """N_map as it is used, and where it comes from."""

    value: int | None
    """None if a tier that it is computed for has no node."""
    reason: str

    @property
    def used(self) -> int:
        """Value for formulas and routes: 1 if there is none, when they hardly depend on it."""
        return 1 if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds to a tier and back, t^c of the formulas."""

    set_s: float | None
    """Seconds set by the operator."""
    measured_s: float | None
    """None before the first answer."""

    @property
    def used_s(self) -> float:
        return self.measured_s or 0.0 if self.set_s is None else self.set_s


class Placement:
    """Views of a device list.

    Args:
        devices: the list.
        settings: trust, N_map and link times.
        manifest: of the release in force, until `use` names others.
        secret: of this scheduler; the keys of the noise that encoders add come from it.
    """

    def __init__(self, devices: Ledger, settings: SchedulerSettings, manifest: Manifest, secret: bytes) -> None:
        self._devices = devices
        self._settings = settings
        self._secret = secret
        self._sets: Mapping[int, NetworkSet] = {IN_FORCE: NetworkSet(manifest)}
        """The releases that answer, by number, and the one in force under 0 as well."""
        self._sharing = settings.sharing
        self._known: dict[Hashable, Any] = {}
        """Results since the device list last changed."""
        self._known_at = -1
        self._measured: dict[Tier, float] = {}
        """Seconds to a tier and back."""
        self._of_sites: dict[str, tuple[tuple[int, int], dict[Hashable, Any]]] = {}
        """Results of each site since it, or the nodes of no site, last changed."""

    def use(self, releases: Mapping[int, NetworkSet], in_force: int) -> None:
        """Place work by these releases from now on."""
        self._sets = {**releases, IN_FORCE: releases[in_force]}
        self._known.clear()
        self._of_sites.clear()
        self._devices.networks_changed()

    def measured(self, links: Mapping[Tier, float]) -> None:
        """Take the measured seconds to tiers and back."""
        changed = {tier: seconds for tier, seconds in links.items() if _differs(self._measured.get(tier), seconds)}
        if changed:
            self._measured |= changed
            self._known.clear()
            self._of_sites.clear()
            self._devices.networks_changed()

    def links(self) -> dict[Tier, LinkTime]:
        """Seconds to each tier and back: from the scheduler to an end device, and from there to the upper tiers."""
        of = {
            Tier.END: self._settings.end_link_s,
            Tier.EDGE: self._settings.edge_link_s,
            Tier.CLOUD: self._settings.cloud_link_s,
        }
        return {tier: LinkTime(seconds, self._measured.get(tier)) for tier, seconds in of.items()}

    def check_networks(self, registration: Registration) -> None:
        """Refuse a node whose answers would be taken for other networks' answers. A node that follows the scheduler's
        releases may have any networks: it loads what it needs, and gets no work before.

        Raises:
            OtherNetworks: its networks are in no release that answers, by name and sha256; they answer other classes,
                or in another order; or it is of an upper tier and answers only superclasses.
        """
        if registration.follows:
            return
        sets = self._sets.values()
        strangers = [o.name for o in registration.models if not any(o.classes in each.classes for each in sets)]
        if strangers:
            raise OtherNetworks(
                f"{', '.join(strangers)} of {registration.node_id} answers other classes than this fleet does: start "
                "the node with --models for the scheduler's model set, or without --models to get it from there"
            )
        for offer in registration.models:
            if any(each.is_of_it(offer) for each in sets):
                continue
            sha256, _ = self._sets[IN_FORCE].offered.get(offer.name, ("", ""))
            if offer.sha256 != sha256:
                instead = f", and the set has {sha256}" if sha256 else ""
                differs = f"is not in the model set of this scheduler: its sha256 is {offer.sha256}{instead}"
            else:
                differs = "reads pictures in another way, or with another temperature, than the model set says"
            raise OtherNetworks(
                f"{offer.name} of {registration.node_id} {differs}. Start the node without --models and --model to "
                "get the set from the scheduler, or bring its own set up to date"
            )
        fine = {classes for each in sets for classes in each.fine_classes}
        if registration.tier is not Tier.END and fine.isdisjoint(offer.classes for offer in registration.models):
            names = ", ".join(offer.name for offer in registration.models)
            raise OtherNetworks(
                f"{names} of {registration.node_id} answers only superclasses, as end devices do: start the node "
                "without --model, or with one that answers classes"
            )

    def accuracy(self, device: Device) -> float | None:
        """Accuracy of the network that a node is asked for, by the manifest; None if the file is in no release."""
        sha256 = self.node(device).sha256
        return next((found for each in self._sets.values() if (found := each.accuracy.get(sha256)) is not None), None)

    def once(self, key: Hashable, make: Callable[[], Known], now: float | None = None) -> Known:
        """The result of `make`, computed once for each state of the device list.

        Args:
            now: bring the list up to this time first; None if that was just done.
        """
        if now is not None:
            self._devices.alive(Tier.END, now)
        results = self._results()
        if key not in results:
            results[key] = make()
        known: Known = results[key]
        return known

    def _results(self) -> dict[Hashable, Any]:
        """Results for the device list as it is, by the last `alive`."""
        if self._known_at != self._devices.version:
            self._known.clear()
            self._known_at = self._devices.version
        return self._known

    def in_site(self, site: str, key: Hashable, make: Callable[[], Known]) -> Known:
        """The result of `make`, computed once for each state of a site and of the nodes of no site."""
        state = self._devices.site_version(site), self._devices.site_version(NO_SITE)
        known_at, known = self._of_sites.get(site, (None, {}))
        if known_at != state:
            if len(self._of_sites) > _MOST_SITES:
                self._of_sites.clear()
            known = {}
            self._of_sites[site] = state, known
        if key not in known:
            known[key] = make()
        result: Known = known[key]
        return result

    def share(self, site: str) -> Share:
        """Rule on where the pictures of a site may go."""
        return self._sharing.of(site)

    def route(self, scheme: Scheme, node_id: str, now: float, rules: JobRules | None = None) -> Route:
        """The route of one end device; one that gets no tasks is counted in as if it did."""
        self._devices.alive(Tier.END, now)
        device = self._devices.get(node_id)
        sender = None if device.listed else device
        position = self._devices.place(Tier.END, device)
        return route_of(
            scheme,
            end=self.node(device, (rules or _DEFAULT).release),
            position=position,
            reach=self._reach(device.site, now, rules, sound=len(_UPPER_TIERS[scheme]) > 1, sender=sender),
            n_map=self.n_map(now, device.site).used,
        )

    def routes(self, scheme: Scheme, now: float, site: str | None = None) -> dict[str, Route]:
        """The routes of the end devices that are alive, of a site or of all, by the default rules."""
        ends = [device.node_id for device in self._devices.alive(Tier.END, now, site)]
        return {node_id: self.route(scheme, node_id, now) for node_id in ends}

    def has_upstream(self, scheme: Scheme, now: float, rules: JobRules | None = None, site: str | None = None) -> bool:
        """True if an upstream node that the scheme uses is alive, and may get the images in some form.

        Args:
            site: of the end devices that ask; None: any.
        """
        wanted = _UPPER_TIERS[scheme]
        sites = self._devices.sites if site is None else [site]
        if len(sites) < 2 or not any(self._devices.alive(tier, now) for tier in wanted):
            return any(self.upper(tier, now, rules, site) or self._foreign(tier, site, now, rules) for tier in wanted)
        return any(
            self.upper(tier, now, rules, each) or self._foreign(tier, each, now, rules)
            for each in sites
            if self._devices.alive(Tier.END, now, each)
            for tier in wanted
        )

    def is_cut_off(self, scheme: Scheme, device: Device, now: float, rules: JobRules | None = None) -> bool:
        """True if the rule of the device's site, or its own list, leaves out every upstream node that the scheme
        uses."""
        end, site = self.node(device), device.site
        return not any(
            end.may_ask(node)
            for tier in _UPPER_TIERS[scheme]
            for node in (*self.upper(tier, now, rules, site), *self._foreign(tier, site, now, rules))
        )

    def upper(
        self,
        tier: Tier,
        now: float,
        rules: JobRules | None = None,
        site: str | None = None,
        sender: Device | None = None,
    ) -> list[Node]:
        """Return the nodes of an upper tier that are alive and may get images in some form; suspects if there is no
        other. The end device asks suspects with a budget: at worst, the coarse answer is final, as it would be without
        them.

        Args:
            rules: rules of the job; None for the defaults.
            site: only its own nodes and those that all sites share, if it may use them; None: all nodes.
            sender: an end device that sends images although it is not alive.
        """
        rules = rules or _DEFAULT
        alive = self._candidates(self._devices.alive, tier, site, now)
        if not alive:
            suspects = self._candidates(self._devices.suspect, tier, site, now)
            return self._able(suspects, rules, now, sender)
        # Who may get them in which form depends on the end devices and the edge nodes that encode as well.
        key = (tier, rules, "" if sender is None else sender.node_id)
        if site is None:
            return self.once(key, lambda: self._able(alive, rules, now, sender))
        return self.in_site(site, key, lambda: self._able(alive, rules, now, sender, site))

    def _candidates(
        self, listed: Callable[[Tier, float, str | None], list[Device]], tier: Tier, site: str | None, now: float
    ) -> list[Device]:
        """Nodes of a site, then the cloud nodes that it shares with others."""
        own = listed(tier, now, site)
        if tier is Tier.CLOUD and site and self.share(site) is not Share.NONE:
            return [*own, *listed(tier, now, NO_SITE)]
        return own

    def _foreign(self, tier: Tier, site: str | None, now: float, rules: JobRules | None, first: int = 0) -> list[Node]:
        """A few edge nodes of other sites that a site may use while its own are dead or full.

        Args:
            first: number of the first, so that sites begin with different ones.
        """
        if tier is not Tier.EDGE or not site or self.share(site) is not Share.SITES:
            return []
        known = self._devices.alive(Tier.EDGE, now)
        ends = self._devices.alive(Tier.END, now, site)
        found: list[Node] = []
        for number in range(len(known)):
            device = known[(first + number) % len(known)]
            if device.site != site and self._may_get(device, ends, rules or _DEFAULT, now):
                found.append(self.node(device, (rules or _DEFAULT).release))
                if len(found) == _MOST_FOREIGN:
                    break
        return found

    def _able(
        self,
        devices: Sequence[Device],
        rules: JobRules,
        now: float,
        sender: Device | None = None,
        site: str | None = None,
    ) -> list[Node]:
        more = () if sender is None else (sender,)
        return [
            self.node(device, rules.release)
            for device in devices
            if self._may_get(device, (*more, *self._senders(device, now, site)), rules, now)
        ]

    def _senders(self, target: Device, now: float, site: str | None = None) -> Sequence[Device]:
        """End devices that are alive and may send to a node, as far as sites go, and perhaps others."""
        if site is None and target.site and not self._sharing.lends:
            site = target.site
        return self._devices.alive(Tier.END, now, site)

    def uppers(self, now: float, rules: JobRules | None = None, site: str | None = None) -> list[Node]:
        """The upstream nodes of both tiers that a site may use, edge first; those that are set aside only if there is
        no other. `site` as for `upper`."""
        edges, clouds = self._above(now, rules, site)
        return [*edges, *clouds]

    def foreign_edges(self, site: str, now: float, rules: JobRules | None = None) -> list[Node]:
        """A few edge nodes of other sites that a site may use while its own are dead or full."""
        return self._foreign(Tier.EDGE, site, now, rules, self._first_cloud(site, now))

    def _above(
        self,
        now: float,
        rules: JobRules | None,
        site: str | None,
        *,
        sound: bool = True,
        sender: Device | None = None,
    ) -> tuple[Sequence[Node], Sequence[Node]]:
        """The edge nodes and the clouds.

        Args:
            sound: leave out those that are set aside, if there is another.
            site, sender: as for `upper`.
        """
        edges, clouds = (self.upper(tier, now, rules, site, sender) for tier in (Tier.EDGE, Tier.CLOUD))
        if not sound or all(self._devices.get(node.node_id).listed for node in (*edges[:1], *clouds[:1])):
            return edges, clouds  # one that is alive is not set aside, and suspects are asked only if none is alive
        aside = self._set_aside((*edges, *clouds), now)
        kept = [[node for node in nodes if node.node_id not in aside] for nodes in (edges, clouds)]
        return (kept[0], kept[1]) if any(kept) else (edges, clouds)

    def _set_aside(self, nodes: Sequence[Node], now: float) -> set[str]:
        devices = (self._devices.get(node.node_id) for node in nodes)
        views = (self._devices.view_of(device.node_id, device.incarnation, now) for device in devices)
        return {view.device.node_id for view in views if view is not None and view.set_aside}

    def _reach(self, site: str, now: float, rules: JobRules | None, *, sound: bool, sender: Device | None) -> Reach:
        """The upstream nodes of the devices of a site."""
        if sender is not None:
            return self._reached(site, now, rules, sound=sound, sender=sender)
        key, results = ("reach", site, rules, sound), self._results()
        if (known := results.get(key)) is None:
            known = self._reached(site, now, rules, sound=sound, sender=None)
            # Who is suspect changes without notice.
            if all(self._devices.get(node.node_id).listed for node in (*known.edges[:1], *known.clouds[:1])):
                results[key] = known
        reach: Reach = known
        return reach

    def _reached(self, site: str, now: float, rules: JobRules | None, *, sound: bool, sender: Device | None) -> Reach:
        edges, clouds = self._above(now, rules, site, sound=sound, sender=sender)
        if len(self._devices.sites) < 2:
            return Reach(edges=edges, clouds=clouds)
        own = [node for node in clouds if node.site == site]
        first_cloud = 0 if own and site else self._first_cloud(site, now)
        shared = [node for node in clouds if node.site != site] if own else []
        foreign = self._foreign(Tier.EDGE, site, now, rules, first_cloud)
        return Reach(edges=edges, clouds=own or clouds, reserve=(*shared, *foreign), first_cloud=first_cloud)

    # --- the cloud nodes of no site, shared by the sites ---

    def _surplus(self, site: str, now: float) -> int:
        """End devices of a site for which its own nodes have no place: their tasks go to the shared cloud nodes."""

        def count() -> int:
            if site and (self.share(site) is Share.NONE or self._devices.alive(Tier.CLOUD, now, site)):
                return 0
            ends = len(self._devices.alive(Tier.END, now, site))
            return max(0, ends - len(self._devices.alive(Tier.EDGE, now, site)) * self.n_map(now, site).used)

        return self.in_site(site, "surplus", count)

    def _first_clouds(self, now: float) -> tuple[dict[str, int], int]:
        """Return the surplus of the earlier sites for each site, and the sum of all."""
        firsts, total = {}, 0
        for site in self._devices.sites:
            firsts[site] = total
            total += self._surplus(site, now)
        return firsts, total

    def _first_cloud(self, site: str, now: float) -> int:
        return self.once("first clouds", lambda: self._first_clouds(now))[0].get(site, 0)

    def cloud_nodes(self, site: str, now: float) -> float:
        """A site's share of the cloud nodes of no site, in proportion to what each site cannot do by itself."""
        total = self.once("first clouds", lambda: self._first_clouds(now))[1]
        shared = len(self._devices.alive(Tier.CLOUD, now, NO_SITE))
        return shared * self._surplus(site, now) / total if total else 0.0

    def alive_ends(self, now: float, site: str | None = None, release: int = IN_FORCE) -> list[Node]:
        """End devices that may receive new tasks of a release, of a site or of all."""
        there = self._devices.alive(Tier.END, now, site)
        return [node for device in there if (node := self.held(device, release)) is not None]

    def holders(self, devices: Sequence[Device], release: int) -> Sequence[Device]:
        """The devices among these that hold the networks of a release: all of them, as a rule."""
        if all(self.held(device, release) is not None for device in devices):
            return devices
        return [device for device in devices if self.held(device, release) is not None]

    def all_hold(self, release: int, now: float) -> bool:
        """True if all end devices that may receive tasks hold the networks of a release."""
        ends = self._devices.alive(Tier.END, now)
        return self.once(("all hold", release), lambda: all(self.held(end, release) is not None for end in ends))

    def trusts(self, device: Device) -> bool:
        """True if a device is trusted: by an operator's word, else by the scheduler's own list; never by the node's
        word."""
        if device.intent.trusted is not None:
            return device.intent.trusted
        trusted = self._settings.trusted
        # Names of tiers stand in the same list, and are no ids, even if a node calls itself so.
        return device.tier in trusted or (device.node_id in trusted and device.node_id not in _TIERS)

    def check_trust(self, scheme: Scheme, rules: JobRules, now: float, site: str | None = None) -> None:
        """Check that a job can run without pixels reaching an untrusted node.

        A scheme is refused while a node that it would use can get its images in no form that is allowed, or when no
        node could. Should such a node join later, it is left out of the routes.

        Args:
            site: where the job runs; None: anywhere.

        Raises:
            Forbidden: pixels would go to a node that is not trusted; with what to do about it.
            Conflict: an encoder that the job needs is missing on a device or on an upstream node.
        """
        key = ("trust", scheme, rules, site)
        trouble = self.once(key, lambda: self._distrust(scheme, rules, now, site), now)
        if trouble is not None:
            raise type(trouble)(str(trouble))

    def _distrust(self, scheme: Scheme, rules: JobRules, now: float, site: str | None) -> Conflict | Forbidden | None:
        """The reason why `check_trust` refuses a job."""
        known = [view.device for view in self._devices.present(now)]
        if site is not None:
            share = self.share(site)
            known = [device for device in known if may_reach(site, share, device.site, device.tier)]
        wanted = _UPPER_TIERS[scheme]
        # Also those that have not proven yet what they offer: they may be asked soon.
        networks = self._sets[rules.release]
        targets = [d for d in known if d.tier in wanted and networks.offer_of(d.registration) is not None]
        blind = [
            device
            for device in targets
            if not self.trusts(device) and (rules.privacy is Privacy.NONE or not self._served(device, rules))
        ]
        possible = {tier for tier in wanted if tier in self._settings.trusted}
        if rules.privacy is not Privacy.NONE:
            possible |= self._sets[rules.release].encoded_tiers & set(wanted)
        hopeless = bool(wanted) and not possible and not any(self.trusts(device) for device in targets)
        if blind or hopeless:
            return Forbidden(self._advice(scheme, blind, known))
        several = site is None and len(self._devices.sites) > 1
        for target in targets:
            ends, trouble, can = self._senders(target, now, site), None, False
            for end in (end for end in ends if self._may_send(end, target)):
                try:
                    self._ways(end, target, rules, now)
                    can = True
                except (Conflict, Forbidden) as exc:
                    trouble = trouble or Conflict(f"nothing can go from {end.node_id} to {target.node_id}: {exc}")
            if trouble is not None and not (several and can):
                return trouble  # a job of all sites leaves out those that cannot
            if not ends and rules.privacy in (Privacy.CONV1, Privacy.BOTTLENECK):
                kinds = {encoder.kind for encoder in self._served(target, rules)}
                try:
                    decide_form(
                        rules.privacy, self._trust(target), kinds, lacking=f"{target.node_id} lacks the tail {_HERE}"
                    )
                except (Conflict, Forbidden) as exc:
                    return exc
        return None

    def _advice(self, scheme: Scheme, untrusted: Sequence[Device], known: Sequence[Device]) -> str:
        wanted = _UPPER_TIERS[scheme]
        tiers = [str(tier) for tier in wanted if tier not in self._settings.trusted]
        which = ", ".join(d.node_id for d in untrusted) or f"the {' and '.join(tiers)} tier"
        others = [scheme for scheme in (Scheme.END_EDGE, Scheme.END) if self._is_clean(scheme, known)]
        return (
            f"scheme {scheme} would send pixels to {which}, which this scheduler does not trust: submit with scheme "
            f"{' or '.join(others)}, or, if it may see them, {_trusting(untrusted)}start the scheduler with "
            f"--trusted {','.join([*self._settings.trusted, *([d.node_id for d in untrusted] or tiers)])}"
        )

    def n_map(self, now: float, site: str = NO_SITE) -> MapCount:
        """End devices per edge node of a site: as set, else Eq. 4 over the measured speeds."""
        if self._settings.n_map is not None:
            return MapCount(self._settings.n_map, "set by the operator (--n-map)")
        self._devices.alive(Tier.END, now)
        return self.in_site(site, "n_map", lambda: self._by_formula(now, site))

    def _by_formula(self, now: float, site: str) -> MapCount:
        times = self.times(now, site)
        if times is None or times.edge is None:
            return MapCount(None, f"there is no {'end device' if times is None else 'edge node'} to compute it for")
        value = map_count(times.end, times.edge)
        return MapCount(value, f"ceil({times.edge.total_s:.3f} s / {times.end.total_s:.3f} s), Eq. 4")

    def theta_cloud(self, now: float, site: str = NO_SITE) -> float | None:
        """Eq. 5 for a site as it is; None without end devices."""
        ends = len(self._devices.alive(Tier.END, now, site))
        if not ends:
            return None
        return share_to_cloud(ends, len(self.upper(Tier.EDGE, now, site=site)), self.n_map(now, site).used)

    def times(self, now: float, site: str = NO_SITE) -> FleetTimes | None:
        """Seconds per task of 50 images in a site. A tier has the median of its nodes' measured speeds, so a node that
        was disturbed when it measured does not count."""
        links = self.links()

        def of(tier: Tier) -> TaskTimes | None:
            alive = self._candidates(self._devices.alive, tier, site, now)
            speeds = [self.node(device).ms_per_image for device in alive]
            if not speeds:
                return None
            return TaskTimes(communication_s=links[tier].used_s, processing_s=median(speeds) / 1000 * PAPER_BATCH)

        end = of(Tier.END)
        return None if end is None else FleetTimes(end=end, edge=of(Tier.EDGE), cloud=of(Tier.CLOUD))

    def upstreams(
        self, end: Device, nodes: Sequence[Node], rules: JobRules, now: float, *, content: str
    ) -> list[Upstream]:
        """Return the route entries that are sent to this device: of the nodes to which its images may go, each with
        their form. With `encode_on=auto`, the first of `ways`."""
        return [entries[0] for entries in self.ways(end, nodes, rules, now, content=content)]

    def ways(
        self, end: Device, nodes: Sequence[Node], rules: JobRules, now: float, *, content: str
    ) -> list[list[Upstream]]:
        """The route entries of each node to which images may go from this device: more than one only with
        `encode_on=auto`, and then first the one with which the device encodes. This is the last decision
        before a task is sent.

        Args:
            content: digest of the job's images.
        """
        found: list[list[Upstream]] = []
        for node in nodes:
            target = self._devices.find(node.node_id)
            if target is None or not self._may_send(end, target):
                continue
            try:
                ways = self._ways(end, target, rules, now)
            except (Conflict, Forbidden):
                continue
            present = self.held(target, rules.release)
            if present is not None:
                found.append([self._entry(present, target, way, rules, content) for way in ways])
        return found

    def _entry(self, present: Node, target: Device, way: _Way, rules: JobRules, content: str) -> Upstream:
        encoder, relay = way
        encoding = None
        if encoder is not None:
            encoding = Encoding(
                name=encoder.name,
                head=encoder.head.sha256,
                tail=encoder.tail.sha256,
                form=rules.feature_form,
                noise_key=job_key(self._secret, content) if encoder.noise else "",
            )
        return Upstream(
            node_id=present.node_id,
            url=present.url,
            tier=target.tier,
            model=present.model if encoder is None else encoder.name,
            sha256=present.sha256 if encoder is None else encoder.tail.sha256,
            reading=present.reading if encoder is None else "",
            encoding=encoding,
            relay=relay,
            key=target.registration.key,
        )

    def _ways(self, end: Device, target: Device, rules: JobRules, now: float) -> list[_Way]:
        """The ways of images from an end device to an upstream node: with `encode_on=auto` up to two, and then first
        the one of `encode_on=end`.

        Raises:
            Conflict, Forbidden: see `decide_form`.
        """
        if self._gets_pixels(target, rules):
            return [(None, None)]
        if rules.encode_on is not EncodeOn.AUTO:
            return [self._way(end, target, rules, now)]
        ways: list[_Way] = []
        trouble: Conflict | Forbidden | None = None
        for place in (EncodeOn.END, EncodeOn.EDGE):
            try:
                ways.append(self._way(end, target, replace(rules, encode_on=place), now))
            except (Conflict, Forbidden) as exc:
                trouble = trouble or exc
        if trouble is not None and not ways:
            raise trouble
        # A quicker place must not lead to an encoder that hides less.
        best = preferred([encoder.kind for encoder, _ in ways if encoder is not None])
        return [(encoder, relay) for encoder, relay in ways if encoder is None or encoder.kind is best]

    def _way(self, end: Device, target: Device, rules: JobRules, now: float) -> _Way:
        """The way of images from an end device to an upstream node; `encode_on` is not `auto`.

        Raises:
            Conflict, Forbidden: see `decide_form`.
        """
        on_edge = rules.encode_on is EncodeOn.EDGE
        relays: list[Device] = []
        holders = [end]
        if on_edge:
            holders = relays = [
                device
                for device in self._devices.alive(Tier.EDGE, now, end.site)
                if self.trusts(device)
                and device is not target
                and self._may_send(end, device)
                and self._may_send(device, target)
            ]
        served = self._served(target, rules)
        common = {encoder.kind: encoder for encoder in served if any(_holds(holder, encoder) for holder in holders)}
        encodes = on_edge and target.tier is Tier.EDGE
        lacking = _lacking(rules, end, target, relays, {encoder.kind for encoder in served})
        form = decide_form(rules.privacy, self._trust(target), common, encodes=encodes, lacking=lacking)
        if form is Form.PIXELS:
            return None, None
        encoder = common[EncoderKind(form.value)]
        if not on_edge:
            return encoder, None
        able = [relay for relay in relays if _holds(relay, encoder)]
        # Each device keeps to one of them, and they share the devices.
        relay = able[zlib.crc32(end.node_id.encode()) % len(able)]
        return encoder, Relay(node_id=relay.node_id, url=relay.registration.url, key=relay.registration.key)

    def _may_send(self, sender: Device, receiver: Device) -> bool:
        """True if the rule of the sender's site and its own list let images or features go to the receiver."""
        there = may_reach(sender.site, self.share(sender.site), receiver.site, receiver.tier)
        return there and is_allowed(receiver.registration.url, sender.registration.allowed_upstreams)

    def _served(self, target: Device, rules: JobRules) -> list[EncoderEntry]:
        """Return the encoders of the manifest whose tails a node serves in this version, if the job may use them. Only
        encoders of the network that the node is asked for count."""
        offers = {(offer.name, offer.sha256) for offer in target.registration.models}
        network = self.node(target, rules.release).model
        return [
            encoder
            for encoder in self._sets[rules.release].encoders
            if encoder.network == network
            and (encoder.name, encoder.tail.sha256) in offers
            and (encoder.is_cut or not rules.as_tuned)
        ]

    def _may_get(self, target: Device, ends: Sequence[Device], rules: JobRules, now: float) -> bool:
        if self.held(target, rules.release) is None:
            return False
        if self._gets_pixels(target, rules):
            return not ends or any(self._may_send(end, target) for end in ends)
        for end in (end for end in ends if self._may_send(end, target)):
            try:
                self._ways(end, target, rules, now)
            except (Conflict, Forbidden):
                continue
            return True
        return False

    def _gets_pixels(self, target: Device, rules: JobRules) -> bool:
        """True if it gets them with any encoders; False if those matter."""
        return rules.privacy in (Privacy.AUTO, Privacy.NONE) and self.trusts(target)

    def _trust(self, device: Device) -> Trust:
        return Trust.TRUSTED if self.trusts(device) else Trust.UNTRUSTED

    def node(self, device: Device, release: int = IN_FORCE) -> Node:
        """The node with the network of a release that it would be asked for: on upper tiers a fine one where it holds
        one. Of a node that holds none of it, its first network."""
        found = self.held(device, release)
        return self._node(device, device.registration.models[0], self._sets[IN_FORCE]) if found is None else found

    def held(self, device: Device, release: int) -> Node | None:
        """The same; None if the node holds no network of the release, or one whose answers were wrong."""
        try:
            return device.nodes[release]
        except KeyError:
            networks = self._sets.get(release)
            offer = None if networks is None else networks.offer_of(device.registration, device.barred)
            node = None if networks is None or offer is None else self._node(device, offer, networks)
            device.nodes[release] = node
            return node

    def _node(self, device: Device, offer: ModelOffer, networks: NetworkSet) -> Node:
        return Node(
            node_id=device.node_id,
            tier=device.tier,
            url=device.registration.url,
            model=networks.network_of(offer),
            sha256=offer.sha256,
            reading=offer.reading if _is_twice(offer, device.registration) else "",
            ms_per_image=offer.ms_per_image / device.replicas,
            site=device.site,
            share=self.share(device.site),
            allowed_upstreams=device.registration.allowed_upstreams,
        )

    def _is_clean(self, scheme: Scheme, known: Sequence[Device]) -> bool:
        wanted = _UPPER_TIERS[scheme]
        return all(tier in self._settings.trusted for tier in wanted) and all(
            self.trusts(device) for device in known if device.tier in wanted
        )


def _differs(used: float | None, measured: float) -> bool:
    if used is None:
        return True
    low, high = sorted((used, measured))
    return high > _LINK_CHANGE * low and high - low > _LINK_CHANGE_S


def _is_twice(offer: ModelOffer, registration: Registration) -> bool:
    """True if a node holds two versions of a model with the same weights."""
    version = offer.name, offer.sha256
    return sum((each.name, each.sha256) == version for each in registration.models) > 1


def _trusting(untrusted: Sequence[Device]) -> str:
    return "".join(f"'terrace devices trust {device.node_id} yes', or " for device in untrusted[:1])


def in_words(entry: Upstream) -> str:
    """Return the form in which images go to an upstream node, in words."""
    if entry.encoding is None:
        return f"pixels to {entry.node_id}"
    where = f", encoded by {entry.relay.node_id}" if entry.relay is not None else ""
    kind = entry.encoding.name.rpartition(".")[2]
    return f"{kind} features as {entry.encoding.form} to {entry.node_id}{where}"


def _lacking(rules: JobRules, end: Device, target: Device, relays: Sequence[Device], served: set[EncoderKind]) -> str:
    """A sentence about the nodes that lack their part of the encoders, if no encoder is left."""
    wanted = {kind for kind in EncoderKind if rules.privacy in (Privacy.AUTO, Privacy(kind.value))}
    if wanted.isdisjoint(served):
        return f"{target.node_id} lacks the tail {_HERE}"
    if rules.encode_on is not EncodeOn.EDGE:
        return f"{end.node_id} lacks the head {_HERE}"
    if not relays:
        return f"there is no trusted edge node beside {target.node_id} to encode"
    return f"{' and '.join(relay.node_id for relay in relays)} lacks the head {_HERE}"


def _holds(device: Device, encoder: EncoderEntry) -> bool:
    return any(
        (offer.name, offer.head, offer.tail) == (encoder.name, encoder.head.sha256, encoder.tail.sha256)
        for offer in device.registration.encoders
    )
