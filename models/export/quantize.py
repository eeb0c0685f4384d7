"""Static INT8 quantisation (QDQ) of an exported network, calibrated on training images."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from models.data import ImageSet
from models.export.to_onnx import mark_cut
from models.held_out import hold_out
from models.split import FEATURES
from models.training.batches import Statistics
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["calibration_images", "quantize_head", "quantize_onnx", "quantize_tail"]

_CALIBRATION_PER_CLASS = 10
_CALIBRATION_BATCH = 50


def calibration_images(train: ImageSet, held_out_per_class: int) -> tuple[Array, ImageSet]:
    """Some images of each class that were trained on, UINT8 `[n, h, w, 3]`, and the images that were held out.

    Raises:
        DataError: the images have no labels.
    """
    if train.fine is None:
        raise DataError("quantisation needs labelled training images")
    split = hold_out(train.fine, held_out_per_class)
    fine = train.fine[split.train]
    picked = [split.train[fine == label][:_CALIBRATION_PER_CLASS] for label in np.unique(fine)]
    return train.images[np.concatenate(picked)], train.take(split.held_out)


class _Examples(CalibrationDataReader):
    def __init__(self, name: str, values: Array) -> None:
        starts = range(0, len(values), _CALIBRATION_BATCH)
        self._batches = iter([{name: values[start : start + _CALIBRATION_BATCH]} for start in starts])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


def quantize_onnx(model: onnx.ModelProto, known: Statistics, images: Array) -> onnx.ModelProto:
    """INT8 form of a network that `export_onnx` wrote.

    Weights are INT8 with one scale per output channel, activations UINT8 with one scale per tensor from the smallest
    and the largest value seen. The images themselves are the first quantised tensor: their zero point and scale are
    the normalisation, so nothing is rounded there.

    Args:
        model: the FP32 network.
        known: the normalisation that it was trained with.
        images: UINT8 `[n, h, w, 3]`, training images to calibrate on.
    """
    quantised = _quantised_of_pixels(model, known, images)
    _restore_cut(quantised.graph)
    quantised.graph.value_info.extend(value for value in model.graph.value_info if value.name == FEATURES)
    mark_cut(quantised)
    onnx.checker.check_model(quantised, full_check=True)
    return quantised


def quantize_head(model: onnx.ModelProto, known: Statistics, images: Array) -> onnx.ModelProto:
    """INT8 form of what `export_head` wrote; see `quantize_onnx`."""
    quantised = _quantised_of_pixels(model, known, images)
    onnx.checker.check_model(quantised, full_check=True)
    return quantised


def quantize_tail(model: onnx.ModelProto, scale: float, zero_point: int, features: Array) -> onnx.ModelProto:
    """Quantise the tail from `export_tail` to INT8; see `quantize_onnx`.

    Args:
        scale, zero_point: scale and zero point of the UINT8 features that the tail takes.
        features: FP32 `[n, channels, h, w]` as they arrive, to calibrate on.
    """
    quantised = _quantised(model, FEATURES, features, FEATURES, scale, zero_point, [])
    onnx.checker.check_model(quantised, full_check=True)
    return quantised


def _quantised_of_pixels(model: onnx.ModelProto, known: Statistics, images: Array) -> onnx.ModelProto:
    pixels = next(node for node in model.graph.node if node.op_type == "Conv").input[0]
    before = _before(model.graph, pixels)
    quantised = _quantised(model, "images", images, pixels, 1.0 / known.std, known.mean, before)
    _feed_pixels(quantised.graph, pixels)
    return quantised


def _quantised(
    model: onnx.ModelProto,
    takes: str,
    examples: Array,
    first: str,
    scale: float,
    zero_point: int,
    excluded: list[str],
) -> onnx.ModelProto:
    """Quantise with a given scale and zero point for the tensor `first` and measured ones for all others."""
    exact = {
        first: [
            {
                "quant_type": QuantType.QUInt8,
                "scale": np.array(scale, dtype=np.float32),
                "zero_point": np.array(zero_point, dtype=np.uint8),
            }
        ]
    }
    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, target = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, source)
        quantize_static(
            source,
            target,
            _Examples(takes, examples),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=excluded,
            extra_options={"TensorQuantOverrides": exact},
        )
        quantised = onnx.load(target)
    _average_in_integers(quantised.graph)
    return quantised


def _average_in_integers(graph: onnx.GraphProto) -> None:
    """Replace a quantised mean over height and width by `GlobalAveragePool`.

    ONNX Runtime has no mean of quantised values: it dequantises them and averages in FP32. `GlobalAveragePool` it
    computes on the 8-bit values, if a dequantisation stands before it and a quantisation after it. So

        DequantizeLinear, ReduceMean, QuantizeLinear

    becomes, with the scale and zero point of the mean used twice,

        DequantizeLinear, GlobalAveragePool, QuantizeLinear, DequantizeLinear, Flatten, QuantizeLinear
    """
    stored = {item.name: item for item in graph.initializer}
    for at, mean in reversed(list(enumerate(graph.node))):
        if mean.op_type != "ReduceMean":
            continue
        axes = numpy_helper.to_array(stored[mean.input[1]])
        drops_axes = any(attribute.name == "keepdims" and attribute.i == 0 for attribute in mean.attribute)
        (after,) = (node for node in graph.node if mean.output[0] in node.input)
        if sorted(axes % 4) != [2, 3] or not drops_axes or after.op_type != "QuantizeLinear":
            raise ValueError(f"{mean.name!r} is not the mean over height and width of a quantised tensor")
        step, name, make = after.input[1:], mean.output[0], onnx.helper.make_node
        nodes = [
            make("GlobalAveragePool", [mean.input[0]], [f"{name}_pooled"], name=f"{name}_pool"),
            make("QuantizeLinear", [f"{name}_pooled", *step], [f"{name}_quantized"], name=f"{name}_quantize"),
            make("DequantizeLinear", [f"{name}_quantized", *step], [f"{name}_maps"], name=f"{name}_dequantize"),
            make("Flatten", [f"{name}_maps"], [name], name=f"{name}_flatten"),
        ]
        del graph.node[at]
        for node in reversed(nodes):
            graph.node.insert(at, node)
        graph.initializer.remove(stored[mean.input[1]])


def _before(graph: onnx.GraphProto, tensor: str) -> list[str]:
    """Names of the nodes that normalise the image."""
    names: list[str] = []
    for node in graph.node:
        names.append(node.name)
        if tensor in node.output:
            return names
    raise ValueError(f"no node gives {tensor!r}")


def _feed_pixels(graph: onnx.GraphProto, pixels: str) -> None:
    """Let the first convolution read the transposed UINT8 image, in the place of its normalised, quantised self."""
    transpose = next(node for node in graph.node if node.op_type == "Transpose" and "images" in node.input)
    quantise = next(node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == pixels)
    after = next(node for node in graph.node if quantise.output[0] in node.input)
    after.input[0] = transpose.output[0]
    needed: set[str] = {output.name for output in graph.output}
    kept: list[Any] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
    del graph.node[:]
    graph.node.extend(copies)
    used = [item for item in graph.initializer if item.name in needed]
    weights = [numpy_helper.from_array(numpy_helper.to_array(item), item.name) for item in used]
    del graph.initializer[:]
    graph.initializer.extend(weights)


def _restore_cut(graph: onnx.GraphProto) -> None:
    """Name the first convolution's output again.

    The quantiser drops a rectifier before an UINT8 tensor, and with it the tensor between the two; ONNX Runtime drops
    it just as well when it loads the graph.
    """
    first = next(node for node in graph.node if node.op_type == "Conv")
    if first.output[0] == FEATURES:
        return
    rectified, first.output[0] = first.output[0], FEATURES
    position = list(graph.node).index(first) + 1
    graph.node.insert(position, onnx.helper.make_node("Relu", [FEATURES], [rectified], name="features_relu"))


@contextmanager
def _quiet() -> Iterator[None]:
    # The quantiser recommends a preprocessing step that the exporter has already done, on the root logger.
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
