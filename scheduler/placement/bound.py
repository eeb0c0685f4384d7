"""Lower bounds of the makespan of a job, to be compared with measured times. Pure functions.

The paper adds the two stages of a task up (Eq. 1 to 6). Terrace overlaps them, so its bound is the bound of a pipeline
whose stages work at the same time. Of its N_t tasks, n_edge get their fine answers from edge nodes, and n_cloud from
clouds. Per task, t^p is the processing time and t^c the communication time there and back; links delay, they are not
occupied:

    end devices: t^c_end + N_t t^p_end / N_end + the shortest way on: min over the tiers used of t^c + t^p
    edge nodes: t^c_end + t^p_end + t^c_edge + n_edge t^p_edge / N_edge
    clouds: t^c_end + t^p_end + t^c_cloud + n_cloud t^p_cloud / N_cloud

The largest of the three is the bound: no order of the tasks is faster. It is the largest occupancy plus the latency of
one task along its path, without the step that the occupancy counts already.
"""

from __future__ import annotations

import math

from msgspec import Struct

from scheduler.placement.mapping import FleetTimes, TaskTimes, share_to_cloud
from tierkit.types import Scheme, Tier

__all__ = ["Bound", "NodeCounts", "bound_of_scheme", "bound_of_split", "least_bound"]


class NodeCounts(Struct, frozen=True, kw_only=True):
    """Nodes per tier."""

    end: int
    edge: int = 0
    cloud: int = 0


class Bound(Struct, frozen=True, kw_only=True):
    """The least time for a job, in seconds from its first dispatch."""

    seconds: float
    edge_tasks: int
    """Fine answers that come from the edge nodes."""


def bound_of_split(tasks: int, edge_tasks: int, cloud_tasks: int, counts: NodeCounts, times: FleetTimes) -> Bound:
    """The bound with these numbers of fine answers from each tier.

    Raises:
        ValueError: a tier has tasks and no nodes or no times.
    """
    tiers = ((Tier.EDGE, edge_tasks, counts.edge, times.edge), (Tier.CLOUD, cloud_tasks, counts.cloud, times.cloud))
    used = [(share, nodes, _known(tier, nodes, task)) for tier, share, nodes, task in tiers if share]
    way_on_s = min((task.total_s for _, _, task in used), default=0.0)
    ends_s = times.end.communication_s + tasks * times.end.processing_s / counts.end + way_on_s
    stages_s = [
        times.end.total_s + task.communication_s + share * task.processing_s / nodes for share, nodes, task in used
    ]
    return Bound(seconds=max([ends_s, *stages_s]), edge_tasks=edge_tasks)


def bound_of_scheme(scheme: Scheme, tasks: int, counts: NodeCounts, times: FleetTimes, *, n_map: int = 1) -> Bound:
    """Return the bound of a scheme; `adaptive` may choose the split with the least bound.

    Args:
        n_map: end devices per edge node. Used by `mapping`, which gives each end device the same number of tasks.

    Raises:
        ValueError: the scheme has no upstream node here.
    """
    match scheme:
        case Scheme.END:
            return bound_of_split(tasks, 0, 0, counts, times)
        case Scheme.END_EDGE:
            return bound_of_split(tasks, tasks, 0, counts, times)
        case Scheme.END_CLOUD:
            return bound_of_split(tasks, 0, tasks, counts, times)
        case Scheme.MAPPING:
            to_cloud = round(tasks * share_to_cloud(counts.end, counts.edge, n_map)) if counts.cloud else 0
            return bound_of_split(tasks, tasks - to_cloud, to_cloud, counts, times)
        case _:
            return least_bound(tasks, counts, times)


def least_bound(tasks: int, counts: NodeCounts, times: FleetTimes) -> Bound:
    """Return the bound with the best split between the tiers; of equal splits, the largest share for the edge nodes.

    With both tiers in use, the edge nodes' part grows with n_edge, and the clouds' part shrinks. So the best split is
    next to the point where the two are equal, or further along for as long as the end devices take longer. Only a few
    splits are examined, however many tasks there are.

    Raises:
        ValueError: there is no upstream node.
    """
    if not counts.cloud or times.cloud is None:
        return bound_of_split(tasks, tasks, 0, counts, times)
    if not counts.edge or times.edge is None:
        return bound_of_split(tasks, 0, tasks, counts, times)
    edge_s, cloud_s = times.edge.processing_s / counts.edge, times.cloud.processing_s / counts.cloud
    equal = (times.cloud.communication_s - times.edge.communication_s + tasks * cloud_s) / (edge_s + cloud_s)
    splits = {0, tasks, *_near(equal, tasks)}
    best = min(bound_of_split(tasks, split, tasks - split, counts, times).seconds for split in splits)
    splits |= _near((best - times.end.total_s - times.edge.communication_s) / edge_s, tasks)
    return min(
        (bound_of_split(tasks, split, tasks - split, counts, times) for split in sorted(splits, reverse=True)),
        key=lambda bound: bound.seconds,
    )


def _near(split: float, tasks: int) -> set[int]:
    """Return the whole splits around a number, and their neighbours: the number may be off by rounding."""
    return {min(tasks, max(0, math.floor(split) + step)) for step in (-1, 0, 1, 2)}


def _known(tier: Tier, nodes: int, task: TaskTimes | None) -> TaskTimes:
    if not nodes or task is None:
        raise ValueError(f"there is no {tier} node whose times are known")
    return task
