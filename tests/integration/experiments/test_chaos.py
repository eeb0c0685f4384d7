"""Chaos in short: real services, real faults, and not an image lost."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.harness import RECORD
from terrace.commands.experiment import app


@pytest.mark.timeout(180)
def test_no_image_is_lost_while_services_are_killed_stopped_and_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    out = tmp_path / "chaos"
    arguments = ["chaos", "--faults", "16", "--jobs", "4", "--tasks", "6", "--seed", "11", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["faults"] == 16
    assert row["jobs"] >= 4
    assert row["images"] == 300 * row["jobs"]
    wrongs = ("lost", "duplicated", "wrong", "unmarked", "unfinished_jobs", "unknown_jobs", "wait_without_fine")
    assert {name: row[name] for name in wrongs} == dict.fromkeys(wrongs, 0)
    assert {"detection_p99_s", "fallback_share"} <= set(row)
    assert json.loads((out / RECORD).read_text())["results"]["rows"] == [row]
    assert (out / "detection.png").stat().st_size > 0


def test_nobody_is_given_up_under_full_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    arguments = ["steady", "--minutes", "0.05", "--tasks", "8", "--out", str(tmp_path / "steady"), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["false_deaths"] == 0
    assert row["images"] >= 2 * 400
    assert row["minutes"] >= 0.05
