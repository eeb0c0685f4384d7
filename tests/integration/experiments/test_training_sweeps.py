"""`terrace experiment training-sweeps`, as small as it can be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.commands.experiment import app
from tests.digits import write_digits

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]


def test_a_row_has_what_each_number_of_workers_reached_and_after_equal_work(tmp_path: Path) -> None:
    write_digits(tmp_path, 480)
    flags = ["--quick", "--json", "--data", str(tmp_path), "--images", "480", "--out", str(tmp_path / "run")]
    chosen = ["--only", "batch", "--processes", "1"]
    ended = CliRunner().invoke(app, ["training-sweeps", *flags, *chosen], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(ended.stdout)
    assert (row["sweep"], row["value"], row["runs"]) == ("batch", 100, 1)
    for figures in (row["accuracy"], row["equal_work"]):
        assert set(figures) == {"0", "1", "2"}
        assert all(0 < value <= 1 for values in figures.values() for value in values)
    # The host alone does the same work in both.
    assert row["accuracy"]["0"] == row["equal_work"]["0"]


def test_a_sweep_that_is_none_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["training-sweeps", "--only", "speed", "--out", str(tmp_path / "run")])
    assert ended.exit_code != 0
    assert "epochs" in str(ended.exception)
