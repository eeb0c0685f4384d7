"""Microseconds of a request by part: real services with the profiler inside, in a window as short as can be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.road.experiment import ROAD, part_of


@pytest.mark.timeout(180)
def test_each_road_has_its_parts_latency_and_processor_time(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--window-s", "0.5", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, ["road", *few], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = {row["road"]: row for row in json.loads(done.stdout)}
    assert {road: row["asks"] for road, row in rows.items()} == {
        "tasks": "end",
        "infer": "edge",
        "classify": "scheduler",
    }
    for row in rows.values():
        assert 0 < row["first_ms"] <= row["last_ms"]
        assert {"parsing", "writing", "waiting"} <= row["us"].keys()
    assert "inference" in rows["infer"]["us"]
    assert "decisions" in rows["classify"]["us"]
    assert "decisions" not in rows["tasks"]["us"]
    assert rows["tasks"]["end_cpu_ms"] > rows["infer"]["end_cpu_ms"]


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        (("/x/asyncio/runners.py:Runner.run", "/x/tierkit/http/server.py:serve"), "waiting"),
        (("/x/re/__init__.py:fullmatch", "/x/tierkit/access/browsers.py:_is_local"), "tokens"),
        (("/x/prometheus_client/values.py:MutexValue.inc", "/x/tierkit/inference/metrics.py:count"), "metrics"),
        (
            ("/x/aiohttp/client.py:ClientSession._request", "/x/scheduler/dispatch/loop.py:Dispatcher._live"),
            "the upstream call",
        ),
        (("/x/tierkit/http/protocol.py:_HttpProtocol.write", "/x/tierkit/http/exchange.py:Exchange.send"), "writing"),
        (("/x/tierkit/http/protocol.py:_HttpProtocol.data_received",), "parsing"),
        (("/x/uvloop/loop.py:run",), "event loop and libraries"),
        ((), "event loop and libraries"),
    ],
)
def test_a_stack_belongs_to_the_innermost_frame_that_is_a_part(frames: tuple[str, ...], part: str) -> None:
    assert part_of(frames) == part


def test_rows_are_medians_of_windows() -> None:
    cpu = {"end_cpu_ms": 1.0, "edge_cpu_ms": 1.0, "scheduler_cpu_ms": 0.0}
    points = [
        {"what": "window", "road": "tasks", "round": number, "first_ms": ms, "last_ms": 2 * ms, **cpu}
        for number, ms in enumerate((1.0, 5.0, 2.0))
    ]
    points.append({"what": "part", "road": "tasks", "part": "writing", "us": 12.0})
    (row,) = ROAD.rows({"points": points})
    assert (row["rounds"], row["first_ms"], row["last_ms"], row["us"]) == (3, 2.0, 4.0, {"writing": 12.0})
    table = ROAD.table({"points": points})
    assert all(len(line) == len(table.columns) for line in table.rows)
