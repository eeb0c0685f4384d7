"""Scores of logits whose right answers are known, speed, data sets and verification."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.data import ImageSet, read_sample
from models.dataset import Dataset
from models.evaluate import evaluate, score
from models.hierarchy import Hierarchy, bundled_hierarchy
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from models.speed import measure_ms_per_image, probe_images
from models.verify import verify_entry
from tierkit.errors import DataError
from tierkit.types import Tier

PETS = Hierarchy.parse(
    {"name": "pets", "fine": ["cat", "lynx", "dog"], "superclasses": {"feline": ["cat", "lynx"], "canine": ["dog"]}},
    source="test",
)


def labelled(fine: list[int]) -> ImageSet:
    labels = np.array(fine)
    return ImageSet(
        images=np.zeros((len(fine), 4, 4, 3), np.uint8),
        fine=labels,
        coarse=PETS.coarse_labels(labels),
        names=tuple(map(str, fine)),
        hierarchy_name="pets",
    )


def test_the_coarse_answer_is_the_superclass_with_the_largest_sum():
    # Dog is the likeliest class, yet cat and lynx together are likelier than it.
    logits = np.log(np.array([[0.35, 0.25, 0.4]], dtype=np.float32))
    coarse, fine, _ = score(logits, labelled([0]), PETS, target="fine", temperature=1.0)
    assert (coarse, fine) == (1.0, 0.0)


def test_a_coarse_network_has_no_fine_accuracy():
    logits = np.array([[2.0, 0.0], [2.0, 0.0]], dtype=np.float32)
    assert score(logits, labelled([0, 2]), PETS, target="coarse", temperature=1.0)[:2] == (0.5, None)


def test_classes_that_disagree_with_the_hierarchy_are_refused():
    for target in ("fine", "coarse"):
        with pytest.raises(DataError, match="pets"):
            score(np.zeros((1, 7), np.float32), labelled([0]), PETS, target=target, temperature=1.0)


def test_images_without_labels_cannot_be_scored():
    with pytest.raises(DataError, match="labelled"):
        score(np.zeros((1, 3), np.float32), replace(labelled([0]), fine=None), PETS, target="fine", temperature=1.0)


def test_a_shipped_network_on_the_sample():
    manifest = load_manifest()
    entry = manifest.default_for("end")
    seen: list[int] = []
    sample = read_sample()
    result = evaluate(
        load_model(entry),
        sample.take(np.arange(120)),
        bundled_hierarchy(),
        target=entry.target,
        temperature=entry.temperature,
        report=seen.append,
    )
    assert seen == [50, 50, 20]
    assert result.images == 120
    assert result.coarse_accuracy > 0.5
    assert result.ms_per_image > 0


def test_images_of_another_size_are_refused():
    entry = load_manifest().default_for("end")
    with pytest.raises(DataError, match=r"takes images \(32, 32, 3\)"):
        evaluate(load_model(entry), labelled([0]), PETS, target="coarse", temperature=1.0)


def test_speed_is_measured_for_each_batch_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("models.speed._LEAST_S", 0.001)
    entry = load_manifest().default_for("end")
    pace = measure_ms_per_image(load_model(entry), probe_images(entry.input_shape)[:3], [1, 7])
    assert set(pace) == {1, 7}
    assert min(pace.values()) > 0


def test_probe_images_fit_any_shape():
    assert probe_images((32, 32, 3)).shape == (1000, 32, 32, 3)
    assert probe_images((8, 9, 3)).shape == (256, 8, 9, 3)


@pytest.mark.parametrize("tier", Tier)
def test_the_shipped_networks_verify(tier: Tier):
    manifest = load_manifest()
    verdict = verify_entry(manifest.default_for(tier), manifest, weights_folder())
    assert verdict.ok, verdict.detail


def test_a_wrong_file_does_not_verify(tmp_path: Path):
    entry = load_manifest().models[0]
    (tmp_path / entry.file).write_bytes(b"")
    verdict = verify_entry(entry, load_manifest(), tmp_path)
    assert not verdict.ok
    assert entry.file in verdict.detail


def test_a_folder_data_set_brings_its_own_hierarchy(tmp_path: Path):
    (tmp_path / "hierarchy.json").write_text(json.dumps(PETS.content()))
    for name in PETS.fine:
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.new("RGB", (10, 10), (9, 9, 9)).save(tmp_path / "test" / name / "one.png")
    dataset = Dataset.open(str(tmp_path), None)
    assert dataset.hierarchy == PETS
    assert dataset.read("test").images.shape == (3, 32, 32, 3)
    with pytest.raises(DataError, match="train"):
        dataset.read("train")


def test_a_folder_without_a_hierarchy_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"hierarchy\.toml"):
        Dataset.open(str(tmp_path), None)


def test_cifar_100_needs_its_folder():
    with pytest.raises(DataError, match="TERRACE_DATA"):
        Dataset.open("cifar100", None).read("test")
