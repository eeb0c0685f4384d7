"""The durable path of the scheduler on nodes that answer at once."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.__main__ import app
from experiments.harness import RECORD
from tests.postgres import PostgresServer


def test_each_kind_of_run_is_measured_and_recorded(postgres: PostgresServer, tmp_path: Path) -> None:
    out, kinds = tmp_path / "run", ("SQLite", "PostgreSQL", None)
    database = ["--database", postgres.database()]
    words = ["durability", "--tasks", "20", "--repeats", "1", "--nodes", "2", "--json", "--out", str(out), *database]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["scheme"], row["kept_in"]) for row in rows] == [(s, k) for s in ("end", "end-edge") for k in kinds]
    assert all(row["tasks_per_s"] > 0 and row["cpu_ms_per_task"] > 0 and row["n"] == 1 for row in rows)
    assert len(json.loads((out / RECORD).read_text())["points"]) == 2 * len(kinds)
