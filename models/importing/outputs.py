"""The kind of a network's outputs: scores, probabilities, or independent labels. The end of the graph and the output
values show it.

Terrace takes the softmax of a network's outputs. That would be a second softmax on probabilities, and a wrong one on
independent labels. Both would show only as meaningless confidences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx

from tierkit.errors import InvalidInput
from tierkit.tensors import Array

__all__ = ["LOGITS", "Ending", "Form", "ending", "form", "logits_of", "own_answers"]

LOGITS = "logits"

Form = Literal["scores", "probabilities", "softmax", "sigmoid"]
"""Place of the scores: the output (scores), or the input of the graph's last operator (softmax, sigmoid). The logarithm
of other probabilities serves as well (probabilities).
"""

Kind = Literal["softmax", "log", "sigmoid", "tanh", "sorted", "distance", "power", "turned", "unbounded", "unknown"]

_SAME = {"Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}
_ROUNDING = {"QuantizeLinear", "DequantizeLinear"}
_CHANGING = {
    *(
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Clip",
        "GlobalAveragePool",
        "AveragePool",
        "ReduceMean",
        "Concat",
        "Slice",
        "Gather",
    ),
    *("Max", "Min", "Sum", "Mean"),
}
"""Operators that leave bounded values bounded, so that what lies before them counts."""
_UNBOUNDED = {
    *("MatMul", "Gemm", "Conv", "BatchNormalization", "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Gelu", "Softplus"),
    *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "QGemm", "FusedMatMul", "FusedGemm", "FusedConv"),
    *("LayerNormalization", "InstanceNormalization", "QLinearAdd", "Einsum", "HardSwish", "Mish", "MatMulNBits"),
}
_ENDS: dict[str, Kind] = {
    "Softmax": "softmax",
    "QLinearSoftmax": "softmax",
    "LogSoftmax": "log",
    "Sigmoid": "sigmoid",
    "QLinearSigmoid": "sigmoid",
    "HardSigmoid": "sigmoid",
    "Tanh": "tanh",
    "Softsign": "tanh",
    "TopK": "sorted",
    "Exp": "power",
    **dict.fromkeys(("Sqrt", "Abs", "ReduceL1", "ReduceL2", "ReduceSumSquare"), "distance"),
}
_TURNING = {"Neg", "Reciprocal"}
"""Operators that make the largest value the smallest."""
_EXACT = 1e-3
_ROUNDED = 0.02
"""Allowed difference of probabilities from a sum of 1, or from their softmax: as computed, and rounded to 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a graph, seen from its output."""

    kind: Kind
    before: tuple[str, ...] = ()
    """The tensor of the scores that go into the softmax or sigmoid, if nothing after it changes more than their shape
    or type; scale and zero point follow if it is quantised."""
    rounded: bool = False
    """True if the output was quantised, or is FP16."""

    @property
    def tolerance(self) -> float:
        """Allowed difference of the probabilities from their sum, or from the softmax of the scores."""
        return _ROUNDED if self.rounded else _EXACT


def ending(graph: onnx.GraphProto, output: str) -> Ending:
    """Find the operators that produce one of the graph's tensors."""
    made_by = {name: node for node in graph.node for name in node.output}
    stored = {tensor.name for tensor in graph.initializer}
    rounded = False
    name = output
    for _ in range(len(graph.node)):
        if (node := made_by.get(name)) is None or node.op_type not in _SAME | _ROUNDING:
            break
        rounded |= node.op_type in _ROUNDING or (node.op_type == "Cast" and _casts_to_half(node))
        name = node.input[0]
    if node is not None and node.op_type == "Log":
        inner = ending(graph, node.input[0])
        return Ending(kind="log" if inner.kind == "softmax" else inner.kind, rounded=rounded or inner.rounded)
    if node is not None and node.op_type in _TURNING:
        inner = ending(graph, node.input[0])
        turned = inner.kind in ("softmax", "log", "sigmoid", "power", "turned")
        return Ending(kind="turned" if turned else "unknown", rounded=rounded or inner.rounded)
    if node is not None and (kind := _ENDS.get(str(node.op_type))):
        before: tuple[str, ...] = ()
        if node.op_type in ("Softmax", "Sigmoid"):
            before = (node.input[0],)
        elif node.op_type in ("QLinearSoftmax", "QLinearSigmoid"):
            before = tuple(node.input[:3])
        return Ending(kind=kind, before=before, rounded=rounded)
    kinds = _kinds(made_by, stored, name)
    if node is not None and node.op_type in ("Add", "Sub", "Sum") and "unbounded" in kinds:
        kinds = {"unbounded"}
    return Ending(kind=kinds.pop() if len(kinds) == 1 else "unknown", rounded=rounded)


def _kinds(made_by: dict[str, onnx.NodeProto], stored: set[str], output: str) -> set[Kind]:
    """The kinds of what the output is made of, by operators that leave bounded values bounded."""
    found: set[Kind] = set()
    seen: set[str] = set()
    waiting = [output]
    while waiting:
        name = waiting.pop()
        if name in seen or name in stored or not name:
            continue
        seen.add(name)
        node = made_by.get(name)
        kind = None if node is None else str(node.op_type)
        if node is None or kind == "Constant":
            found |= set() if node is not None else {"unknown"}
        elif kind in _ENDS:
            found.add(_ENDS[kind])
        elif kind in _UNBOUNDED:
            found.add("unbounded")
        elif kind in _SAME | _ROUNDING:
            waiting.append(node.input[0])
        elif kind in _CHANGING:
            waiting += node.input
        else:
            found.add("unknown")
    return found


def _casts_to_half(node: onnx.NodeProto) -> bool:
    return any(each.name == "to" and each.i == onnx.TensorProto.FLOAT16 for each in node.attribute)


def form(end: Ending, values: Array, classes: int) -> Form:
    """Find out how to get one score per class such that their softmax gives the network's own probabilities.

    Args:
        end: how the graph ends.
        values: outputs for a few different pictures, FP32 `[n, outputs]`. One output for two classes is the
            probability, or the score, of the second one.

    Raises:
        InvalidInput: the values are neither scores nor probabilities of classes that exclude each other.
    """
    if values.shape[1] == 1 and classes == 2:
        return _form_of_one(end, values)
    inside = bool((values >= 0).all() and (values <= 1 + end.tolerance).all())
    sums = values.sum(axis=1)
    add_up = bool((values >= 0).all() and np.abs(sums - 1).max() <= end.tolerance)
    if end.kind == "log":
        if np.abs(np.exp(values).sum(axis=1) - 1).max() > _ROUNDED:
            raise InvalidInput("the network ends with a logarithm of a softmax that is not over its classes")
        return "scores"
    if end.kind == "softmax" and end.before and inside:
        return "softmax"  # whoever folds it compares
    if end.kind == "unknown" and np.isin(values, (0, 1)).all():
        raise InvalidInput("the network gives decisions (0 or 1) and no confidence: export it with logits")
    if add_up and end.kind != "sorted":
        return "probabilities"
    if end.kind == "sigmoid":
        raise InvalidInput(
            "the network ends with a sigmoid, so each class has an independent probability, and they add up to "
            f"{sums.min():.2f} to {sums.max():.2f}: several classes may be right at once, and Terrace answers one. If "
            "one is always right, export the network without the sigmoid"
        )
    if end.kind == "power":
        raise InvalidInput(
            f"the network ends with an exponential (Exp), and its outputs add up to {sums.min():.4g} to "
            f"{sums.max():.4g}: they are neither scores nor probabilities; export it without the Exp"
        )
    if end.kind == "turned" and (values >= 0).all() and _are_negative_logarithms(values):
        raise InvalidInput("the network gives negative logarithms of probabilities: export it with logits")
    negative = bool((values <= 0).all() and sums.mean() < 0)
    if end.kind == "turned" or (negative and np.ptp(sums) <= _EXACT * -sums.mean()):
        raise InvalidInput(
            "the network ends with probabilities that are negated or inverted (as by Neg or Reciprocal), so the "
            "largest output is the least probable class: export it with logits"
        )
    if end.kind == "unbounded":
        return "scores"
    if end.kind == "sorted":
        raise InvalidInput("the network sorts its classes for each picture (TopK): export it without that")
    if end.kind == "distance" and (values >= 0).all():
        raise InvalidInput(
            "the network gives distances or other values without a sign, of which the smallest may be the best: export "
            "it with scores, of which the largest is"
        )
    if (values >= 0).all() and np.ptp(sums) <= _EXACT * sums.mean():
        raise InvalidInput(
            f"the network's outputs add up to {sums.mean():.4g} for each picture, so they are not scores, and "
            "probabilities add up to 1: export it without what follows its softmax"
        )
    if (values >= 0).all() and _are_negative_logarithms(values):
        raise InvalidInput("the network gives negative logarithms of probabilities: export it with logits")
    if inside or end.kind in ("softmax", "tanh"):
        raise InvalidInput(
            f"the network's outputs lie between {values.min():.3g} and {values.max():.3g} and add up to "
            f"{sums.min():.2f} to {sums.max():.2f}: they are neither scores nor probabilities of classes that exclude "
            "each other; export it with logits"
        )
    return "scores"


def _are_negative_logarithms(values: Array) -> bool:
    return bool(np.abs(np.exp(-values).sum(axis=1) - 1).max() <= _EXACT)


def _form_of_one(end: Ending, values: Array) -> Form:
    """Form of a single output for two classes."""
    if end.kind == "sigmoid" and end.before:
        return "sigmoid"
    if end.kind == "unbounded":
        return "scores"
    if (values >= 0).all() and (values <= 1).all() and end.kind not in ("softmax", "power", "turned"):
        return "probabilities"
    raise InvalidInput(
        f"the network has one output for two classes, with values from {values.min():.3g} to {values.max():.3g}: it is "
        "not a probability of the second class; export it with a sigmoid, or with an output for each class"
    )


def own_answers(values: Array, read_as: Form) -> Array:
    """The network's own scores or probabilities of each class, FP32 `[n, classes]`, of what it gives."""
    if values.shape[1] > 1:
        return values
    return np.concatenate([np.zeros_like(values) if read_as == "scores" else 1 - values, values], axis=1)


def logits_of(output: str, read_as: Form, end: Ending, *, single: bool, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes that give `logits` FP32 `[n, classes]`, of which a softmax makes the network's own probabilities.

    Args:
        output: The network's output.
        single: True for one output that stands for two classes.
        graph: Gets the tensors that the nodes need.
    """
    nodes: list[onnx.NodeProto] = []
    last = output

    def add(kind: str, *more: str, **attributes: object) -> None:
        nonlocal last
        out = f"logits/{kind}"
        nodes.append(onnx.helper.make_node(kind, [last, *more], [out], name=out, **attributes))
        last = out

    def store(name: str, values: object) -> str:
        tensor = onnx.numpy_helper.from_array(np.array(values, np.float32), f"logits/{name}")
        graph.initializer.append(tensor)
        return f"logits/{name}"

    if read_as in ("softmax", "sigmoid"):
        last, *quantised = end.before
        if quantised:
            add("DequantizeLinear", *quantised)
    add("Flatten", axis=1)
    add("Cast", to=onnx.TensorProto.FLOAT)
    if single:
        add("MatMul", store("second", [[-1, 1]] if read_as == "probabilities" else [[0, 1]]))
    if read_as == "probabilities":
        if single:
            add("Add", store("first", [1, 0]))
        add("Max", store("least", 1e-12))
        add("Log")
    nodes[-1].output[0] = LOGITS
    return nodes
