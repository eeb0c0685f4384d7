"""The device list as the mapping sees it: what is remembered must be that of the fleet as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from models.manifest import Manifest, load_manifest
from scheduler.core.fleet import Ledger
from scheduler.core.policy import JobRules
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tierkit.errors import OtherNetworks
from tierkit.types import EncodeOn, Privacy, Scheme, Tier
from tierkit.wire.messages import EncoderOffer, Heartbeat, ModelOffer, Registration


@cache
def manifest() -> Manifest:
    return load_manifest()


def the_clouds_encoder() -> tuple[EncoderOffer, ModelOffer]:
    """What a device holds of it, and what the cloud serves."""
    network = manifest().default_for(Tier.CLOUD).name
    encoder = next(one for one in manifest().encoders if one.network == network)
    head = EncoderOffer(name=encoder.name, head=encoder.head.sha256, tail=encoder.tail.sha256)
    return head, ModelOffer(name=encoder.name, sha256=encoder.tail.sha256, ms_per_image=7.36)


class World:
    """A device list, and the fleet of it."""

    def __init__(self, *, trusted: tuple[str, ...] = ("end", "edge", "cloud"), edge_link_s: float | None = 0.5) -> None:
        settings = SchedulerSettings(trusted=trusted, edge_link_s=edge_link_s)
        self.devices = Ledger(settings.detector_times)
        self.fleet = Placement(self.devices, settings, manifest(), b"")

    def add(
        self,
        node_id: str,
        ms_per_image: float,
        *,
        port: int = 1,
        incarnation: str = "the-first",
        heads: Sequence[EncoderOffer] = (),
        tails: Sequence[ModelOffer] = (),
        allowed: tuple[str, ...] = (),
    ) -> None:
        tier = Tier(node_id.partition("-")[0])
        network = manifest().default_for(tier)
        offer = ModelOffer(name=network.name, sha256=network.sha256, ms_per_image=ms_per_image)
        self.devices.register(
            Registration(
                node_id=node_id,
                incarnation=incarnation,
                tier=tier,
                url=f"http://127.0.0.1:{port}",
                models=(offer, *tails),
                encoders=tuple(heads),
                version="0",
                allowed_upstreams=allowed,
            ),
            0.0,
        )


def test_only_networks_of_the_manifest_are_taken():
    fleet, entry, (_, tail) = World().fleet, manifest().default_for(Tier.CLOUD), the_clouds_encoder()
    whole = ModelOffer(name=entry.name, sha256=entry.sha256, ms_per_image=1.0, reading=entry.reading)

    def claim(*models: ModelOffer) -> Registration:
        url = "http://127.0.0.1:1"
        return Registration(
            node_id="cloud-1", incarnation="the-first", tier=Tier.CLOUD, url=url, models=models, version="0"
        )

    for good in ((whole,), (whole, tail), (tail,), (whole.model_copy(update={"reading": ""}),)):
        fleet.check_networks(claim(*good))
    squashed = entry.model_copy(update={"resize": "pad"})
    assert squashed.reading != entry.reading
    wrong = ({"sha256": "0" * 64}, {"name": "another"}, {"reading": squashed.reading}, {"sha256": tail.sha256[::-1]})
    for change in wrong:
        with pytest.raises(OtherNetworks, match=r"cloud-1"):
            fleet.check_networks(claim(tail, whole.model_copy(update=change)))


def test_one_node_that_measured_its_speed_wrongly_does_not_decide_n_map():
    world = World()
    for number in range(1, 9):
        world.add(f"end-{number}", 7.41 if number > 1 else 90.0)
    for number in range(1, 5):
        world.add(f"edge-{number}", 5.99)
    # With the mean, end devices would seem to take 0.89 s for a task, and N_map would be 1.
    assert world.fleet.n_map(0.0).value == 3
    assert [route.upstreams[0].tier for route in world.fleet.routes(Scheme.MAPPING, 0.0).values()] == [Tier.EDGE] * 8


def test_n_map_follows_the_measured_links_unless_they_are_set():
    world = World(edge_link_s=None)
    world.add("end-1", 10.0)
    world.add("edge-1", 10.0)
    assert world.fleet.n_map(0.0).value == 1
    world.fleet.measured({Tier.EDGE: 0.9})
    assert world.fleet.n_map(0.0).value == 3, "ceil((0.9 + 0.5) / 0.5)"
    # A little less is nothing new, and what takes part of a millisecond does not matter.
    world.fleet.measured({Tier.EDGE: 0.8, Tier.END: 0.0002})
    assert world.fleet.n_map(0.0).value == 3
    assert world.fleet.links()[Tier.EDGE].used_s == 0.9
    world.fleet.measured({Tier.EDGE: 0.4})
    assert world.fleet.n_map(0.0).value == 2
    told = World(edge_link_s=0.0)
    told.add("end-1", 10.0)
    told.add("edge-1", 10.0)
    told.fleet.measured({Tier.EDGE: 0.9})
    assert told.fleet.n_map(0.0).value == 1
    assert (told.fleet.links()[Tier.EDGE].measured_s, told.fleet.links()[Tier.EDGE].used_s) == (0.9, 0.0)


def test_n_map_follows_the_fleet():
    world = World()
    world.add("end-1", 7.41)
    assert world.fleet.n_map(0.0).value is None
    world.add("edge-1", 5.99)
    assert world.fleet.n_map(0.0).value == 3
    world.devices.forget("edge-1")
    assert world.fleet.n_map(0.0).value is None


def test_a_node_that_came_back_elsewhere_is_asked_there():
    world = World()
    world.add("end-1", 7.41)
    world.add("edge-1", 5.99)
    assert [node.url for node in world.fleet.upper(Tier.EDGE, 0.0)] == ["http://127.0.0.1:1"]
    world.devices.forget("edge-1")
    assert world.fleet.upper(Tier.EDGE, 0.0) == []
    world.add("edge-1", 2.0, port=2, incarnation="the-second")
    (node,) = world.fleet.upper(Tier.EDGE, 0.0)
    assert (node.url, node.ms_per_image) == ("http://127.0.0.1:2", 2.0)
    end = world.devices.get("end-1")
    assert [entry.url for entry in world.fleet.upstreams(end, [node], JobRules(), 0.0, content="")] == [
        "http://127.0.0.1:2"
    ]


def test_what_is_remembered_of_an_upper_node_counts_as_long_as_it_is_on_the_list():
    world = World()
    world.add("end-1", 7.41)
    world.add("edge-1", 5.99)
    world.add("cloud-1", 7.36)
    end = world.devices.get("end-1")
    for _ in range(2):
        nodes = world.fleet.route(Scheme.MAPPING, "end-1", 0.0).upstreams
        assert [node.node_id for node in nodes] == ["edge-1", "cloud-1"]
        assert [node.node_id for node in world.fleet.upstreams(end, nodes, JobRules(), 0.0, content="")] == [
            "edge-1",
            "cloud-1",
        ]
    world.devices.forget("edge-1")
    assert [node.node_id for node in world.fleet.upstreams(end, nodes, JobRules(), 0.0, content="")] == ["cloud-1"]
    assert [node.node_id for node in world.fleet.route(Scheme.MAPPING, "end-1", 0.0).upstreams] == ["cloud-1"]


def test_an_untrusted_node_is_an_upper_node_while_somebody_can_encode_for_it():
    world = World(trusted=("end", "edge"))
    world.add("end-1", 7.41)
    head, tail = the_clouds_encoder()
    world.add("cloud-1", 7.36, tails=[tail])
    assert world.fleet.upper(Tier.CLOUD, 0.0) == []
    world.add("end-2", 7.41, heads=[head])
    assert [node.node_id for node in world.fleet.upper(Tier.CLOUD, 0.0)] == ["cloud-1"]
    nodes = world.fleet.upper(Tier.CLOUD, 0.0)
    assert world.fleet.upstreams(world.devices.get("end-1"), nodes, JobRules(), 0.0, content="") == []
    (entry,) = world.fleet.upstreams(world.devices.get("end-2"), nodes, JobRules(), 0.0, content="")
    assert entry.encoding is not None
    assert world.fleet.upper(Tier.CLOUD, 0.0, JobRules(privacy=Privacy.NONE)) == []
    world.devices.forget("end-2")
    assert world.fleet.upper(Tier.CLOUD, 0.0) == []


def test_images_go_where_the_devices_own_list_lets_them():
    world = World()
    world.add("edge-1", 5.99, port=1)
    world.add("edge-2", 5.99, port=2)
    world.add("cloud-1", 7.36, port=3)
    world.add("end-1", 7.41, port=4, allowed=("http://127.0.0.1:2",))
    end, fleet = world.devices.get("end-1"), world.fleet
    # The only end device may ask edge-2 alone, so the others are no upstream nodes of any job.
    assert [node.node_id for node in fleet.uppers(0.0)] == ["edge-2"]
    world.add("end-2", 7.41, port=5)
    assert [node.node_id for node in fleet.uppers(0.0)] == ["edge-1", "edge-2", "cloud-1"]
    for scheme in (Scheme.MAPPING, Scheme.END_EDGE, Scheme.ADAPTIVE):
        assert [node.node_id for node in fleet.route(scheme, "end-1", 0.0).upstreams] == ["edge-2"]
        assert len(fleet.route(scheme, "end-2", 0.0).upstreams) > 1
    every = fleet.upstreams(end, fleet.uppers(0.0), JobRules(), 0.0, content="")
    assert [entry.node_id for entry in every] == ["edge-2"]
    assert [fleet.is_cut_off(scheme, end, 0.0) for scheme in (Scheme.END_CLOUD, Scheme.MAPPING)] == [True, False]


def test_an_edge_node_encodes_only_for_clouds_of_its_own_list():
    world = World(trusted=("end", "edge"))
    head, tail = the_clouds_encoder()
    rules = JobRules(encode_on=EncodeOn.EDGE)
    world.add("cloud-1", 7.36, port=1, tails=[tail])
    world.add("end-1", 7.41, port=2)
    world.add("edge-1", 5.99, port=3, heads=[head], allowed=("http://elsewhere",))
    assert world.fleet.upper(Tier.CLOUD, 0.0, rules) == []
    world.add("edge-2", 5.99, port=4, heads=[head])
    (cloud,) = world.fleet.upper(Tier.CLOUD, 0.0, rules)
    (entry,) = world.fleet.upstreams(world.devices.get("end-1"), [cloud], rules, 0.0, content="")
    assert entry.relay is not None
    assert entry.relay.node_id == "edge-2"


def encoders_of(*kinds: str, tier: Tier = Tier.CLOUD) -> tuple[list[EncoderOffer], list[ModelOffer]]:
    """What a device holds of a tier's encoders of these kinds, and what that tier serves."""
    network = manifest().default_for(tier).name
    found = [one for one in manifest().encoders if one.network == network and one.kind in kinds]
    heads = [EncoderOffer(name=one.name, head=one.head.sha256, tail=one.tail.sha256) for one in found]
    return heads, [ModelOffer(name=one.name, sha256=one.tail.sha256, ms_per_image=7.36) for one in found]


@pytest.mark.parametrize(
    ("on_end", "on_edge", "tails", "ways"),
    [
        (["conv1"], ["conv1"], ["conv1"], [("conv1", None), ("conv1", "edge-1")]),
        (["conv1"], [], ["conv1"], [("conv1", None)]),
        ([], ["conv1"], ["conv1"], [("conv1", "edge-1")]),
        ([], [], ["conv1"], []),
        (["conv1", "bottleneck"], ["conv1"], ["conv1", "bottleneck"], [("bottleneck", None)]),
        (["conv1"], ["conv1", "bottleneck"], ["conv1", "bottleneck"], [("bottleneck", "edge-1")]),
        (["conv1", "bottleneck"], ["conv1", "bottleneck"], ["conv1"], [("conv1", None), ("conv1", "edge-1")]),
    ],
)
def test_auto_offers_the_ways_of_end_and_edge_with_the_encoder_that_hides_the_most(
    on_end: list[str], on_edge: list[str], tails: list[str], ways: list[tuple[str, str | None]]
):
    world = World(trusted=("end", "edge"))
    world.add("cloud-1", 7.36, port=1, tails=encoders_of(*tails)[1])
    world.add("end-1", 7.41, port=2, heads=encoders_of(*on_end)[0])
    world.add("edge-1", 5.99, port=3, heads=encoders_of(*on_edge)[0])
    end, cloud = world.devices.get("end-1"), world.fleet.node(world.devices.get("cloud-1"))
    rules = JobRules(encode_on=EncodeOn.AUTO)
    found = world.fleet.ways(end, [cloud], rules, 0.0, content="")
    shown = [
        (entry.encoding and entry.encoding.name.rpartition(".")[2], entry.relay and entry.relay.node_id)
        for entries in found
        for entry in entries
    ]
    assert shown == ways
    assert len(found) == bool(ways)
    first = world.fleet.upstreams(end, [cloud], rules, 0.0, content="")
    assert first == [entries[0] for entries in found]


@pytest.mark.parametrize("privacy", list(Privacy))
@pytest.mark.parametrize("trusted", [("end",), ("end", "edge"), ("end", "edge", "cloud"), ("end", "cloud")])
def test_with_auto_no_untrusted_node_gets_pixels(privacy: Privacy, trusted: tuple[str, ...]):
    world = World(trusted=trusted)
    for node_id in ("end-1", "edge-1", "edge-2", "cloud-1"):
        heads, tails = encoders_of("conv1", "bottleneck")
        edge_heads, edge_tails = encoders_of("conv1", "bottleneck", tier=Tier.EDGE)
        if node_id == "cloud-1":
            world.add(node_id, 5.0, port=1, tails=tails)
        else:
            world.add(node_id, 5.0, port=2, heads=[*heads, *edge_heads], tails=edge_tails)
    end = world.devices.get("end-1")
    nodes = [world.fleet.node(world.devices.get(name)) for name in ("edge-1", "edge-2", "cloud-1")]
    rules = {place: JobRules(privacy=privacy, encode_on=place) for place in EncodeOn}
    found = {place: world.fleet.ways(end, nodes, rules[place], 0.0, content="") for place in EncodeOn}
    every = [entry for entries in found[EncodeOn.AUTO] for entry in entries]
    for entry in every:
        if entry.encoding is None:
            assert world.fleet.trusts(world.devices.get(entry.node_id))
        if entry.relay is not None:
            assert world.fleet.trusts(world.devices.get(entry.relay.node_id))
    if privacy is Privacy.CONV1 and "edge" in trusted:
        forms = [entry.encoding is None for entry in every if entry.node_id == "edge-1"]
        assert forms == [False, True]  # features, or pixels from which it answers
    # Nothing goes a way that neither of the two fixed places takes.
    fixed = [entry for place in (EncodeOn.END, EncodeOn.EDGE) for entries in found[place] for entry in entries]
    assert all(entry in fixed for entry in every)
    assert {entry.node_id for entry in every} == {entry.node_id for entry in fixed}


@pytest.mark.parametrize(
    ("tier", "node_id", "trusted"),
    [
        (Tier.EDGE, "edge-1", True),
        (Tier.CLOUD, "cloud-0", True),
        (Tier.CLOUD, "cloud-1", False),
        (Tier.CLOUD, "edge-1", False),
        (Tier.CLOUD, "end", False),
        (Tier.CLOUD, "edge", False),
        (Tier.CLOUD, "cloud", False),
    ],
)
def test_a_node_is_not_trusted_for_what_it_calls_itself(tier: Tier, node_id: str, trusted: bool):
    settings = SchedulerSettings(trusted=("end", "edge", "cloud-0"))
    devices = Ledger(settings.detector_times)
    offer = ModelOffer(name="small", sha256="0" * 64, ms_per_image=1.0)
    said = {"tier": tier, "incarnation": "first-one", "url": "http://127.0.0.1:1", "models": (offer,), "version": "0"}
    honest = Registration.model_validate({**said, "node_id": "honest"})
    # Past the check of a registration, which refuses the names of tiers.
    devices.register(honest.model_copy(update={"node_id": node_id}), 0.0)
    fleet = Placement(devices, settings, manifest(), bytes(32))
    assert fleet.trusts(devices.get(node_id)) is trusted


def test_replicas_of_a_node_make_it_faster():
    world = World()
    world.add("end-1", 2.0)
    world.add("cloud-1", 8.0)
    device = world.devices.get("cloud-1")
    for replicas, ms_per_image in ((4, 2.0), (4, 2.0), (1, 8.0)):
        beat = Heartbeat(incarnation="the-first", in_flight=0, queued_images=0, images_done=0, replicas=replicas)
        world.devices.heartbeat("cloud-1", beat, 0.0)
        (node,) = world.fleet.upper(Tier.CLOUD, 0.0)
        assert (node.ms_per_image, device.ms_per_image) == (ms_per_image, ms_per_image)
        times = world.fleet.times(0.0)
        assert times is not None
        assert times.cloud is not None
        assert times.cloud.processing_s == pytest.approx(ms_per_image / 1000 * 50)
