"""Average pooling on integers: what is rewritten, what is left alone, and that no answer changes."""

import struct
from dataclasses import dataclass, field

import numpy as np
import onnxruntime
import pytest

from models import wire
from models.data import read_sample
from models.fusion import fuse_pooling
from models.manifest import load_manifest, weights_folder
from models.session import load_encoder, load_model
from models.wire import encode
from tierkit.errors import ProviderUnavailable
from tierkit.types import Tier

FLOAT, UINT8, INT8, INT64, UINT16 = 1, 2, 3, 7, 4
KEEPDIMS_0 = {"keepdims": 0}


def integer(number: int, value: int) -> bytes:
    return bytes([number << 3, value])


def tensor(name: str, kind: int, values: bytes, *dims: int) -> bytes:
    head = b"".join(integer(wire.TENSOR_DIMENSION, dim) for dim in dims) + integer(wire.TENSOR_TYPE, kind)
    return head + encode(wire.TENSOR_NAME, name.encode()) + encode(wire.TENSOR_BYTES, values)


def floats(name: str, *dims: int, values: list[float]) -> bytes:
    return tensor(name, FLOAT, struct.pack(f"<{len(values)}f", *values), *dims)


def axes(*values: int, kind: int = INT64) -> bytes:
    return tensor("axes", kind, struct.pack(f"<{len(values)}q", *values), len(values))


def value(name: str, *dims: int) -> bytes:
    """A tensor of floats whose first dimension is free."""
    sizes = [encode(2, b"n"), *(integer(1, dim) for dim in dims)]
    shape = b"".join(encode(1, size) for size in sizes)
    return encode(1, name.encode()) + encode(2, encode(1, integer(1, FLOAT) + encode(2, shape)))


@dataclass
class Node:
    operator: str
    inputs: list[str]
    output: str
    attributes: dict[str, int] = field(default_factory=dict)
    domain: str = ""
    subgraph: bytes = b""

    def encoded(self) -> bytes:
        out = [encode(wire.NODE_INPUT, name.encode()) for name in self.inputs]
        out += [encode(wire.NODE_OUTPUT, self.output.encode()), encode(wire.NODE_OPERATOR, self.operator.encode())]
        for name, number in self.attributes.items():
            attribute = encode(wire.ATTRIBUTE_NAME, name.encode()) + integer(wire.ATTRIBUTE_INTEGER, number)
            out.append(encode(wire.NODE_ATTRIBUTE, attribute + bytes([20 << 3 & 0x7F | 0x80, 1, 2])))
        if self.subgraph:
            branch = encode(wire.ATTRIBUTE_NAME, b"body") + encode(wire.ATTRIBUTE_GRAPH, self.subgraph)
            out.append(encode(wire.NODE_ATTRIBUTE, branch))
        return b"".join([*out, encode(wire.NODE_DOMAIN, self.domain.encode())])


class Network:
    """`images` FP32 `[n, 3, 4, 4]`, quantised, averaged, quantised, and a `Gemm` to `logits` `[n, 2]`.

    The scales are those of the MobileNet, with which no average lies in the middle between two steps.
    """

    def __init__(self, kind: int = UINT8, scale: float = 0.042859424, mean_scale: float = 0.018794693) -> None:
        self.nodes = {
            "first": Node("QuantizeLinear", ["images", "scale", "zero"], "quantised"),
            "before": Node("DequantizeLinear", ["quantised", "scale", "zero"], "features"),
            "mean": Node("ReduceMean", ["features", "axes"], "mean", dict(KEEPDIMS_0, noop_with_empty_axes=0)),
            "after": Node("QuantizeLinear", ["mean", "mean_scale", "mean_zero"], "mean_quantised"),
            "back": Node("DequantizeLinear", ["mean_quantised", "mean_scale", "mean_zero"], "mean_again"),
            "gemm": Node("Gemm", ["mean_again", "weights"], "logits"),
        }
        self.constants = {
            "scale": floats("scale", values=[scale]),
            "zero": tensor("zero", kind, bytes([3])),
            "mean_scale": floats("mean_scale", values=[mean_scale]),
            "mean_zero": tensor("mean_zero", kind, bytes([5])),
            "axes": axes(2, 3),
            "weights": floats("weights", 3, 2, values=[1.5, -2, 0.25, 1, -0.5, 3]),
        }
        self.inputs = [value("images", 3, 4, 4)]
        self.outputs = [value("logits", 2)]

    def encoded(self) -> bytes:
        parts = [encode(wire.GRAPH_NODE, node.encoded()) for node in self.nodes.values()]
        parts += [encode(2, b"network"), *(encode(wire.GRAPH_INITIALIZER, one) for one in self.constants.values())]
        parts += [encode(wire.GRAPH_INPUT, one) for one in self.inputs]
        parts += [encode(wire.GRAPH_OUTPUT, one) for one in self.outputs]
        return integer(1, 10) + encode(wire.MODEL_GRAPH, b"".join(parts)) + encode(8, integer(2, 20))


def session(model: bytes, optimised: str = "") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = optimised
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def answer(model: bytes, output: str = "logits") -> np.ndarray:
    images = np.random.default_rng(7).uniform(-1, 6, (500, 3, 4, 4)).astype(np.float32)
    (values,) = session(model).run([output], {"images": images})
    return np.asarray(values)


@pytest.mark.parametrize("kind", [UINT8, INT8], ids=["uint8", "int8"])
@pytest.mark.parametrize("over", [(2, 3), (3, 2), (-2, -1), (-1, -2)], ids=str)
def test_a_quantised_mean_becomes_a_pool_of_integers(tmp_path, over, kind):
    network = Network(kind)
    network.constants["axes"] = axes(*over)
    plain = network.encoded()
    fused = fuse_pooling(plain)
    np.testing.assert_array_equal(answer(fused), answer(plain))
    assert len(np.unique(answer(plain))) > 100
    assert b"ReduceMean" not in fused
    assert encode(wire.GRAPH_INITIALIZER, network.constants["axes"]) not in fused
    session(fused, str(tmp_path / "optimised.onnx"))
    assert b"QLinearGlobalAveragePool" in (tmp_path / "optimised.onnx").read_bytes()


def changed(change) -> bytes:
    network = Network()
    change(network)
    return network.encoded()


def without_quantised_input(network):
    network.nodes["mean"].inputs[0] = "images"


def without_quantised_mean(network):
    network.nodes["gemm"].inputs[0] = "mean"
    del network.nodes["after"], network.nodes["back"]


def axes_from_the_caller(network):
    network.inputs.append(value("axes"))


def no_axes(network):
    del network.nodes["mean"].inputs[1]


def mean_is_an_answer(network):
    network.outputs.append(value("mean", 3))


def mean_is_used_twice(network):
    network.nodes["other"] = Node("Relu", ["mean"], "other")


def mean_is_used_in_a_branch(network):
    inner = encode(wire.GRAPH_NODE, Node("Relu", ["mean"], "other").encoded())
    network.nodes["branch"] = Node("If", ["yes"], "other", subgraph=inner)


def rank_is_unknown(network):
    network.nodes["gemm"].operator = "MatMul"


def gemm_takes_it_elsewhere(network):
    network.nodes["gemm"].inputs = ["weights", "weights", "mean_again"]


def scale_for_each_channel(network):
    network.constants["mean_scale"] = floats("mean_scale", 3, values=[0.1, 0.2, 0.3])


def input_scale_for_each_channel(network):
    network.constants["scale"] = floats("scale", 3, values=[0.1, 0.2, 0.3])


def sixteen_bits(network):
    network.constants["mean_zero"] = tensor("mean_zero", UINT16, bytes([5, 0]))


def another_scale_behind(network):
    network.nodes["back"].inputs[1] = "scale"


LEFT_ALONE = {
    "other axes": lambda network: network.constants.update(axes=axes(1, 2)),
    "one axis": lambda network: network.constants.update(axes=axes(3)),
    "mixed axes": lambda network: network.constants.update(axes=axes(2, -1)),
    "axes of another type": lambda network: network.constants.update(axes=axes(2, 3, kind=FLOAT)),
    "axes computed": lambda network: network.constants.pop("axes"),
    "axes from the caller": axes_from_the_caller,
    "axes in two dimensions": lambda network: network.constants.update(
        axes=tensor("axes", INT64, struct.pack("<2q", 2, 3), 1, 2)
    ),
    "no axes": no_axes,
    "dimensions kept": lambda network: network.nodes["mean"].attributes.update(keepdims=1),
    "dimensions kept by default": lambda network: network.nodes["mean"].attributes.pop("keepdims"),
    "unknown attribute": lambda network: network.nodes["mean"].attributes.update(more=0),
    "another operator": lambda network: setattr(network.nodes["mean"], "operator", "ReduceMax"),
    "another domain": lambda network: setattr(network.nodes["mean"], "domain", "own"),
    "not quantised before": without_quantised_input,
    "not quantised behind": without_quantised_mean,
    "mean is an answer": mean_is_an_answer,
    "mean is used twice": mean_is_used_twice,
    "mean is used in a branch": mean_is_used_in_a_branch,
    "rank is unknown": rank_is_unknown,
    "gemm takes it elsewhere": gemm_takes_it_elsewhere,
    "scale for each channel": scale_for_each_channel,
    "input's scale for each channel": input_scale_for_each_channel,
    "quantised along an axis": lambda network: network.nodes["after"].attributes.update(axis=1),
    "16 bits": sixteen_bits,
    "another scale behind": another_scale_behind,
}


@pytest.mark.parametrize("change", LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_is_unusual_is_left_alone(change):
    model = changed(change)
    assert fuse_pooling(model) is model


@pytest.mark.parametrize(
    "model",
    [b"", b"not a network", Network().encoded()[:-9], Network().encoded() * 2, encode(7, b"\x0b")],
    ids=["empty", "text", "truncated", "two graphs", "broken graph"],
)
def test_what_cannot_be_read_is_left_to_onnx_runtime(model):
    assert fuse_pooling(model) is model


def test_axes_that_something_else_uses_stay():
    network = Network()
    network.nodes["of all"] = Node("ReduceMean", ["images"], "of_all")
    network.nodes["other"] = Node("ReduceMean", ["images", "axes"], "other", KEEPDIMS_0)
    network.outputs.append(value("other", 3))
    plain = network.encoded()
    fused = fuse_pooling(plain)
    assert fused is not plain
    np.testing.assert_array_equal(answer(fused), answer(plain))


def test_each_mean_of_a_network_is_replaced():
    network = Network()
    network.nodes["mean 2"] = Node("ReduceMean", ["features", "axes"], "second", KEEPDIMS_0)
    network.nodes["after 2"] = Node("QuantizeLinear", ["second", "mean_scale", "mean_zero"], "second_quantised")
    network.nodes["back 2"] = Node("DequantizeLinear", ["second_quantised", "mean_scale", "mean_zero"], "second_again")
    network.nodes["gemm 2"] = Node("Gemm", ["second_again", "weights"], "second_logits")
    network.outputs.append(value("second_logits", 2))
    plain = network.encoded()
    fused = fuse_pooling(plain)
    assert b"ReduceMean" not in fused
    np.testing.assert_array_equal(answer(fused), answer(plain))
    np.testing.assert_array_equal(answer(fused, "second_logits"), answer(plain, "second_logits"))


def test_an_average_in_the_middle_between_two_steps_may_come_out_one_step_apart():
    network = Network(scale=0.034, mean_scale=0.017)
    network.outputs.append(value("mean_again", 3))
    plain = network.encoded()
    fused = fuse_pooling(plain)
    assert fused is not plain
    steps = np.abs(answer(fused, "mean_again") - answer(plain, "mean_again")) / 0.017
    assert steps.max() < 1.01
    assert np.mean(steps > 0.5) < 0.1


def test_new_names_are_none_of_the_networks_own():
    network = Network()
    taken = "pooled_0_GlobalAveragePool_mean"
    network.nodes["before"].output = network.nodes["mean"].inputs[0] = taken
    plain = network.encoded()
    fused = fuse_pooling(plain)
    assert b"pooled_1_GlobalAveragePool_mean" in fused
    np.testing.assert_array_equal(answer(fused), answer(plain))


@pytest.fixture
def given(monkeypatch):
    """The networks that ONNX Runtime is given."""
    models: list[bytes] = []
    real = onnxruntime.InferenceSession

    def remember(model, *rest, **more):
        models.append(model)
        return real(model, *rest, **{**more, "providers": ["CPUExecutionProvider"]})

    monkeypatch.setattr("onnxruntime.InferenceSession", remember)
    return models


@pytest.mark.parametrize("part", ["whole", "tail"])
@pytest.mark.parametrize("tier", Tier)
def test_the_shipped_networks_answer_bit_for_bit_as_their_files_do(tier, part, given, monkeypatch):
    entry = load_manifest().default_for(tier)
    inputs = {"images": read_sample().images[:200]}
    if part == "tail":
        inputs = load_model(entry, part="head").run(inputs, ["features"])
    compare(lambda: load_model(entry, part=part), inputs, given, monkeypatch)


def test_the_shipped_encoders_answer_bit_for_bit_as_their_files_do(given, monkeypatch):
    manifest = load_manifest()
    for encoder in manifest.encoders:
        network = manifest.entry(encoder.network)
        images = {"images": read_sample().images[:100]}
        features = load_encoder(encoder, network, "head").run(images, ["features"])
        compare(lambda e=encoder, n=network: load_encoder(e, n, "tail"), features, given, monkeypatch)


def compare(load, inputs, given, monkeypatch) -> None:
    both = ["logits", "probabilities"]
    fused = load()
    assert b"GlobalAveragePool" in given[-1]
    assert b"ReduceMean" not in given[-1]
    with monkeypatch.context() as unfused:
        unfused.setattr("models.session.fuse_pooling", lambda model: model)
        plain = load()
    assert b"ReduceMean" in given[-1]
    answers, expected = fused.run(inputs, both), plain.run(inputs, both)
    for name in both:
        np.testing.assert_array_equal(answers[name], expected[name])


def test_a_gpu_is_given_the_file_as_it_is(given, monkeypatch):
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    entry = load_manifest().default_for(Tier.END)
    with pytest.raises(ProviderUnavailable, match="could not start"):
        load_model(entry, provider="cuda")
    assert given == [(weights_folder() / entry.file).read_bytes()]
