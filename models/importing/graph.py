"""A stranger's ONNX file: read without trust, and fed with plain pixels.

Needs the extra `import` (onnx). Nothing in the file is executed here but by ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper

from models.importing.preprocess import MOST_SIDE, Preprocess
from models.session import plain
from models.split import FEATURES
from tierkit.errors import DataError, InvalidInput

__all__ = ["IMAGES", "LOGITS", "Signature", "first_line", "fold", "read_onnx", "signature"]

IMAGES, LOGITS = "images", "logits"
_OURS = {IMAGES, "pixels", FEATURES, LOGITS, "network"}
"""First parts of the names that we give."""

_MAX_BYTES = 2 * 1024**3 - 1
"""Of a network: the bound of the file format."""

_FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}
_KINDS = {number: name for name, number in TensorProto.DataType.items()}
_OLDEST_OPSET, _NEWEST_IR = 7, 13
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a file takes and gives."""

    input: str
    element: int
    """`onnx.TensorProto` type of the input: FLOAT, FLOAT16 or UINT8."""
    layout: str
    """nchw | nhwc"""
    size: tuple[int, int] | None
    """Height and width; None where the file leaves them open."""
    output: str
    classes: int


def read_onnx(path: Path) -> onnx.ModelProto:
    """A network with all its weights, checked.

    Raises:
        DataError: the file cannot be read, is no ONNX, is too large or damaged, or names weights in a file outside of
            its folder.
    """
    try:
        if not path.is_file():
            raise DataError(f"cannot read {path}: it is {'no file' if path.exists() else 'not there'}")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise DataError(f"{path} has {size} bytes; a network may have {_MAX_BYTES}")
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as exc:
        raise DataError(f"{path} is no ONNX file: {exc}") from exc
    if not model.graph.node or not model.opset_import:
        raise DataError(f"{path} is no ONNX file: it holds no graph")
    _load_external(model, path)
    versions = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    opset, newest = versions.get("ai.onnx", _OLDEST_OPSET), onnx.defs.onnx_opset_version()
    if not _OLDEST_OPSET <= opset <= newest or model.ir_version > _NEWEST_IR:
        raise DataError(
            f"{path} is of opset {opset} and IR version {model.ir_version}: export it with an opset from "
            f"{_OLDEST_OPSET} to {newest}, and IR version {_NEWEST_IR} or older"
        )
    if unknown := sorted({str(node.op_type) for node in model.graph.node if not _is_known(node, opset)}):
        named = ", ".join(unknown[:_MOST_NAMED]) + (" and others" if len(unknown) > _MOST_NAMED else "")
        raise DataError(
            f"{path} uses operators that opset {opset} of ONNX does not have: {named}; export it with another opset "
            f"(up to {newest}), or without them"
        )
    try:
        onnx.checker.check_model(model)
    except Exception as exc:  # the checker's own class, UnicodeDecodeError, and whatever its C++ raises
        raise DataError(f"{path} is damaged, or uses operators that ONNX does not know: {first_line(exc)}") from exc
    return model


def _is_known(node: onnx.NodeProto, opset: int) -> bool:
    """Whether ONNX has the operator; those of other domains are ONNX Runtime's to know."""
    if node.domain not in ("", "ai.onnx"):
        return True
    if not isinstance(node.op_type, str):  # bytes that are no UTF-8
        return False
    try:
        onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return True


def _load_external(model: onnx.ModelProto, path: Path) -> None:
    """Read weights that lie in files of their own, beside the network and nowhere else."""
    folder = path.resolve().parent
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == TensorProto.EXTERNAL]
    places: set[Path] = set()
    for tensor in outside:
        said = {entry.key: entry.value for entry in tensor.external_data}
        location = said.get("location", "")
        try:
            place = (folder / location).resolve()
            is_file = place.is_file()
        except (TypeError, ValueError, OSError) as exc:  # not UTF-8, with a NUL in it, too long
            raise DataError(f"{path} has weights in {location!r:.100}, which no file is called") from exc
        if not location or Path(location).is_absolute() or not place.is_relative_to(folder) or place == folder:
            raise DataError(f"{path} has weights in {location!r}: only files in its own folder are read")
        if not is_file:
            raise DataError(f"{path} has weights in {location!r}, which is not there: put it beside the network")
        places.add(place)
    try:
        total = sum(place.stat().st_size for place in places)
        if total > _MAX_BYTES:
            raise DataError(f"the weights of {path} have {total} bytes; a network may have {_MAX_BYTES}")
        for tensor in outside:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    except DataError:
        raise
    except Exception as exc:  # what odd offsets, lengths and types raise is not one family
        raise DataError(f"cannot read the weights of {path}: {first_line(exc)}") from exc


def _tensors(message: Any) -> Iterator[TensorProto]:
    """All stored tensors, wherever in the file they are: in sub-graphs, attributes, functions or sparse tensors."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in [value] if hasattr(value, "ListFields") else value:
            if isinstance(inner, TensorProto):
                yield inner
            else:
                yield from _tensors(inner)


def signature(model: onnx.ModelProto, classes: int, layout: str | None = None) -> Signature:
    """What the file takes and gives, for pictures and this many classes.

    Args:
        layout: nchw or nhwc, where somebody says so.

    Raises:
        InvalidInput: it is no image classifier of these classes.
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
    fits = [name for name, at in (("nchw", 1), ("nhwc", 3)) if shape[at] in (3, None)]
    exact = [name for name, at in (("nchw", 1), ("nhwc", 3)) if shape[at] == 3]
    chosen = layout or next(iter(exact if len(exact) == 1 else fits), None)
    if chosen not in fits:
        raise InvalidInput(f"the network takes {_shown(shape)}, which has no 3 colours where {chosen or 'they'} belong")
    if shape[0] not in (None, 1) and shape[0] > 0:
        raise InvalidInput(
            f"the network takes batches of {shape[0]} images and no others: export it with a dynamic first axis"
        )
    height, width = shape[2:] if chosen == "nchw" else shape[1:3]
    if (height is None) != (width is None):
        raise InvalidInput(f"the network takes {_shown(shape)}: either height and width are fixed, or neither is")
    given = [(value.name, _shape(value)) for value in graph.output]
    ends = [name for name, shape in given if len(shape) in (2, 4) and shape[1] == classes]
    ends = ends or [name for name, shape in given if len(shape) == 2 and shape[1] is None]
    if len(ends) != 1:
        have = ", ".join(f"{name} {_shown(shape)}" for name, shape in given)
        raise InvalidInput(
            f"there are {classes} labels, and the network gives {have}: one output must be [n, {classes}]"
        )
    return Signature(
        input=taken.name,
        element=element,
        layout=chosen,
        size=_size(height, width),
        output=ends[0],
        classes=classes,
    )


def fold(model: onnx.ModelProto, known: Signature, preprocess: Preprocess, *, probabilities: bool) -> onnx.ModelProto:
    """The network with its preprocessing inside: `images` UINT8 `[n, height, width, 3]`, RGB, to `logits` FP32
    `[n, classes]`, any `n`.

    Args:
        model: left as it is.
        probabilities: what it gives is a softmax already; its logarithm serves as logits.
    """
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    graph = folded.graph
    _rename(graph)
    taken, given = _apart(known.input), _apart(known.output)
    _store_constants(graph)
    before = _pixels_to(taken, known, preprocess, graph)
    after = _to_logits(given, probabilities, graph)
    nodes = [*before, *(onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node), *after]
    del graph.node[:]
    graph.node.extend(nodes)
    height, width = preprocess.size
    stored = {tensor.name for tensor in graph.initializer}
    _replace(graph.input, [value for value in graph.input if value.name in stored and value.name != taken])
    graph.input.append(onnx.helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, ["n", height, width, 3]))
    _replace(graph.output, [onnx.helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["n", known.classes])])
    # Shapes that were noted for one batch size do not hold for others.
    del graph.value_info[:]
    del folded.metadata_props[:]
    return folded


def _pixels_to(taken: str, known: Signature, preprocess: Preprocess, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    make = onnx.helper.make_node
    nodes: list[onnx.NodeProto] = []
    last = IMAGES

    def add(kind: str, *more: str, **attributes: object) -> None:
        nonlocal last
        out = f"pixels/{kind}"
        nodes.append(make(kind, [last, *more], [out], name=out, **attributes))
        last = out

    def store(name: str, values: np.ndarray) -> str:
        graph.initializer.append(numpy_helper.from_array(values, f"pixels/{name}"))
        return f"pixels/{name}"

    if preprocess.colour == "bgr":
        add("Gather", store("bgr", np.array([2, 1, 0], np.int64)), axis=3)
    if known.layout == "nchw":
        add("Transpose", perm=[0, 3, 1, 2])
    if known.element != TensorProto.UINT8:
        add("Cast", to=TensorProto.FLOAT)
        shape = (1, 3, 1, 1) if known.layout == "nchw" else (1, 1, 1, 3)
        factor, offset = (np.array(values, np.float64).astype(np.float32).reshape(shape) for values in preprocess.steps)
        if (factor != 1).any():
            add("Mul", store("factor", factor))
        if offset.any():
            add("Add", store("offset", offset))
    # The last one gives the network's own input; the cast to its type does no harm where it is that already.
    nodes.append(make("Cast", [last], [taken], name="pixels/input", to=known.element))
    return nodes


def _to_logits(given: str, probabilities: bool, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    make = onnx.helper.make_node
    nodes = [
        make("Flatten", [given], ["logits/flat"], name="logits/flat", axis=1),
        make(
            "Cast",
            ["logits/flat"],
            ["logits/float" if probabilities else LOGITS],
            name="logits/float",
            to=TensorProto.FLOAT,
        ),
    ]
    if probabilities:
        least = numpy_helper.from_array(np.array(1e-12, np.float32), "logits/least")
        graph.initializer.append(least)
        nodes.append(make("Max", ["logits/float", "logits/least"], ["logits/positive"], name="logits/positive"))
        nodes.append(make("Log", ["logits/positive"], [LOGITS], name="logits/log"))
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


def _replace(field: object, values: list[onnx.ValueInfoProto]) -> None:
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


def _shape(value: onnx.ValueInfoProto) -> list[int | None]:
    """None for an axis that is open."""
    dimensions = value.type.tensor_type.shape.dim
    return [size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in dimensions]


def _shown(shape: list[int | None]) -> str:
    return str(["?" if size is None else size for size in shape]).replace("'", "")


def first_line(exc: Exception) -> str:
    """What a foreign library says of an error, as part of a sentence."""
    lines = str(exc).strip().splitlines()
    return (plain(lines[0]) if lines else type(exc).__name__)[:300]


def _size(height: int | None, width: int | None) -> tuple[int, int] | None:
    """Raises InvalidInput where it is beyond all reason."""
    if height is None or width is None:
        return None
    if max(height, width) > MOST_SIDE:
        raise InvalidInput(f"the network takes {width} x {height} pixels; at most {MOST_SIDE} on a side are served")
    return height, width
