"""Small networks for the benchmark of releases, made here: three colours, and what can be wrong with a network.

Each answers with the strongest colour of a picture, after some layers that cost time and change little.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.importing.run import Wish, import_network
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = ["COLOURS", "FAULTS", "KINDS", "Fault", "Kind", "base_set", "pictures", "variant"]

COLOURS = ("red", "green", "blue")
SIDE = 32
Fault = Literal["one class", "slow", "nan", "damaged"]
Kind = Literal["good", "slow", "nan"]
KINDS: tuple[Kind, ...] = ("good", "slow", "nan")
FAULTS: tuple[Fault, ...] = ("one class", "slow", "nan", "damaged")

_WIDTH = 512
"""Features of a layer."""
_LAYERS = {"good": 300, "slow": 1500, "nan": 300, "upper": 1}
"""Layers by kind of network: five times as many make it five times as slow. They share their weights."""
_WHITE = 0.999
"""Brightness of the first pixel from which on the network with a fault gives NaN."""
_BIAS = "answer.bias"


def _network(path: Path, kind: str) -> None:
    chance = np.random.default_rng(len(kind))
    height = width = SIDE
    colours = np.zeros((3, height, width, _WIDTH), np.float32)
    for colour in range(3):
        colours[colour, :, :, colour] = 30.0 / (height * width)
    mixing = np.eye(_WIDTH, dtype=np.float32) + chance.normal(0, 1e-6, (_WIDTH, _WIDTH)).astype(np.float32)
    stored: dict[str, Array] = {
        "first": colours.reshape(-1, _WIDTH),
        "layer": mixing,
        "answer": np.eye(_WIDTH, 3, dtype=np.float32),
        _BIAS: np.zeros(3, np.float32),
    }
    nodes = [
        helper.make_node("Flatten", ["input"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "first"], ["h0"]),
    ]
    for layer in range(_LAYERS[kind]):
        nodes.append(helper.make_node("MatMul", [f"h{layer}", "layer"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("MatMul", [f"h{_LAYERS[kind]}", "answer"], ["scores"]))
    nodes.append(helper.make_node("Add", ["scores", _BIAS], ["logits" if kind != "nan" else "plain"]))
    if kind == "nan":
        # (0.999 - brightness) / (0.999 - brightness), where the difference is at least 0: 1, or 0 / 0.
        colours_of_first = np.arange(3) * height * width
        stored |= {"pixel": colours_of_first, "white": np.array([_WHITE], np.float32)}
        nodes += [
            helper.make_node("Gather", ["flat", "pixel"], ["first pixel"], axis=1),
            helper.make_node("ReduceMean", ["first pixel"], ["brightness"], axes=[1], keepdims=1),
            helper.make_node("Sub", ["white", "brightness"], ["difference"]),
            helper.make_node("Relu", ["difference"], ["dark"]),
            helper.make_node("Div", ["dark", "dark"], ["one"]),
            helper.make_node("Mul", ["plain", "one"], ["logits"]),
        ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["n", 3, height, width])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))


def base_set(folder: Path, kind: Kind) -> Path:
    """A model set of a network of this kind for end devices, and a good one for the edge."""
    folder.mkdir(parents=True)
    labels, preprocess = folder / "labels.txt", folder / "preprocess.toml"
    labels.write_text("\n".join(COLOURS) + "\n")
    preprocess.write_text(
        f'size = [{SIDE}, {SIDE}]\nresize = "squash"\nresample = "bilinear"\ncolour = "rgb"\n'
        "scale = 255\nmean = 0.0\nstd = 1.0\n"
    )
    for name, tier in ((kind, Tier.END), ("upper", Tier.EDGE)):
        file = folder / f"colours-{tier}.onnx"
        _network(file, name)
        import_network(Wish(file=file, models=folder / "set", tier=tier, labels=labels, preprocess=preprocess))
    return folder / "set"


def variant(base: Path, folder: Path, number: int, *, one_class: bool = False) -> Path:
    """Another set with the same networks, but for the end devices' file: it is another one for each number.

    Args:
        one_class: let the network answer every picture with the first class.
    """
    shutil.copytree(base, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (entry,) = (each for each in manifest["models"] if each["tier"] == "end")
    model = onnx.load(str(folder / entry["file"]))
    model.doc_string = f"variant {number}"
    if one_class:
        (bias,) = (each for each in model.graph.initializer if each.name.endswith(_BIAS))
        bias.CopyFrom(numpy_helper.from_array(np.array([1000, 0, 0], np.float32), bias.name))
    content = model.SerializeToString()
    (folder / entry["file"]).write_bytes(content)
    entry |= {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def pictures(count: int, white: float = 0.0, seed: int = 0) -> Array:
    """Noise with a tint, UINT8 `[count, 32, 32, 3]`; a share of them has a white first pixel."""
    chance = np.random.default_rng(seed)
    made = chance.integers(0, 200, (count, SIDE, SIDE, 3), np.uint8)
    tints = chance.integers(0, 3, count)
    made[np.arange(count), :, :, tints] += 50
    made[:, 0, 0] = 0
    made[chance.random(count) < white, 0, 0] = 255
    return made
