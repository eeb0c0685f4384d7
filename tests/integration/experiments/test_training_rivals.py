"""`terrace experiment training-rivals`: Terrace, hivemind and Flower on images that are learnt at once."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.harness import RECORD
from terrace.commands.experiment import app
from tests.digits import write_digits

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

ENVIRONMENTS = Path(__file__).parents[3] / ".venv-peers"


def test_all_three_get_there(tmp_path: Path) -> None:
    write_digits(tmp_path, 7_000)  # 5,000 of them are held out
    out = tmp_path / "run"
    flags = ["--quick", "--json", "--data", str(tmp_path), "--venvs", str(ENVIRONMENTS), "--out", str(out)]
    ended = CliRunner().invoke(app, ["training-rivals", *flags], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    rows = {row["trainer"]: row for row in json.loads(ended.stdout)}
    assert set(rows) == {"terrace", "hivemind", "flower"}
    assert {row["failure"] for row in rows.values()} == {""}
    assert all(row["seconds"] > 0 for row in rows.values())
    own = rows.pop("terrace")
    assert own["updates"] > 0
    for row in rows.values():
        assert row["ratio"] == pytest.approx(own["seconds"] / row["seconds"])
    points = json.loads((out / RECORD).read_text())["points"]
    assert all(point["accuracy"] >= 0.9 for point in points)
