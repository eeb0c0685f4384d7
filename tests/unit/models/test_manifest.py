"""The manifest: what ships, and what a wrong one is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.manifest import MANIFEST_NAME, begin_weights, load_manifest, merge_entry, save_manifest, weights_folder
from models.source import chosen_entries
from tierkit.errors import NotFound, SetupError, WeightsError
from tierkit.types import Tier


@pytest.fixture
def content():
    return json.loads((weights_folder() / MANIFEST_NAME).read_text())


def write(folder: Path, content: object) -> Path:
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    return folder


def test_each_tier_has_a_network_and_each_file_is_there():
    manifest = load_manifest()
    for tier in ("end", "edge", "cloud"):
        entry = manifest.default_for(tier)
        assert (weights_folder() / entry.file).stat().st_size == entry.size_bytes
        assert len(manifest.labels(entry)) == entry.classes
    assert manifest.default_for("end").target == "coarse"


def test_the_shipped_weights_keep_within_their_budget():
    assert sum(entry.size_bytes for entry in load_manifest().models) <= 70_000_000


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(NotFound, match="resnet-34"):
        load_manifest().entry("vgg")
    with pytest.raises(NotFound, match="space"):
        load_manifest().default_for("space")


def test_saving_and_loading_changes_nothing(tmp_path: Path):
    manifest = load_manifest()
    save_manifest(manifest, tmp_path)
    assert load_manifest(tmp_path) == manifest
    assert load_manifest(tmp_path).hierarchy == manifest.hierarchy


def test_a_merged_entry_takes_the_place_of_the_old_one():
    models = load_manifest().models
    better = models[0].model_copy(update={"coarse_accuracy": 0.99})
    merged = merge_entry(reversed(models), better)
    assert [entry.tier for entry in merged] == ["end", "edge", "cloud"]
    assert merged[0].coarse_accuracy == 0.99


def test_a_network_for_a_gpu_is_the_default_there_alone():
    *others, small = load_manifest().models
    large = small.model_copy(update={"name": "large", "gpu": True})
    manifest = load_manifest().model_copy(update={"models": merge_entry([large, *others], small)})
    assert [entry.name for entry in manifest.models][-2:] == [small.name, "large"]
    assert manifest.default_for("cloud").name == small.name
    assert manifest.default_for("cloud", gpu=True).name == "large"
    assert [entry.name for entry in chosen_entries(manifest, (), Tier.CLOUD, gpu=True)] == ["large"]
    # A tier that has nothing of the kind serves what it has.
    assert manifest.default_for("edge", gpu=True) == manifest.default_for("edge")
    alone = manifest.model_copy(update={"models": (large,)})
    assert alone.default_for("cloud").name == "large"


def test_a_folder_that_is_no_model_set_is_named_and_what_makes_one(tmp_path: Path):
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(WeightsError, match=f"{folder} is not a model set .*'terrace models import"):
            load_manifest(folder)


def test_a_copy_that_is_broken_off_leaves_nothing(tmp_path: Path, content):
    like = tmp_path / "like"
    like.mkdir()
    write(like, content)
    for name in ("a.onnx", "b.onnx"):
        (like / name).symlink_to(tmp_path / "absent")
    with pytest.raises(SetupError, match="No such file") as raised:
        begin_weights(tmp_path / "set", like)
    assert sum(name in str(raised.value) for name in ("a.onnx", "b.onnx")) == 1, "the first file that failed, not all"
    assert list(tmp_path.iterdir()) == [like]
    for name in ("a.onnx", "b.onnx"):
        (like / name).unlink()
    assert begin_weights(tmp_path / "set", like) == load_manifest()


def test_a_class_count_that_disagrees_with_the_hierarchy_is_refused(tmp_path: Path, content):
    content["models"][1]["classes"] = 99
    with pytest.raises(WeightsError, match=r"has 99 classes, hierarchy 'cifar-100' has 100"):
        load_manifest(write(tmp_path, content))


def test_a_hierarchy_that_misses_a_class_is_refused(tmp_path: Path, content):
    content["hierarchy"]["superclasses"]["people"].remove("girl")
    with pytest.raises(WeightsError, match="'girl' stands in no superclass"):
        load_manifest(write(tmp_path, content))


def test_a_name_that_stands_twice_is_refused(tmp_path: Path, content):
    content["models"].append(content["models"][0])
    with pytest.raises(WeightsError, match="names a model twice"):
        load_manifest(write(tmp_path, content))


@pytest.mark.parametrize(
    ("field", "value"),
    [("file", "../escape.onnx"), ("sha256", "beef"), ("temperature", 0), ("tier", "fog"), ("surprise", 1)],
)
def test_a_wrong_field_is_named(tmp_path: Path, content, field: str, value: object):
    content["models"][0][field] = value
    with pytest.raises(WeightsError, match=field):
        load_manifest(write(tmp_path, content))


def test_text_that_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(WeightsError, match=r"manifest\.json is wrong: Invalid JSON: EOF"):
        load_manifest(tmp_path)


def test_a_manifest_without_networks_is_refused(tmp_path: Path, content):
    content["models"] = []
    with pytest.raises(WeightsError, match=r"manifest\.json lists no network"):
        load_manifest(write(tmp_path, content))


def test_an_entry_for_another_file_has_its_digest(tmp_path: Path):
    (tmp_path / "fp32.onnx").write_bytes(b"")
    entry = load_manifest().models[0].with_file(tmp_path / "fp32.onnx", precision="fp32")
    assert (entry.file, entry.size_bytes, entry.precision) == ("fp32.onnx", 0, "fp32")
    assert entry.sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    with pytest.raises(WeightsError, match="absent"):
        entry.with_file(tmp_path / "absent", precision="fp32")


def test_each_upper_network_has_its_first_convolution_as_an_encoder():
    manifest = load_manifest()
    for network in (model for model in manifest.models if model.target == "fine"):
        encoder = manifest.encoder(f"{network.name}.conv1")
        assert encoder.feature_shape == network.feature_shape
        assert network.fine_accuracy is not None
        assert abs(encoder.fp32_fine_accuracy - network.fine_accuracy) <= 0.0005
        assert abs(encoder.fine_accuracy - network.fine_accuracy) <= 0.003


def test_an_encoder_that_is_not_there_is_refused_with_those_there_are():
    with pytest.raises(NotFound, match=r"no encoder 'x.conv1'; the manifest has: resnet-34"):
        load_manifest().encoder("x.conv1")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"network": "gone"}, "belongs to no network"),
        ({"network": "mobilenet-v1-0.5"}, "gives no fine answers to encode for"),
        ({"zero_point": 8, "bits": 3}, "zero_point 8 does not fit 3 bits"),
        ({"kind": "conv7"}, "conv7|conv1"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(tmp_path: Path, content, change: dict[str, Any], sentence: str):
    content["encoders"][0].update(change)
    with pytest.raises(WeightsError, match=sentence):
        load_manifest(write(tmp_path, content))


def test_an_encoder_that_was_cut_from_another_file_is_refused_with_the_remedy(tmp_path: Path, content):
    cut = next(encoder for encoder in content["encoders"] if encoder["kind"] == "conv1")
    cut["tail"]["sha256"] = "0" * 64
    with pytest.raises(WeightsError, match=r"terrace models cut-encoder resnet-34"):
        load_manifest(write(tmp_path, content))
