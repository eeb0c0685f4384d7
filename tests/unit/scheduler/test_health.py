"""The failure detector's verdicts, and the accrual detector under them."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from scheduler.core.health import (
    MIN_DEVIATION_S,
    Arrivals,
    DetectorTimes,
    Evidence,
    Probe,
    hears_nobody,
    judge,
    phi,
    stalled_after_s,
    suspect_after_s,
)
from scheduler.settings import SchedulerSettings
from tierkit.types import Health

TIMES = SchedulerSettings().detector_times
ON_TIME = Evidence(silent_s=0.1, suspect_after_s=0.42)
LATE = replace(ON_TIME, silent_s=0.45)
REACHED = replace(ON_TIME, reached=True)
STUCK = replace(ON_TIME, owed=50, ms_per_image=1.0, idle_s=5.2)


@pytest.mark.parametrize(
    ("evidence", "health", "reason"),
    [
        (ON_TIME, Health.ALIVE, "on time"),
        (replace(ON_TIME, silent_s=0.42), Health.ALIVE, "on time"),
        (LATE, Health.SUSPECT, "no heartbeat for 0.45 s, expected within 0.42 s"),
        # The probe is the second opinion on silence.
        (replace(LATE, reached=True, probe=Probe.ANSWERED), Health.SUSPECT, "answers the scheduler's probe"),
        (replace(LATE, reached=True, probe=Probe.SILENT), Health.DEAD, "does not answer the scheduler's probe"),
        (replace(LATE, reached=True, probe=Probe.REFUSED), Health.DEAD, "its process has ended"),
        # A node whose heartbeats come may be slow to answer; one that refuses connections has ended.
        (replace(REACHED, probe=Probe.SILENT), Health.ALIVE, "on time"),
        (replace(REACHED, probe=Probe.REFUSED), Health.DEAD, "its process has ended"),
        # One that was never reached stands behind a wall: its lease alone decides.
        (replace(ON_TIME, probe=Probe.REFUSED), Health.ALIVE, "on time"),
        (replace(LATE, probe=Probe.REFUSED), Health.SUSPECT, "refuses connections"),
        (replace(LATE, silent_s=3.0, probe=Probe.SILENT), Health.SUSPECT, "does not answer"),
        (replace(LATE, silent_s=3.01), Health.DEAD, "its lease of 3 s has run out"),
        (replace(LATE, silent_s=3.01, reached=True, probe=Probe.ANSWERED), Health.DEAD, "run out"),
        # Failed attempts.
        (replace(ON_TIME, accusation="connection reset"), Health.SUSPECT, "connection reset"),
        (replace(REACHED, accusation="connection reset", probe=Probe.SILENT), Health.SUSPECT, "connection reset"),
        (replace(REACHED, accusation="connection reset", probe=Probe.REFUSED), Health.DEAD, "has ended"),
        # Wrong answers: whatever else is known of the node counts more.
        (replace(ON_TIME, wrong="its last answer was wrong"), Health.SUSPECT, "its last answer was wrong"),
        (replace(LATE, wrong="its last answer was wrong"), Health.SUSPECT, "no heartbeat"),
        (replace(ON_TIME, wrong="its last answer was wrong", draining=True), Health.DRAINING, "takes nothing new"),
        (replace(REACHED, wrong="its last answer was wrong", probe=Probe.REFUSED), Health.DEAD, "has ended"),
        # A node that leaves closes its socket before it ends.
        (replace(ON_TIME, draining=True), Health.DRAINING, "takes nothing new"),
        (replace(ON_TIME, draining=True, accusation="reset"), Health.DRAINING, "takes nothing new"),
        (replace(REACHED, draining=True, probe=Probe.REFUSED), Health.DRAINING, "takes nothing new"),
        (replace(LATE, draining=True), Health.SUSPECT, "no heartbeat"),
        (replace(LATE, draining=True, reached=True, probe=Probe.REFUSED), Health.DEAD, "has ended"),
        # Heartbeats are not work.
        (STUCK, Health.SUSPECT, "no progress: 50 images for 5.2 s, at most 5.0 s expected"),
        (replace(STUCK, idle_s=4.9), Health.ALIVE, "on time"),
        (replace(STUCK, draining=True), Health.SUSPECT, "no progress"),
        (replace(STUCK, silent_s=4.0), Health.DEAD, "run out"),
    ],
)
def test_judge(evidence, health, reason):
    verdict = judge(evidence, TIMES)
    assert verdict.health is health
    assert reason in verdict.reason
    assert verdict.keeps_tasks == (health is not Health.DEAD and "no progress" not in reason)


SEVERITY = [Health.ALIVE, Health.DRAINING, Health.SUSPECT, Health.DEAD]
evidence = st.builds(
    Evidence,
    silent_s=st.floats(0, 5),
    suspect_after_s=st.floats(0.05, 0.5),
    probe=st.sampled_from([None, *Probe]),
    reached=st.booleans(),
    accusation=st.sampled_from([None, "reset"]),
    wrong=st.sampled_from([None, "500"]),
    draining=st.booleans(),
    owed=st.sampled_from([0, 50]),
    ms_per_image=st.just(1.0),
    idle_s=st.floats(0, 10),
)


@given(evidence, st.floats(0, 5))
def test_longer_silence_never_makes_a_node_healthier(one, more_s):
    before, after = judge(one, TIMES), judge(replace(one, silent_s=one.silent_s + more_s), TIMES)
    assert SEVERITY.index(after.health) >= SEVERITY.index(before.health)
    assert before.keeps_tasks or not after.keeps_tasks


@given(evidence)
def test_no_node_is_dead_by_silence_alone_before_its_lease_is_over(one):
    if one.silent_s <= TIMES.lease_s and one.probe in (None, Probe.ANSWERED):
        assert judge(one, TIMES).health is not Health.DEAD


@pytest.mark.parametrize(
    ("nodes", "nobody"),
    [
        ([], False),
        ([(9.0, 0.5)] * 2, False),  # each for a reason of its own
        ([(0.51, 0.5)] * 3, True),
        ([(0.5, 0.5)] * 3, False),
        ([(0.51, 0.5), (9.0, 0.42), (0.43, 0.42), (0.1, 0.42)], False),
        ([(0.51, 0.5), (9.0, 0.42), (0.43, 0.42), (0.45, 0.42)], True),
    ],
)
def test_nobody_is_heard_where_all_of_three_or_more_are_late(nodes, nobody):
    assert hears_nobody(nodes) is nobody


def test_the_first_node_that_is_heard_settles_it():
    nodes = iter([(9.0, 0.5), (0.1, 0.5), (9.0, 0.5)])
    assert not hears_nobody(nodes)
    assert next(nodes) == (9.0, 0.5)


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [
        (0.2, -math.log10(0.5)),
        (0.2 + 0.04, -math.log10(0.158655)),  # one deviation
        (0.2 + 3 * 0.04, -math.log10(0.00134990)),
        (0.0, 0.0),
        (60.0, 300.0),
    ],
)
def test_phi_is_the_logarithm_of_the_normal_tail(silent_s, expected):
    assert phi(silent_s, 0.2, 0.04) == pytest.approx(expected, abs=1e-5)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.05, 2), st.floats(0.04, 2))
def test_phi_grows_with_silence(silent_s, more_s, mean_s, deviation_s):
    assert 0 <= phi(silent_s, mean_s, deviation_s) <= phi(silent_s + more_s, mean_s, deviation_s) <= 300


intervals = st.lists(st.floats(0, 3), min_size=1, max_size=100)


@given(intervals)
def test_the_threshold_on_silence_is_phi_8_within_its_bounds(history):
    arrivals = Arrivals(TIMES.heartbeat_s)
    for interval_s in history:
        arrivals.add(interval_s)
    mean_s, deviation_s = arrivals.fit()
    threshold_s = suspect_after_s(mean_s, deviation_s, TIMES)
    assert TIMES.heartbeat_s < threshold_s <= TIMES.suspect_s
    unbounded_s = suspect_after_s(mean_s, deviation_s, replace(TIMES, suspect_s=math.inf))
    assert phi(unbounded_s, mean_s, deviation_s) == pytest.approx(8, abs=1e-3)


@given(intervals, st.integers(1, 200))
def test_a_late_burst_does_not_make_regular_heartbeats_suspect(history, burst):
    arrivals = Arrivals(TIMES.heartbeat_s)
    for interval_s in [*history, *[0.0] * burst]:
        arrivals.add(interval_s)
    assert suspect_after_s(*arrivals.fit(), TIMES) > 1.1 * TIMES.heartbeat_s


def test_a_node_that_beats_regularly_is_suspect_earlier_than_an_irregular_one():
    regular, irregular = Arrivals(0.2), Arrivals(0.2)
    for number in range(100):
        regular.add(0.2)
        irregular.add(0.1 if number % 2 else 0.3)
    times = replace(TIMES, suspect_s=10.0)
    assert suspect_after_s(*regular.fit(), times) == pytest.approx(0.2 + 5.612 * 0.04, abs=1e-3)
    assert suspect_after_s(*irregular.fit(), times) == pytest.approx(0.2 + 5.612 * 0.1, abs=1e-3)


@given(st.lists(st.floats(0, 3), max_size=250))
def test_mean_and_deviation_are_those_of_the_last_intervals(history):
    arrivals = Arrivals(0.2)
    for interval_s in history:
        arrivals.add(interval_s)
    kept = [0.15, 0.25, *history][-100:]
    expected = max(0.2, fmean(kept)), max(MIN_DEVIATION_S, pstdev(kept))
    assert arrivals.fit() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("images", "ms_per_image", "expected_s"), [(50, 1.0, 5.0), (50, 7.41, 5.0), (64, 60.0, 38.4), (3000, 7.41, 222.3)]
)
def test_a_slow_node_is_given_time_for_what_it_owes(images, ms_per_image, expected_s):
    assert stalled_after_s(images, ms_per_image, TIMES) == pytest.approx(expected_s)


def test_the_defaults_keep_the_promise_of_one_second():
    """From the last heartbeat: suspicion at `suspect_s` at the latest, a sweep of 0.05 s, then one probe."""
    assert isinstance(TIMES, DetectorTimes)
    assert TIMES.suspect_s + 0.05 + TIMES.probe_s < 1.0
