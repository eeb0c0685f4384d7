"""`terrace experiment early-exit` with a network that was trained for one step."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.dataset import CIFAR100, Dataset
from models.training.config import TrainConfig
from models.training.run import RunOptions, train_run
from terrace.commands.experiment import app

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]


@pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs CIFAR-100: set TERRACE_DATA")
@pytest.mark.parametrize(
    ("network", "code"),
    [
        ({"kind": "early-exit", "options": {"alpha": 0.25, "stem_stride": 2, "width": 1, "blocks": 1}}, 0),
        ({"kind": "wide-resnet", "options": {"depth": 10, "width": 1}}, 1),
    ],
    ids=["in two parts", "whole"],
)
def test_both_systems_are_measured_on_the_same_images(tmp_path: Path, network: dict[str, Any], code: int) -> None:
    config = TrainConfig.model_validate(
        {
            "name": "ddnn",
            "tier": "cloud",
            "target": "fine",
            "auxiliary": 1.0,
            "network": network,
            "epochs": 1,
            "batch_size": 8,
        }
    )
    train_run(config, Dataset.open(CIFAR100, Path(os.environ["TERRACE_DATA"])), tmp_path, RunOptions(steps=1))
    flags = ["--json", "--runs", str(tmp_path), "--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(app, ["early-exit", *flags], catch_exceptions=code != 0)
    assert (ended.exit_code == 0) == (code == 0), ended.output
    if code:
        assert "two parts" in str(ended.exception)
        return
    rows = json.loads(ended.stdout)
    assert rows[-1]["terrace_coarse"] > rows[0]["terrace_coarse"] > 0.5
    assert rows[-1]["terrace_bytes_per_image"] == 32 * 32 * 3
    assert rows[-1]["ddnn_bytes_per_image"] == 32 * 8 * 8
    assert all(0 <= row[f"ddnn_{level}"] <= 1 for row in rows for level in ("fine", "coarse"))
