"""The route of a device's sources: its place in the mapping, forms, thresholds, version."""

from __future__ import annotations

from functools import cache

import pytest

from models.escalation import Tuning, load_tuning
from models.manifest import Manifest, load_manifest
from scheduler.core.device import Device
from scheduler.core.fleet import Ledger
from scheduler.placement.own_pictures import learning, route_of_sources
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tierkit.errors import NotFound, TerraceError
from tierkit.types import Scheme, Tier
from tierkit.wire.messages import DeviceRoute, EncoderOffer, Heartbeat, ModelOffer, Registration

NOTHING_TUNED = NotFound("nothing was tuned")


@cache
def manifest() -> Manifest:
    return load_manifest()


@cache
def tuning() -> Tuning:
    return load_tuning(None)


class Fleet:
    def __init__(self, *, trusted: tuple[str, ...] = ("end", "edge", "cloud"), scheme: Scheme = Scheme.MAPPING) -> None:
        settings = SchedulerSettings(trusted=trusted, n_map=1)
        self.scheme = scheme
        self.devices = Ledger(settings.detector_times)
        self.placement = Placement(self.devices, settings, manifest(), b"")

    def add(self, node_id: str, *, lease_s: float | None = None, encodes: bool = False, **changes: object) -> None:
        tier = Tier(node_id.partition("-")[0])
        network = manifest().default_for(tier)
        models = [ModelOffer(name=network.name, sha256=network.sha256, ms_per_image=1.0)]
        cut = next(
            each
            for each in manifest().encoders
            if each.is_cut and each.network == manifest().default_for(Tier.CLOUD).name
        )
        heads = (EncoderOffer(name=cut.name, head=cut.head.sha256, tail=cut.tail.sha256),) if encodes else ()
        if encodes and tier is not Tier.END:
            models.append(ModelOffer(name=cut.name, sha256=cut.tail.sha256, ms_per_image=1.0))
        place = Registration(
            node_id=node_id,
            incarnation="the-first",
            tier=tier,
            url=f"http://{node_id}:1",
            models=tuple(models),
            encoders=heads if tier is Tier.END else (),
            version="0",
            spool="5" * 16 if tier is Tier.END else "",
            lease_s=lease_s,
            key=f"key-of-{node_id}",
        )
        self.devices.register(place.model_copy(update=changes), 0.0)

    def route(self, node_id: str, tuned: Tuning | TerraceError | None = None) -> DeviceRoute:
        device: Device = self.devices.get(node_id)
        return route_of_sources(
            self.placement, device, scheme=self.scheme, release=0, tuning=tuned or tuning(), now=0.1
        )


def names(route: DeviceRoute) -> list[str]:
    return [upstream.node_id for upstream in route.upstreams]


@pytest.mark.parametrize("lease_s", [None, 600.0])
def test_a_route_is_the_place_in_the_mapping_with_the_thresholds_of_jobs(lease_s: float | None) -> None:
    fleet = Fleet()
    for node_id in ("edge-0", "edge-1", "cloud-0"):
        fleet.add(node_id)
    for number in range(3):
        fleet.add(f"end-{number}", lease_s=lease_s)
    route = fleet.route("end-0")
    assert names(route) == ["edge-0", "edge-1", "cloud-0"]
    assert [(stage.tier, stage.spare) for stage in route.stages] == [(Tier.EDGE, True), (Tier.CLOUD, True)]
    assert all(stage.below is not None for stage in route.stages)
    assert all(
        upstream.encoding is None and upstream.key == f"key-of-{upstream.node_id}" for upstream in route.upstreams
    )
    if lease_s is None:
        # Nodes that take tasks share the edge nodes.
        assert names(fleet.route("end-1"))[0] == "edge-1"


def test_only_features_go_to_a_node_that_is_not_trusted() -> None:
    fleet = Fleet(trusted=("end", "edge"))
    fleet.add("cloud-0", encodes=True)
    fleet.add("end-0", lease_s=600.0, encodes=True)
    fleet.add("end-1", lease_s=600.0)
    fleet.add("end-2")  # takes tasks, and cannot encode
    (upstream,) = fleet.route("end-0").upstreams
    assert upstream.encoding is not None
    assert bool(upstream.encoding.noise_key) == bool(manifest().encoder(upstream.encoding.name).noise)
    for node_id in ("end-1", "end-2"):
        assert names(fleet.route(node_id)) == []


@pytest.mark.parametrize(
    ("scheme", "tuned", "upstreams", "stages", "reason"),
    [
        (Scheme.ADAPTIVE, True, ["edge-0", "cloud-0"], ["edge", "cloud"], "place 1 of 1"),
        (Scheme.MAPPING, False, ["edge-0", "cloud-0"], [], "no thresholds: nothing was tuned"),
        (Scheme.END_CLOUD, True, ["cloud-0"], ["cloud"], "scheme end-cloud"),
        (Scheme.END, True, [], [], "scheme end: coarse answers only"),
        (Scheme.END, False, [], [], "scheme end: coarse answers only"),
    ],
)
def test_schemes(scheme: Scheme, tuned: bool, upstreams: list[str], stages: list[str], reason: str) -> None:
    fleet = Fleet(scheme=scheme)
    for node_id in ("edge-0", "cloud-0", "end-0"):
        fleet.add(node_id)
    route = fleet.route("end-0", None if tuned else NOTHING_TUNED)
    assert (names(route), [stage.tier for stage in route.stages]) == (upstreams, stages)
    assert reason in route.reason


def test_networks_for_two_tiers_send_pictures_from_one_to_the_other() -> None:
    """Without a network for the edge tier, `mapping` has no thresholds."""
    fleet = Fleet()
    fleet.add("cloud-0")
    fleet.add("end-0")
    gates = tuple(gate for gate in tuning().gates if (gate.lower.tier, gate.upper.tier) == (Tier.END, Tier.CLOUD))
    assert len(gates) == 1
    of_two = Tuning.model_validate({**tuning().model_dump(exclude={"gates"}), "gates": gates})
    route = fleet.route("end-0", of_two)
    assert names(route) == ["cloud-0"]
    assert [stage.tier for stage in route.stages] == [Tier.CLOUD]
    assert route.stages[0].below is not None
    assert "no thresholds" not in route.reason


def test_thresholds_are_those_of_the_network_that_answers() -> None:
    fleet = Fleet()
    fleet.add("cloud-0")
    other = (ModelOffer(name="another", sha256="f" * 64, ms_per_image=1.0),)
    fleet.add("end-0", models=other)
    route = fleet.route("end-0")
    assert (names(route), route.stages) == (["cloud-0"], ())
    assert "no thresholds for the network of end-0" in route.reason


def test_only_end_devices_have_routes() -> None:
    fleet = Fleet()
    fleet.add("edge-0")
    fleet.add("cloud-0")
    assert names(fleet.route("edge-0")) == []


def test_the_version_changes_with_the_content_and_with_nothing_else() -> None:
    fleet = Fleet()
    for node_id in ("edge-0", "cloud-0"):
        fleet.add(node_id)
    fleet.add("end-5", lease_s=600.0)
    first = fleet.route("end-5")
    assert fleet.route("end-5") is first, "computed once"
    fleet.devices.heartbeat(
        "end-5", Heartbeat(incarnation="the-first", in_flight=0, queued_images=0, images_done=9), 0.1
    )
    assert fleet.route("end-5") is first
    fleet.add("end-7")  # behind it in the list
    again = fleet.route("end-5")
    assert (again is first, again.version) == (False, first.version)
    fleet.add("edge-0", key="another-key")
    changed = fleet.route("end-5")
    assert changed.version != first.version
    fleet.devices.leave("cloud-0", "the-first", 0.1)
    assert fleet.route("end-5").version not in (first.version, changed.version)


def test_a_route_says_whether_the_fleet_learns_and_its_version_changes_with_that() -> None:
    fleet = Fleet()
    fleet.add("edge-0")
    fleet.add("end-0", lease_s=600.0)
    before = fleet.route("end-0")
    after = learning(before)
    assert (before.learn, after.learn) == (False, True)
    assert before.version != after.version
    assert learning(after).version == after.version
    assert after.model_copy(update={"learn": False, "version": before.version}) == before
