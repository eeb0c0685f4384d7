"""The device list: incarnations, leases, drain, remove. Time is passed in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from scheduler.core import events, fleet as devices_module
from scheduler.core.device import NO_INTENT, Device, Intent
from scheduler.core.fleet import Change, Ledger
from scheduler.core.health import DetectorTimes, Evidence, Probe, Verdict, judge
from scheduler.core.job import AttemptReport
from scheduler.core.policy import JobPolicy
from scheduler.core.step import State, step as decide
from scheduler.core.work import Attempt, AttemptFacts, JobFacts, OpenJob, Phase, TaskFacts
from scheduler.settings import SchedulerSettings
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded
from tierkit.pacing import TokenBucket
from tierkit.testing import FakeClock
from tierkit.types import Health, Scheme, Tier
from tierkit.wire.events import CoarseEvent
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration, Upstream

DRAINED = Intent(drained=True)
REMOVED = Intent(removed=True, by="alice")


TIMES = DetectorTimes(heartbeat_s=0.5, suspect_s=1.5, probe_s=0.4, lease_s=3.0, stall_s=5.0, set_aside_s=1.0)


def registration(
    node_id: str = "end-0",
    incarnation: str = "first-one",
    tier: Tier = Tier.END,
    *,
    port: int = 1,
    images_per_minute: int | None = None,
    key: str = "",
) -> Registration:
    return Registration(
        node_id=node_id,
        incarnation=incarnation,
        tier=tier,
        url=f"http://127.0.0.1:{port}",
        models=(ModelOffer(name="small", sha256="0" * 64, ms_per_image=1.0),),
        version="0",
        images_per_minute=images_per_minute,
        key=key,
    )


def beat(incarnation: str = "first-one", **changes: Any) -> Heartbeat:
    load = {"in_flight": 1, "queued_images": 0, "images_done": 3, **changes}
    return Heartbeat(incarnation=incarnation, **load)


class Machine:
    """The state machine of dispatch without a dispatcher: takes events, and tells followers what becomes of nodes."""

    def __init__(self, devices: Ledger, clock: Callable[[], float]) -> None:
        self._state = State(limits=SchedulerSettings().task_limits, ledger=devices)
        self._clock = clock
        self.followers: list[Callable[[Change], None]] = []
        self.reports: list[AttemptReport] = []

    def handle(self, what: events.What) -> None:
        for effect in decide(self._state, events.Event(what, self._clock(), 0.5)):
            if isinstance(effect, events.NodeChanged):
                for follower in self.followers:
                    follower(effect.change)
            elif isinstance(effect, events.Report):
                self.reports.append(effect.report)


@pytest.fixture
def devices() -> Ledger:
    return Ledger(TIMES)


def health(devices: Ledger, node_id: str, now: float) -> Health:
    return next(view.health for view in devices.view(now) if view.device.node_id == node_id)


POLICY = JobPolicy(scheme=Scheme.END_EDGE, deadline_s=100, task_deadline_s=10)
COARSE = CoarseEvent(
    task_id="j-0", node_id="end-0", model="m", labels=(0,), confidences=(0.5,), queue_ms=0, compute_ms=1
)
IDS = itertools.count()


def attempt_on(
    end: str, *uppers: str, now: float, images: int = 50, incarnation: str = "first-one", **facts: Any
) -> AttemptFacts:
    """An attempt on an end device, which asks these upstream nodes."""
    upstreams = tuple(
        Upstream(
            node_id=upper,
            tier=Tier(upper.split("-")[0]),
            url="http://127.0.0.1:1",
            model="m",
            sha256="1" * 64,
            encoding=None,
        )
        for upper in uppers
    )
    return AttemptFacts(
        id=next(IDS),
        job_id="j",
        task=0,
        images=images,
        number=1,
        node_id=end,
        incarnation=incarnation,
        upstreams=upstreams,
        incarnations=dict.fromkeys(uppers, incarnation),
        started=now,
        started_at=0.0,
        deadline=now + 10.0,
        **facts,
    )


def begun(devices: Ledger, facts: AttemptFacts) -> Attempt:
    """The attempt under way: its device owes the coarse answer."""
    tasks = [TaskFacts(index=facts.task, first_image=0, images=facts.images)]
    job = OpenJob(JobFacts(job_id=facts.job_id, policy=POLICY, deadline=100.0), tasks, TokenBucket(1.0, 1.0))
    attempt = Attempt(facts, job, job.open[facts.task], Phase.COARSE, until=facts.deadline)
    devices.begin(attempt, facts.started)
    return attempt


def keeps_tasks(devices: Ledger, incarnation: str, now: float) -> bool:
    view = devices.view_of("end-0", incarnation, now)
    return view is not None and view.keeps_tasks


def test_a_registered_node_is_alive_until_its_lease_runs_out(devices):
    devices.register(registration(), 0.0)
    assert [device.node_id for device in devices.alive(Tier.END, 1.0)] == ["end-0"]
    assert devices.alive(Tier.EDGE, 1.0) == []
    assert health(devices, "end-0", 2.0) is Health.SUSPECT
    assert health(devices, "end-0", 3.1) is Health.DEAD
    assert devices.alive(Tier.END, 3.1) == []


def test_a_full_list_takes_no_further_node_but_the_old_ones_again(devices, monkeypatch):
    monkeypatch.setattr(devices_module, "MOST_NODES", 2)
    devices.register(registration("end-0"), 0.0)
    devices.register(registration("end-1"), 0.0)
    with pytest.raises(Overloaded, match="full"):
        devices.register(registration("end-2"), 0.1)
    devices.register(registration("end-1"), 0.2)
    devices.forget("end-0")
    devices.register(registration("end-2"), 0.3)


def test_heartbeats_renew_the_lease_and_carry_the_load(devices):
    devices.register(registration(), 0.0)
    for now in (0.5, 1.0, 2.4, 3.9):
        devices.heartbeat("end-0", beat(), now)
    assert health(devices, "end-0", 5.0) is Health.ALIVE
    assert devices.get("end-0").load.images_done == 3


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
    assert not keeps_tasks(devices, "first-one", 1.0)
    assert keeps_tasks(devices, "second-one", 1.0)
    with pytest.raises(Conflict, match="another incarnation"):
        devices.heartbeat("end-0", beat("first-one"), 1.1)
    with pytest.raises(Conflict, match="another incarnation"):
        devices.leave("end-0", "first-one", 1.1)


def test_a_node_that_moves_to_another_address_loses_its_tasks_and_is_alive_there(devices):
    clock = FakeClock()
    machine = Machine(devices, clock)

    def take(what: events.What, now: float) -> list[tuple[str, str]]:
        clock.now_s = now
        machine.reports.clear()
        machine.handle(what)
        return [(report.outcome, report.reason) for report in machine.reports]

    job = JobFacts(job_id="j", policy=POLICY, deadline=100.0)
    take(events.JobAdded(job, [TaskFacts(index=0, first_image=0, images=50)]), 0.0)
    take(events.Registered(registration()), 0.0)
    take(events.Registered(registration("edge-0", tier=Tier.EDGE)), 0.0)
    take(events.AttemptBegun(attempt_on("end-0", "edge-0", now=0.1)), 0.1)
    reports = take(events.Registered(registration(port=2)), 0.2)
    assert reports == [("lost", "end-0: has moved to http://127.0.0.1:2")]
    (device,) = devices.alive(Tier.END, 0.2)
    assert (device.registration.url, device.owed) == ("http://127.0.0.1:2", 0)
    take(events.JobDue("j", has_upstream=True), 1.0)
    sent = attempt_on("end-0", "edge-0", now=1.0)
    take(events.AttemptBegun(sent), 1.0)
    assert take(events.Registered(registration(port=2)), 1.1) == [], "the same address again is no move"
    assert devices.get("end-0").owed == 50
    take(events.LineCame(sent.id, COARSE, ""), 1.2)
    assert devices.get("end-0").owed == 0
    reports = take(events.Registered(registration("edge-0", tier=Tier.EDGE, port=2)), 1.3)
    assert reports == [("rerouted", "edge-0 left the device list")]


def test_a_node_cannot_claim_the_id_of_one_that_is_alive(devices):
    devices.register(registration(), 0.0)
    with pytest.raises(
        Conflict, match=r"'end-0' belongs to a node at http://127\.0\.0\.1:1 that is alive; .*--node-id"
    ):
        devices.register(registration(incarnation="second-one", port=2), 0.1)
    devices.heartbeat("end-0", beat(), 0.5)
    assert keeps_tasks(devices, "first-one", 0.5)


@pytest.mark.parametrize(("now", "port"), [(0.1, 1), (0.1, 2), (2.0, 2), (5.0, 2)])
def test_a_node_of_another_tier_takes_no_id_over(devices, now: float, port: int):
    devices.register(registration("edge-1", tier=Tier.EDGE), 0.0)
    other = registration("edge-1", "second-one", Tier.CLOUD, port=port)
    with pytest.raises(Conflict, match=r"'edge-1' belongs to an edge node, and this is one of tier cloud.*forget"):
        devices.register(other, now)
    devices.forget("edge-1")
    devices.register(other, now)
    assert devices.get("edge-1").tier is Tier.CLOUD


@pytest.mark.parametrize("tier", list(Tier))
def test_no_node_registers_under_the_name_of_a_tier(tier: Tier):
    with pytest.raises(ValueError, match=f"must not be the name of a tier, as '{tier}' is"):
        registration(str(tier), tier=Tier.CLOUD)


@pytest.mark.parametrize("sign", ["silent", "accused", "refused", "same address"])
def test_a_restarted_node_takes_its_id_back(devices, sign):
    devices.register(registration(), 0.0)
    if sign == "accused":
        devices.note("end-0", "first-one", 0.1, Device.is_accused, "connection reset")
    elif sign == "refused":
        devices.probed("end-0", "first-one", Probe.ANSWERED, began=0.0, now=0.0)
        devices.probed("end-0", "first-one", Probe.REFUSED, began=0.1, now=0.1)
    now, port = (2.0 if sign == "silent" else 0.2), (1 if sign == "same address" else 2)
    devices.register(registration(incarnation="second-one", port=port), now)
    assert keeps_tasks(devices, "second-one", now)
    assert not keeps_tasks(devices, "first-one", now)


def test_the_old_incarnation_is_refused_while_the_new_one_lives(devices):
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="second-one"), 1.0)
    with pytest.raises(Conflict, match="--node-id"):
        devices.register(registration(), 1.1)


def test_the_old_incarnation_may_return_when_the_new_one_is_dead(devices):
    devices.register(registration(), 0.0)
    devices.register(registration(incarnation="second-one"), 1.0)
    devices.register(registration(), 5.0)
    assert keeps_tasks(devices, "first-one", 5.0)


def test_an_accusation_lasts_until_the_next_heartbeat(devices):
    devices.register(registration(), 0.0)
    devices.note("end-0", "first-one", 0.1, Device.is_accused, "connection refused")
    assert health(devices, "end-0", 0.1) is Health.SUSPECT
    assert [device.node_id for device in devices.suspect(Tier.END, 0.1)] == ["end-0"]
    devices.heartbeat("end-0", beat(), 0.2)
    assert health(devices, "end-0", 0.2) is Health.ALIVE


def test_wrong_answers_last_until_a_right_one_whatever_the_heartbeats_say(devices):
    devices.register(registration(), 0.0)
    devices.note("end-0", "first-one", 0.1, Device.answers_wrongly, "no JSON", 0.1)
    devices.heartbeat("end-0", beat(), 0.5)
    assert health(devices, "end-0", 0.5) is Health.SUSPECT
    assert devices.keeps_tasks("end-0", 0.5)
    # Suspect by that alone, it is there: nobody else may take its name.
    with pytest.raises(Conflict, match="--node-id"):
        devices.register(registration(incarnation="second-one", port=2), 0.6)
    devices.heartbeat("end-0", beat(), 1.1)
    (view,) = devices.view(1.1)
    assert view.health is Health.ALIVE
    assert "gets one task as a trial: its last answer was wrong: no JSON" in view.reason
    begun(devices, attempt_on("end-0", now=1.2))
    assert devices.alive(Tier.END, 1.2) == []
    devices.note("end-0", "first-one", 1.3, Device.answers_rightly)
    assert [view.reason for view in devices.view(1.3)] == ["heartbeats on time"]


def test_one_that_has_done_nothing_wrong_alone_is_not_blamed(devices):
    devices.register(registration(), 0.0)
    devices.note("end-0", "first-one", 0.1, Device.answers_wrongly, "500", 0.1, counts=False)
    assert health(devices, "end-0", 0.1) is Health.ALIVE
    devices.note("end-0", "first-one", 0.1, Device.answers_wrongly, "500", 0.1)
    devices.note("end-0", "first-one", 0.2, Device.is_pardoned)
    assert health(devices, "end-0", 0.2) is Health.ALIVE
    devices.note("end-0", "another-one", 0.3, Device.answers_wrongly, "500", 0.3)
    assert health(devices, "end-0", 0.3) is Health.ALIVE


def test_nodes_that_are_set_aside_are_asked_where_there_is_no_other(devices):
    for node_id in ("end-0", "end-1"):
        devices.register(registration(node_id), 0.0)
    for at in (0.1, 0.2, 0.3):
        devices.note("end-0", "first-one", at, Device.answers_wrongly, "500", at)

    def asked(now: float) -> list[str]:
        return [device.node_id for device in devices.last_resort(Tier.END, now)]

    for node_id in ("end-0", "end-1"):
        devices.heartbeat(node_id, beat(), 0.9)
    assert asked(1.4) == [], "the other one is alive"
    devices.note("end-1", "first-one", 1.0, Device.answers_wrongly, "500", 1.0)
    assert asked(1.2) == []
    assert asked(1.31) == ["end-0"]
    devices.note("end-1", "first-one", 1.35, Device.is_accused, "connection reset")
    assert asked(1.4) == [], "the other one may be back in a moment"
    devices.forget("end-1")
    assert asked(1.4) == ["end-0"]


def test_an_answer_to_a_task_clears_an_accusation_and_ends_silence(devices):
    devices.register(registration(), 0.0)
    devices.note("end-0", "first-one", 1.6, Device.is_accused, "connection reset")
    devices.note("end-0", "first-one", 1.7, Device.seen, 1.7)
    assert health(devices, "end-0", 2.0) is Health.ALIVE
    devices.note("end-0", "another-one", 3.0, Device.seen, 3.0)
    assert health(devices, "end-0", 3.5) is Health.SUSPECT


def test_a_silent_node_that_was_reached_before_is_dead_when_it_does_not_answer(devices):
    devices.register(registration(), 0.0)
    devices.probed("end-0", "first-one", Probe.ANSWERED, began=0.0, now=0.0)
    devices.probed("end-0", "first-one", Probe.SILENT, began=0.5, now=0.9)
    assert health(devices, "end-0", 0.9) is Health.ALIVE
    assert health(devices, "end-0", 1.6) is Health.DEAD


def test_death_is_final_until_the_node_registers_again(devices):
    devices.register(registration(), 0.0)
    devices.probed("end-0", "first-one", Probe.ANSWERED, began=0.0, now=0.0)
    devices.probed("end-0", "first-one", Probe.REFUSED, began=0.1, now=0.1)
    devices.note("end-0", "first-one", 0.2, Device.seen, 0.2)
    devices.probed("end-0", "first-one", Probe.ANSWERED, began=0.2, now=0.2)
    assert health(devices, "end-0", 0.2) is Health.DEAD
    with pytest.raises(NotFound, match=r"process has ended.*register again"):
        devices.heartbeat("end-0", beat(), 0.3)
    devices.register(registration(), 0.4)
    assert health(devices, "end-0", 0.4) is Health.ALIVE


def test_a_heartbeat_outlives_a_probe_that_began_before_it(devices):
    devices.register(registration(), 0.0)
    devices.probed("end-0", "first-one", Probe.ANSWERED, began=0.0, now=0.0)
    devices.heartbeat("end-0", beat(), 1.2)
    devices.probed("end-0", "first-one", Probe.REFUSED, began=1.1, now=1.3)
    assert health(devices, "end-0", 1.3) is Health.ALIVE


def test_a_node_that_heartbeats_but_makes_no_progress_is_not_alive_until_it_does(devices):
    devices.register(registration(), 0.0)
    attempt = begun(devices, attempt_on("end-0", now=1.0))
    for now in (1.5, 3.0, 4.5, 5.9):
        devices.heartbeat("end-0", beat(images_done=0), now)
        assert health(devices, "end-0", now) is Health.ALIVE
    devices.heartbeat("end-0", beat(images_done=0), 6.1)
    assert health(devices, "end-0", 6.1) is Health.SUSPECT
    assert not devices.keeps_tasks("end-0", 6.1)
    assert devices.suspect(Tier.END, 6.1) == []
    # Its tasks go to others. That is no reason to trust it again, a finished image is.
    devices.release(attempt, 6.1, answered=False)
    devices.heartbeat("end-0", beat(images_done=0), 6.5)
    assert health(devices, "end-0", 6.5) is Health.SUSPECT
    devices.heartbeat("end-0", beat(images_done=1), 6.9)
    assert health(devices, "end-0", 6.9) is Health.ALIVE
    assert devices.get("end-0").owed == 0


def test_an_upper_node_is_measured_by_what_it_says_of_itself(devices):
    devices.register(registration("edge-0", tier=Tier.EDGE), 0.0)
    for step in range(30):
        devices.heartbeat("edge-0", beat(images_done=step, running_images=64, queued_images=500), step / 2)
    assert health(devices, "edge-0", 14.5) is Health.ALIVE
    for step in range(30, 42):
        devices.heartbeat("edge-0", beat(images_done=29, running_images=64, queued_images=500), step / 2)
    view = devices.view(20.5)[0]
    assert (view.health, view.keeps_tasks) == (Health.SUSPECT, False)
    assert view.reason == "no progress: 64 images for 6.0 s, at most 5.0 s expected"


def test_a_node_that_works_for_another_scheduler_is_not_stuck(devices):
    """It reports its own queue to each scheduler, and the batch that runs and the images that are done for all."""
    devices.register(registration("cloud-0", tier=Tier.CLOUD), 0.0)
    for step in range(120):
        load: dict[str, Any] = {"images_done": 64 * step, "running_images": 64, "queued_images": 50}
        devices.heartbeat("cloud-0", beat(**load), step / 2)
        assert health(devices, "cloud-0", step / 2) is Health.ALIVE
    for step in range(120, 132):  # it is stuck in a batch of the other scheduler
        devices.heartbeat("cloud-0", beat(images_done=64 * 119, running_images=64), step / 2)
    assert health(devices, "cloud-0", 65.5) is Health.SUSPECT


def test_a_node_that_had_nothing_to_do_is_not_late_with_new_work(devices):
    devices.register(registration(), 0.0)
    for step in range(1, 101):
        devices.heartbeat("end-0", beat(), step / 2)
    attempt = begun(devices, attempt_on("end-0", now=50.0))
    assert health(devices, "end-0", 50.0) is Health.ALIVE
    devices.release(attempt, 50.1, answered=True)
    begun(devices, attempt_on("end-0", now=50.2))
    assert devices.get("end-0").owed == 50
    assert health(devices, "end-0", 50.4) is Health.ALIVE


def test_a_power_budget_lets_a_node_rest(devices):
    devices.register(registration(images_per_minute=600), 0.0)
    devices.charge("end-0", 50, 0.0)
    devices.heartbeat("end-0", beat(), 1.0)
    assert devices.alive(Tier.END, 1.0) == []
    view = devices.view(1.0)[0]
    assert (view.health, view.reason) == (
        Health.ALIVE,
        "heartbeats on time; rests for 4.0 s to keep to 600 images a minute",
    )
    for now in (2.0, 3.0, 4.0, 4.9):
        devices.heartbeat("end-0", beat(), now)
    assert devices.alive(Tier.END, 4.9) == []
    assert len(devices.alive(Tier.END, 5.0)) == 1


@given(st.floats(-1e6, 1e9), st.lists(st.floats(0.01, 2.0), max_size=20))
def test_only_differences_of_the_schedulers_own_clock_count(offset_s, intervals):
    """Whatever a node's clock says never gets here; where the scheduler's own begins changes nothing."""
    verdicts = []
    for begin in (0.0, offset_s):
        devices, now = Ledger(TIMES), begin
        devices.register(registration(), now)
        said = []
        for interval_s in intervals:
            now += interval_s
            if devices.keeps_tasks("end-0", now):
                devices.heartbeat("end-0", beat(), now)
            said.append(devices.get("end-0").suspect_after_s)
        verdicts.append(said)
    assert verdicts[0] == pytest.approx(verdicts[1], abs=1e-3)


def test_an_accusation_against_an_older_incarnation_means_nothing(devices):
    devices.register(registration(incarnation="second-one"), 0.0)
    devices.note("end-0", "first-one", 0.1, Device.is_accused, "connection refused")
    assert health(devices, "end-0", 0.1) is Health.ALIVE


@pytest.mark.parametrize("by", ["operator", "node"])
def test_a_draining_node_gets_nothing_new_and_keeps_what_it_has(devices, by):
    devices.register(registration(), 0.0)
    if by == "operator":
        devices.intend("end-0", DRAINED, 0.1)
    else:
        devices.heartbeat("end-0", beat(draining=True), 0.1)
    devices.heartbeat("end-0", beat(draining=by == "node"), 0.2)
    assert health(devices, "end-0", 0.2) is Health.DRAINING
    assert devices.alive(Tier.END, 0.2) == []
    assert keeps_tasks(devices, "first-one", 0.2)
    devices.heartbeat("end-0", beat(), 0.3)  # its model is loaded again
    assert health(devices, "end-0", 0.3) is (Health.ALIVE if by == "node" else Health.DRAINING)


def test_a_node_that_was_set_aside_comes_back_by_itself(devices):
    devices.register(registration(), 0.0)
    devices.note("end-0", "first-one", 0.0, Device.rests, 1.0)
    assert devices.alive(Tier.END, 0.9) == []
    assert len(devices.alive(Tier.END, 1.0)) == 1


def changed(devices: Ledger) -> list[tuple[str, Health | None]]:
    """The feed since the last call."""
    return [(change.node_id, change.health) for change in devices.take_changes()]


def test_changes_are_told_once(devices):
    devices.register(registration(), 0.0)
    devices.register(registration("edge-0", tier=Tier.EDGE), 0.0)
    assert changed(devices) == [("end-0", None), ("edge-0", None)]
    devices.heartbeat("edge-0", beat(), 1.0)
    devices.sweep(2.0)
    assert changed(devices) == [("end-0", Health.SUSPECT)]
    devices.sweep(2.1)
    assert changed(devices) == []
    devices.sweep(3.5)
    assert changed(devices) == [("edge-0", Health.SUSPECT), ("end-0", Health.DEAD)]
    devices.forget("edge-0")
    assert changed(devices) == [("edge-0", None)]


def swept(nodes: list[str], *, until: float) -> Ledger:
    """A list that has been swept every 0.05 s, with nodes that were heard until then and can be probed."""
    devices = Ledger(TIMES, sweep_s=0.05)
    for node_id in nodes:
        devices.register(registration(node_id), 0.0)
        devices.probed(node_id, "first-one", Probe.ANSWERED, began=0.0, now=0.0)
    devices.sweep(0.0)
    sweep_on(devices, 0.0, until, heard=nodes)
    return devices


def sweep_on(devices: Ledger, since: float, until: float, *, heard: list[str]) -> None:
    for step in range(1, round((until - since) / 0.05) + 1):
        now = since + 0.05 * step
        if step % 10 == 0:
            for node_id in heard:
                devices.heartbeat(node_id, beat(), now)
        devices.sweep(now)


def test_silence_while_the_scheduler_stood_still_does_not_count():
    devices = swept(["end-0"], until=5.0)
    # Whatever comes first after the pause: evidence, a question, or the sweep.
    devices.probed("end-0", "first-one", Probe.ANSWERED, began=5.0, now=15.0)
    assert health(devices, "end-0", 15.0) is Health.ALIVE
    devices.sweep(15.0)
    assert health(devices, "end-0", 15.1) is Health.ALIVE
    assert devices.get("end-0").last_seen == pytest.approx(14.95)
    sweep_on(devices, 15.0, 18.1, heard=[])
    assert health(devices, "end-0", 18.1) is Health.DEAD


def test_a_node_that_was_judged_during_a_pause_is_suspect_in_time_after_it():
    devices = swept(["end-0", "end-1"], until=5.0)
    devices.take_changes()
    sweep_on(devices, 5.0, 5.6, heard=["end-1"])
    assert len(devices.alive(Tier.END, 7.0)) == 2, "what it was silent for meanwhile does not count"
    sweep_on(devices, 6.95, 7.6, heard=["end-1"])
    assert ("end-0", Health.SUSPECT) in changed(devices)


def test_a_pause_costs_no_judgement_of_each_node_that_is_alive(monkeypatch):
    """With thousands of nodes that would be a pause as well, and the next sweep would be late again, for ever."""
    devices = swept([f"end-{number}" for number in range(100)], until=5.0)
    judged: list[Evidence] = []

    def count(evidence: Evidence, times: DetectorTimes) -> Verdict:
        judged.append(evidence)
        return judge(evidence, times)

    monkeypatch.setattr("scheduler.core.device.judge", count)
    devices.sweep(5.3)  # in which their time to be judged comes
    for number in range(100):
        devices.heartbeat(f"end-{number}", beat(), 5.3)
    judged.clear()
    devices.sweep(5.6)
    assert len(judged) < 10
    assert {health(devices, f"end-{number}", 5.6) for number in range(100)} == {Health.ALIVE}


def test_a_pause_before_the_first_sweep_does_not_count():
    devices = Ledger(TIMES, sweep_s=0.05)
    devices.register(registration(), 1.0)
    devices.sweep(9.0)
    assert health(devices, "end-0", 9.0) is Health.ALIVE


def test_a_node_that_is_heard_just_after_a_pause_is_not_forgiven_time_to_come():
    devices = swept(["end-0"], until=5.0)
    devices.heartbeat("end-0", beat(), 15.0)
    devices.sweep(15.0)
    assert devices.get("end-0").last_seen == 15.0


def test_where_no_node_is_heard_none_dies_of_silence_until_one_is_heard():
    nodes = ["cloud-0", "edge-0", "end-0", "end-1"]
    devices = swept(nodes, until=5.0)
    sweep_on(devices, 5.0, 9.0, heard=[])
    assert devices.doubting
    for node_id in nodes:
        devices.probed(node_id, "first-one", Probe.SILENT, began=8.0, now=9.0)
    sweep_on(devices, 9.0, 20.0, heard=[])
    views = devices.view(20.0)
    assert {view.health for view in views} == {Health.SUSPECT}
    assert all("the scheduler doubts itself first" in view.reason for view in views)
    # One is heard: it was not the scheduler, or no more. A probe that began before says nothing yet.
    for now in (20.0, 20.5):
        devices.heartbeat("end-0", beat(), now)
        sweep_on(devices, now, now + 0.5, heard=[])
    assert not devices.doubting
    devices.probed("edge-0", "first-one", Probe.SILENT, began=19.8, now=20.2)
    assert (health(devices, "end-0", 21.0), health(devices, "edge-0", 21.0)) == (Health.ALIVE, Health.SUSPECT)
    devices.probed("edge-0", "first-one", Probe.SILENT, began=20.6, now=21.0)
    assert health(devices, "edge-0", 21.0) is Health.DEAD
    # The others had been silent for 0.8 s when the doubt began, and have been for 1 s since it ended.
    devices.heartbeat("end-0", beat(), 21.0)
    sweep_on(devices, 21.0, 22.0, heard=["end-0"])
    assert health(devices, "cloud-0", 22.0) is Health.SUSPECT
    sweep_on(devices, 22.0, 22.5, heard=["end-0"])
    assert health(devices, "cloud-0", 22.5) is Health.DEAD


def test_a_refused_connection_is_believed_in_doubt_as_well():
    devices = swept(["cloud-0", "edge-0", "end-0"], until=5.0)
    sweep_on(devices, 5.0, 9.0, heard=[])
    devices.probed("end-0", "first-one", Probe.REFUSED, began=8.9, now=9.0)
    assert (health(devices, "end-0", 9.0), health(devices, "edge-0", 9.0)) == (Health.DEAD, Health.SUSPECT)


def test_nodes_that_stay_silent_are_given_up_in_the_end_and_the_doubt_does_not_begin_anew():
    devices = swept(["cloud-0", "edge-0", "end-0"], until=5.0)
    sweep_on(devices, 5.0, 35.0, heard=[])
    assert {view.health for view in devices.view(35.0)} == {Health.SUSPECT}
    sweep_on(devices, 35.0, 39.0, heard=[])
    assert not devices.doubting
    assert {view.health for view in devices.view(39.0)} == {Health.DEAD}


@pytest.mark.parametrize("heard", [[], ["edge-0"]])
def test_one_node_that_is_heard_or_too_few_nodes_leave_no_doubt(heard):
    devices = swept(["edge-0", "end-0", *(["cloud-0"] if heard else [])], until=5.0)
    sweep_on(devices, 5.0, 7.0, heard=heard)
    devices.probed("end-0", "first-one", Probe.SILENT, began=6.6, now=7.0)
    assert health(devices, "end-0", 7.0) is Health.DEAD


def test_the_dead_stay_on_the_list_up_to_a_bound(devices, monkeypatch):
    monkeypatch.setattr(devices_module, "MOST_DEAD", 2)
    for number in range(5):
        devices.register(registration(f"end-{number}"), 0.1 * number)
    devices.intend("end-0", DRAINED, 0.5)
    devices.heartbeat("end-4", beat(), 3.0)
    devices.sweep(3.45)
    assert listed(devices, 3.45) == {
        "end-0": Health.DEAD,
        "end-2": Health.DEAD,
        "end-3": Health.DEAD,
        "end-4": Health.ALIVE,
    }, "end-1 died first of those of which nobody has said anything"
    devices.sweep(1e6)
    assert set(listed(devices, 1e6)) == {"end-0", "end-3", "end-4"}


def test_the_dead_make_room_for_the_living(devices, monkeypatch):
    monkeypatch.setattr(devices_module, "MOST_NODES", 2)
    devices.register(registration("end-0"), 0.0)
    devices.register(registration("end-1"), 3.0)
    devices.sweep(3.2)
    devices.register(registration("end-2"), 3.2)
    assert listed(devices, 3.2) == {"end-1": Health.ALIVE, "end-2": Health.ALIVE}


def listed(devices: Ledger, now: float) -> dict[str, Health]:
    return {view.device.node_id: view.health for view in devices.view(now)}


def test_a_drain_outlasts_the_node(devices):
    devices.register(registration(), 0.0)
    devices.intend("end-0", replace(DRAINED, by="alice"), 0.1)
    devices.register(registration(incarnation="second-one"), 0.2)
    view = devices.view_of("end-0", "second-one", 0.2)
    assert view is not None
    assert view.health is Health.DRAINING
    assert "by alice" in view.reason
    assert devices.alive(Tier.END, 0.2) == []
    devices.intend("end-0", NO_INTENT, 0.3)
    assert health(devices, "end-0", 0.3) is Health.ALIVE


def test_a_removed_node_may_not_come_back_until_it_is_resumed(devices):
    devices.register(registration(), 0.0)
    assert changed(devices) == [("end-0", None)]
    devices.intend("end-0", REMOVED, 0.1)
    assert changed(devices) == [("end-0", Health.REMOVED)]
    assert health(devices, "end-0", 0.1) is Health.REMOVED
    assert not keeps_tasks(devices, "first-one", 0.1)
    with pytest.raises(NotFound, match="register again"):
        devices.heartbeat("end-0", beat(), 0.2)
    for incarnation in ("first-one", "second-one"):
        with pytest.raises(Forbidden, match="terrace devices resume end-0"):
            devices.register(registration(incarnation=incarnation), 0.3)
    devices.intend("end-0", NO_INTENT, 0.4)
    assert health(devices, "end-0", 0.4) is Health.DEAD
    devices.register(registration(), 0.5)
    assert health(devices, "end-0", 0.5) is Health.ALIVE
    assert keeps_tasks(devices, "first-one", 0.5)


def test_why_none_takes_work_is_told_of_a_few_and_first_of_those_that_are_there(devices):
    assert devices.why_none(Tier.END, 0.0) == ""
    for number in range(20):
        devices.register(registration(f"end-{number}"), 0.0)
    devices.register(registration("end-20"), 3.0)
    devices.intend("end-20", DRAINED, 3.0)
    devices.sweep(3.2)
    told = devices.why_none(Tier.END, 3.2)
    assert told.startswith("end-20: draining: ")
    assert told.endswith("; and 16 more")
    assert told.count("dead") == 4
    assert [view.device.node_id for view in devices.present(3.2)] == ["end-20"]
    devices.register(registration("end-3"), 3.3)
    assert [view.device.node_id for view in devices.present(3.3)] == ["end-3", "end-20"]


def test_why_none_takes_work_tells_of_nodes_that_were_refused(devices):
    devices.refused("end-1", "it serves other networks", 0.0, registration("end-1"))
    devices.refused("edge-1", "it serves other networks", 0.0, registration("edge-1", tier=Tier.EDGE))
    devices.refused("pc-end", "the token of 'pi' is not for the node id 'pc-end'", 1.0, tier=Tier.END)
    devices.refused("pc-edge", "the token of 'pi' is not for an edge", 1.0, tier=Tier.EDGE)
    told = devices.why_none(Tier.END, 1.0)
    assert "end-1" in told
    assert "it serves other networks" in told
    assert "pc-end was refused: the token of 'pi' is not for the node id 'pc-end'" in told
    assert "edge" not in told
    assert devices.why_none(Tier.END, 100.0) == ""


def test_a_refusal_is_told_of_a_dead_node_for_a_while_and_once(devices):
    devices.register(registration(), 0.0)
    devices.refused("nobody", "unknown", 0.0)
    devices.refused("end-0", "the token has expired", 2.9)
    for now, told in ((2.9, 0), (3.1, 1), (3.2, 1), (50.0, 1), (63.0, 0)):
        devices.sweep(now)
        (view,) = devices.view(now)
        assert view.reason.count("the token has expired") == told, (now, view.reason)


@pytest.mark.parametrize(("intent", "stays"), [(NO_INTENT, False), (DRAINED, True), (Intent(trusted=True), True)])
def test_a_node_that_takes_its_leave_stays_listed_where_an_operator_has_said_something(devices, intent, stays):
    devices.register(registration(), 0.0)
    devices.intend("end-0", intent, 0.1)
    devices.leave("end-0", "first-one", 0.2)
    assert listed(devices, 0.2) == ({"end-0": Health.DEAD} if stays else {})


def to_save(devices: Ledger) -> list[str]:
    """The nodes whose stored rows have come to be out of date since the last call."""
    return [change.node_id for change in devices.take_changes() if change.to_save]


def test_what_is_known_of_nodes_is_written_when_it_changes_and_read_by_the_next_list(devices):
    devices.register(registration("end-0", key="secret"), 0.0)
    devices.register(registration("end-1"), 0.0)
    devices.intend("end-1", REMOVED, 0.1)
    assert to_save(devices) == ["end-0", "end-1"]
    after = Ledger(TIMES)
    after.restore([devices.known("end-0"), devices.known("end-1")], 0.0)
    assert listed(after, 100.0) == {"end-0": Health.DEAD, "end-1": Health.REMOVED}
    after.sweep(100.0)
    assert changed(after) == [], "that is no news"
    assert after.alive(Tier.END, 100.0) == []
    with pytest.raises(NotFound, match="register again"):
        after.heartbeat("end-0", beat(), 100.0)
    after.register(registration("end-0", key="secret"), 100.0)
    assert to_save(after) == [], "the same process as before"
    after.register(registration("end-0", "second-one"), 101.0)
    after.forget("end-1")
    assert to_save(after) == ["end-0", "end-1"]
    assert after.known("end-1") is None


def test_the_list_is_in_natural_order_whoever_came_first(devices):
    for node_id in ("end-10", "end-2", "cloud-0"):
        devices.register(registration(node_id), 0.0)
    assert [view.device.node_id for view in devices.view(0.0)] == ["cloud-0", "end-2", "end-10"]


def test_a_place_in_the_list_follows_who_comes_and_goes(devices: Ledger):
    devices.register(registration("end-2"), 0.0)

    def place() -> int:
        assert devices.alive(Tier.END, 0.0)
        return devices.place(Tier.END, devices.get("end-2"))

    assert (place(), place()) == (0, 0)
    devices.register(registration("end-1"), 0.0)
    devices.register(registration("end-10"), 0.0)
    assert (place(), place()) == (1, 1)
    devices.forget("end-1")
    assert place() == 0


@pytest.mark.parametrize("judge", ["sweep", "view", "alive"])
def test_a_node_that_cannot_be_judged_is_given_up_and_no_other(devices, judge):
    for node_id in ("end-0", "end-1"):
        devices.register(registration(node_id), 0.0)
    # No message can say that; whatever else goes wrong with one node must not cost the others either.
    never = Heartbeat.model_construct(**{**dict(beat()), "running_images": 10**400})
    devices.heartbeat("end-0", never, 0.4)
    devices.heartbeat("end-1", beat(), 0.4)
    for step in range(5, 30):
        if step % 5 == 0:
            devices.heartbeat("end-1", beat(images_done=step), step / 10)
        getattr(devices, judge)(*(() if judge != "alive" else (Tier.END,)), step / 10)
    assert [device.node_id for device in devices.alive(Tier.END, 3.0)] == ["end-1"]
    lost, other = devices.view(3.0)
    assert (lost.health, other.health) == (Health.DEAD, Health.ALIVE)
    assert lost.reason.startswith("cannot be judged (OverflowError: ")
    devices.sweep(3.0)
    assert changed(devices).count(("end-0", Health.DEAD)) == 1
    with pytest.raises(NotFound, match="register again"):
        devices.heartbeat("end-0", beat(), 3.0)
    devices.register(registration("end-0", "second-one"), 3.1)
    assert health(devices, "end-0", 3.1) is Health.ALIVE


def test_of_a_long_list_those_that_are_not_well_are_shown_before_the_others(devices):
    for number in range(10):
        devices.register(registration(f"end-{number}"), 0.0)
    devices.intend("end-7", DRAINED, 0.0)
    devices.intend("end-9", DRAINED, 0.0)

    def shown(most: int | None) -> list[str]:
        return [view.device.node_id for view in devices.view(0.0, most)]

    assert shown(4) == ["end-0", "end-1", "end-7", "end-9"]
    assert shown(1) == ["end-7"]
    assert shown(10) == shown(None) == [f"end-{number}" for number in range(10)]
