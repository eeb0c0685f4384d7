"""A whole measurement: a real server process, the real network that comes with Terrace, the bare loop beside it."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from experiments.peers.comparison import Comparison, compare
from experiments.peers.contenders import TERRACE, Contender, choose
from experiments.peers.measuring import Cores
from experiments.peers.rows import Row, Timing
from models.manifest import load_manifest, weights_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="pinning is Linux's")

ROWS = (Row(batch=5, concurrency=2), Row(batch=1, concurrency=1))
TIMING = Timing(rounds=1, window_s=0.3, warmup_s=0.1, bare_s=0.1)
# FastAPI and ONNX Runtime are in the environment of the tests as well.
FASTAPI = dataclasses.replace(choose(["fastapi"])[0], requirements=())


def compared(*contenders: Contender) -> Comparison:
    available = sorted(os.sched_getaffinity(0))
    comparison = Comparison(load_manifest().default_for("end"), weights_folder(), contenders, ROWS)
    pythons = {contender.name: Path(sys.executable) for contender in contenders}
    compare([comparison], TIMING, Cores(server=available[0], load=available[-1]), pythons, lambda _: None)
    return comparison


@pytest.mark.parametrize("contender", [TERRACE, FASTAPI], ids=lambda contender: contender.name)
def test_every_row_stands_beside_the_bare_loop(contender: Contender) -> None:
    comparison = compared(contender)
    assert comparison.failures == {}
    [measurement] = comparison.measurements[contender.name]
    assert measurement.failures == {}
    assert list(measurement.rows) == [row.key for row in ROWS]
    assert 0 < measurement.cold_start_s < 60
    assert measurement.peak_memory_bytes > 20 * 2**20
    for row in measurement.rows.values():
        assert row.images_per_s > 0
        assert row.bare_images_per_s > 0
        assert 0 < row.p50_ms <= row.p99_ms
        # Only the protocol that Terrace speaks tells how long the model took.
        assert (row.compute_ms is not None) == (contender is TERRACE)
    [record] = comparison.records(TIMING, Cores(server=0, load=1), {contender.name: Path(sys.executable)})
    assert record.results[f"{ROWS[0].key}.ratio_to_bare"] > 0
    assert record.config["sha256"] == comparison.network.sha256


def test_a_server_that_dies_is_reported_with_its_last_words() -> None:
    broken = dataclasses.replace(FASTAPI, command=("-c", "raise SystemExit('no such thing')"))
    comparison = compared(broken)
    assert comparison.failures["fastapi"].endswith("it ended while it started: no such thing")
    [record] = comparison.records(TIMING, Cores(server=0, load=1), {})
    assert record.results == {"unmeasured": comparison.failures["fastapi"]}


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


def test_a_fast_server_with_wrong_answers_is_not_measured() -> None:
    comparison = compared(dataclasses.replace(FASTAPI, command=("-c", ZEROS)))
    assert comparison.measurements["fastapi"] == []
    assert "of the answers are those of the bare session" in comparison.failures["fastapi"]
