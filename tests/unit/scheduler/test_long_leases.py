"""Nodes that ask for a long lease: they are judged by it, and get no tasks."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.fleet import Ledger
from scheduler.core.health import DetectorTimes, Probe
from tierkit.errors import Conflict, NotFound
from tierkit.types import Health, Tier
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration

TIMES = DetectorTimes(heartbeat_s=0.2, suspect_s=0.5, probe_s=0.4, lease_s=3.0, stall_s=5.0, set_aside_s=1.0)
SWEEP_S = 0.05


def registration(node_id: str = "end-0", lease_s: float | None = 600.0, incarnation: str = "the-first") -> Registration:
    return Registration(
        node_id=node_id,
        incarnation=incarnation,
        tier=Tier.END,
        url="http://127.0.0.1:1",
        models=(ModelOffer(name="small", sha256="0" * 64, ms_per_image=1.0),),
        version="0",
        spool="5" * 16,
        lease_s=lease_s,
    )


def beat(incarnation: str = "the-first", **load: Any) -> Heartbeat:
    return Heartbeat(**{"incarnation": incarnation, "in_flight": 0, "queued_images": 0, "images_done": 0, **load})


def health(devices: Ledger, node_id: str, now: float) -> tuple[Health, str]:
    view = next(view for view in devices.view(now) if view.device.node_id == node_id)
    return view.health, view.reason


@pytest.mark.parametrize(
    ("asked", "lease_s", "heartbeat_s"), [(600.0, 600.0, 200.0), (0.1, 3.0, 1.0), (1e6, 3600.0, 1200.0)]
)
def test_the_lease_has_bounds(asked: float, lease_s: float, heartbeat_s: float) -> None:
    devices = Ledger(TIMES)
    devices.register(registration(lease_s=asked), 0.0)
    times = devices.get("end-0").times
    assert (times.lease_s, times.heartbeat_s) == (lease_s, heartbeat_s)


def test_a_node_is_alive_for_its_whole_lease_and_gets_no_tasks() -> None:
    devices = Ledger(TIMES)
    devices.register(registration(), 0.0)
    devices.heartbeat("end-0", beat(running_images=1, images_done=7), 200.0)
    for now in (200.0, 201.0, 300.0, 799.0):
        devices.sweep(now)
        found, reason = health(devices, "end-0", now)
        assert (found, "takes no tasks, since it asked for a lease of 600 s" in reason) == (Health.ALIVE, True)
        assert devices.alive(Tier.END, now) == []
        assert devices.last_resort(Tier.END, now) == devices.suspect(Tier.END, now) == []
    assert "takes no tasks" in devices.why_none(Tier.END, 799.0)
    devices.sweep(800.1)
    assert health(devices, "end-0", 800.1) == (Health.DEAD, "silent for 600.1 s, its lease of 600 s has run out")
    with pytest.raises(NotFound):
        devices.heartbeat("end-0", beat(), 800.2)


def test_observations_renew_a_lease() -> None:
    devices = Ledger(TIMES)
    for node_id, lease_s in (("end-0", None), ("end-1", 600.0)):
        devices.register(registration(node_id, lease_s), 0.0)
    for now in (2.0, 4.0, 6.0):
        devices.hear("end-0", "the-first", now)
        devices.sweep(now)
        assert health(devices, "end-0", now)[0] is Health.ALIVE
    devices.hear("end-1", "the-first", 500.0)
    assert health(devices, "end-1", 1000.0)[0] is Health.ALIVE
    with pytest.raises(NotFound, match="given up"):
        devices.hear("end-0", "the-first", 500.0)
    with pytest.raises(NotFound):
        devices.hear("end-9", "the-first", 500.0)
    with pytest.raises(Conflict):
        devices.hear("end-1", "the-second", 500.0)


def test_a_node_becomes_one_that_takes_tasks_and_back() -> None:
    devices = Ledger(TIMES)
    for number, lease_s in enumerate((600.0, None, 600.0, None)):
        now, version = float(number), devices.version
        devices.register(registration("end-0", lease_s, f"process-{number}"), now)
        assert [device.node_id for device in devices.alive(Tier.END, now)] == ([] if lease_s else ["end-0"])
        assert devices.get("end-0").times.lease_s == (lease_s or 3.0)
        assert devices.version > version


def test_silent_nodes_with_long_leases_do_not_speak_for_the_scheduler() -> None:
    """Three nodes fall silent at once: the scheduler doubts itself, although a fourth one is within its lease."""
    devices = Ledger(TIMES, sweep_s=SWEEP_S)
    devices.register(registration("end-9", 600.0), 0.0)
    for number in range(3):
        devices.register(registration(f"end-{number}", None), 0.0)
    for tick in range(1, 40):
        devices.sweep(tick * SWEEP_S)
    assert devices.doubting
    assert not any(health(devices, f"end-{number}", 39 * SWEEP_S)[0].gone for number in range(3))


def test_many_nodes_with_long_leases_raise_no_doubt() -> None:
    devices = Ledger(TIMES, sweep_s=SWEEP_S)
    for number in range(5):
        devices.register(registration(f"end-{number}"), 0.0)
    for tick in range(1, 400):
        devices.sweep(tick * SWEEP_S)
        assert not devices.doubting


def test_a_process_that_has_ended_and_comes_back_gets_its_place_at_once() -> None:
    devices = Ledger(TIMES)
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="the-second"), 1.0)
    assert devices.get("end-0").incarnation == "the-second"
    with pytest.raises(Conflict):
        devices.register(registration(incarnation="the-first"), 2.0)
    # A second node with the name, at another address, is refused as long as the lease lasts.
    rival = registration(incarnation="the-rival").model_copy(update={"url": "http://127.0.0.2:1", "spool": "6" * 16})
    with pytest.raises(Conflict):
        devices.register(rival, 600.0)
    devices.register(rival, 602.0)


@pytest.mark.parametrize(("spool", "same"), [("5" * 16, True), ("6" * 16, False), ("", False)])
def test_a_device_is_known_by_its_spool_at_another_address(spool: str, same: bool) -> None:
    devices = Ledger(TIMES)
    devices.register(registration(), 0.0)
    moved = registration(incarnation="the-second").model_copy(update={"url": "http://127.0.0.9:1", "spool": spool})
    if same:
        devices.register(moved, 1.0)
        assert devices.get("end-0").registration.url == moved.url
        with pytest.raises(Conflict):  # the first process must not take it back
            devices.heartbeat("end-0", beat(), 2.0)
        with pytest.raises(Conflict):
            devices.register(registration(), 2.0)
    else:
        with pytest.raises(Conflict):
            devices.register(moved, 1.0)


def test_an_accusation_or_a_refused_probe_counts() -> None:
    devices = Ledger(TIMES)
    devices.register(registration(), 0.0)
    devices.probed("end-0", "the-first", Probe.ANSWERED, began=1.0, now=1.0)
    devices.probed("end-0", "the-first", Probe.REFUSED, began=2.0, now=2.0)
    assert health(devices, "end-0", 2.0)[0] is Health.DEAD
