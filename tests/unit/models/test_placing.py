"""The cut of a network between an end device and an upstream node."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.graph import read_graph
from models.manifest import load_manifest, weights_folder
from models.placing import Costing, CutCost, CutPoint, chosen_cut, consistent, front, place, sides
from models.session import open_session
from models.speed import probe_images
from tierkit.errors import InvalidInput


def cut(tensor: str, size_bytes: int, below_ms: float, above_ms: float) -> CutCost:
    return CutCost(tensor=tensor, size_bytes=size_bytes, layers=0, below_ms=below_ms, above_ms=above_ms)


CUTS = [cut("images", 3000, 0, 10), cut("a", 2000, 2, 8), cut("b", 500, 6, 4), cut("logits", 100, 10, 0)]


@pytest.mark.parametrize(
    ("costing", "chosen"),
    [
        # The limit alone: as few layers below as it allows, since the upstream node is as quick or quicker.
        (Costing(most_bytes=3000), "images"),
        (Costing(most_bytes=2999), "a"),
        (Costing(most_bytes=2999, device_factor=10), "a"),
        (Costing(most_bytes=500), "b"),
        (Costing(most_bytes=499), "logits"),
        # The link: 1 Mbit/s sends 125 bytes a millisecond.
        (Costing(link_mbps=1), "logits"),
        (Costing(link_mbps=1, device_factor=2), "b"),
        (Costing(link_mbps=1, device_factor=4), "a"),  # as quick as b, and less to do for the device
        (Costing(link_mbps=1, device_factor=10), "images"),
        (Costing(link_mbps=1, device_factor=10, most_bytes=2500), "a"),
        (Costing(link_mbps=1000, device_factor=4), "images"),
        # A slower node above leaves all to the device.
        (Costing(most_bytes=3000, upstream_factor=2), "logits"),
    ],
)
def test_the_quickest_cut_that_the_limit_allows_is_chosen(costing: Costing, chosen: str) -> None:
    assert chosen_cut(place(CUTS, costing)).tensor == chosen


def test_a_limit_below_all_cuts_names_the_least() -> None:
    with pytest.raises(InvalidInput, match="100 bytes"):
        chosen_cut(place(CUTS, Costing(most_bytes=99)))


def test_times_and_the_upper_limit_of_the_computation_below() -> None:
    pixels, first, *_ = place(CUTS, Costing(link_mbps=1, device_factor=3, upstream_factor=0.5))
    assert (pixels.send_ms, pixels.above_ms, pixels.total_ms, pixels.most_below_ms) == (24, 5, 29, 0)
    assert (first.below_ms, first.send_ms, first.above_ms, first.total_ms) == (6, 16, 4, 26)
    assert first.most_below_ms == 29 - 16 - 4


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.one_of(st.none(), st.integers(1, 6000)),
    st.one_of(st.none(), st.floats(0.01, 1000)),
)
def test_no_allowed_cut_is_quicker_than_the_chosen_one(costs, device, upstream, most, link) -> None:
    cuts = [cut(str(at), *each) for at, each in enumerate(costs)]
    costing = Costing(device_factor=device, upstream_factor=upstream, most_bytes=most, link_mbps=link)
    placements = place(cuts, costing)
    allowed = [each for each in placements if most is None or each.size_bytes <= most]
    chosen = [each for each in placements if each.chosen]
    assert len(chosen) == bool(allowed)
    if chosen:
        assert chosen[0] in allowed
        assert chosen[0].total_ms == min(each.total_ms for each in allowed)
        # Li's limit: a cut pays against the pixels exactly up to it.
        pays = chosen[0].total_ms <= placements[0].total_ms
        assert pays == (chosen[0].below_ms <= chosen[0].most_below_ms) or chosen[0].total_ms == pytest.approx(
            placements[0].total_ms
        )


def test_more_layers_never_take_less_time() -> None:
    noisy = [cut("images", 9, 0, 10), cut("a", 8, 7, 12), cut("b", 7, 5, 4), cut("logits", 6, 9, 0)]
    assert [(each.below_ms, each.above_ms) for each in consistent(noisy)] == [(0, 10), (5, 10), (5, 4), (9, 0)]


@pytest.mark.parametrize("tier", ["end", "edge", "cloud"])
def test_both_sides_of_each_cut_give_the_answer_of_the_whole(tier: str) -> None:
    entry = load_manifest().default_for(tier)
    content = (weights_folder() / entry.file).read_bytes()
    graph = read_graph(content, entry.name)
    points = front(graph)
    sizes = [point.size_bytes for point in points]
    assert points[0] == CutPoint(tensor="images", size_bytes=3072, layers=0, nodes=0)
    assert sizes == sorted(set(sizes), reverse=True)
    assert [point.layers for point in points] == sorted({point.layers for point in points})
    images = probe_images(entry.input_shape)[:5]
    (expected,) = open_session(content, entry.name).run(None, {"images": images})
    for point in points[1:]:
        head, tail = (open_session(side, entry.name) for side in sides(content, graph, point))
        (values,) = head.run(None, {"images": images})
        assert values[0].nbytes == point.size_bytes
        (found,) = tail.run(None, {point.tensor: values})
        assert np.abs(found - expected).max() <= 0.05 * np.abs(expected).max()
        assert (found.argmax(1) == expected.argmax(1)).all()
