"""Multiply-adds and peak memory of a network by picture.

S. Bianco, R. Cadene, L. Celona and P. Napoletano, "Benchmark Analysis of Representative Deep Neural Network
Architectures", 2018, compare networks by these figures, and by accuracy per parameter (accuracy density).
"""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path
from typing import TypeVar

from models.graph import Graph, Operator, read_graph
from models.manifest import Costs, Manifest, ModelEntry, NamedFile, PartFile
from models.session import verify_file
from models.split import Part, extract_part
from tierkit.errors import WeightsError

__all__ = ["costs_of", "graph_costs", "node_macs", "with_costs"]

T = TypeVar("T", ModelEntry, PartFile)

log = logging.getLogger(__name__)

_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "FusedConv": 1, "NhwcConv": 1, "NhwcFusedConv": 1}
"""Number of the input that holds the weights `[out, in / groups, ...]`."""
_PRODUCTS = {"MatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
_MATRICES = {"Gemm", "QGemm"}
_UNCOUNTED = {"Einsum", "Attention", "DeformConv", "LSTM", "GRU", "RNN", "FusedMatMul", "DFT", "STFT"}
"""Operators that multiply and add in other ways."""
_WITHOUT = {
    "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
    "QLinearAveragePool", "QLinearGlobalAveragePool", "QuantizeLinear", "DequantizeLinear", "NhwcMaxPool", "Gelu",
    "FastGelu", "BiasGelu", "QuickGelu", "BiasAdd", "BiasSplitGelu", "SkipLayerNormalization", "LayerNormalization",
}  # fmt: skip
"""Operators of ONNX Runtime that have no multiply-adds to count."""
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


def costs_of(model: bytes, source: str) -> Costs | None:
    """Costs of one picture in an ONNX file; None if the file cannot be run with all its tensors as outputs.

    Args:
        source: names the network in messages.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    try:
        return graph_costs(read_graph(model, source))
    except WeightsError as error:
        log.debug("the costs of a network are unknown: %s", error)
        return None


def with_costs(manifest: Manifest, folder: Path) -> Manifest:
    """The manifest with the costs of all networks and of the heads and tails of encoders: those that it lacks come from
    the files, if these are whole.

    Raises:
        MissingExtra: a cost is missing, and ONNX Runtime is not installed.
    """

    def known(part: T, name: str, cut: Part = "whole") -> T:
        if part.costs is not None:
            return part
        facts = part.model_dump(include={"file", "sha256", "size_bytes"})
        try:
            content = extract_part(verify_file(NamedFile(name=name, **facts), folder).read_bytes(), cut)
        except WeightsError as error:
            log.debug("the costs of a network are unknown: %s", error)
            return part
        return part.model_copy(update={"costs": costs_of(content, name)})

    encoders = (
        encoder.model_copy(
            update={
                "head": known(encoder.head, encoder.head_name, encoder.head.part),
                "tail": known(encoder.tail, encoder.name, encoder.tail.part),
            }
        )
        for encoder in manifest.encoders
    )
    models = tuple(known(entry, entry.name) for entry in manifest.models)
    return manifest.model_copy(update={"models": models, "encoders": tuple(encoders)})


def graph_costs(graph: Graph) -> Costs:
    """Costs of one picture.

    Multiply-adds count convolutions and matrix products, and nothing that works value by value. They are
    unknown if an operator multiplies in a way that is not known here.

    The peak is the largest sum of the tensors that live at once, plus all weights as they are stored. It comes from the
    order of the graph's nodes. Values between two quantisers count in their quantised size, in which ONNX Runtime
    computes. The runtime's own memory is not in it.
    """
    counts = [node_macs(node, graph) for node in graph.nodes]
    known = [count for count in counts if count is not None]
    stored = sum(weight.size_bytes for weight in graph.weights.values())
    stored += sum(graph.tensors[node.outputs[0]].size_bytes for node in graph.nodes if node.kind == "Constant")
    return Costs(
        macs=sum(known) if len(known) == len(counts) else None, peak_bytes=max(1, stored + _peak_of_values(graph))
    )


def node_macs(node: Operator, graph: Graph) -> int | None:
    """Multiply-adds of one node; None if they are unknown."""
    if node.has_graph or node.kind in _UNCOUNTED:
        return None
    try:
        if node.kind in _CONVOLUTIONS:
            return prod(graph.shape(node.outputs[0])) * prod(graph.shape(node.inputs[_CONVOLUTIONS[node.kind]])[1:])
        if node.kind == "ConvTranspose":
            return prod(graph.shape(node.inputs[0])) * prod(graph.shape(node.inputs[1])[1:])
        if node.kind in _PRODUCTS:
            return prod(graph.shape(node.outputs[0])) * graph.shape(node.inputs[0])[-1]
        if node.kind in _MATRICES:
            rows = graph.shape(node.inputs[0])
            return prod(graph.shape(node.outputs[0])) * rows[0 if node.numbers.get("transA") else 1]
    except (KeyError, IndexError):
        return None
    return 0 if node.domain in _STANDARD or node.kind in _WITHOUT else None


def _peak_of_values(graph: Graph) -> int:
    """Bytes of the tensors that depend on the picture, at the moment when they are most."""
    held = _same_memory(graph)
    steps = [
        (
            {held[name] for name in node.inputs if name in held},
            {held[name] for name in node.outputs if name in held},
        )
        for node in graph.nodes
        if not graph.computed.isdisjoint(node.outputs)
    ]
    last = {name: step for step, (taken, given) in enumerate(steps) for name in (*taken, *given)}
    last[held[graph.output]] = len(steps)
    live, peak = {held[graph.input]}, 0
    for step, (taken, given) in enumerate(steps):
        live |= taken | given
        peak = max(peak, sum(graph.tensors[name].size_bytes for name in live))
        live = {name for name in live if last[name] > step}
    return peak


def _same_memory(graph: Graph) -> dict[str, str]:
    """The tensor that stands for each one that depends on the picture: a quantised one for its unpacked forms."""
    users: dict[str, list[Operator]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            users.setdefault(name, []).append(node)
    held = {name: name for name in graph.computed if name in graph.tensors}
    for node in graph.nodes:  # forwards: what is unpacked
        if node.kind == "DequantizeLinear" and node.inputs[0] in held and node.outputs[0] != graph.output:
            held[node.outputs[0]] = held[node.inputs[0]]
    for node in reversed(graph.nodes):  # backwards: what is only packed
        if node.kind != "QuantizeLinear" or node.inputs[0] == graph.input:
            continue
        if len(users[node.inputs[0]]) == 1 and held.get(node.inputs[0]) == node.inputs[0]:
            held[node.inputs[0]] = held[node.outputs[0]]
    return held
