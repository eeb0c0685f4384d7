"""A run that ends when it is accurate enough, and the curves that its host keeps."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.conftest import CONFIG
from training.curves import MOST_POINTS, MeasuredPoint, extended, read_curve

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]
STEPS = 5


def test_a_run_ends_when_the_held_out_images_are_answered_well(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = tmp_path / "net.toml", tmp_path / "run"
    config.write_text(CONFIG.format(epochs=100_000))
    flags = ["--workers", "2", "--dataset", str(shapes), "--folder", str(folder), "--strategy", "downpour"]
    assert run(["train", "run", str(config), *flags, "--until", "0.9", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["until"] == 0.9
    assert result["reached"]["accuracy"] >= 0.9
    assert 0 < result["reached"]["updates"] == result["updates"]
    assert result["reached"]["seconds"] > 0
    record = json.loads((folder / "record.json").read_text())
    assert record["steps"] < record["planned_steps"] == 100_000 * STEPS
    curve = read_curve(folder)
    assert curve[-1].updates == result["updates"]
    assert (curve[-1].bytes_sent, curve[-1].done) == (result["bytes_sent"], record["steps"])

    # The same command finds the run ended; the run counts as finished for a release.
    assert run(["train", "run", str(config), *flags, "--until", "0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"] == result["reached"]
    assert run(["train", "release", str(folder), "--dataset", str(shapes), "--json"]) == 0


@pytest.mark.parametrize("strategy", ["tournament", "lbfgs", "allreduce"])
def test_strategies_without_one_line_of_weights_do_all_steps(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    (tmp_path / "net.toml").write_text(CONFIG.format(epochs=1))
    flags = ["--workers", "1", "--dataset", str(shapes), "--strategy", strategy, "--until", "0.9"]
    assert run(["train", "run", str(tmp_path / "net.toml"), *flags]) == 2
    assert "--until" in capsys.readouterr().err


def test_a_curve_is_bounded_and_keeps_its_ends(tmp_path: Path) -> None:
    curve: list[MeasuredPoint] = []
    for number in range(5 * MOST_POINTS):
        point = {"seconds": float(number), "done": number, "updates": number, "loss": None, "accuracy": 0.5}
        curve = extended(curve, MeasuredPoint(**point, bytes_sent=0, bytes_received=0, staleness=0.0))  # type: ignore[arg-type]
        assert len(curve) <= MOST_POINTS
    assert (curve[0].updates, curve[-1].updates) == (0, 5 * MOST_POINTS - 1)
    assert [point.updates for point in curve] == sorted({point.updates for point in curve})
    (tmp_path / "curves.json").write_text("[{")
    assert read_curve(tmp_path) == []
