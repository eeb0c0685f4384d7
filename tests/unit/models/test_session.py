"""ONNX Runtime sessions of the shipped networks, whole and cut."""

import builtins
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from models.data import read_sample
from models.manifest import load_manifest, weights_folder
from models.session import OnnxModel, load_model, plain, softmax, verify_file
from models.split import extract_part
from tierkit.errors import MissingExtra, ProviderUnavailable, SetupError, WeightsError
from tierkit.inference.model import Model
from tierkit.tensors import TensorSpec
from tierkit.types import Tier


@pytest.fixture(scope="module")
def images():
    return read_sample().images[:60]


@pytest.mark.parametrize("tier", Tier)
def test_a_shipped_network_is_a_model(tier: Tier, images):
    entry = load_manifest().default_for(tier)
    model = load_model(entry)
    assert isinstance(model, Model)
    assert model.inputs == (TensorSpec(name="images", datatype="UINT8", shape=(-1, *entry.input_shape)),)
    assert [spec.name for spec in model.outputs] == ["logits", "probabilities"]
    assert model.labels["logits"] == load_manifest().labels(entry)
    assert model.sha256 == entry.sha256
    assert model.parameters["temperature"] == entry.temperature
    answer = model.run({"images": images}, ["logits", "probabilities"])
    assert answer["logits"].shape == (60, entry.classes)
    assert answer["logits"].dtype == answer["probabilities"].dtype == np.float32
    np.testing.assert_allclose(answer["probabilities"].sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(answer["probabilities"], softmax(answer["logits"], entry.temperature))


@pytest.mark.parametrize("tier", Tier)
def test_only_what_is_asked_for_comes_back(tier: Tier, images):
    model = load_model(load_manifest().default_for(tier))
    assert list(model.run({"images": images[:1]}, ["probabilities"])) == ["probabilities"]
    assert model.run({"images": images[:1]}, []) == {}


@pytest.mark.parametrize("tier", Tier)
def test_a_batch_and_its_images_one_by_one_agree(tier: Tier, images):
    model = load_model(load_manifest().default_for(tier))
    together = model.run({"images": images[:5]}, ["logits"])["logits"]
    alone = [model.run({"images": images[index : index + 1]}, ["logits"])["logits"][0] for index in range(5)]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("images_in_batch", [1, 7, 8, 9, 50])
def test_slices_on_several_cores_give_what_one_core_gives(images, images_in_batch, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    entry = load_manifest().default_for(Tier.EDGE)
    batch = {"images": images[:images_in_batch]}
    one = load_model(entry, threads=1).run(batch, ["logits"])["logits"]
    three = load_model(entry, threads=3).run(batch, ["logits"])["logits"]
    assert three.shape == (images_in_batch, entry.classes)
    np.testing.assert_allclose(three, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("side", "provider", "expected"),
    [(224, "cpu", [2] * 6), (224, "cuda", [12]), (1024, "cpu", [1] * 12), (128, "cpu", [6, 6]), (32, "cpu", [12])],
)
def test_large_images_run_in_pieces(side, provider, expected):
    sizes = []

    class Session:
        def get_inputs(self):
            return [SimpleNamespace(shape=["n", side, side, 3])]

        def run(self, _outputs, inputs):
            sizes.append(len(inputs["images"]))
            return [inputs["images"][:, 0, 0, :1].astype(np.float32)]

    entry = load_manifest().default_for(Tier.END).model_copy(update={"input_shape": (side, side, 3)})
    model = OnnxModel(entry, "whole", "0" * 64, Session, (), provider)
    numbered = np.broadcast_to(np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1), (12, side, side, 3))
    assert model.run({"images": numbered}, ["logits"])["logits"].ravel().tolist() == list(range(12))
    assert sizes == expected


def test_large_images_run_in_pieces_on_each_core():
    sizes: dict[str, list[int]] = {}

    class Session:
        def get_inputs(self):
            return [SimpleNamespace(shape=["n", 224, 224, 3])]

        def run(self, _outputs, inputs):
            sizes.setdefault(threading.current_thread().name, []).append(len(inputs["images"]))
            return [inputs["images"][:, 0, 0, :1].astype(np.float32)]

    entry = load_manifest().default_for(Tier.END).model_copy(update={"input_shape": (224, 224, 3)})
    model = OnnxModel(entry, "whole", "0" * 64, Session, (), "cpu", threads=2)
    numbered = np.broadcast_to(np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1), (7, 224, 224, 3))
    assert model.run({"images": numbered}, ["logits"])["logits"].ravel().tolist() == list(range(7))
    assert sorted(sizes.values()) == [[2, 1], [2, 2]]


@pytest.mark.parametrize(("provider", "threads"), [("cpu", 1), ("cpu", 3), ("cuda", 1)])
def test_a_graph_for_one_image_gets_one_at_a_time(provider, threads):
    sizes = []

    class Session:
        def get_inputs(self):
            return [SimpleNamespace(shape=[1, 32, 32, 3])]

        def run(self, _outputs, inputs):
            sizes.append(len(inputs["images"]))
            return [inputs["images"][:, 0, 0, :1].astype(np.float32)]

    entry = load_manifest().default_for(Tier.END)
    model = OnnxModel(entry, "whole", "0" * 64, Session, (), provider, threads=threads)
    numbered = np.broadcast_to(np.arange(11, dtype=np.uint8).reshape(11, 1, 1, 1), (11, 32, 32, 3))
    assert model.run({"images": numbered}, ["logits"])["logits"].ravel().tolist() == list(range(11))
    assert sizes == [1] * 11


def test_an_unloaded_network_answers_the_same_when_it_is_loaded_again(images, tmp_path):
    entry = load_manifest().default_for(Tier.END)
    file = tmp_path / entry.file
    shutil.copy(weights_folder() / entry.file, file)
    model = load_model(entry, tmp_path, labels=load_manifest().labels(entry))
    before, facts = model.run({"images": images}, ["logits"])["logits"], (model.inputs, model.outputs, model.labels)
    model.unload()
    model.unload()
    assert (model.inputs, model.outputs, model.labels) == facts
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(WeightsError, match="is not the file of the manifest"):
        model.load()
    file.write_bytes(content)
    model.load()
    model.load()
    assert np.array_equal(model.run({"images": images}, ["logits"])["logits"], before)


def test_a_slice_that_fails_fails_the_batch(images, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    model = load_model(load_manifest().default_for(Tier.EDGE), threads=2)
    with pytest.raises(Exception, match="images"):
        model.run({"images": images[:, :16]}, ["logits"])
    assert model.run({"images": images}, ["logits"])["logits"].shape == (60, 100)


def test_more_threads_than_cores_are_refused(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(SetupError, match="3 threads are asked for, and this machine has 2 cores"):
        load_model(load_manifest().default_for(Tier.END), threads=3)


@pytest.mark.parametrize("tier", Tier)
def test_head_and_tail_make_the_whole(tier: Tier, images):
    entry = load_manifest().default_for(tier)
    head, tail = load_model(entry, part="head"), load_model(entry, part="tail")
    assert (head.name, tail.name) == (f"{entry.name}-head", f"{entry.name}-tail")
    assert head.outputs == tail.inputs
    assert head.outputs[0].shape == (-1, *entry.cut.shape)
    assert head.labels == {}
    assert head.parameters["parameters"] == entry.head_parameters
    features = head.run({"images": images}, ["features"])["features"]
    joined = tail.run({"features": features}, ["logits"])["logits"]
    whole = load_model(entry).run({"images": images}, ["logits"])["logits"]
    assert np.mean(joined.argmax(axis=1) == whole.argmax(axis=1)) >= 0.97


def test_the_heads_are_the_encoders_of_the_design():
    heads = {entry.tier: (entry.feature_shape, entry.head_parameters) for entry in load_manifest().models}
    assert heads["edge"] == ((64, 16, 16), 9472)
    assert heads["cloud"] == ((16, 32, 32), 432)


def test_a_changed_file_is_refused_by_name(tmp_path: Path):
    entry = load_manifest().models[0]
    content = bytearray((weights_folder() / entry.file).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / entry.file).write_bytes(content)
    for check in (lambda: verify_file(entry, tmp_path), lambda: load_model(entry, tmp_path)):
        with pytest.raises(WeightsError, match=entry.file):
            check()


def test_a_missing_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(WeightsError, match=load_manifest().models[0].file):
        verify_file(load_manifest().models[0], tmp_path)


def test_a_file_that_is_no_network_is_refused_by_name(tmp_path: Path):
    (tmp_path / "text.onnx").write_bytes(b"not a network")
    entry = load_manifest().models[0].with_file(tmp_path / "text.onnx", precision="int8")
    for part in ("whole", "head", "tail"):
        with pytest.raises(WeightsError, match=r"text\.onnx"):
            load_model(entry, tmp_path, part=part)


@pytest.mark.parametrize("change", [{"classes": 21}, {"input_shape": (64, 64, 3)}])
def test_a_network_that_does_not_fit_its_entry_is_refused(change):
    with pytest.raises(WeightsError, match="does not fit its manifest entry"):
        load_model(load_manifest().models[0].model_copy(update=change))


def test_a_number_of_labels_that_disagrees_with_the_network_is_refused():
    with pytest.raises(WeightsError, match="the hierarchy names 2"):
        load_model(load_manifest().models[0], labels=("cat", "dog"))


def test_the_runtime_reports_to_nobody(tmp_path: Path):
    program = "import models.manifest as m, models.session as s; s.load_model(m.load_manifest().models[0])"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CI": "", "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env={**environment, **home}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == [], "an identifier of this machine, or what waits to be sent"


def test_a_provider_that_is_not_there_is_refused():
    with pytest.raises(ProviderUnavailable, match="cpu, cuda"):
        load_model(load_manifest().models[0], provider="tpu")


def test_cuda_needs_its_extra():
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(ProviderUnavailable, match="extra 'gpu'"):
        load_model(load_manifest().models[0], provider="cuda")


@pytest.mark.parametrize(
    ("failure", "error", "says"),
    [
        (ModuleNotFoundError("onnxruntime"), MissingExtra, r"\[cpu\]"),
        (ImportError("cannot allocate memory"), SetupError, "does not start: cannot allocate memory"),
    ],
)
def test_without_onnx_runtime_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, failure, error, says):
    real = builtins.__import__

    def without(name: str, *rest, **more):
        if name == "onnxruntime":
            raise failure
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(error, match=says):
        load_model(load_manifest().models[0])


def test_a_truncated_network_cannot_be_cut():
    content = (weights_folder() / load_manifest().models[0].file).read_bytes()
    with pytest.raises(WeightsError, match="cannot cut"):
        extract_part(content[: len(content) // 2], "tail")


def test_the_parts_hold_each_weight_once():
    entry = load_manifest().default_for("edge")
    content = (weights_folder() / entry.file).read_bytes()
    head, tail = extract_part(content, "head"), extract_part(content, "tail")
    assert len(head) < 100_000
    assert len(head) + len(tail) < 1.02 * len(content)
    assert extract_part(content, "whole") == content


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : Error: a:Relu(-1) is not\na function", "Error: a:Relu(-1) is not a function"),
        (
            "[ONNXRuntimeError] : 1 : FAIL : /src/core/graph/load.h:46 void ort::Validate(const std::map<std::string, "
            "std::function<void(int)> >&, bool) const Opset 40 is under development (for now).",
            "Opset 40 is under development (for now)",
        ),
        (
            "[ONNXRuntimeError] : 6 : E : while running Reshape: /src/a.cc:7 ort::R::R(int) no",
            "while running Reshape: no",
        ),
        ("", ""),
    ],
)
def test_what_the_runtime_says_is_said_without_its_source(message: str, expected: str) -> None:
    assert plain(message) == expected
