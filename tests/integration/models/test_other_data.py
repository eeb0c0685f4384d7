"""Another data set with another hierarchy: trained, exported, quantised, evaluated and run, by the commands alone."""

import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from models.data import read_sample
from models.hierarchy import Hierarchy, bundled_hierarchy
from models.manifest import load_manifest
from models.session import load_model
from terrace.cli import run
from terrace.commands.models import app
from tierkit.atomic import alone_in
from tierkit.errors import DataError, InvalidInput

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.config import TrainConfig, find_config

pytestmark = pytest.mark.train

# Five real classes under a hierarchy that CIFAR-100 does not have; class names in another order than its labels.
GARDEN = {
    "name": "garden",
    "fine": ["orange", "apple", "poppy", "rose", "bicycle"],
    "superclasses": {"plant": ["apple", "orange", "poppy", "rose"], "thing": ["bicycle"]},
}
CONFIG = """
name = "garden-net"
tier = "edge"
target = "{target}"
epochs = 2
batch_size = 8
held_out_per_class = 1
precision = "fp32"
crop_padding = 2

[network]
kind = "wide-resnet"
options = {{ depth = 10, width = 1 }}
"""


@pytest.fixture(scope="module")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("garden")
    (root / "hierarchy.json").write_text(json.dumps(GARDEN))
    sample, hierarchy = read_sample(), bundled_hierarchy()
    assert sample.fine is not None
    for name in GARDEN["fine"]:
        for number, index in enumerate(np.flatnonzero(sample.fine == hierarchy.fine.index(str(name)))):
            folder = root / ("test" if number < 3 else "train") / str(name)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(sample.images[index]).save(folder / f"{number}.png")
    return root


def terrace_models(*arguments: str):
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("target", ["fine", "coarse"])
def test_another_hierarchy_needs_no_code(garden: Path, tmp_path: Path, target: str):
    (tmp_path / "garden.toml").write_text(CONFIG.format(target=target))
    data, runs = ["--dataset", str(garden)], ["--runs", str(tmp_path / "runs")]
    weights = tmp_path / "weights"
    record = terrace_models(
        "train", "garden-net", "--config", str(tmp_path / "garden.toml"), "--threads", "1", *data, *runs
    )
    assert record["steps"] == record["planned_steps"]
    assert (tmp_path / "runs" / "garden-net" / "curves.png").read_bytes().startswith(b"\x89PNG")
    (trained,) = terrace_models("eval", "garden-net", *data, *runs)
    entry = terrace_models("quantize", "garden-net", "--out", str(weights), *data, *runs)
    assert entry["classes"] == (5 if target == "fine" else 2)
    assert (weights / "records" / "garden-net.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"garden.toml", "runs", "weights"}

    (row,) = terrace_models("eval", "--all", "--models", str(weights), *data)
    assert row["images"] == trained["images"] == 15
    assert row.keys() == trained.keys()
    share = "fine_accuracy" if target == "fine" else "coarse_accuracy"
    assert trained[share] == pytest.approx(entry[f"fp32_{share}"], abs=0.1)  # an image or two may be near the border
    assert row["coarse_accuracy"] == entry["coarse_accuracy"]
    assert (row["fine_accuracy"] is None) == (target == "coarse")
    verdict, *encoders = terrace_models("verify", "--models", str(weights))
    # The first convolution of a network that an upper tier may serve is cut off as an encoder.
    assert [(each["name"], each["ok"]) for each in encoders] == (
        [("garden-net.conv1", True)] if target == "fine" else []
    )
    assert verdict["ok"], verdict["detail"]

    manifest = load_manifest(weights)
    assert manifest.hierarchy == Hierarchy.parse(GARDEN, source="test")
    model = load_model(manifest.default_for("edge"), weights)
    assert list(model.labels["logits"]) == (GARDEN["fine"] if target == "fine" else ["plant", "thing"])


def test_networks_of_one_hierarchy_are_not_measured_on_another(garden: Path):
    with pytest.raises(InvalidInput, match="'cifar-100', the data set is 'garden'"):
        terrace_models("eval", "--all", "--dataset", str(garden))


@pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs MNIST: set TERRACE_DATA")
def test_digits_need_the_name_of_the_network_alone(tmp_path: Path):
    runs = ["--runs", str(tmp_path)]
    record = terrace_models("train", "mnist-64-64", "--threads", "1", "--steps", "550", *runs)
    assert record["data"] == "mnist"
    (epoch,) = record["epochs"]
    assert epoch["held_out_fine"] > 0.9
    (row,) = terrace_models("eval", "mnist-64-64", *runs)
    assert (row["images"], row["parameters"]) == (10_000, 784 * 64 + 64 * 64 + 64 * 10 + 64 + 64 + 10)
    assert row["fine_accuracy"] == pytest.approx(epoch["held_out_fine"], abs=0.03)
    out = tmp_path / "set"
    entry = terrace_models("quantize", "mnist-64-64", "--dataset", "mnist", "--out", str(out), *runs)
    assert entry["input_shape"] == [28, 28, 3]
    assert entry["fp32_fine_accuracy"] == pytest.approx(row["fine_accuracy"], abs=1e-4)  # grey as three equal colours
    assert entry["fine_accuracy"] == pytest.approx(row["fine_accuracy"], abs=0.01)
    (served,) = terrace_models("eval", "--all", "--dataset", "mnist", "--models", str(out))
    assert served["fine_accuracy"] == pytest.approx(entry["fine_accuracy"], abs=1e-4)
    (tmp_path / "mnist-64-64").rename(tmp_path / "renamed")
    (moved,) = terrace_models("eval", "renamed", *runs)
    assert (moved["name"], moved["fine_accuracy"]) == ("renamed", row["fine_accuracy"])


@pytest.fixture(scope="module")
def run_folder(garden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one of a single step."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "garden.toml").write_text(CONFIG.format(target="fine"))
    arguments = ["--config", str(folder / "garden.toml"), "--dataset", str(garden), "--runs", str(folder)]
    assert run(["models", "train", "garden-net", "--steps", "1", *arguments]) == 0
    return folder


def test_training_says_what_it_begins_with(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    arguments = ["--config", str(run_folder / "garden.toml"), "--dataset", str(garden), "--runs", str(tmp_path)]
    assert run(["models", "train", "garden-net", "--batch-size", "10", "--steps", "2", *arguments]) == 0
    out, err = capfd.readouterr()
    assert "stopped; the command without --steps goes on after 2 of 6 steps" in out
    assert err.splitlines() == [
        "reading the training images",
        "garden-net: wide-resnet on garden, 2 epochs of 3 steps with 10 images each, on cpu",
    ]


OTHERS = {
    "order": {**GARDEN, "superclasses": {"thing": ["bicycle"], "plant": ["apple", "orange", "poppy", "rose"]}},
    "count": {"name": "fruit", "fine": ["orange", "apple"], "superclasses": {"fruit": ["apple", "orange"]}},
}


@pytest.mark.parametrize("command", ["train", "export", "quantize"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_run_is_not_used_for_another_hierarchy(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, other: str
):
    content: dict[str, Any] = OTHERS[other]
    (tmp_path / "hierarchy.json").write_text(json.dumps(content))
    for name in content["fine"]:
        for split in ("train", "test"):
            shutil.copytree(garden / split / name, tmp_path / split / name)
    arguments = ["--dataset", str(tmp_path), "--runs", str(run_folder)]
    if command == "quantize":
        arguments += ["--out", str(tmp_path / "weights")]
    if command == "train":
        arguments += ["--config", str(run_folder / "garden.toml")]
    capfd.readouterr()
    assert run(["models", command, "garden-net", *arguments]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert re.match("terrace: .* (for another hierarchy|was trained for hierarchy 'garden')", last)


def test_a_run_folder_that_is_a_file_or_in_use_is_told(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "garden-net").touch()
    config, data = ["--config", str(run_folder / "garden.toml")], ["--dataset", str(garden)]
    assert run(["models", "train", "garden-net", *config, *data, "--runs", str(tmp_path / "none")]) == 2
    assert "cannot make the folder" in capfd.readouterr().err.splitlines()[-1]
    runs = tmp_path / "runs"
    with alone_in(runs / "garden-net"):
        assert run(["models", "train", "garden-net", *config, *data, "--runs", str(runs)]) == 2
    assert "another process trains in" in capfd.readouterr().err.splitlines()[-1]
    assert list((runs / "garden-net").iterdir()) == []


def test_what_is_quantised_is_the_run_as_it_is_now(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    runs = shutil.copytree(run_folder, tmp_path / "runs")
    file, place = runs / "garden-net" / "fp32.onnx", ["--dataset", str(garden), "--runs", str(runs)]
    file.write_bytes(b"of an earlier step")
    assert run(["models", "quantize", "garden-net", *place, "--out", str(tmp_path / "set")]) == 0
    assert "garden-net is not finished: it has done 1 of 6 steps" in capfd.readouterr().err.splitlines()
    made = file.read_bytes()
    assert run(["models", "export", "garden-net", *place]) == 0
    assert "garden-net is not finished: it has done 1 of 6 steps" in capfd.readouterr().err.splitlines()
    assert made == file.read_bytes()


def test_a_run_in_a_folder_of_another_name_is_not_quantised(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    shutil.copytree(run_folder / "garden-net", tmp_path / "runs" / "meadow-net")
    place = ["--dataset", str(garden), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "set")]
    assert run(["models", "quantize", "meadow-net", *place]) == 2
    assert "holds a run of 'garden-net'" in capfd.readouterr().err
    assert not (tmp_path / "set").exists()


def test_a_student_is_told_that_its_teacher_is_not_finished(
    garden: Path, run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    runs = shutil.copytree(run_folder, tmp_path / "runs")
    config = (run_folder / "garden.toml").read_text().replace("garden-net", "pupil")
    (tmp_path / "pupil.toml").write_text(f'{config}\n[teacher]\nruns = ["garden-net"]\n')
    arguments = ["--config", str(tmp_path / "pupil.toml"), "--dataset", str(garden), "--runs", str(runs)]
    assert run(["models", "train", "pupil", "--steps", "1", *arguments]) == 0
    assert "garden-net is not finished: it has done 1 of 6 steps" in capfd.readouterr().err.splitlines()


def test_a_configuration_of_another_name_is_a_usage_error(
    garden: Path, run_folder: Path, capfd: pytest.CaptureFixture[str]
):
    arguments = ["--config", str(run_folder / "garden.toml"), "--dataset", str(garden), "--runs", str(run_folder)]
    assert run(["models", "train", "meadow-net", *arguments]) == 2
    assert "is called 'garden-net', not 'meadow-net'" in capfd.readouterr().err


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "train-networks.md").read_text(encoding="utf-8")
    digits, noisy, hierarchy, config = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    TrainConfig.model_validate(find_config("mnist-64-64", None).model_dump() | tomllib.loads(noisy))
    assert tomllib.loads(digits)["network"] == find_config("mnist-64-64", None).network.model_dump()
    (commands,) = re.findall(r"```sh\n(terrace models train shapes-net.*?)```", page, flags=re.DOTALL)
    (tmp_path / "shapes-net.toml").write_text(config.replace("epochs = 10", "epochs = 1"))
    for split, count in (("train", 12), ("test", 3)):
        for number, shape in enumerate(("circle", "ellipse", "square")):
            folder = tmp_path / "shapes" / split / shape
            folder.mkdir(parents=True)
            for index in range(count):
                picture = Image.new("RGB", (40, 40))
                corner, side = (index, 2 * index), 15 + number
                box = (*corner, corner[0] + side, corner[1] + side // (1 + (shape == "ellipse")))
                (ImageDraw.Draw(picture).rectangle if shape == "square" else ImageDraw.Draw(picture).ellipse)(box)
                picture.save(folder / f"{index}.png")
    (tmp_path / "shapes" / "hierarchy.toml").write_text(hierarchy)
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        _, *arguments = shlex.split(line)
        if arguments[0] == "models":
            assert run(arguments) == 0, capfd.readouterr().err
    assert load_manifest(tmp_path / "shapes-weights").default_for("edge").name == "shapes-net"
    assert str(Path("shapes-weights") / "records" / "shapes-net.json") in capfd.readouterr().out


def test_training_names_the_class_that_has_too_few_images(garden: Path, tmp_path: Path):
    (tmp_path / "garden.toml").write_text(CONFIG.format(target="fine").replace("per_class = 1", "per_class = 7"))
    arguments = ["--config", str(tmp_path / "garden.toml"), "--dataset", str(garden), "--runs", str(tmp_path)]
    with pytest.raises(DataError, match="has 7 training images"):
        terrace_models("train", "garden-net", *arguments)
