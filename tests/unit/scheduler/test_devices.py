"""The device list: incarnations, leases, drain, remove. Time is passed in."""

from __future__ import annotations

import pytest

from scheduler.devices import DeviceList
from scheduler.health import LeaseTimes
from tierkit.errors import Conflict, NotFound
from tierkit.protocol import Heartbeat, ModelOffer, Registration
from tierkit.types import Health, Tier

TIMES = LeaseTimes(heartbeat_s=0.5, suspect_s=1.5, lease_s=3.0)


def registration(node_id: str = "end-0", incarnation: str = "first-one", tier: Tier = Tier.END) -> Registration:
    return Registration(
        node_id=node_id,
        incarnation=incarnation,
        tier=tier,
        url="http://127.0.0.1:1",
        models=(ModelOffer(name="small", sha256="0" * 64, ms_per_image=1.0),),
        version="0",
    )


def beat(incarnation: str = "first-one", *, draining: bool = False) -> Heartbeat:
    return Heartbeat(incarnation=incarnation, in_flight=1, queued_images=2, images_done=3, draining=draining)


@pytest.fixture
def devices() -> DeviceList:
    return DeviceList(TIMES)


def health(devices: DeviceList, node_id: str, now: float) -> Health:
    return next(view.health for view in devices.view(now) if view.device.node_id == node_id)


def test_a_registered_node_is_alive_until_its_lease_runs_out(devices):
    lease = devices.register(registration(), 0.0)
    assert (lease.lease_s, lease.heartbeat_s) == (3.0, 0.5)
    assert [device.node_id for device in devices.alive(Tier.END, 1.0)] == ["end-0"]
    assert devices.alive(Tier.EDGE, 1.0) == []
    assert health(devices, "end-0", 2.0) is Health.SUSPECT
    assert health(devices, "end-0", 3.1) is Health.DEAD
    assert devices.alive(Tier.END, 3.1) == []


def test_heartbeats_renew_the_lease_and_carry_the_load(devices):
    devices.register(registration(), 0.0)
    for now in (0.5, 1.0, 2.4, 3.9):
        devices.heartbeat("end-0", beat(), now)
    assert health(devices, "end-0", 5.0) is Health.ALIVE
    assert devices.get("end-0").load.queued_images == 2


def test_a_heartbeat_after_the_lease_asks_for_a_new_registration(devices):
    devices.register(registration(), 0.0)
    with pytest.raises(NotFound, match="register again"):
        devices.heartbeat("end-0", beat(), 3.1)
    devices.register(registration(), 3.2)
    assert health(devices, "end-0", 3.2) is Health.ALIVE


def test_an_unknown_node_is_told_to_register(devices):
    with pytest.raises(NotFound, match="on the device list"):
        devices.heartbeat("end-9", beat(), 0.0)


def test_a_new_incarnation_replaces_the_old_one(devices):
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="second-one"), 1.0)
    assert not devices.is_current("end-0", "first-one", 1.0)
    assert devices.is_current("end-0", "second-one", 1.0)
    with pytest.raises(Conflict, match="another incarnation"):
        devices.heartbeat("end-0", beat("first-one"), 1.1)
    with pytest.raises(Conflict, match="another incarnation"):
        devices.remove("end-0", "first-one")


def test_of_two_running_nodes_with_one_name_the_older_is_refused(devices):
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="second-one"), 1.0)
    with pytest.raises(Conflict, match="--node-id"):
        devices.register(registration(), 1.1)


def test_the_older_of_two_may_return_when_the_newer_is_dead(devices):
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="second-one"), 1.0)
    devices.register(registration(), 5.0)
    assert devices.is_current("end-0", "first-one", 5.0)


def test_an_accusation_lasts_until_the_next_heartbeat(devices):
    devices.register(registration(), 0.0)
    devices.accuse("end-0", "first-one", "connection refused", 0.1)
    assert health(devices, "end-0", 0.1) is Health.SUSPECT
    assert [device.node_id for device in devices.suspect(Tier.END, 0.1)] == ["end-0"]
    devices.heartbeat("end-0", beat(), 0.2)
    assert health(devices, "end-0", 0.2) is Health.ALIVE


def test_an_accusation_against_an_older_incarnation_means_nothing(devices):
    devices.register(registration(incarnation="second-one"), 0.0)
    devices.accuse("end-0", "first-one", "connection refused", 0.1)
    assert health(devices, "end-0", 0.1) is Health.ALIVE


@pytest.mark.parametrize("by", ["operator", "node"])
def test_a_draining_node_gets_nothing_new_and_keeps_what_it_has(devices, by):
    devices.register(registration(), 0.0)
    if by == "operator":
        devices.drain("end-0", 0.1)
    else:
        devices.heartbeat("end-0", beat(draining=True), 0.1)
    devices.heartbeat("end-0", beat(), 0.2)
    assert health(devices, "end-0", 0.2) is Health.DRAINING
    assert devices.alive(Tier.END, 0.2) == []
    assert devices.is_current("end-0", "first-one", 0.2)


def test_a_node_that_was_set_aside_comes_back_by_itself(devices):
    devices.register(registration(), 0.0)
    devices.set_aside("end-0", "first-one", 1.0)
    assert devices.alive(Tier.END, 0.9) == []
    assert len(devices.alive(Tier.END, 1.0)) == 1


def test_changes_are_told_once(devices):
    told: list[str] = []
    devices.on_change = told.append
    devices.register(registration(), 0.0)
    devices.register(registration("edge-0", tier=Tier.EDGE), 0.0)
    assert told == ["end-0", "edge-0"]
    told.clear()
    devices.heartbeat("edge-0", beat(), 1.0)
    assert [view.device.node_id for view in devices.sweep(2.0)] == ["end-0"]
    assert devices.sweep(2.1) == []
    assert [(view.device.node_id, view.health) for view in devices.sweep(3.5)] == [
        ("edge-0", Health.SUSPECT),
        ("end-0", Health.DEAD),
    ]
    assert told == ["end-0", "edge-0", "end-0"]
    told.clear()
    devices.remove("edge-0")
    assert told == ["edge-0"]


def test_silence_while_the_scheduler_stood_still_does_not_count(devices):
    devices.register(registration(), 0.0)
    devices.forgive(10.0)
    assert health(devices, "end-0", 10.5) is Health.ALIVE


def test_the_long_dead_are_forgotten(devices):
    devices.register(registration(), 0.0)
    devices.sweep(599.0)
    assert devices.get("end-0")
    devices.sweep(601.0)
    with pytest.raises(NotFound):
        devices.get("end-0")


def test_the_list_is_in_natural_order_whoever_came_first(devices):
    for node_id in ("end-10", "end-2", "cloud-0"):
        devices.register(registration(node_id), 0.0)
    assert [view.device.node_id for view in devices.view(0.0)] == ["cloud-0", "end-2", "end-10"]
