"""`terrace experiment data-copies`: two real machines, by each way, and libtorrent."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.training.data_copies import LINES
from terrace.commands.experiment import app

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

ENVIRONMENTS = Path(__file__).parents[3] / ".venv-peers"


def test_all_ways_get_there(tmp_path: Path) -> None:
    flags = ["--quick", "--json", "--machines", "3", "--megabytes", "1", "--venvs", str(ENVIRONMENTS)]
    ended = CliRunner().invoke(app, ["data-copies", *flags, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    assert set(rows) == {line.name for line in LINES}
    assert {row["failure"] for row in rows.values()} == {""}
    assert all(row["rounds"] == 1 and row["seconds"][0] > 0 for row in rows.values())
