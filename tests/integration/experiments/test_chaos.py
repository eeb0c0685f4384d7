"""Chaos in short: real services, real faults, and not an image lost."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.chaos.faults import Kind
from experiments.harness import RECORD
from terrace.commands.experiment import app
from tierkit.fleet import SCHEDULER


@pytest.mark.timeout(180)
def test_no_image_is_lost_while_services_are_killed_stopped_and_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    out = tmp_path / "chaos"
    # With this seed, few faults are of every kind, and one of them kills the scheduler.
    arguments = ["chaos", "--faults", "11", "--jobs", "4", "--tasks", "6", "--seed", "277", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["faults"] == 11
    assert row["jobs"] >= 4
    assert row["images"] == 300 * row["jobs"]
    wrongs = ("lost", "duplicated", "wrong", "unmarked", "unfinished_jobs", "unknown_jobs", "wait_without_fine")
    assert {name: row[name] for name in wrongs} == dict.fromkeys(wrongs, 0)
    assert {"detection_p99_s", "fallback_share"} <= set(row)
    record = json.loads((out / RECORD).read_text())
    assert record["results"]["rows"] == [row]
    struck = {(point["kind"], point["target"]) for point in record["points"] if point["what"] == "fault"}
    assert {kind for kind, _ in struck} >= set(Kind) - {Kind.FULL}
    assert (Kind.KILL, SCHEDULER) in struck
    assert (out / "detection.png").stat().st_size > 0
