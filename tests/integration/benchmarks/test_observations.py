"""The benchmark of observations: a real scheduler, few devices and few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from experiments.harness import RECORD
from tests.postgres import PostgresServer

FEW = [
    *("--devices", "5", "--seconds", "2", "--interval-s", "0.5", "--rate", "4", "--rows", "2000", "--doomed", "500"),
    *("--pages", "3", "--readers", "2", "--window-s", "1", "--repeats", "1"),
]


@pytest.mark.timeout(180)
def test_each_part_is_measured_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["observations", *FEW, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    (devices,) = (row for row in rows if row["what"] == "devices")
    assert devices["observations"] == 5 * 2 * 4
    assert devices["cores"] > 0
    found = {row["filter"]: row["found"] for row in rows if row["what"] == "pages"}
    assert (found["none"], found["rare class"], found["absent class"]) == (100, 10, 0)
    assert [row["window"] for row in rows if row["what"] == "retention"] == ["plain", "deleting"]
    without, readers = (row for row in rows if row["what"] == "readers")
    assert (without["events_per_reader_per_s"], readers["readers"]) == (0, 2)
    assert readers["events_per_reader_per_s"] > 0
    assert (out / RECORD).exists()


@pytest.mark.timeout(120)
def test_another_database(postgres: PostgresServer, tmp_path: Path) -> None:
    words = ["observations", *FEW, "--only", "devices", "--database", postgres.database(), "--json"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["observations"] == 40
