"""A whole measurement: a real server process, the real network that comes with Terrace, the bare loop beside it."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.contenders import TERRACE, Contender, choose
from benchmarks.peers.duel import DUEL, duel
from benchmarks.peers.engines import CHOICES, ENGINES, compare as compare_engines
from benchmarks.peers.experiment import PEERS, Timing, compare
from benchmarks.peers.measuring import Installed, Network
from experiments.bench.load import LoadPlan
from experiments.harness import Log, Request, Run
from experiments.processes import Cores
from experiments.profile import read_profile
from models.manifest import load_manifest, weights_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="pinning is Linux's")

LOADS = ((5, 2), (1, 1))
TIMING = Timing(rounds=2, window_s=0.8, warmup_s=0.1, bare_s=0.1)
HERE = Installed(Path(sys.executable), "1.0")
# FastAPI and ONNX Runtime are in the environment of the tests as well.
FASTAPI = dataclasses.replace(choose(["fastapi"])[0], requirements=())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    request = Request(profile_name="native", profile=read_profile("native"))
    with closing(Log(tmp_path / "log")) as log:
        yield Run(request=request, folder=tmp_path, tell=lambda *_: None, log=log)


def cores() -> Cores:
    available = sorted(os.sched_getaffinity(0))
    return Cores(server_core=available[0], load_core=available[-1])


def network() -> Network:
    return Network(load_manifest().default_for("end"), weights_folder())


def recorded(run: Run) -> dict[str, Any]:
    return {"config": run.config, "points": run.points}


async def compared(run: Run, contender: Contender) -> list[dict[str, Any]]:
    await compare(run, [(network(), [contender], LOADS)], TIMING, cores(), {contender.name: HERE})
    return PEERS.rows(recorded(run))


async def test_every_load_stands_beside_the_bare_loop(run: Run) -> None:
    rows = await compared(run, TERRACE)
    assert [(row["images_per_request"], row["concurrency"]) for row in rows] == list(LOADS)
    for row in rows:
        assert (row["rounds"], row["failure"]) == (2, "")
        assert 0 < row["cold_start_s"] < 60
        assert row["peak_memory_bytes"] > 20 * 2**20
        assert row["images_per_s"] > 0
        assert row["of_bare"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert run.config["networks"] == [{"name": network().name, "sha256": network().sha256}]


async def test_a_server_that_dies_is_told_of_with_its_last_words_and_not_started_again(run: Run) -> None:
    (row,) = await compared(run, dataclasses.replace(FASTAPI, command=("-c", "raise SystemExit('no such thing')")))
    assert row["failure"].endswith("it ended while it started: no such thing")
    assert (row["images_per_request"], row["rounds"], len(run.points)) == (None, 0, 1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to")
async def test_a_duel_measures_both_servers_in_turn(run: Run) -> None:
    run.config |= {"peer": "fastapi", "title": "naive FastAPI"}
    pair = {"terrace": HERE, "fastapi": HERE}
    await duel(run, network(), pair, LOADS, 2, cores(), LoadPlan(window_s=1.0, warmup_s=0.1, timeout_s=20.0))
    assert [point["server"] for point in run.points[:4]] == ["terrace", "fastapi", "fastapi", "terrace"]
    assert all(point["images_per_s"] > 0 and point["cpu_us_per_image"] > 0 for point in run.points)
    rows = DUEL.rows(recorded(run))
    assert [(row["images_per_request"], row["rounds"]) for row in rows] == [(5, 2), (1, 2)]
    assert all(row["ratio"] > 0 and row["of_bare"] > 0 for row in rows)


# Answers every request with zeros, of the right number.
ZEROS = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Zeros(BaseHTTPRequestHandler):
    def do_POST(self):
        images = len(self.rfile.read(int(self.headers["Content-Length"]))) // 3072
        self.send_response(200)
        self.send_header("Content-Length", str(images * 80))
        self.end_headers()
        self.wfile.write(bytes(images * 80))
HTTPServer(("127.0.0.1", int(os.environ["PEER_PORT"])), Zeros).serve_forever()
"""


async def test_a_fast_server_with_wrong_answers_is_not_measured(run: Run) -> None:
    (row,) = await compared(run, dataclasses.replace(FASTAPI, command=("-c", ZEROS)))
    assert "of the answers agree with the bare session" in row["failure"]


async def test_a_node_with_each_engine_is_measured_and_one_that_cannot_start_is_told_of(run: Run) -> None:
    onnx, in_front, *_ = CHOICES
    refused = dataclasses.replace(onnx, title="refused", flags=("--no-such-flag", "1"))
    plan = LoadPlan(window_s=1.5, warmup_s=0.1, timeout_s=20.0)
    await compare_engines(run, [onnx, in_front, refused], network(), plan, 1, cores(), {TERRACE.name: HERE})
    rows = {row["engine"]: row for row in ENGINES.rows(recorded(run))}
    for choice in (onnx, in_front):
        row = rows[choice.title]
        assert (row["rounds"], row["failure"]) == (1, "")
        assert all(load["images_per_s"] > 0 and load["p50_ms"] > 0 for load in row["loads"])
    assert rows["refused"]["rounds"] == 0
    assert "no-such-flag" in rows["refused"]["failure"]
