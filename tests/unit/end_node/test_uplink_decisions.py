"""Decisions of the uplink: hours, the wall clock, and a day on a budget."""

from __future__ import annotations

import ctypes
import gzip
import heapq
import math
import random
import time as clock
from datetime import datetime, time
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from end_node.uplink.budget import DailyBudget, lease_s
from end_node.uplink.clock import DeviceClock, system_synchronised
from end_node.uplink.hours import opens_in_s, time_of_day
from tests.unit.end_node.test_spool import FINER, LOCAL
from tierkit.wire.observations import (
    DeviceStatus,
    LocalAnswer,
    Observation,
    ObservationBatch,
    ReportedSource,
    write_batch,
)

NIGHT, OFFICE = (time(22), time(6)), (time(8, 30), time(17))
HOUR, DAY = 3600.0, 86400.0


@pytest.mark.parametrize(
    ("hours", "now", "expected"),
    [
        (None, None, 0.0),
        (NIGHT, None, 600.0),  # unknown: closed
        (NIGHT, time(21, 59, 50), 10.0),
        (NIGHT, time(22), 0.0),
        (NIGHT, time(0), 0.0),
        (NIGHT, time(5, 59, 59), 0.0),
        (NIGHT, time(6), 600.0),
        (OFFICE, time(8, 29), 60.0),
        (OFFICE, time(8, 30), 0.0),
        (OFFICE, time(17), 600.0),
        (OFFICE, time(23, 59), 600.0),
    ],
)
def test_hours(hours, now, expected):
    assert opens_in_s(hours, now) == expected


@given(st.times(), st.times(), st.times())
def test_what_is_closed_opens_when_it_says(first, last, now):
    if first == last:
        return
    wait_s = opens_in_s((first, last), now)
    assert 0.0 <= wait_s <= 600.0
    if 0.0 < wait_s < 600.0:
        after = (now.hour * 60 + now.minute) * 60 + now.second + now.microsecond / 1e6 + wait_s + 1e-5
        at = first.hour * 3600 + first.minute * 60 + first.second + first.microsecond / 1e6
        assert (after - at) % DAY < 1.0


@pytest.mark.parametrize(
    ("zone", "day", "open_hours"),
    [
        ("UTC", datetime(2026, 3, 29), 8),
        ("Europe/Berlin", datetime(2026, 3, 28), 7),  # the night in which summer time begins
        ("Europe/Berlin", datetime(2026, 10, 24), 9),
    ],
)
def test_hours_are_those_of_the_time_zone(zone, day, open_hours, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    clock.tzset()
    try:
        noon = day.replace(hour=12, tzinfo=ZoneInfo(zone)).timestamp()
        opened = [opens_in_s(NIGHT, time_of_day(noon + 60 * minute)) == 0.0 for minute in range(24 * 60)]
    finally:
        monkeypatch.undo()
        clock.tzset()
    assert sum(opened) == open_hours * 60


def test_the_wall_clock_comes_from_the_scheduler_or_a_synchronised_system():
    wall = DeviceClock()
    assert wall.wall(100.0, None) is None
    for nonsense in ("", "yesterday", "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "\0"):
        wall.heard(nonsense, 100.0)
    assert wall.wall(100.0, None) is None
    assert wall.wall(100.0, 1.7e9) == 1.7e9
    wall.heard("Sun, 06 Sep 2026 08:49:37 GMT", 100.0)
    expected = datetime(2026, 9, 6, 8, 49, 37, tzinfo=ZoneInfo("UTC")).timestamp()
    assert wall.wall(160.0, None) == pytest.approx(expected + 60, abs=1)
    assert wall.wall(160.0, 1.7e9) == wall.wall(160.0, None)  # whatever somebody sets the system clock to


@pytest.mark.parametrize(("state", "expected"), [(0, True), (1, True), (5, False), (-1, False)])
def test_a_synchronised_clock(state, expected, monkeypatch):
    class Library:
        def __init__(self, name: None) -> None: ...

        def adjtimex(self, buffer: object) -> object:
            return state

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert system_synchronised() is expected


def test_this_system_says_whether_its_clock_is_synchronised():
    assert system_synchronised() in (True, False)


@pytest.mark.parametrize(
    ("budget", "tls", "heartbeat_s"),
    [(5_000_000, False, 518.4), (50_000_000, False, 51.84), (5_000_000, True, 900.0), (10**12, True, 10.0)],
)
def test_heartbeats_cost_two_percent_of_the_budget(budget, tls, heartbeat_s):
    asked = lease_s(budget, tls=tls)
    assert asked == pytest.approx(3 * heartbeat_s)


def test_without_a_budget_nothing_waits():
    budget = DailyBudget(None, tls=False, hours=False, began=0.0)
    budget.spend(0.0, 10**12)
    assert lease_s(None, tls=True) is None
    assert budget.picture_in_s(1.0, 10**9) == 0.0
    assert (budget.answers_in_s(1, 0.2), budget.answers_in_s(1, 1.0), budget.answers_in_s(500, 0.0)) == (0.8, 0.0, 0.0)


def test_answers_go_in_batches_however_much_is_spent():
    budget = DailyBudget(5_000_000, tls=False, hours=False, began=0.0)
    budget.spend(0.0, 10**9)
    assert budget.answers_in_s(1, 0.0) == pytest.approx(518.4)
    assert (budget.answers_in_s(1, 600.0), budget.answers_in_s(500, 0.0)) == (0.0, 0.0)
    assert budget.picture_in_s(0.0, 1000) > 0.0


def test_a_picture_that_no_day_can_pay_never_goes():
    budget = DailyBudget(1_000_000, tls=False, hours=False, began=0.0)
    assert budget.picture_in_s(DAY, 1_000_001) == math.inf
    assert budget.picture_in_s(DAY, 800_000) == 0.0  # more than is saved at once, but the day covers it


def test_unused_budget_is_saved_for_six_hours_or_for_the_hours():
    for hours, expected in ((False, 0.25), (True, 0.9)):
        budget = DailyBudget(1_000_000, tls=False, hours=hours, began=0.0)
        now, sent = 3 * DAY, 0
        while budget.picture_in_s(now, 10_000) == 0.0:
            budget.spend(now, 10_000, pictures=10_000)
            sent += 10_000
        assert sent == pytest.approx(expected * 1_000_000, rel=0.15)


def test_a_restart_forgets_nothing_that_was_spent():
    before = DailyBudget(1_000_000, tls=False, hours=False, began=0.0)
    after = DailyBudget(1_000_000, tls=False, hours=False, began=HOUR)
    before.spend(0.0, 200_000, pictures=200_000)
    before.spend(1800.0, 100_000)
    after.load(HOUR, [(3540.0, 200_000), (1740.0, 100_000)])
    after.spend(HOUR, 5000)
    before.spend(HOUR, 5000)
    assert after.spent(HOUR) == before.spent(HOUR) == 305_000
    assert after.spent(DAY + 100.0) == 105_000


@given(
    st.lists(st.tuples(st.floats(0, 7200), st.integers(0, 400_000), st.booleans()), max_size=80),
    st.booleans(),
)
def test_pictures_never_take_the_last_24_hours_above_the_budget(steps, hours):
    budget = DailyBudget(1_000_000, tls=False, hours=hours, began=0.0)
    now = 0.0
    sent: list[tuple[float, int]] = []
    for wait_s, size, restart in steps:
        now += wait_s
        if restart:
            spent: dict[float, int] = {}
            for at, count in sent:
                end = (at // 60 + 1) * 60
                spent[end] = spent.get(end, 0) + count
            budget = DailyBudget(1_000_000, tls=False, hours=hours, began=now)
            budget.load(now, [(max(0.0, now - end), count) for end, count in spent.items() if end > now - DAY])
        wait_s = budget.picture_in_s(now, size)
        assert wait_s >= 0.0
        if wait_s == 0.0:
            budget.spend(now, size, pictures=size)
            sent.append((now, size))
        assert sum(count for at, count in sent if at > now - DAY) <= 1_000_000


class Shot(NamedTuple):
    margin: float
    at: float
    size: int


class Simulated(NamedTuple):
    worst_bytes: float
    """Most bytes in any 24 hours."""
    picture_bytes: int
    undelivered: int
    sent: list[Shot]
    passed_over: int
    """Pictures that were sent although a more unsure one waited."""
    hindsight: float
    """Share of the sent pictures that a choice with knowledge of the whole time would have sent too."""


OVERHEAD_BYTES = 1500
DEVICE = DeviceStatus(
    sources=(ReportedSource(name="gate", state="running"),),
    waiting_pictures=1753,
    spool_bytes=12_345_678,
    spool_size_bytes=256_000_000,
    spent_bytes=1_234_567,
    bytes_per_day=5_000_000,
)


def simulate(budget_bytes: int, days: float, *, hours: tuple[time, time] | None, seed: int) -> Simulated:
    """Let a device answer ten pictures a minute; a fifth of them are unsure. Batches are real ones, compressed."""
    chance = random.Random(seed)
    budget = DailyBudget(budget_bytes, tls=False, hours=hours is not None, began=0.0)
    beat_s = lease_s(budget_bytes, tls=False) / 3  # type: ignore[operator]
    waiting: list[Shot] = []
    margins: list[float] = []
    queued: list[Observation] = []
    spent: dict[int, int] = {}
    sent: list[Shot] = []
    pictures = passed_over = number = 0
    next_beat = last_batch = next_picture = 0.0

    def spend(now: float, count: int, of_pictures: int = 0) -> None:
        spent[int(now // 60)] = spent.get(int(now // 60), 0) + count
        budget.spend(now, count, pictures=of_pictures)

    def observed(now: float, better: bool) -> Observation:
        return Observation(
            source="gate",
            sequence=number,
            revision=int(better),
            age_s=chance.uniform(0, 600),
            taken_at=1.7e9 + now,
            local=LocalAnswer(
                model=LOCAL.model, sha256=LOCAL.sha256, label=chance.randrange(20), confidence=chance.random()
            ),
            finer=FINER if better else None,
            unsure=better,
            reason="",
        )

    def deliver(now: float) -> None:
        batch, queued[:] = queued[:500], queued[500:]
        body = ObservationBatch(
            node_id="camera-7", incarnation="0" * 32, spool="0" * 16, observations=tuple(batch), device=DEVICE
        )
        spend(now, len(gzip.compress(write_batch(body), mtime=0)) + OVERHEAD_BYTES)

    now = 0.0
    while now < days * DAY:
        number += 1
        shot = Shot(chance.random(), now, chance.randint(2000, 20_000))
        queued.append(observed(now, better=False))
        if shot.margin < 0.2:
            heapq.heappush(waiting, shot)
            margins.append(shot.margin)
        if now >= next_beat:
            spend(now, 600)
            next_beat += beat_s
        if queued and budget.answers_in_s(len(queued), now - last_batch) == 0.0:
            deliver(now)
            last_batch = now
        is_open = opens_in_s(hours, time(int(now % DAY // 3600), int(now % 3600 // 60))) == 0.0
        while waiting and is_open and now >= next_picture:
            wait_s = budget.picture_in_s(now, waiting[0].size + OVERHEAD_BYTES)
            if wait_s > 0.0:
                next_picture = now + wait_s
                break
            picture = heapq.heappop(waiting)
            passed_over += any(each.margin < picture.margin for each in waiting)
            spend(now, picture.size + OVERHEAD_BYTES, picture.size + OVERHEAD_BYTES)
            sent.append(picture)
            pictures += picture.size + OVERHEAD_BYTES
            queued.append(observed(now, better=True))
        now += 6.0
    while queued:
        deliver(now)
    worst = rolling = 0
    for minute in range(int(days * 1440) + 1):
        rolling += spent.get(minute, 0) - spent.get(minute - 1440, 0)
        worst = max(worst, rolling)
    ideal = sorted(margins)[len(sent) - 1]
    hindsight = sum(shot.margin <= ideal for shot in sent) / len(sent)
    return Simulated(worst, pictures, len(queued), sent, passed_over, hindsight)


@pytest.mark.parametrize("hours", [None, NIGHT], ids=["always", "night"])
@pytest.mark.parametrize("seed", [1, 2])
def test_two_days_on_five_megabytes_each(hours, seed):
    """Ten pictures a minute: the budget holds in any 24 hours, and the most unsure picture goes first."""
    done = simulate(5_000_000, 2, hours=hours, seed=seed)
    assert done.worst_bytes <= 5_050_000
    assert (done.undelivered, done.passed_over) == (0, 0)
    assert done.picture_bytes >= 0.7 * 10_000_000  # the rest went to pictures
    assert done.hindsight >= 0.95
