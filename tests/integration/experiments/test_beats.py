"""Heartbeats at full rate, against a real scheduler."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from experiments.harness import RECORD
from terrace.commands.experiment import app


def test_each_number_of_nodes_is_measured_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    few = ["beats", "--nodes", "1", "--nodes", "20", "--seconds", "0.2", "--repeats", "1"]
    done = CliRunner().invoke(app, [*few, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["nodes"] for row in rows] == [1, 20]
    assert all(row["beats_per_s"] > 0 and row["cpu_ms_per_beat"] > 0 and row["memory_mib"] > 0 for row in rows)
    assert len(json.loads((out / RECORD).read_text())["points"]) == 2
