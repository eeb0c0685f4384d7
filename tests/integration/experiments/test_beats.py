"""Heartbeats at full rate, against a real scheduler."""

from __future__ import annotations

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from experiments.beats import run


def test_each_number_of_nodes_is_measured_and_recorded(tmp_path: Path) -> None:
    app = Typer()
    app.command()(run)
    few = ["--nodes", "1", "--nodes", "20", "--seconds", "0.2", "--repeats", "1"]
    done = CliRunner().invoke(app, [*few, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    *rows, last = done.stdout.splitlines()
    assert [row["nodes"] for row in map(json.loads, rows)] == [1, 20]
    assert all(row["beats_per_s"] > 0 and row["cpu_ms_per_beat"] > 0 for row in map(json.loads, rows))
    record = json.loads(Path(last.partition(": ")[2]).read_text())
    assert len(record["samples"]["20_beats_per_s"]) == 1
