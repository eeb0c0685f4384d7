"""The pipelined bound against cases computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.placement.bound import NodeCounts, bound_of_scheme, bound_of_split, least_bound
from scheduler.placement.mapping import FleetTimes, TaskTimes
from tierkit.types import Scheme, Tier

# 50 images at 7.41, 5.99 and 7.36 ms; 0.5 s to an edge node and back, 1 s to the cloud.
PAPER = FleetTimes(
    end=TaskTimes(communication_s=0.0, processing_s=0.3705),
    edge=TaskTimes(communication_s=0.5, processing_s=0.2995),
    cloud=TaskTimes(communication_s=1.0, processing_s=0.368),
)


def counts(end: int, edge: int = 4, cloud: int = 1) -> NodeCounts:
    return NodeCounts(end=end, edge=edge, cloud=cloud)


@pytest.mark.parametrize(
    ("scheme", "ends", "seconds"),
    [
        # 200 * 0.3705, and the last coarse answer goes on to an edge node: 0.5 + 0.2995
        (Scheme.END_EDGE, 1, 74.1 + 0.7995),
        (Scheme.END_CLOUD, 1, 74.1 + 1.368),
        (Scheme.END, 8, 25 * 0.3705),
        # 200 * 0.2995 / 4 = 14.975 after the first coarse answer and the link
        (Scheme.END_EDGE, 8, 14.975 + 0.3705 + 0.5),
        # 200 * 0.368 = 73.6
        (Scheme.END_CLOUD, 8, 73.6 + 0.3705 + 1.0),
        # theta = 1/2: 100 tasks for the one cloud
        (Scheme.MAPPING, 8, 36.8 + 0.3705 + 1.0),
        # 0.3705 + 0.5 + 168 * 0.2995 / 4, with 32 tasks for the cloud: 0.3705 + 1 + 32 * 0.368 = 13.1465
        (Scheme.ADAPTIVE, 8, 13.4495),
        (Scheme.ADAPTIVE, 5, 40 * 0.3705 + 0.7995),
    ],
)
def test_bounds_of_the_papers_machines(scheme, ends, seconds):
    assert bound_of_scheme(scheme, 200, counts(ends), PAPER).seconds == pytest.approx(seconds)


def test_one_tier_alone():
    assert least_bound(10, counts(2, cloud=0), PAPER).edge_tasks == 10
    assert least_bound(10, counts(2, edge=0), PAPER).edge_tasks == 0
    with pytest.raises(ValueError, match="no edge node"):
        least_bound(10, counts(2, edge=0, cloud=0), PAPER)


@settings(deadline=None)
@given(tasks=st.integers(1, 300), ends=st.integers(1, 12), edge=st.integers(1, 6), cloud=st.integers(1, 3))
def test_no_split_is_below_the_least_bound(tasks, ends, edge, cloud):
    fleet = counts(ends, edge, cloud)
    least = least_bound(tasks, fleet, PAPER).seconds
    for edge_tasks in {0, tasks // 2, tasks}:
        assert bound_of_split(tasks, edge_tasks, tasks - edge_tasks, fleet, PAPER).seconds >= least


SECONDS = st.floats(0.001, 5.0)


@settings(deadline=None)
@given(
    tasks=st.integers(1, 60),
    fleet=st.builds(NodeCounts, end=st.integers(1, 12), edge=st.integers(1, 6), cloud=st.integers(1, 3)),
    times=st.builds(
        FleetTimes, **{tier: st.builds(TaskTimes, communication_s=SECONDS, processing_s=SECONDS) for tier in Tier}
    ),
)
def test_the_least_bound_is_that_of_the_best_of_all_splits(tasks, fleet, times):
    splits = [bound_of_split(tasks, edge, tasks - edge, fleet, times) for edge in range(tasks, -1, -1)]
    least = least_bound(tasks, fleet, times)
    assert least.seconds == min(bound.seconds for bound in splits)
    assert least.seconds == splits[tasks - least.edge_tasks].seconds


def test_the_least_bound_does_not_take_longer_for_more_tasks():
    """With so many tasks a look at each split would not end."""
    bound = bound_of_scheme(Scheme.ADAPTIVE, 10**12, counts(8), PAPER)
    share = (4 / 0.2995) / (4 / 0.2995 + 1 / 0.368)  # each tier gets what it can compute in the same time
    assert bound.edge_tasks / 10**12 == pytest.approx(share)
