"""`terrace train simulate`: from the command line to one object, and what it refuses."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.shapes import write_shapes

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from training.cheating import Cheat

pytestmark = pytest.mark.train

CONFIG = """
name = "shapes-net"
tier = "end"
target = "fine"
epochs = 6
batch_size = 8
peak_rate = 0.1
held_out_per_class = 2
precision = "fp32"
crop_padding = 0

[network]
kind = "wide-resnet"
options = { depth = 10, width = 1 }
"""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_shapes(tmp_path_factory.mktemp("shapes"))
    (root / "net.toml").write_text(CONFIG)
    return root


def simulate(shapes: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any, str]:
    known = ["--config", str(shapes / "net.toml"), "--dataset", str(shapes), "--threads", "1", "--json"]
    code = run(["train", "simulate", "shapes-net", *known, *flags])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out.startswith("{") else None, said.err


def test_it_ends_with_one_object(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--strategy", "sgd", "--workers", "3", "--step-ms", "10", "--serve-ms", "1", "--delay-ms", "5"]
    code, result, _ = simulate(shapes, capsys, *fixed, "--slow", "4", "--mbps", "100")
    assert code == 0
    assert (result["strategy"], result["workers"], result["updates"], result["faults"]) == ("sgd", 3, 18, 0)
    assert result["bytes_sent"] == result["bytes_received"] > 0
    # 18 steps of at least 10 ms, on two workers and a quarter at most.
    assert result["virtual_seconds"] > 18 * 0.010 / 2.25
    assert result["accuracy"] > 1 / 3
    again = simulate(shapes, capsys, *fixed, "--slow", "4", "--mbps", "100")[1]
    same = ("accuracy", "virtual_seconds", "loss", "staleness")
    assert [result[key] for key in same] == [again[key] for key in same]


def test_the_wire_shows_in_bytes_and_not_in_time(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--strategy", "sgd", "--workers", "2", "--step-ms", "10", "--serve-ms", "1"]
    wires = ("fp32", "bf16", "int8")
    found = {wire: simulate(shapes, capsys, *fixed, "--wire", wire)[1] for wire in wires}
    assert [found[wire]["wire"] for wire in wires] == list(wires)
    assert len({found[wire]["virtual_seconds"] for wire in wires}) == 1
    assert len({found[wire]["loss"] for wire in wires}) == 3
    full, half, quarter = (found[wire]["bytes_sent"] for wire in wires)
    assert (half / full, quarter / full) == pytest.approx((1 / 2, 1 / 4), abs=0.05)
    assert found["int8"]["bytes_received"] == found["bf16"]["bytes_received"] == half
    assert min(found[wire]["accuracy"] for wire in wires) > 1 / 3


def test_a_worker_that_dies_is_a_fault_and_no_step_is_lost(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _ = simulate(
        shapes, capsys, "--strategy", "fedavg", "--workers", "2", "--step-ms", "10", "--leave", "0.1"
    )
    assert (code, result["faults"], result["accuracy"] > 1 / 3) == (0, 1, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy", "no-such"], "no-such"),
        (["--workers", "1", "--slow", "2", "--slow", "3"], "--slow"),
        (["--workers", "0"], "--workers"),
        (["--wire", "fp8"], "--wire"),
        (["--config", "none.toml"], "none.toml"),
        (["--strategy", "gossip", "--cheaters", "1"], "--cheaters"),
        (["--strategy", "allreduce", "--leave", "3"], "--leave"),
        (["--strategy", "tournament", "--wire", "int8"], "--wire"),
    ],
)
def test_what_cannot_be_is_refused(
    shapes: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    code, result, error = simulate(shapes, capsys, *flags)
    assert (code, result) == (2, None)
    assert said in error


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "tournament", "ensemble"])
def test_ranks_exchange_without_a_host(shapes: Path, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    fixed = ["--strategy", strategy, "--workers", "2", "--step-ms", "10", "--delay-ms", "5", "--mbps", "100"]
    code, result, _ = simulate(shapes, capsys, *fixed, "--slow", "4")
    assert code == 0
    assert (result["strategy"], result["workers"], result["updates"]) == (strategy, 2, 18)
    assert result["virtual_seconds"] >= 9 * 0.040
    assert result["bytes_sent"] == result["bytes_received"] > 0
    assert 0 <= result["accuracy"] <= 1


@pytest.mark.parametrize("name", ["mobilenet-v1-0.5", "resnet-34"])
def test_a_network_that_needs_another_run_is_refused(
    shapes: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code = run(["train", "simulate", name, "--dataset", str(shapes), "--json"])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "terrace models answers" in said.err


def test_workers_that_never_stay_long_enough_are_an_error(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "fedavg", "--step-ms", "10", "--stay", "0.001"]
    code, result, error = simulate(shapes, capsys, *flags)
    assert (code, result) == (2, None)
    assert "stay" in error


def test_weights_that_are_worth_nothing_are_an_error(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = tmp_path / "wild.toml"
    wild.write_text('family = "outer"\nperiod = 3\nrate = 1e9')
    code, result, error = simulate(shapes, capsys, "--strategy", str(wild), "--step-ms", "10")
    assert "learning rate" in error
    assert (code, result) == (2, None)


def test_all_workers_dead_is_an_error_and_no_result(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, error = simulate(shapes, capsys, "--workers", "1", "--step-ms", "10", "--leave", "0.05")
    assert (code, result) == (1, None)
    assert "died" in error


@pytest.mark.parametrize("cheat", get_args(Cheat))
def test_it_knows_each_cheat(shapes: Path, capsys: pytest.CaptureFixture[str], cheat: str) -> None:
    fixed = ["--strategy", "fedavg", "--workers", "4", "--step-ms", "10", "--serve-ms", "1"]
    code, result, _ = simulate(shapes, capsys, *fixed, "--cheaters", "1", "--cheat", cheat)
    assert (code, result["cheat"], result["cheaters"]) == (0, cheat, 1)
