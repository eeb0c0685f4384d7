"""The durable path of the scheduler on nodes that answer at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from experiments.harness import RECORD


@pytest.mark.parametrize("kinds", [["SQLite", None], ["SQLite", "PostgreSQL", None]])
def test_each_kind_of_run_is_measured_and_recorded(
    request: pytest.FixtureRequest, tmp_path: Path, kinds: list[str | None]
) -> None:
    out = tmp_path / "run"
    database = ["--database", request.getfixturevalue("postgres").database()] if "PostgreSQL" in kinds else []
    words = ["durability", "--tasks", "20", "--repeats", "1", "--nodes", "2", "--json", "--out", str(out), *database]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["scheme"], row["kept_in"]) for row in rows] == [(s, k) for s in ("end", "end-edge") for k in kinds]
    assert all(row["tasks_per_s"] > 0 and row["cpu_ms_per_task"] > 0 and row["n"] == 1 for row in rows)
    assert len(json.loads((out / RECORD).read_text())["points"]) == 2 * len(kinds)
