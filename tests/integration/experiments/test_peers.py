"""Terrace and another server in turn: real servers, real load."""

import os
import sys
from pathlib import Path

import pytest

from experiments.peers.comparison import Comparison
from experiments.peers.contenders import TERRACE, choose
from experiments.peers.duel import as_markdown, duel, newest_records
from experiments.peers.measuring import Cores
from experiments.peers.rows import Row
from models.manifest import load_manifest, weights_folder

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to (Linux)"
)


@needs_two_cores
def test_a_duel_measures_both_servers_in_turn(tmp_path: Path) -> None:
    server, load = sorted(os.sched_getaffinity(0))[:2]
    (peer,) = choose(["fastapi"])  # what it needs, Terrace needs as well
    rows = (Row(batch=2, concurrency=2), Row(batch=1, concurrency=1))
    comparison = Comparison(load_manifest().default_for("end"), weights_folder(), [TERRACE, peer], rows)
    python = Path(sys.executable)
    record = duel(
        comparison,
        3,
        cores=Cores(server=server, load=load),
        pythons={TERRACE.name: python, peer.name: python},
        announce=lambda what: None,
        window_s=0.1,
    )
    assert set(record.results) == {row.key for row in rows}
    for row in rows:
        assert record.results[row.key]["rounds"] == 3
        for name in (TERRACE.name, peer.name):
            assert len(record.samples[f"{row.key}.{name}.images_per_s"]) == 3
            assert min(record.samples[f"{row.key}.{name}.cpu_us_per_image"]) > 0
    record.write(tmp_path)
    table = as_markdown(newest_records(tmp_path))
    assert table.count("naive FastAPI") == 2
    assert len({line.count("|") for line in table.strip().splitlines()}) == 1
