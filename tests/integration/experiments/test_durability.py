"""The durable path of the scheduler on nodes that answer at once."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from experiments.harness import RECORD
from terrace.commands.experiment import app


def test_each_kind_of_run_is_measured_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["durability", "--tasks", "20", "--repeats", "1", "--nodes", "2", "--json", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    kinds = [(row["scheme"], row["durable"]) for row in rows]
    assert kinds == [("end", True), ("end", False), ("end-edge", True), ("end-edge", False)]
    assert all(row["tasks_per_s"] > 0 and row["cpu_ms_per_task"] > 0 and row["n"] == 1 for row in rows)
    assert len(json.loads((out / RECORD).read_text())["points"]) == 4
