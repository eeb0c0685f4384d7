"""`terrace train run --until`: a run that ends when it is accurate enough, and becomes a release."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.conftest import CONFIG
from training.host.curves import Curves
from training.messages import CURVES_PLOT

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
    last = Curves(folder, result["updates"]).points[-1]
    assert (last.updates, last.bytes_sent, last.steps) == (result["updates"], result["bytes_sent"], record["steps"])
    if find_spec("matplotlib") is not None:
        assert (folder / CURVES_PLOT).read_bytes().startswith(b"\x89PNG")

    # The same command finds the run ended; the run counts as finished for a release.
    assert run(["train", "run", str(config), *flags, "--until", "0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"] == result["reached"]
    assert run(["train", "release", str(folder), "--dataset", str(shapes), "--json"]) == 0


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_ranks_measure_at_the_end_and_refuse_it(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    (tmp_path / "net.toml").write_text(CONFIG.format(epochs=1))
    flags = ["--workers", "1", "--dataset", str(shapes), "--strategy", strategy, "--until", "0.9"]
    assert run(["train", "run", str(tmp_path / "net.toml"), *flags]) == 2
    assert "--until" in capsys.readouterr().err
