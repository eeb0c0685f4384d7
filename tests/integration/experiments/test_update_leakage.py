"""`terrace experiment update-leakage`, as small as it can be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.training.leakage import MASKINGS
from terrace.commands.experiment import app
from tests.digits import write_digits

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]


def test_each_masking_is_attacked_and_what_it_costs_is_measured(tmp_path: Path) -> None:
    flags = ["--quick", "--json", "--data", str(write_digits(tmp_path, 1_200)), "--out", str(tmp_path / "run")]
    flags += ["--network", "mnist-64-64", "--batch", "1", "--pictures", "2", "--steps", "4", "--images", "1200"]
    ended = CliRunner().invoke(app, ["update-leakage", *flags], catch_exceptions=False)
    assert ended.exit_code == 0
    rows = json.loads(ended.stdout)
    assert [(row["attack"], row["images"], row["seeds"]) for row in rows] == [
        (attack, 2, 1) for _ in MASKINGS for attack in ("first layer", "search")
    ]
    plain, clipped, *noisy = [row for row in rows if row["attack"] == "first layer"]
    assert plain["ssim"] > 0.99  # one picture in the clear
    assert clipped["ssim"] == pytest.approx(plain["ssim"], abs=0.01)  # a shorter gradient points the same way
    assert noisy[-1]["ssim"] < 0.5
    assert all(0 <= row["recognised_low"] <= row["recognised"] <= row["recognised_high"] <= 1 for row in rows)
