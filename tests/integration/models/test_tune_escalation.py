"""`terrace models tune-escalation` with the shipped networks on a few images of the bundled sample."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from models.data import read_sample
from models.escalation import load_tuning
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest, records_folder, weights_folder
from terrace.commands.models import app
from tierkit.errors import DataError, InvalidInput, WeightsError
from tierkit.types import Tier

HELD_OUT, TEST = 2, 1


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder data set with the hierarchy of CIFAR-100: three training images and a test image of each class."""
    root = tmp_path_factory.mktemp("sample")
    sample, hierarchy = read_sample(), bundled_hierarchy()
    (root / "hierarchy.json").write_text(json.dumps(hierarchy.content()))
    assert sample.fine is not None
    for label, name in enumerate(hierarchy.fine):
        for number, index in enumerate(np.flatnonzero(sample.fine == label)[: 1 + HELD_OUT + TEST]):
            folder = root / ("test" if number < TEST else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(sample.images[index]).save(folder / f"{number}.png", compress_level=0)
    return root


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A copy of the shipped weights whose records say that two images of each class were held out."""
    shutil.copytree(weights_folder(), tmp_path / "weights")
    (tmp_path / "weights" / "escalation.json").unlink()
    records = records_folder(tmp_path / "weights")
    records.mkdir()
    for entry in load_manifest().models:
        record = {"config": {"held_out_per_class": HELD_OUT}}
        (records / entry.trained.record).write_text(json.dumps(record))
    return tmp_path / "weights"


def tune(weights: Path, images: Path, *arguments: str, out: Path | None = None):
    folders = ["--models", str(weights), "--out", str(out or weights)]
    command = ["tune-escalation", *folders, "--dataset", str(images), *arguments]
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, command, catch_exceptions=False)


def test_it_stores_thresholds_and_draws_the_curves(weights: Path, images: Path):
    said = json.loads(tune(weights, images, "--json", "--relative-accuracy", "0.95", "--budget", "0.4").stdout)
    # A node that may choose among networks takes those that the thresholds are for.
    tuned = load_manifest(weights)
    assert set(tuned.tuned) == {entry.name for entry in tuned.models}
    assert tuned.models == load_manifest().models
    assert [row["gate"] for row in said["thresholds"]][::2] == ["edge-cloud", "end-edge", "end-cloud"]
    assert {(row["escalate"], row["escalate_from"]) for row in said["test"]} == {
        (escalate, lowest) for escalate in ("threshold", "budget") for lowest in ("edge", "end")
    }
    assert all(row["images"] == 100 * TEST for row in said["test"])
    stored = load_tuning(weights)
    stored.check(load_manifest(weights))
    assert (stored.relative_accuracy, stored.budget) == (0.95, 0.4)
    assert stored.gate(Tier.EDGE, Tier.CLOUD).images == 100 * HELD_OUT
    assert "200 images held out of training, the last 2 of each class" in stored.data
    records = records_folder(weights)
    assert (records / "escalation.png").read_bytes().startswith(b"\x89PNG")
    header, *rows = (records / "escalation.csv").read_text().splitlines()
    assert header == "gate,answers,below,share,accuracy,random,oracle,test_share,test_accuracy"
    assert {row.split(",")[0] for row in rows} == {"edge-cloud", "end-edge", "end-cloud"}
    curves = json.loads((records / "escalation.json").read_bytes())["curves"]
    assert len(curves["end-edge"]["oracle"]) == sum(row.startswith("end-edge,") for row in rows)


def test_a_person_sees_what_was_chosen_and_what_it_comes_to(weights: Path, images: Path):
    out = weights.parent / "tuned"
    shown = tune(weights, images, out=out)
    assert str(out / "escalation.json") in shown.output
    load_tuning(out).check(load_manifest(out))
    assert not (weights / "escalation.json").exists()
    assert "Chosen on" in shown.output
    assert "100 test images, which had no part in the choice" in shown.output
    assert all(len(line) <= 120 for line in shown.output.splitlines() if "/" not in line)


def test_what_cannot_be_reached_changes_nothing(weights: Path, images: Path):
    with pytest.raises(InvalidInput, match=r"accuracy 0\.99 cannot be reached: .* ask for at most that"):
        tune(weights, images, "--target-accuracy", "0.99")
    assert not (weights / "escalation.json").exists()


def test_without_held_out_images_nothing_is_tuned(weights: Path, images: Path):
    record = records_folder(weights) / load_manifest().models[0].trained.record
    record.unlink()
    with pytest.raises(WeightsError, match="the network has not seen"):
        tune(weights, images)
    shipped = Path(__file__).parents[3] / "models" / "records"
    with pytest.raises(DataError, match="3 training images; 20 are to be held out"):
        tune(weights, images, "--records", str(shipped))
