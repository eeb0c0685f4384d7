"""What `terrace top` draws, from snapshots: which nodes are shown where not all have room."""

from typing import Any

import pytest
from rich.console import Console

from terrace.commands.top import picture


def node(node_id: str, tier: str = "end", **changes: Any) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "tier": tier,
        "health": "alive",
        "reason": "heartbeats on time",
        "outstanding": 1,
        "queued_images": 0,
        "images_per_s": 0.0,
        "ms_per_image": None,
        "own_ms_per_image": 1.5,
        "trusted": True,
        **changes,
    }


def fleet(*nodes: dict[str, Any], jobs: int = 0, **changes: Any) -> dict[str, Any]:
    job = {"name": "photos", "owner": "alice", "state": "running", "reason": "", "images": 100}
    answered = {"answered_coarse": 50, "answered_fine": 20}
    return {
        "scheme": "mapping",
        "doubting": False,
        "nodes": list(nodes),
        "known": len(nodes),
        "jobs": [{**job, **answered, "id": f"job-{number}"} for number in range(jobs)],
        "unfinished": jobs,
        "figures": {"first": 12.0, "finer": None},
        **changes,
    }


def drawn(snapshot: dict[str, Any], *, height: int | None = 24, away: str = "", width: int = 120) -> str:
    console = Console(width=width, height=height or 24)
    with console.capture() as capture:
        console.print(picture(snapshot, "http://hub:8070", height=height, away=away))
    return capture.get()


def test_it_says_how_every_node_and_job_is() -> None:
    text = drawn(fleet(node("cloud-1", "cloud", health="dead", reason="refuses connections"), node("end-1"), jobs=1))
    assert "1 alive, 1 dead" in text
    assert "refuses connections" in text
    assert "heartbeats on time" not in text, "of those that are well there is nothing to say"
    assert text.index("end-1") < text.index("cloud-1") < text.index("job-0")
    assert "alice" in text


@pytest.mark.parametrize("height", [10, 24, 50])
def test_it_fits_the_terminal_and_shows_those_that_are_not_well_first(height: int) -> None:
    nodes = [node(f"end-{number}", images_per_s=float(number)) for number in range(100)]
    nodes[3] = node("end-3", health="suspect", reason="late")
    text = drawn(fleet(*nodes, jobs=20), height=height)
    assert "end-3" in text
    assert "end-99" in text
    assert "end-4 " not in text
    assert "of 100 nodes" in text
    if height > 20:
        assert len(text.splitlines()) <= height


def test_it_says_when_it_is_not_the_newest() -> None:
    assert "not the newest: gone" in drawn(fleet(node("end-1")), away="gone")
    assert "looks for the fault in itself" in drawn(fleet(node("end-1"), doubting=True))
    assert "none has registered" in drawn(fleet())


def test_a_fleet_with_sites_is_grouped_by_them() -> None:
    nodes = [
        node("cloud-1", "cloud", site=None),
        node("a-end", site="shop-10"),
        node("b-edge", "edge", site="shop-2"),
        node("c-end", site="shop-2"),
    ]
    names = {"ok": ["shop-2"], "coarse": ["shop-3", "shop-4", "shop-5", "shop-10"]}
    sites = [{"site": name, "health": health} for health, named in names.items() for name in named]
    text = drawn(fleet(*nodes, sites=sites))
    assert "sites: 1 ok, 4 coarse (shop-3, shop-4, shop-5 and 1 more)" in text
    table = text[text.index("health") :]
    assert table.index("c-end") < table.index("b-edge") < table.index("a-end") < table.index("cloud-1")
    assert "shop-10" in table
    assert "site" not in drawn(fleet(node("end-1", site=None), sites=[]))
