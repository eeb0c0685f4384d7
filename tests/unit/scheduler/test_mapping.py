"""Eq. 1 to 6 against hand-computed cases and the paper's own figures, and who forwards to whom."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from scheduler.core.device import Node, natural_order
from scheduler.placement.mapping import (
    Reach,
    Route,
    TaskTimes,
    map_count,
    route_of,
    share_to_cloud,
    time_end,
    time_end_cloud,
    time_end_edge,
    time_mapping,
)
from tierkit.types import Scheme, Tier

# Table 2 of the paper, overall processing time per image, for tasks of 50 images. Its "Proc. time" includes the
# communication latency (0.5 s to an edge node, 1 s to the cloud), so t^p is what is left.
PAPER_END = TaskTimes(communication_s=0.0, processing_s=50 * 0.0104)
PAPER_EDGE = TaskTimes(communication_s=0.5, processing_s=50 * 0.0183 - 0.5)
PAPER_CLOUD = TaskTimes(communication_s=1.0, processing_s=50 * 0.0310 - 1.0)


def nodes(tier: Tier, count: int) -> list[Node]:
    return [
        Node(node_id=f"{tier}-{k}", tier=tier, url=f"http://{tier}{k}", model="m", ms_per_image=1.0)
        for k in range(count)
    ]


def route(
    scheme: Scheme, position: int, edges: int, clouds: int, n_map: int = 1, *, allowed: tuple[str, ...] = ()
) -> Route:
    (end,) = nodes(Tier.END, 1)
    return route_of(
        scheme,
        end=replace(end, node_id=f"end-{position}", allowed_upstreams=allowed),
        position=position,
        reach=Reach(edges=nodes(Tier.EDGE, edges), clouds=nodes(Tier.CLOUD, clouds)),
        n_map=n_map,
    )


def plan(scheme: Scheme, ends: int, edges: int, clouds: int, n_map: int = 1) -> dict[str, list[str]]:
    routes = [route(scheme, position, edges, clouds, n_map) for position in range(ends)]
    return {way.end: [node.node_id for node in way.upstreams] for way in routes}


def first(scheme: Scheme, ends: int, edges: int, clouds: int, n_map: int = 1) -> list[str | None]:
    return [upstreams[0] if upstreams else None for upstreams in plan(scheme, ends, edges, clouds, n_map).values()]


@pytest.mark.parametrize(
    ("tasks", "n_end", "seconds"),
    [(200, 8, 13.0), (200, 1, 104.0), (1, 1, 0.52), (0, 3, 0.0)],
)
def test_eq1_end(tasks, n_end, seconds):
    assert time_end(tasks, n_end, PAPER_END) == pytest.approx(seconds)


def test_eq2_end_cloud():
    # 200/8 * 0.52 + 200/1 * 1.55 = 13 + 310
    assert time_end_cloud(200, 8, 1, PAPER_END, PAPER_CLOUD) == pytest.approx(323.0)
    assert time_end_cloud(200, 8, 2, PAPER_END, PAPER_CLOUD) == pytest.approx(168.0)


def test_eq3_end_edge():
    # 13 + 200/4 * 0.915
    assert time_end_edge(200, 8, 4, PAPER_END, PAPER_EDGE) == pytest.approx(58.75)


@pytest.mark.parametrize(
    ("end", "edge", "n_map"),
    [
        (PAPER_END, PAPER_EDGE, 2),  # 0.915 / 0.52 = 1.76
        (TaskTimes(communication_s=0, processing_s=1), TaskTimes(communication_s=1, processing_s=2), 3),
        (TaskTimes(communication_s=0, processing_s=1), TaskTimes(communication_s=1.001, processing_s=2), 4),
        (TaskTimes(communication_s=0, processing_s=1), TaskTimes(communication_s=0, processing_s=0.1), 1),
        (TaskTimes(communication_s=0, processing_s=0.1), TaskTimes(communication_s=0.1, processing_s=0.2), 3),
        (TaskTimes(communication_s=0, processing_s=0), TaskTimes(communication_s=0, processing_s=1), 1),
        (TaskTimes(communication_s=0, processing_s=1), TaskTimes(communication_s=0, processing_s=0), 1),
    ],
)
def test_eq4_map_count(end, edge, n_map):
    assert map_count(end, edge) == n_map


@pytest.mark.parametrize(
    ("n_end", "n_edge", "n_map", "theta"),
    [(8, 4, 1, 0.5), (8, 4, 2, 0.0), (5, 4, 1, 0.2), (4, 4, 1, 0.0), (3, 4, 2, 0.0), (8, 0, 1, 1.0), (1, 0, 3, 1.0)],
)
def test_eq5_share_to_cloud(n_end, n_edge, n_map, theta):
    assert share_to_cloud(n_end, n_edge, n_map) == pytest.approx(theta)


def test_eq6_mapping_lies_between_its_two_parts():
    assert time_mapping(0.5, 323.0, 58.75) == pytest.approx(190.875)
    assert time_mapping(0.0, 323.0, 58.75) == 58.75
    assert time_mapping(1.0, 323.0, 58.75) == 323.0


@pytest.mark.parametrize(
    ("ends", "edges", "clouds", "n_map", "expected"),
    [
        # Figure 3: "the first 4 end devices send data to 4 edge devices correspondingly, the rest to the cloud".
        (8, 4, 1, 1, ["edge-0", "edge-1", "edge-2", "edge-3", "cloud-0", "cloud-0", "cloud-0", "cloud-0"]),
        (3, 4, 1, 1, ["edge-0", "edge-1", "edge-2"]),
        (8, 4, 1, 2, ["edge-0", "edge-1", "edge-2", "edge-3"] * 2),
        (5, 2, 2, 1, ["edge-0", "edge-1", "cloud-0", "cloud-1", "cloud-0"]),
        # Fewer end devices than places: no edge node idles beside a doubly used one.
        (2, 2, 1, 2, ["edge-0", "edge-1"]),
        (2, 0, 1, 1, ["cloud-0", "cloud-0"]),
        (3, 1, 0, 1, ["edge-0", "edge-0", "edge-0"]),
        (3, 2, 0, 1, ["edge-0", "edge-1", "edge-0"]),
        (2, 0, 0, 1, [None, None]),
        (0, 1, 1, 1, []),
    ],
)
def test_mapping_pairs(ends, edges, clouds, n_map, expected):
    assert first(Scheme.MAPPING, ends, edges, clouds, n_map) == expected


def test_mapping_keeps_every_other_upper_node_in_reserve_own_tier_first():
    assert plan(Scheme.MAPPING, 3, 2, 1) == {
        "end-0": ["edge-0", "edge-1", "cloud-0"],
        "end-1": ["edge-1", "edge-0", "cloud-0"],
        "end-2": ["cloud-0", "edge-0", "edge-1"],
    }


@pytest.mark.parametrize(
    ("scheme", "position", "allowed", "expected"),
    [
        (Scheme.MAPPING, 0, ("http://edge1",), ["edge-1"]),
        (Scheme.MAPPING, 0, ("http://edge1", "http://cloud0"), ["edge-1", "cloud-0"]),
        (Scheme.MAPPING, 0, ("http://cloud0",), ["cloud-0"]),
        (Scheme.MAPPING, 2, ("http://edge1",), ["edge-1"]),  # the cloud's place, which it may not take
        (Scheme.MAPPING, 1, ("http://elsewhere",), []),
        (Scheme.END_EDGE, 0, ("http://edge1",), ["edge-1"]),
        (Scheme.END_CLOUD, 0, ("http://edge1",), []),
        (Scheme.ADAPTIVE, 0, ("http://edge1", "http://cloud0"), ["edge-1", "cloud-0"]),
    ],
)
def test_a_device_is_mapped_to_nodes_of_its_own_list(scheme, position, allowed, expected):
    way = route(scheme, position, 2, 1, allowed=allowed)
    assert [node.node_id for node in way.upstreams] == expected
    assert "--allowed-upstreams" in way.reason
    assert all(node.node_id in expected for turn in range(3) for node in way.for_task(turn))


@given(st.data())
def test_a_list_takes_nodes_from_a_route_and_changes_nothing_else_of_it(data):
    edges, clouds = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    scheme, position = data.draw(st.sampled_from(list(Scheme))), data.draw(st.integers(0, 30))
    known = [node.url for node in (*nodes(Tier.EDGE, edges), *nodes(Tier.CLOUD, clouds))]
    allowed = tuple(data.draw(st.sets(st.sampled_from(known)) if known else st.just(set())))
    given_list = route(scheme, position, edges, clouds, allowed=allowed or ("http://nowhere",)).upstreams
    free = [node.node_id for node in route(scheme, position, edges, clouds).upstreams]
    kept = [node.node_id for node in given_list]
    assert all(node.url in allowed for node in given_list)
    # Of a route that has room for all nodes, exactly the forbidden ones are missing.
    if max(edges, clouds) <= 8:
        assert kept == [node_id for node_id in free if node_id in kept]
        assert {node.url for node in route(scheme, position, edges, clouds).upstreams} & set(allowed) == {
            node.url for node in given_list
        }


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [(Scheme.END, []), (Scheme.END_EDGE, ["edge-0", "edge-1"]), (Scheme.END_CLOUD, ["cloud-0"])],
)
def test_the_other_schemes_use_one_upper_tier(scheme, expected):
    assert plan(scheme, 2, 2, 1) == {"end-0": expected, "end-1": expected}


def test_end_edge_sends_task_after_task_to_the_edge_nodes_in_sequential_order():
    way = route(Scheme.END_EDGE, 0, edges=3, clouds=0)
    order = [[node.node_id for node in way.for_task(turn)] for turn in range(4)]
    assert order == [
        ["edge-0", "edge-1", "edge-2"],
        ["edge-1", "edge-2", "edge-0"],
        ["edge-2", "edge-0", "edge-1"],
        ["edge-0", "edge-1", "edge-2"],
    ]


def test_a_mapped_device_keeps_its_upper_node_from_task_to_task():
    way = route(Scheme.MAPPING, 0, edges=2, clouds=1)
    assert {way.for_task(turn)[0].node_id for turn in range(5)} == {"edge-0"}


@pytest.mark.parametrize("scheme", list(Scheme))
def test_every_pair_has_a_reason(scheme):
    for edges in (0, 2):
        for clouds in (0, 1):
            assert route(scheme, 0, edges, clouds).reason


def test_the_device_list_is_in_natural_order():
    ids = ["end-10", "end-2", "edge-1", "end-1", "a2b", "a10b"]
    assert sorted(ids, key=natural_order) == ["a2b", "a10b", "edge-1", "end-1", "end-2", "end-10"]


def test_n_map_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        route(Scheme.MAPPING, 0, edges=0, clouds=0, n_map=0)
