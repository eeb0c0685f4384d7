"""Export to ONNX and INT8: same answers, folded normalisation, the marked cut."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from models.data import read_sample
from models.manifest import ModelEntry, load_manifest, weights_folder
from models.session import OnnxModel, load_model
from models.split import FEATURES, Part
from tierkit.errors import WeightsError

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
onnx = pytest.importorskip("onnx", reason="needs the extra 'train' (onnx)")

from models.export.dequantize import dequantize_onnx  # noqa: E402
from models.export.quantize import quantize_onnx  # noqa: E402
from models.export.to_onnx import export_onnx  # noqa: E402
from models.training.batches import Statistics, normalise  # noqa: E402
from models.training.networks import build_network  # noqa: E402

pytestmark = pytest.mark.train

KNOWN = Statistics(mean=122, std=68.0)
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("mobilenet-v1", {"alpha": 0.25}),
    ("resnet-34", {"stem_kernel": 7}),
    ("resnet-34", {"stem_kernel": 3, "stem_pool": True}),
    ("wide-resnet", {"depth": 10, "width": 2}),
    ("wide-resnet", {"depth": 10, "width": 1}),
]


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)


def trained(kind: str, options: dict[str, Any]) -> Any:
    """A network whose batch normalisation has seen some images, so that folding it changes something."""
    torch.manual_seed(0)
    network = build_network(kind, 20, options)
    with torch.no_grad():
        for value in network.parameters():
            if value.ndim == 1:
                value.uniform_(0.5, 1.5)
        for _ in range(3):
            network(torch.randn(16, 3, 32, 32))
    return network.eval()


_made: dict[str, Any] = {}
"""Networks and files that several tests look at, made once."""


def exported(kind: str, options: dict[str, Any]) -> Any:
    """The network in ONNX, in FP32."""
    key = f"{kind} {options}"
    if key not in _made:
        _made[key] = export_onnx(trained(kind, options), KNOWN, (32, 32))
    return copy.deepcopy(_made[key])


def quantised(kind: str, options: dict[str, Any], images: np.ndarray) -> Any:
    """The same in INT8."""
    key = f"INT8 {kind} {options}"
    if key not in _made:
        _made[key] = quantize_onnx(exported(kind, options), KNOWN, images)
    return copy.deepcopy(_made[key])


def entry_for(path: Path, features: tuple[int, int, int]) -> ModelEntry:
    entry = load_manifest().default_for("end").with_file(path, precision="fp32")
    return entry.model_copy(update={"feature_shape": features})


def load(model: Any, path: Path, part: Part = "whole") -> OnnxModel:
    path.write_bytes(model.SerializeToString())
    cut = next(value for value in model.graph.value_info if value.name == FEATURES)
    _, *shape = (dim.dim_value for dim in cut.type.tensor_type.shape.dim)
    return load_model(entry_for(path, (shape[0], shape[1], shape[2])), path.parent, part=part)


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_the_exported_network_answers_as_torch_does(kind: str, options: dict[str, Any], images, tmp_path: Path):
    network = trained(kind, options)
    with torch.inference_mode():
        expected = network(normalise(torch.from_numpy(images), KNOWN)).numpy()
    model = exported(kind, options)
    assert "BatchNormalization" not in {node.op_type for node in model.graph.node}
    answer = load(model, tmp_path / "net.onnx").run({"images": images}, ["logits"])["logits"]
    np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    assert (answer.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_head_and_tail_equal_the_whole_in_fp32(kind: str, options: dict[str, Any], images, tmp_path: Path):
    model = exported(kind, options)
    whole, head, tail = (load(model, tmp_path / "net.onnx", part) for part in ("whole", "head", "tail"))
    expected = whole.run({"images": images}, ["logits"])["logits"]
    features = head.run({"images": images}, [FEATURES])
    answer = tail.run(features, ["logits"])["logits"]
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (answer.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_int8_covers_every_weight_and_stays_close(kind: str, options: dict[str, Any], images, tmp_path: Path):
    model, integer = exported(kind, options), quantised(kind, options, images)
    floats = [item for item in integer.graph.initializer if item.data_type == onnx.TensorProto.FLOAT]
    assert max(len(onnx.numpy_helper.to_array(item).ravel()) for item in floats) <= 2048  # scales alone
    assert len(integer.SerializeToString()) < 0.45 * len(model.SerializeToString())
    expected = load(model, tmp_path / "fp32.onnx").run({"images": images}, ["logits"])["logits"]
    whole, head, tail = (load(integer, tmp_path / "int8.onnx", part) for part in ("whole", "head", "tail"))
    answer = whole.run({"images": images}, ["logits"])["logits"]
    spread = expected.std()
    assert np.abs(answer - expected).mean() < 0.25 * spread
    joined = tail.run(head.run({"images": images}, [FEATURES]), ["logits"])["logits"]
    assert np.abs(joined - answer).mean() < 0.1 * spread


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_int8_averages_in_integers_with_the_same_answers(kind, options, images, tmp_path: Path, monkeypatch):
    model, pooled = exported(kind, options), quantised(kind, options, images)
    monkeypatch.setattr("models.export.quantize._average_in_integers", lambda graph: None)
    plain = quantize_onnx(model, KNOWN, images)
    assert "ReduceMean" in {node.op_type for node in plain.graph.node}
    assert "ReduceMean" not in {node.op_type for node in pooled.graph.node}
    for part in ("whole", "tail"):
        inputs = {"images": images}
        if part == "tail":
            inputs = load(plain, tmp_path / "head.onnx", "head").run(inputs, [FEATURES])
        first, second = (
            load(form, tmp_path / f"{name}.onnx", part).run(inputs, ["logits"])["logits"]
            for name, form in (("pooled", pooled), ("plain", plain))
        )
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("tier", ["end", "edge", "cloud"])
def test_the_fp32_form_of_a_shipped_network_answers_nearly_the_same(tier: str, tmp_path: Path):
    entry = load_manifest().default_for(tier)
    content = dequantize_onnx((weights_folder() / entry.file).read_bytes())
    steps = [node.op_type for node in onnx.load_from_string(content).graph.node]
    assert steps.count("DequantizeLinear") == 1, "only the image is UINT8"
    assert "QuantizeLinear" not in steps
    (tmp_path / "fp32.onnx").write_bytes(content)
    labels = load_manifest().labels(entry)
    floating = load_model(entry.with_file(tmp_path / "fp32.onnx", precision="fp32"), tmp_path, labels=labels)
    sample = {"images": read_sample().images[:200]}
    answer, expected = (model.run(sample, ["logits"])["logits"] for model in (floating, load_model(entry)))
    assert np.mean(answer.argmax(1) == expected.argmax(1)) > 0.9
    assert np.abs(answer - expected).max() < 0.1 * np.abs(expected).max()


def test_an_exported_file_says_nothing_of_the_machine_it_was_made_on():
    content = export_onnx(trained("wide-resnet", {"depth": 10, "width": 1}), KNOWN, (32, 32)).SerializeToString()
    assert b".py" not in content
    assert b"/home" not in content


def test_two_exports_of_the_same_weights_are_the_same_file():
    first, second = (
        hashlib.sha256(
            export_onnx(trained("wide-resnet", {"depth": 10, "width": 1}), KNOWN, (32, 32)).SerializeToString()
        )
        for _ in range(2)
    )
    assert first.digest() == second.digest()


def test_a_network_for_another_class_count_does_not_load(tmp_path: Path):
    network = build_network("wide-resnet", 7, {"depth": 10, "width": 1})
    with pytest.raises(WeightsError, match="does not fit"):
        load(export_onnx(network, KNOWN, (32, 32)), tmp_path / "net.onnx")


def test_predicted_weights_are_exported_as_a_usual_layer(tmp_path: Path):
    torch.manual_seed(0)
    network = build_network("mlp", 20, {"predicted": 0.25}).eval()
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28, 3), dtype=np.uint8)
    model = export_onnx(network, KNOWN, (28, 28))
    grey = normalise(torch.from_numpy(images), KNOWN).mean(dim=1, keepdim=True)
    with torch.inference_mode():
        expected = network(grey).numpy()
    session = ort.InferenceSession(model.SerializeToString())
    (answer,) = session.run(["logits"], {"images": images})
    np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-3)
