"""Model sets of imported networks: small classifiers that say which colour a picture has most of."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from models.importing import run
from models.importing.run import Wish, import_network
from terrace.cli import run as terrace
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = ["COLOURS", "colour_network", "colour_pictures", "colour_set", "coloured", "encoded_set", "wide_picture"]

COLOURS = ("red", "green", "blue")


def colour_network(
    path: Path,
    *,
    size: int = 32,
    factor: float = 10.0,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    single: bool = False,
    grow: int = 0,
) -> Path:
    """Convolution, rectifier, mean, linear layer: the scores are the means of the colours.

    Args:
        factor: how sure its answers are.
        weights: of the three colours; one of less weight is taken for another.
        single: whether its graph fixes the batch at one picture.
        grow: products with the unit matrix at the end, which change nothing.
    """
    kernel = np.zeros((3, 3, 3, 3), np.float32)
    for colour, weight in enumerate(weights):
        kernel[colour, colour, 1, 1] = weight
    stored = {
        "kernel": kernel,
        "bias": np.zeros(3, np.float32),
        "form": np.array([1 if single else -1, 3]),
        "last": (factor * np.eye(3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["input", "kernel", "bias"], ["filtered"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["filtered"], ["rectified"]),
        helper.make_node("GlobalAveragePool", ["rectified"], ["pooled"]),
        helper.make_node("Reshape", ["pooled", "form"], ["means"]),
    ]
    for at in range(grow):
        stored[f"unit{at}"] = np.eye(3, dtype=np.float32)
        nodes.append(helper.make_node("MatMul", [nodes[-1].output[0], f"unit{at}"], [f"again{at}"]))
    nodes.append(helper.make_node("MatMul", [nodes[-1].output[0], "last"], ["scores"]))
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["n", 3, size, size])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(values, name) for name, values in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def colour_set(folder: Path, networks: Mapping[str, Path], *, validate: Path | None = None) -> Path:
    """A model set without hierarchy in `folder`, of one network file for each tier, called after the tier; returns it.

    Args:
        validate: labelled pictures to measure them on.
    """
    labels = folder.parent / f"{folder.name}.txt"
    labels.write_text("\n".join(COLOURS) + "\n")
    # Nothing depends on the speed, and measuring it takes two seconds.
    with mock.patch.object(run, "least_ms_per_image", return_value=1.0):
        for tier, file in networks.items():
            wish = Wish(file=file, models=folder, tier=Tier(tier), labels=labels, name=f"of-{tier}", validate=validate)
            import_network(wish)
    return folder


def encoded_set(folder: Path, sides: Mapping[str, int], *, single: Collection[str] = (), factor: float = 10.0) -> Path:
    """A model set in a folder, of a network for each tier that sees squares of this side; those above the end devices
    have encoders.

    Args:
        single: tiers whose networks take one picture at a time.
        factor: how sure the answers are.
    """
    networks = {
        tier: colour_network(folder / f"{tier}.onnx", size=side, single=tier in single, factor=factor)
        for tier, side in sides.items()
    }
    models = colour_set(folder / "set", networks)
    labelled = colour_pictures(folder / "labelled", size=max(sides.values()))
    cut = ["models", "cut-encoder", "--models", str(models), "--out", str(models), "--dataset", str(labelled)]
    assert terrace(cut) == 0
    return models


def coloured(colour: str, size: int = 32, *, strength: int = 200) -> Array:
    """UINT8 `[size, size, 3]`, mostly of that colour."""
    pixels = np.full((size, size, 3), 40, np.uint8)
    pixels[..., COLOURS.index(colour)] = strength
    return pixels


def wide_picture(colour: str, form: str, size: tuple[int, int] = (200, 90), *, edges: str) -> bytes:
    """A file: the middle, a square, is of one colour, and what is left and right of it of another."""
    width, height = size
    image = Image.new("RGB", size, edges)
    image.paste(Image.new("RGB", (height, height), colour), ((width - height) // 2, 0))
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def colour_pictures(folder: Path, each: int = 4, size: int = 32) -> Path:
    """PNG files in folders by class, from clear to unclear ones; returns the folder."""
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for number in range(each):
            picture = Image.fromarray(coloured(colour, size, strength=200 - number * (150 // each)))
            picture.save(folder / colour / f"{number:03}.png")
    return folder
