"""What the scheduler remembers of its fleet: figures by the second, and events. Time is passed in."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from scheduler.core.device import NO_INTENT, Intent
from scheduler.core.fleet import Ledger
from scheduler.core.job import Answer
from scheduler.history.record import COLUMNS, Record
from scheduler.history.series import Latencies, RingBuffer
from tests.unit.scheduler.test_devices import TIMES, beat, registration
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent

DRAINED = Intent(drained=True)


EPOCH = 1_800_000_000.0


def answer(*, stage: str = "coarse", kind: str = "coarse", images: int = 50, ms: float = 10.0) -> Answer:
    event = CoarseEvent(
        task_id="j-0", node_id="end-0", model="small", labels=(), confidences=(), queue_ms=0.0, compute_ms=0.0
    )
    return Answer(
        job_id="j",
        task=0,
        first_image=0,
        images=images,
        stage=stage,
        kind=kind,
        ms=ms,
        request_id="",
        event=event,
        line="",
    )


class Watched:
    """A device list and its record; `pass_to` lets time pass as the scheduler's loop does."""

    def __init__(self, **registered: Any) -> None:
        self.devices = Ledger(TIMES)
        self.record = Record(self.devices, wall=lambda now: EPOCH + now)
        self.now = 0.0

    def pass_to(self, now: float) -> None:
        while self.now < now:
            self.now = min(now, self.now + 0.25)
            self.devices.sweep(self.now)
            self.look(self.now)

    def look(self, now: float) -> None:
        for change in self.devices.take_changes():
            self.record.node_changed(change)
        self.record.look(now)

    def kinds(self) -> list[tuple[str, str | None]]:
        return [(event.kind, event.node) for event in self.record.events]

    def row(self, ring: RingBuffer | None = None) -> dict[str, float]:
        _, rows = (ring or self.record.seconds).since(0)
        return dict(zip(COLUMNS, rows[-1].tolist(), strict=True))


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- rings and percentiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("puts", "since", "start", "values"),
    [
        ([], 7.0, 7, []),
        ([(5, 1.0)], 0, 5, [1.0]),
        ([(5, 1.0), (6, 2.0)], 6.5, 6, [2.0]),
        ([(5, 1.0), (5, 2.0)], 0, 5, [2.0]),
        ([(5, 1.0), (8, 2.0)], 0, 5, [1.0, None, None, 2.0]),
        ([(5, 1.0), (4, 9.0), (6, 2.0)], 0, 5, [1.0, 2.0]),
        ([(5, 1.0), (6, 2.0), (7, 3.0), (8, 4.0), (9, 5.0)], 0, 6, [2.0, 3.0, 4.0, 5.0]),
        ([(5, 1.0), (50, 2.0)], 0, 47, [None, None, None, 2.0]),
        ([(5, 1.0)], 99, 6, []),
    ],
)
def test_a_ring_keeps_the_newest_rows_and_leaves_gaps_where_there_was_nothing(puts, since, start, values):
    ring = RingBuffer(1, 1, 4)
    for at, value in puts:
        ring.put(at, [value])
    first, rows = ring.since(since)
    found = [None if math.isnan(value) else value for value in rows[:, 0].tolist()]
    assert (first, found) == (start, values)


def test_percentiles_of_latencies_are_a_twentieth_too_high_at_most():
    chance = np.random.default_rng(0)
    latencies, first, second = Latencies(), Latencies(), Latencies()
    sample = chance.lognormal(3, 1, 2000)
    for number, ms in enumerate(sample):
        latencies.add(ms, 1)
        (first, second)[number % 2].add(ms, 1)
    first.join(second)
    for percent in (50, 90, 99):
        truth = float(np.percentile(sample, percent, method="inverted_cdf"))
        assert truth <= latencies.percentile(percent) <= 1.0501 * truth
        assert first.percentile(percent) == latencies.percentile(percent)
    assert math.isnan(Latencies().percentile(50))


@pytest.mark.parametrize("ms", [0.0, 1e-9, 1e12])
def test_latencies_beyond_all_measure_are_counted_at_the_rim(ms):
    latencies = Latencies()
    latencies.add(ms, 3)
    assert latencies.percentile(50) > 0


# --- what becomes of nodes -------------------------------------------------------------------------------------------


def test_what_becomes_of_a_node_is_noted_in_order_and_once(watched):
    watched.devices.register(registration(), 0.0)
    watched.pass_to(0.5)
    watched.devices.intend("end-0", DRAINED, 0.5)
    watched.pass_to(1.0)
    watched.devices.heartbeat("end-0", beat(), 1.0)
    watched.devices.intend("end-0", NO_INTENT, 1.0)
    watched.pass_to(5.0)  # silent
    watched.devices.register(registration(incarnation="another-one"), 5.0)
    watched.pass_to(5.5)
    watched.devices.forget("end-0")
    watched.pass_to(6.0)
    kinds = [kind for kind, node in watched.kinds() if node == "end-0"]
    assert kinds == ["joined", "drained", "resumed", "suspect", "dead", "joined", "removed"]
    ids = [event.id for event in watched.record.events]
    assert ids == sorted(set(ids))
    assert watched.record.after(ids[2]) == list(watched.record.events)[3:]
    assert watched.record.after(0) == list(watched.record.events)


def test_event_numbers_rise_over_a_restart_of_the_scheduler(watched):
    watched.devices.register(registration(), 0.0)
    watched.pass_to(0.5)
    later = Watched()
    later.record.wall = lambda now: EPOCH + 10 + now
    later.devices.register(registration(), 0.0)
    later.pass_to(0.5)
    assert later.record.events[0].id > watched.record.last_id


# --- what becomes of tasks -------------------------------------------------------------------------------------------


def test_failed_attempts_of_a_second_are_one_event_for_each_node_and_job(watched):
    watched.pass_to(0.5)
    for outcome in ("lost", "error", "ok", "late", "refused"):
        watched.record.attempted(outcome, "end-0", "j", f"it was {outcome}")
    watched.pass_to(1.5)
    events = [(event.kind, event.node, event.job, event.count, event.text) for event in watched.record.events]
    assert events == [("reassigned", "end-0", "j", 2, "it was lost"), ("limited", "end-0", "j", 1, "it was refused")]
    assert watched.row()["failed_attempts"] == 3


def test_however_much_happens_the_events_of_a_second_are_few(watched):
    watched.pass_to(0.5)
    for number in range(10_000):
        watched.record.attempted("lost", f"end-{number}", f"j-{number}", "gone")
    watched.pass_to(1.5)
    assert len(watched.record.events) <= 60
    assert sum(event.count for event in watched.record.events) == 10_000


def test_a_row_holds_the_answers_of_its_second(watched):
    watched.devices.register(registration(), 0.0)
    watched.devices.register(registration("edge-0", tier=Tier.EDGE), 0.0)
    watched.record.jobs = lambda: 7
    watched.pass_to(0.5)
    watched.record.worked("end-0", 50)
    watched.record.answered(answer(ms=10))
    watched.record.passed("end-0", "edge-0", 20)
    watched.record.answered(answer(stage="final", kind="fine", ms=40))
    watched.record.answered(answer(stage="final", kind="fallback", ms=400, images=1))
    watched.record.answered(answer(stage="final", kind="failed", images=3))
    watched.pass_to(1.25)
    row = watched.row()
    expected = {"first": 50, "finer": 50, "fallback": 1, "failed": 3, "sent_up": 20, "alive": 2, "dead": 0, "jobs": 7}
    assert {name: row[name] for name in expected} == expected
    assert row["first_p50_ms"] == pytest.approx(10, rel=0.05)
    assert row["final_p50_ms"] == pytest.approx(40, rel=0.05)
    assert row["final_p99_ms"] == pytest.approx(400, rel=0.05)
    assert watched.record.images_per_s("end-0") == 50
    assert watched.record.traffic() == {("end-0", "edge-0"): 20}
    watched.pass_to(2.25)
    assert watched.row()["first"] == 0
    assert math.isnan(watched.row()["first_p50_ms"])
    assert watched.record.images_per_s("end-0") == 25


def test_a_minute_has_the_mean_of_its_rates_and_the_percentiles_of_all_its_answers(watched):
    watched.record.wall = lambda now: 60_000 + now
    for second in range(60):
        watched.pass_to(second + 0.5)
        watched.record.answered(answer(images=60 if second < 30 else 30, ms=10 if second < 30 else 1000))
    watched.pass_to(60.5)
    row = watched.row(watched.record.minutes)
    assert row["first"] == pytest.approx(45)
    assert row["first_p50_ms"] == pytest.approx(10, rel=0.05)
    assert row["first_p99_ms"] == pytest.approx(1000, rel=0.05)


async def test_who_waits_is_told_of_an_event_and_of_each_second_and_no_more_often(watched):
    watched.pass_to(0.5)
    version = watched.record.version
    waiting = asyncio.ensure_future(watched.record.changed(version))
    await asyncio.sleep(0)
    assert not waiting.done()
    watched.devices.register(registration(), 0.5)
    watched.pass_to(0.75)
    await asyncio.wait_for(waiting, 5)
    assert watched.record.version == version + 1
    for number in range(100):
        watched.devices.intend("end-0", DRAINED, 0.75)
        watched.devices.intend("end-0", NO_INTENT, 0.75 + number * 1e-4)
        watched.look(0.75 + number * 1e-4)
    assert watched.record.version == version + 1


def test_a_day_takes_less_than_20_mib():
    watched = Watched()
    tracemalloc.start()
    try:
        for number in range(100):
            watched.devices.register(registration(f"end-{number}"), 0.0)
        for second in range(0, 86_400, 20):  # a row in twenty; the events that are kept are many times replaced
            watched.look(float(second))
            for number in range(5):
                watched.record.attempted("lost", f"end-{number}", f"j-{second}", "x" * 500)
                watched.record.passed(f"end-{number}", "edge-0", 50)
                watched.record.answered(answer())
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(watched.record.events) == watched.record.events.maxlen
    assert used < 20 * 1024**2
