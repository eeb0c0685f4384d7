"""The FP32 form of a shipped INT8 network: the same operators over floats, to time the two side by side.

The FP32 files of the shipped networks are large and not shipped; their speed does not depend on the weights' values.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from models.split import HEAD_NODES_KEY
from tierkit.tensors import Array

__all__ = ["dequantize_onnx"]


def dequantize_onnx(content: bytes) -> bytes:
    """An INT8 file that `quantize_onnx` wrote as FP32 file: shapes and operators of the network before quantisation.

    The weights keep the values that INT8 rounded them to, so the answers are close to the original's, not the same.
    It cannot be cut into head and tail.
    """
    model = onnx.load_from_string(content)
    graph = model.graph
    stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    producer = {name: node.op_type for node in graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    original: dict[str, str] = {}
    """The float tensor by the quantised one."""
    for node in graph.node:
        source, output = node.input[0], node.output[0]
        if node.op_type == "QuantizeLinear":
            original[output] = source
        elif node.op_type != "DequantizeLinear" or source not in {*stored, *original}:
            nodes.append(node)  # also the image's own step to floats, since it is UINT8 in both forms
        elif source in stored:
            weights = _floats(*(stored[name] for name in node.input))
            graph.initializer.append(numpy_helper.from_array(weights, output))
        else:
            # The quantiser drops the rectifier before a tensor whose least value is zero: UINT8 rectifies by itself.
            rectify = stored[node.input[2]] == 0 and producer[original[source]] != "Relu"
            step = "Relu" if rectify else "Identity"
            nodes.append(onnx.helper.make_node(step, [original[source]], [output], name=output))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    used = {name for node in copies for name in node.input}
    kept = [onnx.TensorProto.FromString(item.SerializeToString()) for item in graph.initializer if item.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    metadata = [item for item in model.metadata_props if item.key != HEAD_NODES_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(metadata)
    onnx.checker.check_model(model, full_check=True)
    answer: bytes = model.SerializeToString()
    return answer


def _floats(values: Array, scale: Array, zero: Array) -> Array:
    """Return weights or biases as FP32. Each output channel (the first axis) has one scale and zero point."""
    along = (-1, *(1 for _ in values.shape[1:]))
    return ((values.astype(np.float32) - zero.reshape(along)) * scale.reshape(along)).astype(np.float32)
