"""The layers of a network on a device, and the rest above it, under a limit of transmitted bytes.

C. Li, X. Xie, Y. Huang, H. Wang and C. Niu, "Distributed Data Mining Based on Deep Neural Network for Wireless Sensor
Network", 2015, put layers of a network on sensors: less is transmitted, and a fusion centre computes less. They give an
upper limit of the computation: beyond it, sending the data directly is better. So S. Amiri reports it in "A Literature
Review on Scalable Machine Learning with Focus on Deep Learning", 2019. They weigh power; here it is time, by measured
costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from models import protobuf
from models.costs import node_macs
from models.graph import Graph, read_graph, value_info
from models.session import open_session
from models.speed import least_ms_per_image, probe_images
from models.split import extract_nodes
from tierkit.errors import InvalidInput, WeightsError
from tierkit.tensors import Array

__all__ = [
    "Costing",
    "CutCost",
    "CutPoint",
    "PlacedCut",
    "chosen_cut",
    "consistent",
    "front",
    "measure_cuts",
    "place",
    "sides",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """A place where a single tensor leads from the layers before to those after it."""

    tensor: str
    """Its name in the graph."""
    size_bytes: int
    """Bytes of it for one picture."""
    layers: int
    """Convolutions and matrix products before it."""
    nodes: int
    """Nodes before it, in the order of the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """A cut, and the time of both sides on this machine."""

    tensor: str
    size_bytes: int
    layers: int
    below_ms: float
    """Milliseconds of a picture up to the cut."""
    above_ms: float
    """Milliseconds from the cut on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costing:
    """The devices and the link between them."""

    device_factor: float = 1.0
    """Time of the end device for the same work, as a multiple of this machine's."""
    upstream_factor: float = 1.0
    """Time of the upstream node for the same work, as a multiple of this machine's."""
    most_bytes: int | None = None
    """Limit of what is sent for one picture; None for no limit."""
    link_mbps: float | None = None
    """Speed of the link in Mbit/s; None if sending takes no time."""

    def send_ms(self, size_bytes: int) -> float:
        """Milliseconds to send this on the link."""
        return 0.0 if self.link_mbps is None else 8 * size_bytes / (1e3 * self.link_mbps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCut:
    """A cut between two devices, and the time of a picture."""

    tensor: str
    layers: int
    below_ms: float
    size_bytes: int
    send_ms: float
    above_ms: float
    total_ms: float
    most_below_ms: float
    """Upper limit of the computation below (Li et al.): beyond it, sending the pixels takes less time in all."""
    allowed: bool
    """True if the limit of transmitted bytes allows it."""
    chosen: bool


def place(cuts: Sequence[CutCost], costing: Costing) -> list[PlacedCut]:
    """The time of each cut between two devices, and the choice.

    Chosen is the cut with the smallest total time among those that the limit allows. Of equals it is the first, which
    leaves the device the least work.

    Args:
        cuts: From the pixels, with nothing below, up to the answer, with nothing above.
    """
    times = [
        (cut.below_ms * costing.device_factor, costing.send_ms(cut.size_bytes), cut.above_ms * costing.upstream_factor)
        for cut in cuts
    ]
    allowed = [costing.most_bytes is None or cut.size_bytes <= costing.most_bytes for cut in cuts]
    able = [number for number, may in enumerate(allowed) if may]
    best = min(able, key=lambda number: (sum(times[number]), number), default=None)
    of_pixels = sum(times[0])
    return [
        PlacedCut(
            tensor=cut.tensor,
            layers=cut.layers,
            below_ms=below,
            size_bytes=cut.size_bytes,
            send_ms=send,
            above_ms=above,
            total_ms=below + send + above,
            most_below_ms=max(0.0, of_pixels - send - above),
            allowed=may,
            chosen=number == best,
        )
        for number, (cut, may, (below, send, above)) in enumerate(zip(cuts, allowed, times, strict=True))
    ]


def chosen_cut(placements: Sequence[PlacedCut]) -> PlacedCut:
    """The cut that was chosen.

    Raises:
        InvalidInput: the limit allows none; the message names the smallest.
    """
    found = next((each for each in placements if each.chosen), None)
    if found is None:
        least = min(placements, key=lambda each: each.size_bytes)
        raise InvalidInput(
            f"no cut sends so little: the least is {least.size_bytes:,} bytes per picture, after {least.layers} layers"
        )
    return found


def front(graph: Graph) -> list[CutPoint]:
    """The cuts that are worth a choice: each sends less than all before it. They begin with the pixels.

    Between two layers, the smallest tensor stands for all.
    """
    points = [CutPoint(tensor=graph.input, size_bytes=graph.tensors[graph.input].size_bytes, layers=0, nodes=0)]
    layers = list(accumulate(1 if node_macs(node, graph) != 0 else 0 for node in graph.nodes))
    for number, name in _alone(graph):
        size = graph.tensors[name].size_bytes
        if size >= points[-1].size_bytes:
            continue
        if len(points) > 1 and points[-1].layers == layers[number]:
            points.pop()
        points.append(CutPoint(tensor=name, size_bytes=size, layers=layers[number], nodes=number + 1))
    return points


def _alone(graph: Graph) -> list[tuple[int, str]]:
    """Numbers of nodes after which a single tensor that depends on the picture is used further on, and its name."""
    last = {graph.output: len(graph.nodes)}
    for number, node in reversed(list(enumerate(graph.nodes))):
        for name in node.inputs:
            last.setdefault(name, number)
    live, found = {graph.input}, []
    for number, node in enumerate(graph.nodes):
        live |= graph.computed.intersection(node.outputs)
        live = {name for name in live if last.get(name, -1) > number}
        if len(live) == 1 and graph.computed.intersection(node.outputs):
            (name,) = live
            # Others cannot be the input of a network for any number of pictures.
            if len(graph.tensors[name].shape) > 1 and graph.tensors[name].element:
                found.append((number, name))
    return found


def measure_cuts(
    model: bytes, source: str, image_shape: tuple[int, int, int], report: Callable[[int, int], None]
) -> list[CutCost]:
    """Measure both sides of each cut of the front on one core of this machine, one picture at a time.

    Args:
        model: The network's ONNX file.
        source: names it in messages.
        image_shape: Height, width and colours of its pictures.
        report: Gets the number of cuts that are measured, and of all cuts.

    Raises:
        WeightsError: the network cannot be run or cut.
    """
    graph = read_graph(model, source)
    points = front(graph)
    picture = probe_images(image_shape)
    whole = partial(_run, open_session(model, source), graph.input)
    found: list[CutCost] = []
    for done, point in enumerate(points):
        # Both are measured again with each cut, so that other programs disturb all in the same way.
        whole_ms = least_ms_per_image(whole, picture, 1)
        below_ms, above_ms = 0.0, whole_ms
        if point.tensor == graph.output:
            below_ms, above_ms = whole_ms, 0.0
        elif point.nodes:
            head, tail = (open_session(side, source) for side in sides(model, graph, point))
            (values,) = head.run(None, {graph.input: picture[:1]})
            below_ms = least_ms_per_image(partial(_run, head, graph.input), picture, 1)
            above_ms = least_ms_per_image(partial(_run, tail, point.tensor), values, 1)
        found.append(
            CutCost(
                tensor=point.tensor,
                size_bytes=point.size_bytes,
                layers=point.layers,
                below_ms=min(below_ms, whole_ms),
                above_ms=min(above_ms, whole_ms),
            )
        )
        report(done + 1, len(points))
    return consistent(found)


def consistent(cuts: Sequence[CutCost]) -> list[CutCost]:
    """Return the cuts with times that do not contradict each other: layers never take longer than more layers do. This
    removes the time of other programs.

    Args:
        cuts: cuts from the first to the last.
    """
    below = list(accumulate((cut.below_ms for cut in reversed(cuts)), min))[::-1]
    above = accumulate((cut.above_ms for cut in cuts), min)
    return [replace(cut, below_ms=low, above_ms=high) for cut, low, high in zip(cuts, below, above, strict=True)]


def _run(session: Any, name: str, batch: Array) -> object:
    return session.run(None, {name: batch})


def sides(model: bytes, graph: Graph, point: CutPoint) -> tuple[bytes, bytes]:
    """The ONNX files of what is below a cut, `images` to its tensor, and of what is above."""
    value = value_info(point.tensor, graph.tensors[point.tensor])
    try:
        return (
            extract_nodes(model, _needed(graph, range(point.nodes)), protobuf.GRAPH_OUTPUT, value),
            extract_nodes(model, _needed(graph, range(point.nodes, len(graph.nodes))), protobuf.GRAPH_INPUT, value),
        )
    except (IndexError, ValueError) as error:
        raise WeightsError(f"cannot cut the network after {point.tensor!r}: {error}") from error


def _needed(graph: Graph, side: range) -> set[int]:
    """The nodes of one side that depend on the picture, and those that prepare weights for them."""
    kept = {number for number in side if not graph.computed.isdisjoint(graph.nodes[number].outputs)}
    wanted = {name for number in kept for name in graph.nodes[number].inputs}
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        if graph.computed.isdisjoint(node.outputs) and not wanted.isdisjoint(node.outputs):
            kept.add(number)
            wanted.update(node.inputs)
    return kept
