"""`terrace models` for networks that were imported: no training, no hierarchy, and little that was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from models.escalation import load_tuning
from models.manifest import load_manifest
from terrace.cli import run
from terrace.commands.models import app
from tests.model_sets import COLOURS, colour_network, colour_pictures, colour_set, encoded_set
from tests.unit.models.importing.conftest import write_colours
from tierkit.types import Tier


def invoke(models: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [*arguments, "--models", str(models)], catch_exceptions=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_pictures(tmp_path_factory.mktemp("pictures") / "colours", size=40)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """An end network that takes green for blue, unmeasured, and a right one in the cloud, measured."""
    folder = tmp_path_factory.mktemp("imported")
    blind = colour_network(folder / "blind.onnx", weights=(1.0, 0.1, 1.0))
    colour_set(folder / "set", {"end": blind})
    return colour_set(folder / "set", {"cloud": colour_network(folder / "right.onnx")}, validate=pictures)


def test_list_has_one_column_of_accuracy_and_says_how_it_is_measured(models: Path) -> None:
    shown = invoke(models, "list").output
    lines = {name: line for line in shown.splitlines() for name in ("of-end", "of-cloud") if name in line.split()[:2]}
    assert "coarse" not in shown
    assert "fine" not in shown
    assert "3 classes" in lines["of-end"]
    assert "32 x 32, shortest side to 32" in lines["of-cloud"]
    assert lines["of-cloud"].split()[-2:] == ["100.0", "%"]
    assert lines["of-end"].split()[-1] == "-"
    assert "not measured: of-end; 'terrace models import'" in shown


def test_show_says_that_it_was_imported(models: Path) -> None:
    assert "none: it was imported" in invoke(models, "show", "of-end").output
    assert json.loads(invoke(models, "show", "of-end", "--json").stdout)["training"] is None


def test_verify_runs_them(models: Path) -> None:
    verdicts = json.loads(invoke(models, "verify", "--json").stdout)
    assert {verdict["name"]: verdict["ok"] for verdict in verdicts} == {"of-end": True, "of-cloud": True}


def test_speed_is_measured(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.speed._LEAST_S", 0.001)
    done = invoke(models, "speed", "--batch", "2", "--json")
    names = [row["name"] for row in json.loads(done.stdout)]
    assert names == ["of-end", "of-cloud"]
    # What takes long says what it is at.
    assert [name in line for name, line in zip(names, done.stderr.splitlines(), strict=True)] == [True, True]


def test_eval_on_pictures_in_folders_by_class(models: Path, pictures: Path) -> None:
    rows = json.loads(invoke(models, "eval", "--all", "--dataset", str(pictures), "--json").stdout)
    end, cloud = rows
    assert (end["images"], end["coarse_accuracy"], end["fine_accuracy"]) == (12, pytest.approx(2 / 3), None)
    assert (cloud["images"], cloud["fine_accuracy"]) == (12, 1.0)
    assert cloud["temperature"] == load_manifest(models).entry("of-cloud").temperature
    assert "accuracy" in invoke(models, "eval", "--all", "--dataset", str(pictures)).output


def test_eval_takes_the_resize_rule_of_each_network(models: Path, tmp_path: Path) -> None:
    # Red in the middle, which alone is left of a wide picture; all of it together is mostly blue.
    wide = np.zeros((40, 200, 3), np.uint8)
    wide[..., 2] = 200
    wide[:, 80:120] = (200, 0, 0)
    (tmp_path / "red").mkdir()
    Image.fromarray(wide).save(tmp_path / "red" / "wide.png")
    (row,) = json.loads(invoke(models, "eval", "of-cloud", "--dataset", str(tmp_path), "--json").stdout)
    assert row["fine_accuracy"] == 1.0


def test_eval_takes_the_test_pictures_of_a_data_set(models: Path, pictures: Path, tmp_path: Path) -> None:
    for split, colour in (("test", "red"), ("train", "blue")):
        (tmp_path / split).mkdir()
        (tmp_path / split / colour).symlink_to(pictures / colour)
    (row,) = json.loads(invoke(models, "eval", "of-cloud", "--dataset", str(tmp_path), "--json").stdout)
    assert row["images"] == 4


def test_thresholds_are_chosen_on_half_of_the_pictures_and_judged_on_the_others(
    models: Path, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    shown = invoke(models, "tune-escalation", "--dataset", str(pictures), "--out", str(out))
    assert shown.exit_code == 0
    assert "6 labelled images, every other one of each class" in shown.output
    assert "6 test images" in shown.output
    assert "warning: chosen by only 6 pictures" in shown.stderr
    assert "coarse" not in shown.output
    tuning = load_tuning(out)
    tuning.check(load_manifest(out))
    gate = tuning.gate(Tier.END, Tier.CLOUD)
    assert (gate.images, gate.upper_accuracy) == (6, 1.0)
    assert gate.lower_accuracy == pytest.approx(2 / 3, abs=1e-4)
    # What it is sure of stays; the unclear ones and all green ones, which it gets wrong, go up.
    assert gate.for_accuracy(1.0).share == pytest.approx(2 / 3, abs=1e-4)


def test_the_first_convolution_becomes_an_encoder(models: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "encoded"
    (made,) = json.loads(invoke(models, "cut-encoder", "--dataset", str(pictures), "--out", str(out), "--json").stdout)
    assert (made["network"], made["fine_accuracy"], made["test_images"]) == ("of-cloud", 1.0, 6)
    verdicts = json.loads(invoke(out, "verify", "--json").stdout)
    assert {verdict["name"]: verdict["ok"] for verdict in verdicts}["of-cloud.conv1"]


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoded_set(tmp_path_factory.mktemp("sizes"), {"edge": 32, "cloud": 48})


@pytest.mark.train
def test_an_audit_attacks_an_encoder_on_pictures_of_its_networks_size(
    two_sizes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    from encryption.audit.decoder import Lessons
    from encryption.audit.run import Budget
    from encryption.audit.whitebox import Search

    tiny = Budget(
        images=8,
        searched_images=2,
        equations=60,
        search=Search(steps=2, own_images=2),
        lessons=Lessons(images=16, enough=1.0),
        imitation_steps=2,
        overheard=10,
        test_images=9,
    )
    monkeypatch.setattr(Budget, "quick", lambda images: tiny)
    for split in ("train", "test"):
        colour_pictures(tmp_path / "data" / split, each=20, size=60)
    given = ["--models", str(two_sizes), "--dataset", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    for network, side in (("of-edge", 32), ("of-cloud", 48)):
        command = [
            "audit",
            "--encoder",
            "conv1",
            "--form",
            "float32",
            "--network",
            network,
            "--quick",
            "--json",
            *given,
        ]
        assert run(["privacy", *command]) == 0
        rows = json.loads(capsys.readouterr().out)
        attacks = {row["attack"]: row for row in rows}
        assert attacks.keys() == {"least-squares", "black-box", "optimisation", "query-free"}
        assert attacks["least-squares"]["ssim"] > 0.9
        assert {(row["network"], row["judge"], row["payload_bytes"]) for row in rows} == {
            (network, network, 4 * 3 * side**2)
        }


def test_an_audit_says_what_a_set_lacks(models: Path, two_sizes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in (["--encoder", "conv1"], ["--all"]):
        assert run(["privacy", "audit", *what, "--models", str(models)]) == 2
        assert "'terrace models cut-encoder --models SET" in capsys.readouterr().err
    assert run(["privacy", "audit", "--all", "--models", str(two_sizes)]) == 2
    assert "audit one at a time, with --network" in capsys.readouterr().err


def test_a_network_without_such_a_convolution_is_refused_and_nothing_written(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_colours(tmp_path / "means.onnx", size=(32, 32))
    models = colour_set(tmp_path / "set", {"cloud": file})
    before = (models / "manifest.json").read_bytes()
    for out in (models, tmp_path / "new"):
        command = ["cut-encoder", "--models", str(models), "--dataset", str(pictures), "--out", str(out)]
        assert run(["models", *command]) == 2
        assert "'of-cloud' cannot be cut" in capsys.readouterr().err
    assert (models / "manifest.json").read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_what_was_chosen_by_is_not_what_it_is_judged_by(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = colour_pictures(tmp_path / "few", each=1)
    for command in ("cut-encoder", "tune-escalation"):
        given = ["--models", str(models), "--dataset", str(few), "--out", str(tmp_path / "new")]
        assert run(["models", command, *given]) == 2
        assert "few has one image of each class" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_one_network_alone_has_nothing_to_tune(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = colour_set(tmp_path / "set", {"cloud": colour_network(tmp_path / "net.onnx")})
    command = ["tune-escalation", "--models", str(models), "--dataset", str(pictures), "--out", str(models)]
    assert run(["models", *command]) != 0
    assert "'terrace models import' enters another" in capsys.readouterr().err
    assert not (models / "escalation.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--dataset"),
        (["--dataset", "{folder}/nowhere"], "nowhere is not a folder"),
        (["--dataset", "{folder}/stray"], "'purple'"),
        (["--dataset", "{folder}/empty"], "holds no pictures"),
        (["--dataset", "{folder}/damaged"], "1.png: not a PNG"),
    ],
)
def test_what_is_missing_to_measure_is_one_line(
    models: Path, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("stray/purple", "empty", f"damaged/{COLOURS[0]}"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("stray/purple/1.png", f"damaged/{COLOURS[0]}/1.png"):
        (tmp_path / file).write_bytes(b"no picture")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert run(["models", "eval", "--all", "--models", str(models), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
