"""The route for the pictures of a device's sources: its place in the mapping, which the device keeps."""

from __future__ import annotations

import hashlib
import zlib

from models.escalation import Tuning
from scheduler.core.device import Device
from scheduler.core.escalation import JobGate, choose_gates, stages_of, upstreams_of
from scheduler.core.policy import JobRules
from scheduler.placement.routes import Placement
from tierkit.errors import InvalidInput, TerraceError
from tierkit.types import Escalate, Scheme, Tier
from tierkit.wire.messages import DeviceRoute

__all__ = ["learning", "route_of_sources"]

_NO_VERSION = "0" * 16


def route_of_sources(
    placement: Placement, device: Device, *, scheme: Scheme, tuning: Tuning | TerraceError, release: int, now: float
) -> DeviceRoute:
    """The route of a device's sources, computed once for each state of the device list.

    It is the route of a job with `escalate=threshold` and `escalate_from=end`.

    Args:
        scheme: of the scheduler; `mapping` replaces `adaptive`, which decides for each task.
        tuning: the tuned thresholds, or why there are none.
        release: with whose networks the device answers them.
    """

    def computed() -> DeviceRoute:
        return _computed(placement, device, scheme, tuning, release, now)

    return placement.once(("sources", device.node_id, release), computed, now)


def learning(route: DeviceRoute) -> DeviceRoute:
    """The same route for a device that may keep pictures to learn from."""
    return _versioned(route.model_copy(update={"learn": True, "version": _NO_VERSION}))


def _computed(
    placement: Placement, device: Device, scheme: Scheme, tuning: Tuning | TerraceError, release: int, now: float
) -> DeviceRoute:
    if device.tier is not Tier.END:
        return _versioned(DeviceRoute(version=_NO_VERSION, upstreams=(), reason="only end devices have sources"))
    scheme = Scheme.MAPPING if scheme is Scheme.ADAPTIVE else scheme
    sha256, why = placement.node(device, release).sha256, ""
    scheme, gates, error = _gates(scheme, tuning)
    if error is not None and scheme is not Scheme.END:
        why = f"no thresholds: {tuning if isinstance(tuning, TerraceError) else error}"
    if gates and gates[0].lower_sha256 != sha256:
        gates, why = (), f"no thresholds for the network of {device.node_id}"
    # Thresholds were tuned on the answers of the network itself.
    rules = JobRules(as_tuned=bool(gates), release=release)
    route = placement.route(scheme, device.node_id, now, rules)
    # Devices that share several nodes begin with different ones.
    turn = zlib.crc32(device.node_id.encode())
    nodes = upstreams_of(gates, route.upstreams, turn) if gates else route.for_task(turn)
    content = f"sources of {device.node_id}"
    made = DeviceRoute(
        version=_NO_VERSION,
        upstreams=tuple(placement.upstreams(device, nodes, rules, now, content=content)),
        stages=stages_of(gates, Escalate.THRESHOLD, sha256),
        reason="; ".join(filter(None, (route.reason, why))),
    )
    return _versioned(made)


def _gates(scheme: Scheme, tuning: Tuning | TerraceError) -> tuple[Scheme, tuple[JobGate, ...], InvalidInput | None]:
    """The gates of a scheme. Networks for two tiers have no thresholds for `mapping`, but for one of its parts, which
    then takes its place."""
    first: InvalidInput | None = None
    for each in (scheme, Scheme.END_CLOUD, Scheme.END_EDGE) if scheme is Scheme.MAPPING else (scheme,):
        try:
            return each, choose_gates(Escalate.THRESHOLD, each, tuning, lowest="end", accuracy=None, budget=None), None
        except InvalidInput as error:
            first = first or error
    return scheme, (), first


def _versioned(route: DeviceRoute) -> DeviceRoute:
    return route.model_copy(update={"version": hashlib.sha256(route.model_dump_json().encode()).hexdigest()[:16]})
