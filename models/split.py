"""Cutting a stored network after its first convolution, without any ONNX library.

The exporter (`models.export`) puts the head's nodes first in the graph, calls the tensor at the cut `features`, and
notes in the model's metadata how many nodes the head has. So head and tail are the stored file with one run of nodes
left out, and every network's weights are stored once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from models import protobuf
from models.protobuf import Field, encode, fields, first
from tierkit.errors import WeightsError

__all__ = ["FEATURES", "HEAD_NODES_KEY", "Part", "extract_nodes", "extract_part"]

Part = Literal["whole", "head", "tail"]

FEATURES = "features"
HEAD_NODES_KEY = "terrace.head_nodes"


def extract_part(model: bytes, part: Part) -> bytes:
    """The ONNX file of the whole network, of its head (`images` to `features`) or of its tail (`features` to `logits`).

    Raises:
        WeightsError: `model` is not an ONNX file from the exporter.
    """
    if part == "whole":
        return model
    try:
        parts = list(fields(memoryview(model)))
        graph = next(value for number, value, _ in parts if number == protobuf.MODEL_GRAPH)
        nodes = range(sum(number == protobuf.GRAPH_NODE for number, _, _ in fields(graph)))
        kept = nodes[: _head_nodes(parts)] if part == "head" else nodes[_head_nodes(parts) :]
        replaced = protobuf.GRAPH_OUTPUT if part == "head" else protobuf.GRAPH_INPUT
        return extract_nodes(model, kept, replaced, _features(graph))
    except (IndexError, ValueError, StopIteration) as error:
        raise WeightsError(f"cannot cut the network into head and tail: {error}") from error


def extract_nodes(model: bytes, kept: Collection[int], replaced: int, value: bytes | memoryview) -> bytes:
    """The ONNX file of some nodes of a network.

    Args:
        kept: Numbers of these nodes, in the order of the file.
        replaced: Field of the graph whose values are replaced: `GRAPH_OUTPUT` or `GRAPH_INPUT` of `models.protobuf`.
        value: The only output or input instead, an encoded `ValueInfoProto`.

    Raises:
        IndexError, ValueError: `model` is not an ONNX file, or no node is kept.
    """
    return b"".join(
        encode(number, _cut_graph(content, frozenset(kept), replaced, value))
        if number == protobuf.MODEL_GRAPH
        else whole
        for number, content, whole in fields(memoryview(model))
    )


def _head_nodes(parts: Iterable[Field]) -> int:
    for number, entry, _ in parts:
        if number == protobuf.MODEL_METADATA and first(entry, protobuf.ENTRY_KEY) == HEAD_NODES_KEY.encode():
            return int(first(entry, protobuf.ENTRY_VALUE))
    raise ValueError(f"the file has no {HEAD_NODES_KEY!r} in its metadata")


def _features(graph: memoryview) -> memoryview:
    """Type and shape of the tensor at the cut."""
    for number, value, _ in fields(graph):
        if number == protobuf.GRAPH_VALUE and first(value, protobuf.VALUE_NAME) == FEATURES.encode():
            return value
    raise ValueError(f"the graph has no tensor {FEATURES!r} between two groups of nodes")


def _cut_graph(graph: memoryview, chosen: Collection[int], replaced: int, value: bytes | memoryview) -> bytes:
    parts = list(fields(graph))
    nodes = [(content, whole) for number, content, whole in parts if number == protobuf.GRAPH_NODE]
    kept = [node for number, node in enumerate(nodes) if number in chosen]
    if not kept:
        raise ValueError(f"the graph has no tensor {FEATURES!r} between two groups of nodes")
    used = {bytes(name) for node, _ in kept for number, name, _ in fields(node) if number == protobuf.NODE_INPUT}
    out = [bytes(whole) for _, whole in kept]
    for number, content, whole in parts:
        if number in (protobuf.GRAPH_NODE, protobuf.GRAPH_VALUE, replaced):
            continue
        # ONNX Runtime warns about weights that no node uses, and would keep them in memory.
        if number == protobuf.GRAPH_INITIALIZER and first(content, protobuf.TENSOR_NAME) not in used:
            continue
        out.append(bytes(whole))
    out.append(encode(replaced, value))
    return b"".join(out)
