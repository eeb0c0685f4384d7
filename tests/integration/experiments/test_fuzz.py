"""Fuzzing in short: changed and broken requests to real services, and another client that gets its answers."""

import json
from pathlib import Path

from typer.testing import CliRunner

from experiments.harness import RECORD
from terrace.commands.experiment import app


def test_broken_requests_end_no_service_and_spoil_no_answer(tmp_path: Path) -> None:
    out = tmp_path / "fuzz"
    arguments = ["fuzz", "--requests", "3000", "--seed", "5", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["requests"] == sum(row["by_status"].values()) == 3000
    record = json.loads((out / RECORD).read_text())
    harm = [point for point in record["points"] if point["what"] == "harm" and point["status"] == 500]
    assert (row["crashes"], row["server_errors"], row["trouble"], harm) == (0, 0, {}, [])
    assert (row["answers_wrong"], row["answers_missing"], row["failed_health_checks"]) == (0, 0, 0)
    assert row["answers_checked"] >= 40
    assert row["health_checks"] > 0
    # Most of the requests were taken in and looked at: broken ones, and honest ones among them.
    assert {"200", "202", "204", "400", "404", "405", "413", "415", "422"} <= row["by_status"].keys()
