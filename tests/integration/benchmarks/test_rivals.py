"""`python -m benchmarks training-rivals`: Terrace and the others, to an accuracy that is reached soon."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from benchmarks.__main__ import app
from experiments.harness import RECORD

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs CIFAR-100: set TERRACE_DATA"),
]

ENVIRONMENTS = Path(__file__).parents[3] / ".venv-peers"


def test_all_get_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--quick", "--json", "--venvs", str(ENVIRONMENTS), "--out", str(out)]
    ended = CliRunner().invoke(app, ["training-rivals", *flags], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    rows = {row["trainer"]: row for row in json.loads(ended.stdout)}
    assert list(rows) == ["alone", "all-reduce", "local", "terrace", "flower", "hivemind"]
    assert {row["failure"] for row in rows.values()} == {""}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert all((row["updates"] > 0) == (name != "alone") for name, row in rows.items())
    own = rows.pop("terrace")
    for row in rows.values():
        assert row["ratio"] == pytest.approx(own["seconds"] / row["seconds"])
    points = json.loads((out / RECORD).read_text())["points"]
    assert all(point["accuracy"] >= 0.2 for point in points)
