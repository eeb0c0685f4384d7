"""The durable path of the scheduler on nodes that answer at once."""

from __future__ import annotations

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from experiments.durability import run


def test_each_kind_of_run_is_measured_and_recorded(tmp_path: Path) -> None:
    app = Typer()
    app.command()(run)
    done = CliRunner().invoke(app, ["--tasks", "20", "--repeats", "1", "--nodes", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    *rows, last = done.stdout.splitlines()
    kinds = [(row["scheme"], row["durable"]) for row in map(json.loads, rows)]
    assert kinds == [("end", True), ("end", False), ("end-edge", True), ("end-edge", False)]
    assert all(row["tasks_per_s"] > 0 and row["cpu_ms_per_task"] > 0 for row in map(json.loads, rows))
    record = json.loads(Path(last.partition(": ")[2]).read_text())
    assert len(record["samples"]["end_durable_tasks_per_s"]) == 1


def test_json_is_one_list_of_rows(tmp_path: Path) -> None:
    app = Typer()
    app.command()(run)
    words = ["--tasks", "20", "--repeats", "1", "--nodes", "1", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert {(row["scheme"], row["tasks_per_s"] > 0) for row in json.loads(done.stdout)} == {
        ("end", True),
        ("end-edge", True),
    }
