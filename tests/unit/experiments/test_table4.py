"""The arithmetic of table 4, on points made up by hand, and which cells are measured."""

from typing import Any

import pytest

from experiments.plots import Figures
from experiments.profile import read_profile
from experiments.table4 import TABLE4, _head_paces, encoders_of, links_of, machines_of, turns_of
from models.manifest import load_manifest
from tierkit.errors import InvalidInput
from tierkit.types import EncoderKind, Tier


def point(encode_on: str | None, stage_ms: list[float], encode_ms: float = 0.0, **other: Any) -> dict[str, Any]:
    sent = {"upload_bytes": [153_600, 153_600], "relay_bytes": [0, 0]}
    if encode_on is not None:
        sent = {"upload_bytes": [490_000, 492_000], "relay_bytes": [153_600 if encode_on == "edge" else 0] * 2}
    cell = {"upper": "cloud", "network": "wrn-16-4", "latency_s": 0.5, "bandwidth_mbps": None}
    return {**cell, "encode_on": encode_on, "stage_ms": stage_ms, "encode_ms": [encode_ms] * 2, **sent, **other}


RECORD: dict[str, Any] = {
    "config": {"encoder": "conv1", "form": "uint8", "slowness": {"end": 10.0, "edge": 4.0, "cloud": 12.0}},
    "points": [
        point(None, [999.0, 1001.0]),
        point("edge", [1039.0, 1041.0], 8.0),
        point("end", [1050.0, 1070.0], 20.0),
        point(None, [1500.0, 1500.0], bandwidth_mbps=10.0),
        point("end", [1800.0, 1800.0], 20.0, bandwidth_mbps=10.0),
    ],
}


def test_the_overhead_is_split_as_in_eq_8() -> None:
    end, limited, edge = TABLE4.rows(RECORD)
    assert (end["encode_on"], end["overhead_ms"], end["encoding_ms"], end["communication_ms"]) == ("end", 60, 20, 40)
    assert (end["overhead"], end["encoding"], end["communication"]) == (0.06, 0.02, 0.04)
    assert (end["ms_without"], end["min_ms_with"], end["max_ms_with"], end["tasks"]) == (1000, 1050, 1070, 2)
    assert (edge["encode_on"], edge["overhead"], edge["encoding"]) == ("edge", 0.04, 0.008)
    # Against the task without encoder over the same link.
    assert (limited["bandwidth_mbps"], limited["overhead"]) == (10.0, 0.2)


def test_heads_are_as_much_slower_as_the_networks_of_their_tier() -> None:
    paces = _head_paces(0.2, {"end": 40.0, "edge": 1.5, "cloud": 9.0})
    assert paces == {"end-1": {"emulate_encode_ms_per_image": 8.0}}  # an edge about as fast as here: its real time
    assert _head_paces(0.2, {"end": None, "edge": 3.0}) == {"edge-1": {"emulate_encode_ms_per_image": 0.2 * 3.0}}


def test_the_papers_figures_stand_beside_its_own_set_up_alone() -> None:
    end, limited, edge = TABLE4.rows(RECORD)
    assert (end["paper_overhead"], edge["paper_overhead"], limited["paper_overhead"]) == (0.571, 0.440, None)


def test_the_bytes_of_both_hops_count() -> None:
    end, _, edge = TABLE4.rows(RECORD)
    assert (end["upload_bytes_without"], end["upload_bytes_with"]) == (153_600, 491_000)
    assert edge["upload_bytes_with"] == 491_000 + 153_600


def test_a_run_that_was_stopped_before_the_first_encoded_task_has_no_rows_and_no_plot() -> None:
    record = {**RECORD, "points": RECORD["points"][:1]}
    assert TABLE4.rows(record) == []
    TABLE4.draw(record, Figures())


def test_auto_stands_beside_the_better_fixed_place_of_its_cell() -> None:
    by = {"encoded_by": ["end-1", "edge-1"]}
    auto = [
        point("auto", [1045.0, 1055.0], 14.0, **by),  # the edge node needs 1040, the end device 1060
        point("auto", [1710.0, 1710.0], 20.0, bandwidth_mbps=10.0, **by),
    ]
    rows = TABLE4.rows({**RECORD, "points": [*RECORD["points"], *auto]})
    assert [(row["encode_on"], row["bandwidth_mbps"]) for row in rows[3:]] == [("auto", None), ("auto", 10.0)]
    assert [(row["of_better"], row["encoded_on_edge"]) for row in rows] == [(None, None)] * 3 + [(1.0096, 1), (0.95, 1)]
    assert (rows[3]["overhead"], rows[3]["encoding"], rows[3]["slowness"]) == (0.05, 0.014, None)
    table = TABLE4.table({**RECORD, "points": [*RECORD["points"], *auto]})
    assert table.rows[3][0] == "auto, cloud"
    assert "1.010 (1 of 2 on the edge node)" in table.rows[3]


def test_without_a_fixed_place_in_its_cell_auto_has_no_ratio() -> None:
    points = [RECORD["points"][0], point("auto", [1045.0], 14.0, encoded_by=["edge-1"])]
    (row,) = TABLE4.rows({**RECORD, "points": points})
    assert (row["of_better"], row["encoded_on_edge"]) == (None, None)


def test_the_table_names_way_and_limit() -> None:
    rows = TABLE4.table(RECORD).rows
    assert [row[:3] for row in rows] == [
        ["end, cloud", "wrn-16-4", "none"],
        ["end, cloud", "wrn-16-4", "10 Mbit/s"],
        ["edge, cloud", "wrn-16-4", "none"],
    ]


def test_the_latency_lies_before_the_upper_node_alone() -> None:
    cloud = machines_of(read_profile("paper"), Tier.CLOUD, 1.5, 10.0).path
    assert {name: (link.delay_s, link.bandwidth_bps) for name, link in cloud.items()} == {
        "end-cloud": (0.75, 1e7),
        "edge-cloud": (0.75, 1e7),
        "end-edge": (0.0, 1e7),
    }
    edge = machines_of(read_profile("paper"), Tier.EDGE, 1.5, None)
    assert (edge.nodes.cloud, {name: link.delay_s for name, link in edge.path.items()}) == (0, {"end-edge": 0.75})


def test_when_it_shall_be_quick_there_are_four_links() -> None:
    assert links_of(None, None, quick=True) == [
        (0.5, None),
        (0.5, 100.0),
        (0.5, 10.0),
        (2.0, None),
    ]
    assert len(links_of(None, None, quick=False)) == 12
    assert links_of([1.0, 2.0], [10.0], quick=True) == [(1.0, 10.0), (2.0, 10.0)]


def test_without_a_limit_of_its_own_a_cell_has_that_of_the_profile_and_no_cell_is_measured_twice() -> None:
    links = [(1.0, None), (1.0, 12.0), (1.0, 3.0)]
    assert turns_of(read_profile("lte"), links, [Tier.CLOUD]) == [(Tier.CLOUD, 1.0, 12.0), (Tier.CLOUD, 1.0, 3.0)]
    assert turns_of(read_profile("paper"), links[:1], [Tier.CLOUD, Tier.EDGE]) == [
        (Tier.CLOUD, 1.0, None),
        (Tier.EDGE, 1.0, None),
    ]


def test_a_latency_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="finite numbers"):
        links_of([float("nan")], None, quick=False)


def test_each_tier_has_the_encoder_of_its_own_network() -> None:
    found = encoders_of(EncoderKind.CONV1, load_manifest())
    assert {tier: encoder.name for tier, encoder in found.items()} == {
        Tier.CLOUD: "wrn-16-4.conv1",
        Tier.EDGE: "resnet-34.conv1",
    }


def test_a_cloud_without_an_encoder_of_its_own_serves_the_edge_nodes_network() -> None:
    manifest = load_manifest()
    manifest = manifest.model_copy(update={"encoders": (manifest.encoder("resnet-34.bottleneck"),)})
    found = encoders_of(EncoderKind.BOTTLENECK, manifest)
    assert {tier: encoder.network for tier, encoder in found.items()} == {
        Tier.CLOUD: "resnet-34",
        Tier.EDGE: "resnet-34",
    }


def test_an_encoder_that_nobody_has_is_refused_in_a_sentence() -> None:
    manifest = load_manifest()
    manifest = manifest.model_copy(update={"encoders": (manifest.encoder("wrn-16-4.conv1"),)})
    with pytest.raises(
        InvalidInput, match="no encoder of the kind bottleneck for wrn-16-4 or resnet-34; there is conv1"
    ):
        encoders_of(EncoderKind.BOTTLENECK, manifest)
