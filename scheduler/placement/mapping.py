"""The mapping: the upstream nodes that serve an end device, with the paper's formulas. Pure functions.

The schemes are from section 3.4 of the paper; see `docs/explanation/scheduling.md`. Adaptive has no fixed routes:
`scheduler.placement.adaptive` chooses for each task. If a route is needed all the same (by a second attempt while the
first is slow), it is every upstream node, the edge first.

The equations have the paper's numbers. Times are seconds per task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from msgspec import Struct

from scheduler.core.device import Node
from tierkit.types import Scheme, Tier

__all__ = [
    "FleetTimes",
    "Route",
    "TaskTimes",
    "map_count",
    "route_of",
    "share_to_cloud",
    "time_end",
    "time_end_cloud",
    "time_end_edge",
    "time_mapping",
]


_MOST_ASKED = 8
"""Nodes of a tier on one route: the list goes over the wire with each task, and a device that has asked this many
without an answer will not get one."""


class TaskTimes(Struct, frozen=True, kw_only=True):
    """Seconds that one task costs on a tier: t^c to get there and back, t^p to be computed."""

    communication_s: float
    processing_s: float

    @property
    def total_s(self) -> float:
        return self.communication_s + self.processing_s


class FleetTimes(Struct, frozen=True, kw_only=True):
    """Task times per tier; None for a tier that has no node."""

    end: TaskTimes
    edge: TaskTimes | None = None
    cloud: TaskTimes | None = None


class Reach(Struct, frozen=True, kw_only=True):
    """The upstream nodes that the devices of a site may ask, each list in the order of the device list."""

    edges: Sequence[Node]
    clouds: Sequence[Node]
    """Its own, else those that the sites share."""
    reserve: Sequence[Node] = ()
    """A few that are asked after these: shared clouds if it has its own, and edge nodes of other sites."""
    first_cloud: int = 0
    """The number in `clouds` of the first that one of its devices goes to; devices of other sites take those before."""


class Route(Struct, frozen=True, kw_only=True):
    """Upstream nodes of one end device."""

    end: str
    upstreams: tuple[Node, ...]
    """Upstream nodes in the order in which the end device tries them; empty if only the coarse answer is wanted."""
    in_turn: int
    """Number of `upstreams`, from the first, that share the load: task k starts at number k modulo this. With 1, every
    task starts at the first, and the others are asked if it fails."""
    reason: str

    def for_task(self, turn: int) -> tuple[Node, ...]:
        """The upstreams of the `turn`-th task on this route, first choice first; of those in turn the first few."""
        if self.in_turn < 2:
            return self.upstreams
        in_turn = _circle(self.upstreams[: self.in_turn], turn % self.in_turn)
        return tuple(islice(chain(in_turn, self.upstreams[self.in_turn :]), _MOST_ASKED))


def time_end(tasks: int, n_end: int, end: TaskTimes) -> float:
    """Eq. 1: T_End = N_t / N_end * (t^c_end + t^p_end)."""
    return tasks / n_end * end.total_s


def time_end_cloud(tasks: int, n_end: int, n_cloud: float, end: TaskTimes, cloud: TaskTimes) -> float:
    """Eq. 2: T_End-Cloud = T_End + N_t / N_cloud * (t^c_cloud + t^p_cloud)."""
    return time_end(tasks, n_end, end) + tasks / n_cloud * cloud.total_s


def time_end_edge(tasks: int, n_end: int, n_edge: int, end: TaskTimes, edge: TaskTimes) -> float:
    """Eq. 3: T_End-Edge = T_End + N_t / N_edge * (t^c_edge + t^p_edge)."""
    return time_end(tasks, n_end, end) + tasks / n_edge * edge.total_s


def map_count(end: TaskTimes, edge: TaskTimes) -> int:
    """Eq. 4: N_map = ceil((t^c_edge + t^p_edge) / (t^c_end + t^p_end)) end devices per edge node, at least 1.

    While one edge node works on a task, N_map end devices prepare at least one more for it. With end devices that cost
    no time at all the ratio has no value; 1 is returned.
    """
    if end.total_s <= 0:
        return 1
    # Without the small step, 0.3 / 0.1 = 2.9999999999999996 or 3.0000000000000004 would decide about a whole device.
    return max(1, math.ceil(edge.total_s / end.total_s - 1e-9))


def share_to_cloud(n_end: int, n_edge: int, n_map: int) -> float:
    """Eq. 5: theta_cloud = (N_end - N_edge * N_map) / N_end, the share of tasks that goes to the cloud.

    The equation is below 0 if the edge nodes take more end devices than there are; 0 is returned then.
    """
    return max(0.0, (n_end - n_edge * n_map) / n_end)


def time_mapping(theta_cloud: float, end_cloud_s: float, end_edge_s: float) -> float:
    """Eq. 6: T_Mapping = theta_cloud * T_End-Cloud + (1 - theta_cloud) * T_End-Edge."""
    return theta_cloud * end_cloud_s + (1.0 - theta_cloud) * end_edge_s


def route_of(scheme: Scheme, *, end: Node, position: int, reach: Reach, n_map: int) -> Route:
    """Return the route of one end device.

    Args:
        end: the device; nodes that it may not ask are left out of its route, and keep their place in the others'.
        position: position of the end device on the device list of its site, from 0.
        reach: upstream nodes that may get the images.
        n_map: end devices per edge node, from `map_count` or set by the operator; at least 1.

    Mapping gives the first `N_edge * N_map` end devices to the edge nodes in turn. So with fewer end devices than
    places, no edge node idles while another one serves two. For `N_map = 1` this is the paper's evaluation: the first
    four end devices to the four edge nodes, the others to the cloud.
    """
    if n_map < 1:
        raise ValueError(f"n_map must be at least 1, not {n_map}")
    if scheme is Scheme.MAPPING:
        return _map(end, position, reach, n_map)
    if scheme is Scheme.END:
        return Route(end=end.node_id, upstreams=(), in_turn=0, reason="scheme end: coarse answers only")
    edges, clouds, reserve = reach.edges, reach.clouds, reach.reserve
    if scheme is Scheme.ADAPTIVE:
        every = (*_from(end, edges, 0), *_from(end, clouds, 0), *_from(end, reserve, 0))
        reason = "scheme adaptive: chosen for each task" if every else _nobody(end)
        return _route(end, every, min(1, len(every)), reason, (*edges, *clouds))
    tier = Tier.EDGE if scheme is Scheme.END_EDGE else Tier.CLOUD
    upper = edges if tier is Tier.EDGE else clouds
    further = [node for node in reserve if node.tier is tier]
    if not upper:
        upper, further = further, []
    reason = f"scheme {scheme}: {_count(upper, tier)}"
    reason += " in sequential order" if len(upper) > 1 else "" if upper else _where(end)
    may_ask = tuple(node for node in upper if end.may_ask(node))
    return _route(end, (*may_ask, *_from(end, further, 0)), len(may_ask), reason, upper)


def _map(end: Node, position: int, reach: Reach, n_map: int) -> Route:
    edges, clouds = reach.edges, reach.clouds
    places = len(edges) * n_map
    if position < places:
        own, others, spare = edges, position % len(edges), clouds
        reason = f"place {position + 1} of {places} on {_count(edges, 'edge')} (N_map = {n_map})"
    elif clouds:
        own, others, spare = clouds, (reach.first_cloud + position - places) % len(clouds), edges
        reason = f"all {places} places on {_count(edges, 'edge')} are taken (N_map = {n_map}): the rest go to the cloud"
        if not edges:
            reason = f"no edge node{_where(end)}: the cloud serves all"
    elif edges:
        own, others, spare = edges, position % len(edges), clouds
        reason = f"all {places} places are taken (N_map = {n_map}) and there is no cloud: shared among the edge nodes"
        if reach.reserve:
            own, others, spare = reach.reserve, 0, edges
            reason = f"all {places} places are taken (N_map = {n_map}) and there is no cloud: edge nodes of other sites"
    elif reach.reserve:
        own, others, spare = reach.reserve, 0, ()
        reason = f"no upstream node{_where(end)}: edge nodes of other sites"
    else:
        own, others, spare = (), 0, ()
        reason = _nobody(end)
    in_reserve = position % len(spare) if len(spare) > _MOST_ASKED else 0
    upstreams = (*_from(end, own, others), *_from(end, spare, in_reserve))
    if own is not reach.reserve:
        upstreams = (*upstreams, *_from(end, reach.reserve, 0))
    return _route(end, upstreams, min(1, len(upstreams)), reason, (*edges, *clouds))


def _nobody(end: Node) -> str:
    if not end.site:
        return "no upstream node on the device list that may be asked: the coarse answer stands"
    return f"no upstream node that the site {end.site} may ask (share = {end.share}): the coarse answer stands"


def _where(end: Node) -> str:
    return f" in the site {end.site}" if end.site else " on the device list"


def _route(end: Node, upstreams: tuple[Node, ...], in_turn: int, reason: str, known: Sequence[Node]) -> Route:
    """A route, whose reason says where the device's own list has changed it."""
    forbidden = [node.node_id for node in known if not end.may_ask(node)] if end.allowed_upstreams else []
    if forbidden:
        others = f" and {len(forbidden) - 1} more" if len(forbidden) > 1 else ""
        reason += f"; --allowed-upstreams of {end.node_id} leaves out {forbidden[0]}{others}"
        if not upstreams:
            reason += ", so the coarse answer stands"
    return Route(end=end.node_id, upstreams=upstreams, in_turn=in_turn, reason=reason)


def _from(end: Node, nodes: Sequence[Node], first: int) -> tuple[Node, ...]:
    """The first few nodes in a circle that the device may ask."""
    return tuple(islice((node for node in _circle(nodes, first) if end.may_ask(node)), _MOST_ASKED))


def _circle(nodes: Sequence[Node], first: int) -> Iterator[Node]:
    return chain(islice(nodes, first, None), islice(nodes, first))


def _count(nodes: Sequence[Node], tier: str) -> str:
    return f"{len(nodes) or 'no'} {tier} node{'' if len(nodes) == 1 else 's'}"
