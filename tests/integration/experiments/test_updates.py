"""`terrace experiment updates`, as small as it can be."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.commands.experiment import app
from tests.digits import write_digits

pytestmark = [
    pytest.mark.train,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the host and its clients need a core each"),
]


def test_a_quick_run_counts_the_updates_of_each_strategy(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    flags = ["--quick", "--json", "--data", str(write_digits(tmp_path, 6_000)), "--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(
        app, ["updates", *flags, "--server-core", str(first), "--load-core", str(second)], catch_exceptions=False
    )
    assert ended.exit_code == 0
    rows = json.loads(ended.stdout)
    assert all(row["per_s"]["median"] > 0 and row["cpu_ms"]["median"] > 0 and not row["missed"] for row in rows)
    assert [row["strategy"] for row in rows] == ["sgd", "downpour", "dc-adaptive"]
    points = json.loads((tmp_path / "run" / "record.json").read_bytes())["points"]
    assert all(40 <= point["updates"] <= 80 for point in points)
