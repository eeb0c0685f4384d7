"""Medians and ratios by hand, and what stands in the table for a server that could not be measured."""

from typing import Any

import pytest

from benchmarks.peers.experiment import PEERS


def visit(number: int, server: str, rate: float | None, bare: float = 100.0, **figures: Any) -> dict[str, Any]:
    given = {
        "images_per_s": rate,
        "p50_ms": 8.0,
        "p99_ms": 20.0,
        "cpu_us_per_image": 300.0,
        **figures,
    }
    load: dict[str, Any] = {"batch": 50, "concurrency": 4, "bare_images_per_s": bare, "bare_batch_ms": 7.0}
    load |= {"failure": "not answered: 4 x 500"} if rate is None else given
    started = {"version": "1.0", "cold_start_s": 1.0 + number, "peak_memory_bytes": 2**20, "loads": [load]}
    return {"round": number, "network": "net", "server": server, "title": server.title(), **started}


def rows(*points: dict[str, Any]) -> list[dict[str, Any]]:
    return PEERS.rows({"config": {}, "points": list(points)})


def test_a_ratio_is_taken_within_its_round() -> None:
    # The machine halves its speed in the second round; the server keeps its share.
    found = rows(
        *(visit(0, "terrace", 90.0), visit(0, "ray", 60.0)),
        *(visit(1, "terrace", 46.0, bare=50.0), visit(1, "ray", 23.0, bare=50.0)),
        *(visit(2, "terrace", 80.0), visit(2, "ray", 30.0)),
    )
    own, other = found
    assert (own["server"], own["rounds"], own["terrace_ratio"]) == ("terrace", 3, None)
    assert own["images_per_s"] == 80.0
    assert [own[name] for name in ("of_bare", "min_of_bare", "max_of_bare")] == pytest.approx([0.9, 0.8, 0.92])
    assert own["p50_above_bare_ms"] == pytest.approx(1.0)
    assert own["cold_start_s"] == 2.0
    assert other["terrace_ratio"] == 2.0


def test_the_fastest_comes_first() -> None:
    found = rows(visit(0, "fastapi", 1000.0), visit(0, "terrace", 9000.0))
    assert [row["server"] for row in found] == ["terrace", "fastapi"]


def test_a_load_that_failed_once_has_the_figures_of_the_other_rounds() -> None:
    (row,) = rows(visit(0, "ray", None), visit(1, "ray", 10.0, bare=20.0))
    assert (row["rounds"], row["of_bare"]) == (1, 0.5)


def test_what_was_not_measured_stands_there_with_its_reason() -> None:
    dead = {"round": 0, "network": "net", "server": "ray", "title": "Ray", "failure": "no wheel | no luck"}
    table = PEERS.table({"config": {}, "points": [visit(0, "terrace", 10.0), visit(0, "bentoml", None), dead]})
    assert [row[:3] for row in table.rows] == [
        ["net, 50 x 4", "Terrace 1.0", "10"],
        ["net, 50 x 4", "Bentoml 1.0", "unmeasured: not answered: 4 x 500"],
        ["net", "Ray", "unmeasured: no wheel | no luck"],
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
