"""Cutting a stored network after its first convolution, without any ONNX library.

The exporter (`models.export`) puts the head's nodes first in the graph, calls the tensor at the cut `features`, and
notes in the model's metadata how many nodes the head has. So head and tail are the stored file with one run of nodes
left out, and every network's weights are stored once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from models import protobuf
from models.protobuf import Field, encode, fields, first
from tierkit.errors import WeightsError

__all__ = ["FEATURES", "HEAD_NODES_KEY", "Part", "extract_part"]

Part = Literal["whole", "head", "tail"]

FEATURES = "features"
HEAD_NODES_KEY = "terrace.head_nodes"


def extract_part(model: bytes, part: Part) -> bytes:
    """The ONNX file of the whole network, of its head (`images` to `features`) or of its tail (`features` to
    `logits`).

    Raises:
        WeightsError: `model` is no ONNX file that the exporter wrote.
    """
    if part == "whole":
        return model
    try:
        parts = list(fields(memoryview(model)))
        head_nodes = _head_nodes(parts)
        return b"".join(
            encode(number, _cut_graph(value, part, head_nodes)) if number == protobuf.MODEL_GRAPH else whole
            for number, value, whole in parts
        )
    except (IndexError, ValueError) as error:
        raise WeightsError(f"cannot cut the network into head and tail: {error}") from error


def _head_nodes(parts: Iterable[Field]) -> int:
    for number, entry, _ in parts:
        if number == protobuf.MODEL_METADATA and first(entry, protobuf.ENTRY_KEY) == HEAD_NODES_KEY.encode():
            return int(first(entry, protobuf.ENTRY_VALUE))
    raise ValueError(f"the file has no {HEAD_NODES_KEY!r} in its metadata")


def _cut_graph(graph: memoryview, part: Part, head_nodes: int) -> bytes:
    parts = list(fields(graph))
    nodes = [(value, whole) for number, value, whole in parts if number == protobuf.GRAPH_NODE]
    kept = nodes[:head_nodes] if part == "head" else nodes[head_nodes:]
    used = {bytes(name) for node, _ in kept for number, name, _ in fields(node) if number == protobuf.NODE_INPUT}
    features = FEATURES.encode()
    cut = [
        value
        for number, value, _ in parts
        if number == protobuf.GRAPH_VALUE and first(value, protobuf.VALUE_NAME) == features
    ]
    if not cut or not kept:
        raise ValueError(f"the graph has no tensor {FEATURES!r} between two groups of nodes")
    replaced = protobuf.GRAPH_OUTPUT if part == "head" else protobuf.GRAPH_INPUT
    out = [bytes(whole) for _, whole in kept]
    for number, value, whole in parts:
        if number in (protobuf.GRAPH_NODE, protobuf.GRAPH_VALUE, replaced):
            continue
        # ONNX Runtime warns about weights that no node uses, and would keep them in memory.
        if number == protobuf.GRAPH_INITIALIZER and first(value, protobuf.TENSOR_NAME) not in used:
            continue
        out.append(bytes(whole))
    out.append(encode(replaced, bytes(cut[0])))
    return b"".join(out)
