"""An unknown network: its input and output, and its conversion to a network that takes plain pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from models.importing.outputs import LOGITS, Ending, Form, logits_of
from models.importing.preprocess import MOST_SIDE, Preprocess
from models.split import FEATURES
from tierkit.errors import InvalidInput

__all__ = ["GREY", "IMAGES", "LOGITS", "Signature", "class_numbers", "fold", "signature", "taken_by"]

IMAGES = "images"
_OURS = {IMAGES, "pixels", FEATURES, LOGITS, "network"}
"""First parts of the names that we give."""

GREY = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in a grey value (ITU-R BT.601, as Pillow takes them)."""

_FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}
_GIVEN = (*_FLOATS, TensorProto.DOUBLE)
"""Types of outputs that can be scores or probabilities."""
_KINDS = {number: name for name, number in TensorProto.DataType.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Input and output of a network file."""

    input: str
    element: int
    """`onnx.TensorProto` type of the input: FLOAT, FLOAT16 or UINT8."""
    layout: str
    """nchw | nhwc"""
    channels: int | None
    """1 or 3; None if the file leaves them open."""
    batch: int | None
    """Pictures at once; None if the file leaves them open."""
    size: tuple[int, int] | None
    """Height and width; None if the file leaves them open."""
    output: str
    classes: int
    single: bool
    """True if one output stands for two classes."""
    half: bool
    """True if the output is FP16."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that may hold an answer; no shape, and 0 for the type, if the file does not say."""

    name: str
    element: int
    shape: list[int | None] | None

    def is_of(self, classes: int) -> bool:
        """True for `[n, classes]`, with axes of length 1 before and after the classes, or for `[n]` and one class."""
        if not self.shape:
            return False
        return [size for size in self.shape[1:] if size != 1] == [classes] * (classes != 1)

    @property
    def is_open(self) -> bool:
        """True if it may turn out to be `[n, classes]`."""
        return self.shape is None or (len(self.shape) == 2 and self.shape[1] is None)


def signature(model: onnx.ModelProto, classes: int, layout: str | None = None) -> Signature:
    """Find the file's input for pictures and its output for this many classes.

    Args:
        layout: nchw or nhwc, if a source says so.

    Raises:
        InvalidInput: it is not an image classifier with these classes.
    """
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if len(inputs) != 1:
        raise InvalidInput(
            f"the network takes {len(inputs)} inputs ({', '.join(value.name for value in inputs)}): an image "
            "classifier takes one"
        )
    (taken,) = inputs
    element, shape = taken.type.tensor_type.elem_type, _shape(taken)
    if len(shape) != 4 or element not in (*_FLOATS, TensorProto.UINT8):
        raise InvalidInput(
            f"the network takes {_KINDS.get(element, element)} {_shown(shape)}: an image classifier takes FLOAT, "
            "FLOAT16 or UINT8 [n, 3, height, width] or [n, height, width, 3]"
        )
    channels = {"nchw": shape[1], "nhwc": shape[3]}
    fits = [name for name, count in channels.items() if count in (1, 3, None)]
    exact = [name for name, count in channels.items() if count in (1, 3)]
    if layout is None and len(exact) == 2:
        raise InvalidInput(f"the network takes {_shown(shape)}: say layout = nchw or nhwc in a preprocess.toml")
    chosen = layout or next(iter(exact or fits), None)
    if chosen not in fits:
        raise InvalidInput(
            f"the network takes {_shown(shape)}, which has no 3 colours, or 1 channel, where {chosen or 'they'} belong"
        )
    height, width = shape[2:] if chosen == "nchw" else shape[1:3]
    if (height is None) != (width is None):
        raise InvalidInput(f"the network takes {_shown(shape)}: either height and width are fixed, or neither is")
    output = _answer(graph, classes)
    return Signature(
        input=taken.name,
        element=element,
        layout=chosen,
        channels=channels[chosen],
        batch=shape[0],
        size=_size(height, width),
        output=output.name,
        classes=classes,
        single=not output.is_of(classes) and output.is_of(1),
        half=output.element == TensorProto.FLOAT16,
    )


def _answer(graph: onnx.GraphProto, classes: int) -> _Output:
    """The output that answers."""
    given = [_behind(graph, value) for value in graph.output]
    able = [each for each in given if each.element in (*_GIVEN, 0)]
    ends = [each for each in able if each.is_of(classes)]
    if not ends and classes == 2:
        ends = [each for each in able if each.is_of(1)]
    ends = ends or [each for each in able if each.is_open]
    if len(ends) == 1:
        return ends[0]
    have = ", ".join(f"{each.name} {_KINDS.get(each.element, '?')} {_shown(each.shape or [])}" for each in given)
    raise InvalidInput(
        f"there are {classes} labels, and the network gives {have}: one output must be [n, {classes}], of FLOAT"
    )


def _behind(graph: onnx.GraphProto, value: onnx.ValueInfoProto) -> _Output:
    """The tensor of an output; that before it if it goes into a ZipMap or is quantised at the end."""
    shape = _shape(value) if value.type.tensor_type.HasField("shape") else None
    element = value.type.tensor_type.elem_type
    node = next((node for node in graph.node if value.name in node.output), None)
    if node is not None and node.op_type == "ZipMap":
        numbers = _classes_of(node)
        return _Output(node.input[0], 0, [None, len(numbers)] if numbers else None)
    if node is not None and node.op_type == "QuantizeLinear":
        return _Output(node.input[0], 0, shape)
    return _Output(value.name, element, shape)


def class_numbers(model: onnx.ModelProto) -> list[str] | list[int]:
    """The classes that a ZipMap at the end of a network names, in the order of its outputs."""
    outputs = {value.name for value in model.graph.output}
    ends = [node for node in model.graph.node if node.op_type == "ZipMap" and outputs.intersection(node.output)]
    return _classes_of(ends[0]) if len(ends) == 1 else []


def _classes_of(zipmap: onnx.NodeProto) -> list[str] | list[int]:
    for attribute in zipmap.attribute:
        if attribute.name == "classlabels_strings":
            return [text.decode("utf-8", "replace") for text in attribute.strings]
        if attribute.name == "classlabels_int64s":
            return list(attribute.ints)
    return []


def fold(
    model: onnx.ModelProto,
    known: Signature,
    preprocess: Preprocess,
    *,
    read_as: Form = "scores",
    end: Ending,
    batch: int | None = None,
) -> onnx.ModelProto:
    """Put the preprocessing inside the network. It then maps RGB `images` UINT8 `[n, height, width, 3]` to `logits`
    FP32 `[n, classes]`.

    Args:
        model: the network; it is not changed.
        read_as: place of its scores.
        end: end of its graph.
        batch: number of pictures that it takes at once; None for any number.
    """
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    graph = folded.graph
    _rename(graph)
    taken, given = _apart(known.input), _apart(known.output)
    _store_constants(graph)
    before = _pixels_to(taken, known, preprocess, graph)
    end = replace(end, before=tuple(map(_apart, end.before)))
    after = logits_of(given, read_as, end, single=known.single, graph=graph)
    nodes = [*before, *(onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node), *after]
    del graph.node[:]
    graph.node.extend(_needed(nodes, LOGITS))
    height, width = preprocess.size
    first = "n" if batch is None else batch
    stored = {tensor.name for tensor in graph.initializer}
    _replace(graph.input, [value for value in graph.input if value.name in stored and value.name != taken])
    graph.input.append(onnx.helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, [first, height, width, 3]))
    _replace(graph.output, [onnx.helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [first, known.classes])])
    # Shapes that were noted for one batch size do not hold for others.
    del graph.value_info[:]
    del folded.metadata_props[:]
    return folded


def _pixels_to(taken: str, known: Signature, preprocess: Preprocess, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    make = onnx.helper.make_node
    nodes: list[onnx.NodeProto] = []
    last = IMAGES

    def add(kind: str, *more: str, name: str | None = None, **attributes: object) -> None:
        nonlocal last
        out = f"pixels/{name or kind}"
        nodes.append(make(kind, [last, *more], [out], name=out, **attributes))
        last = out

    def store(name: str, values: np.ndarray) -> str:
        graph.initializer.append(numpy_helper.from_array(values, f"pixels/{name}"))
        return f"pixels/{name}"

    if preprocess.colour == "grey":
        add("Cast", to=TensorProto.FLOAT)
        add("MatMul", store("grey", np.array(GREY, np.float32).reshape(3, 1)))
        # Rounded, as Pillow's: so a grey picture keeps its values.
        add("Add", store("half", np.array(0.5, np.float32)))
        add("Floor")
    if preprocess.colour == "bgr":
        add("Gather", store("bgr", np.array([2, 1, 0], np.int64)), axis=3)
    if known.layout == "nchw":
        add("Transpose", perm=[0, 3, 1, 2])
    if known.element != TensorProto.UINT8:
        if preprocess.colour != "grey":
            add("Cast", to=TensorProto.FLOAT)
        channels = preprocess.channels
        shape = (1, channels, 1, 1) if known.layout == "nchw" else (1, 1, 1, channels)
        factor, offset = (np.array(values, np.float64).astype(np.float32).reshape(shape) for values in preprocess.steps)
        if (factor != 1).any():
            add("Mul", store("factor", factor))
        if offset.any():
            add("Add", store("offset", offset), name="Offset")
    # The last one gives the network's own input; the cast to its type does no harm where it is that already.
    nodes.append(make("Cast", [last], [taken], name="pixels/input", to=known.element))
    return nodes


def _apart(name: str) -> str:
    """The name of a tensor or node, changed where it could be one of ours: the file may have been imported before."""
    return f"network/{name}" if name.partition("/")[0] in _OURS else name


def _rename(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.name = _apart(node.name)
        node.input[:] = map(_apart, node.input)
        node.output[:] = map(_apart, node.output)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner)
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = _apart(value.name)


def _store_constants(graph: onnx.GraphProto) -> None:
    """Constants become stored tensors, which both sides of a cut can use."""
    kept = []
    for node in graph.node:
        value = next((each.t for each in node.attribute if each.name == "value"), None)
        if node.op_type != "Constant" or value is None:
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        graph.initializer.append(value)
        graph.initializer[-1].name = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


def _needed(nodes: list[onnx.NodeProto], output: str) -> list[onnx.NodeProto]:
    """The nodes that an output depends on, in their order."""
    wanted, kept = {output}, []
    for node in reversed(nodes):  # which the file sorts by what they need
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(taken_by(node))
    return kept[::-1]


def taken_by(node: onnx.NodeProto) -> Iterable[str]:
    """Names that a node takes, and those that its inner graphs take from outside."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for each in inner.node:
                yield from taken_by(each)
            yield from (value.name for value in inner.output)


def _replace(field: object, values: list[onnx.ValueInfoProto]) -> None:
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


def _shape(value: onnx.ValueInfoProto) -> list[int | None]:
    """Shape of a value, with None for each open axis."""
    dimensions = value.type.tensor_type.shape.dim
    return [size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in dimensions]


def _shown(shape: list[int | None]) -> str:
    return str(["?" if size is None else size for size in shape]).replace("'", "")


def _size(height: int | None, width: int | None) -> tuple[int, int] | None:
    """Raises InvalidInput where it is beyond all reason."""
    if height is None or width is None:
        return None
    if max(height, width) > MOST_SIDE:
        raise InvalidInput(f"the network takes {width} x {height} pixels; at most {MOST_SIDE} on a side are served")
    return height, width
