"""Export of a trained network to an FP32 ONNX file with normalisation inside and a marked cut."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from models.export.first_layer import of_three_colours
from models.split import FEATURES, HEAD_NODES_KEY
from models.training.batches import Statistics

__all__ = ["export_head", "export_onnx", "export_published", "export_tail", "mark_cut"]


class _Served(nn.Module):
    """UINT8 `[n, h, w, 3]` to what the network gives for normalised images."""

    def __init__(self, network: nn.Module, known: Statistics) -> None:
        super().__init__()
        self.network = network
        self.mean, self.scale = float(known.mean), 1.0 / known.std

    def forward(self, images: Tensor) -> Tensor:
        planes = images.permute(0, 3, 1, 2).float()
        given: Tensor = self.network((planes - self.mean) * self.scale)
        return given


def export_onnx(network: nn.Module, known: Statistics, image_shape: tuple[int, int]) -> onnx.ModelProto:
    """Export the network as ONNX: `images` UINT8 `[n, h, w, 3]` to `logits` FP32 `[n, classes]`, any `n`.

    Batch normalisation is folded into a convolution directly before it and becomes a depthwise convolution elsewhere,
    so that INT8 covers it. The output of the first convolution is called `features`; see `of_three_colours` for
    networks of grey images and for an MLP.

    Args:
        network: maps normalised float images to logits; left in evaluation mode.
        known: the normalisation that it was trained with.
        image_shape: height and width.

    Raises:
        WeightsError: the network cannot take images of three colours.
    """
    network = of_three_colours(network, image_shape)
    model = _export(_of_pixels(network, known), _pixels(image_shape), "images", "logits")
    _name_cut(model)
    mark_cut(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def export_head(network: nn.Module, known: Statistics, image_shape: tuple[int, int]) -> onnx.ModelProto:
    """A network of images that gives features: `images` UINT8 `[n, h, w, 3]` to `features` FP32; see `export_onnx`."""
    return _export(_of_pixels(network, known), _pixels(image_shape), "images", FEATURES)


def export_tail(network: nn.Module, feature_shape: tuple[int, int, int]) -> onnx.ModelProto:
    """A network of features: `features` FP32 `[n, channels, h, w]` to `logits` FP32 `[n, classes]`; see
    `export_onnx`."""
    return _export(network.cpu().eval(), torch.zeros(2, *feature_shape), FEATURES, "logits")


def export_published(network: nn.Module, side: int) -> onnx.ModelProto:
    """A network as others publish it: `input` FP32 `[n, 3, side, side]`, normalised, to `output`; see `export_onnx`."""
    return _export(network.cpu().eval(), torch.zeros(2, 3, side, side), "input", "output")


def _of_pixels(network: nn.Module, known: Statistics) -> nn.Module:
    return _Served(network.cpu().eval(), known).eval()


def _pixels(shape: tuple[int, int]) -> Tensor:
    return torch.zeros(2, *shape, 3, dtype=torch.uint8)


def _export(network: nn.Module, example: Tensor, takes: str, gives: str) -> onnx.ModelProto:
    buffer = io.BytesIO()
    with _quiet():
        torch.onnx.export(
            network,
            (example,),
            buffer,
            input_names=[takes],
            output_names=[gives],
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    _normalisation_to_convolution(model.graph)
    # The exporter notes the source file of every node; those paths are private.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.checker.check_model(model, full_check=True)
    return model


def mark_cut(model: onnx.ModelProto) -> None:
    """Order the nodes so that those before `features` come first, and note their number for `models.split`."""
    graph = model.graph
    producer = {name: node for node in graph.node for name in node.output}
    head: set[int] = set()
    queue = [FEATURES]
    while queue:
        node = producer.get(queue.pop())
        if node is not None and id(node) not in head:
            head.add(id(node))
            queue.extend(node.input)
    # Dequantised weights of the tail need no input, so both groups keep their own topological order.
    first = [node for node in graph.node if id(node) in head]
    rest = [node for node in graph.node if id(node) not in head]
    ordered = [*first, *rest]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)
    kept = [item for item in model.metadata_props if item.key != HEAD_NODES_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=HEAD_NODES_KEY, value=str(len(first)))


def _name_cut(model: onnx.ModelProto) -> None:
    graph = model.graph
    first = next(node for node in graph.node if node.op_type == "Conv")
    old = first.output[0]
    for node in graph.node:
        node.input[:] = [FEATURES if name == old else name for name in node.input]
    first.output[0] = FEATURES
    for value in graph.value_info:
        if value.name == old:
            value.name = FEATURES


def _normalisation_to_convolution(graph: onnx.GraphProto) -> None:
    values = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    for node in graph.node:
        if node.op_type != "BatchNormalization":
            continue
        epsilon = next((item.f for item in node.attribute if item.name == "epsilon"), 1e-5)
        gamma, beta, mean, variance = (values[name].astype(np.float64) for name in node.input[1:5])
        scale = gamma / np.sqrt(variance + epsilon)
        weight, bias = scale[:, None, None, None], beta - mean * scale
        stem = f"{node.output[0]}_scale"
        graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), f"{stem}.weight"))
        graph.initializer.append(numpy_helper.from_array(bias.astype(np.float32), f"{stem}.bias"))
        source, output = node.input[0], node.output[0]
        node.CopyFrom(
            onnx.helper.make_node(
                "Conv", [source, f"{stem}.weight", f"{stem}.bias"], [output], name=stem, group=len(scale)
            )
        )
    used = {name for node in graph.node for name in node.input}
    kept = [item for item in graph.initializer if item.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


@contextmanager
def _quiet() -> Iterator[None]:
    # The exporter reports its own deprecations and its missing optional parts; neither concerns our graphs.
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
