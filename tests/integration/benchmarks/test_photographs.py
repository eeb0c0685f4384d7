"""Photographs through the end tier, against a bare loop: as few as can be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


def test_without_a_model_set_terraces_own_network_classifies_and_no_target_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    few = ["--photographs", "6", "--rounds", "1", "--end", "1", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, ["photographs", "--quick", *few], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert (row["photographs"], row["equal"], row["missed"]) == (6, 6, [])
