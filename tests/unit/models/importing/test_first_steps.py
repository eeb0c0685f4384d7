"""What the first operators of a network show of the values and the colours that it takes."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.importing.first_steps import check_clear, facts_of
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput

BYTES, UNIT, NOTHING, REFUSED = 1.0, 255.0, None, "refused"
MEAN, SPREAD = np.array([123.7, 116.3, 103.5], np.float32), np.array([58.0, 57.0, 57.0], np.float32)
ONES = np.ones(3, np.float32)
node = helper.make_node


def planes(values: Any) -> Any:
    return np.asarray(values, np.float32).reshape(3, 1, 1)


def network(
    nodes: list[Any], layout: str = "nchw", channels: int = 3, more: Any = None, **stored: Any
) -> onnx.GraphProto:
    """A graph that takes `x`; what the nodes call `y` goes into a convolution."""
    shape = ["n", channels, 6, 8] if layout == "nchw" else ["n", 6, 8, channels]
    return helper.make_graph(
        [*nodes, node("Conv", ["y" if nodes else "x", "weights"], ["features"])],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (stored | (more or {})).items()],
    )


def said(graph: onnx.GraphProto) -> Any:
    facts = facts_of(graph, "x")
    try:
        check_clear(graph, "x", {"first": facts})
    except InvalidInput:
        return REFUSED
    return facts.scale


def normalised(mean: Any, variance: Any) -> onnx.GraphProto:
    one = node("BatchNormalization", ["x", "gamma", "beta", "mean", "var"], ["y"])
    return network([one], gamma=ONES, beta=0 * ONES, mean=np.float32(mean), var=np.float32(variance))


SHAPE = node("Shape", ["x"], ["shape"])
FIRST = {
    "nothing": network([]),
    "only the type": network([node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]),
    "only the layout": network([node("Transpose", ["x"], ["y"], perm=[0, 3, 1, 2])], layout="nhwc"),
}
ORDINARY = {
    **FIRST,
    "pad": network([node("Pad", ["x", "by"], ["y"])], by=np.array([0, 0, 1, 1, 0, 0, 1, 1])),
    "resize": network([node("Resize", ["x", "", "by"], ["y"])], by=np.array([1, 1, 2, 2], np.float32)),
    "pool": network([node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])]),
    "flat": network([node("Flatten", ["x"], ["flat"]), node("MatMul", ["flat", "weights"], ["y"])]),
    "mean": network([node("ReduceMean", ["x", "axes"], ["y"])], axes=np.array([2, 3])),
    "focus": network(
        [
            node("Slice", ["x", "zero", "end", "rows", "two"], ["even"]),
            node("Slice", ["x", "one", "end", "rows", "two"], ["odd"]),
            node("Concat", ["even", "odd"], ["y"], axis=1),
        ],
        more={"zero": [0], "one": [1], "end": [2**63 - 1], "rows": [2], "two": [2]},
    ),
    "features beside the pixels": network(
        [node("Conv", ["x", "weights"], ["c"]), node("Concat", ["x", "c"], ["y"], axis=1)]
    ),
    "times one": network([node("Mul", ["x", "one"], ["y"])], one=np.float32(1)),
    "8 bits of values from 0 to 1": network(
        [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        s=np.float32(1 / 255),
        z=np.uint8(0),
    ),
    "8 bits of normalised values": network(
        [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        s=np.float32(0.0187),
        z=np.uint8(114),
    ),
}
OF_BYTES = {
    "batch normalisation": normalised(MEAN, SPREAD**2),
    "batch normalisation of little spread": normalised(MEAN, ONES),
    "a number": network(
        [node("Constant", [], ["m"], value_float=127.5), node("Sub", ["x", "m"], ["y"])],
    ),
    "numbers": network(
        [
            node("Constant", [], ["m"], value_floats=MEAN.tolist()),
            node("Sub", ["x", "m"], ["d"]),
            node("Transpose", ["d"], ["y"], perm=[0, 3, 1, 2]),
        ],
        layout="nhwc",
    ),
    "a constant put into shape": network(
        [node("Unsqueeze", ["m", "axes"], ["planes"]), node("Sub", ["x", "planes"], ["y"])],
        m=MEAN,
        axes=np.array([1, 2]),
    ),
    "a mean picture": network(
        [node("Sub", ["x", "m"], ["y"])], m=np.random.default_rng(0).uniform(80, 150, (3, 6, 8)).astype(np.float32)
    ),
    "a mean picture in a batch": network(
        [node("Sub", ["x", "m"], ["y"])], m=np.random.default_rng(0).uniform(80, 150, (1, 3, 6, 8)).astype(np.float32)
    ),
    "a negative": network([node("Sub", ["top", "x"], ["y"])], top=np.float32(255)),
    "a negative of one channel": network([node("Sub", ["top", "x"], ["y"])], channels=1, top=np.float32(255)),
    "a scale, and the shape": network([SHAPE, node("Mul", ["x", "s"], ["y"])], s=np.float32(1 / 255)),
    "a scale after padding": network(
        [node("Pad", ["x", "by"], ["p"]), node("Div", ["p", "s"], ["y"])],
        by=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        s=np.float32(255),
    ),
    "bytes by QuantizeLinear": network(
        [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        s=np.float32(0.98),
        z=np.uint8(0),
    ),
    "signed bytes by QuantizeLinear": network(
        [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        s=np.float32(1),
        z=np.int8(-128),
    ),
    "clip": network([node("Clip", ["x", "low", "top"], ["y"])], low=np.float32(0), top=np.float32(255)),
    "clip of an older file": network([node("Clip", ["x"], ["y"], min=0.0, max=255.0)]),
    "cast": network(
        [node("Cast", ["x"], ["b"], to=TensorProto.UINT8), node("Cast", ["b"], ["y"], to=TensorProto.FLOAT)]
    ),
    "a scale in two branches": network(
        [node("Mul", ["x", "s"], ["a"]), node("Conv", ["x", "weights"], ["c"]), node("Identity", ["a"], ["y"])],
        s=np.float32(1 / 255),
    ),
}
OF_UNIT = {
    "batch normalisation": normalised([0.485, 0.456, 0.406], [0.0524, 0.0502, 0.0506]),
    "a negative": network([node("Sub", ["top", "x"], ["y"])], top=np.float32(1)),
    "clip": network([node("Clip", ["x", "low", "top"], ["y"])], low=np.float32(0), top=np.float32(1)),
}
NOT_CLEAR = {
    "batch normalisation of normalised values": normalised([0.01, 0.02, 0.01], ONES),
    "power": network([node("Pow", ["x", "s"], ["y"])], s=np.float32(0.5)),
    "half": network([node("Mul", ["x", "s"], ["y"])], s=np.float32(0.5)),
    "the picture's own mean": network(
        [node("ReduceMean", ["x", "axes"], ["m"]), node("Sub", ["x", "m"], ["y"])], axes=np.array([2, 3])
    ),
    "tanh": network([node("Tanh", ["x"], ["y"])]),
    "largest": network([node("Max", ["x", "s"], ["y"])], s=np.float32(0)),
    "a stranger's operator": network([node("Convert", ["x"], ["y"], domain="com.example")]),
    "other normalised values": network(
        [
            *(node("Gather", ["x", f"i{at}"], [f"g{at}"], axis=1) for at in range(3)),
            *(node("Unsqueeze", [f"g{at}", "one"], [f"u{at}"]) for at in range(3)),
            *(node("Mul", [f"u{at}", "f"], [f"m{at}"]) for at in range(3)),
            *(node("Add", [f"m{at}", "o"], [f"a{at}"]) for at in range(3)),
            node("Concat", ["a0", "a1", "a2"], ["y"], axis=1),
        ],
        more={"i0": 0, "i1": 1, "i2": 2, "one": [1], "f": np.float32(0.458), "o": np.float32(-0.03)},
    ),
}


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        pytest.param(graph, expected, id=f"{expected}: {name}")
        for cases, expected in ((ORDINARY, NOTHING), (OF_BYTES, BYTES), (OF_UNIT, UNIT), (NOT_CLEAR, REFUSED))
        for name, graph in cases.items()
    ],
)
def test_scale(graph: onnx.GraphProto, expected: Any) -> None:
    assert said(graph) == expected


@pytest.mark.parametrize("name", NOT_CLEAR)
def test_what_is_not_clear_may_be_said(name: str) -> None:
    check_clear(NOT_CLEAR[name], "x", {"preprocess.toml": PreprocessFacts(scale=255)})


SWAPS = {
    "gather": ([node("Gather", ["x", "bgr"], ["s"], axis=1)], {"bgr": [2, 1, 0]}),
    "slice": (
        [node("Slice", ["x", "last", "end", "axis", "last"], ["s"])],
        {"last": [-1], "end": [-(2**63) + 1], "axis": [1]},
    ),
    "split": (
        [node("Split", ["x"], ["r", "g", "b"], axis=1), node("Concat", ["b", "g", "r"], ["s"], axis=1)],
        {},
    ),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize(("mean", "colour"), [(MEAN[::-1], "rgb"), (MEAN, "bgr"), (127.5 * ONES, REFUSED)])
def test_colours_that_change_places(swap: str, mean: Any, colour: str) -> None:
    """The mean shows the order after it; where none does, nobody knows."""
    nodes, stored = SWAPS[swap]
    graph = network([*nodes, node("Sub", ["s", "m"], ["y"])], more=stored, m=planes(mean))
    facts = facts_of(graph, "x")
    assert facts.scale == BYTES
    assert facts.colour == (None if colour == REFUSED else colour)
    assert said(graph) == (REFUSED if colour == REFUSED else BYTES)
    check_clear(graph, "x", {"preprocess.toml": PreprocessFacts(scale=1, colour="rgb")})


@pytest.mark.parametrize(("mean", "colour"), [(MEAN, None), (MEAN[::-1], "bgr")])
def test_a_mean_by_blue_green_and_red(mean: Any, colour: str | None) -> None:
    graph = network([node("Sub", ["x", "m"], ["y"])], m=planes(mean))
    assert facts_of(graph, "x").colour == colour
    if colour:
        with pytest.raises(InvalidInput, match="colour"):
            check_clear(graph, "x", {"preprocess.toml": PreprocessFacts(scale=1)})
