"""The benchmark of sinks: a real scheduler, few devices and a good and a slow receiver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from experiments.harness import RECORD

FEW = ["--devices", "4", "--seconds", "2", "--interval-s", "0.5", "--rate", "4"]


@pytest.mark.timeout(180)
def test_the_good_receiver_has_all_events(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["sinks", *FEW, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert (row["events"], row["good"], row["repeated"]) == (32, 32, 0)
    assert row["lag_p50_s"] <= row["lag_p99_s"] <= row["lag_max_s"]
    assert row["slow"] <= row["good"]
    assert row["warm_bytes"] > 0
    assert (out / RECORD).exists()
