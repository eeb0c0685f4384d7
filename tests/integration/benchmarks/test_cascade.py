"""End and edge node against a naive cascade: real processes, as few windows as can be."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cascade import experiment
from benchmarks.cascade.experiment import CASCADE


@pytest.mark.timeout(180)
def test_both_answer_as_the_bare_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [(1, 4), (50, 1)]
    monkeypatch.setattr(experiment, "LOADS", loads)
    few = ["--rounds", "1", "--window-s", "0.3", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, ["cascade", *few], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["images_per_request"], row["clients"]) for row in rows] == loads
    for row in rows:
        assert row["naive"].startswith("naive, ")
        assert row["ratio"] > 0
        for side in ("terrace", "naive"):
            assert 0 < row[f"{side}_first_p50_ms"] <= row[f"{side}_last_p50_ms"] <= row[f"{side}_last_p99_ms"]


def point(number: int, server: str, rate: float) -> dict[str, Any]:
    times = {"first_p50_ms": 1.0, "last_p50_ms": 2.0, "last_p99_ms": 3.0}
    return {"batch": 50, "clients": 4, "round": number, "server": server, "images_per_s": rate, **times}


def test_the_better_naive_cascade_counts_and_ratios_are_those_of_a_round() -> None:
    rounds = [(100, 50, 60), (90, 40, 30), (240, 70, 80)]
    points = [
        point(number, server, rate)
        for number, rates in enumerate(rounds)
        for server, rate in zip(("terrace", "naive, threads: 1", "naive, threads: 2"), rates, strict=True)
    ]
    (row,) = CASCADE.rows({"points": points})
    assert (row["naive"], row["rounds"]) == ("naive, threads: 2", 3)
    assert (row["min_ratio"], row["ratio"], row["max_ratio"]) == pytest.approx((100 / 60, 3.0, 3.0))
    assert len(CASCADE.table({"points": points}).rows[0]) == len(CASCADE.table({"points": points}).columns)
    (lone,) = CASCADE.rows({"points": points[:1]})  # stopped early
    assert (lone["naive"], lone["ratio"]) == (None, None)
