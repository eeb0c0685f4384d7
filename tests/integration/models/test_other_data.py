"""Another data set with another hierarchy: trained, exported, quantised, evaluated and run, by the commands alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from models.data import read_sample
from models.hierarchy import Hierarchy, bundled_hierarchy
from models.manifest import load_manifest
from models.session import load_model
from terrace.commands.models import app
from tierkit.errors import DataError, InvalidInput

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

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
    terrace_models("export", "garden-net", *data, *runs)
    entry = terrace_models("quantize", "garden-net", "--out", str(weights), *data, *runs)
    assert entry["classes"] == (5 if target == "fine" else 2)
    assert (tmp_path / "records" / "garden-net.json").is_file()

    (row,) = terrace_models("eval", "--all", "--weights", str(weights), *data)
    assert row["images"] == 15
    assert row["coarse_accuracy"] == entry["coarse_accuracy"]
    assert (row["fine_accuracy"] is None) == (target == "coarse")
    (verdict,) = terrace_models("verify", "--weights", str(weights))
    assert verdict["ok"], verdict["detail"]

    manifest = load_manifest(weights)
    assert manifest.hierarchy == Hierarchy.parse(GARDEN, source="test")
    model = load_model(manifest.default_for("edge"), weights)
    assert list(model.labels["logits"]) == (GARDEN["fine"] if target == "fine" else ["plant", "thing"])


def test_networks_of_one_hierarchy_are_not_measured_on_another(garden: Path):
    with pytest.raises(InvalidInput, match="'cifar-100', the data set is 'garden'"):
        terrace_models("eval", "--all", "--dataset", str(garden))


def test_training_names_the_class_that_has_too_few_images(garden: Path, tmp_path: Path):
    (tmp_path / "garden.toml").write_text(CONFIG.format(target="fine").replace("per_class = 1", "per_class = 7"))
    arguments = ["--config", str(tmp_path / "garden.toml"), "--dataset", str(garden), "--runs", str(tmp_path)]
    with pytest.raises(DataError, match="has 7 training images"):
        terrace_models("train", "garden-net", *arguments)
