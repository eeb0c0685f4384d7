"""A small network of shapes as a release has it, and pictures that devices have kept of them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from models.kept.sample import KeptPicture
from models.kept.store import KeptStore
from models.manifest import ModelEntry
from models.training.config import TrainConfig
from tests.shapes import SHAPES, shape_images
from tierkit.tensors import Array
from tierkit.types import Tier
from training.messages import RunSpec
from training.own_data import OwnData
from training.strategies.config import OuterConfig

__all__ = ["CONFIG", "SIDE", "entry_of", "keep", "kept_picture", "network", "own", "run_on_kept_pictures"]

SIDE = 8
CONFIG = TrainConfig.model_validate(
    {
        "name": "shapes",
        "tier": "end",
        "target": "fine",
        "network": {"kind": "file"},
        "epochs": 40,
        "batch_size": 8,
        "peak_rate": 0.05,
        "schedule": "constant",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "label_smoothing": 0.0,
        "crop_padding": 0,
        "precision": "fp32",
    }
)


def network(*extra: onnx.NodeProto, classes: int = 3, **stored: np.ndarray) -> bytes:
    """UINT8 images, a convolution, a rectifier, a mean and a linear layer, all with random weights."""
    draw = np.random.default_rng(0)
    held = {
        "scale": np.array(1 / 255, np.float32),
        "kernel": draw.normal(0, 0.3, (6, 3, 3, 3)).astype(np.float32),
        "bias": np.zeros(6, np.float32),
        "form": np.array([0, -1], np.int64),
        "last": draw.normal(0, 0.3, (6, classes)).astype(np.float32),
        "shift": np.zeros(classes, np.float32),
        **stored,
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["small"]),
        *extra,
        helper.make_node("Transpose", ["small"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["planes", "kernel", "bias"], ["filtered"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["filtered"], ["rectified"]),
        helper.make_node("GlobalAveragePool", ["rectified"], ["pooled"]),
        helper.make_node("Reshape", ["pooled", "form"], ["means"]),
        helper.make_node("Gemm", ["means", "last", "shift"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "shapes",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", SIDE, SIDE, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(values, name) for name, values in held.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(made.SerializeToString())


def entry_of(content: bytes, classes: int = 3, **changes: object) -> ModelEntry:
    """The entry of such a network: a fine one with three classes, a coarse one with two."""
    given: dict[str, object] = {
        "name": "shapes",
        "tier": "end",
        "file": "shapes.onnx",
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
        "target": "fine" if classes == 3 else "coarse",
        "classes": classes,
        "input_shape": (SIDE, SIDE, 3),
        "precision": "fp32",
        "parameters": 21,
        "temperature": 1.0,
        "coarse_accuracy": None,
        "fine_accuracy": None,
        "test_images": 0,
        "ece_before": None,
        "ece_after": None,
        "feature_shape": None,
        "head_parameters": None,
        "training": None,
        **changes,
    }
    return ModelEntry.model_validate(given)


def own(content: bytes, layers: int = 1, side: int = SIDE) -> OwnData:
    return OwnData(
        release="shapes@1",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        layers=layers,
        hierarchy=SHAPES.content(),
        height=side,
        width=side,
    )


def run_on_kept_pictures() -> RunSpec:
    """The description of a run that trains this network."""
    content = network()
    return RunSpec(
        id="a" * 32,
        network=CONFIG,
        choice="improve",
        strategy=OuterConfig(),
        workers=3,
        wire="fp32",
        values=21,
        buffers=0,
        data_sha256=own(content).sha256,
        lease_s=30.0,
        own=own(content),
    )


def kept_picture(number: int, label: int, content: bytes, **changes: object) -> KeptPicture:
    """A picture of which the cloud says a class with a confidence of 0.9."""
    coarse = SHAPES.parent[label]
    given: dict[str, object] = {
        "source": "door",
        "sequence": number,
        "taken_at": None,
        "sha256": hashlib.sha256(content).hexdigest(),
        "release": 1,
        "local_sha256": "0" * 64,
        "local": 1 - coarse,
        "local_confidence": 0.6,
        "margin": 0.2,
        "tier": Tier.CLOUD,
        "node_id": "cloud-1",
        "upper_sha256": "1" * 64,
        "label": label,
        "confidence": 0.9,
        "coarse_label": coarse,
        "coarse_confidence": 0.9,
        "kind": "differs",
        "form": "pixels",
        "classes": SHAPES.digest,
        **changes,
    }
    return KeptPicture(**given)  # type: ignore[arg-type]


def keep(folder: Path, labels: set[int], *, seed: int = 0, most: int = 36, **changes: object) -> Path:
    """Let a device keep pictures of some classes; returns the folder."""
    images = shape_images(SIDE, seed)
    assert images.fine is not None
    store = KeptStore(folder, 10_000_000)
    for number, (pixels, label) in enumerate(zip(images.images[:most], images.fine[:most], strict=True), start=1):
        if int(label) in labels:
            content = png(pixels)
            store.keep(kept_picture(number, int(label), content, **changes), content)
    store.close()
    return folder


def png(pixels: Array) -> bytes:
    """A file."""
    written = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(written, "PNG")
    return written.getvalue()
